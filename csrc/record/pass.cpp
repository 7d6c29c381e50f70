// Pass: its uses in the forward, its terms and norms in the backward. The record of all passes is in backward.cpp.
#include "pass.h"

#include <ATen/ATen.h>
#include <ATen/SequenceNumber.h>
#include <ATen/core/grad_mode.h>
#include <ATen/record_function.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/variable.h>

#include <algorithm>

namespace torchgradx {
namespace {

using torch::autograd::get_current_graph_task_exec_info;
using torch::autograd::get_current_graph_task_id;
using torch::autograd::get_current_graph_task_nodes_in_graph;

// Under backward(inputs=...) or autograd.grad, which only captures: no .grad receives anything there.
bool executes(const Node* node) {
  const auto* info = get_current_graph_task_exec_info();
  if (!info || info->empty()) return true;  // a plain backward() runs everything
  const auto found = info->find(const_cast<Node*>(node));
  return found != info->end() && found->second.needed_;
}

// The node that a tensor's gradient goes to, where it receives one.
NodePtr owner_of(const Tensor& tensor) {
  const bool receives = tensor.defined() && tensor.requires_grad() && tensor.is_leaf();
  return receives ? torch::autograd::impl::grad_accumulator(tensor) : NodePtr();
}

std::shared_ptr<const Owners> owners_of(const std::vector<Tensor>& parameters) {
  auto owners = std::make_shared<Owners>();
  owners->parameter.reserve(parameters.size());
  for (const Tensor& tensor : parameters) {
    owners->of.push_back(owner_of(tensor));
    if (owners->of.back()) owners->parameter[&*owners->of.back()] = static_cast<int64_t>(owners->of.size()) - 1;
  }
  return owners;
}

bool same(const std::shared_ptr<const Owners>& owners, const std::vector<Tensor>& parameters) {
  return owners && std::equal(parameters.begin(), parameters.end(), owners->of.begin(), owners->of.end(),
                              [](const Tensor& tensor, const NodePtr& owner) { return owner_of(tensor) == owner; });
}

thread_local const Recorder* asks = nullptr;  // a node for its products, in this thread

template <class Entries, class Is>
std::vector<int64_t> places_of(const Entries& entries, const Is& is) {
  std::vector<int64_t> places;
  for (size_t p = 0; p < entries.size(); ++p)
    if (is(entries[p])) places.push_back(static_cast<int64_t>(p));
  return places;
}

uint64_t mixed(uint64_t hash, uint64_t value) {
  return (hash ^ value) * 0x9E3779B97F4A7C15u + (hash >> 29);
}

// The dimensions of a tensor that may hold the samples, as bits.
int64_t samples_in(const Tensor& given, int64_t n) {
  if (given.is_nested() || given.unsafeGetTensorImpl()->has_symbolic_sizes_strides()) return -1;
  int64_t those = 0;
  for (int64_t d = 0; d < std::min<int64_t>(given.dim(), 8); ++d) those |= int64_t(given.size(d) == n) << d;
  return those;
}

// Where a backward begins, which is not among the nodes that it reaches. Torch hands out those alone, by address: they
// are a member of what holds the others.
std::vector<const Node*> roots_beside(const std::unordered_set<Node*>& reached) {
  using torch::autograd::GraphTask;
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Winvalid-offsetof"
  const size_t offset = offsetof(GraphTask, nodes_in_graph_);
#pragma GCC diagnostic pop
  const auto* task = reinterpret_cast<const GraphTask*>(reinterpret_cast<const char*>(&reached) - offset);
  return {task->graph_roots_.begin(), task->graph_roots_.end()};
}

}  // namespace

Recorder::Recorder(int64_t parameters, py::object began, py::object finish, py::object drained, py::object site_called,
                   py::object received, py::object called_directly)
    : parameters(parameters),
      began{std::move(began)},
      finish{std::move(finish)},
      drained{std::move(drained)},
      site_called{std::move(site_called)},
      received{std::move(received)},
      called_directly{std::move(called_directly)},
      before_{at::RecordFunction::currentThreadId(), 0, at::sequence_number::peek()} {}

std::shared_ptr<const Owners> Recorder::owners() const {
  const std::lock_guard<std::mutex> lock(mutex);
  return owners_;
}

void Recorder::set_owners(std::shared_ptr<const Owners> latest) {
  const std::lock_guard<std::mutex> lock(mutex);
  owners_.swap(latest);
}

bool Recorder::asking() const {
  return asks == this;
}

void Recorder::set_asking(bool on) {
  asks = on ? this : nullptr;
}

Pass::Pass(std::shared_ptr<Recorder> recorder, int64_t n, const std::vector<Tensor>& parameters)
    : recorder(std::move(recorder)), n(n), entries(parameters.size()) {
  trainable.reserve(parameters.size());
  for (size_t p = 0; p < parameters.size(); ++p) {
    const bool trained = parameters[p].requires_grad();
    structure = mixed(structure, trained ? 5 : 6);
    if (!trained) continue;
    trainable.push_back(static_cast<int64_t>(p));
    wide = wide || parameters[p].scalar_type() == at::kDouble;
  }
  // Hundreds of parameters are looked up anew only where one was exchanged.
  owners_ = this->recorder->owners();
  if (!same(owners_, parameters)) {
    this->recorder->set_owners(owners_ = owners_of(parameters));
    for (size_t p = 0; p < parameters.size(); ++p) this->recorder->put_gate(static_cast<int64_t>(p), owners_->of[p]);
  }
  structure = mixed(structure, n > 1 ? 7 : 8);  // where there is one sample nothing is proven
}

bool Pass::track(int64_t parameter, const Tensor& tensor) {
  NodePtr node = owner_of(tensor);
  if (!node || owners_->of[parameter] == node) return true;
  const auto found = owners_->parameter.find(&*node);
  if (found != owners_->parameter.end() && owners_->of[found->second] == node) return false;
  recorder->put_gate(parameter, node);
  auto owners = std::make_shared<Owners>(*owners_);  // of this pass alone
  owners->parameter[&*node] = parameter;
  std::swap(owners->of[parameter], node);
  if (node) owners->former.push_back(std::move(node));
  owners_ = std::move(owners);
  return true;
}

bool Pass::needed(int64_t parameter) const {
  const NodePtr& owner = owners_->of[parameter];
  return !owner || executes(&*owner);
}

int64_t Pass::call(int64_t site, const std::vector<Slot>& slots, at::IntArrayRef sizes,
                   const std::vector<Tensor>& given) {
  if (called_directly) {
    refusals.emplace_back(site, "outside");
    return -1;
  }
  const bool again = get_current_graph_task_id() != -1 && recorder->depth() == 0;
  for (const auto& [parameter, tensor] : slots)
    if (!track(parameter, tensor)) refusals.emplace_back(site, "anothers");
  if (again) return -1;
  for (const auto& slot : slots) ++entries[slot.first].calls;
  silent = silent || !at::GradMode::is_enabled();
  note(site);
  note(static_cast<int64_t>(sizes.size()));
  for (const int64_t size : sizes) structure = mixed(structure, size == n ? 1 : 2);
  // Rows [T N S] at T = 1 or S = 1 are in the order of another layout: its proof holds for one T S. [N, T, *] is clear.
  const size_t flat = n > 1 && !sizes.empty() && sizes[0] != n ? (sizes.size() > 2 ? 2 : 1) : 0;
  for (const int64_t size : sizes.slice(0, flat)) note(size % n == 0 ? size / n : -1);
  const int64_t rows = sizes.empty() ? 0 : c10::multiply_integers(sizes.slice(0, sizes.size() - 1));
  note(ago(rows));
  for (const Tensor& t : given) note(samples_in(t, n));
  uses.push_back({site, at::DimVector(sizes), rows, NodePtr(), 0});
  return forgotten_ + static_cast<int64_t>(uses.size()) - 1;
}

int64_t Pass::ago(int64_t rows) const {
  for (auto use = uses.rbegin(); use != uses.rend(); ++use)  // ids are rows each
    if (use->rows == rows || c10::multiply_integers(use->sizes) == rows) return use - uses.rbegin() + 1;
  return 0;
}

void Pass::expect(int64_t parameter, const Tensor& tensor) {
  track(parameter, tensor);
  ++entries[parameter].calls;
}

void Pass::note(int64_t fact) {
  structure = mixed(structure, static_cast<uint64_t>(fact) + 16);
}

void Pass::watch(int64_t use, const Tensor& output) {
  if (use < forgotten_ || !output.grad_fn()) return;
  Use& seen = uses[use - forgotten_];
  seen.node = output.grad_fn();
  seen.output_nr = static_cast<uint32_t>(output.output_nr());
}

void Pass::forget_uses() {
  forgotten_ += static_cast<int64_t>(uses.size());
  uses.clear();
}

void Pass::enclose(const std::vector<int64_t>& parameters, uint64_t first) {
  spans_.push_back({{at::RecordFunction::currentThreadId(), first, at::sequence_number::peek()}, parameters});
}

void Pass::disclose(const std::vector<int64_t>& parameters, uint64_t first) {
  const auto disclosed = [&](int64_t p) { return contains(parameters, p); };
  for (Span& span : spans_) {
    if (span.made.first < first) continue;
    auto& those = span.parameters;
    those.erase(std::remove_if(those.begin(), those.end(), disclosed), those.end());
  }
}

void Pass::guard(const std::vector<std::pair<const Node*, bool>>& nodes, std::vector<int64_t> sites) {
  guarded_.reserve(guarded_.size() + nodes.size());
  for (const auto& [node, inside] : nodes) guarded_[node] = {node->sequence_nr(), inside};
  guards_ = std::move(sites);
}

const Pass::Guarded* Pass::guarded(const Node& node) const {
  const auto found = guarded_.find(&node);
  return found != guarded_.end() && found->second.sequence_nr == node.sequence_nr() ? &found->second : nullptr;
}

int64_t Pass::place_of(const Node& node) const {
  const auto found = owners_->parameter.find(&node);
  return found == owners_->parameter.end() ? -1 : found->second;
}

bool Pass::encloses(const Node& node, int64_t parameter) const {
  return std::any_of(spans_.begin(), spans_.end(),
                     [&](const Span& span) { return span.made.holds(node) && contains(span.parameters, parameter); });
}

bool Pass::arrive(at::IntArrayRef parameters, const Node* at, bool enclosed) {
  bool any = false, all = true;
  if (recorder->asking()) return false;
  for (const int64_t parameter : parameters) {
    any = any || needed(parameter);
    all = all && needed(parameter);
  }
  if (!any) return false;  // autograd.grad of something else: no gradient of ours is computed
  const int64_t task = get_current_graph_task_id();
  if (task_ != task || !recorded) enter(task, at);
  if (called_directly) return false;
  if (!all) recorder->refuse(-1, "some_inputs");
  if (at::GradMode::is_enabled()) create_graph = true;
  if (torch::autograd::get_current_graph_task_keep_graph()) retained = true;
  const std::lock_guard<std::mutex> lock(recorder->mutex);
  for (const int64_t parameter : parameters)
    if (!enclosed && owners_->of[parameter] && needed(parameter)) recorder->count(task, parameter, -1);
  return true;
}

bool Pass::reaches(at::IntArrayRef parameters) const {
  const auto* reached = get_current_graph_task_nodes_in_graph();
  return std::any_of(parameters.begin(), parameters.end(), [&](int64_t parameter) {
    const NodePtr& owner = owners_->of[parameter];
    return !reached || !owner || reached->count(&*owner) > 0;
  });
}

bool Pass::compiled(const Node& node) {
  return node.name() == "CompiledFunctionBackward";
}

// Once a backward: every edge of its graph into a tracked parameter must belong to a recorded use. Autocast casts a
// weight once for many uses, so an edge into the cast is what counts there. And nobody else may give a gradient to what
// the passes guard.
void Pass::audit_edges(const Node* at, const std::vector<std::shared_ptr<Pass>>& passes) {
  const int64_t task = get_current_graph_task_id();
  if (!recorder->audit(task)) return;
  const auto* reached = get_current_graph_task_nodes_in_graph();
  if (!reached) return;
  std::vector<const Node*> nodes(reached->begin(), reached->end());
  const auto roots = roots_beside(*reached);
  for (const Node* root : roots)
    if (!contains(nodes, root)) nodes.push_back(root);
  if (at && !contains(nodes, at)) nodes.push_back(at);
  const auto count = [&](const Node& node, int64_t parameter) {
    for (const auto& pass : passes)
      if (pass->encloses(node, parameter)) return;
    recorder->count(task, parameter, 1);
  };
  for (const auto& pass : passes)
    if (!pass->guarded_.empty()) pass->audit_guarded(nodes, roots);
  const bool in_graphs = std::any_of(passes.begin(), passes.end(), [](const auto& pass) { return pass->in_graph; });
  std::unordered_map<const Node*, int64_t> casts;
  for (const Node* node : nodes)
    for (const auto& edge : node->next_edges()) {
      if (!edge.function) continue;
      const auto found = owners_->parameter.find(&*edge.function);
      if (found == owners_->parameter.end() || !executes(node) || !executes(found->first)) continue;
      if (node->next_edges().size() == 1 && node->name() == "ToCopyBackward0")
        casts[node] = found->second;
      else if (!in_graphs || !compiled(*node))
        count(*node, found->second);
    }
  if (casts.empty()) return;
  for (const Node* node : nodes)
    for (const auto& edge : node->next_edges()) {
      const auto found = edge.function ? casts.find(&*edge.function) : casts.end();
      if (found != casts.end() && executes(node)) count(*node, found->second);
    }
}

void Pass::audit_guarded(const std::vector<const Node*>& nodes, const std::vector<const Node*>& roots) const {
  const auto inside = [&](const Node* node) {
    const Guarded* found = node ? guarded(*node) : nullptr;
    return found && found->inside;
  };
  bool stray = std::any_of(roots.begin(), roots.end(), inside);
  for (const Node* node : nodes)
    for (const auto& edge : node->next_edges())
      stray = stray || (inside(edge.function ? &*edge.function : nullptr) && !guarded(*node) && executes(node));
  for (const int64_t site : stray ? guards_ : std::vector<int64_t>()) recorder->refuse_locked(site, "not_its_sum");
}

bool Pass::waits(int64_t parameter, int64_t parts) {
  const Entry& entry = entries[parameter];
  return keep || retained || entry.calls != parts || !entry.terms.empty();
}

void Pass::add(int64_t parameter, Term term) {
  Entry& entry = entries[parameter];
  if (entry.sq_norms.defined()) {
    entry.late = true;
    return;
  }
  for (Tensor* operand : {&term.activations, &term.grads})  // not the graph, which a view's base may hold
    if (operand->defined()) *operand = operand->detach();
  if (n == 1)  // it may become the .grad of what is expanded over the batch, into which another backward adds
    term.grads = term.grads.clone(), term.kept[1] = {};
  entry.terms.push_back(std::move(term));
  if (keep || retained || static_cast<int64_t>(entry.terms.size()) < entry.calls) return;
  py::gil_scoped_acquire gil;  // all uses are in: combine them now, and let their operands go
  recorder->finish.function(shared_from_this(), parameter);
}

void Pass::finish(int64_t parameter, const Tensor& sq_norms, int64_t row, int64_t parts) {
  Entry& entry = entries[parameter];
  if (entry.parts > 0 && entry.parts < parts) {
    const at::NoGradGuard no_grad;
    entry.sq_norms = entry.final() + (sq_norms.dim() > 1 ? sq_norms[row] : sq_norms);
    entry.row = 0;
    ++entry.parts;
    return;
  }
  entry.parts = 1;
  entry.late = entry.late || entry.sq_norms.defined();
  entry.sq_norms = sq_norms;
  entry.row = row;
  entry.terms.clear();
}

std::vector<int64_t> Pass::waiting() const {
  return places_of(entries, [](const Entry& entry) { return !entry.terms.empty(); });
}

std::vector<int64_t> Pass::late() const {
  return places_of(entries, [](const Entry& entry) { return entry.late; });
}

std::vector<int64_t> Pass::changed() const {
  return places_of(entries, [](const Entry& entry) {
    return !std::all_of(entry.terms.begin(), entry.terms.end(),
                        [](const Term& term) { return term.kept[0].stands() && term.kept[1].stands(); });
  });
}

void Pass::clear() {
  recorded = create_graph = false;
  dots = Tensor();
  take_tape();
  for (Entry& entry : entries) {
    entry.parts = 0;
    entry.late = false;
    entry.sq_norms = Tensor();
    entry.terms.clear();
  }
}

}  // namespace torchgradx
