// What a malformed direct call must not do is crash the interpreter: every operator goes through one of these first.
// Each message names the argument, what was expected and what came. Python checks again, with friendlier words.
#pragma once

#include "ops.h"
#include "shapes.h"
#include "text.h"

#include <ATen/core/TensorBody.h>
#include <c10/util/safe_numerics.h>

namespace torchgradx {

// Sizes below these limits keep every product of two of them, and every offset computed from them, inside int64.
constexpr int64_t kMaxSize = int64_t(1) << 31, kMaxStep = int64_t(1) << 20, kMaxPatch = int64_t(1) << 31;

inline void check_operand(const Tensor& tensor, const char* name, int64_t dim, const char* letters) {
  TORCHGRADX_CHECK(tensor.defined(), name, " must be a tensor ", letters, "; got none");
  TORCHGRADX_CHECK(tensor.layout() == at::kStrided, name, " must be dense (strided); got layout ", tensor.layout());
  TORCHGRADX_CHECK(tensor.dim() == dim, name, " must be ", letters, "; got ", tensor.dim(), " dimensions, ",
                   tensor.sizes());
  const auto dtype = tensor.scalar_type();
  TORCHGRADX_CHECK(dtype == at::kFloat || dtype == at::kDouble || dtype == at::kBFloat16 || dtype == at::kHalf, name,
                   " must be float32, float64, bfloat16 or float16; got ", dtype);
  for (const auto size : tensor.sizes())
    TORCHGRADX_CHECK(size < kMaxSize, name, " must have sizes below 2^31; got ", tensor.sizes());
}

inline void check_alike(const Tensor& first, const char* first_name, const Tensor& second, const char* second_name) {
  TORCHGRADX_CHECK(first.scalar_type() == second.scalar_type(), second_name, " must have the dtype of ", first_name,
                   ", ", first.scalar_type(), "; got ", second.scalar_type());
  TORCHGRADX_CHECK(first.device() == second.device(), second_name, " must be on the device of ", first_name, ", ",
                   first.device(), "; got ", second.device());
}

inline void check_weight_fits(int64_t rows, int64_t columns) {
  uint64_t bytes = 0;
  const bool overflows = c10::mul_overflows(uint64_t(rows), uint64_t(columns), &bytes) || bytes > (uint64_t(1) << 58);
  TORCHGRADX_CHECK(!overflows, "the weight's gradient would have ", rows, " x ", columns,
                   " elements, more than can be indexed");
}

inline RowShape check_rows(const Tensor& activations,    // [N, T, I]
                           const Tensor& grad_output) {  // [N, T, O]
  check_operand(activations, "activations", 3, "[N, T, I]");
  check_operand(grad_output, "grad_output", 3, "[N, T, O]");
  const int64_t N = activations.size(0), T = activations.size(1);
  TORCHGRADX_CHECK(grad_output.size(0) == N && grad_output.size(1) == T, "grad_output must be [N, T, O] with N = ", N,
                   " and T = ", T, ", as activations are ", activations.sizes(), "; got ", grad_output.sizes());
  check_alike(activations, "activations", grad_output, "grad_output");
  check_weight_fits(grad_output.size(2), activations.size(2));
  return {N, T, activations.size(2), grad_output.size(2)};
}

inline void check_scale(const std::optional<Tensor>& scale, int64_t N, const Tensor& like) {
  if (!scale) return;
  check_operand(*scale, "scale", 1, "[N]");
  TORCHGRADX_CHECK(scale->size(0) == N, "scale must be [N] with N = ", N, "; got ", scale->sizes());
  TORCHGRADX_CHECK(scale->device() == like.device(), "scale must be on ", like.device(), "; got ", scale->device());
}

inline void check_pair(IntArrayRef pair, const char* name, int64_t least) {
  TORCHGRADX_CHECK(pair.size() == 2, name, " must be two integers; got ", pair);
  for (const auto value : pair)
    TORCHGRADX_CHECK(value >= least && value <= kMaxStep, name, " must be between ", least, " and 2^20; got ", pair);
}

inline void check_output_size(int64_t size, int64_t kernel, int64_t stride, int64_t padding, int64_t dilation,
                              int64_t got, const char* which) {
  const int64_t room = size + 2 * padding - dilation * (kernel - 1) - 1;
  const int64_t expected = room < 0 ? 0 : room / stride + 1;
  TORCHGRADX_CHECK(room >= 0 || got == 0, "kernel_size with dilation must fit the padded input's ", which, " of ",
                   size + 2 * padding, "; it spans ", dilation * (kernel - 1) + 1);
  TORCHGRADX_CHECK(got == expected, "grad_output must have ", which, " ", expected,
                   ", as input, kernel_size, stride, padding ", "and dilation have it; got ", got);
}

inline ConvShape check_conv2d(const Tensor& input,        // [N, C, H, W]
                              const Tensor& grad_output,  // [N, O, outH, outW]
                              const Geometry& g) {
  check_operand(input, "input", 4, "[N, C, H, W]");
  check_operand(grad_output, "grad_output", 4, "[N, O, H', W']");
  check_alike(input, "input", grad_output, "grad_output");
  check_pair(g.kernel_size, "kernel_size", 1);
  check_pair(g.stride, "stride", 1);
  check_pair(g.padding, "padding", 0);
  check_pair(g.dilation, "dilation", 1);
  const int64_t N = input.size(0), C = input.size(1), O = grad_output.size(1);
  TORCHGRADX_CHECK(grad_output.size(0) == N, "grad_output must be [N, O, H', W'] with N = ", N, ", as input is ",
                   input.sizes(), "; got ", grad_output.sizes());
  TORCHGRADX_CHECK(g.groups >= 1 && C % g.groups == 0 && O % g.groups == 0,
                   "groups must be positive and divide the channels of input, ", C, ", and of grad_output, ", O,
                   "; got ", g.groups);
  check_output_size(input.size(2), g.kernel_size[0], g.stride[0], g.padding[0], g.dilation[0], grad_output.size(2),
                    "height");
  check_output_size(input.size(3), g.kernel_size[1], g.stride[1], g.padding[1], g.dilation[1], grad_output.size(3),
                    "width");
  uint64_t patch = 0;
  const bool overflows =
      c10::mul_overflows(uint64_t(C / g.groups), uint64_t(g.kernel_size[0] * g.kernel_size[1]), &patch) ||
      patch > uint64_t(kMaxPatch);
  TORCHGRADX_CHECK(!overflows, "input's channels per group times kernel_size must be at most 2^31; got ", C / g.groups,
                   " times ", g.kernel_size);
  check_weight_fits(O, int64_t(patch));
  return {N,
          C,
          input.size(2),
          input.size(3),
          O,
          grad_output.size(2),
          grad_output.size(3),
          g.kernel_size[0],
          g.kernel_size[1],
          g.stride[0],
          g.stride[1],
          g.padding[0],
          g.padding[1],
          g.dilation[0],
          g.dilation[1],
          g.groups};
}

inline void check_indices(const Tensor& indices,                        // [N, T]
                          const Tensor& rows, const char* rows_name) {  // [N, T, D]
  TORCHGRADX_CHECK(indices.defined() && indices.layout() == at::kStrided && indices.dim() == 2,
                   "indices must be a dense tensor [N, T]; got ",
                   indices.defined() ? text(indices.layout(), " ", indices.sizes()) : "none");
  TORCHGRADX_CHECK(indices.scalar_type() == at::kInt || indices.scalar_type() == at::kLong,
                   "indices must be int32 or int64; got ", indices.scalar_type());
  TORCHGRADX_CHECK(indices.device() == rows.device(), "indices must be on the device of ", rows_name, ", ",
                   rows.device(), "; got ", indices.device());
  TORCHGRADX_CHECK(indices.size(0) == rows.size(0) && indices.size(1) == rows.size(1), "indices must be [N, T], as ",
                   rows_name, " is ", rows.sizes(), "; got ", indices.sizes());
}

inline RowShape check_gather_dots(const Tensor& indices, const Tensor& grad_rows, const Tensor& activations,
                                  const Tensor& grad_output) {
  const RowShape s = check_rows(activations, grad_output);
  check_operand(grad_rows, "grad_rows", 3, "[N, T, D]");
  check_alike(activations, "activations", grad_rows, "grad_rows");
  check_indices(indices, grad_rows, "grad_rows");
  TORCHGRADX_CHECK(grad_rows.size(0) == s.N && grad_rows.size(2) == s.I, "grad_rows must be [N, T, D] with N = ", s.N,
                   " and D = ", s.I, ", as activations are ", activations.sizes(), "; got ", grad_rows.sizes());
  return s;
}

inline void check_statistic(const std::optional<Tensor>& statistic, const char* name, const Tensor& input) {
  if (!statistic) return;
  check_operand(*statistic, name, 3, "[N, T, 1] or [N, 1, G]");
  const auto wide = accumulator_of(input);
  TORCHGRADX_CHECK(statistic->scalar_type() == wide, name, " must be ", wide, ", as sums over input are; got ",
                   statistic->scalar_type());
  TORCHGRADX_CHECK(statistic->device() == input.device(), name, " must be on the device of input, ", input.device(),
                   "; got ", statistic->device());
  const auto fits = [&](int64_t d) { return statistic->size(d) == 1 || statistic->size(d) == input.size(d); };
  TORCHGRADX_CHECK(fits(0) && fits(1) && fits(2) && (statistic->size(1) == 1 || input.size(2) == 1), name,
                   " must be [N, T, 1] if G = 1, or [N, 1, G], as input is ", input.sizes(), "; got ",
                   statistic->sizes());
}

inline void check_affine(const Tensor& input,                  // [N, T, G, K]
                         const Tensor& grad_output,            // [N, T, G, K]
                         const std::optional<Tensor>& mean,    // [N, T, 1] or [N, 1, G]
                         const std::optional<Tensor>& rstd) {  // likewise
  check_operand(input, "input", 4, "[N, T, G, K]");
  check_operand(grad_output, "grad_output", 4, "[N, T, G, K]");
  TORCHGRADX_CHECK(input.sizes() == grad_output.sizes(), "grad_output must have the shape of input, ", input.sizes(),
                   "; got ", grad_output.sizes());
  check_alike(input, "input", grad_output, "grad_output");
  check_weight_fits(input.size(2), input.size(3));
  check_statistic(mean, "mean", input);
  check_statistic(rstd, "rstd", input);
  TORCHGRADX_CHECK(!mean || (rstd && rstd->sizes() == mean->sizes()), "rstd must have the shape of mean, ",
                   mean->sizes(), "; got ", rstd ? rstd->sizes() : at::IntArrayRef());
}

inline void check_affine_weight(const Tensor& input, const Tensor& weight) {  // [N, T, G, K], [G, K] as ops.h says
  check_operand(weight, "weight", weight.dim(), "[G, K]");
  const int64_t G = input.size(2), K = input.size(3);
  const bool in_order = weight.dim() < 2 || G == 1 || weight.sizes() == input.sizes().slice(2);
  TORCHGRADX_CHECK(weight.numel() == G * K && in_order, "weight must be [G, K], as input is ", input.sizes(),
                   ", or [G K], or of K elements if G = 1; got ", weight.sizes());
  TORCHGRADX_CHECK((weight.scalar_type() == at::kDouble) == (input.scalar_type() == at::kDouble),
                   "weight must be float64 if input is, and only then; got ", weight.scalar_type(), " and ",
                   input.scalar_type());
  TORCHGRADX_CHECK(weight.device() == input.device(), "weight must be on the device of input, ", input.device(),
                   "; got ", weight.device());
}

inline void check_affine_by_sample(const Tensor& input, const Tensor& grad_output, const std::optional<Tensor>& weight,
                                   const std::optional<Tensor>& mean, const std::optional<Tensor>& rstd, bool frozen) {
  check_affine(input, grad_output, mean, rstd);
  if (!weight) return;
  check_affine_weight(input, *weight);
  TORCHGRADX_CHECK(frozen || rstd, "rstd must be given unless frozen; got none");
  TORCHGRADX_CHECK(frozen || rstd->size(0) == input.size(0), "rstd must have a row a sample, N = ", input.size(0),
                   ", unless frozen; got ", rstd->sizes());
  TORCHGRADX_CHECK(!frozen || !rstd || rstd->size(1) == 1, "rstd must be [N, 1, G] or [1, 1, G] if frozen; got ",
                   rstd->sizes());
}

}  // namespace torchgradx
