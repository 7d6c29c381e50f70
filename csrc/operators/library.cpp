// The operators' definition, and the C++ calls that reach them through the dispatcher.
// Kernels register themselves at the foot of each backend's file.
#include "ops.h"
#include "schemas.h"

#include <ATen/ATen.h>
#include <ATen/core/dispatch/Dispatcher.h>
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

template <class Signature>
auto find(const char* name) {
  return c10::Dispatcher::singleton().findSchemaOrThrow(name, "").typed<Signature>();
}

using ConvNorms = Tensor(const Tensor&, const Tensor&, IntArrayRef, IntArrayRef, IntArrayRef, IntArrayRef, int64_t,
                         bool);

}  // namespace

Tensor rank1_sq_norms(const Tensor& activations, const Tensor& grad_output, bool bias) {
  static const auto op = find<decltype(rank1_sq_norms)>("torchgradx::rank1_sq_norms");
  return op.call(activations, grad_output, bias);
}

Tensor gram_sq_norms(const Tensor& activations, const Tensor& grad_output, bool bias) {
  static const auto op = find<decltype(gram_sq_norms)>("torchgradx::gram_sq_norms");
  return op.call(activations, grad_output, bias);
}

Tensor direct_sq_norms(const Tensor& activations, const Tensor& grad_output, bool bias) {
  static const auto op = find<decltype(direct_sq_norms)>("torchgradx::direct_sq_norms");
  return op.call(activations, grad_output, bias);
}

Tensor bias_sq_norms(const Tensor& grad_output) {
  static const auto op = find<decltype(bias_sq_norms)>("torchgradx::bias_sq_norms");
  return op.call(grad_output);
}

Fused linear_fused(const Tensor& activations, const Tensor& grad_output, const std::optional<Tensor>& scale,
                   bool bias) {
  static const auto op = find<decltype(linear_fused)>("torchgradx::linear_fused");
  return op.call(activations, grad_output, scale, bias);
}

std::vector<Tensor> segments_fused(const Tensor& activations, const Tensor& grad_output, const Tensor& starts,
                                   int64_t longest, bool weight, bool bias) {
  static const auto op = find<decltype(segments_fused)>("torchgradx::segments_fused");
  return op.call(activations, grad_output, starts, longest, weight, bias);
}

Scaled linear_scaled(const Tensor& activations, const Tensor& grad_output, const Tensor& scale, bool bias) {
  static const auto op = find<decltype(linear_scaled)>("torchgradx::linear_scaled");
  return op.call(activations, grad_output, scale, bias);
}

Tensor conv2d_gram_sq_norms(const Tensor& input, const Tensor& grad_output, const Geometry& g, bool bias) {
  static const auto op = find<ConvNorms>("torchgradx::conv2d_gram_sq_norms");
  return op.call(input, grad_output, g.kernel_size, g.stride, g.padding, g.dilation, g.groups, bias);
}

Tensor conv2d_direct_sq_norms(const Tensor& input, const Tensor& grad_output, const Geometry& g, bool bias) {
  static const auto op = find<ConvNorms>("torchgradx::conv2d_direct_sq_norms");
  return op.call(input, grad_output, g.kernel_size, g.stride, g.padding, g.dilation, g.groups, bias);
}

Fused conv2d_fused(const Tensor& input, const Tensor& grad_output, const Geometry& g,
                   const std::optional<Tensor>& scale, bool bias) {
  using Signature = Fused(const Tensor&, const Tensor&, IntArrayRef, IntArrayRef, IntArrayRef, IntArrayRef, int64_t,
                          const std::optional<Tensor>&, bool);
  static const auto op = find<Signature>("torchgradx::conv2d_fused");
  return op.call(input, grad_output, g.kernel_size, g.stride, g.padding, g.dilation, g.groups, scale, bias);
}

Scaled conv2d_scaled(const Tensor& input, const Tensor& grad_output, const Geometry& g, const Tensor& scale,
                     bool bias) {
  using Signature = Scaled(const Tensor&, const Tensor&, IntArrayRef, IntArrayRef, IntArrayRef, IntArrayRef, int64_t,
                           const Tensor&, bool);
  static const auto op = find<Signature>("torchgradx::conv2d_scaled");
  return op.call(input, grad_output, g.kernel_size, g.stride, g.padding, g.dilation, g.groups, scale, bias);
}

Tensor affine_sq_norms(const Tensor& input, const Tensor& grad_output, const std::optional<Tensor>& mean,
                       const std::optional<Tensor>& rstd, bool bias) {
  static const auto op = find<decltype(affine_sq_norms)>("torchgradx::affine_sq_norms");
  return op.call(input, grad_output, mean, rstd, bias);
}

AffineFused affine_fused(const Tensor& input, const Tensor& grad_output, const Tensor& weight,
                         const std::optional<Tensor>& mean, const std::optional<Tensor>& rstd, bool frozen,
                         const std::optional<Tensor>& scale, bool bias) {
  static const auto op = find<decltype(affine_fused)>("torchgradx::affine_fused");
  return op.call(input, grad_output, weight, mean, rstd, frozen, scale, bias);
}

BySample affine_by_sample(const Tensor& input, const Tensor& grad_output, const std::optional<Tensor>& weight,
                          const std::optional<Tensor>& mean, const std::optional<Tensor>& rstd, bool frozen,
                          bool bias) {
  static const auto op = find<decltype(affine_by_sample)>("torchgradx::affine_by_sample");
  return op.call(input, grad_output, weight, mean, rstd, frozen, bias);
}

Tensor affine_sum(const Tensor& gradients, const std::optional<Tensor>& scale, at::ScalarType dtype) {
  static const auto op = find<decltype(affine_sum)>("torchgradx::affine_sum");
  return op.call(gradients, scale, dtype);
}

Tensor prelu_sq_norms(const Tensor& input, const Tensor& grad_output) {
  static const auto op = find<decltype(prelu_sq_norms)>("torchgradx::prelu_sq_norms");
  return op.call(input, grad_output);
}

Fused prelu_fused(const Tensor& input, const Tensor& grad_output, const Tensor& weight,
                  const std::optional<Tensor>& scale) {
  static const auto op = find<decltype(prelu_fused)>("torchgradx::prelu_fused");
  return op.call(input, grad_output, weight, scale);
}

std::tuple<Tensor, Tensor> moments(const Tensor& input, double eps, bool centred, bool over_positions) {
  static const auto op = find<decltype(moments)>("torchgradx::moments");
  return op.call(input, eps, centred, over_positions);
}

Tensor turned(const Tensor& input) {
  static const auto op = find<decltype(turned)>("torchgradx::turned");
  return op.call(input);
}

Tensor gather_sq_norms(const Tensor& indices, const Tensor& grad_output, std::optional<int64_t> padding_idx) {
  static const auto op = find<decltype(gather_sq_norms)>("torchgradx::gather_sq_norms");
  return op.call(indices, grad_output, padding_idx);
}

Tensor gather_dots(const Tensor& indices, const Tensor& grad_rows, const Tensor& activations, const Tensor& grad_output,
                   std::optional<int64_t> padding_idx) {
  static const auto op = find<decltype(gather_dots)>("torchgradx::gather_dots");
  return op.call(indices, grad_rows, activations, grad_output, padding_idx);
}

}  // namespace torchgradx

TORCH_LIBRARY_IMPL(torchgradx, CompositeExplicitAutograd, m) {
  m.impl("affine_sum", torchgradx::plain_affine_sum);
  m.impl("segments_fused", torchgradx::no_segments);
}
