// Tiles for any processor (on x86: SSE2, which all have), and the choice among those compiled.
#include "tile.h"
#include "tile_isa.h"

#include <ATen/Version.h>

#include <string>

#include "tile_body.h"

namespace torchgradx::cpu {

template <class acc_t>
const Kernels<acc_t>& kernels() {
  static const Kernels<acc_t> chosen = [] {
    [[maybe_unused]] const std::string capability = at::get_cpu_capability();
#if defined(__x86_64__)
    if (capability.rfind("AVX512", 0) == 0) return avx512_kernels<acc_t>();
    if (capability == "AVX2") return avx2_kernels<acc_t>();
#endif
    return make_kernels<acc_t, 16 / sizeof(acc_t), 6>();
  }();
  return chosen;
}

template const Kernels<float>& kernels();
template const Kernels<double>& kernels();

}  // namespace torchgradx::cpu
