// A layer of nn.LSTM, nn.GRU or nn.RNN as one node of the graph. Its backward goes through time once, and gives each
// weight the gradient and the norms of a Linear over all steps.
#include "../cpu/direct.h"
#include "../layers/recurrence.h"
#include "node.h"
#include "site.h"

#include <ATen/ATen.h>
#include <ATen/autocast_mode.h>
#include <torch/csrc/autograd/autograd.h>
#include <torch/csrc/autograd/functions/utils.h>
#include <torch/csrc/autograd/saved_variable.h>

namespace torchgradx {
namespace {

using torch::autograd::SavedVariable;
using torch::autograd::variable_list;

constexpr int64_t kInput = 0, kState = 1, kCell = 2, kWeights = 3;  // among the node's inputs

variable_list listed(const Sequence& in) {
  variable_list all{in.input, in.state, in.cell};
  all.insert(all.end(), in.weights.begin(), in.weights.end());
  return all;
}

Sequence sequence(const variable_list& all) {
  return {all[kInput], all[kState], all[kCell], Tensors(all.begin() + kWeights, all.end())};
}

variable_list listed(const Output& out) {
  variable_list all{out.states};
  for (const Tensor& t : {out.last, out.last_cells})
    if (t.defined()) all.push_back(t);
  return all;
}

struct RecurrentNode : SavingNode {
  Recurrence of;
  std::vector<c10::intrusive_ptr<Use>> uses;  // by site; null where nothing of it is trained
  std::shared_ptr<Gathered> into;             // instead of them
  at::ScalarType dtype;
  bool late = false;                 // the states of the first direction, see Steps
  std::vector<SavedVariable> saved;  // as listed(), then of each direction's Steps

  std::string name() const override {
    return "torchgradx::RecurrentBackward";
  }

  std::vector<const SavedVariable*> all_saved() const override {
    std::vector<const SavedVariable*> all;
    for (const SavedVariable& s : saved) all.push_back(&s);
    return all;
  }

  void release_variables() override {
    const std::lock_guard<std::mutex> lock(mutex_);
    for (SavedVariable& s : saved) s.reset_data();
  }

  void save(const Sequence& in, const std::vector<Steps>& steps) {
    variable_list all = listed(in);
    for (const Steps& s : steps) all.insert(all.end(), {s.states, s.kept});
    for (const Tensor& t : all) saved.emplace_back(t, /*is_output=*/false);
  }

  variable_list apply(variable_list&& grads) override {
    const std::lock_guard<std::mutex> lock(mutex_);
    const c10::impl::ExcludeDispatchKeyGuard cast_already(c10::autocast_dispatch_keyset);
    std::vector<bool> recorded;
    for (const auto& use : uses) recorded.push_back(use && use->arrive(this));
    variable_list all;
    if (std::none_of(grads.begin(), grads.end(), [](const Tensor& g) { return g.defined(); }))
      return variable_list(num_outputs());
    for (const SavedVariable& s : saved) all.push_back(s.unpack());
    std::vector<Steps> steps;
    for (size_t k = num_outputs(); k < all.size(); k += 2) steps.push_back({all[k], all[k + 1], late && steps.empty()});
    all.resize(num_outputs());
    // Those of torch.func.vmap have no memory of their own.
    const bool mapped =
        std::any_of(grads.begin(), grads.end(), [](const Tensor& g) { return g.defined() && !g.has_storage(); });
    return at::GradMode::is_enabled() || several_at_once() || mapped ? of_framework(all, grads)
                                                                     : of_ours(all, steps, grads, recorded);
  }

  // Under create_graph, and for gradients of several backwards: as autograd makes them, by running the layer again.
  variable_list of_framework(variable_list all, const variable_list& grads) {
    const bool create_graph = at::GradMode::is_enabled();
    const at::AutoGradMode enabled(true);
    variable_list sources, outputs, given, found(num_outputs());
    std::vector<size_t> places;
    for (size_t k = 0; k < all.size(); ++k) {
      if (!all[k].defined() || !task_should_compute_output(k)) continue;
      // A view: two inputs may be one tensor, each with a gradient of its own.
      all[k] = all[k].view_as(all[k]);
      sources.push_back(all[k]), places.push_back(k);
    }
    const Output again = framework(of, sequence(all));
    for (size_t k = 0; k < grads.size(); ++k)
      if (grads[k].defined()) outputs.push_back(listed(again)[k]), given.push_back(grads[k]);
    const auto made = torch::autograd::grad(outputs, sources, given, create_graph, create_graph, true);
    for (size_t k = 0; k < places.size(); ++k) found[places[k]] = made[k];
    return found;
  }

