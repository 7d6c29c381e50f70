// Layers whose weight acts element by element on features [N K, T, G, C] of the input, which their operators make.
#pragma once

#include "layer.h"

#include <ATen/ATen.h>

namespace torchgradx {

class Elementwise : public Layer {
 public:
  Elementwise() {
    lowered = false, makes_input = true;
  }
  bool fuses(const Operands& o, const Tensor& weight) const override {
    return !o.rearranged && weight.scalar_type() == o.activations.scalar_type();
  }

  Tensor bias_rows(const Operands& o) const override {
    return o.grad_output.flatten(2);
  }
  double magnitude(const Operands& o) const override {
    return norm_of(features(o));
  }
  Tensor weight_dots(const Operands& o, const Tensor& direction) const override {
    return weight_gradients(o)->mv(direction.flatten());
  }
  std::optional<Tensor> weight_gradients(const Operands& o) const override {
    return (widened(features(o)) * widened(o.grad_output)).sum(1).flatten(1);
  }

 protected:
  virtual Tensor features(const Operands& o) const = 0;
};

}  // namespace torchgradx
