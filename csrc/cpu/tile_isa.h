// What tile_avx2.cpp and tile_avx512.cpp offer to the choice in tile_default.cpp.
#pragma once

#include "affine.h"
#include "gates.h"
#include "tile.h"

namespace torchgradx::cpu {

template <class acc_t>
Kernels<acc_t> avx2_kernels();
template <class acc_t>
Kernels<acc_t> avx512_kernels();
template <class acc_t>
AffineKernels<acc_t> avx2_affine_kernels();
template <class acc_t>
AffineKernels<acc_t> avx512_affine_kernels();
template <class T>
GateKernels<T> avx2_gate_kernels();
template <class T>
GateKernels<T> avx512_gate_kernels();

}  // namespace torchgradx::cpu
