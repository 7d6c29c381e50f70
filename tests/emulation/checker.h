// Every memory access of a kernel, checked. Kernels are compiled with -fsanitize=thread and -fsanitize=undefined but
// linked without their libraries: the hooks which the compiler calls are in hooks.cpp. Errors are
// - shared memory: a race between two threads that neither a barrier nor an mbarrier orders (by byte; __syncwarp orders
//   one warp), a read of what this block never wrote or what is still being copied, a byte outside the variable;
// - global memory: a byte in no registered buffer, a write to an input, and races within a block and between blocks;
// - anywhere: a misaligned access, a constant index past its array, a signed overflow, a bad shift, a division by zero.
#pragma once

#include <cstddef>
#include <cstdint>

namespace cuda_emulation::checker {

// The scheduler says where it is. `slots`: blocks that run together; the current one is the last that was entered.
void begin_launch(const void* arguments, size_t argument_bytes, size_t slots);
void enter(size_t slot);  // from here on the shared memory of that block is meant
void begin_block(int64_t number);
void next_interval();  // a barrier of the block has passed
void next_epoch();     // a barrier of the whole grid has
void end_launch();

void* allocate_shared(size_t bytes, size_t alignment, const char* what);  // NaN-filled, until the block ends
void register_buffer(const void* base, size_t bytes, bool writable);
void forget_buffer(const void* base);

// For what does not go through the compiler's hooks: the emulated instructions.
void check(const void* address, size_t bytes, bool write);
bool is_enabled();
void forget_code();  // the last access that the compiler told of has nothing to do with what is reported
void access(uintptr_t address, size_t bytes, bool write);
bool is_of_image(uintptr_t address);
bool is_shared(const void* address);
void poison_shared(void* address, size_t bytes);  // as if never written

// Shared memory as Hopper's instructions name it: an offset in the block's window of 2^18 bytes.
constexpr size_t window_bytes = 1 << 18;
uint32_t offset_of_shared(const void* address);
unsigned char* shared_at(uint32_t offset);

// What hardware does beside the threads (checker_async.cpp): a copy into shared memory, from its issue to its landing,
// and a warpgroup's product, which reads from its issue on.
void begin_copy(void* to, size_t bytes, int unit, uint32_t clock);
void end_copy(void* to, size_t bytes);
uint32_t next_serial();  // of a product
void begin_product_read(const void* from, size_t bytes, size_t warpgroup, uint32_t serial);

}  // namespace cuda_emulation::checker

namespace cuda_emulation {

// Who accesses memory, as the scheduler knows it.
struct Running {
  int thread = -1;                  // in the block; -1 outside of kernels
  int slot = 0;                     // of the block among those that run
  int at = 0;                       // slot of the block whose shared memory it reaches: of a cluster, maybe another
  uint32_t* warp_epochs = nullptr;  // of each warp: how many __syncwarp it has passed
};
extern Running running;
bool on_a_fiber_stack(const void* address);
void touch_registers(uintptr_t address, bool write);  // memory on a fiber's stack may stand for wgmma's; wgmma.cpp
bool is_barrier(uintptr_t address, size_t bytes);     // mbarrier.cpp

}  // namespace cuda_emulation
