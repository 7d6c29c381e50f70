// Every operator's schema, once: library.cpp defines them, and the tests' emulated backend in a namespace of its own.
// Shapes are documented in ops.h.
#pragma once

#include <torch/library.h>

namespace torchgradx {

inline void define_operators(torch::Library& m) {
  m.def("rank1_sq_norms(Tensor activations, Tensor grad_output, bool bias) -> Tensor");
  m.def("gram_sq_norms(Tensor activations, Tensor grad_output, bool bias) -> Tensor");
  m.def("direct_sq_norms(Tensor activations, Tensor grad_output, bool bias) -> Tensor");
  m.def("bias_sq_norms(Tensor grad_output) -> Tensor");
  m.def("linear_fused(Tensor activations, Tensor grad_output, Tensor? scale, bool bias) -> (Tensor, Tensor, Tensor)");
  m.def(
      "segments_fused(Tensor activations, Tensor grad_output, Tensor starts, int longest, bool weight, bool bias) "
      "-> Tensor[]");
  m.def("linear_scaled(Tensor activations, Tensor grad_output, Tensor scale, bool bias) -> (Tensor, Tensor)");
  m.def(
      "conv2d_gram_sq_norms(Tensor input, Tensor grad_output, int[2] kernel_size, int[2] stride, int[2] padding, "
      "int[2] dilation, int groups, bool bias) -> Tensor");
  m.def(
      "conv2d_direct_sq_norms(Tensor input, Tensor grad_output, int[2] kernel_size, int[2] stride, int[2] padding, "
      "int[2] dilation, int groups, bool bias) -> Tensor");
  m.def(
      "conv2d_fused(Tensor input, Tensor grad_output, int[2] kernel_size, int[2] stride, int[2] padding, "
      "int[2] dilation, int groups, Tensor? scale, bool bias) -> (Tensor, Tensor, Tensor)");
  m.def(
      "conv2d_scaled(Tensor input, Tensor grad_output, int[2] kernel_size, int[2] stride, int[2] padding, "
      "int[2] dilation, int groups, Tensor scale, bool bias) -> (Tensor, Tensor)");
  m.def("affine_sq_norms(Tensor input, Tensor grad_output, Tensor? mean, Tensor? rstd, bool bias) -> Tensor");
  m.def(
      "affine_fused(Tensor input, Tensor grad_output, Tensor weight, Tensor? mean, Tensor? rstd, bool frozen, "
      "Tensor? scale, bool bias) -> (Tensor, Tensor, Tensor, Tensor)");
  m.def(
      "affine_by_sample(Tensor input, Tensor grad_output, Tensor? weight, Tensor? mean, Tensor? rstd, bool frozen, "
      "bool bias) -> (Tensor, Tensor, Tensor)");
  m.def("affine_sum(Tensor gradients, Tensor? scale, ScalarType dtype) -> Tensor");
  m.def("prelu_sq_norms(Tensor input, Tensor grad_output) -> Tensor");
  m.def("prelu_fused(Tensor input, Tensor grad_output, Tensor weight, Tensor? scale) -> (Tensor, Tensor, Tensor)");
  m.def("moments(Tensor input, float eps, bool centred, bool over_positions) -> (Tensor, Tensor)");
  m.def("turned(Tensor input) -> Tensor");
  m.def("gather_sq_norms(Tensor indices, Tensor grad_output, int? padding_idx) -> Tensor");
  // [N]: <E_n, H_n>, with E_n the gradient of a table [V, D] looked up at indices [N, T], grad_rows [N, T, D], and H_n
  // that of a Linear of the same weight, of activations [N, S, D] and grad_output [N, S, V].
  m.def(
      "gather_dots(Tensor indices, Tensor grad_rows, Tensor activations, Tensor grad_output, int? padding_idx) "
      "-> Tensor");
}

}  // namespace torchgradx
