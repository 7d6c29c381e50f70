// The mainloop: tiles travel to shared memory kStages - 1 steps ahead of the arithmetic, through a ring, from whatever
// sample comes next: nothing drains where one sample ends and another begins. One barrier a step.
// `work` is what a kernel does: a Step is one tile deep; start(), more(step), next(step) walk through them;
// copy(step, slot) begins to fetch one, multiply(step, slot) uses it.
#pragma once

#include "device.cuh"

namespace torchgradx::cuda {

// What every architecture since sm_80 gives one block, some no more: with 4 stages if they fit, else 3.
constexpr int kSharedBytes = 99 << 10;
constexpr int stages(int stage_bytes, int other_bytes) {
  return 4 * stage_bytes + other_bytes <= kSharedBytes ? 4 : 3;
}

template <int kStages, class Work>
__device__ __forceinline__ void run_pipeline(Work& work) {
  auto now = work.start(), ahead = now;
#pragma unroll 1
  for (int slot = 0; slot < kStages - 1; ++slot) {
    if (work.more(ahead)) work.copy(ahead, slot), work.next(ahead);
    cp_async_commit();
  }
#pragma unroll 1
  for (int slot = 0; work.more(now); slot = slot + 1 == kStages ? 0 : slot + 1) {
    cp_async_wait<kStages - 2>();
    __syncthreads();  // this slot has arrived, and all are done with the one before it, which is filled next
    if (work.more(ahead)) work.copy(ahead, slot ? slot - 1 : kStages - 1), work.next(ahead);
    cp_async_commit();
    work.multiply(now, slot);
    work.next(now);
  }  // what is still under way are the empty groups of the last steps
}

}  // namespace torchgradx::cuda
