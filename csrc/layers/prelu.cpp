// PReLU: one slope, or one for each channel.
#include "layer.h"

#include <ATen/ATen.h>

namespace torchgradx {
namespace {

class PReLU final : public Layer {
 public:
  explicit PReLU(bool single) : single_(single) {}

  bool batched(const Tensor& input) const override {
    return input.dim() > 1 || single_;
  }
  bool lowered() const override {
    return false;
  }
  bool makes_input() const override {
    return true;
  }
  bool fuses(const Operands& o, const Tensor& weight) const override {
    return !o.rearranged && weight.scalar_type() == o.activations.scalar_type();
  }

  Tensor forward(const Tensor& input, const Tensor& weight, const std::optional<Tensor>&, Saved&) const override {
    return at::prelu(input, weight);
  }

  std::optional<Operands> operands(const Saved& saved, const Tensor& grad_output, int64_t n,
                                   Layout layout) const override {
    const int64_t lead = grad_output.size(0), k = n ? lead / n : 1;
    if (n == 0 ? lead != 0 : lead % n != 0) return std::nullopt;
    const bool moved = k > 1 && layout == Layout::kSequence;
    const auto by_sample = [&](const Tensor& t) {
      const Tensor front = moved ? t.unflatten(0, {k, n}).transpose(0, 1).flatten(0, 1) : t;
      if (single_) return front.reshape({lead, -1, 1, 1});
      return front.flatten(1).unflatten(1, {t.size(1), -1}).transpose(1, 2).unsqueeze(3);  // [N K, HW, C, 1]
    };
    return Operands{
        by_sample(saved.input), by_sample(grad_output), {}, {}, k, moved, at::DimVector(saved.input.sizes())};
  }
  int64_t positions(const Operands& o) const override {
    return o.grad_output.size(1);
  }
  Tensor bias_rows(const Operands& o) const override {
    return o.grad_output.flatten(2);
  }
  double magnitude(const Operands& o) const override {
    return norm_of(o.activations);
  }
  Tensor sq_norms(const Operands& o, Algorithm, bool) const override {
    return prelu_sq_norms(o.activations, o.grad_output);
  }
  std::optional<Tensor> weight_gradients(const Operands& o) const override {
    return (o.activations.clamp_max(0) * o.grad_output).sum(1).flatten(1);
  }
  std::pair<Gradients, Tensor> fused(const Operands& o, const Tensor& weight, const Wanted&) const override {
    auto [input, grad_weight, sq] =
        prelu_fused(o.activations, o.grad_output, weight.view({o.activations.size(2), 1}), std::nullopt);
    const Tensor front = single_ ? input : input.squeeze(3).transpose(1, 2);
    return {{front.reshape(o.shape), grad_weight.view_as(weight), {}}, sq};
  }

 private:
  const bool single_;
};

}  // namespace

LayerPtr prelu_layer(int64_t slopes) {
  return std::make_shared<PReLU>(slopes == 1);
}

}  // namespace torchgradx
