// Products of a warpgroup (wgmma): D [64, columns] in the threads' registers, A and B where descriptors point to.
// A product is computed when a wait retires its group; from its issue on until then D is poison, and the operands
// count as being read. Sums are in float32, along k.
#include <array>
#include <deque>

#include "clocks.h"
#include "hopper.h"
#include "ptx_sm90.h"
#include "shadow.h"

namespace cuda_emulation {
namespace {

constexpr int rows = 64, depth = 16;

struct Operand {  // by its descriptor: blocks of 64 along m or n, groups of 8 along k
  uint32_t start, between, group;

  // Eight neighbours along m or n.
  uint32_t piece(int eight, int k) const {
    const uint32_t at = start + uint32_t(eight % 8) * 16 + uint32_t(k % 8) * 128 + uint32_t(eight / 8) * between +
                        uint32_t(k / 8) * group;
    return at ^ (at >> 7 & 7) << 4;
  }
};

struct Accumulator {
  std::array<float*, group_threads> d;
  int columns;
  int pending;   // products under way
  bool touched;  // by threads, since the last fence
  std::vector<float> values;
};

struct Product {
  Operand a, b;
  Half half;
  bool adds;
  size_t accumulator;
  uint32_t serial;
};

struct Request {
  float* d;
  int columns;
  Half half;
  uint64_t of_a, of_b;
  bool adds;
};

struct Group {
  std::array<Request, group_threads> requests;
  std::vector<Accumulator> accumulators;
  std::vector<Product> open;
  std::deque<std::vector<Product>> committed;
  bool fenced = false;  // since the last commit
};
std::vector<std::vector<Group>> all;  // by block

Group& mine() {
  return all[size_t(running.slot)][group_of_thread()];
}

Operand decode(uint64_t descriptor) {
  constexpr uint64_t known = 0xc00000003fff3fff | uint64_t(0x3fff) << 32;
  if (descriptor & ~known & ~(uint64_t(7) << 49))
    report("wgmma: reserved bits in descriptor %016llx", static_cast<unsigned long long>(descriptor));
  if (descriptor >> 62 != 1 || descriptor >> 49 & 7)
    report("wgmma: only the 128-byte swizzle without a base offset is emulated");
  const auto field = [&](int bit) { return uint32_t(descriptor >> bit & 0x3fff) << 4; };
  const Operand o{field(0), field(16), field(32)};
  if (o.start % 128)
    report("wgmma: a descriptor's start %u is not aligned to the swizzle's rows of 128 bytes", o.start);
  return o;
}

void check_operand(const Operand& o, int extent, uint32_t serial) {
  for (int k = 0; k < depth; ++k)
    for (int eight = 0; eight < extent / 8; ++eight) {
      const uint32_t at = o.piece(eight, k);
      if (at >= checker::window_bytes) report("wgmma: a descriptor leaves shared memory, at %u", at);
      checker::begin_product_read(checker::shared_at(at), 16, group_of_thread(), serial);
    }
}

void load(const Operand& o, int extent, Half half, float* to) {  // [depth][extent]
  for (int k = 0; k < depth; ++k)
    for (int eight = 0; eight < extent / 8; ++eight) {
      uint16_t bits[8];
      std::memcpy(bits, checker::shared_at(o.piece(eight, k)), sizeof(bits));
      for (int i = 0; i < 8; ++i)
        to[k * extent + eight * 8 + i] = half == Half::bfloat16 ? decode_bfloat16(bits[i]) : decode_float16(bits[i]);
    }
}

// f(thread of the group, register, row, column)
template <class F>
void each_register(int columns, const F& f) {
  for (int t = 0; t < int(group_threads); ++t)
    for (int r = 0; r < columns / 2; ++r)
      f(t, r, t / 32 * 16 + t % 32 / 4 + r % 4 / 2 * 8, r / 4 * 8 + t % 4 * 2 + r % 2);
}

size_t find_accumulator(Group& g, int columns) {
  std::array<float*, group_threads> d;
  for (size_t t = 0; t < group_threads; ++t) d[t] = g.requests[t].d;
  for (size_t i = 0; i < g.accumulators.size(); ++i)
    if (g.accumulators[i].d == d && g.accumulators[i].columns == columns) return i;
  // Registers seen for the first time: all that was done to them came before the last commit, for all we know.
  g.accumulators.push_back({d, columns, 0, !g.fenced, {}});
  return g.accumulators.size() - 1;
}

void issue(Group& g) {
  const Request& first = g.requests[0];
  for (const Request& r : g.requests)
    if (r.of_a != first.of_a || r.of_b != first.of_b || r.adds != first.adds)
      report("wgmma: the threads of the warpgroup do not agree on descriptors and sum");
  const size_t index = find_accumulator(g, first.columns);
  Accumulator& acc = g.accumulators[index];
  if (!acc.pending && acc.touched) report("wgmma: no wgmma_fence since its registers were last touched");
  const Product p{decode(first.of_a), decode(first.of_b), first.half, first.adds, index, checker::next_serial()};
  check_operand(p.a, rows, p.serial);
  check_operand(p.b, first.columns, p.serial);
  if (!acc.pending) {
    acc.values.resize(size_t(rows * acc.columns));
    each_register(acc.columns, [&](int t, int r, int row, int column) {
      acc.values[size_t(row * acc.columns + column)] = acc.d[size_t(t)][r];
      std::memset(&acc.d[size_t(t)][r], 0xff, sizeof(float));
    });
  }
  ++acc.pending;
  g.open.push_back(p);
}

void retire(Group& g, const Product& p) {
  Accumulator& acc = g.accumulators[p.accumulator];
  const int columns = acc.columns;
  static float a[depth * rows], b[depth * 256];
  load(p.a, rows, p.half, a);
  load(p.b, columns, p.half, b);
  if (!p.adds) std::fill(acc.values.begin(), acc.values.end(), 0.f);
  for (int row = 0; row < rows; ++row)
    for (int k = 0; k < depth; ++k)
      for (int column = 0; column < columns; ++column)
        acc.values[size_t(row * columns + column)] += a[k * rows + row] * b[k * columns + column];
  if (--acc.pending == 0)
    each_register(columns, [&](int t, int r, int row, int column) {
      acc.d[size_t(t)][r] = acc.values[size_t(row * columns + column)];
    });
  const size_t group = group_of_thread();
  for (size_t t = group * group_threads; t < (group + 1) * group_threads; ++t)
    clocks::learn(t, clocks::products + int(group), p.serial);
}

// Of a warpgroup's operation: the last thread to come acts for all.
template <class F>
void together(const char* what, Site site, const F& act) {
  const Doing doing(site);
  clocks::start();
  const size_t group = group_of_thread();
  if (group >= checker::most_warpgroups) report("%s: more warpgroups than are emulated", what);
  if (!gather(what, site)) return;
  act(mine());
  release(group);
}

}  // namespace

void wgmma(float* d, int columns, Half half, uint64_t of_a, uint64_t of_b, bool adds, Site site) {
  if (group_of_thread() < all[size_t(running.slot)].size())
    mine().requests[size_t(running.thread) % group_threads] = {d, columns, half, of_a, of_b, adds};
  together("wgmma", site, issue);
}

void wgmma_fence(Site site) {
  together("wgmma_fence", site, [](Group& g) {
    g.fenced = true;
    for (Accumulator& acc : g.accumulators) acc.touched = false;
  });
}

void wgmma_commit(Site site) {
  together("wgmma_commit", site, [](Group& g) {
    g.committed.push_back(std::move(g.open));
    g.open.clear();
    g.fenced = false;
  });
}

void wgmma_wait(int left, Site site) {
  together("wgmma_wait", site, [&](Group& g) {
    for (; g.committed.size() > size_t(left); g.committed.pop_front())
      for (const Product& p : g.committed.front()) retire(g, p);
  });
}

void touch_registers(uintptr_t address, bool write) {
  auto& groups = all[size_t(running.slot)];
  if (group_of_thread() >= groups.size()) return;
  for (Accumulator& acc : groups[group_of_thread()].accumulators) {
    const auto d = uintptr_t(acc.d[size_t(running.thread) % group_threads]);
    if (address < d || address >= d + size_t(acc.columns) / 2 * sizeof(float)) continue;
    if (acc.pending) report("%s of a register of wgmma before its wgmma_wait", write ? "write" : "read");
    acc.touched = true;
  }
}

void end_hopper_thread() {
  auto& groups = all[size_t(running.slot)];
  if (group_of_thread() >= groups.size()) return;
  const Group& g = groups[group_of_thread()];
  if (!g.open.empty() || !g.committed.empty()) report("the thread ends before a wgmma_wait for its wgmma");
}

void begin_products(size_t slot, size_t threads) {
  if (all.size() <= slot) all.resize(slot + 1);
  all[slot].assign(threads / group_threads, {});
}

}  // namespace cuda_emulation
