// The linear operators that a pointwise convolution calls.
#pragma once

#include "../ops.h"

namespace torchgradx::cpu {

Tensor direct_sq_norms(const Tensor& activations, const Tensor& grad_output, bool bias);
Tensor gram_sq_norms(const Tensor& activations, const Tensor& grad_output, bool bias);
Fused linear_fused(const Tensor& activations, const Tensor& grad_output, const std::optional<Tensor>& scale, bool bias);

}  // namespace torchgradx::cpu
