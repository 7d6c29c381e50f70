// The operators on parameters that act element by element, and on tables, for CUDA tensors. As in bindings.cpp.
#include "../operators/lines.h"
#include "operands.h"

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/sort.h>

namespace torchgradx::cuda {
namespace {

using OptionalTensor = std::optional<Tensor>;

ElementOperand elements_of(const Tensor& t) {  // [N, T, G, K]
  return {t.const_data_ptr(), t.stride(0), t.stride(1), t.stride(2), t.stride(3)};
}

// Lanes go along the memory of the input: what lies the other way round would be read a sector a number.
Tensor lying_as(const Tensor& t, const Tensor& input) {  // [N, T, G, K]
  const auto by_position = [](const Tensor& x) {
    return x.size(1) > 1 && x.stride(1) < x.stride(x.size(3) > 1 ? 3 : 2);
  };
  const int64_t N = t.size(0), T = t.size(1), G = t.size(2), K = t.size(3), C = G * K, s = t.stride(K > 1 ? 3 : 2);
  if (C == 1 || T == 1 || by_position(t) == by_position(input)) return t;
  const bool joint = G == 1 || K == 1 || t.stride(2) == K * t.stride(3);
  if (joint && by_position(t)) {
    const Tensor rows = viewed(t, {N, T, C}, {t.stride(0), t.stride(1), s});
    if (turns(rows)) return viewed(turned(rows), t.sizes(), {T * C, C, K, 1});
  } else if (joint) {
    const Tensor planes = viewed(t, {N, C, T}, {t.stride(0), s, t.stride(1)});
    if (turns(planes)) return viewed(turned(planes), t.sizes(), {T * C, 1, K * T, T});
  }
  return at::empty_like(input).copy_(t);
}

Statistic statistic_of(const OptionalTensor& t) {  // [N, T or 1, G], each of which may be 1
  if (!t) return {};
  const auto along = [&](int64_t d) { return t->size(d) == 1 ? 0 : t->stride(d); };
  return {t->const_data_ptr(), along(0), along(1), along(2)};
}

AffineProblem problem_of(const Tensor& input, const Tensor& grad_output, const OptionalTensor& mean,
                         const OptionalTensor& rstd, bool negative) {
  return {dtype_of(input),
          input.size(0),
          input.size(1),
          input.size(2),
          input.size(3),
          elements_of(input),
          elements_of(grad_output),
          statistic_of(mean),
          statistic_of(rstd),
          negative};
}

void run_affine(const Run& run, const AffineProblem& p, const InputGradient& to, const AffineResults& results) {
  run("affine",
      [&](Workspace& workspace, cudaStream_t stream) { return launch_affine(p, to, results, workspace, stream); });
}

Tensor affine_norms(const Tensor& input, const Tensor& grad_output, const OptionalTensor& mean,
                    const OptionalTensor& rstd, bool negative, bool bias) {
  return norms(input, input.size(0), bias, input.numel() == 0, [&](const Run& run, const SqNorms& sq_norms) {
    const Tensor grads = lying_as(grad_output, input);
    run_affine(run, problem_of(input, grads, mean, rstd, negative), {}, {sq_norms.weight, bias, {}, nullptr});
  });
}

// And the weight that it points to.
std::pair<InputGradient, Tensor> input_gradient(const AffineProblem& p, const Tensor& grad_input, const Tensor& weight,
                                                bool frozen, bool by_row) {
  InputGradient to{elements_of(grad_input), nullptr, dtype_of(weight), frozen, by_row};
  const Tensor weights =
      (affine_reads_weight(p, to) && weight.element_size() == 2 ? weight : weight.to(accumulator_of(grad_input)))
          .contiguous();
  to.weight = weights.const_data_ptr();
  return {to, weights};
}

AffineFused affine_fused(const Tensor& input, const Tensor& grad_output, const Tensor& weight,
                         const OptionalTensor& mean, const OptionalTensor& rstd, bool negative, bool frozen,
                         const OptionalTensor& scale, bool bias) {
  const bool by_row = is_by_row(input, rstd, frozen), empty = input.numel() == 0;
  const auto make = [&](IntArrayRef sizes, const at::TensorOptions& options) {
    return empty ? at::zeros(sizes, options) : at::empty(sizes, options);
  };
  const auto wide = input.options().dtype(accumulator_of(input));
  const Tensor grad_input = empty_in_lines(input, by_row), grad_weight = make(weight.sizes(), weight.options()),
               grad_bias = bias ? make(weight.sizes(), weight.options()) : at::empty({0}, weight.options()),
               sq_norms = make({1 + int64_t(bias), input.size(0)}, wide);
  if (empty) return {grad_input, grad_weight, grad_bias, sq_norms};
  const Tensor factors = scale ? scale->to(wide.dtype()).contiguous() : Tensor();
  const Run run(input);
  const Tensor grads = lying_as(grad_output, input);
  const AffineProblem p = problem_of(input, grads, mean, rstd, negative);
  const auto [to, weights] = input_gradient(p, grad_input, weight, frozen, by_row);
  const Gradients gradients{grad_weight.mutable_data_ptr(), bias ? grad_bias.mutable_data_ptr() : nullptr,
                            scale ? factors.const_data_ptr() : nullptr};
  run_affine(run, p, to, {sq_norms.mutable_data_ptr(), bias, gradients, nullptr});
  return {grad_input, grad_weight, grad_bias, sq_norms};
}

BySample affine_by_sample(const Tensor& input, const Tensor& grad_output, const OptionalTensor& weight,
                          const OptionalTensor& mean, const OptionalTensor& rstd, bool frozen, bool bias) {
  check_affine_by_sample(input, grad_output, weight, mean, rstd, frozen);
  const auto wide = input.options().dtype(accumulator_of(input));
  const bool by_row = is_by_row(input, rstd, frozen);
  const int64_t N = input.size(0), C = input.size(2) * input.size(3);
  const Tensor grad_input = weight ? empty_in_lines(input, by_row) : at::empty({0}, input.options());
  if (input.numel() == 0)
    return {grad_input, at::zeros({1 + int64_t(bias), N}, wide), at::zeros({1 + int64_t(bias), N, 1, C}, wide)};
  const Run run(input);
  const Tensor grads = lying_as(grad_output, input);
  const AffineProblem p = problem_of(input, grads, mean, rstd, false);
  const auto [to, weights] =
      weight ? input_gradient(p, grad_input, *weight, frozen, by_row) : std::pair<InputGradient, Tensor>();
  const Tensor sq_norms = at::empty({1 + int64_t(bias), N}, wide),
               gradients = at::empty({2, N, affine_parts(p, to), C}, wide);
  run_affine(run, p, to, {sq_norms.mutable_data_ptr(), bias, {}, gradients.mutable_data_ptr()});
  return {grad_input, sq_norms, gradients.narrow(0, 0, 1 + int64_t(bias))};
}

Tensor affine_sum(const Tensor& gradients, const OptionalTensor& scale, at::ScalarType dtype) {
  check_operand(gradients, "gradients", 3, "[N, P, G K]");
  check_scale(scale, gradients.size(0), gradients);
  const int64_t N = gradients.size(0), P = gradients.size(1), C = gradients.size(2);
  const Tensor rows = gradients.contiguous(), sum = at::empty({C}, rows.options().dtype(dtype));
  if (rows.numel() == 0) return sum.zero_();
  const Tensor factors = scale ? scale->to(rows.scalar_type()).contiguous() : Tensor();
  const Run run(rows);
  run("sum", [&](cudaStream_t stream) {
    return launch_sum_rows(dtype_of(sum), rows.const_data_ptr(), scale ? factors.const_data_ptr() : nullptr, N * P, C,
                           sum.mutable_data_ptr(), stream, P);
  });
  return sum;
}

std::tuple<Tensor, Tensor> moments(const Tensor& input, double eps, bool centred, bool over_positions) {
  check_operand(input, "input", 4, "[N, T, G, K]");
  const auto wide = input.options().dtype(accumulator_of(input));
  const Tensor rstd = at::empty({input.size(0), over_positions ? 1 : input.size(1), input.size(2)}, wide);
  const Tensor mean = centred ? at::empty(rstd.sizes(), wide) : at::empty({0}, wide);
  const AffineProblem p = problem_of(input, input, {}, {}, false);
  const Run run(input);
  run("moments", [&](Workspace& workspace, cudaStream_t stream) {
    return launch_moments(p, over_positions, eps, centred ? mean.mutable_data_ptr() : nullptr, rstd.mutable_data_ptr(),
                          workspace, stream);
  });
  return {mean, rstd};
}

// Ids are sorted by the framework, 16 N T bytes; a stable sort, so that sums have one order. Nothing waits, and so an
// id below 0 is not refused by its place but makes its sample's norm NaN.
Tensor gather_sq_norms(const Tensor& indices, const Tensor& grad_output, std::optional<int64_t> padding_idx) {
  check_operand(grad_output, "grad_output", 3, "[N, T, D]");
  check_indices(indices, grad_output, "grad_output");
  const int64_t N = grad_output.size(0);
  const auto options = grad_output.options().dtype(accumulator_of(grad_output));
  if (grad_output.numel() == 0) return at::zeros({N}, options);
  const Run run(grad_output);
  const Tensor sq_norms = at::empty({N}, options);
  const auto [ids, positions] = at::sort(indices.to(at::kLong), /*stable=*/true, /*dim=*/1, /*descending=*/false);
  const Tensor in_order = ids.contiguous(), places = positions.contiguous();
  const GatherProblem p{dtype_of(grad_output),
                        N,
                        grad_output.size(1),
                        grad_output.size(2),
                        in_order.const_data_ptr<int64_t>(),
                        places.const_data_ptr<int64_t>(),
                        rows_of(grad_output),
                        padding_idx.value_or(-1)};
  run("gather", [&](Workspace& workspace, cudaStream_t stream) {
    return launch_gather(p, sq_norms.mutable_data_ptr(), workspace, stream);
  });
  return sq_norms;
}

Tensor checked_turned(const Tensor& input) {
  check_operand(input, "input", 3, "[N, R, C]");
  return turns(input) ? turned(input) : input.clone(at::MemoryFormat::Contiguous);
}

}  // namespace

Tensor turned(const Tensor& input) {
  const Tensor made = at::empty(input.sizes(), input.options());
  const TurnProblem p{int64_t(input.element_size()), input.size(0),   input.size(1),   input.size(2),
                      input.const_data_ptr(),        input.stride(0), input.stride(2), made.mutable_data_ptr()};
  const Run run(input);
  run("turn", [&](cudaStream_t stream) { return launch_turn(p, stream); });
  return made;
}

}  // namespace torchgradx::cuda

IMPLEMENT_OPERATORS(m) {
  using namespace torchgradx::cuda;
  torchgradx::implement_affine<affine_norms, affine_fused>(m);
  m.impl("affine_by_sample", affine_by_sample);
  m.impl("affine_sum", affine_sum);
  m.impl("moments", moments);
  m.impl("turned", checked_turned);
  m.impl("gather_sq_norms", gather_sq_norms);
}
