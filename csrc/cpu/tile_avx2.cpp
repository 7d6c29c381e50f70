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

template <class T>
Isa<T> avx2_isa() {
  return make_isa<T, 32, 6>();
}

template Isa<float> avx2_isa();
template Isa<double> avx2_isa();

}  // namespace torchgradx::cpu

#if defined(__clang__)
#pragma clang attribute pop
#endif
#endif
