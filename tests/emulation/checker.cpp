// Accesses of threads, by the shadow of each byte. Intervals are numbered through all launches, so that one comparison
// tells "since the last barrier" from "in another block of this launch".
#include "checker.h"

#include <algorithm>
#include <map>
#include <memory>

#include "clocks.h"
#include "cuda_emulation.h"
#include "shadow.h"

namespace cuda_emulation::checker {

BlockMemory* mine = nullptr;

namespace {

struct Buffer {  // of global memory
  size_t bytes;
  bool writable;
  std::unique_ptr<Pages<Shadow>> shadow;
};

constexpr size_t gap_bytes = 1 << 10;
struct Arena {  // the shared memory of all blocks that run, a window for each
  Pages<unsigned char> memory;
  Pages<Shadow> shadow;
  Pages<ProductReads> reads;
  explicit Arena(size_t bytes) : memory(bytes), shadow(bytes), reads(bytes) {}
};
std::unique_ptr<Arena> arena;
std::vector<BlockMemory> blocks;
std::map<uintptr_t, Buffer> buffers;
uint32_t last_interval = 1, first_of_epoch = 1, first_of_launch = 1, last_serial = 0;
std::vector<int64_t> owners;  // blocks, of the intervals of this launch
uintptr_t arguments_begin = 0, arguments_end = 0;

const char* verb(bool write) {
  return write ? "write" : "read";
}

uintptr_t base() {
  return uintptr_t(arena->memory.data);
}

uint32_t new_interval(int64_t owner) {
  owners.push_back(owner);
  return ++last_interval;
}

int64_t owner_of(uint32_t interval) {
  return owners[interval - first_of_launch - 1];
}

// Between the running thread and an earlier access of this block: has no barrier come between?
bool unordered(uint32_t then, int thread, int warp, uint32_t warp_epoch_then, uint32_t clock_then) {
  const int own = running.thread / 32;
  return then == mine->interval && !(warp == own && warp_epoch_then < running.warp_epochs[own]) &&
         !(thread >= 0 ? clocks::knows(thread, clock_then) : clocks::knows_of_warp(warp, warp_epoch_then));
}

bool in_another_block(uint32_t then) {
  return then > first_of_epoch && owner_of(then) != owner_of(mine->interval);
}

struct Place {
  const char* what;
  size_t offset;
};

void note_read(Shadow& s) {
  const auto warp = int8_t(running.thread / 32);
  if (s.read_interval == mine->interval) {
    if (s.reader != running.thread) s.reader = -1;
    if (s.reader_warp != warp) s.reader_warp = -1;
  } else {
    if (in_another_block(s.read_interval)) s.other_block_read = s.read_interval;
    s.reader = int16_t(running.thread), s.reader_warp = warp, s.read_interval = mine->interval;
    s.read_warp_epoch = 0;
  }
  s.read_warp_epoch = std::max(s.read_warp_epoch, running.warp_epochs[warp]);
  s.read_clock = clocks::own();
}

void note_write(Shadow& s) {
  s.writer = int16_t(running.thread), s.write_interval = mine->interval, s.poison_interval = 0;
  s.write_warp_epoch = running.warp_epochs[running.thread / 32];
  s.write_clock = clocks::own(), s.write_fences = clocks::fences();
}

void check_block_race(const Shadow& s, bool write, const Place& at) {
  if (!is_ordered(s, true)) {
    if (s.writer >= clocks::copies)
      report("race: %s at offset %zu of %s, which a copy has written; no barrier_wait has come between", verb(write),
             at.offset, at.what);
    report("race: %s at offset %zu of %s, written by thread %d since the last barrier", verb(write), at.offset, at.what,
           s.writer);
  }
  if (write && !is_ordered(s, false))
    report("race: write at offset %zu of %s, read by another thread since the last barrier", at.offset, at.what);
}

void check_grid_race(const Shadow& s, bool write, const Place& at) {
  if (in_another_block(s.write_interval))
    report("race: %s at offset %zu of %s, written by another block of this launch", verb(write), at.offset, at.what);
  if (write && (in_another_block(s.read_interval) || in_another_block(s.other_block_read)))
    report("race: write at offset %zu of %s, read by another block of this launch", at.offset, at.what);
}

void touch(Shadow& s, bool write, const Place& at) {
  check_block_race(s, write, at);
  write ? note_write(s) : note_read(s);
}

void check_shared_access(uintptr_t address, size_t bytes, bool write) {
  const Variable& v = variable_of(address, bytes, verb(write));
  const size_t offset = address - v.base;
  if (is_barrier(address, bytes)) report("%s at offset %zu of %s, which is a barrier", verb(write), offset, v.what);
  for (size_t i = 0; i < bytes; ++i) {
    Shadow& s = *shadow_of(address + i);
    const bool copying = s.poison_interval >= mine->first;
    if (!write && (copying || s.write_interval < mine->first))
      report("read of %s at offset %zu, which is %s", v.what, offset + i,
             copying ? "still being copied" : "uninitialised");
    if (write && copying && s.writer >= clocks::copies)
      report("write of %s at offset %zu, which is still being copied", v.what, offset + i);
    for (size_t g = 0; write && g < most_warpgroups; ++g) {
      const uint32_t serial = product_reads_of(address + i)->serial[g];
      if (serial >= mine->first_serial && !clocks::knows(clocks::products + int(g), serial))
        report("race: write at offset %zu of %s, which a wgmma may still read", offset + i, v.what);
    }
    touch(s, write, {v.what, offset + i});
  }
}

void check_global_access(uintptr_t start, Buffer& buffer, uintptr_t address, size_t bytes, bool write) {
  const size_t offset = address - start;
  const char* const what = buffer.writable ? "an output or workspace" : "an input";
  if (offset + bytes > buffer.bytes)
    report("%s of %zu bytes at offset %zu of %zu bytes of %s", verb(write), bytes, offset, buffer.bytes, what);
  if (!buffer.writable) {
    if (write) report("write at offset %zu of %s", offset, what);
    return;
  }
  if (!buffer.shadow) buffer.shadow = std::make_unique<Pages<Shadow>>(buffer.bytes);
  for (size_t i = 0; i < bytes; ++i) {
    Shadow& s = buffer.shadow->data[offset + i];
    check_grid_race(s, write, {what, offset + i});
    touch(s, write, {what, offset + i});
  }
}

// A byte past a buffer is that buffer's overrun; further off it is anybody's.
std::map<uintptr_t, Buffer>::iterator buffer_at(uintptr_t address) {
  auto it = buffers.upper_bound(address);
  if (it == buffers.begin()) return buffers.end();
  --it;
  return address - it->first < it->second.bytes + 64 ? it : buffers.end();
}

}  // namespace

Shadow* shadow_of(uintptr_t shared) {
  return arena->shadow.data + (shared - base());
}

ProductReads* product_reads_of(uintptr_t shared) {
  return arena->reads.data + (shared - base());
}

const Variable& variable_of(uintptr_t shared, size_t bytes, const char* verb) {
  const Variable* v = nullptr;
  for (const auto& candidate : mine->variables)
    if (shared >= candidate.base) v = &candidate;
  if (!v || shared + bytes > base() + (size_t(running.at) + 1) * window_bytes)
    report("%s of %zu bytes outside of the block's shared memory", verb, bytes);
  const size_t offset = shared - v->base;
  if (offset + bytes > v->bytes)
    report("%s of %zu bytes at offset %zu of %zu bytes of %s", verb, bytes, offset, v->bytes, v->what);
  return *v;
}

bool is_ordered(const Shadow& s, bool last_write) {
  const uint32_t then = last_write ? s.write_interval : s.read_interval;
  if (running.at != running.slot && !(last_write && s.writer >= clocks::copies)) {  // barriers of its own block: none
    if (then < mine->first) return true;
    if (!last_write && s.reader < 0) return clocks::knows_of_warp(s.reader_warp, s.read_warp_epoch);
    return clocks::knows(last_write ? s.writer : s.reader, last_write ? s.write_clock : s.read_clock);
  }
  if (last_write) {
    if (s.writer >= clocks::copies)  // whatever else: only its own barrier tells of a copy
      return s.write_interval < mine->first || clocks::knows(s.writer, s.write_clock);
    return !s.write_interval || s.writer == running.thread ||
           !unordered(s.write_interval, s.writer, s.writer / 32, s.write_warp_epoch, s.write_clock);
  }
  return !s.read_interval || s.reader == running.thread ||
         !unordered(s.read_interval, s.reader, s.reader_warp, s.read_warp_epoch, s.read_clock);
}

void access(uintptr_t address, size_t bytes, bool write) {
  if (!bytes) return;
  if (on_a_fiber_stack(reinterpret_cast<void*>(address))) return touch_registers(address, write);
  if (is_shared(reinterpret_cast<void*>(address))) return check_shared_access(address, bytes, write);
  if (const auto it = buffer_at(address); it != buffers.end())
    return check_global_access(it->first, it->second, address, bytes, write);
  const bool of_arguments = address >= arguments_begin && address < arguments_end;
  if (!write && (is_of_image(address) || of_arguments)) return;
  report("%s of %zu bytes at %p, in no registered buffer", verb(write), bytes, reinterpret_cast<void*>(address));
}

void begin_launch(const void* arguments, size_t argument_bytes, size_t slots) {
  if (!arena || arena->memory.bytes < slots * window_bytes) arena = std::make_unique<Arena>(slots * window_bytes);
  if (blocks.size() < slots) blocks.resize(slots);
  arguments_begin = uintptr_t(arguments), arguments_end = arguments_begin + argument_bytes;
  first_of_launch = first_of_epoch = ++last_interval;
  owners.clear();
}

void enter(size_t slot) {
  mine = &blocks[slot];
  running.at = int(slot);
}

void begin_block(int64_t number) {
  mine->first = mine->interval = new_interval(number);
  mine->first_serial = last_serial + 1;
  mine->variables.clear();
  mine->used = 0;
}

void next_interval() {
  mine->interval = new_interval(owner_of(mine->interval));
}

void next_epoch() {
  first_of_epoch = new_interval(-1);
}

void end_launch() {
  first_of_launch = first_of_epoch = ++last_interval;
  owners.clear();
}

uint32_t next_serial() {
  return ++last_serial;
}

void register_buffer(const void* start, size_t bytes, bool writable) {
  buffers[uintptr_t(start)] = {bytes, writable, nullptr};
}

void forget_buffer(const void* start) {
  buffers.erase(uintptr_t(start));
}

void* allocate_shared(size_t bytes, size_t alignment, const char* what) {
  // Aligned to `alignment` and no better, so that nothing passes by luck.
  const size_t offset = (mine->used + gap_bytes) / (2 * alignment) * (2 * alignment) + alignment;
  if (offset + bytes + gap_bytes > window_bytes) report("more shared memory than any processor has: %zu bytes", offset);
  mine->used = offset + bytes;
  unsigned char* const start = shared_at(uint32_t(offset));
  mine->variables.push_back({uintptr_t(start), bytes, what});
  std::memset(start, 0xff, bytes);
  return start;
}

bool is_shared(const void* address) {
  return arena && uintptr_t(address) >= base() && uintptr_t(address) < base() + arena->memory.bytes;
}

uint32_t offset_of_shared(const void* address) {
  return uint32_t((uintptr_t(address) - base()) % window_bytes);
}

unsigned char* shared_at(uint32_t offset) {
  return arena->memory.data + size_t(running.at) * window_bytes + offset;
}

void poison_shared(void* address, size_t bytes) {
  std::memset(address, 0xff, bytes);
  for (size_t i = 0; i < bytes; ++i) shadow_of(uintptr_t(address) + i)->poison_interval = mine->interval;
}

}  // namespace cuda_emulation::checker

namespace cuda_emulation {

void check_constant(const void* address, size_t bytes) {
  using namespace checker;
  if (running.thread < 0 || !is_enabled()) return;
  const auto it = buffer_at(uintptr_t(address));
  if (it == buffers.end() || !it->second.shadow || uintptr_t(address) + bytes > it->first + it->second.bytes) return;
  for (size_t i = 0; i < bytes; ++i)
    if (it->second.shadow->data[uintptr_t(address) + i - it->first].write_interval > first_of_launch)
      report("__ldg at offset %zu of what this launch has written", uintptr_t(address) + i - it->first);
}

}  // namespace cuda_emulation
