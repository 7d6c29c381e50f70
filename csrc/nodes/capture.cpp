// The tap: catches a layer's input and the gradient of its output without changing the layer. The input is a
// SavedVariable, so that checkpointing and offloading hold for it too; the hook sits on the node, after every hook of
// the user's on the tensor.
#include "../operators/views.h"
#include "node.h"
#include "site.h"

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>
#include <c10/core/impl/TorchDispatchModeTLS.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/function_hook.h>
#include <torch/csrc/autograd/saved_variable.h>
#include <torch/csrc/autograd/variable.h>

namespace torchgradx {
namespace {

using torch::autograd::SavedVariable;
using torch::autograd::variable_list;

// With the same memory and version, and no history.
Tensor detached(const Tensor& t) {
  if (!t.defined() || !t.requires_grad()) return t;
  const bool watched = c10::impl::TorchDispatchModeTLS::any_modes_set();
  return watched || !plain(t) ? t.detach() : torch::autograd::make_variable_non_differentiable_view(t, t);
}

struct Tap : torch::autograd::FunctionPreHook {
  SavedVariable input;
  Tensor mean, rstd;  // where they are the module's own
  c10::intrusive_ptr<Use> use;
  const Node* node;  // that owns this hook
  uint32_t output_nr;
  at::DimVector sizes;      // of the output
  at::DimVector weight;     // sizes of the weight as the layer enters it
  at::TensorOptions dtype;  // of the weight

  Tap(const Saved& saved, c10::intrusive_ptr<Use> use, const Node* node, uint32_t output_nr, at::IntArrayRef sizes,
      const Tensor& weight)
      : input(detached(saved.input), /*is_output=*/false),
        mean(detached(saved.mean)),
        rstd(detached(saved.rstd)),
        use(std::move(use)),
        node(node),
        output_nr(output_nr),
        sizes(sizes),
        weight(weight.sizes()),
        dtype(weight.options()) {}

  variable_list operator()(const variable_list& grads) override {
    if (!use->arrive(node) || !grads[output_nr].defined()) return grads;
    Tensor x = use->wants_weight ? input.unpack() : Tensor(), g = viewed(grads[output_nr], sizes);
    if (!torch::autograd::get_current_graph_task_keep_graph()) input.reset_data();
    if (at::GradMode::is_enabled()) return grads;  // create_graph: refused when read
    const at::NoGradGuard no_grad;
    const Layer& layer = *use->site->layer;
    const Recorder& recorder = *use->site->recorder;  // of a weight, an audit and clipping ask for the shape
    const Tensor w = recorder.auditing || recorder.keeps_tape ? at::zeros({1}, dtype).expand(weight) : Tensor();
    use->record({x.defined() ? layer.enter(x) : x, mean, rstd}, w, layer.lifted(g), /*received=*/true);
    return grads;
  }
};

std::vector<Slot> slots_of(const Site& site, bool wants_weight, const Tensor& weight, bool wants_bias,
                           const std::optional<Tensor>& bias) {
  std::vector<Slot> slots;
  if (wants_weight) slots.emplace_back(site.weight, weight);
  if (wants_bias) slots.emplace_back(site.bias, *bias);
  return slots;
}

}  // namespace

c10::intrusive_ptr<Use> begin_use(const std::shared_ptr<Site>& site, const Tensor& input, const Tensor& weight,
                                  const std::optional<Tensor>& bias, at::OptionalIntArrayRef sizes) {
  const bool transformed = c10::impl::tls_is_dispatch_key_included(c10::DispatchKey::FuncTorchDynamicLayerFrontMode);
  std::shared_ptr<Pass> pass = transformed ? nullptr : site->recorder->current();
  if (!pass) return {};
  const bool wants_weight = site->weight >= 0 && weight.requires_grad();
  const bool wants_bias = site->bias >= 0 && bias.has_value() && bias->requires_grad();
  const auto slots = slots_of(*site, wants_weight, weight, wants_bias, bias);
  if (slots.empty()) return {};
  if (input.is_nested()) {
    pass->refusals.emplace_back(site->index, "nested");
    return {};
  }
  // A part of a parameter (attention) is a view of it. What else is no leaf (of functional_call) was computed from
  // others' parameters, which the graph shows as it shows any use of these outside of their modules.
  if ((wants_weight && site->weight_rows.parts == 1 && !weight.is_leaf()) ||
      (wants_bias && site->bias_rows.parts == 1 && !bias->is_leaf()))
    return {};
  // Where operators are observed (torchgradx/graph/constant.py), or a selective checkpoint takes them down.
  const bool heard = watching() || c10::impl::TorchDispatchModeTLS::any_modes_set();
  if (heard && site->recorder->depth() > 0) {
    py::gil_scoped_acquire gil;
    site->recorder->site_called.function(site->index, input);
  }
  const int64_t index = pass->call(site->index, slots, sizes.value_or(input.sizes()));
  if (!at::GradMode::is_enabled()) return {};
  return c10::make_intrusive<Use>(site, std::move(pass), index, wants_weight, wants_bias);
}

c10::intrusive_ptr<Use> use_in_graph(const std::shared_ptr<Site>& site, const std::shared_ptr<Pass>& pass,
                                     const Tensor& input, const Tensor& weight, const std::optional<Tensor>& bias) {
  const bool wants_weight = contains(pass->trainable, site->weight);  // what a graph is given need not say so
  const bool wants_bias = bias.has_value() && contains(pass->trainable, site->bias);
  const auto slots = slots_of(*site, wants_weight, weight, wants_bias, bias);
  if (slots.empty()) return {};
  const at::AutoGradMode enable(true);
  const int64_t index = pass->call(site->index, slots, input.sizes());
  auto use = c10::make_intrusive<Use>(site, pass, index, wants_weight, wants_bias);
  use->borrows = true;
  return use;
}

void listen(const c10::intrusive_ptr<Use>& use, const Saved& saved, const Tensor& weight, const Tensor& output) {
  if (!use || !output.grad_fn()) return;
  const Tensor made = end_of(output);
  use->pass->watch(use->index, made);
  made.grad_fn()->add_pre_hook(std::make_unique<Tap>(use->wants_weight ? saved : Saved{}, use, &*made.grad_fn(),
                                                     made.output_nr(), output.sizes(),
                                                     use->site->layer->lifted(weight)));
}

void tap(const std::shared_ptr<Site>& site, const Saved& saved, const Tensor& weight, const std::optional<Tensor>& bias,
         const Tensor& output) {
  if (site->layer->batched(saved.input)) listen(begin_use(site, saved.input, weight, bias), saved, weight, output);
}

Tensor call_tapped(const std::shared_ptr<Site>& site, const Tensor& input, const Tensor& weight,
                   const std::optional<Tensor>& bias) {
  const Tensor output = [&] {
    const py::gil_scoped_release others;  // as torch's own functions
    return site->layer->whole_forward(input, weight, bias);
  }();
  if (output.defined()) tap(site, {input}, weight, bias, output);
  return output;
}

}  // namespace torchgradx
