// The linear operators that a pointwise convolution and a recurrent layer call.
#pragma once

#include "../operators/ops.h"

namespace torchgradx::cpu {

// Two weights with one grad_output [N, T, O], one after the other: what the first leaves for the second.
struct SharedGrads {
  Tensor activations;            // [N, T, I], of the second
  bool bias;                     // whether the second has one
  bool late;                     // its row t - 1 goes with position t, and zeros with the first
  Tensor gram;                   // [N, tiles of row_gram.h] of grad_output
  Tensor bias_grad, bias_norms;  // [O], [N]
  Tensor weight, sq_norms;       // [O, I], [1 + bias, N]: where both went together

  Fused second() const;  // in that case
};

Tensor direct_sq_norms(const Tensor& activations, const Tensor& grad_output, bool bias);
Fused linear_fused(const Tensor& activations, const Tensor& grad_output, const std::optional<Tensor>& scale, bool bias,
                   SharedGrads* shared = nullptr);  // `shared` goes without a scale
Scaled linear_scaled(const Tensor& activations, const Tensor& grad_output, const Tensor& scale, bool bias);

}  // namespace torchgradx::cpu
