// All that is compiled for one instruction set. tile_default.cpp chooses.
#pragma once

#include "affine.h"
#include "gates.h"
#include "tile.h"

namespace torchgradx::cpu {

template <class T>
struct Isa {
  Kernels<T> tiles;
  AffineKernels<T> affine;
  GateKernels<T> gates;
};

template <class T>
Isa<T> avx2_isa();
template <class T>
Isa<T> avx512_isa();

}  // namespace torchgradx::cpu
