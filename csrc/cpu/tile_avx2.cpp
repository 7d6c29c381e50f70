// Tiles for processors with AVX2 and FMA: 6 rows by two vectors, 12 of 16 registers.
#include "tile.h"

#if defined(__x86_64__)

#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx,avx2,fma,f16c,bmi,bmi2"))), apply_to = function)
#else
#pragma GCC target("avx,avx2,fma,f16c,bmi,bmi2")
#endif
#include "gates_body.h"

namespace torchgradx::cpu {

template <class T>
Kernels<T> avx2_kernels() {
  return make_kernels<T, 32, 6>();
}

template Kernels<float> avx2_kernels();
template Kernels<double> avx2_kernels();

}  // namespace torchgradx::cpu

#if defined(__clang__)
#pragma clang attribute pop
#endif
#endif
