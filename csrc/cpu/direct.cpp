// direct and fused for Linear: the sweep of sweep.h over rows as they lie.
// fused takes the sweep where T is large enough to hide what becomes of each tile; below that the plain weight
// gradient, one sum over all N T positions, and the norms by rank1 or gram. That sum is MKL's on the processors MKL is
// made for, where it takes 0.85 of the sweep's time; elsewhere it takes more than all of it.
#include "direct.h"
#include "row_gram.h"
#include "rowwise.h"

#include <ATen/Context.h>
#include <ATen/ops/as_strided_cpu_dispatch.h>
#include <ATen/ops/mm_cpu_dispatch.h>

#include <torch/library.h>

namespace torchgradx::cpu {
namespace {

bool mkl_at_home() {
  static const bool is = at::hasMKL() && __builtin_cpu_is("intel");
  return is;
}

template <class acc_t>
bool gram_is_quicker(const Rows<acc_t>& layer, const RowShape& s, const SharedGrads* shared) {
  const bool shares = shared && s.T <= kSpan;
  const double part = shares ? double(s.I) / double(s.I + shared->activations.size(2)) : 1;
  const double of_sweep = mkl_at_home() ? 0.08 * double(s.T) : 0;  // positions, that its own sum takes longer
  return row_gram_nanoseconds(s.T, s.I) + part * row_gram_nanoseconds(s.T, s.O) <
         tile_end_nanoseconds<acc_t>(s.I, s.O, std::min(layer.chunk().samples, s.N), of_sweep);
}

// The sweep of the first of two weights, and beside it the second's; or nothing, where they do not suit.
template <class acc_t>
bool pair_pass(const Rows<acc_t>& first, const Tensor& grad_output, SharedGrads* shared, const Tensor& weight,
               const Tensor& grad_bias, const Tensor& sq_norms) {
  if (!shared || (shared->bias && !grad_bias.defined()) || shared->activations.scalar_type() != weight.scalar_type())
    return false;
  const Rows<acc_t> second(shared->activations, grad_output, true, shared->late);
  for (const Rows<acc_t>* layer : {&first, &second})
    if (!layer->in_place() || layer->blocks() > 1 || layer->width > kDepth || layer->N != first.N) return false;
  shared->weight = results({second.rows, second.inputs}, weight.scalar_type(), false);
  shared->sq_norms = results({1 + int64_t(shared->bias), second.N}, weight.scalar_type(), false);
  fused_pair<acc_t>(first, second, grad_bias, {weight, shared->weight}, {sq_norms, shared->sq_norms.narrow(0, 0, 1)});
  return true;
}

// The weight's gradient alone, as one sum over all N T positions.
template <class acc_t>
void weight_pass(const Tensor& activations, const Tensor& grad_output, const acc_t* scale, const Tensor& weight) {
  if (const auto kept = kept_samples(activations, grad_output, scale)) {
    weight.zero_();
    if (kept->scale.numel() > 0)
      weight_pass<acc_t>(kept->activations, kept->grad_output, kept->scale.template const_data_ptr<acc_t>(), weight);
    return;
  }
  const Rows<acc_t> layer(activations, grad_output, true);
  const Rows<acc_t> joined = layer.joined(/*in_any_order=*/!scale);
  if (mkl_at_home() && !scale && joined.N == 1 && activations.scalar_type() == weight.scalar_type()) {
    Tensor out = weight;
    const auto of = [&](const Tensor& t, int64_t features, const Operand& o) {  // [N T, features]
      return at::cpu::as_strided(t, {joined.width, features}, {o.x, o.c});
    };
    at::cpu::mm_out(out, of(grad_output, joined.rows, joined.grads).t(), of(activations, joined.inputs, joined.source));
  } else {
    fused_pass<acc_t>(joined, scale, layer.width, weight, {}, {});
  }
}

}  // namespace

Fused SharedGrads::second() const {
  if (bias) sq_norms.select(0, 1).copy_(bias_norms);
  return {weight, bias ? bias_grad.clone() : Tensor(), sq_norms};
}

Tensor direct_sq_norms(const Tensor& activations, const Tensor& grad_output, bool bias) {
  const RowShape s = check_rows(activations, grad_output);
  return norm_results(activations, s.N, bias, grad_output.numel() == 0, [&](auto zero, const Tensor& sq_norms) {
    using acc_t = decltype(zero);
    const Rows<acc_t> layer(activations, grad_output, false);
    direct_pass<acc_t>(layer, sq_norms);
  });
}

Fused linear_fused(const Tensor& activations, const Tensor& grad_output, const std::optional<Tensor>& scale, bool bias,
                   SharedGrads* shared) {
  const RowShape s = check_rows(activations, grad_output);
  check_scale(scale, s.N, activations);
  if (shared && shared->weight.defined()) return shared->second();
  return fused_results(
      activations, {s.O, s.I}, s.N, scale, bias, grad_output.numel() == 0,
      [&](auto zero, const auto* factors, const Tensor& weight, const Tensor& grad_bias, const Tensor& sq_norms) {
        using acc_t = decltype(zero);
        const Rows<acc_t> layer(activations, grad_output, true);
        // The bias's gradient and norms depend on grad_output alone.
        const bool known = bias && shared && shared->bias_grad.defined(), sums_bias = bias && !known;
        const Tensor of_bias = sums_bias ? grad_bias : Tensor(), rows = known ? sq_norms.narrow(0, 0, 1) : sq_norms;
        if (s.T > 1 && !gram_is_quicker(layer, s, shared)) {
          if (known || !pair_pass<acc_t>(layer, grad_output, shared, weight, of_bias, rows))
            fused_pass<acc_t>(layer, factors, s.T, weight, of_bias, rows);
        } else {
          weight_pass<acc_t>(activations, grad_output, factors, weight);
          if (s.T > 1) {
            gram_pass<acc_t>(RowSource<acc_t>(activations, grad_output, shared), layer, s.T, rows);
            if (sums_bias) bias_pass<acc_t>(layer, factors, of_bias, rows);
          } else {
            rank1_pass<acc_t>(activations, grad_output, sums_bias, rows);
            if (sums_bias) bias_pass<acc_t>(factors ? layer : layer.joined(), factors, of_bias, {});
          }
        }
        if (known)
          grad_bias.copy_(shared->bias_grad), sq_norms.select(0, 1).copy_(shared->bias_norms);
        else if (bias && shared)
          shared->bias_grad = grad_bias, shared->bias_norms = sq_norms.select(0, 1);
      });
}

Scaled linear_scaled(const Tensor& activations, const Tensor& grad_output, const Tensor& scale, bool bias) {
  const RowShape s = check_rows(activations, grad_output);
  check_scale(scale, s.N, activations);
  const auto [weight, grad_bias, none] =
      fused_results(activations, {s.O, s.I}, s.N, scale, bias, grad_output.numel() == 0,
                    [&](auto zero, const auto* factors, const Tensor& weight, const Tensor& grad_bias, const Tensor&) {
                      using acc_t = decltype(zero);
                      weight_pass<acc_t>(activations, grad_output, factors, weight);
                      if (bias) bias_pass<acc_t>(Rows<acc_t>(activations, grad_output, true), factors, grad_bias, {});
                    });
  return {weight, grad_bias};
}

}  // namespace torchgradx::cpu

TORCH_LIBRARY_IMPL(torchgradx, CPU, m) {
  m.impl("direct_sq_norms", torchgradx::cpu::direct_sq_norms);
  m.impl("linear_scaled", torchgradx::cpu::linear_scaled);
  m.impl("linear_fused",
         [](const at::Tensor& activations, const at::Tensor& grad_output, const std::optional<at::Tensor>& scale,
            bool bias) { return torchgradx::cpu::linear_fused(activations, grad_output, scale, bias); });
}
