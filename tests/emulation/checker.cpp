// Shadow memory: who last wrote and read each byte, and in which interval between barriers. Intervals are numbered
// through all launches, so that one comparison tells "since the last barrier" from "in another block of this launch".
#include "checker.h"

#include "cuda_emulation.h"

#include <sys/mman.h>

#include <algorithm>
#include <map>
#include <memory>
#include <vector>

extern "C" __attribute__((visibility("hidden"))) char __ehdr_start[], _end[];  // this library's image, by the linker

namespace cuda_emulation::checker {
namespace {

struct Shadow {
  uint32_t write_interval, read_interval;  // 0: never
  uint32_t other_block_read;               // an earlier reader's interval, in another block
  uint32_t write_warp_epoch, read_warp_epoch;
  int16_t writer, reader;    // threads; several readers: -1
  int8_t reader_warp;        // of several warps: -1
  uint32_t poison_interval;  // of a cp.async under way
};

// Zeroed pages that cost nothing until touched.
template <class T>
struct Pages {
  T* data;
  size_t bytes;
  explicit Pages(size_t count) : bytes(std::max<size_t>(1, count) * sizeof(T)) {
    void* const mapped =
        mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (mapped == MAP_FAILED) throw std::bad_alloc();
    data = static_cast<T*>(mapped);
  }
  Pages(const Pages&) = delete;
  ~Pages() {
    munmap(data, bytes);
  }
};

struct Variable {  // of shared memory
  uintptr_t base;
  size_t bytes;
  const char* what;
};

struct Buffer {  // of global memory
  size_t bytes;
  bool writable;
  std::unique_ptr<Pages<Shadow>> shadow;
};

constexpr size_t arena_bytes = 1 << 20, gap_bytes = 1 << 10;
Pages<unsigned char>* arena = nullptr;
Pages<Shadow>* arena_shadow = nullptr;
size_t arena_used = 0;
std::vector<Variable> variables;
std::map<uintptr_t, Buffer> buffers;
uint32_t interval = 1, first_of_block = 1, first_of_launch = 1;
uintptr_t arguments_begin = 0, arguments_end = 0;
bool enabled = true;
const void* code = nullptr;  // the instruction that made the access

const char* verb(bool write) {
  return write ? "write" : "read";
}

// Between the running thread and an earlier access of this block: has no barrier come between?
bool unordered(uint32_t then, int warp, uint32_t warp_epoch_then) {
  const int mine = running.thread / 32;
  return then == interval && !(warp == mine && warp_epoch_then < running.warp_epochs[mine]);
}

bool in_another_block(uint32_t then) {
  return then >= first_of_launch && then < first_of_block;
}

struct Place {
  const char* what;
  size_t offset;
};

void note_read(Shadow& s) {
  const auto warp = int8_t(running.thread / 32);
  if (s.read_interval == interval) {
    if (s.reader != running.thread) s.reader = -1;
    if (s.reader_warp != warp) s.reader_warp = -1;
  } else {
    if (in_another_block(s.read_interval)) s.other_block_read = s.read_interval;
    s.reader = int16_t(running.thread), s.reader_warp = warp, s.read_interval = interval;
    s.read_warp_epoch = 0;
  }
  s.read_warp_epoch = std::max(s.read_warp_epoch, running.warp_epochs[warp]);
}

void note_write(Shadow& s) {
  s.writer = int16_t(running.thread), s.write_interval = interval, s.poison_interval = 0;
  s.write_warp_epoch = running.warp_epochs[running.thread / 32];
}

void check_block_race(const Shadow& s, bool write, const Place& at) {
  if (s.write_interval && s.writer != running.thread && unordered(s.write_interval, s.writer / 32, s.write_warp_epoch))
    report("race: %s at offset %zu of %s, written by thread %d since the last barrier", verb(write), at.offset, at.what,
           s.writer);
  if (write && s.read_interval && s.reader != running.thread &&
      unordered(s.read_interval, s.reader_warp, s.read_warp_epoch))
    report("race: write at offset %zu of %s, read by another thread since the last barrier", at.offset, at.what);
}

void check_grid_race(const Shadow& s, bool write, const Place& at) {
  if (in_another_block(s.write_interval))
    report("race: %s at offset %zu of %s, written by another block of this launch", verb(write), at.offset, at.what);
  if (write && (in_another_block(s.read_interval) || in_another_block(s.other_block_read)))
    report("race: write at offset %zu of %s, read by another block of this launch", at.offset, at.what);
}

void touch(Shadow& s, bool write, const Place& at) {
  check_block_race(s, write, at);
  write ? note_write(s) : note_read(s);
}

void check_shared_access(uintptr_t address, size_t bytes, bool write) {
  const Variable* v = nullptr;
  for (const auto& candidate : variables)
    if (address >= candidate.base) v = &candidate;
  if (!v) report("%s of %zu bytes in front of shared memory", verb(write), bytes);
  const size_t offset = address - v->base;
  if (offset + bytes > v->bytes)
    report("%s of %zu bytes at offset %zu of %zu bytes of %s", verb(write), bytes, offset, v->bytes, v->what);
  Shadow* const shadow = arena_shadow->data + (address - uintptr_t(arena->data));
  for (size_t i = 0; i < bytes; ++i) {
    Shadow& s = shadow[i];
    const bool copying = s.poison_interval >= first_of_block;
    if (!write && (copying || s.write_interval < first_of_block))
      report("read of %s at offset %zu, which is %s", v->what, offset + i,
             copying ? "still being copied" : "uninitialised");
    touch(s, write, {v->what, offset + i});
  }
}

void check_global_access(uintptr_t base, Buffer& buffer, uintptr_t address, size_t bytes, bool write) {
  const size_t offset = address - base;
  const char* const what = buffer.writable ? "an output or workspace" : "an input";
  if (offset + bytes > buffer.bytes)
    report("%s of %zu bytes at offset %zu of %zu bytes of %s", verb(write), bytes, offset, buffer.bytes, what);
  if (!buffer.writable) {
    if (write) report("write at offset %zu of %s", offset, what);
    return;
  }
  if (!buffer.shadow) buffer.shadow = std::make_unique<Pages<Shadow>>(buffer.bytes);
  for (size_t i = 0; i < bytes; ++i) {
    Shadow& s = buffer.shadow->data[offset + i];
    check_grid_race(s, write, {what, offset + i});
    touch(s, write, {what, offset + i});
  }
}

void access(uintptr_t address, size_t bytes, bool write) {
  if (!bytes || on_a_fiber_stack(reinterpret_cast<void*>(address))) return;
  if (is_shared(reinterpret_cast<void*>(address))) return check_shared_access(address, bytes, write);
  auto it = buffers.upper_bound(address);
  if (it != buffers.begin()) {
    --it;
    // A byte past a buffer is that buffer's overrun; further off it is anybody's.
    if (address - it->first < it->second.bytes + 64)
      return check_global_access(it->first, it->second, address, bytes, write);
  }
  const bool of_image = address >= uintptr_t(__ehdr_start) && address < uintptr_t(_end);
  const bool of_arguments = address >= arguments_begin && address < arguments_end;
  if (!write && (of_image || of_arguments)) return;
  report("%s of %zu bytes at %p, in no registered buffer", verb(write), bytes, reinterpret_cast<void*>(address));
}

void hook(void* address, size_t bytes, bool write, bool aligned, const void* caller) {
  if (running.thread < 0 || !enabled) return;
  code = caller;
  if (aligned && uintptr_t(address) % bytes) report("misaligned %s of %zu bytes at %p", verb(write), bytes, address);
  access(uintptr_t(address), bytes, write);
}

}  // namespace

void begin_launch(const void* arguments, size_t argument_bytes) {
  if (!arena) arena = new Pages<unsigned char>(arena_bytes), arena_shadow = new Pages<Shadow>(arena_bytes);
  arguments_begin = uintptr_t(arguments), arguments_end = arguments_begin + argument_bytes;
  first_of_launch = ++interval;
}

void begin_block() {
  first_of_block = ++interval;
  variables.clear();
  arena_used = 0;
}

void next_interval() {
  ++interval;
}

void end_launch() {
  begin_block();
  first_of_launch = interval;
}

void* allocate_shared(size_t bytes, size_t alignment, const char* what) {
  // Aligned to `alignment` and no better, so that nothing passes by luck.
  const size_t offset = (arena_used + gap_bytes) / (2 * alignment) * (2 * alignment) + alignment;
  if (offset + bytes + gap_bytes > arena_bytes) report("more shared memory than any processor has: %zu bytes", offset);
  arena_used = offset + bytes;
  variables.push_back({uintptr_t(arena->data) + offset, bytes, what});
  std::memset(arena->data + offset, 0xff, bytes);
  return arena->data + offset;
}

void check(const void* address, size_t bytes, bool write) {
  if (enabled) access(uintptr_t(address), bytes, write);
}

bool is_shared(const void* address) {
  return arena && address >= arena->data && address < arena->data + arena_bytes;
}

void poison_shared(void* address, size_t bytes) {
  Shadow* const shadow = arena_shadow->data + (static_cast<unsigned char*>(address) - arena->data);
  std::memset(address, 0xff, bytes);
  for (size_t i = 0; i < bytes; ++i) shadow[i].poison_interval = interval;
}

}  // namespace cuda_emulation::checker

using namespace cuda_emulation::checker;

extern "C" {

void cuda_emulation_check(int on) {
  enabled = on != 0;
}
void cuda_emulation_register(const void* base, size_t bytes, int writable) {
  buffers[uintptr_t(base)] = {bytes, writable != 0, nullptr};
}
void cuda_emulation_forget(const void* base) {
  buffers.erase(uintptr_t(base));
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
