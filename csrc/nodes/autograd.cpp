// Layers whose backward makes the weight gradient and the norms in one pass. The gradient goes back through autograd,
// so what wraps the model (DDP, GradScaler, hooks on parameters) sees nothing unusual. Under create_graph it is plain
// PyTorch.
#include "../operators/views.h"
#include "node.h"
#include "site.h"

#include <ATen/ATen.h>
#include <ATen/autocast_mode.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/functions/utils.h>
#include <torch/csrc/autograd/saved_variable.h>
#include <torch/csrc/autograd/variable.h>

namespace torchgradx {
namespace {

using torch::autograd::SavedVariable;
using torch::autograd::variable_list;

struct LayerNode : SavingNode {
  c10::intrusive_ptr<Use> use;
  SavedVariable input, weight;
  Tensor mean, rstd;

  std::string name() const override {
    return "torchgradx::LayerBackward";
  }

  std::vector<const SavedVariable*> all_saved() const override {
    return {&input, &weight};
  }

  void release_variables() override {
    const std::lock_guard<std::mutex> lock(mutex_);
    input.reset_data(), weight.reset_data();
    mean = rstd = Tensor();
  }

  variable_list apply(variable_list&& grads) override {
    const std::lock_guard<std::mutex> lock(mutex_);
    const bool recorded = use->arrive(this);
    if (!grads[0].defined()) return variable_list(3);
    const Wanted wanted{task_should_compute_output(0), task_should_compute_output(1), task_should_compute_output(2)};
    const auto [grad_input, grad_weight, grad_bias] =
        use->gradients({input.unpack(), mean, rstd}, weight.unpack(), grads[0], wanted, recorded);
    return {grad_input, grad_weight, grad_bias};
  }
};

Tensor attached(const c10::intrusive_ptr<Use>& use, const Tensor& input, const Tensor& weight,
                const std::optional<Tensor>& bias, Saved& saved) {
  const Layer& layer = *use->site->layer;
  const auto node = make_node<LayerNode>();
  node->set_next_edges(torch::autograd::collect_next_edges(input, weight, bias));
  node->use = use;
  if (use->wants_weight || layer.reads_input) node->input = SavedVariable(input, /*is_output=*/false);
  if (input.requires_grad() || layer.reads_input) node->weight = SavedVariable(weight, /*is_output=*/false);
  const Tensor output = [&] {
    const py::gil_scoped_release others;  // as torch's own functions
    const at::AutoDispatchBelowADInplaceOrView below;
    const at::NoGradGuard no_grad;
    return layer.forward(input, weight, bias, saved);
  }();
  node->mean = std::move(saved.mean), node->rstd = std::move(saved.rstd);
  torch::autograd::set_history(output, node);
  use->pass->watch(use->index, output);
  return output;
}

}  // namespace

Tensor cast(const Tensor& t) {
  return at::autocast::cached_cast(at::autocast::get_autocast_dtype(t.device().type()), t, t.device().type());
}

Tensor of_its_own(const Tensor& t) {
  if (!t.is_view() || !plain(t) || has_tangent(t)) return t;
  const Tensor own = viewed(t, t.sizes(), t.strides());
  if (t.requires_grad()) torch::autograd::impl::set_gradient_edge(own, torch::autograd::impl::gradient_edge(t));
  return own;
}

Tensor call(const std::shared_ptr<Site>& site, const Tensor& input, const Tensor& weight,
            const std::optional<Tensor>& bias) {
  const Layer& layer = *site->layer;
  Saved saved;
  const auto use = layer.batched(input) ? begin_use(site, input, weight, bias) : nullptr;
  if (!use) return {};
  const Tensor x = layer.enter(input), w = layer.lifted(weight);
  const bool autocast = at::autocast::is_autocast_enabled(input.device().type());
  if ((autocast && !layer.lowered) || has_tangent(x) || has_tangent(w) || (bias && has_tangent(*bias))) {
    const Tensor output = layer.leave(layer.forward(x, w, bias, saved));
    listen(use, {input, saved.mean, saved.rstd}, weight, output);
    return of_its_own(output);
  }
  const auto given = [&](const Tensor& t) { return autocast ? cast(t) : t; };
  const auto b = bias ? std::optional<Tensor>(given(*bias)) : std::nullopt;
  return of_its_own(layer.leave(attached(use, given(x), given(w), b, saved)));
}

}  // namespace torchgradx
