// What the kernels need beyond C++: launches, shared memory, the PTX instructions, conversions and sums. The only file
// with asm. Under CUDA_EMULATION the first half comes from tests/emulation/ in another form, and g++ compiles the rest
// of a .cu as it stands; so a kernel keeps to these rules:
// - blocks of whole warps, masks of 0xffffffff, no return before a barrier, a shuffle or an mma: guard the work
// instead;
// - shared memory by DYNAMIC_SHARED or STATIC_SHARED, launches by launch();
// - half types through widen() and narrow(): torch builds without their operators.
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>
#include <map>
#include <mutex>
#include <type_traits>
#include <utility>

namespace torchgradx::cuda {

// Dynamic shared memory beyond 48 KB less the kernel's static memory must be asked for, on each device. All of it is,
// once a kernel, since that takes a good part of a launch's time. Captured graphs allow it.
inline cudaError_t allow_shared(const void* kernel, size_t bytes) {
  static std::mutex mutex;
  static std::map<std::pair<int, const void*>, size_t> allowed;
  int device = 0;
  const cudaError_t found = bytes ? cudaGetDevice(&device) : cudaSuccess;
  if (bytes == 0 || found != cudaSuccess) return found;
  const std::lock_guard<std::mutex> lock(mutex);
  size_t& most = allowed[{device, kernel}];
  if (bytes <= most) return cudaSuccess;
  const cudaError_t error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, int(bytes));
  if (error == cudaSuccess) most = bytes;
  return error;
}

}  // namespace torchgradx::cuda

#ifdef CUDA_EMULATION
#include "cuda_emulation.h"
#else
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

// type* name, at the launch's dynamic shared memory. One array of bytes under all types: extern __shared__ arrays of
// one name and two types do not compile.
#define DYNAMIC_SHARED(type, name)                                       \
  extern __shared__ __align__(128) unsigned char dynamic_shared_bytes[]; \
  type* const name = reinterpret_cast<type*>(dynamic_shared_bytes)

// STATIC_SHARED(float, tile, [32][33]), aligned for 16-byte accesses
#define STATIC_SHARED(type, name, dims) __shared__ __align__(16) type name dims

namespace torchgradx::cuda {

template <class... Parameters, class... Arguments>
cudaError_t launch(void (*kernel)(Parameters...), dim3 grid, dim3 block, size_t shared_bytes, cudaStream_t stream,
                   const Arguments&... arguments) {
  const cudaError_t error = allow_shared(reinterpret_cast<const void*>(kernel), shared_bytes);
  if (error != cudaSuccess) return error;
  // clang-format off: it takes >>> apart
  kernel<<<grid, block, shared_bytes, stream>>>(arguments...);
  // clang-format on
  return cudaGetLastError();
}

__device__ __forceinline__ uint32_t shared_address(const void* shared) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(shared));
}

// 16, 8 or 4 bytes from global to shared memory, asynchronously, both aligned to that size. Only the first valid_bytes
// are read, the others become zero: at 0 the global address only has to be aligned. 16 bytes go past L1 (.cg).
template <int bytes>
__device__ __forceinline__ void cp_async(void* shared, const void* global, int valid_bytes = bytes) {
  if constexpr (bytes == 16)
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;\n" ::"r"(shared_address(shared)), "l"(global),
                 "r"(valid_bytes)
                 : "memory");
  else
    asm volatile("cp.async.ca.shared.global [%0], [%1], %2, %3;\n" ::"r"(shared_address(shared)), "l"(global),
                 "n"(bytes), "r"(valid_bytes)
                 : "memory");
}

// Closes this thread's group of copies; a group may be empty, which keeps the count of a pipeline's tail right.
__device__ __forceinline__ void cp_async_commit() {
  asm volatile("cp.async.commit_group;\n" ::: "memory");
}

// Until at most `left` of this thread's groups are under way. What other threads copied is seen after a barrier.
template <int left>
__device__ __forceinline__ void cp_async_wait() {
  asm volatile("cp.async.wait_group %0;\n" ::"n"(left) : "memory");
}

// Four 8x8 matrices of 16-bit elements. Lane l names row l % 8 of matrix l / 8: 16 aligned bytes of shared memory.
// r[m] of lane l: matrix m, row l / 4, columns 2 (l % 4) (low half) and 2 (l % 4) + 1.
__device__ __forceinline__ void ldmatrix_x4(uint32_t (&r)[4], const void* row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];\n"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(shared_address(row))
               : "memory");
}

// The same matrices, transposed. r[m] of lane l: matrix m, column l / 4, rows 2 (l % 4) (low half) and 2 (l % 4) + 1.
__device__ __forceinline__ void ldmatrix_x4_trans(uint32_t (&r)[4], const void* row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];\n"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(shared_address(row))
               : "memory");
}

