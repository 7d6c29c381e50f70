// Accesses of hardware that works beside the threads: copies of boxes, which write shared memory from their issue to
// their landing, and wgmma, which reads its operands from its issue to the wait that retires it. What the running
// thread, or its whole warpgroup, must know before either begins.
#include "checker.h"
#include "clocks.h"
#include "cuda_emulation.h"
#include "shadow.h"

namespace cuda_emulation::checker {

// Reads by earlier products and by threads, and writes of any kind, must all be over as the issuing thread knows.
void begin_copy(void* to, size_t bytes, int unit, uint32_t clock) {
  const uintptr_t start = uintptr_t(to);
  const Variable& v = variable_of(start, bytes, "copy");
  if (is_barrier(start, bytes)) report("copy over a barrier, at offset %zu of %s", start - v.base, v.what);
  for (size_t i = 0; i < bytes; ++i) {
    Shadow& s = *shadow_of(start + i);
    const size_t offset = start + i - v.base;
    if (is_enabled()) {
      if (s.poison_interval >= mine->first)
        report("race: copy to offset %zu of %s, while another copy to it is under way", offset, v.what);
      if (!is_ordered(s, true)) report("race: copy to offset %zu of %s, which is written since", offset, v.what);
      if (s.write_interval >= mine->first && s.writer < clocks::copies &&
          !clocks::fenced(s.writer, s.write_fences, size_t(running.thread)))
        report("copy to offset %zu of %s, which thread %d has written without fence_async_shared", offset, v.what,
               s.writer);
      if (!is_ordered(s, false))
        report("race: copy to offset %zu of %s, which a thread may still read", offset, v.what);
      for (size_t g = 0; g < most_warpgroups; ++g) {
        const uint32_t serial = product_reads_of(start + i)->serial[g];
        if (serial >= mine->first_serial && !clocks::knows(clocks::products + int(g), serial))
          report("race: copy to offset %zu of %s, which a wgmma of warpgroup %zu may still read", offset, v.what, g);
      }
    }
    s.writer = int16_t(unit), s.write_clock = clock;
    s.write_interval = s.poison_interval = mine->interval;
  }
  std::memset(to, 0xff, bytes);
}

void end_copy(void* to, size_t bytes) {
  for (size_t i = 0; i < bytes; ++i) shadow_of(uintptr_t(to) + i)->poison_interval = 0;
}

namespace {

// Every thread of a warpgroup starts the product: each must know of the write, and of its fence.
bool all_know(const Shadow& s, size_t first_thread) {
  for (size_t t = first_thread; t < first_thread + 128; ++t) {
    if (s.writer >= clocks::copies) {
      if (!clocks::knows(t, s.writer, s.write_clock)) return false;
    } else if (size_t(s.writer) != t && s.write_interval == mine->interval &&
               !clocks::knows(t, s.writer, s.write_clock)) {
      return false;
    }
  }
  return true;
}

bool all_know_of_the_fence(const Shadow& s, size_t first_thread) {
  for (size_t t = first_thread; t < first_thread + 128; ++t)
    if (!clocks::fenced(s.writer, s.write_fences, t)) return false;
  return true;
}

}  // namespace

void begin_product_read(const void* from, size_t bytes, size_t warpgroup, uint32_t serial) {
  if (!is_enabled()) return;
  const uintptr_t start = uintptr_t(from);
  const Variable& v = variable_of(start, bytes, "wgmma: read");
  static Shadow last{};  // neighbours were mostly written alike
  static uint32_t last_serial = 0;
  for (size_t i = 0; i < bytes; ++i) {
    Shadow& s = *shadow_of(start + i);
    const size_t offset = start + i - v.base;
    if (s.poison_interval >= mine->first)
      report("wgmma reads offset %zu of %s, which is still being copied", offset, v.what);
    if (s.write_interval < mine->first) report("wgmma reads offset %zu of %s, which is uninitialised", offset, v.what);
    product_reads_of(start + i)->serial[warpgroup] = serial;
    if (last_serial == serial && s.writer == last.writer && s.write_clock == last.write_clock &&
        s.write_interval == last.write_interval && s.write_fences == last.write_fences)
      continue;
    last = s, last_serial = serial;
    if (!all_know(s, warpgroup * 128))
      report("race: wgmma reads offset %zu of %s, written since some of its threads' last barrier_wait", offset,
             v.what);
    if (s.writer < clocks::copies && !all_know_of_the_fence(s, warpgroup * 128))
      report("wgmma reads offset %zu of %s, which thread %d has written without fence_async_shared", offset, v.what,
             s.writer);
  }
}

}  // namespace cuda_emulation::checker
