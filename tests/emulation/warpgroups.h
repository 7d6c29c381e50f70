// A warpgroup's rendezvous: what its 128 threads do together, wgmma and the change of registers.
#pragma once

#include "blocks.h"

namespace cuda_emulation {

constexpr size_t group_threads = 128;

// True for the last of the running thread's warpgroup to come, which then acts and calls release(); the others come
// back once it has. `what` names the operation in reports.
bool gather(const char* what, Site site);
void release(size_t group);
size_t group_of_thread();

void begin_products(size_t slot, size_t threads);
void begin_copies(size_t slot);

}  // namespace cuda_emulation
