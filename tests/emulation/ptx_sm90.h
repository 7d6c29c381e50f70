// The PTX wrappers of csrc/cuda/device_sm90.cuh as they run on a CPU: the same names and rules, read from the PTX
// manual. What is asynchronous happens as late as it may, and is checked from its issue on (checker_async.cpp).
#pragma once

#include <cuda.h>

#include "cuda_emulation.h"

#define GRID_CONSTANT

namespace cuda_emulation {

uint32_t shared_address(const void* shared);
void barrier_init(uint64_t* barrier, uint32_t arrivals, Site site = Site::here());
void barrier_init_fence();
void barrier_expect(uint64_t* barrier, uint32_t bytes, Site site = Site::here());
void barrier_arrive(uint64_t* barrier, Site site = Site::here());
void barrier_arrive_at(uint64_t* barrier, int rank, Site site = Site::here());
void barrier_wait(uint64_t* barrier, uint32_t parity, Site site = Site::here());
void fence_async_shared();
void copy_box(void* shared, const CUtensorMap& map, uint64_t* barrier, const int (&at)[4], bool to_all, Site site);
void cluster_barrier(Site site = Site::here());

enum class Half { bfloat16, float16 };
void wgmma(float* d, int columns, Half half, uint64_t of_a, uint64_t of_b, bool adds, Site site);
void wgmma_fence(Site site = Site::here());
void wgmma_commit(Site site = Site::here());
void wgmma_wait(int left, Site site);
void change_registers(int registers, bool more, Site site);

}  // namespace cuda_emulation

namespace torchgradx::cuda {

using TensorMap = CUtensorMap;
using cuda_emulation::barrier_arrive;
using cuda_emulation::barrier_arrive_at;
using cuda_emulation::barrier_expect;
using cuda_emulation::barrier_init;
using cuda_emulation::barrier_init_fence;
using cuda_emulation::barrier_wait;
using cuda_emulation::cluster_barrier;
using cuda_emulation::fence_async_shared;
using cuda_emulation::grid_barrier;
using cuda_emulation::shared_address;
using cuda_emulation::wgmma_commit;
using cuda_emulation::wgmma_fence;

template <class... Parameters, class... Arguments>
cudaError_t launch_together(void (*kernel)(Parameters...), unsigned cluster, unsigned blocks, unsigned threads,
                            size_t shared_bytes, cudaStream_t, const Arguments&... arguments) {
  return launch_emulated(cluster, kernel, blocks, threads, shared_bytes, arguments...);
}

template <class... Parameters>
int resident_pairs(void (*)(Parameters...), unsigned threads, size_t shared_bytes) {
  return int(cuda_emulation::resident_blocks(threads, shared_bytes) / 2);
}

inline void copy_box(void* shared, const TensorMap& map, uint64_t* barrier, int x0, int x1, int x2, int x3,
                     Site site = Site::here()) {
  cuda_emulation::copy_box(shared, map, barrier, {x0, x1, x2, x3}, false, site);
}

inline void copy_box_to_both(void* shared, const TensorMap& map, uint64_t* barrier, int x0, int x1, int x2, int x3,
                             Site site = Site::here()) {
  cuda_emulation::copy_box(shared, map, barrier, {x0, x1, x2, x3}, true, site);
}

template <int left>
void wgmma_wait(Site site = Site::here()) {
  cuda_emulation::wgmma_wait(left, site);
}

template <int registers>
void keep(float (&)[registers]) {}

template <int columns, class half_t>
void wgmma(float (&d)[columns / 2], uint64_t of_a, uint64_t of_b, bool adds, Site site = Site::here()) {
  constexpr bool bfloat = std::is_same_v<half_t, __nv_bfloat16>;
  static_assert(bfloat || std::is_same_v<half_t, __half>);
  static_assert(columns % 8 == 0 && columns > 0 && columns <= 256);
  using cuda_emulation::Half;
  cuda_emulation::wgmma(d, columns, bfloat ? Half::bfloat16 : Half::float16, of_a, of_b, adds, site);
}

template <int registers>
void give_registers(Site site = Site::here()) {
  cuda_emulation::change_registers(registers, false, site);
}
template <int registers>
void take_registers(Site site = Site::here()) {
  cuda_emulation::change_registers(registers, true, site);
}

}  // namespace torchgradx::cuda
