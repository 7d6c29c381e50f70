// Every memory access of a kernel, checked. Kernels are compiled with -fsanitize=thread and -fsanitize=undefined but
// linked without their libraries: the hooks which the compiler calls are in checker.cpp. Errors are
// - shared memory: a race between two threads with no barrier between them (by byte; __syncwarp orders one warp), a
// read
//   of what this block never wrote, a byte outside the variable;
// - global memory: a byte in no registered buffer, a write to an input, and races within a block and between blocks;
// - anywhere: a misaligned access, a constant index past its array, a signed overflow, a bad shift, a division by zero.
#pragma once

#include <cstddef>
#include <cstdint>

namespace cuda_emulation::checker {

// The scheduler says where it is.
void begin_launch(const void* arguments, size_t argument_bytes);
void begin_block();
void next_interval();  // a barrier of the block has passed
void end_launch();

void* allocate_shared(size_t bytes, size_t alignment, const char* what);  // NaN-filled, until the block ends

// For what does not go through the compiler's hooks: the emulated instructions.
void check(const void* address, size_t bytes, bool write);
bool is_shared(const void* address);
void poison_shared(void* address, size_t bytes);  // as if never written

}  // namespace cuda_emulation::checker

namespace cuda_emulation {

// Who accesses memory, as the scheduler knows it.
struct Running {
  int thread = -1;                // in the block; -1 outside of kernels
  uint32_t warp_epochs[32] = {};  // of each warp: how many __syncwarp it has passed
};
extern Running running;
bool on_a_fiber_stack(const void* address);
uint64_t block_number();

}  // namespace cuda_emulation
