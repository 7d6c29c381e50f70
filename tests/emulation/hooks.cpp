// What the compiler calls for every access and every undefined operation of a kernel: the hooks of -fsanitize=thread
// and -fsanitize=undefined, which are linked without their libraries. And what the tests call.
#include "checker.h"
#include "cuda_emulation.h"

extern "C" __attribute__((visibility("hidden"))) char __ehdr_start[], _end[];  // this library's image, by the linker

namespace cuda_emulation::checker {
namespace {

bool enabled = true;
const void* code = nullptr;  // the instruction that made the access

void hook(void* address, size_t bytes, bool write, bool aligned, const void* caller) {
  if (running.thread < 0 || !enabled) return;
  code = caller;
  if (aligned && uintptr_t(address) % bytes)
    report("misaligned %s of %zu bytes at %p", write ? "write" : "read", bytes, address);
  access(uintptr_t(address), bytes, write);
}

}  // namespace

void check(const void* address, size_t bytes, bool write) {
  if (enabled) access(uintptr_t(address), bytes, write);
}

void forget_code() {
  code = nullptr;
}

bool is_enabled() {
  return enabled;
}

bool is_of_image(uintptr_t address) {
  return address >= uintptr_t(__ehdr_start) && address < uintptr_t(_end);
}

}  // namespace cuda_emulation::checker

using namespace cuda_emulation::checker;

extern "C" {

void cuda_emulation_check(int on) {
  enabled = on != 0;
}
void cuda_emulation_register(const void* base, size_t bytes, int writable) {
  register_buffer(base, bytes, writable != 0);
}
void cuda_emulation_forget(const void* base) {
  forget_buffer(base);
}
size_t cuda_emulation_code() {  // of the last checked access, as addr2line takes it
  return code ? uintptr_t(code) - 1 - uintptr_t(__ehdr_start) : 0;
}

#define HOOKS(size)                                                 \
  void __tsan_read##size(void* address) {                           \
    hook(address, size, false, true, __builtin_return_address(0));  \
  }                                                                 \
  void __tsan_write##size(void* address) {                          \
    hook(address, size, true, true, __builtin_return_address(0));   \
  }                                                                 \
  void __tsan_unaligned_read##size(void* address) {                 \
    hook(address, size, false, false, __builtin_return_address(0)); \
  }                                                                 \
  void __tsan_unaligned_write##size(void* address) {                \
    hook(address, size, true, false, __builtin_return_address(0));  \
  }
HOOKS(1) HOOKS(2) HOOKS(4) HOOKS(8) HOOKS(16) void __tsan_read_range(void* address, size_t bytes) {
  hook(address, bytes, false, false, __builtin_return_address(0));
}
void __tsan_write_range(void* address, size_t bytes) {
  hook(address, bytes, true, false, __builtin_return_address(0));
}
void __tsan_func_entry(void*) {}
void __tsan_func_exit() {}
void __tsan_init() {}
uint8_t __tsan_atomic8_load(const volatile uint8_t* address, int) {  // guards of function statics, in launchers
  return *address;
}

// -fsanitize=undefined: what each handler is told begins with its place in the source.
struct Where {
  const char* file;
  uint32_t line, column;
};
#define UNDEFINED(handler, ...)                                                                               \
  void __ubsan_handle_##handler(const Where* where __VA_OPT__(, ) __VA_ARGS__) {                              \
    code = nullptr;                                                                                           \
    cuda_emulation::report("undefined behaviour: " #handler " at %s:%u", where->file, unsigned(where->line)); \
  }
UNDEFINED(out_of_bounds, void*)
UNDEFINED(shift_out_of_bounds, void*, void*)
UNDEFINED(divrem_overflow, void*, void*)
UNDEFINED(add_overflow, void*, void*)
UNDEFINED(sub_overflow, void*, void*)
UNDEFINED(mul_overflow, void*, void*)
UNDEFINED(negate_overflow, void*)
UNDEFINED(type_mismatch_v1, void*)
}
