// The operators as C++ calls through the dispatcher. Schemas are in schemas.h; each backend registers its own kernels.
// Letters: N samples, T positions, I input features, O output features. sq_norms are float32, float64 for float64
// operands.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>

#include <algorithm>
#include <optional>
#include <tuple>

namespace torchgradx {

using at::IntArrayRef;
using at::Tensor;
using Fused = std::tuple<Tensor, Tensor, Tensor>;  // grad_weight, grad_bias [O] (or [0]), sq_norms [1 + bias, N]
using Scaled = std::tuple<Tensor, Tensor>;         // grad_weight, grad_bias as in Fused
using AffineFused = std::tuple<Tensor, Tensor, Tensor, Tensor>;  // grad_input, then as in Fused
using BySample = std::tuple<Tensor, Tensor, Tensor>;  // grad_input, sq_norms, gradients [1 + bias, N, P, G K]

struct Geometry {  // of a two-dimensional convolution
  IntArrayRef kernel_size, stride, padding, dilation;
  int64_t groups;
};

// The dtype in which sums over an operand are kept.
inline at::ScalarType accumulator_of(const Tensor& t) {
  return t.scalar_type() == at::kDouble ? at::kDouble : at::kFloat;
}

template <size_t n>
struct Name {
  char text[n];
  constexpr Name(const char (&from)[n]) {
    std::copy_n(from, n, text);
  }
};

// A function object that calls the operator of a name.
template <Name name, class Signature>
struct Operator;
template <Name name, class Result, class... Arguments>
struct Operator<name, Result(Arguments...)> {
  Result operator()(Arguments... arguments) const {
    static const auto op =
        c10::Dispatcher::singleton().findSchemaOrThrow(name.text, "").template typed<Result(Arguments...)>();
    return op.call(arguments...);
  }
};
#define OPERATOR(name, ...) inline constexpr Operator<"torchgradx::" #name, __VA_ARGS__> name

// Row 0 of every sq_norms is the weight's; row 1, there if `bias`, the bias's.
OPERATOR(rank1_sq_norms, Tensor(const Tensor& activations,  // [N, T, I] with T <= 1
                                const Tensor& grad_output,  // [N, T, O]
                                bool bias));                // -> [1 + bias, N]
OPERATOR(gram_sq_norms, Tensor(const Tensor& activations, const Tensor& grad_output, bool bias));
OPERATOR(direct_sq_norms, Tensor(const Tensor& activations, const Tensor& grad_output, bool bias));
OPERATOR(bias_sq_norms, Tensor(const Tensor& grad_output));  // [N, T, O] -> [N]
OPERATOR(
    linear_fused,
    Fused(const Tensor& activations, const Tensor& grad_output,
          // [N], weights each sample in the returned gradients, not in sq_norms; one of 0 is left out, nan included
          const std::optional<Tensor>& scale, bool bias));
// Samples of several lengths in one launch: n's rows are starts[n] to starts[n + 1], one at least and `longest` at
// most.
// -> [[O, I], [O], [1 + bias, N]], or without `weight` the last alone; nothing where no kernel takes them so.
OPERATOR(segments_fused, std::vector<Tensor>(const Tensor& activations,  // [rows, I]
                                             const Tensor& grad_output,  // [rows, O]
                                             const Tensor& starts,       // [N + 1] int32
                                             int64_t longest, bool weight, bool bias));
// The weighted gradients alone.
OPERATOR(linear_scaled, Scaled(const Tensor& activations, const Tensor& grad_output, const Tensor& scale, bool bias));

OPERATOR(conv2d_gram_sq_norms, Tensor(const Tensor& input,        // [N, C, H, W]
                                      const Tensor& grad_output,  // [N, O, H', W']
                                      IntArrayRef kernel_size, IntArrayRef stride, IntArrayRef padding,
                                      IntArrayRef dilation, int64_t groups, bool bias));
OPERATOR(conv2d_direct_sq_norms,
         Tensor(const Tensor& input, const Tensor& grad_output, IntArrayRef kernel_size, IntArrayRef stride,
                IntArrayRef padding, IntArrayRef dilation, int64_t groups, bool bias));
OPERATOR(conv2d_fused, Fused(const Tensor& input, const Tensor& grad_output, IntArrayRef kernel_size,
                             IntArrayRef stride, IntArrayRef padding, IntArrayRef dilation, int64_t groups,
                             const std::optional<Tensor>& scale, bool bias));
OPERATOR(conv2d_scaled,
         Scaled(const Tensor& input, const Tensor& grad_output, IntArrayRef kernel_size, IntArrayRef stride,
                IntArrayRef padding, IntArrayRef dilation, int64_t groups, const Tensor& scale, bool bias));

// Parameters that act element by element. Operands are [N, T, G, K]: T positions that share the parameters, which are
// [G, K]. The weight's gradient is sum_t b_nt f_nt, the bias's sum_t b_nt, with the feature f = xhat = (x - mean) rstd.
// Statistics are in the dtype that sums are kept in, [N, T, 1] (G = 1) or [N, 1, G]; any size may be 1 for all alike.
//
//   LayerNorm, RMSNorm (no mean)   [N, T, 1, D]       [N, T, 1]
//   GroupNorm                      [N, HW, G, C / G]  [N, 1, G]
//   InstanceNorm                   [N, HW, C, 1]      [N, 1, C]
//   BatchNorm in eval mode         [N, HW, C, 1]      [1, 1, C], frozen
//   a scale, gamma x               [N, T, D, 1]       none, frozen
OPERATOR(affine_sq_norms, Tensor(const Tensor& input,        // [N, T, G, K]
                                 const Tensor& grad_output,  // [N, T, G, K]
                                 const std::optional<Tensor>& mean, const std::optional<Tensor>& rstd, bool bias));
// grad_input = rstd (w b - m(w b) - xhat m(w b xhat)), m the mean over what the statistics are of: K, or T and K; the
// first m only if there is a mean, neither if the statistics are frozen, that is constants. Gradients as `input`'s
// dtype.
OPERATOR(affine_fused, AffineFused(const Tensor& input, const Tensor& grad_output,
                                   const Tensor& weight,  // [G, K] or [G K]; of any sizes if G = 1; so its gradients
                                   const std::optional<Tensor>& mean, const std::optional<Tensor>& rstd, bool frozen,
                                   const std::optional<Tensor>& scale,  // [N], as for linear_fused; not in grad_input
                                   bool bias));
// The samples' own gradients in place of their sum, each as the sum over P parts, in the dtype that sums are kept in.
OPERATOR(affine_by_sample,
         BySample(const Tensor& input, const Tensor& grad_output,
                  const std::optional<Tensor>& weight,  // as for affine_fused; without one grad_input is [0]
                  const std::optional<Tensor>& mean, const std::optional<Tensor>& rstd, bool frozen, bool bias));
// Those of one parameter [N, P, G K], added up: each sample times its scale [N]; one of 0 is left out, nan included.
OPERATOR(affine_sum, Tensor(const Tensor& gradients, const std::optional<Tensor>& scale, at::ScalarType dtype));
// f = min(x, 0): PReLU's, [N, T, 1, 1] or [N, HW, C, 1]
OPERATOR(prelu_sq_norms, Tensor(const Tensor& input, const Tensor& grad_output));  // -> [1, N]
OPERATOR(prelu_fused, Fused(const Tensor& input, const Tensor& grad_output, const Tensor& weight,
                            const std::optional<Tensor>& scale));  // -> grad_input, grad_weight, sq_norms [1, N]
// Statistics of input [N, T, G, K], over K (-> [N, T, G]) or T and K (-> [N, 1, G]): mean, and rstd = 1 / sqrt(v + eps)
// with v the variance; not centred: mean is [0], and v the mean square.
OPERATOR(moments, std::tuple<Tensor, Tensor>(const Tensor& input, double eps, bool centred, bool over_positions));

// input [N, R, C] as a contiguous tensor of its own.
OPERATOR(turned, Tensor(const Tensor& input));

// Tables of rows, looked up by id.
OPERATOR(gather_sq_norms, Tensor(const Tensor& indices,                 // [N, T], int32 or int64
                                 const Tensor& grad_output,             // [N, T, D]
                                 std::optional<int64_t> padding_idx));  // rows that count nothing

#undef OPERATOR

}  // namespace torchgradx
