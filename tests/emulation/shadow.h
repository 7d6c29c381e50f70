// Shadow memory: who last wrote and read each byte, and when. For the two halves of the checker.
#pragma once

#include <sys/mman.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <new>
#include <vector>

namespace cuda_emulation::checker {

// "When" is an interval between barriers of the block, numbered through all launches; within one, the count of
// __syncwarp of a warp; and the thread's own clock, which other threads learn through mbarriers (clocks.h).
struct Shadow {
  uint32_t write_interval, read_interval;  // 0: never
  uint32_t other_block_read;               // an earlier reader's interval, in another block
  uint32_t write_warp_epoch, read_warp_epoch;
  uint32_t write_clock, read_clock;
  uint32_t write_fences;     // how many fence_async_shared the writer had passed
  int16_t writer, reader;    // threads, or a copy's unit (clocks.h); several readers: -1
  int8_t reader_warp;        // of several warps: -1
  uint32_t poison_interval;  // of an asynchronous copy under way
};

constexpr size_t most_warpgroups = 4;
struct ProductReads {  // of a byte of shared memory, by each warpgroup's wgmma: its serial number
  uint32_t serial[most_warpgroups];
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

struct BlockMemory {
  uint32_t interval = 1, first = 1;  // now, and when the block began
  uint32_t first_serial = 1;         // of its products
  size_t used = 0;
  std::vector<Variable> variables;
};
extern BlockMemory* mine;  // the running block's

Shadow* shadow_of(uintptr_t shared);
ProductReads* product_reads_of(uintptr_t shared);
const Variable& variable_of(uintptr_t shared, size_t bytes, const char* verb);  // reports what leaves it
bool is_ordered(const Shadow& s, bool last_write);  // the last write, or read: before the running thread's now

}  // namespace cuda_emulation::checker
