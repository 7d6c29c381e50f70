// The operators' definition, and what serves where a device has no kernel.
// Kernels register themselves at the foot of each backend's file.
#include "ops.h"
#include "schemas.h"

#include <ATen/ATen.h>
#include <torch/library.h>

TORCH_LIBRARY(torchgradx, m) {
  torchgradx::define_operators(m);
}

namespace torchgradx {
namespace {

// On every device that has no kernel for it.
Tensor plain_affine_sum(const Tensor& gradients, const std::optional<Tensor>& scale, at::ScalarType dtype) {
  Tensor rows = gradients;  // [N, P, C]
  if (scale) {
    const Tensor factors = scale->to(rows.scalar_type()).view({-1, 1, 1});
    rows = at::mul(rows, factors).masked_fill_(factors == 0, 0);  // 0 times nan is nan
  }
  return rows.sum(at::IntArrayRef({0, 1})).to(dtype);
}

std::vector<Tensor> no_segments(const Tensor&, const Tensor&, const Tensor&, int64_t, bool, bool) {
  return {};
}

}  // namespace
}  // namespace torchgradx

TORCH_LIBRARY_IMPL(torchgradx, CompositeExplicitAutograd, m) {
  m.impl("affine_sum", torchgradx::plain_affine_sum);
  m.impl("segments_fused", torchgradx::no_segments);
}
