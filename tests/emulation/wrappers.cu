// One small kernel for each function of device.cuh that stands for hardware: the same source on a GPU and emulated,
// word for word comparable. wrappers.py has their inputs and, from the PTX manual, what they must answer.
#include "device.cuh"

#include <cstring>

namespace torchgradx::cuda {
namespace {

using Words = const uint32_t*;

// 64 copies of `bytes`, of which thread i wants the first i % (bytes + 1).
template <int bytes>
__global__ void cp_async_kernel(Words in, uint32_t* out) {
  DYNAMIC_SHARED(uint32_t, tile);
  constexpr int words = bytes / 4;
  const int i = int(threadIdx.x), valid = i % (bytes + 1);
  cp_async<bytes>(tile + i * words, in + i * words, valid);
  cp_async_commit();
  cp_async_wait<0>();
  __syncthreads();
  for (int w = 0; w < words; ++w) out[i * words + w] = tile[i * words + w];
}

// in: 32 rows of 8 halves, then each lane's row.
template <bool transposed>
__global__ void ldmatrix_kernel(Words in, uint32_t* out) {
  DYNAMIC_SHARED(uint32_t, tile);
  const int lane = int(threadIdx.x);
  for (int w = 0; w < 4; ++w) tile[lane * 4 + w] = in[lane * 4 + w];
  __syncthreads();
  const uint32_t* const row = tile + in[128 + lane] * 4;
  uint32_t r[4];
  if constexpr (transposed)
    ldmatrix_x4_trans(r, row);
  else
    ldmatrix_x4(r, row);
  for (int m = 0; m < 4; ++m) out[lane * 4 + m] = r[m];
}

// in: ten words a lane, of A four, of B two, of D four.
template <class T>
__global__ void mma_kernel(Words in, uint32_t* out) {
  const Words mine = in + threadIdx.x * 10;
  uint32_t a[4], b[2];
  float d[4];
  for (int i = 0; i < 4; ++i) a[i] = mine[i], d[i] = __uint_as_float(mine[6 + i]);
  for (int i = 0; i < 2; ++i) b[i] = mine[4 + i];
  if constexpr (std::is_same_v<T, float>) {
    for (uint32_t& bits : a) bits = to_tf32(__uint_as_float(bits));
    for (uint32_t& bits : b) bits = to_tf32(__uint_as_float(bits));
    mma_m16n8k8_tf32(d, a, b);
  } else {
    mma_m16n8k16<T>(d, a, b);
  }
  for (int i = 0; i < 4; ++i) out[threadIdx.x * 4 + i] = __float_as_uint(d[i]);
}

__global__ void to_tf32_kernel(Words in, uint32_t* out) {
  out[threadIdx.x] = to_tf32(__uint_as_float(in[threadIdx.x]));
}

// Float32 to a half type and back.
template <class T>
__global__ void narrow_kernel(Words in, uint32_t* out) {
  out[threadIdx.x] = __float_as_uint(widen(narrow<T>(__uint_as_float(in[threadIdx.x]))));
}

__global__ void warp_sum_kernel(Words in, uint32_t* out) {
  out[threadIdx.x] = __float_as_uint(warp_sum(__uint_as_float(in[threadIdx.x])));
}

__global__ void block_sum_kernel(Words in, uint32_t* out) {
  const float sum = block_sum(__uint_as_float(in[threadIdx.x]));
  out[threadIdx.x] = threadIdx.x == 0 ? __float_as_uint(sum) : 0;
}

struct Wrapper {
  const char* name;
  void (*kernel)(Words, uint32_t*);
  unsigned threads, shared_bytes;
};

constexpr Wrapper kWrappers[] = {
    {"cp_async_16", cp_async_kernel<16>, 64, 1024},
    {"cp_async_8", cp_async_kernel<8>, 64, 512},
    {"cp_async_4", cp_async_kernel<4>, 64, 256},
    {"ldmatrix_x4", ldmatrix_kernel<false>, 32, 512},
    {"ldmatrix_x4_trans", ldmatrix_kernel<true>, 32, 512},
    {"mma_m16n8k16_bfloat16", mma_kernel<__nv_bfloat16>, 32, 0},
    {"mma_m16n8k16_float16", mma_kernel<__half>, 32, 0},
    {"mma_m16n8k8_tf32", mma_kernel<float>, 32, 0},
    {"to_tf32", to_tf32_kernel, 64, 0},
    {"narrow_bfloat16", narrow_kernel<__nv_bfloat16>, 64, 0},
    {"narrow_float16", narrow_kernel<__half>, 64, 0},
    {"warp_sum", warp_sum_kernel, 64, 0},
    {"block_sum", block_sum_kernel, 64, 0},
};

}  // namespace
}  // namespace torchgradx::cuda

extern "C" cudaError_t run_wrapper(const char* name, const uint32_t* in, uint32_t* out) {
  using namespace torchgradx::cuda;
  for (const Wrapper& w : kWrappers)
    if (!std::strcmp(name, w.name)) return launch(w.kernel, 1, w.threads, w.shared_bytes, nullptr, in, out);
  return cudaErrorInvalidValue;
}
