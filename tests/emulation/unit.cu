// Kernels that are right, and the same kernels with one fault each: what test_emulation.py wants computed and reported.
// `fault` is a template parameter, so that the right kernel is free of the faulty one's code.
#include "device.cuh"

namespace torchgradx::cuda {
namespace {

constexpr int kThreads = 64;

enum Fault {
  none,
  no_barrier,
  out_of_bounds,
  divergent,
  early_return,
  misaligned,
  overflow,
  between_blocks,
  uninitialised,
  partial_mask,
};

template <Fault fault>
__global__ void reverse_kernel(const float* in, float* out) {
  STATIC_SHARED(float, tile, [kThreads]);
  const int i = int(threadIdx.x), last = kThreads - 1;
  if (fault == early_return && i == last) return;
  tile[i] = in[i];
  if (fault != no_barrier && (fault != divergent || i < 32)) __syncthreads();
  out[i] = tile[last - i];
}

// A second round overwrites what the first still reads, but for the barrier between them.
template <Fault fault>
__global__ void rotate_twice_kernel(const float* in, float* out) {
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

__global__ void write_input_kernel(const float* in, float*) {
  const_cast<float*>(in)[threadIdx.x] = 0;
}

// Block 1 reads what block 0 has written in the same launch.
__global__ void read_other_block_kernel(const float* in, float* out) {
  const int i = int(threadIdx.x);
  if (blockIdx.x == 0)
    out[i] = in[i];
  else
    out[kThreads + i] = out[i];
}

template <Fault fault>
__global__ void vector_kernel(const float* in, float* out) {
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
__global__ void shuffle_kernel(const float* in, float* out) {
  const int i = int(threadIdx.x);
  float value = in[i];
  if (fault != divergent || i % 2 == 0) value = __shfl_xor_sync(fault == partial_mask ? 0xffffu : full_warp, value, 1);
  if (fault == divergent && i % 2) value = __shfl_xor_sync(full_warp, value, 1);
  out[i] = value;
}

__global__ void warp_functions_kernel(const float* in, float* out) {
  const int i = int(threadIdx.x);
  const float value = in[i];
  out[i] = __shfl_down_sync(full_warp, value, 4) + 1000 * __shfl_up_sync(full_warp, value, 1) +
           1e6f * __shfl_sync(full_warp, value, 3) + (__ballot_sync(full_warp, i % 2) == 0xaaaaaaaau ? 0.5f : 0.f);
}

__global__ void sums_kernel(const float* in, float* out) {
  const float first = block_sum(in[threadIdx.x]), second = block_sum(2 * in[threadIdx.x]);
  if (threadIdx.x == 0) out[blockIdx.x] = first + second;
  if (threadIdx.x == 33) out[gridDim.x + blockIdx.x] = first;
}

// cp.async of 64 floats as 16 copies of 16 bytes, four rounds into two buffers.
template <Fault fault, int left = 0>
__global__ void copy_kernel(const float* in, float* out, int valid_bytes) {
  DYNAMIC_SHARED(float, tile);
  const int i = int(threadIdx.x);
  if (i < kThreads / 4) cp_async_16(tile + 4 * i + (fault == misaligned ? 1 : 0), in + 4 * i, valid_bytes);
  cp_async_commit();
  if (fault != uninitialised) cp_async_wait<left>();
  if (fault != no_barrier) __syncthreads();
  out[i] = tile[i];
}

__global__ void never_waited_kernel(const float* in, float* out) {
  DYNAMIC_SHARED(float, tile);
  cp_async_4(tile + threadIdx.x, in + threadIdx.x);
  out[threadIdx.x] = in[threadIdx.x];
}

using Kernel = void (*)(const float*, float*);
using SizedKernel = void (*)(const float*, float*, int);

struct Case {
  const char* name;
  Kernel kernel;
  SizedKernel sized;
  int size, blocks;
};

constexpr Case kCases[] = {
    {"reverse", reverse_kernel<none>, nullptr, 0, 1},
    {"reverse/no_barrier", reverse_kernel<no_barrier>, nullptr, 0, 1},
    {"reverse/divergent", reverse_kernel<divergent>, nullptr, 0, 1},
    {"reverse/early_return", reverse_kernel<early_return>, nullptr, 0, 1},
    {"rotate_twice", rotate_twice_kernel<none>, nullptr, 0, 1},
    {"rotate_twice/no_barrier", rotate_twice_kernel<no_barrier>, nullptr, 0, 1},
    {"swap_lanes", nullptr, swap_lanes_kernel<none>, 1, 1},
    {"swap_lanes/no_barrier", nullptr, swap_lanes_kernel<no_barrier>, 1, 1},
    {"swap_lanes/across_warps", nullptr, swap_lanes_kernel<none>, 32, 1},
    {"shared", nullptr, shared_kernel<none>, kThreads, 1},
    {"shared/out_of_bounds", nullptr, shared_kernel<out_of_bounds>, kThreads, 1},
    {"shared/uninitialised", nullptr, shared_kernel<uninitialised>, kThreads, 1},
    {"global", nullptr, global_kernel<none>, kThreads, 2},
    {"global/out_of_bounds", nullptr, global_kernel<out_of_bounds>, kThreads, 3},
    {"global/between_blocks", nullptr, global_kernel<between_blocks>, 2 * kThreads, 2},
    {"global/write_input", write_input_kernel, nullptr, 0, 1},
    {"global/read_other_block", read_other_block_kernel, nullptr, 0, 2},
    {"vector", vector_kernel<none>, nullptr, 0, 1},
    {"vector/misaligned", vector_kernel<misaligned>, nullptr, 0, 1},
    {"index", nullptr, index_kernel<none>, 1 << 20, 1},
    {"index/overflow", nullptr, index_kernel<overflow>, 1 << 20, 1},
    {"shuffle", shuffle_kernel<none>, nullptr, 0, 1},
    {"shuffle/divergent", shuffle_kernel<divergent>, nullptr, 0, 1},
    {"shuffle/partial_mask", shuffle_kernel<partial_mask>, nullptr, 0, 1},
    {"warp_functions", warp_functions_kernel, nullptr, 0, 1},
    {"sums", sums_kernel, nullptr, 0, 2},
    {"copy", nullptr, copy_kernel<none>, 16, 1},
    {"copy/part", nullptr, copy_kernel<none>, 12, 1},
    {"copy/nothing", nullptr, copy_kernel<none>, 0, 1},
    {"copy/no_wait", nullptr, copy_kernel<uninitialised>, 16, 1},
    {"copy/wait_too_short", nullptr, copy_kernel<none, 1>, 16, 1},
    {"copy/no_barrier", nullptr, copy_kernel<no_barrier>, 16, 1},
    {"copy/misaligned", nullptr, copy_kernel<misaligned>, 16, 1},
    {"copy/never_waited", never_waited_kernel, nullptr, 0, 1},
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
  if (c.kernel) return launch(c.kernel, unsigned(c.blocks), unsigned(threads), shared_bytes, nullptr, in, out);
  return launch(c.sized, unsigned(c.blocks), unsigned(threads), shared_bytes, nullptr, in, out, c.size);
}
}
