// Tiles for processors with AVX2 and FMA: 6 rows by two vectors, 12 of 16 registers.
#include "tile_isa.h"

#if defined(__x86_64__)

#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx,avx2,fma,f16c,bmi,bmi2"))), apply_to = function)
#else
#pragma GCC target("avx,avx2,fma,f16c,bmi,bmi2")
#endif
#include "tile_body.h"

#include "affine_body.h"

#include "gates_body.h"

namespace torchgradx::cpu {

template <class acc_t>
Kernels<acc_t> avx2_kernels() {
  return make_kernels<acc_t, 32 / sizeof(acc_t), 6>();
}

template Kernels<float> avx2_kernels();
template Kernels<double> avx2_kernels();

template <class acc_t>
AffineKernels<acc_t> avx2_affine_kernels() {
  return make_affine_kernels<acc_t, 32 / sizeof(acc_t)>();
}

template AffineKernels<float> avx2_affine_kernels();
template AffineKernels<double> avx2_affine_kernels();

template <class T>
GateKernels<T> avx2_gate_kernels() {
  return make_gate_kernels<T, 32 / sizeof(T)>();
}

template GateKernels<float> avx2_gate_kernels();
template GateKernels<double> avx2_gate_kernels();

}  // namespace torchgradx::cpu

#if defined(__clang__)
#pragma clang attribute pop
#endif
#endif
