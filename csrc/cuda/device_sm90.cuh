// Hopper's own instructions (sm_90a): barriers that count bytes, copies of a tensor's boxes into shared memory,
// products of a warpgroup, and launches whose blocks run together, in clusters that reach each other's shared memory.
// Beside device.cuh the only file with asm. Under CUDA_EMULATION the first half comes from tests/emulation/ptx_sm90.h.
// Rules for a kernel, beyond device.cuh's:
// - a warpgroup is 128 threads from a multiple of 128 on; all of it calls wgmma and its fences together;
// - a stage of shared memory begins at a multiple of 1024 bytes, as the 128-byte swizzle wants;
// - what threads wrote to shared memory is seen by copies and wgmma only after fence_async_shared and a barrier.
#pragma once

#include "device.cuh"

#include <cuda.h>

#ifdef CUDA_EMULATION
#include "ptx_sm90.h"
#else
#include <cooperative_groups.h>

#define GRID_CONSTANT __grid_constant__

namespace torchgradx::cuda {

using TensorMap = CUtensorMap;

struct Together {  // a launch: blocks in clusters of so many
  cudaLaunchAttribute attributes[2];
  cudaLaunchConfig_t config{};

  Together(unsigned cluster, unsigned blocks, unsigned threads, size_t shared_bytes, cudaStream_t stream) {
    attributes[0].id = cudaLaunchAttributeCooperative, attributes[0].val.cooperative = 1;
    attributes[1].id = cudaLaunchAttributeClusterDimension, attributes[1].val.clusterDim = {cluster, 1, 1};
    config.gridDim = blocks, config.blockDim = threads, config.dynamicSmemBytes = shared_bytes, config.stream = stream;
    config.attrs = attributes, config.numAttrs = cluster > 1 ? 2 : 1;
  }
};

// A launch whose blocks are all resident, so that they may wait for each other by grid_barrier. Captured graphs allow
// it.
template <class... Parameters, class... Arguments>
cudaError_t launch_together(void (*kernel)(Parameters...), unsigned cluster, unsigned blocks, unsigned threads,
                            size_t shared_bytes, cudaStream_t stream, const Arguments&... arguments) {
  const cudaError_t error = allow_shared(reinterpret_cast<const void*>(kernel), shared_bytes);
  const Together launch(cluster, blocks, threads, shared_bytes, stream);
  return error == cudaSuccess ? cudaLaunchKernelEx(&launch.config, kernel, arguments...) : error;
}

// Return how many clusters of two blocks are resident at once: fewer than half the processors where some stand alone.
template <class... Parameters>
int resident_pairs(void (*kernel)(Parameters...), unsigned threads, size_t shared_bytes) {
  int count = 0;
  Together launch(2, 2, threads, shared_bytes, nullptr);
  launch.config.attrs = launch.attributes + 1, launch.config.numAttrs = 1;  // the cluster's alone
  if (allow_shared(reinterpret_cast<const void*>(kernel), shared_bytes) == cudaSuccess &&
      cudaOccupancyMaxActiveClusters(&count, kernel, &launch.config) == cudaSuccess)
    return count;
  cudaGetLastError();  // else the next launch would report it
  return 0;
}

// All threads of all blocks of a cluster.
__device__ __forceinline__ void cluster_barrier() {
  asm volatile("barrier.cluster.arrive.release;\nbarrier.cluster.wait.acquire;" ::: "memory");
}

__device__ __forceinline__ void grid_barrier() {
  cooperative_groups::this_grid().sync();
}

// Barriers (mbarrier): 8 bytes of shared memory. A phase ends when all its arrivals and all bytes it expects have come.

__device__ __forceinline__ void barrier_init(uint64_t* barrier, uint32_t arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared_address(barrier)), "r"(arrivals) : "memory");
}

// By the thread that has initialised barriers, before the __syncthreads that lets others use them.
__device__ __forceinline__ void barrier_init_fence() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

