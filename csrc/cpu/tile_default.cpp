// Tiles for any processor (on x86: SSE2, which all have), and the choice among those compiled.
#include "tile.h"

#include <ATen/Version.h>

#include <string>

#include "gates_body.h"

namespace torchgradx::cpu {

template <class T>
const Kernels<T>& kernels() {
  static const Kernels<T> chosen = [] {
#if defined(__x86_64__)
    const std::string capability = at::get_cpu_capability();
    if (capability.rfind("AVX512", 0) == 0) return avx512_kernels<T>();
    if (capability == "AVX2") return avx2_kernels<T>();
#endif
    return make_kernels<T, 16, 6>();
  }();
  return chosen;
}

template const Kernels<float>& kernels();
template const Kernels<double>& kernels();

}  // namespace torchgradx::cpu