  variable_list of_ours(const variable_list& all, std::vector<Steps> steps, const variable_list& grads,
                        const std::vector<bool>& recorded) {
    const Sequence in = sequence(all);
    const Tensor input = torchgradx::by_step(of, in.input);  // [T, B, I]
    const int64_t directions = of.directions(), parts = of.projects ? 3 : 2;
    const int64_t width = steps[0].states.size(2);
    const auto by_step = [&](size_t k) {  // [B, *, *] -> [*, B, *]
      if (k >= grads.size() || !grads[k].defined()) return Tensor();
      const Tensor& order = of.packing.sorted;
      return (order.defined() ? grads[k].index_select(0, order) : grads[k]).transpose(0, 1);
    };
    Tensor states = by_step(0), last, cells;
    if (!states.defined()) states = at::zeros({input.size(0), input.size(1), directions * width}, input.options());
    if (!of.single) last = by_step(1);
    if (of.cell == Cell::kLstm) cells = by_step(of.single ? 1 : 2);
    variable_list found(num_outputs());
    std::vector<Tensor> first_states, first_cells;
    for (int64_t d = 0; d < directions; ++d) {
      const int64_t from = kWeights + d * of.weights(), site = d * parts;
      const auto alone = [&](int64_t s) { return recorded[s] && uses[s]->fuses_alone(input.size(0), input); };
      const bool second_alone = alone(site + 1);
      if (second_alone && alone(site) && !uses[site]->held) {  // nor is the graph kept then
        steps[d].spent = true;
        saved[num_outputs() + 2 * d + 1].reset_data();  // whether this backward fails or not
      }
      const GateGradients at = through_time(
          of, d, input, in, steps[d],
          {states.narrow(2, d * width, width), last.defined() ? last[d] : last, cells.defined() ? cells[d] : cells},
          task_should_compute_output(kInput));
      first_states.push_back(at.first_state), first_cells.push_back(at.first_cell);
      if (at.layer_input.defined())
        found[kInput] = found[kInput].defined() ? found[kInput].add_(at.layer_input) : at.layer_input;
      const int64_t bias = of.biases ? 2 : -1;
      const Tensor g = rows(at.input);
      std::shared_ptr<cpu::SharedGrads> shared;
      if (input.is_cpu() && at.state.is_same(at.input) && recorded[site] && recorded[site + 1] &&
          uses[site]->wants_weight && uses[site + 1]->wants_weight)
        shared = std::make_shared<cpu::SharedGrads>(
            cpu::SharedGrads{rows(steps[d].states).squeeze(1), uses[site + 1]->wants_bias, steps[d].late});
      weight(found, site, recorded, {rows(input), {}, {}, shared}, g, from, bias);
      if (shared && shared->weight.defined() && second_alone) {
        const auto [grad_weight, grad_bias, sq_norms] = shared->second();
        uses[site + 1]->finish(sq_norms);
        found[from + 1] = grad_weight;
        if (shared->bias) found[from + 1 + bias] = grad_bias;
      } else {
        const Tensor previous = rows(steps[d].previous());
        weight(found, site + 1, recorded, {previous, {}, {}, shared}, shared ? g : rows(at.state), from + 1, bias);
      }
      if (of.projects)
        weight(found, site + 2, recorded, {rows(at.projected), {}, {}}, rows(at.out), from + of.weights() - 1, -1);
    }
    if (found[kInput].defined()) found[kInput] = from_steps(of, found[kInput], in.input);
    if (task_should_compute_output(kState)) found[kState] = at::stack(first_states).to(in.state.scalar_type());
    if (task_should_compute_output(kCell)) found[kCell] = at::stack(first_cells).to(in.cell.scalar_type());
    return found;
  }

