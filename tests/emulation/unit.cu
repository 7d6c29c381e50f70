// Kernels that are right, and the same kernels with one fault each: what test_emulation.py wants computed and reported.
// `fault` is a template parameter, so that the right kernel is free of the faulty one's code.
#include "device.cuh"

namespace torchgradx::cuda {
namespace {

constexpr int kThreads = 64;

// clang-format off
enum Fault { none, no_barrier, out_of_bounds, divergent, early_return, misaligned, overflow, between_blocks,
             uninitialised, partial_mask };
// clang-format on

template <Fault fault>
__global__ void reverse_kernel(const float* in, float* out, int) {
  STATIC_SHARED(float, tile, [kThreads]);
  const int i = int(threadIdx.x), last = kThreads - 1;
  if (fault == early_return && i == last) return;
  tile[i] = in[i];
  if (fault != no_barrier && (fault != divergent || i < 32)) __syncthreads();
  out[i] = tile[last - i];
}

// A second round overwrites what the first still reads, but for the barrier between them.
template <Fault fault>
__global__ void rotate_twice_kernel(const float* in, float* out, int) {
  STATIC_SHARED(float, tile, [kThreads]);
  const int i = int(threadIdx.x);
  float value = in[i];
  for (int round = 0; round < 2; ++round) {
    tile[i] = value;
    __syncthreads();
    value = tile[(i + 33) % kThreads];
    if (fault != no_barrier) __syncthreads();
  }
  out[i] = value;
}

template <Fault fault>
__global__ void swap_lanes_kernel(const float* in, float* out, int distance) {
  STATIC_SHARED(float, tile, [kThreads]);
  const int i = int(threadIdx.x);
  tile[i] = in[i];
  if (fault == none) __syncwarp();
  out[i] = tile[i ^ distance];
}

template <Fault fault>
__global__ void shared_kernel(const float* in, float* out, int n) {
  DYNAMIC_SHARED(float, tile);
  const int i = int(threadIdx.x);
  if (fault != uninitialised || i != 5) tile[i] = in[i];
  __syncthreads();
  out[i] = tile[fault == out_of_bounds ? i + n - kThreads + 1 : i];
}

template <Fault fault>
__global__ void global_kernel(const float* in, float* out, int n) {
  const int i = int(blockIdx.x * blockDim.x + threadIdx.x);
  if (i < n || fault == out_of_bounds) out[fault == between_blocks ? i % kThreads : i] = in[i];
}

__global__ void write_input_kernel(const float* in, float*, int) {
  const_cast<float*>(in)[threadIdx.x] = 0;
}

// Block 1 reads what block 0 has written in the same launch.
__global__ void read_other_block_kernel(const float* in, float* out, int) {
  const int i = int(threadIdx.x);
  if (blockIdx.x == 0)
    out[i] = in[i];
  else
    out[kThreads + i] = out[i];
}

template <Fault fault>
__global__ void vector_kernel(const float* in, float* out, int) {
  const int i = int(threadIdx.x);
  const float* const from = in + (fault == misaligned ? 1 : 0);
  if (i < kThreads / 4 - 1) reinterpret_cast<float4*>(out)[i] = reinterpret_cast<const float4*>(from)[i];
}

template <Fault fault>
__global__ void index_kernel(const float* in, float* out, int big) {
  const int i = int(threadIdx.x);
  out[i] = in[fault == overflow ? (i + big) * big % kThreads : i];
}

template <Fault fault>
__global__ void shuffle_kernel(const float* in, float* out, int) {
  const int i = int(threadIdx.x);
  float value = in[i];
  if (fault != divergent || i % 2 == 0) value = __shfl_xor_sync(fault == partial_mask ? 0xffffu : full_warp, value, 1);
  if (fault == divergent && i % 2) value = __shfl_xor_sync(full_warp, value, 1);
  out[i] = value;
}

__global__ void warp_functions_kernel(const float* in, float* out, int) {
  const int i = int(threadIdx.x);
  const float value = in[i];
  out[i] = __shfl_down_sync(full_warp, value, 4) + 1000 * __shfl_up_sync(full_warp, value, 1) +
           1e6f * __shfl_sync(full_warp, value, 3) + (__ballot_sync(full_warp, i % 2) == 0xaaaaaaaau ? 0.5f : 0.f);
}

__global__ void sums_kernel(const float* in, float* out, int) {
  const float first = block_sum(in[threadIdx.x]), second = block_sum(2 * in[threadIdx.x]);
  if (threadIdx.x == 0) out[blockIdx.x] = first + second;
  if (threadIdx.x == 33) out[gridDim.x + blockIdx.x] = first;
}

// cp.async of 64 floats as 16 copies of 16 bytes, four rounds into two buffers.
template <Fault fault, int left = 0>
__global__ void copy_kernel(const float* in, float* out, int valid_bytes) {
  DYNAMIC_SHARED(float, tile);
  const int i = int(threadIdx.x);
  if (i < kThreads / 4) cp_async<16>(tile + 4 * i + (fault == misaligned ? 1 : 0), in + 4 * i, valid_bytes);
  cp_async_commit();
  if (fault != uninitialised) cp_async_wait<left>();
  if (fault != no_barrier) __syncthreads();
  out[i] = tile[i];
}

__global__ void never_waited_kernel(const float* in, float* out, int) {
  DYNAMIC_SHARED(float, tile);
  cp_async<4>(tile + threadIdx.x, in + threadIdx.x);
  out[threadIdx.x] = in[threadIdx.x];
}

struct Case {
  const char* name;
  void (*kernel)(const float*, float*, int);
  int size, blocks;
};

#define RIGHT(kernel, size, blocks) {#kernel, kernel##_kernel<none>, size, blocks}
#define FAULT(kernel, fault, size, blocks) {#kernel "/" #fault, kernel##_kernel<fault>, size, blocks}
constexpr Case kCases[] = {
    // clang-format off
    RIGHT(reverse, 0, 1), FAULT(reverse, no_barrier, 0, 1), FAULT(reverse, divergent, 0, 1),
    FAULT(reverse, early_return, 0, 1), RIGHT(rotate_twice, 0, 1), FAULT(rotate_twice, no_barrier, 0, 1),
    RIGHT(swap_lanes, 1, 1), FAULT(swap_lanes, no_barrier, 1, 1),
    {"swap_lanes/across_warps", swap_lanes_kernel<none>, 32, 1},
    RIGHT(shared, kThreads, 1), FAULT(shared, out_of_bounds, kThreads, 1), FAULT(shared, uninitialised, kThreads, 1),
    RIGHT(global, kThreads, 2), FAULT(global, out_of_bounds, kThreads, 3),
    FAULT(global, between_blocks, 2 * kThreads, 2), {"global/write_input", write_input_kernel, 0, 1},
    {"global/read_other_block", read_other_block_kernel, 0, 2}, RIGHT(vector, 0, 1), FAULT(vector, misaligned, 0, 1),
    RIGHT(index, 1 << 20, 1), FAULT(index, overflow, 1 << 20, 1), RIGHT(shuffle, 0, 1),
    FAULT(shuffle, divergent, 0, 1), FAULT(shuffle, partial_mask, 0, 1),
    {"warp_functions", warp_functions_kernel, 0, 1}, {"sums", sums_kernel, 0, 2},
    RIGHT(copy, 16, 1), {"copy/part", copy_kernel<none>, 12, 1}, {"copy/nothing", copy_kernel<none>, 0, 1},
    {"copy/no_wait", copy_kernel<uninitialised>, 16, 1}, {"copy/wait_too_short", copy_kernel<none, 1>, 16, 1},
    FAULT(copy, no_barrier, 16, 1), FAULT(copy, misaligned, 16, 1), {"copy/never_waited", never_waited_kernel, 0, 1},
    // clang-format on
};

}  // namespace
}  // namespace torchgradx::cuda

extern "C" {

const char* unit_name(int which) {
  using torchgradx::cuda::kCases;
  return which < int(sizeof(kCases) / sizeof(kCases[0])) ? kCases[which].name : nullptr;
}

cudaError_t unit_launch(int which, const float* in, float* out, int threads, size_t shared_bytes) {
  using namespace torchgradx::cuda;
  const Case& c = kCases[which];
  return launch(c.kernel, unsigned(c.blocks), unsigned(threads), shared_bytes, nullptr, in, out, c.size);
}
}
