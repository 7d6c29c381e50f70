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

template <class T>
Isa<T> avx512_isa() {
  return make_isa<T, 64, 14>();
}

template Isa<float> avx512_isa();
template Isa<double> avx512_isa();

}  // namespace torchgradx::cpu

#if defined(__clang__)
#pragma clang attribute pop
#endif
#endif
