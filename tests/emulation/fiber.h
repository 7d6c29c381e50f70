// A CUDA thread as a stack to switch to. Fifteen instructions on x86-64, since a kernel switches at every shuffle;
// elsewhere ucontext, several times slower.
#pragma once

#include <cstddef>

#if !defined(__x86_64__)
#include <ucontext.h>
#endif

namespace cuda_emulation {

struct Context {
#if defined(__x86_64__)
  void* stack_pointer = nullptr;
#else
  ucontext_t context;
#endif
};

void prepare(Context& context, unsigned char* stack, size_t bytes, void (*entry)());  // entry never returns
void transfer(Context& from, Context& to);

// One stack for each of `count` threads, an unmapped page below each: an overflow ends in a fault, not in a neighbour.
class Stacks {
 public:
  static constexpr size_t bytes = 128 << 10;
  void reserve(size_t count);
  unsigned char* operator[](size_t thread) const {
    return base_ + thread * (bytes + page) + page;
  }
  bool contains(const void* address) const {
    return address >= base_ && address < base_ + count_ * (bytes + page);
  }

 private:
  static constexpr size_t page = 4096;
  unsigned char* base_ = nullptr;
  size_t count_ = 0;
};

}  // namespace cuda_emulation