// An arrival that also expects `bytes` from copies.
__device__ __forceinline__ void barrier_expect(uint64_t* barrier, uint32_t bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(barrier)), "r"(bytes)
               : "memory");
}

__device__ __forceinline__ void barrier_arrive(uint64_t* barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(shared_address(barrier)) : "memory");
}

// At the barrier in the same place of another block of the cluster, by its number there; or of this one.
__device__ __forceinline__ void barrier_arrive_at(uint64_t* barrier, int rank) {
  asm volatile(
      "{\n.reg .b32 there;\nmapa.shared::cluster.u32 there, %0, %1;\n"
      "mbarrier.arrive.shared::cluster.b64 _, [there];\n}\n" ::"r"(shared_address(barrier)),
      "r"(rank)
      : "memory");
}

// Until the phase of this parity has ended; the first one's parity is 0. The one before the first counts as ended.
__device__ __forceinline__ void barrier_wait(uint64_t* barrier, uint32_t parity) {
  const uint32_t address = shared_address(barrier);
  uint32_t ended;
  do {
    asm volatile("{\n.reg .pred p;\nmbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;\nselp.b32 %0, 1, 0, p;\n}\n"
                 : "=r"(ended)
                 : "r"(address), "r"(parity)
                 : "memory");
  } while (!ended);
}

// By every thread that has written shared memory which a copy or a wgmma touches next, before the barrier between.
__device__ __forceinline__ void fence_async_shared() {
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

// The box of `map` at these coordinates, innermost first, into shared memory at a multiple of 1024 bytes: rows of 128
// bytes whose 16-byte pieces are exchanged by the swizzle (piece p of row r lies at p ^ r % 8). Coordinates outside of
// the tensor give zeros, and count for the barrier's bytes as all do.
__device__ __forceinline__ void copy_box(void* shared, const TensorMap& map, uint64_t* barrier, int x0, int x1, int x2,
                                         int x3) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4, %5, %6}], "
      "[%2];" ::"r"(shared_address(shared)),
      "l"(&map), "r"(shared_address(barrier)), "r"(x0), "r"(x1), "r"(x2), "r"(x3)
      : "memory");
}

// The same into both blocks of a cluster, at the same place, and for the barrier of each at the same place.
__device__ __forceinline__ void copy_box_to_both(void* shared, const TensorMap& map, uint64_t* barrier, int x0, int x1,
                                                 int x2, int x3) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster [%0], "
      "[%1, {%3, %4, %5, %6}], [%2], %7;" ::"r"(shared_address(shared)),
      "l"(&map), "r"(shared_address(barrier)), "r"(x0), "r"(x1), "r"(x2), "r"(x3), "h"(uint16_t(3))
      : "memory");
}

// Products of a warpgroup: D [64, columns] (+)= A B, with A [64, 16] and B [16, columns] in shared memory, both stored
// k-major: rows of 64 elements along m or n. With warp w of the group, g = lane / 4 and p = lane % 4, register 4 j + e
// of D is row 16 w + g + 8 (e / 2), column 8 j + 2 p + e % 2. Nothing of D may be touched between wgmma and wgmma_wait.

__device__ __forceinline__ void wgmma_fence() {
  asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}

__device__ __forceinline__ void wgmma_commit() {
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}

// Until at most `left` committed groups are under way.
template <int left>
__device__ __forceinline__ void wgmma_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(left) : "memory");
}

// Keeps the compiler from moving what it does with D across this place: it does not know that wgmma goes on.
template <int registers>
__device__ __forceinline__ void keep(float (&d)[registers]) {
#pragma unroll
  for (int i = 0; i < registers; ++i) asm volatile("" : "+f"(d[i])::"memory");
}

// clang-format off
#define REGISTERS_64                                                                                             \
  "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, %23, " \
  "%24, %25, %26, %27, %28, %29, %30, %31, %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, " \
  "%46, %47, %48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
#define REGISTERS_96                                                                                               \
  REGISTERS_64 ", %64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79, %80, %81, %82, " \
  "%83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95"
