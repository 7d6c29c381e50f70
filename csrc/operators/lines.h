// Which way operands [N, T, G, K] are read, and in what memory a result of theirs goes; the same on every backend.
#pragma once

#include "ops.h"

#include <ATen/EmptyTensor.h>
#include <ATen/ops/empty_strided.h>

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

}  // namespace torchgradx
