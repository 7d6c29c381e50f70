// The linear operators that a pointwise convolution and a recurrent layer call.
#pragma once

#include "../ops.h"

namespace torchgradx::cpu {

// What several weights make of one grad_output [N, T, O] with none of them: the first leaves it here for the others.
struct SharedGrads {
  int64_t inputs;                // I, of all these weights together
  Tensor gram;                   // [N, tiles of row_gram.h]
  Tensor bias_grad, bias_norms;  // [O], [N]
};

Tensor direct_sq_norms(const Tensor& activations, const Tensor& grad_output, bool bias);
Tensor gram_sq_norms(const Tensor& activations, const Tensor& grad_output, bool bias);
Fused linear_fused(const Tensor& activations, const Tensor& grad_output, const std::optional<Tensor>& scale, bool bias,
                   SharedGrads* shared = nullptr);  // `shared` goes without a scale

}  // namespace torchgradx::cpu
