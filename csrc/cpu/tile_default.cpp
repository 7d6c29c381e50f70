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

enum class Processor { kAny, kAvx2, kAvx512 };

Processor processor() {
#if defined(__x86_64__)
  const std::string capability = at::get_cpu_capability();
  if (capability.rfind("AVX512", 0) == 0) return Processor::kAvx512;
  if (capability == "AVX2") return Processor::kAvx2;
#endif
  return Processor::kAny;
}

}  // namespace

template <class acc_t>
const Kernels<acc_t>& kernels() {
  static const Kernels<acc_t> chosen = [] {
#if defined(__x86_64__)
    if (processor() == Processor::kAvx512) return avx512_kernels<acc_t>();
    if (processor() == Processor::kAvx2) return avx2_kernels<acc_t>();
#endif
    return make_kernels<acc_t, 16 / sizeof(acc_t), 6>();
  }();
  return chosen;
}

template <class acc_t>
const AffineKernels<acc_t>& affine_kernels() {
  static const AffineKernels<acc_t> chosen = [] {
#if defined(__x86_64__)
    if (processor() == Processor::kAvx512) return avx512_affine_kernels<acc_t>();
    if (processor() == Processor::kAvx2) return avx2_affine_kernels<acc_t>();
#endif
    return make_affine_kernels<acc_t, 16 / sizeof(acc_t)>();
  }();
  return chosen;
}

template <class T>
const GateKernels<T>& gate_kernels() {
  static const GateKernels<T> chosen = [] {
#if defined(__x86_64__)
    if (processor() == Processor::kAvx512) return avx512_gate_kernels<T>();
    if (processor() == Processor::kAvx2) return avx2_gate_kernels<T>();
#endif
    return make_gate_kernels<T, 16 / sizeof(T)>();
  }();
  return chosen;
}

template const Kernels<float>& kernels();
template const Kernels<double>& kernels();
template const AffineKernels<float>& affine_kernels();
template const AffineKernels<double>& affine_kernels();
template const GateKernels<float>& gate_kernels();
template const GateKernels<double>& gate_kernels();

}  // namespace torchgradx::cpu
