// The PTX wrappers of csrc/cuda/device.cuh as they run on a CPU: the same names, fragment layouts and rules, read from
// the PTX manual. wrappers.cu holds each against a GPU's recorded answers, lane by lane.
#pragma once

#include "cuda_emulation.h"

namespace cuda_emulation {

void copy_async(void* shared, const void* global, size_t bytes, int valid_bytes);
void cp_async_commit();
void copy_async_wait(size_t left);
void load_matrices(uint32_t (&r)[4], const void* row, bool transposed, Site site);
void mma_bfloat16(float (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2], Site site);
void mma_float16(float (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2], Site site);
void mma_m16n8k8_tf32(float (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2], Site site = Site::here());
float decode_bfloat16(uint32_t bits);
float decode_float16(uint32_t bits);

}  // namespace cuda_emulation

namespace torchgradx::cuda {

using cuda_emulation::cp_async_commit;
using cuda_emulation::mma_m16n8k8_tf32;
using cuda_emulation::Site;

template <int bytes>
void cp_async(void* shared, const void* global, int valid_bytes = bytes) {
  cuda_emulation::copy_async(shared, global, bytes, valid_bytes);
}

template <int left>
void cp_async_wait() {
  cuda_emulation::copy_async_wait(left);
}

inline void ldmatrix_x4(uint32_t (&r)[4], const void* row, Site site = Site::here()) {
  cuda_emulation::load_matrices(r, row, false, site);
}

inline void ldmatrix_x4_trans(uint32_t (&r)[4], const void* row, Site site = Site::here()) {
  cuda_emulation::load_matrices(r, row, true, site);
}

template <class half_t>
void mma_m16n8k16(float (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2], Site site = Site::here()) {
  if constexpr (std::is_same_v<half_t, __nv_bfloat16>) {
    cuda_emulation::mma_bfloat16(d, a, b, site);
  } else {
    static_assert(std::is_same_v<half_t, __half>);
    cuda_emulation::mma_float16(d, a, b, site);
  }
}

// Ties away from zero in magnitude; what is not finite stays so.
inline uint32_t to_tf32(float value) {
  const uint32_t bits = __float_as_uint(value);
  return (bits & 0x7f800000u) == 0x7f800000u ? bits : (bits + 0x1000u) & ~0x1fffu;
}

}  // namespace torchgradx::cuda
