// Layers whose parameters act element by element: the affine parameters of normalisations, scales, PReLU. Bound by
// memory: the norms read both operands once; fused makes grad_input from the same lines, which a LayerNorm's need once
// and a GroupNorm's twice, the second time out of cache where a group (a sample, if channels_last) fits it.
#include "../operators/views.h"
#include "affine_sweep.h"

#include <torch/library.h>

namespace torchgradx::cpu {
namespace {

// sq_norms [1 + bias, N] and, if wanted, weighted totals [C] of the weight's and the bias's gradients, or the samples'
// own [1 + bias, N, 1, C]
template <class acc_t>
void affine_pass(const AffineLayer<acc_t>& layer, const acc_t* scale, acc_t* weight, acc_t* bias,
                 const Tensor& sq_norms, const Tensor& by_sample = {}) {
  const int64_t N = sq_norms.size(1), C = layer.C();
  const auto parts = parts_of(layer.N, layer.T, layer.G, C, layer.feature == Feature::kByRow);
  const int64_t count = int64_t(parts.size());
  const bool shared_positions = parts[0].t1 - parts[0].t0 < layer.T && !layer.rows_are_samples;
  std::vector<double> squares(count * 2 * N, 0.0);
  const int64_t of_part = N < kSummed ? 1 : 2;  // see end_part
  std::vector<acc_t> totals(weight ? count * of_part * 2 * C : 0, acc_t(0));
  std::vector<acc_t> unfinished(shared_positions ? count * N * 2 * C : 0);
  acc_t* const of_weight = by_sample.defined() ? by_sample.mutable_data_ptr<acc_t>() : nullptr;
  acc_t* const of_bias = of_weight && by_sample.size(0) > 1 ? of_weight + N * C : nullptr;
  const auto results = [&](int64_t p) {
    return AffineResults<acc_t>{N,
                                squares.data() + p * 2 * N,
                                totals.empty() ? nullptr : totals.data() + p * of_part * 2 * C,
                                scale,
                                shared_positions ? unfinished.data() + p * N * 2 * C : nullptr,
                                of_weight,
                                of_bias};
  };
  for_parts(count, [&](int64_t p) { AffineSweep<acc_t>(layer, parts[p], results(p)).run(); });
  if (shared_positions) {
    add_copies(unfinished.data(), unfinished.data() + N * 2 * C, N * 2 * C, count - 1);
    for (int64_t n = 0; n < N; ++n) {
      const acc_t* const products = unfinished.data() + n * 2 * C;
      finish_sample(n, 0, C, C, products + C, products, results(0));
    }
  }
  if (weight) {
    add_copies(totals.data(), totals.data() + 2 * C, 2 * C, count * of_part - 1);
    std::copy(totals.begin(), totals.begin() + C, weight);
    if (bias) std::copy(totals.begin() + C, totals.begin() + 2 * C, bias);
  }
  const auto sums = sum_of_parts(std::move(squares), count, 2 * N);
  std::copy_n(sums.begin(), sq_norms.numel(), sq_norms.mutable_data_ptr<acc_t>());
}

// grad_input is to be made too.
template <class acc_t>
void aim(AffineLayer<acc_t>& layer, const Tensor& weight, bool frozen, bool centred, const Tensor& grad_input) {
  layer.weight = weight.const_data_ptr<acc_t>(), layer.frozen = frozen, layer.centred = centred;
  layer.out = static_cast<char*>(grad_input.mutable_data_ptr()), layer.out_strides = affine_operand(grad_input);
  if (layer.rows_are_samples) std::swap(layer.out_strides.n, layer.out_strides.x);
}

// T = 1 by row: samples are as good as positions, and sums over them as good as their totals, unless some are left out.
template <class acc_t>
AffineLayer<acc_t> layer_of(const Tensor& input, const Tensor& grad_output, const std::optional<Tensor>& mean,
                            const std::optional<Tensor>& rstd, Feature feature, const acc_t* scale = nullptr) {
  const bool all = !scale || std::find(scale, scale + input.size(0), acc_t(0)) == scale + input.size(0);
  if (feature != Feature::kByRow || input.size(1) != 1 || !all) return {input, grad_output, mean, rstd, feature};
  const auto swapped = [](const Tensor& t) {
    at::DimVector sizes(t.sizes()), strides(t.strides());
    std::swap(sizes[0], sizes[1]), std::swap(strides[0], strides[1]);
    return viewed(t, sizes, strides);
  };
  AffineLayer<acc_t> layer(swapped(input), swapped(grad_output), mean ? std::optional(swapped(*mean)) : mean,
                           swapped(*rstd), feature);
  layer.rows_are_samples = true;
  return layer;
}

Feature feature_of(const Tensor& input, const std::optional<Tensor>& rstd, bool negative, bool frozen) {
  if (negative) return Feature::kNegative;
  return is_by_row(input, rstd, frozen) ? Feature::kByRow : Feature::kByColumn;
}

Tensor affine_norms(const Tensor& input, const Tensor& grad_output, const std::optional<Tensor>& mean,
                    const std::optional<Tensor>& rstd, bool negative, bool bias) {
  const Feature feature = feature_of(input, rstd, negative, false);
  return norm_results(input, input.size(0), bias, input.numel() == 0, [&](auto zero, const Tensor& sq_norms) {
    using acc_t = decltype(zero);
    affine_pass<acc_t>(layer_of<acc_t>(input, grad_output, mean, rstd, feature), nullptr, nullptr, nullptr, sq_norms);
  });
}

AffineFused affine_fused(const Tensor& input, const Tensor& grad_output, const Tensor& weight,
                         const std::optional<Tensor>& mean, const std::optional<Tensor>& rstd, bool negative,
                         bool frozen, const std::optional<Tensor>& scale, bool bias) {
  const Feature feature = feature_of(input, rstd, negative, frozen);
  const Tensor grad_input = empty_in_lines(input, feature == Feature::kByRow);
  const bool empty = input.numel() == 0;
  const auto dtype = accumulator_of(input);
  const auto as = [](const Tensor& t, at::ScalarType type) { return t.scalar_type() == type ? t : t.to(type); };
  const Tensor grad_weight = results(weight.sizes(), dtype, empty),
               grad_bias = bias ? results(weight.sizes(), dtype, empty) : results({0}, dtype, false);
  const auto pass = [&](auto zero, const Tensor& sq_norms) {
    using acc_t = decltype(zero);
    const Tensor wide = as(weight, dtype).contiguous(), factors = scale ? as(*scale, dtype).contiguous() : Tensor();
    const acc_t* const by_sample = scale ? factors.const_data_ptr<acc_t>() : nullptr;
    auto layer = layer_of<acc_t>(input, grad_output, mean, rstd, feature, by_sample);
    aim(layer, wide, frozen, mean.has_value(), grad_input);
    affine_pass<acc_t>(layer, by_sample, grad_weight.mutable_data_ptr<acc_t>(),
                       bias ? grad_bias.mutable_data_ptr<acc_t>() : nullptr, sq_norms);
  };
  const Tensor sq_norms = norm_results(input, input.size(0), bias, empty, pass);
  return {grad_input, as(grad_weight, weight.scalar_type()), as(grad_bias, weight.scalar_type()), sq_norms};
}

BySample affine_by_sample(const Tensor& input, const Tensor& grad_output, const std::optional<Tensor>& weight,
                          const std::optional<Tensor>& mean, const std::optional<Tensor>& rstd, bool frozen,
                          bool bias) {
  check_affine_by_sample(input, grad_output, weight, mean, rstd, frozen);
  const bool empty = input.numel() == 0;
  const Feature feature = feature_of(input, rstd, false, frozen);
  const auto dtype = accumulator_of(input);
  const Tensor grad_input =
                   weight ? empty_in_lines(input, feature == Feature::kByRow) : at::empty({0}, input.options()),
               gradients = results({1 + int64_t(bias), input.size(0), 1, input.size(2) * input.size(3)}, dtype, empty);
  const Tensor sq_norms = norm_results(input, input.size(0), bias, empty, [&](auto zero, const Tensor& sq_norms) {
    using acc_t = decltype(zero);
    AffineLayer<acc_t> layer(input, grad_output, mean, rstd, feature);
    const Tensor wide = weight ? weight->to(dtype).contiguous() : Tensor();
    if (weight) aim(layer, wide, frozen, mean.has_value(), grad_input);
    affine_pass<acc_t>(layer, nullptr, nullptr, nullptr, sq_norms, gradients);
  });
  return {grad_input, sq_norms, gradients};
}

Tensor affine_sum(const Tensor& gradients, const std::optional<Tensor>& scale, at::ScalarType dtype) {
  check_operand(gradients, "gradients", 3, "[N, P, G K]");
  check_scale(scale, gradients.size(0), gradients);
  const int64_t N = gradients.size(0), P = gradients.size(1), C = gradients.size(2);
  const Tensor rows = gradients.contiguous(), sum = at::zeros({C}, rows.options());
  as_accumulator(rows.scalar_type(), [&](auto zero) {
    using acc_t = decltype(zero);
    const Tensor factors = scale ? scale->to(rows.scalar_type()).contiguous() : Tensor();
    const acc_t* const by_sample = scale ? factors.const_data_ptr<acc_t>() : nullptr;
    acc_t* const to = sum.mutable_data_ptr<acc_t>();
    for (int64_t row = 0; row < N * P; ++row) {
      const acc_t* const from = rows.const_data_ptr<acc_t>() + row * C;
      const acc_t factor = by_sample ? by_sample[row / P] : acc_t(1);
      if (factor == acc_t(0)) continue;  // 0 times nan is nan
      for (int64_t c = 0; c < C; ++c) to[c] += factor * from[c];
    }
  });
  return sum.scalar_type() == dtype ? sum : sum.to(dtype);
}

}  // namespace
}  // namespace torchgradx::cpu

TORCH_LIBRARY_IMPL(torchgradx, CPU, m) {
  torchgradx::implement_affine<torchgradx::cpu::affine_norms, torchgradx::cpu::affine_fused>(m);
  m.impl("affine_by_sample", torchgradx::cpu::affine_by_sample);
  m.impl("affine_sum", torchgradx::cpu::affine_sum);
}
