// Tiles for any processor (on x86: SSE2, which all have), and the choice among those compiled.
#include "tile.h"
#include "tile_isa.h"

#include <ATen/Version.h>

#include <string>

#include "tile_body.h"

#include "affine_body.h"

#include "gates_body.h"

namespace torchgradx::cpu {

namespace {

template <class T>
const Isa<T>& isa() {
  static const Isa<T> chosen = [] {
#if defined(__x86_64__)
    const std::string capability = at::get_cpu_capability();
    if (capability.rfind("AVX512", 0) == 0) return avx512_isa<T>();
    if (capability == "AVX2") return avx2_isa<T>();
#endif
    return make_isa<T, 16, 6>();
  }();
  return chosen;
}

}  // namespace

template <class T>
const Kernels<T>& kernels() {
  return isa<T>().tiles;
}

template <class T>
const AffineKernels<T>& affine_kernels() {
  return isa<T>().affine;
}

template <class T>
const GateKernels<T>& gate_kernels() {
  return isa<T>().gates;
}

template const Kernels<float>& kernels();
template const Kernels<double>& kernels();
template const AffineKernels<float>& affine_kernels();
template const AffineKernels<double>& affine_kernels();
template const GateKernels<float>& gate_kernels();
template const GateKernels<double>& gate_kernels();

}  // namespace torchgradx::cpu
