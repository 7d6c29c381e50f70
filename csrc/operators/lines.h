// Which way operands [N, T, G, K] are read, and in what memory a result of theirs goes; the same on every backend.
#pragma once

#include "checks.h"
#include "ops.h"

#include <ATen/EmptyTensor.h>
#include <ATen/ops/empty_strided.h>
#include <torch/library.h>

namespace torchgradx {

// Whether (g, k) is contiguous, so that a position's features are a line.
inline bool rows_contiguous(const Tensor& t) {  // [N, T, G, K]
  return (t.size(3) == 1 || t.stride(3) == 1) && (t.size(2) == 1 || t.stride(2) == t.size(3));
}

inline bool lines_are_rows(const Tensor& t, bool by_row) {  // [N, T, G, K]
  if (by_row || t.size(1) <= 1) return true;
  return t.size(2) * t.size(3) > 1 && (rows_contiguous(t) || t.stride(1) != 1);
}

// For a result: dense, its lines those of `like`, samples outside positions or inside as there.
inline Tensor empty_in_lines(const Tensor& like, bool by_row) {  // [N, T, G, K]
  const int64_t N = like.size(0), T = like.size(1), G = like.size(2), K = like.size(3);
  const auto made = [&](IntArrayRef sizes, IntArrayRef strides) {
    return like.is_cpu() ? at::detail::empty_strided_cpu(sizes, strides, like.scalar_type())  // by no dispatcher
                         : at::empty_strided(sizes, strides, like.options());
  };
  if (!lines_are_rows(like, by_row)) return made(like.sizes(), {G * K * T, 1, K * T, T});
  if (like.stride(0) < like.stride(1)) return made(like.sizes(), {G * K, N * G * K, K, 1});
  return made(like.sizes(), {T * G * K, G * K, K, 1});
}

// Whether statistics are of each position's features.
inline bool is_by_row(const Tensor& input, const std::optional<Tensor>& rstd, bool frozen) {
  return rstd && !frozen && input.size(2) == 1 && rstd->size(1) == input.size(1);
}

// The operators of a backend that are but checks around its norms(input, grad_output, mean, rstd, negative, bias) and
// fused(input, grad_output, weight, mean, rstd, negative, frozen, scale, bias). negative: f = min(x, 0).
template <auto norms, auto fused>
void implement_affine(torch::Library& m) {
  using Maybe = const std::optional<Tensor>&;
  m.impl("affine_sq_norms", [](const Tensor& input, const Tensor& grad_output, Maybe mean, Maybe rstd, bool bias) {
    check_affine(input, grad_output, mean, rstd);
    return norms(input, grad_output, mean, rstd, false, bias);
  });
  m.impl("affine_fused", [](const Tensor& input, const Tensor& grad_output, const Tensor& weight, Maybe mean,
                            Maybe rstd, bool frozen, Maybe scale, bool bias) {
    check_affine_by_sample(input, grad_output, weight, mean, rstd, frozen);
    check_scale(scale, input.size(0), input);
    return fused(input, grad_output, weight, mean, rstd, false, frozen, scale, bias);
  });
  m.impl("prelu_sq_norms", [](const Tensor& input, const Tensor& grad_output) {
    check_affine(input, grad_output, {}, {});
    return norms(input, grad_output, {}, {}, true, false);
  });
  m.impl("prelu_fused", [](const Tensor& input, const Tensor& grad_output, const Tensor& weight, Maybe scale) {
    check_affine(input, grad_output, {}, {});
    check_affine_weight(input, weight);
    check_scale(scale, input.size(0), input);
    auto [grad_input, grad_weight, grad_bias, sq_norms] =
        fused(input, grad_output, weight, {}, {}, true, true, scale, false);
    return Fused{grad_input, grad_weight, sq_norms};
  });
}

}  // namespace torchgradx