// D += A B for a warp: A [16, 16], B [16, 8] of half_t, D [16, 8] float32. With g = lane / 4 and p = lane % 4 (each
// register two neighbours along k, the first in the low half):
//   a[0] A[g][2p..]   a[1] A[g + 8][2p..]   a[2] A[g][2p + 8..]   a[3] A[g + 8][2p + 8..]
//   b[0] B[2p..][g]   b[1] B[2p + 8..][g]
//   d[0] D[g][2p]     d[1] D[g][2p + 1]     d[2] D[g + 8][2p]     d[3] D[g + 8][2p + 1]
// So of tiles stored k-major (as rows of T): ldmatrix_x4_trans gives A of four 8x8 in the order (k, m), (k, m + 8),
// (k + 8, m), (k + 8, m + 8), and B of two column groups in the order (k, n), (k + 8, n), (k, n + 8), (k + 8, n + 8).
#define MMA(shape, type)                                                                \
  asm volatile("mma.sync.aligned." shape ".row.col.f32." type "." type                  \
               ".f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};\n" \
               : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])                         \
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]))
template <class half_t>  // __nv_bfloat16 or __half
__device__ __forceinline__ void mma_m16n8k16(float (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]) {
  static_assert(std::is_same_v<half_t, __nv_bfloat16> || std::is_same_v<half_t, __half>);
  if constexpr (std::is_same_v<half_t, __half>)
    MMA("m16n8k16", "f16");
  else
    MMA("m16n8k16", "bf16");
}

// float32 rounded to the 10 bits of tf32, ties away from zero. An mma of tf32 would cut off what is not rounded.
__device__ __forceinline__ uint32_t to_tf32(float value) {
  uint32_t rounded;
  asm("cvt.rna.tf32.f32 %0, %1;\n" : "=r"(rounded) : "f"(value));
  return rounded;
}

// D += A B for a warp: A [16, 8], B [8, 8] of to_tf32, D [16, 8] float32. With g = lane / 4 and p = lane % 4:
//   a[0] A[g][p]   a[1] A[g + 8][p]   a[2] A[g][p + 4]   a[3] A[g + 8][p + 4]
//   b[0] B[p][g]   b[1] B[p + 4][g]   d as in mma_m16n8k16
__device__ __forceinline__ void mma_m16n8k8_tf32(float (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]) {
  MMA("m16n8k8", "tf32");
}
#undef MMA

}  // namespace torchgradx::cuda
#endif  // CUDA_EMULATION

namespace torchgradx::cuda {

// Elements that lie side by side, for one load or store.
template <class scalar_t, int kCount>
struct alignas(sizeof(scalar_t) * kCount) Vector {
  scalar_t at[kCount];
};

template <class scalar_t>
using accumulator = std::conditional_t<std::is_same_v<scalar_t, double>, double, float>;

__device__ __forceinline__ float widen(float value) {
  return value;
}
__device__ __forceinline__ double widen(double value) {
  return value;
}
__device__ __forceinline__ float widen(__half value) {
  return __half2float(value);
}
__device__ __forceinline__ float widen(__nv_bfloat16 value) {
  return __bfloat162float(value);
}

// An accumulator to scalar_t, rounded to nearest even.
template <class scalar_t>
__device__ __forceinline__ scalar_t narrow(accumulator<scalar_t> value) {
  if constexpr (std::is_same_v<scalar_t, __half>)
    return __float2half_rn(value);
  else if constexpr (std::is_same_v<scalar_t, __nv_bfloat16>)
    return __float2bfloat16_rn(value);
  else
    return value;
}

constexpr int warp_threads = 32;
constexpr unsigned full_warp = 0xffffffffu;

// The same bits in every lane, whatever the lane: each step adds the same two numbers on both sides.
template <class acc_t>
__device__ __forceinline__ acc_t warp_sum(acc_t value) {
#pragma unroll
  for (int distance = warp_threads / 2; distance; distance /= 2) value += __shfl_xor_sync(full_warp, value, distance);
  return value;
}

// Sum over the block in a fixed order, for thread 0 alone; blockDim.x of whole warps, y and z of 1. All threads call
// it, as often as they like: the barrier in front keeps the second call off what the first still reads.
template <class acc_t>
__device__ __forceinline__ acc_t block_sum(acc_t value) {
  STATIC_SHARED(acc_t, partial, [warp_threads]);
  value = warp_sum(value);
  __syncthreads();
  if (threadIdx.x % warp_threads == 0) partial[threadIdx.x / warp_threads] = value;
  __syncthreads();
  if (threadIdx.x >= warp_threads) return acc_t(0);
  return warp_sum(threadIdx.x < blockDim.x / warp_threads ? partial[threadIdx.x] : acc_t(0));
}

template <class index_t>
__host__ __device__ constexpr index_t ceil_div(index_t a, index_t b) {
  return (a + b - 1) / b;
}

}  // namespace torchgradx::cuda
