// Warpgroups: their rendezvous, their shares of the registers (setmaxnreg), and what the scheduler asks of all that
// Hopper adds to a block.
#include "hopper.h"

#include <numeric>

#include "clocks.h"
#include "ptx_sm90.h"

namespace cuda_emulation {
namespace {

constexpr int all_registers = 65536;

struct Gathering {
  size_t arrived = 0, last = 0;
  const char* what = "";
  Site site{};
};

struct Registers {  // of each thread, by warpgroup; what a group waits for, or 0
  std::vector<int> of, wanted;
};

std::vector<std::vector<Gathering>> gatherings;  // by block
std::vector<Registers> shares;

Registers& mine() {
  return shares[size_t(running.slot)];
}

int taken_with(size_t group, int registers) {
  int taken = registers * int(group_threads);
  for (size_t g = 0; g < mine().of.size(); ++g)
    if (g != group) taken += mine().of[g] * int(group_threads);
  return taken;
}

// Those that can have what they wait for, in the order of groups.
void serve() {
  for (size_t g = 0; g < mine().of.size(); ++g) {
    int& wanted = mine().wanted[g];
    if (!wanted || taken_with(g, wanted) > all_registers) continue;
    mine().of[g] = wanted, wanted = 0;
    for (size_t t = g * group_threads; t < (g + 1) * group_threads; ++t)
      if (current().threads[t].state == State::at_registers) current().threads[t].state = State::ready;
  }
}

}  // namespace

size_t group_of_thread() {
  return size_t(running.thread) / group_threads;
}

bool gather(const char* what, Site site) {
  const size_t group = group_of_thread();
  auto& groups = gatherings[size_t(running.slot)];
  if (group >= groups.size()) report("%s: the thread is in no whole warpgroup of 128 threads", what);
  Gathering& g = groups[group];
  if (g.arrived && !(g.site == site && !std::strcmp(g.what, what)))
    report("divergence: %s at %s:%d, while thread %zu of the warpgroup is at %s at %s:%d", what, site.file, site.line,
           g.last, g.what, g.site.file, g.site.line);
  g.what = what, g.site = site, g.last = size_t(running.thread);
  if (++g.arrived == group_threads) return true;
  wait(State::at_warpgroup, site);
  return false;
}

void release(size_t group) {
  gatherings[size_t(running.slot)][group].arrived = 0;
  for (size_t t = group * group_threads; t < (group + 1) * group_threads; ++t)
    if (current().threads[t].state == State::at_warpgroup) current().threads[t].state = State::ready;
}

void change_registers(int registers, bool more, Site site) {
  const Doing doing(site);
  const char* const what = more ? "take_registers" : "give_registers";
  if (registers < 24 || registers > 256 || registers % 8)
    report("%s: %d is no multiple of 8 from 24 to 256", what, registers);
  const size_t group = group_of_thread();
  if (gather(what, site)) {
    const int now = mine().of[group];
    if (more ? registers < now : registers > now) report("%s: %d, where the warpgroup has %d", what, registers, now);
    mine().wanted[group] = registers;
    serve();
    release(group);
  }
  if (mine().wanted[group]) wait(State::at_registers, site);
}

std::string waits_for_registers(const Thread& thread) {
  const size_t group = size_t(&thread - current().threads.data()) / group_threads;
  return "take_registers (" + std::to_string(taken_with(group, mine().wanted[group])) + " of " +
         std::to_string(all_registers) + " would be taken)";
}

std::string waits_for(const Thread& thread) {
  return thread.state == State::at_phase ? waits_for_phase(thread) : waits_for_registers(thread);
}

void begin_hopper(size_t slot, size_t threads) {
  const size_t groups = threads / group_threads;
  if (gatherings.size() <= slot) gatherings.resize(slot + 1), shares.resize(slot + 1);
  gatherings[slot].assign(groups, {});
  const int each = std::min(256, all_registers / int(threads) / 8 * 8);
  shares[slot].of.assign(groups, each);
  shares[slot].wanted.assign(groups, 0);
  clocks::begin(slot, threads);
  begin_barriers(slot);
  begin_copies(slot);
  begin_products(slot, threads);
}

}  // namespace cuda_emulation
