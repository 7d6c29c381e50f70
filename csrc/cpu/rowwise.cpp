// rank1: |a|^2 |b|^2, the norm where a sample has one position; and the bias, |sum_t b_t|^2.
// One pass over the operands, bound by memory. Squares and their product in double, so neither factor can leave float's
// range.
#include "rowwise.h"

#include <torch/library.h>

namespace torchgradx::cpu {
namespace {

Tensor rank1_sq_norms(const Tensor& activations, const Tensor& grad_output, bool bias) {
  const RowShape s = check_rows(activations, grad_output);
  TORCHGRADX_CHECK(s.T <= 1, "rank1 needs activations [N, T, I] with T of 1 at most; got ", activations.sizes());
  return norm_results(activations, s.N, bias, grad_output.numel() == 0, [&](auto zero, const Tensor& sq_norms) {
    rank1_pass<decltype(zero)>(activations, grad_output, bias, sq_norms);
  });
}

Tensor bias_sq_norms(const Tensor& grad_output) {
  check_operand(grad_output, "grad_output", 3, "[N, T, O]");
  const int64_t N = grad_output.size(0);
  const Tensor both =
      norm_results(grad_output, N, true, grad_output.numel() == 0, [&](auto zero, const Tensor& sq_norms) {
        using acc_t = decltype(zero);
        bias_pass<acc_t>(Rows<acc_t>(grad_output, grad_output, false), nullptr, {}, sq_norms);
      });
  return both.select(0, 1).clone();  // a result of its own, not a row of another
}

}  // namespace
}  // namespace torchgradx::cpu

TORCH_LIBRARY_IMPL(torchgradx, CPU, m) {
  m.impl("rank1_sq_norms", torchgradx::cpu::rank1_sq_norms);
  m.impl("bias_sq_norms", torchgradx::cpu::bias_sq_norms);
}
