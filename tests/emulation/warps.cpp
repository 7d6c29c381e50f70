// What a warp does together: exchanges of values and __syncwarp, each a rendezvous of all its lanes.
#include <algorithm>

#include "blocks.h"

namespace cuda_emulation {

const unsigned char* warp_exchange(const void* value, size_t bytes, Site site, Combine combine, unsigned mask) {
  const size_t first = size_t(running.thread) / 32 * 32;
  std::vector<Thread>& threads = current().threads;
  Warp& warp = current().warps[first / 32];
  if (mask != 0xffffffffu)
    report("%s:%d: mask %08x leaves out lanes; only full warps are emulated", site.file, site.line, mask);
  for (size_t i = 0; i < 32; ++i) {
    const Site other = threads[first + i].site;
    if (warp.arrived >> i & 1 && !(other == site))
      report("divergence: warp operation at %s:%d, while lane %zu is at another one, %s:%d", site.file, site.line, i,
             other.file, other.line);
  }
  const unsigned side = warp.exchanges & 1;
  std::memcpy(warp.in[side] + lane() * slot, value, bytes);
  self().site = site;
  warp.arrived |= 1u << lane();
  if (warp.arrived != 0xffffffffu) {
    wait(State::at_warp, site);
  } else {
    if (combine) combine(warp.in[side], warp.out[side]);
    warp.arrived = 0;
    ++warp.exchanges;
    for (size_t i = 0; i < 32; ++i)
      if (threads[first + i].state == State::at_warp) threads[first + i].state = State::ready;
  }
  return combine ? warp.out[side] : warp.in[side];
}

void warp_barrier(unsigned mask, Site site) {
  const char nothing = 0;
  const size_t warp = size_t(running.thread) / 32;
  const unsigned before = current().warps[warp].exchanges;
  warp_exchange(&nothing, 1, site, nullptr, mask);
  // Only __syncwarp orders memory; shuffles and mma do not. The first lane past it counts it for all.
  uint32_t& epoch = current().warp_epochs[warp];
  if (epoch <= before) epoch = before + 1, order_warp(warp);
}

void shuffle_bytes(void* value, size_t bytes, unsigned source, unsigned mask, Site site) {
  const unsigned char* const all = warp_exchange(value, bytes, site, nullptr, mask);
  if (source < 32) std::memcpy(value, all + source * slot, bytes);  // past the warp's end: one's own
}

unsigned ballot(unsigned mask, bool predicate, Site site) {
  const unsigned char* const all = warp_exchange(&predicate, sizeof(bool), site, nullptr, mask);
  unsigned result = 0;
  for (unsigned i = 0; i < 32; ++i) result |= unsigned(all[i * slot] != 0) << i;
  return result;
}

}  // namespace cuda_emulation
