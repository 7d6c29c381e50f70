// Blocks one after another, a fiber for each thread, in one of three orders. A barrier that some threads of a block
// never reach, and a warp operation that some lanes never reach, is an error that names both places.
#include "checker.h"
#include "cuda_emulation.h"
#include "fiber.h"

#include <algorithm>
#include <cstdarg>
#include <cstdio>
#include <cstdlib>
#include <map>
#include <random>
#include <set>
#include <string>
#include <vector>

namespace cuda_emulation {

Running running;
std::string message;  // of the last launch that failed

void require_no_copies_left();  // of the running thread; ptx.cpp
void forget_copies(size_t threads);

namespace {

enum class State { ready, at_barrier, at_warp, done };
enum class Order { forward, reverse, shuffled };

struct Thread {
  Context context;
  State state = State::ready;
  uint3 index{};
  Site site{};
};

struct Warp {
  unsigned arrived = 0, exchanges = 0;
  // Twice: a lane may hand in its next value while others still read the last.
  alignas(64) unsigned char in[2][32 * slot], out[2][32 * slot];
};

constexpr size_t max_threads = 1024;
std::vector<Thread> threads(max_threads);
std::vector<Warp> warps(max_threads / 32);
Stacks stacks;
Context scheduler;
dim3 grid, block;
uint3 block_at;
size_t thread_count = 0, finished = 0, dynamic_bytes = 0;
void* dynamic = nullptr;
std::map<const void*, void*> statics;
void (*body)(const void*);
const void* body_arguments;
bool failed = false, dry = false;
Order order = Order::forward;
std::mt19937 generator;

Thread& self() {
  return threads[size_t(running.thread)];
}

void yield() {
  transfer(self().context, scheduler);
}

void entry() {
  body(body_arguments);
  require_no_copies_left();
  self().state = State::done;
  ++finished;
  yield();
}

void start_block(int64_t number) {
  block_at = {unsigned(number % grid.x), unsigned(number / grid.x % grid.y), unsigned(number / grid.x / grid.y)};
  finished = 0;
  statics.clear();
  checker::begin_block();
  dynamic = dynamic_bytes ? checker::allocate_shared(dynamic_bytes, 128, "dynamic shared memory") : nullptr;
  forget_copies(thread_count);
  for (size_t w = 0; w * 32 < thread_count; ++w) {
    warps[w].arrived = warps[w].exchanges = 0;
    running.warp_epochs[w] = 0;
  }
  for (size_t t = 0; t < thread_count; ++t) {
    threads[t].state = State::ready;
    threads[t].index = {unsigned(t % block.x), unsigned(t / block.x % block.y), unsigned(t / block.x / block.y)};
    prepare(threads[t].context, stacks[t], Stacks::bytes, entry);
  }
}

bool step(size_t thread) {
  if (threads[thread].state != State::ready) return false;
  running.thread = int(thread);
  transfer(scheduler, threads[thread].context);
  running.thread = -1;
  return true;
}

// Forward and reverse run a warp as far as it gets before the next one; shuffled takes a step of every thread.
bool sweep(std::vector<size_t>& sequence) {
  bool progress = false;
  if (order == Order::shuffled) {
    std::shuffle(sequence.begin(), sequence.end(), generator);
    for (const size_t thread : sequence)
      if (!failed) progress |= step(thread);
    return progress;
  }
  for (size_t warp = 0; warp < thread_count; warp += 32)
    for (bool moved = true; moved && !failed;) {
      moved = false;
      for (size_t i = warp; i < std::min(thread_count, warp + 32) && !failed; ++i) moved |= step(sequence[i]);
      progress |= moved;
    }
  return progress;
}

std::string places() {
  std::set<std::string> sites;
  for (size_t t = 0; t < thread_count; ++t) {
    const Thread& thread = threads[t];
    if (thread.state == State::done)
      sites.insert("the end of the kernel");
    else
      sites.insert(std::string(thread.state == State::at_barrier ? "__syncthreads at " : "a warp operation at ") +
                   thread.site.file + ":" + std::to_string(thread.site.line));
  }
  std::string all;
  for (const auto& site : sites) all += (all.empty() ? "" : "; ") + site;
  return sites.size() == 1 && all[0] == '_' ? "" : all;
}

// Nothing can move: either all stand at one barrier, or they never will.
void pass_barrier() {
  const std::string divergence = places();
  if (!divergence.empty()) {
    failed = true;
    message = "divergence: threads of block (" + std::to_string(block_at.x) + ", " + std::to_string(block_at.y) + ", " +
              std::to_string(block_at.z) + ") wait for each other at different places: " + divergence;
    return;
  }
  checker::next_interval();
  for (size_t t = 0; t < thread_count; ++t) threads[t].state = State::ready;
}

void run_block(int64_t number) {
  start_block(number);
  std::vector<size_t> sequence(thread_count);
  for (size_t t = 0; t < thread_count; ++t) sequence[t] = order == Order::reverse ? thread_count - 1 - t : t;
  while (finished < thread_count && !failed)
    if (!sweep(sequence) && !failed) pass_barrier();
}

struct Launched {
  unsigned threads = 0;
  size_t shared_bytes = 0;
};
std::map<const void*, Launched> launched;

// What every processor of compute capability 8.0 and above takes.
bool is_valid(size_t shared_bytes) {
  const size_t threads = size_t(block.x) * block.y * block.z;
  return threads > 0 && threads <= max_threads && threads % 32 == 0 && grid.x > 0 && grid.y > 0 && grid.z > 0 &&
         grid.x < 1u << 31 && grid.y < 1u << 16 && grid.z < 1u << 16 && block.z <= 64 && shared_bytes <= 163 * 1024;
}

}  // namespace

uint3 thread_index() {
  return self().index;
}
uint3 block_index() {
  return block_at;
}
dim3 block_size() {
  return block;
}
dim3 grid_size() {
  return grid;
}
unsigned lane() {
  return unsigned(running.thread) % 32;
}
bool on_a_fiber_stack(const void* address) {
  return stacks.contains(address);
}

void report(const char* format, ...) {
  char text[600];
  va_list arguments;
  va_start(arguments, format);
  vsnprintf(text, sizeof(text), format, arguments);
  va_end(arguments);
  message = text;
  if (running.thread < 0) {
    message += " [in a launcher]";
    return;
  }
  const auto triple = [](const uint3& at) {
    return "(" + std::to_string(at.x) + ", " + std::to_string(at.y) + ", " + std::to_string(at.z) + ")";
  };
  message += " [block " + triple(block_at) + ", thread " + triple(self().index) + "]";
  failed = true;
  yield();
  abort();  // nobody resumes a failed thread
}

void barrier(Site site) {
  self().state = State::at_barrier;
  self().site = site;
  yield();
}

const unsigned char* warp_exchange(const void* value, size_t bytes, Site site, Combine combine, unsigned mask) {
  const size_t first = size_t(running.thread) / 32 * 32;
  Warp& warp = warps[first / 32];
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
    self().state = State::at_warp;
    yield();
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
  const unsigned before = warps[warp].exchanges;
  warp_exchange(&nothing, 1, site, nullptr, mask);
  // Only __syncwarp orders memory; shuffles and mma do not. The first lane past it counts it for all.
  running.warp_epochs[warp] = std::max(running.warp_epochs[warp], before + 1);
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

void* dynamic_shared() {
  if (!dynamic) report("the launch gave no dynamic shared memory");
  return dynamic;
}

void* static_shared(const void* site, size_t bytes) {
  void*& variable = statics[site];
  if (!variable) variable = checker::allocate_shared(bytes, 16, "static shared memory");
  return variable;
}

cudaError_t run(const void* kernel, dim3 grid_, dim3 block_, size_t shared_bytes, void (*thread)(const void*),
                const void* arguments, size_t argument_bytes) {
  grid = grid_, block = block_, dynamic_bytes = shared_bytes, body = thread, body_arguments = arguments;
  failed = false;
  thread_count = size_t(block.x) * block.y * block.z;
  if (!is_valid(shared_bytes)) {
    message = "invalid launch: grid (" + std::to_string(grid.x) + ", " + std::to_string(grid.y) + ", " +
              std::to_string(grid.z) + "), block of " + std::to_string(thread_count) + " threads, " +
              std::to_string(shared_bytes) + " bytes of shared memory";
    return cudaErrorInvalidConfiguration;
  }
  Launched& record = launched[kernel];
  record.threads = std::max(record.threads, unsigned(thread_count));
  record.shared_bytes = std::max(record.shared_bytes, shared_bytes);
  if (dry) return cudaSuccess;
  stacks.reserve(max_threads);
  checker::begin_launch(arguments, argument_bytes);
  const int64_t blocks = int64_t(grid.x) * grid.y * grid.z;
  std::vector<int64_t> numbers(static_cast<size_t>(blocks));
  for (int64_t b = 0; b < blocks; ++b) numbers[size_t(b)] = order == Order::reverse ? blocks - 1 - b : b;
  if (order == Order::shuffled) std::shuffle(numbers.begin(), numbers.end(), generator);
  for (size_t b = 0; b < numbers.size() && !failed; ++b) run_block(numbers[b]);
  running.thread = -1;
  checker::end_launch();
  return failed ? cudaErrorLaunchFailure : cudaSuccess;
}

extern "C" {
// Launches are checked and counted, and do nothing: what a call allocates is seen at any size.
void cuda_emulation_dry(int on) {
  dry = on != 0;
}
void cuda_emulation_order(int mode, unsigned seed) {
  order = static_cast<Order>(mode);
  generator.seed(seed);
}
// The kernels launched so far and their largest blocks: name by address, for the comparison with what nvcc compiled.
size_t cuda_emulation_launched(size_t which, const void** kernel, unsigned* block_threads, size_t* shared) {
  if (which < launched.size()) {
    const auto it = std::next(launched.begin(), std::ptrdiff_t(which));
    *kernel = it->first, *block_threads = it->second.threads, *shared = it->second.shared_bytes;
  }
  return launched.size();
}
}

}  // namespace cuda_emulation
