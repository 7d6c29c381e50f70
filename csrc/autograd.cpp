// Layers whose backward makes the weight gradient and the norms in one pass. The gradient goes back through autograd,
// so what wraps the model (DDP, GradScaler, hooks on parameters) sees nothing unusual. Under create_graph it is plain
// PyTorch.
#include "site.h"

#include <ATen/ATen.h>
#include <ATen/autocast_mode.h>
#include <torch/csrc/autograd/custom_function.h>

namespace torchgradx {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::Function;
using torch::autograd::variable_list;

struct LayerFunction : Function<LayerFunction> {
  static Tensor forward(AutogradContext* ctx, const Tensor& input, const Tensor& weight,
                        const std::optional<Tensor>& bias, const c10::intrusive_ptr<Use>& use) {
    const at::AutoDispatchBelowADInplaceOrView below;
    const Site& site = *use->site;
    ctx->set_materialize_grads(false);
    ctx->save_for_backward(
        {use->wants_weight || !site.linear() ? input : Tensor(), input.requires_grad() ? weight : Tensor()});
    ctx->saved_data["use"] = c10::IValue::make_capsule(use);
    if (site.linear()) return at::linear(input, weight, bias);
    return at::conv2d(input, weight, bias, site.stride, site.padding, site.dilation, site.groups);
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    const auto use = c10::static_intrusive_pointer_cast<Use>(ctx->saved_data["use"].toCapsule());
    const Tensor& grad_output = grads[0];
    const auto node = torch::autograd::get_current_node();
    const bool recorded = use->pass->arrive(use->parameters(), &*node);
    if (!grad_output.defined()) return {Tensor(), Tensor(), Tensor(), Tensor()};
    const auto saved = ctx->get_saved_variables();
    const Tensor &input = saved[0], &weight = saved[1];
    const Site& site = *use->site;

    Tensor grad_input;
    if (ctx->needs_input_grad(0)) {
      grad_input = site.linear() ? grad_output.matmul(weight)
                                 : std::get<0>(at::convolution_backward(grad_output, input, weight, std::nullopt,
                                                                        site.stride, site.padding, site.dilation, false,
                                                                        {0, 0}, site.groups, {true, false, false}));
    }
    std::pair<Tensor, Tensor> gradients;
    if (!recorded) {
      // autograd.grad: nothing reaches .grad, but what is asked for is computed.
      gradients = plain_gradients(site, input, weight, grad_output, ctx->needs_input_grad(1),
                                  use->wants_bias && ctx->needs_input_grad(2));
    } else if (site.weight_grad) {
      gradients = use->record_fused(input, weight, grad_output);
    } else if (!at::GradMode::is_enabled()) {
      use->record(input, grad_output);
    }
    return {grad_input, gradients.first, gradients.second, Tensor()};
  }
};

// As autocast does for the framework's own layers, the weight's cast being cached for the region.
Tensor cast(const Tensor& t) {
  return at::autocast::cached_cast(at::autocast::get_autocast_dtype(t.device().type()), t, t.device().type());
}

Tensor apply(const c10::intrusive_ptr<Use>& use, const Tensor& input, const Tensor& weight,
             const std::optional<Tensor>& bias) {
  Tensor output;
  if (at::autocast::is_autocast_enabled(input.device().type())) {
    const std::optional<Tensor> bias_cast = bias ? std::optional<Tensor>(cast(*bias)) : std::nullopt;
    output = LayerFunction::apply(cast(input), cast(weight), bias_cast, use);
  } else {
    output = LayerFunction::apply(input, weight, bias, use);
  }
  use->pass->watch(use->index, output);
  return output;
}

}  // namespace

Tensor linear(const std::shared_ptr<Site>& site, const Tensor& input, const Tensor& weight,
              const std::optional<Tensor>& bias) {
  const auto use = input.dim() > 1 ? begin_use(site, input.sizes(), weight, bias) : nullptr;
  return use ? apply(use, input, weight, bias) : at::linear(input, weight, bias);
}

Tensor convolution(const std::shared_ptr<Site>& site, const Tensor& input, const Tensor& weight,
                   const std::optional<Tensor>& bias) {
  const bool batched = input.dim() == (site->one_dimensional ? 3 : 4);
  const auto use = batched ? begin_use(site, input.sizes(), weight, bias) : nullptr;
  const bool lift = site->one_dimensional;
  const Tensor x = site->padded(input);
  const Tensor x2 = lift ? x.unsqueeze(-2) : x, w2 = lift ? weight.unsqueeze(-2) : weight;
  const Tensor output = use ? apply(use, x2, w2, bias)
                            : at::conv2d(x2, w2, bias, site->stride, site->padding, site->dilation, site->groups);
  return lift ? output.squeeze(-2) : output;
}

}  // namespace torchgradx
