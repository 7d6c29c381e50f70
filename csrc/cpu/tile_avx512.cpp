// Tiles for processors with AVX-512: 14 rows by two vectors, 28 of 32 registers.
#include "tile.h"

#if defined(__x86_64__)

#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx,avx2,fma,f16c,bmi,bmi2,avx512f,avx512vl,avx512bw,avx512dq"))), \
                             apply_to = function)
#else
#pragma GCC target("avx,avx2,fma,f16c,bmi,bmi2,avx512f,avx512vl,avx512bw,avx512dq,prefer-vector-width=512")
#endif
#include "gates_body.h"

namespace torchgradx::cpu {

template <class T>
Kernels<T> avx512_kernels() {
  return make_kernels<T, 64, 14>();
}

template Kernels<float> avx512_kernels();
template Kernels<double> avx512_kernels();

}  // namespace torchgradx::cpu

#if defined(__clang__)
#pragma clang attribute pop
#endif
#endif
