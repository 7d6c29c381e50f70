// Every operator's schema, once, and the C++ call that reaches it through the dispatcher.
// Kernels register themselves at the foot of each backend's file; shapes are documented in ops.h.
#include "ops.h"
#include "pass.h"

#include <ATen/core/dispatch/Dispatcher.h>
#include <torch/extension.h>
#include <torch/library.h>

TORCH_LIBRARY(torchgradx, m) {
  m.def("rank1_sq_norms(Tensor activations, Tensor grad_output, bool bias) -> Tensor");
  m.def("gram_sq_norms(Tensor activations, Tensor grad_output, bool bias) -> Tensor");
  m.def("direct_sq_norms(Tensor activations, Tensor grad_output, bool bias) -> Tensor");
  m.def("bias_sq_norms(Tensor grad_output) -> Tensor");
  m.def("linear_fused(Tensor activations, Tensor grad_output, Tensor? scale, bool bias) -> (Tensor, Tensor, Tensor)");
  m.def(
      "conv2d_gram_sq_norms(Tensor input, Tensor grad_output, int[2] kernel_size, int[2] stride, int[2] padding, "
      "int[2] dilation, int groups, bool bias) -> Tensor");
  m.def(
      "conv2d_direct_sq_norms(Tensor input, Tensor grad_output, int[2] kernel_size, int[2] stride, int[2] padding, "
      "int[2] dilation, int groups, bool bias) -> Tensor");
  m.def(
      "conv2d_fused(Tensor input, Tensor grad_output, int[2] kernel_size, int[2] stride, int[2] padding, "
      "int[2] dilation, int groups, Tensor? scale, bool bias) -> (Tensor, Tensor, Tensor)");
}

namespace torchgradx {
namespace {

template <class Signature>
auto find(const char* name) {
  return c10::Dispatcher::singleton().findSchemaOrThrow(name, "").typed<Signature>();
}

using Norms = Tensor(const Tensor&, const Tensor&, bool);
using ConvNorms = Tensor(const Tensor&, const Tensor&, IntArrayRef, IntArrayRef, IntArrayRef, IntArrayRef, int64_t,
                         bool);

}  // namespace

Tensor rank1_sq_norms(const Tensor& activations, const Tensor& grad_output, bool bias) {
  static const auto op = find<Norms>("torchgradx::rank1_sq_norms");
  return op.call(activations, grad_output, bias);
}

Tensor gram_sq_norms(const Tensor& activations, const Tensor& grad_output, bool bias) {
  static const auto op = find<Norms>("torchgradx::gram_sq_norms");
  return op.call(activations, grad_output, bias);
}

Tensor direct_sq_norms(const Tensor& activations, const Tensor& grad_output, bool bias) {
  static const auto op = find<Norms>("torchgradx::direct_sq_norms");
  return op.call(activations, grad_output, bias);
}

Tensor bias_sq_norms(const Tensor& grad_output) {
  static const auto op = find<Tensor(const Tensor&)>("torchgradx::bias_sq_norms");
  return op.call(grad_output);
}

Fused linear_fused(const Tensor& activations, const Tensor& grad_output, const std::optional<Tensor>& scale,
                   bool bias) {
  using Signature = Fused(const Tensor&, const Tensor&, const std::optional<Tensor>&, bool);
  static const auto op = find<Signature>("torchgradx::linear_fused");
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

}  // namespace torchgradx

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  torchgradx::bind_pass(m);
  torchgradx::bind_capture(m);
}
