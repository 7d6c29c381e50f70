// What copies of boxes need of the barriers that count them.
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

}  // namespace cuda_emulation
