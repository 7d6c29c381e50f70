// Which thread knows what of the others, by vector clocks: every thread counts its own arrivals at mbarriers, and a
// wait hands on what those who arrived knew. So an order that only mbarriers make is told from luck. Units beyond
// the threads stand for hardware that works beside them. Threads are those of the running block, units those of the
// block whose shared memory is meant (running.at). Blocks of a cluster have their clocks together, which start with the
// first use of Hopper's instructions.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace cuda_emulation::clocks {

constexpr size_t most_barriers = 64;
constexpr int copies = 1024;                           // + a barrier's number: copies that it counts, by phase
constexpr int products = copies + int(most_barriers);  // + a warpgroup: its wgmma, by serial number

using Vector = std::vector<uint32_t>;

void begin(size_t slot, size_t threads);
void start();
uint32_t own();                        // the running thread's clock
bool knows(int unit, uint32_t clock);  // the running thread
bool knows(size_t thread, int unit, uint32_t clock);
// Of what some lanes of a warp did at that count of its __syncwarp: whether they have told the running thread since.
bool knows_of_warp(int warp, uint32_t epoch);
void learn(size_t thread, int unit, uint32_t clock);
void release(Vector& to);  // what the running thread has done up to here
void acquire(const Vector& from, size_t thread);
void set(Vector& of, int unit, uint32_t clock);

// Fences that show a thread's writes to copies and products.
void fence();
uint32_t fences();                                               // of the running thread, so far
bool fenced(int writer, uint32_t fences_before, size_t thread);  // one came after the write, and the thread knows

}  // namespace cuda_emulation::clocks
