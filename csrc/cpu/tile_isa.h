// What tile_avx2.cpp and tile_avx512.cpp offer to the choice in tile_default.cpp.
#pragma once

#include "tile.h"

namespace torchgradx::cpu {

template <class acc_t>
Kernels<acc_t> avx2_kernels();
template <class acc_t>
Kernels<acc_t> avx512_kernels();

}  // namespace torchgradx::cpu
