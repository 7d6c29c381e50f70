// The scheduler's own structures: threads and blocks as they stand in the middle of a launch, for the files that
// emulate what makes threads wait. Blocks of an ordinary launch run one after another; those of launch_together run
// together, as a gang.
#pragma once

#include <map>
#include <string>
#include <vector>

#include "checker.h"
#include "cuda_emulation.h"
#include "fiber.h"

namespace cuda_emulation {

// ready, done, or what a thread waits for
enum class State { ready, done, at_barrier, at_warp, at_warpgroup, at_phase, at_registers, at_cluster, at_grid };
enum class Order { forward, reverse, shuffled };

struct Thread {
  Context context;
  State state = State::ready;
  uint3 index{};
  Site site{};                     // where it waits
  Site doing{"", 0};               // the instruction that it is in, if that knows
  const void* phase_of = nullptr;  // at_phase: the barrier, and the parity that is waited for
  unsigned parity = 0;
};

struct Warp {
  unsigned arrived = 0, exchanges = 0;
  // Twice: a lane may hand in its next value while others still read the last.
  alignas(64) unsigned char in[2][32 * slot], out[2][32 * slot];
};

struct Block {
  int64_t number = 0;
  uint3 at{};
  size_t finished = 0;
  void* dynamic = nullptr;
  size_t static_bytes = 0;
  std::map<const void*, void*> statics;
  std::vector<Thread> threads;
  std::vector<Warp> warps;
  std::vector<uint32_t> warp_epochs;
};

constexpr size_t max_threads = 1024;

Block& current();       // the running thread's
Block& block_at();      // whose shared memory it reaches
size_t cluster_size();  // blocks of a cluster, which stand in neighbouring slots
Thread& self();
void wait(State state, Site site);   // until somebody makes the thread ready
void fail(const std::string& text);  // ends the launch, from the scheduler
class Elsewhere {                    // the shared memory of a block of the cluster is meant, by its number there
 public:
  explicit Elsewhere(int rank);
  ~Elsewhere() {
    checker::enter(size_t(running.slot));
  }
};
struct Doing {  // for reports from within an emulated instruction
  explicit Doing(Site site) {
    self().doing = site;
  }
  ~Doing() {
    self().doing.line = 0;
  }
};
size_t choose(size_t count);  // one of so many that may be next: the first, the last or any, as threads are ordered
std::string place_of(const uint3& at);
std::string place_of(Site site);

// What else a block has, by the file that emulates it: mbarrier.cpp, tensor_map.cpp, wgmma.cpp.
void begin_hopper(size_t slot, size_t threads);
void end_hopper_thread();
void end_hopper_block();
bool land_a_copy(size_t slot);                // false: none is under way
void order_block();                           // the current block's threads have passed a barrier of the block
void order_cluster();                         // all threads of the current block's cluster have passed theirs
void order_warp(size_t warp);                 // __syncwarp
std::string waits_for(const Thread& thread);  // at_phase, at_registers: in words

}  // namespace cuda_emulation