  // [T, B, *] -> [B, 1, T, *]: rows of samples, whatever T is
  Tensor rows(const Tensor& t) const {
    const Tensor same = t.to(dtype);
    return (of.packing.unsorted.defined() ? same.index_select(1, of.packing.unsorted) : same)
        .transpose(0, 1)
        .unsqueeze(1);
  }

  // One weight, and the bias `bias` places on: a Linear over all steps.
  void weight(variable_list& found, int64_t site, const std::vector<bool>& recorded, const Saved& operand,
              const Tensor& g, int64_t at, int64_t bias) {
    if (into) into->operands[site].emplace(operand.input.squeeze(1), g.squeeze(1));
    const auto& use = uses[site];
    if (!use) return;
    const bool biased = bias > 0 && task_should_compute_output(at + bias);
    const Gradients made =
        use->gradients(operand, {}, g, {false, task_should_compute_output(at), biased}, recorded[site]);
    found[at] = made.weight;
    if (bias > 0) found[at + bias] = made.bias;
  }
};

}  // namespace

Output call_recurrent(const std::vector<std::shared_ptr<Site>>& sites, const Recurrence& of, Sequence in,
                      const std::shared_ptr<Gathered>& into) {
  const int64_t parts = of.projects ? 3 : 2;
  const int64_t cells = in.weights[1].size(0) / (of.cell == Cell::kLstm ? 4 : of.cell == Cell::kGru ? 3 : 1);
  const int64_t states = of.projects ? in.weights[of.weights() - 1].size(0) : cells;
  const int64_t width = of.directions() * states;
  const int64_t rows = of.packing.rows.defined() ? of.packing.batch_sizes[0].item<int64_t>() : in.input.size(0);
  const auto zeros = [&](int64_t size) { return at::zeros({of.directions(), rows, size}, in.input.options()); };
  const bool late = !in.state.defined() && !into;
  if (!in.state.defined()) in.state = zeros(states);
  if (!in.cell.defined() && of.cell == Cell::kLstm) in.cell = zeros(cells);
  variable_list all = listed(in);
  if (std::any_of(all.begin(), all.end(), has_tangent)) {
    for (const auto& site : sites)
      if (const auto pass = site->recorder->current()) pass->refusals.emplace_back(site->index, "tangents");
    return framework(of, in);
  }
  std::vector<c10::intrusive_ptr<Use>> uses;
  bool any = into != nullptr;
  if (into) uses.resize(of.directions() * parts), into->operands.resize(uses.size());
  for (size_t s = 0; s < sites.size(); ++s) {
    const int64_t part = s % parts, from = s / parts * of.weights();
    const bool biased = of.biases && part < 2;
    const Tensor& w = in.weights[part < 2 ? from + part : from + of.weights() - 1];
    uses.push_back(begin_use(sites[s], in.input, w,
                             biased ? std::optional<Tensor>(in.weights[from + part + 2]) : std::nullopt,
                             at::IntArrayRef({rows, width})));
    any = any || uses.back();
  }
  if (!any) return framework(of, in);
  if (at::autocast::is_autocast_enabled(in.input.device().type())) {  // an LSTM that goes to oneDNN, see served()
    for (Tensor& t : all) t = cast(t);
    in = sequence(all);
  }
  const c10::impl::ExcludeDispatchKeyGuard cast_already(c10::autocast_dispatch_keyset);
  const auto node = make_node<RecurrentNode>();
  node->set_next_edges(torch::autograd::collect_next_edges(all));
  node->of = of, node->uses = uses, node->into = into, node->dtype = in.input.scalar_type();
  std::vector<Steps> steps;
  std::optional<py::gil_scoped_release> others(std::in_place);  // as torch's own functions
  const Output found = run(of, in, steps, late);
  others.reset();
  node->late = steps[0].late;
  if (node->late && !of.both_ways)  // the output itself: so that it is known if somebody writes into that
    steps[0].states = found.states.detach().transpose(0, 1);
  node->save(in, steps);
  for (const Tensor& t : listed(found)) torch::autograd::set_history(t, node);
  // Where the samples are is proven at both: a loss may use either alone.
  for (size_t k = 0; k < uses.size(); ++k)
    if (uses[k]) uses[k]->pass->watch(uses[k]->index, k % parts && !of.single ? found.last : found.states);
  return found;
}

}  // namespace torchgradx