#define REGISTERS_128                                                                                               \
  REGISTERS_96 ", %96, %97, %98, %99, %100, %101, %102, %103, %104, %105, %106, %107, %108, %109, %110, %111, "      \
  "%112, %113, %114, %115, %116, %117, %118, %119, %120, %121, %122, %123, %124, %125, %126, %127"
#define INOUT_8(d, i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3]), "+f"(d[i + 4]), "+f"(d[i + 5]), \
                      "+f"(d[i + 6]), "+f"(d[i + 7])
#define INOUT_32(d, i) INOUT_8(d, i), INOUT_8(d, i + 8), INOUT_8(d, i + 16), INOUT_8(d, i + 24)
#define INOUT_64(d) INOUT_32(d, 0), INOUT_32(d, 32)
#define INOUT_96(d) INOUT_64(d), INOUT_32(d, 64)
#define INOUT_128(d) INOUT_96(d), INOUT_32(d, 96)
// a, b and add are the three operands after the registers
#define WGMMA(columns, registers, a, b, add, type)                                             \
  asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %" add ", 0;\n"                               \
               "wgmma.mma_async.sync.aligned.m64n" columns "k16.f32." type "." type " {"       \
               REGISTERS_##registers "}, %" a ", %" b ", p, 1, 1, 1, 1;\n}\n"                  \
               : INOUT_##registers(d) : "l"(of_a), "l"(of_b), "r"(int(adds)))
// clang-format on

// of_a, of_b: Descriptor::at; where !adds, D is overwritten.
template <int columns, class half_t>
__device__ __forceinline__ void wgmma(float (&d)[columns / 2], uint64_t of_a, uint64_t of_b, bool adds) {
  constexpr bool bfloat = std::is_same_v<half_t, __nv_bfloat16>;
  static_assert(bfloat || std::is_same_v<half_t, __half>);
  static_assert(columns == 128 || columns == 192 || columns == 256);
  if constexpr (columns == 128 && bfloat) WGMMA("128", 64, "64", "65", "66", "bf16");
  if constexpr (columns == 128 && !bfloat) WGMMA("128", 64, "64", "65", "66", "f16");
  if constexpr (columns == 192 && bfloat) WGMMA("192", 96, "96", "97", "98", "bf16");
  if constexpr (columns == 192 && !bfloat) WGMMA("192", 96, "96", "97", "98", "f16");
  if constexpr (columns == 256 && bfloat) WGMMA("256", 128, "128", "129", "130", "bf16");
  if constexpr (columns == 256 && !bfloat) WGMMA("256", 128, "128", "129", "130", "f16");
}

#undef WGMMA
#undef INOUT_128
#undef INOUT_96
#undef INOUT_64
#undef INOUT_32
#undef INOUT_8
#undef REGISTERS_128
#undef REGISTERS_96
#undef REGISTERS_64

// Registers of each thread of this warpgroup from here on: fewer, or more once another has given its own up.
template <int registers>
__device__ __forceinline__ void give_registers() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(registers));
}
template <int registers>
__device__ __forceinline__ void take_registers() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(registers));
}

}  // namespace torchgradx::cuda
#endif  // CUDA_EMULATION

namespace torchgradx::cuda {

// Address of an operand of wgmma, as copy_box has stored it: rows of 64 elements (128 bytes), eight to a group.
struct Descriptor {
  uint32_t low, high;

  // `between`: bytes from a block of 64 columns to the next one; `group`: from a group of eight rows to the next.
  __device__ __forceinline__ Descriptor(uint32_t address, uint32_t between, uint32_t group)
      : low((between >> 4) << 16 | (address & 0x3ffff) >> 4), high(group >> 4 | 1u << 30) {}

  __device__ __forceinline__ uint64_t at(uint32_t bytes) const {  // of the operand that begins so much later
    return uint64_t(high) << 32 | (low + (bytes >> 4));
  }
};

}  // namespace torchgradx::cuda
