// The operators as C++ calls. Schemas and the dispatcher hop are in library.cpp; each backend registers its own
// kernels. Letters: N samples, T positions, I input features, O output features. sq_norms are float32, float64 for
// float64 operands.
#pragma once

#include <ATen/core/Tensor.h>

#include <optional>
#include <tuple>

namespace torchgradx {

using at::IntArrayRef;
using at::Tensor;
using Fused = std::tuple<Tensor, Tensor, Tensor>;  // grad_weight, grad_bias [O] (or [0]), sq_norms [1 + bias, N]

struct Geometry {  // of a two-dimensional convolution
  IntArrayRef kernel_size, stride, padding, dilation;
  int64_t groups;
};

// Row 0 of every sq_norms is the weight's; row 1, there if `bias`, the bias's.
Tensor rank1_sq_norms(const Tensor& activations,  // [N, T, I] with T <= 1
                      const Tensor& grad_output,  // [N, T, O]
                      bool bias);                 // -> [1 + bias, N]
Tensor gram_sq_norms(const Tensor& activations, const Tensor& grad_output, bool bias);
Tensor direct_sq_norms(const Tensor& activations, const Tensor& grad_output, bool bias);
Tensor bias_sq_norms(const Tensor& grad_output);  // [N, T, O] -> [N]
Fused linear_fused(
    const Tensor& activations, const Tensor& grad_output,
    const std::optional<Tensor>& scale,  // [N], weights each sample in the returned gradients, not in sq_norms
    bool bias);

Tensor conv2d_gram_sq_norms(const Tensor& input,        // [N, C, H, W]
                            const Tensor& grad_output,  // [N, O, H', W']
                            const Geometry& geometry, bool bias);
Tensor conv2d_direct_sq_norms(const Tensor& input, const Tensor& grad_output, const Geometry& geometry, bool bias);
Fused conv2d_fused(const Tensor& input, const Tensor& grad_output, const Geometry& geometry,
                   const std::optional<Tensor>& scale, bool bias);

}  // namespace torchgradx
