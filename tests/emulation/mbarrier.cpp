// Barriers that count arrivals and bytes (mbarrier). What a barrier knows lies beside the 8 bytes of shared memory that
// stand for it, which nobody else may touch.
#include "hopper.h"

#include <map>

#include "blocks.h"
#include "ptx_sm90.h"

namespace cuda_emulation {
namespace {

struct Barrier {
  int number = 0;  // in the block
  uint32_t arrivals = 0, pending = 0;
  int64_t bytes = 0;   // still to come
  uint32_t phase = 0;  // how many have ended
  size_t initialiser = 0;
  uint32_t initialised = 0;  // the initialiser's clock
  bool fenced = false;
  clocks::Vector arrived, ended;  // what those know who arrived in any phase, and in those that have ended
};
std::vector<std::map<uintptr_t, Barrier>> all;  // by block

std::map<uintptr_t, Barrier>& mine() {
  return all[size_t(running.at)];
}

unsigned offset_of(const void* barrier) {
  return checker::offset_of_shared(barrier);
}

Barrier& find(const void* address, const char* what) {
  const auto it = mine().find(uintptr_t(address));
  if (it == mine().end()) report("%s: nobody has initialised the barrier at %u", what, offset_of(address));
  Barrier& b = it->second;
  const bool here = running.at == running.slot, mine = here && size_t(running.thread) == b.initialiser;
  if (!mine && !clocks::knows(int(b.initialiser), b.initialised))
    report("%s: no %s since the barrier at %u was initialised", what, here ? "__syncthreads" : "cluster_barrier",
           offset_of(address));
  if (!b.fenced) report("%s: no barrier_init_fence since the barrier at %u was initialised", what, offset_of(address));
  return b;
}

std::string state_of(const Barrier& b) {
  return std::to_string(b.pending) + " arrivals and " + std::to_string(b.bytes) + " bytes to come";
}

bool has_ended(const Barrier& b, unsigned parity) {
  return (b.phase & 1) != parity;
}

void end_phase_if_complete(const void* address, Barrier& b) {
  if (b.pending || b.bytes) return;
  ++b.phase, b.pending = b.arrivals;
  clocks::set(b.arrived, clocks::copies + b.number, b.phase);
  b.ended = b.arrived;
  for (Thread& t : block_at().threads)
    if (t.state == State::at_phase && t.phase_of == address && has_ended(b, t.parity)) t.state = State::ready;
}

void arrive(uint64_t* barrier, uint32_t bytes, const char* what) {
  Barrier& b = find(barrier, what);
  if (!b.pending)
    report("%s: more than the %u arrivals that the barrier at %u was initialised with", what, b.arrivals,
           offset_of(barrier));
  b.bytes += bytes;
  --b.pending;
  clocks::release(b.arrived);
  end_phase_if_complete(barrier, b);
}

}  // namespace

uint32_t shared_address(const void* shared) {
  if (!checker::is_shared(shared)) report("shared_address: %p is not shared memory", shared);
  return checker::offset_of_shared(shared);
}

void barrier_init(uint64_t* barrier, uint32_t arrivals, Site site) {
  const Doing doing(site);
  clocks::start();
  if (uintptr_t(barrier) % 8) report("barrier_init: misaligned barrier at %u", offset_of(barrier));
  if (!arrivals || arrivals >= 1u << 20) report("barrier_init: %u arrivals", arrivals);
  if (is_barrier(uintptr_t(barrier), 8)) report("barrier_init: the barrier at %u is in use", offset_of(barrier));
  checker::check(barrier, 8, true);
  if (mine().size() == clocks::most_barriers) report("more barriers than are emulated");
  Barrier b;
  b.number = int(mine().size()), b.arrivals = b.pending = arrivals;
  b.initialiser = size_t(running.thread), b.initialised = clocks::own();
  mine()[uintptr_t(barrier)] = b;
}

void barrier_init_fence() {
  for (auto& [address, b] : mine()) b.fenced |= b.initialiser == size_t(running.thread);
}

void barrier_expect(uint64_t* barrier, uint32_t bytes, Site site) {
  const Doing doing(site);
  if (bytes >= 1u << 20) report("barrier_expect: %u bytes", bytes);
  arrive(barrier, bytes, "barrier_expect");
}

void barrier_arrive(uint64_t* barrier, Site site) {
  const Doing doing(site);
  arrive(barrier, 0, "barrier_arrive");
}

void barrier_arrive_at(uint64_t* barrier, int rank, Site site) {
  const Doing doing(site);
  const unsigned offset = offset_of(barrier);
  const Elsewhere there(rank);
  arrive(reinterpret_cast<uint64_t*>(checker::shared_at(offset)), 0, "barrier_arrive_at");
}

void barrier_wait(uint64_t* barrier, uint32_t parity, Site site) {
  const Doing doing(site);
  if (parity > 1) report("barrier_wait: parity %u", parity);
  Barrier& b = find(barrier, "barrier_wait");
  if (!has_ended(b, parity)) {
    self().phase_of = barrier, self().parity = parity;
    wait(State::at_phase, site);
  }
  clocks::acquire(b.ended, size_t(running.thread));
}

void fence_async_shared() {
  clocks::start();
  clocks::fence();
}

Counted begin_counted_copy(const uint64_t* barrier) {
  const Barrier& b = find(barrier, "copy_box");
  return {barrier, clocks::copies + b.number, b.phase + 1};
}

std::string end_counted_copy(const Counted& copy, size_t bytes) {
  Barrier& b = mine().at(uintptr_t(copy.barrier));
  const auto at = [&](const char* what) { return what + std::to_string(offset_of(copy.barrier)) + " "; };
  if (b.phase + 1 != copy.phase)
    return at("a copy lands after its phase of the barrier at ") + "has ended: fewer bytes were expected than copied";
  b.bytes -= int64_t(bytes);
  if (!b.pending && b.bytes < 0)
    return at("more bytes come to the barrier at ") + "than were expected: by " + std::to_string(-b.bytes);
  end_phase_if_complete(copy.barrier, b);
  return "";
}

bool is_barrier(uintptr_t address, size_t bytes) {
  if (mine().empty()) return false;
  const auto it = mine().lower_bound(address + bytes);
  return it != mine().begin() && std::prev(it)->first + 8 > address;
}

void begin_barriers(size_t slot) {
  if (all.size() <= slot) all.resize(slot + 1);
  all[slot].clear();
}

std::string waits_for_phase(const Thread& thread) {
  return "barrier_wait of parity " + std::to_string(thread.parity) + " of the barrier at " +
         std::to_string(offset_of(thread.phase_of)) + " (" + state_of(mine().at(uintptr_t(thread.phase_of))) + ")";
}

}  // namespace cuda_emulation
