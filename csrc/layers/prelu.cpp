// PReLU: one slope, or one for each channel.
#include "elementwise.h"

namespace torchgradx {
namespace {

class PReLU final : public Elementwise {
 public:
  explicit PReLU(bool single) : single_(single) {
    biased = false;
  }

  bool batched(const Tensor& input) const override {
    return input.dim() > 1 || single_;
  }
  Tensor whole_forward(const Tensor& input, const Tensor& weight, const std::optional<Tensor>&) const override {
    return at::prelu(input, weight);
  }
  Tensor forward(const Tensor& input, const Tensor& weight, const std::optional<Tensor>&, Saved&) const override {
    return at::prelu(input, weight);
  }

  Gradients backward(const Saved& saved, const Tensor& weight, const Tensor& grad_output,
                     const Wanted& wanted) const override {
    const Tensor cast = weight.to(saved.input.scalar_type());  // as autocast does, in whose forward it was
    return Elementwise::backward(saved, cast, grad_output, wanted);
  }

  std::optional<Operands> operands(const Saved& saved, const Tensor& grad_output, int64_t n,
                                   Layout layout) const override {
    const auto images = images_of(grad_output, n, layout);
    if (!images) return std::nullopt;
    const auto by_sample = [&](const Tensor& t) {
      const Tensor front = images->by_sample(t);
      if (single_) return front.reshape({t.size(0), front.numel() / std::max<int64_t>(1, t.size(0)), 1, 1});
      return front.flatten(1).unflatten(1, {t.size(1), -1}).transpose(1, 2).unsqueeze(3);  // [N K, HW, C, 1]
    };
    return Operands{by_sample(saved.input),
                    by_sample(grad_output),
                    {},
                    {},
                    images->each,
                    images->moved,
                    at::DimVector(saved.input.sizes())};
  }

  Tensor sq_norms(const Operands& o, Algorithm, bool) const override {
    return prelu_sq_norms(o.activations, o.grad_output);
  }
  std::pair<Gradients, Tensor> fused(const Operands& o, const Tensor& weight, const Wanted&) const override {
    auto [input, grad_weight, sq] = prelu_fused(o.activations, o.grad_output, weight, std::nullopt);
    return {{(single_ ? input : input.squeeze(3).transpose(1, 2)).reshape(o.shape), grad_weight, {}}, sq};
  }

  Gradients scaled(const Operands& o, const Tensor& weight, const Tensor& scale, const Wanted&) const override {
    return {{}, std::get<1>(prelu_fused(o.activations, o.grad_output, weight, scale)), {}};
  }

 protected:
  Tensor features(const Operands& o) const override {
    return o.activations.clamp_max(0);
  }

 private:
  const bool single_;
};

}  // namespace

LayerPtr prelu_layer(int64_t slopes) {
  return std::make_shared<PReLU>(slopes == 1);
}

}  // namespace torchgradx
