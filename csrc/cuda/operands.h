// Tensors as the launchers' operands: strides, and a copy or a view where a kernel wants another memory order; and
// their results.
#pragma once

#include "bindings.h"

#include <ATen/ops/empty.h>

#include <optional>

namespace torchgradx::cuda {

using at::MemoryFormat;

inline DenseOperand rows_of(const Tensor& t) {  // [N, T, features]
  return {t.const_data_ptr(), t.stride(0), t.stride(1), t.stride(2)};
}

inline ConvOperand planes_of(const Tensor& t) {  // [N, channels, height, width]
  return {t.const_data_ptr(), t.stride(0), t.stride(1), t.stride(2), t.stride(3)};
}

// Pixels at one distance from each other, so that they are positions: a copy for the rare view in which they are not.
inline Tensor evenly_spaced(const Tensor& t) {  // [N, O, H', W']
  const bool even = t.size(2) <= 1 || t.size(3) <= 1 || t.stride(2) == t.size(3) * t.stride(3);
  return even ? t : t.contiguous(t.suggest_memory_format());
}

struct Images {
  const Tensor input, grads;  // [N, C, H, W], [N, O, H', W'], pixels of the latter evenly spaced
};

// Kernels go along the same dimension of both, and along channels where they copy whole patches of halves: what lies
// otherwise is copied, as the framework does for its own.
inline Images in_one_order(const ConvShape& s, const Tensor& input, const Tensor& grads) {
  const auto last = [](const Tensor& t) { return t.suggest_memory_format() == MemoryFormat::ChannelsLast; };
  const bool mixed = s.C > 1 && s.O > 1 && last(input) != last(grads);
  const bool patches = s.groups == 1 && s.C % 8 == 0 && s.O % 8 == 0 && s.kH * s.kW > 1 && !last(input);
  const auto copied = [&](MemoryFormat format) { return Images{in_format(input, format), in_format(grads, format)}; };
  if (mixed || (patches && input.element_size() == 2))
    return copied(s.groups == 1 ? MemoryFormat::ChannelsLast : MemoryFormat::Contiguous);
  return {input, evenly_spaced(grads)};
}

inline Tensor rows_of_pixels(const Tensor& t) {  // [N, C, H, W] -> [N, HW, C]
  const Tensor even = evenly_spaced(t);
  return even.as_strided({t.size(0), t.size(2) * t.size(3), t.size(1)},
                         {even.stride(0), even.stride(t.size(3) > 1 ? 3 : 2), even.stride(1)});
}

// A convolution of 1 x 1 as a Linear of its pixels
inline std::optional<Rows> rows_of_images(const ConvShape& s, const Tensor& input, const Tensor& grads) {
  if (s.kH * s.kW > 1 || s.padH + s.padW > 0 || s.groups > 1) return std::nullopt;
  const Tensor met = s.strideH * s.strideW > 1
                         ? input.slice(2, 0, std::nullopt, s.strideH).slice(3, 0, std::nullopt, s.strideW)
                         : input;
  return Rows{rows_of_pixels(met), rows_of_pixels(grads)};
}

inline Conv2dProblem problem_of(const ConvShape& s, const Tensor& input, const Tensor& grad_output, const Run& run) {
  return {s, dtype_of(input), planes_of(input), planes_of(grad_output), run.device()};
}

inline LinearProblem problem_of(const Rows& rows, const Run& run) {
  const Tensor &a = rows.activations, &b = rows.grad_output;
  return {dtype_of(a), a.size(0), a.size(1), a.size(2), b.size(2), rows_of(a), rows_of(b), run.device()};
}

// Rows as images of one row each
inline Conv2dProblem images_of_rows(const Rows& rows, const Run& run) {
  const LinearProblem p = problem_of(rows, run);
  const auto line = [](const DenseOperand& x) { return ConvOperand{x.data, x.n, x.feature, 0, x.t}; };
  const ConvShape s{p.N, p.I, 1, p.T, p.O, 1, p.T, 1, 1, 1, 1, 0, 0, 1, 1, 1};
  return {s, p.dtype, line(p.activations), line(p.grad_output), p.device};
}

// Rows that begin at multiples of 16 bytes, as Hopper's copies want them: a copy where they do not.
inline Tensor aligned_rows(const Tensor& t) {  // [N, T, features]
  constexpr int64_t kPiece = 8;
  const bool aligned = t.stride(2) == 1 && t.stride(1) % kPiece == 0 && t.stride(0) % kPiece == 0 &&
                       reinterpret_cast<uintptr_t>(t.const_data_ptr()) % 16 == 0;
  if (aligned || t.element_size() != 2) return t;
  const int64_t pitch = (t.size(2) + kPiece - 1) / kPiece * kPiece;
  Tensor copy = at::empty({t.size(0), t.size(1), pitch}, t.options()).narrow(2, 0, t.size(2));
  copy.copy_(t);
  return copy;
}

// Patches that neither overlap nor leave pixels out, as rows of a Linear: [N, H'W', C kH kW].
inline Tensor rows_of_patches(const ConvShape& s, const Tensor& input) {
  return input.view({s.N, s.C, s.outH, s.kH, s.outW, s.kW})
      .permute({0, 2, 4, 1, 3, 5})
      .reshape({s.N, s.outH * s.outW, s.C * s.kH * s.kW});
}

// Results of operators, for bindings.cpp.

inline SqNorms rows_of_norms(const Tensor& sq_norms) {  // [1 + bias, N]
  char* const first = static_cast<char*>(sq_norms.mutable_data_ptr());
  return {first, sq_norms.size(0) > 1 ? first + sq_norms.size(1) * sq_norms.element_size() : nullptr};
}

// launches(run, sq_norms) unless there is nothing to add up.
template <class Launches>
Tensor norms(const Tensor& like, int64_t N, bool bias, bool empty, const Launches& launches) {
  const auto options = like.options().dtype(accumulator_of(like));
  if (empty) return at::zeros({1 + int64_t(bias), N}, options);
  const Tensor sq_norms = at::empty({1 + int64_t(bias), N}, options);
  launches(Run(like), rows_of_norms(sq_norms));
  return sq_norms;
}

// launches(run, gradients, sq_norms) unless there is nothing to add up. N of none: without norms.
template <class Launches>
Fused gradients_and_norms(const Tensor& like, IntArrayRef weight_sizes, std::optional<int64_t> N,
                          const std::optional<Tensor>& scale, bool bias, bool empty, const Launches& launches) {
  const auto make = [&](IntArrayRef sizes, const at::TensorOptions& options) {
    return empty ? at::zeros(sizes, options) : at::empty(sizes, options);
  };
  const auto wide = like.options().dtype(accumulator_of(like));
  const Tensor weight = make(weight_sizes, like.options()),
               grad_bias = make({bias ? weight_sizes[0] : 0}, like.options()),
               sq_norms = N ? make({1 + int64_t(bias), *N}, wide) : Tensor();
  if (empty) return {weight, grad_bias, sq_norms};
  const Tensor factors = scale ? scale->to(wide.dtype()).contiguous() : Tensor();
  launches(Run(like),
           Gradients{weight.mutable_data_ptr(), bias ? grad_bias.mutable_data_ptr() : nullptr,
                     scale ? factors.const_data_ptr() : nullptr},
           N ? rows_of_norms(sq_norms) : SqNorms{});
  return {weight, grad_bias, sq_norms};
}

}  // namespace torchgradx::cuda
