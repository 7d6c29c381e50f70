// gram for Linear: the squares of gram.h over rows as they lie.
#include "direct.h"
#include "row_gram.h"
#include "rows.h"

#include <torch/library.h>

namespace torchgradx::cpu {

Tensor gram_sq_norms(const Tensor& activations, const Tensor& grad_output, bool bias) {
  const RowShape s = check_rows(activations, grad_output);
  return norm_results(activations, s.N, bias, grad_output.numel() == 0, [&](auto zero, const Tensor& sq_norms) {
    using acc_t = decltype(zero);
    const Rows<acc_t> layer(activations, grad_output, false);
    gram_pass<acc_t>(RowSource<acc_t>(activations, grad_output), layer, s.T, sq_norms);
    if (bias) bias_pass<acc_t>(layer, nullptr, {}, sq_norms);
  });
}

}  // namespace torchgradx::cpu

TORCH_LIBRARY_IMPL(torchgradx, CPU, m) {
  m.impl("gram_sq_norms", torchgradx::cpu::gram_sq_norms);
}
