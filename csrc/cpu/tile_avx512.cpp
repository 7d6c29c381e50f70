// Tiles for processors with AVX-512: 14 rows by two vectors, 28 of 32 registers.
#include "tile_isa.h"

#if defined(__x86_64__)

#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx,avx2,fma,f16c,bmi,bmi2,avx512f,avx512vl,avx512bw,avx512dq"))), \
                             apply_to = function)
#else
#pragma GCC target("avx,avx2,fma,f16c,bmi,bmi2,avx512f,avx512vl,avx512bw,avx512dq,prefer-vector-width=512")
#endif
#include "tile_body.h"

#include "affine_body.h"

#include "gates_body.h"

namespace torchgradx::cpu {

template <class acc_t>
Kernels<acc_t> avx512_kernels() {
  return make_kernels<acc_t, 64 / sizeof(acc_t), 14>();
}

template Kernels<float> avx512_kernels();
template Kernels<double> avx512_kernels();

template <class acc_t>
AffineKernels<acc_t> avx512_affine_kernels() {
  return make_affine_kernels<acc_t, 64 / sizeof(acc_t)>();
}

template AffineKernels<float> avx512_affine_kernels();
template AffineKernels<double> avx512_affine_kernels();

template <class T>
GateKernels<T> avx512_gate_kernels() {
  return make_gate_kernels<T, 64 / sizeof(T)>();
}

template GateKernels<float> avx512_gate_kernels();
template GateKernels<double> avx512_gate_kernels();

}  // namespace torchgradx::cpu

#if defined(__clang__)
#pragma clang attribute pop
#endif
#endif
