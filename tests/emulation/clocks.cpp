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
  size_t threads = 0;        // of a block
  std::vector<Vector> rows;  // by thread, block after block; none before start()
  std::vector<Vector> fences;
  std::vector<std::map<uint32_t, Vector>> syncs;  // by warp: the lanes' clocks just after each __syncwarp
};
std::vector<Clocks> all;  // by cluster

Clocks& mine() {
  return all[size_t(running.slot) / cluster_size()];
}

size_t number_of(int slot, size_t thread) {
  return size_t(slot) % cluster_size() * mine().threads + thread;
}

Vector& row(size_t thread) {
  return mine().rows[number_of(running.slot, thread)];
}

size_t index(int unit, int slot) {
  const size_t within = unit < copies ? size_t(unit) : mine().threads + size_t(unit - copies);
  return size_t(slot) % cluster_size() * (mine().threads + units) + within;
}

void merge(Vector& to, const Vector& from) {
  for (size_t i = 0; i < from.size(); ++i) to[i] = std::max(to[i], from[i]);
}

// All of them know what any of them knew, and go on from there.
void order(size_t first, size_t count) {
  if (mine().rows.empty()) return;
  Vector together = row(first);
  for (size_t t = first + 1; t < first + count; ++t) merge(together, row(t));
  for (size_t t = first; t < first + count; ++t) row(t) = together, ++row(t)[index(int(t), running.slot)];
}

}  // namespace

void begin(size_t slot, size_t threads) {
  if (slot % cluster_size()) return;
  const size_t cluster = slot / cluster_size();
  if (all.size() <= cluster) all.resize(cluster + 1);
  Clocks& c = all[cluster];
  c.threads = threads;
  c.rows.clear();
  c.fences.assign(threads * cluster_size(), {});
  c.syncs.assign(threads * cluster_size() / 32, {});
}

void start() {
  Clocks& c = mine();
  if (!c.rows.empty()) return;
  c.rows.assign(c.threads * cluster_size(), Vector((c.threads + units) * cluster_size(), 0));
  for (size_t i = 0; i < c.rows.size(); ++i) c.rows[i][index(int(i % c.threads), int(i / c.threads))] = 1;
}

uint32_t own() {
  return mine().rows.empty() ? 1 : row(size_t(running.thread))[index(running.thread, running.slot)];
}

bool knows(size_t thread, int unit, uint32_t clock) {
  return !mine().rows.empty() && row(thread)[index(unit, running.at)] >= clock;
}

bool knows(int unit, uint32_t clock) {
  return knows(size_t(running.thread), unit, clock);
}

bool knows_of_warp(int warp, uint32_t epoch) {
  if (warp < 0 || mine().rows.empty()) return false;
  const auto& syncs = mine().syncs[number_of(running.at, size_t(warp) * 32) / 32];
  const auto it = syncs.upper_bound(epoch);
  if (it == syncs.end()) return false;
  for (int lane = 0; lane < 32; ++lane)
    if (knows(warp * 32 + lane, it->second[size_t(lane)])) return true;
  return false;
}

void learn(size_t thread, int unit, uint32_t clock) {
  uint32_t& known = row(thread)[index(unit, running.at)];
  known = std::max(known, clock);
}

void release(Vector& to) {
  Vector& own = row(size_t(running.thread));
  to.resize(own.size(), 0);
  merge(to, own);
  ++own[index(running.thread, running.slot)];
}

void acquire(const Vector& from, size_t thread) {
  merge(row(thread), from);
}

void set(Vector& of, int unit, uint32_t clock) {
  of.resize((mine().threads + units) * cluster_size(), 0);
  of[index(unit, running.at)] = clock;
}

void fence() {
  mine().fences[number_of(running.slot, size_t(running.thread))].push_back(own());
}

uint32_t fences() {
  return uint32_t(mine().fences[number_of(running.slot, size_t(running.thread))].size());
}

bool fenced(int writer, uint32_t fences_before, size_t thread) {
  const Vector& passed = mine().fences[number_of(running.at, size_t(writer))];
  if (passed.size() <= fences_before) return false;
  const bool own = size_t(writer) == thread && running.at == running.slot;
  return own || knows(thread, writer, passed[fences_before]);
}

}  // namespace clocks

using namespace clocks;

void order_block() {
  order(0, current().threads.size());
}

void order_warp(size_t warp) {
  if (mine().rows.empty()) return;
  order(warp * 32, 32);
  Vector& now = mine().syncs[number_of(running.slot, warp * 32) / 32][current().warp_epochs[warp]];
  for (size_t t = warp * 32; t < warp * 32 + 32; ++t) now.push_back(row(t)[index(int(t), running.slot)]);
}

void order_cluster() {
  if (mine().rows.empty()) return;
  Vector together = mine().rows[0];
  for (const Vector& row : mine().rows) merge(together, row);
  for (size_t i = 0; i < mine().rows.size(); ++i) {
    const size_t slot = i / mine().threads, thread = i % mine().threads;
    mine().rows[i] = together, ++mine().rows[i][index(int(thread), int(slot))];
  }
}

}  // namespace cuda_emulation
