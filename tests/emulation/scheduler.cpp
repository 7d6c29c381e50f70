// Runs a launch: a fiber for each thread, in one of three orders; blocks one after another, or together where they
// wait for each other. A barrier that some threads of a block never reach, and a wait that nobody ends, is an error
// that names the places.
#include <algorithm>
#include <cstdarg>
#include <cstdio>
#include <cstdlib>
#include <numeric>
#include <random>
#include <set>

#include "blocks.h"

namespace cuda_emulation {

Running running;
std::string message;  // of the last launch that failed

void require_no_copies_left();  // of the running thread; ptx.cpp
void forget_copies(size_t slot, size_t threads);

namespace {

std::vector<Block> gang;  // those that run
Stacks stacks;
Context scheduler;
dim3 grid, block;
size_t thread_count = 0, dynamic_bytes = 0, cluster = 1;
void (*body)(const void*);
const void *body_arguments, *launched_kernel;
bool failed = false, dry = false;
Order order = Order::forward;
std::mt19937 generator;

void yield() {
  transfer(self().context, scheduler);
}

void entry() {
  body(body_arguments);
  require_no_copies_left();
  end_hopper_thread();
  self().state = State::done;
  ++current().finished;
  yield();
}

void enter(size_t slot) {
  running.slot = int(slot);
  running.warp_epochs = gang[slot].warp_epochs.data();
  checker::enter(slot);
}

void start_block(size_t slot, int64_t number) {
  Block& b = gang[slot];
  b.number = number;
  b.at = {unsigned(number % grid.x), unsigned(number / grid.x % grid.y), unsigned(number / grid.x / grid.y)};
  b.finished = 0;
  b.statics.clear(), b.static_bytes = 0;
  b.threads.resize(thread_count);
  b.warps.resize(thread_count / 32);
  b.warp_epochs.assign(thread_count / 32, 0);
  enter(slot);
  checker::begin_block(number);
  b.dynamic = dynamic_bytes ? checker::allocate_shared(dynamic_bytes, 128, "dynamic shared memory") : nullptr;
  forget_copies(slot, thread_count);
  begin_hopper(slot, thread_count);
  for (Warp& warp : b.warps) warp.arrived = warp.exchanges = 0;
  for (size_t t = 0; t < thread_count; ++t) {
    Thread& thread = b.threads[t];
    thread.state = State::ready;
    thread.doing.line = 0;
    thread.index = {unsigned(t % block.x), unsigned(t / block.x % block.y), unsigned(t / block.x / block.y)};
    prepare(thread.context, stacks[slot * thread_count + t], Stacks::bytes, entry);
  }
}

bool step(Block& b, size_t thread) {
  if (b.threads[thread].state != State::ready) return false;
  running.thread = int(thread);
  transfer(scheduler, b.threads[thread].context);
  running.thread = -1;
  return true;
}

// Forward and reverse run a warp as far as it gets before the next one; shuffled takes a step of every thread.
bool sweep(Block& b, std::vector<size_t>& sequence) {
  bool progress = false;
  if (order == Order::shuffled) {
    std::shuffle(sequence.begin(), sequence.end(), generator);
    for (const size_t thread : sequence)
      if (!failed) progress |= step(b, thread);
    return progress;
  }
  for (size_t warp = 0; warp < thread_count; warp += 32)
    for (bool moved = true; moved && !failed;) {
      moved = false;
      for (size_t i = warp; i < std::min(thread_count, warp + 32) && !failed; ++i) moved |= step(b, sequence[i]);
      progress |= moved;
    }
  return progress;
}

std::string state_of(const Thread& thread) {
  static const std::map<State, const char*> names = {
      {State::at_barrier, "__syncthreads"},   {State::at_warp, "a warp operation"},
      {State::at_cluster, "cluster_barrier"}, {State::at_warpgroup, "a warpgroup's operation"},
      {State::at_grid, "grid_barrier"},
  };
  if (thread.state == State::done) return "the end of the kernel";
  const auto name = names.find(thread.state);
  return (name == names.end() ? waits_for(thread) : name->second) + " at " + place_of(thread.site);
}

std::set<std::string> places(const Block& b) {
  std::set<std::string> sites;
  for (const Thread& thread : b.threads) sites.insert(state_of(thread));
  return sites;
}

bool all_at(const Block& b, State state) {
  return std::all_of(b.threads.begin(), b.threads.end(), [&](const Thread& t) { return t.state == state; });
}

void make_ready(Block& b) {
  checker::next_interval();
  order_block();
  for (Thread& thread : b.threads) thread.state = State::ready;
}

// Of a block where nothing can move: all stand at one barrier, or they wait for something else.
bool pass_barrier(size_t slot) {
  Block& b = gang[slot];
  if (!all_at(b, State::at_barrier) || places(b).size() > 1) return false;
  make_ready(b);
  return true;
}

bool pass_cluster_barrier(size_t slot) {
  if (slot % cluster) return false;
  for (size_t s = slot; s < slot + cluster; ++s)
    if (!all_at(gang[s], State::at_cluster)) return false;
  for (size_t s = slot; s < slot + cluster; ++s) enter(s), make_ready(gang[s]);
  order_cluster();
  return true;
}

bool pass_grid_barrier() {
  for (const Block& b : gang)
    if (!all_at(b, State::at_grid)) return false;
  checker::next_epoch();
  for (size_t slot = 0; slot < gang.size(); ++slot) enter(slot), make_ready(gang[slot]);
  return true;
}

// Where threads of one block stand at different barriers they diverged; else they wait for what never comes.
void report_deadlock() {
  std::map<int64_t, std::string> by_block;
  bool diverged = gang.size() == 1;
  for (size_t slot = 0; slot < gang.size(); ++slot) {
    enter(slot);
    const Block& b = gang[slot];
    for (const Thread& t : b.threads)
      diverged &= t.state != State::at_phase && t.state != State::at_registers && t.state < State::at_cluster;
    if (b.finished == thread_count) continue;
    std::string all;
    for (const auto& site : places(b)) all += (all.empty() ? "" : "; ") + site;
    by_block[b.number] = "threads of block " + place_of(b.at) +
                         (places(b).size() > 1 ? " wait for each other at different places: " : " wait at: ") + all;
  }
  std::string text;
  for (const auto& [number, said] : by_block)
    if (text.size() < 1500) text += (text.empty() ? "" : " | ") + said;
  checker::forget_code();
  fail((diverged ? "divergence: " : "deadlock: ") + text);
}

void run_gang(const std::vector<int64_t>& numbers) {
  gang.resize(numbers.size());
  std::vector<size_t> sequence(thread_count), slots(gang.size());
  for (size_t slot = 0; slot < gang.size(); ++slot) {
    start_block(slot, numbers[slot]);
    slots[slot] = slot;
  }
  for (size_t t = 0; t < thread_count; ++t) sequence[t] = order == Order::reverse ? thread_count - 1 - t : t;
  std::vector<std::vector<size_t>> sequences(gang.size(), sequence);
  const auto finished = [](const Block& b) { return b.finished == thread_count; };
  const auto each = [&](auto f) {
    bool progress = false;
    if (order == Order::shuffled) std::shuffle(slots.begin(), slots.end(), generator);
    for (const size_t slot : slots) {
      if (failed || finished(gang[slot])) continue;
      enter(slot);
      progress |= f(slot);
    }
    return progress;
  };
  while (!failed && !std::all_of(gang.begin(), gang.end(), finished)) {
    bool moved = each([&](size_t slot) {
      const bool progress = sweep(gang[slot], sequences[slot]);
      if (!failed && finished(gang[slot])) end_hopper_block();
      return progress;
    });
    moved = moved || each(pass_barrier) || each(pass_cluster_barrier) || (!failed && each(land_a_copy)) ||
            (!failed && pass_grid_barrier());
    if (!moved && !failed) report_deadlock();
  }
}

struct Launched {
  unsigned threads = 0;
  size_t shared_bytes = 0, count = 0;
};
std::map<const void*, Launched> launched;

bool is_valid(size_t shared_bytes) {
  const size_t threads = size_t(block.x) * block.y * block.z;
  return threads > 0 && threads <= max_threads && threads % 32 == 0 && grid.x > 0 && grid.y > 0 && grid.z > 0 &&
         grid.x < 1u << 31 && grid.y < 1u << 16 && grid.z < 1u << 16 && block.z <= 64 &&
         shared_bytes <= most_shared_bytes();
}

}  // namespace

Block& current() {
  return gang[size_t(running.slot)];
}
Block& block_at() {
  return gang[size_t(running.at)];
}
size_t cluster_size() {
  return cluster;
}
Elsewhere::Elsewhere(int rank) {
  if (rank < 0 || size_t(rank) >= cluster) report("no block %d in a cluster of %zu", rank, cluster);
  size_t slot = size_t(running.slot) / cluster * cluster;
  while (size_t(gang[slot].number) % cluster != size_t(rank)) ++slot;
  if (gang[slot].finished == thread_count) report("block %d of the cluster has ended", rank);
  checker::enter(slot);
}
Thread& self() {
  return current().threads[size_t(running.thread)];
}
uint3 thread_index() {
  return self().index;
}
uint3 block_index() {
  return current().at;
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

std::string place_of(const uint3& at) {
  return "(" + std::to_string(at.x) + ", " + std::to_string(at.y) + ", " + std::to_string(at.z) + ")";
}
std::string place_of(Site site) {
  return std::string(site.file) + ":" + std::to_string(site.line);
}

size_t choose(size_t count) {
  return order == Order::forward ? 0 : order == Order::reverse ? count - 1 : generator() % count;
}

void fail(const std::string& text) {
  message = text;
  failed = true;
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
  if (self().doing.line) {
    message += " at " + place_of(self().doing);
    checker::forget_code();
  }
  fail(message + " [block " + place_of(current().at) + ", thread " + place_of(self().index) + "]");
  yield();
  abort();  // nobody resumes a failed thread
}

void wait(State state, Site site) {
  self().state = state;
  self().site = site;
  yield();
}

void barrier(Site site) {
  wait(State::at_barrier, site);
}

void cluster_barrier(Site site) {
  wait(State::at_cluster, site);
}

void grid_barrier(Site site) {
  wait(State::at_grid, site);
}

void* dynamic_shared() {
  if (!current().dynamic) report("the launch gave no dynamic shared memory");
  return current().dynamic;
}

void* static_shared(const void* site, size_t bytes) {
  void*& variable = current().statics[site];
  if (!variable) {
    variable = checker::allocate_shared(bytes, 16, "static shared memory");
    current().static_bytes += bytes;
    if (dynamic_bytes > dynamic_shared_bytes(launched_kernel, current().static_bytes))
      report("%zu bytes of dynamic shared memory beside static memory were not asked for", dynamic_bytes);
  }
  return variable;
}

cudaError_t run(const void* kernel, dim3 grid_, dim3 block_, size_t shared_bytes, void (*thread)(const void*),
                const void* arguments, size_t argument_bytes, unsigned cluster_) {
  const bool together = cluster_ > 0;
  cluster = std::max(1u, cluster_);
  grid = grid_, block = block_, dynamic_bytes = shared_bytes, body = thread, body_arguments = arguments;
  launched_kernel = kernel;
  failed = false;
  thread_count = size_t(block.x) * block.y * block.z;
  if (!is_valid(shared_bytes)) {
    message = "invalid launch: grid " + place_of(uint3{grid.x, grid.y, grid.z}) + ", block of " +
              std::to_string(thread_count) + " threads, " + std::to_string(shared_bytes) + " bytes of shared memory";
    return cudaErrorInvalidConfiguration;
  }
  const int64_t blocks = int64_t(grid.x) * grid.y * grid.z;
  if (blocks % int64_t(cluster)) {
    message = "invalid launch: " + std::to_string(blocks) + " blocks are no whole clusters";
    return cudaErrorInvalidConfiguration;
  }
  if (together && blocks > resident_blocks(thread_count, shared_bytes)) {
    message = "invalid launch: " + std::to_string(blocks) + " blocks cannot all run at once";
    return cudaErrorCooperativeLaunchTooLarge;
  }
  Launched& record = launched[kernel];
  record.threads = std::max(record.threads, unsigned(thread_count));
  record.shared_bytes = std::max(record.shared_bytes, shared_bytes);
  ++record.count;
  if (dry) return cudaSuccess;
  const size_t at_once = together ? size_t(blocks) : 1;
  stacks.reserve(at_once * thread_count);
  checker::begin_launch(arguments, argument_bytes, at_once);
  std::vector<int64_t> numbers(static_cast<size_t>(blocks)), clusters(numbers.size() / cluster);
  std::iota(clusters.begin(), clusters.end(), 0);
  if (order == Order::shuffled) std::shuffle(clusters.begin(), clusters.end(), generator);
  for (size_t b = 0; b < numbers.size(); ++b)
    numbers[b] = clusters[b / cluster] * int64_t(cluster) + int64_t(b % cluster);
  if (order == Order::reverse) std::reverse(numbers.begin(), numbers.end());
  for (size_t b = 0; b < numbers.size() && !failed; b += at_once)
    run_gang({numbers.begin() + std::ptrdiff_t(b), numbers.begin() + std::ptrdiff_t(b + at_once)});
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
size_t cuda_emulation_launches(const void* kernel) {  // so far, dry ones too
  return launched[kernel].count;
}
}

}  // namespace cuda_emulation
