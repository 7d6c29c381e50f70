// The norms of a Linear by direct, gram and rank1, fused with its gradient, and of its bias: the sweep of sweep.h and
// the squares of row_gram.h, over rows as they lie. rank1, |a|^2 |b|^2 for rows [N, 1, D], is one pass bound by memory.
// fused takes the sweep where T is large enough to hide what becomes of each tile; below that the plain weight
// gradient, one sum over all N T positions, and the norms by rank1 or gram. That sum is MKL's on the processors MKL is
// made for, where it takes 0.85 of the sweep's time; elsewhere it takes more than all of it.
#include "direct.h"
#include "row_gram.h"
#include "rows.h"

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
  over_kept(activations, grad_output, scale, weight, [&](const Tensor& a, const Tensor& b, const acc_t* factors) {
    const Rows<acc_t> layer(a, b, true);
    const Rows<acc_t> joined = layer.joined(/*in_any_order=*/!factors);
    if (!mkl_at_home() || factors || joined.N != 1 || a.scalar_type() != weight.scalar_type())
      return fused_pass<acc_t>(joined, factors, layer.width, weight, {}, {});
    Tensor out = weight;
    const auto of = [&](const Tensor& t, int64_t features, const Operand& o) {  // [N T, features]
      return at::cpu::as_strided(t, {joined.width, features}, {o.x, o.c});
    };
    at::cpu::mm_out(out, of(b, joined.rows, joined.grads).t(), of(a, joined.inputs, joined.source));
  });
}

// Squares and their product in double, so neither factor can leave float's range.
template <class acc_t>
void rank1_pass(const Tensor& activations,  // [N, 1, I]
                const Tensor& grad_output,  // [N, 1, O]
                bool bias, const Tensor& sq_norms) {
  constexpr int64_t kGrain = 1 << 15;  // elements worth a thread
  const int64_t N = activations.size(0), I = activations.size(2), O = grad_output.size(2);
  const Operand a = rows_of(activations), b = rows_of(grad_output);
  const auto& of = kernels<acc_t>().of(activations.scalar_type());
  acc_t* const out = sq_norms.mutable_data_ptr<acc_t>();
  at::parallel_for(0, N, std::max<int64_t>(1, kGrain / std::max<int64_t>(1, I + O)), [&](int64_t begin, int64_t end) {
    for (int64_t n = begin; n < end; ++n) {
      const double grads = of.sq_sum(b.at(n, 0, 0, 0), O, b.c);
      out[n] = acc_t(of.sq_sum(a.at(n, 0, 0, 0), I, a.c) * grads);
      if (bias) out[N + n] = acc_t(grads);
    }
  });
}

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

Tensor gram_sq_norms(const Tensor& activations, const Tensor& grad_output, bool bias) {
  const RowShape s = check_rows(activations, grad_output);
  return norm_results(activations, s.N, bias, grad_output.numel() == 0, [&](auto zero, const Tensor& sq_norms) {
    using acc_t = decltype(zero);
    const Rows<acc_t> layer(activations, grad_output, false);
    gram_pass<acc_t>(RowSource<acc_t>(activations, grad_output), layer, s.T, sq_norms);
    if (bias) bias_pass<acc_t>(layer, nullptr, {}, sq_norms);
  });
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
    fused_pass<acc_t>(Rows<acc_t>(activations, grad_output, false), nullptr, 1, {}, {}, sq_norms);
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
  m.impl("rank1_sq_norms", torchgradx::cpu::rank1_sq_norms);
  m.impl("bias_sq_norms", torchgradx::cpu::bias_sq_norms);
  m.impl("gram_sq_norms", torchgradx::cpu::gram_sq_norms);
  m.impl("direct_sq_norms", torchgradx::cpu::direct_sq_norms);
  m.impl("linear_scaled", torchgradx::cpu::linear_scaled);
  m.impl("linear_fused",
         [](const at::Tensor& activations, const at::Tensor& grad_output, const std::optional<at::Tensor>& scale,
            bool bias) { return torchgradx::cpu::linear_fused(activations, grad_output, scale, bias); });
}
