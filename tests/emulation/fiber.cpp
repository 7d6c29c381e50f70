#include "fiber.h"

#include <sys/mman.h>

#include <new>

namespace cuda_emulation {

#if defined(__x86_64__)

extern "C" void cuda_emulation_switch(void** save, void* load);
asm(R"(
.text
.globl cuda_emulation_switch
.hidden cuda_emulation_switch
.type cuda_emulation_switch, @function
cuda_emulation_switch:
  pushq %rbp
  pushq %rbx
  pushq %r12
  pushq %r13
  pushq %r14
  pushq %r15
  movq %rsp, (%rdi)
  movq %rsi, %rsp
  popq %r15
  popq %r14
  popq %r13
  popq %r12
  popq %rbx
  popq %rbp
  ret
.size cuda_emulation_switch, .-cuda_emulation_switch
)");

void transfer(Context& from, Context& to) {
  cuda_emulation_switch(&from.stack_pointer, to.stack_pointer);
}

void prepare(Context& context, unsigned char* stack, size_t bytes, void (*entry)()) {
  void** top = reinterpret_cast<void**>(stack + bytes - 64);
  *--top = nullptr;  // a return address for entry, which aligns its frame as a call would
  *--top = reinterpret_cast<void*>(entry);
  for (int saved = 0; saved < 6; ++saved) *--top = nullptr;
  context.stack_pointer = top;
}

#else

void transfer(Context& from, Context& to) {
  swapcontext(&from.context, &to.context);
}

void prepare(Context& context, unsigned char* stack, size_t bytes, void (*entry)()) {
  getcontext(&context.context);
  context.context.uc_stack.ss_sp = stack;
  context.context.uc_stack.ss_size = bytes;
  context.context.uc_link = nullptr;
  makecontext(&context.context, entry, 0);
}

#endif

void Stacks::reserve(size_t count) {
  if (count <= count_) return;
  if (base_) munmap(base_, count_ * (bytes + page));
  void* const mapped =
      mmap(nullptr, count * (bytes + page), PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (mapped == MAP_FAILED) throw std::bad_alloc();
  base_ = static_cast<unsigned char*>(mapped);
  count_ = count;
  for (size_t thread = 0; thread < count; ++thread) mprotect((*this)[thread] - page, page, PROT_NONE);
}

}  // namespace cuda_emulation
