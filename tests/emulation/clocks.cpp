// Vector clocks of the blocks that run. Here too: what barriers of a block and of a warp mean for them.
#include "clocks.h"

#include <algorithm>
#include <map>

#include "blocks.h"
#include "shadow.h"

namespace cuda_emulation {
namespace clocks {
namespace {

constexpr size_t units = most_barriers + checker::most_warpgroups;

struct Clocks {
  size_t threads = 0;
  std::vector<Vector> rows;  // by thread; none before start()
  std::vector<Vector> fences;
  std::vector<std::map<uint32_t, Vector>> syncs;  // by warp: the lanes' clocks just after each __syncwarp
};
std::vector<Clocks> all;

Clocks& mine() {
  return all[size_t(running.slot)];
}

size_t index(int unit) {
  return unit < copies ? size_t(unit) : mine().threads + size_t(unit - copies);
}

void merge(Vector& to, const Vector& from) {
  for (size_t i = 0; i < from.size(); ++i) to[i] = std::max(to[i], from[i]);
}

// All of them know what any of them knew, and go on from there.
void order(size_t first, size_t count) {
  if (mine().rows.empty()) return;
  Vector together = mine().rows[first];
  for (size_t t = first + 1; t < first + count; ++t) merge(together, mine().rows[t]);
  for (size_t t = first; t < first + count; ++t) mine().rows[t] = together, ++mine().rows[t][t];
}

}  // namespace

void order_warp(size_t warp) {
  if (mine().rows.empty()) return;
  order(warp * 32, 32);
  Vector& now = mine().syncs[warp][current().warp_epochs[warp]];
  for (size_t t = warp * 32; t < warp * 32 + 32; ++t) now.push_back(mine().rows[t][t]);
}

void begin(size_t slot, size_t threads) {
  if (all.size() <= slot) all.resize(slot + 1);
  all[slot].threads = threads;
  all[slot].rows.clear();
  all[slot].fences.assign(threads, {});
  all[slot].syncs.assign(threads / 32, {});
}

void start() {
  Clocks& c = mine();
  if (!c.rows.empty()) return;
  c.rows.assign(c.threads, Vector(c.threads + units, 0));
  for (size_t t = 0; t < c.threads; ++t) c.rows[t][t] = 1;
}

uint32_t own() {
  return mine().rows.empty() ? 1 : mine().rows[size_t(running.thread)][size_t(running.thread)];
}

bool knows(size_t thread, int unit, uint32_t clock) {
  return !mine().rows.empty() && mine().rows[thread][index(unit)] >= clock;
}

bool knows(int unit, uint32_t clock) {
  return knows(size_t(running.thread), unit, clock);
}

bool knows_of_warp(int warp, uint32_t epoch) {
  if (warp < 0 || mine().rows.empty()) return false;
  const auto& syncs = mine().syncs[size_t(warp)];
  const auto it = syncs.upper_bound(epoch);
  if (it == syncs.end()) return false;
  for (int lane = 0; lane < 32; ++lane)
    if (knows(warp * 32 + lane, it->second[size_t(lane)])) return true;
  return false;
}

void learn(size_t thread, int unit, uint32_t clock) {
  uint32_t& known = mine().rows[thread][index(unit)];
  known = std::max(known, clock);
}

void release(Vector& to) {
  Vector& row = mine().rows[size_t(running.thread)];
  to.resize(row.size(), 0);
  merge(to, row);
  ++row[size_t(running.thread)];
}

void acquire(const Vector& from, size_t thread) {
  merge(mine().rows[thread], from);
}

void set(Vector& of, int unit, uint32_t clock) {
  of.resize(mine().threads + units, 0);
  of[index(unit)] = clock;
}

void fence() {
  mine().fences[size_t(running.thread)].push_back(own());
}

uint32_t fences() {
  return uint32_t(mine().fences[size_t(running.thread)].size());
}

bool fenced(int writer, uint32_t fences_before, size_t thread) {
  const Vector& passed = mine().fences[size_t(writer)];
  if (passed.size() <= fences_before) return false;
  return size_t(writer) == thread || knows(thread, writer, passed[fences_before]);
}

}  // namespace clocks

void order_block() {
  clocks::order(0, current().threads.size());
}

void order_warp(size_t warp) {
  clocks::order_warp(warp);
}

}  // namespace cuda_emulation
