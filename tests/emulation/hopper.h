// Parts that all emulated instructions of Hopper share: barriers as copies of boxes need them, and a warpgroup's
// rendezvous, in which its 128 threads do wgmma and the change of registers together.
#pragma once

#include <string>

#include "blocks.h"
#include "clocks.h"

namespace cuda_emulation {

struct Counted {  // a copy, by its barrier's phase
  const uint64_t* barrier;
  int unit;
  uint32_t phase;  // from 1 on
};

void begin_barriers(size_t slot);
Counted begin_counted_copy(const uint64_t* barrier);
std::string end_counted_copy(const Counted& copy, size_t bytes);  // what is wrong with it, or nothing
std::string waits_for_phase(const Thread& thread);

constexpr size_t group_threads = 128;

// True for the last of the running thread's warpgroup to come, which then acts and calls release(); the others come
// back once it has. `what` names the operation in reports.
bool gather(const char* what, Site site);
void release(size_t group);
size_t group_of_thread();

void begin_products(size_t slot, size_t threads);
void begin_copies(size_t slot);

}  // namespace cuda_emulation
