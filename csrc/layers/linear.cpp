// Linear: rows of activations [*, I] and of gradients [*, O].
#include "../cpu/direct.h"
#include "layer.h"

#include <ATen/ATen.h>

namespace torchgradx {

namespace {

Tensor dense(const Tensor& t) {  // as bags of words may not be, nothing where it is not defined
  return t.defined() && t.layout() != at::kStrided ? t.to_dense() : t;
}

Tensor rows_of(const Tensor& t) {  // [*, F] -> [rows, F]; a reshape to -1 rows is none where F is 0
  const auto sizes = t.sizes();
  return t.dim() == 2 ? t : t.reshape({c10::multiply_integers(sizes.slice(0, t.dim() - 1)), sizes.back()});
}

bool joined(const Tensor& t) {  // as strides say it, whatever the sizes, those of 1 too: so a product without bias asks
  for (int64_t d = 0; d < t.dim() - 2; ++d)
    if (t.stride(d) != t.stride(d + 1) * t.size(d + 1)) return false;
  return true;
}

class Linear final : public Layer {
 public:
  explicit Linear(bool transposed) : transposed_(transposed) {
    reads_input = false;
  }

  bool batched(const Tensor& input) const override {
    return input.dim() > 1;
  }

  Tensor whole_forward(const Tensor& input, const Tensor& weight, const std::optional<Tensor>& bias) const override {
    return transposed_ ? Tensor() : at::linear(input, weight, bias);
  }
  // To the last bit as the framework does it: of rows that lie apart it makes one product where the weight wants a
  // gradient, which the transpose that it takes of a weight below autograd no longer says.
  Tensor forward(const Tensor& input, const Tensor& weight, const std::optional<Tensor>& bias, Saved&) const override {
    const Tensor w = transposed_ ? weight.t() : weight;
    if (input.dim() < 3 || input.layout() != at::kStrided || !weight.requires_grad() ||
        (bias ? input.is_contiguous() : joined(input)))
      return at::linear(input, w, bias);
    const Tensor rows = at::linear(input.flatten(0, -2), w);
    const Tensor output = rows.unflatten(0, input.sizes().slice(0, input.dim() - 1));
    return bias ? output.add_(*bias) : output;
  }

  Gradients backward(const Saved& saved, const Tensor& weight, const Tensor& grad_output,
                     const Wanted& wanted) const override {
    Gradients gradients;
    if (wanted.input) gradients.input = grad_output.matmul(transposed_ ? weight.t() : weight);
    const Tensor g = rows_of(grad_output);
    if (wanted.weight) {
      const Tensor a = rows_of(dense(saved.input));
      gradients.weight = transposed_ ? a.t().mm(g) : g.t().mm(a);
    }
    if (wanted.bias) gradients.bias = g.sum(0);
    return gradients;
  }

  std::optional<Operands> operands(const Saved& saved, const Tensor& grad_output, int64_t n,
                                   Layout layout) const override {
    const auto b = rows_by_sample(grad_output, n, layout);
    const Tensor input = dense(saved.input);
    const auto a = input.defined() ? rows_by_sample(input, n, layout) : std::optional<Tensor>(Tensor());
    if (!a || !b) return std::nullopt;
    Operands operands{*a, *b};
    operands.shared = saved.shared;
    return operands;
  }

  Tensor sq_norms(const Operands& operands, Algorithm algorithm, bool bias) const override {
    const auto& a = operands.activations;
    const auto& b = operands.grad_output;
    return algorithm == Algorithm::kRank1  ? rank1_sq_norms(a, b, bias)
           : algorithm == Algorithm::kGram ? gram_sq_norms(a, b, bias)
                                           : direct_sq_norms(a, b, bias);
  }

  std::pair<Gradients, Tensor> fused(const Operands& operands, const Tensor&, const Wanted& wanted) const override {
    const Tensor &a = operands.activations, &b = operands.grad_output;
    if (exchanges(b)) {
      auto [weight, none, sq] = linear_fused(b, a, std::nullopt, false);
      if (!wanted.bias) return {{Tensor(), weight, Tensor()}, sq};
      const Tensor bias = at::sum(b, at::IntArrayRef({1}), false, sq.scalar_type());
      return {{Tensor(), weight, bias.sum(0).to(b.scalar_type())}, at::stack({sq[0], bias.square().sum(1)})};
    }
    auto [weight, bias, sq] = operands.shared
                                  ? cpu::linear_fused(a, b, std::nullopt, wanted.bias, operands.shared.get())
                                  : linear_fused(a, b, std::nullopt, wanted.bias);
    return {{Tensor(), as_parameter(weight), wanted.bias ? bias : Tensor()}, sq};
  }

  std::optional<std::pair<Gradients, Tensor>> fused_segments(const Saved& saved, const Tensor& grad_output,
                                                             const Tensor& starts, int64_t longest,
                                                             const Wanted& wanted) const override {
    const Tensor a = rows_of(dense(saved.input)), b = rows_of(grad_output);  // of [rows, 1, I] too
    const auto made = segments_fused(a, b, starts, longest, wanted.weight, wanted.bias);
    if (made.empty()) return std::nullopt;
    if (!wanted.weight) return {{Gradients{}, made.back()}};
    return {{Gradients{Tensor(), as_parameter(made[0]), wanted.bias ? made[1] : Tensor()}, made.back()}};
  }

  Gradients scaled(const Operands& operands, const Tensor&, const Tensor& scale, const Wanted& wanted) const override {
    const Tensor &a = operands.activations, &b = operands.grad_output;
    if (exchanges(b))
      return {Tensor(), std::get<0>(linear_scaled(b, a, scale, false)),
              wanted.bias ? scaled_bias(operands, scale) : Tensor()};
    const auto [weight, bias] = linear_scaled(a, b, scale, wanted.bias);
    return {Tensor(), as_parameter(weight), wanted.bias ? bias : Tensor()};
  }

  Tensor weight_dots(const Operands& operands, const Tensor& direction) const override {
    const Tensor v = transposed_ ? direction.t() : direction;
    return (widened(operands.activations).matmul(v.t()) * widened(operands.grad_output)).sum({1, 2});
  }

 private:
  // Autograd copies a gradient that does not lie as the weight does. So a CPU's is made of exchanged operands; a GPU's,
  // [O, I], is turned, which costs fewer launches.
  bool exchanges(const Tensor& grad_output) const {
    return transposed_ && !grad_output.is_cuda();
  }
  Tensor as_parameter(const Tensor& gradient) const {
    return transposed_ ? turned(gradient.t().unsqueeze(0)).squeeze(0) : gradient;
  }

  const bool transposed_;
};

}  // namespace

LayerPtr linear_layer(bool transposed) {
  return std::make_shared<Linear>(transposed);
}

}  // namespace torchgradx
