// What one backward adds to a record, the way back from it, and what a pass has come to.
#include "pass.h"

#include <ATen/ATen.h>
#include <ATen/EmptyTensor.h>
#include <ATen/core/grad_mode.h>

#include <algorithm>
#include <utility>

namespace torchgradx {

using torch::autograd::get_current_graph_task_id;
using torch::autograd::variable_list;

namespace {

// At a parameter's node: under norms only nothing goes through, and clipping is told of what met no pass.
struct Gate : torch::autograd::FunctionPreHook {
  std::weak_ptr<Recorder> recorder;
  int64_t parameter;
  Node* node;  // which owns this

  Gate(const std::shared_ptr<Recorder>& recorder, int64_t parameter, Node* node)
      : recorder(recorder), parameter(parameter), node(node) {}

  variable_list operator()(const variable_list& grads) override {
    const auto of = recorder.lock();
    if (!of || !(of->shields || of->keeps_tape)) return grads;
    const bool has_pass = of->audited(get_current_graph_task_id());
    // The user's hooks that follow what is accumulated are called where nothing is, too.
    if (of->shields ? has_pass && node->tensor_post_acc_grad_hooks() : !has_pass && grads[0].defined()) {
      py::gil_scoped_acquire gil;
      of->received.function(parameter, grads[0]);
    }
    return of->shields && has_pass ? variable_list(1) : grads;
  }
};

}  // namespace

void Recorder::put_gate(int64_t parameter, const NodePtr& node) {
  if (!node || !(shields || keeps_tape)) return;
  for (const auto& hook : node->pre_hooks()) {
    const auto* gate = dynamic_cast<const Gate*>(hook.get());
    if (gate && gate->recorder.lock().get() == this) return;
  }
  node->add_pre_hook(std::make_unique<Gate>(shared_from_this(), parameter, &*node));
}

Tally& Recorder::tally(int64_t task) {
  Tally& found = tallies_[task];
  if (found.balance.empty()) found.balance.assign(parameters, 0);
  return found;
}

void Recorder::open(int64_t task) {
  const std::lock_guard<std::mutex> lock(mutex);
  tally(task);
}

void Recorder::count(int64_t task, int64_t parameter, int64_t edges) {
  tally(task).balance[parameter] += edges;
}

void Tally::refuse(const Refusal& refusal) {
  if (!contains(refusals, refusal)) refusals.push_back(refusal);
}

void Tally::add(const Tally& more) {
  for (size_t p = 0; p < balance.size(); ++p) balance[p] += more.balance[p];
  for (const Refusal& refusal : more.refusals) refuse(refusal);
}

void Recorder::refuse(int64_t site, const std::string& cause) {
  const int64_t task = get_current_graph_task_id();
  const auto opened = [&] {
    const std::lock_guard<std::mutex> lock(mutex);
    return task == -1 || tallies_.count(task) > 0;
  };
  if (!opened()) {
    py::gil_scoped_acquire gil;
    began.function(py::none());
  }
  const std::lock_guard<std::mutex> lock(mutex);
  refuse_locked(site, cause);
}

void Recorder::refuse_locked(int64_t site, const std::string& cause) {
  tally(get_current_graph_task_id()).refuse({site, cause});
}

void Recorder::merge(const std::vector<int64_t>& tasks) {
  {
    const std::lock_guard<std::mutex> lock(mutex);
    Tally& whole = tally(-1);
    for (const int64_t task : tasks) whole.add(tally(task));
  }
  drop(tasks);
}

void Recorder::drop(const std::vector<int64_t>& tasks) {
  std::vector<decltype(recorded_)::node_type> dropped;
  const std::lock_guard<std::mutex> lock(mutex);
  for (const int64_t task : tasks) tallies_.erase(task);
  for (auto entry = recorded_.begin(); entry != recorded_.end();) {
    const auto next = std::next(entry);
    if (contains(tasks, entry->first.first)) dropped.push_back(recorded_.extract(entry));
    entry = next;
  }
}

Tally Recorder::whole() const {
  const std::lock_guard<std::mutex> lock(mutex);
  Tally sum{std::vector<int64_t>(parameters, 0), {}};
  for (const auto& [task, tally] : tallies_) sum.add(tally);
  return sum;
}

void Recorder::clear() {
  const std::lock_guard<std::mutex> lock(mutex);
  tallies_.erase(-1);  // backwards under way are of the next record
}

bool Recorder::audited(int64_t task) const {
  const std::lock_guard<std::mutex> lock(mutex);
  return contains(audited_, task);
}

bool Recorder::audit(int64_t task) {
  if (contains(audited_, task)) return false;
  if (audited_.size() >= 64) {  // those that are open stay: more may run inside of one
    const auto ended = [&](int64_t each) { return tallies_.count(each) == 0; };
    const auto first = std::find_if(audited_.begin(), audited_.end(), ended);
    if (first != audited_.end()) audited_.erase(first);
  }
  audited_.push_back(task);
  return true;
}

void Recorder::add_recorded(int64_t parameter, const Tensor& gradient, double magnitude) {
  const at::NoGradGuard no_grad;
  const std::pair<int64_t, int64_t> key(get_current_graph_task_id(), parameter);
  Recorded mine{gradient.reshape(-1), magnitude, Version(gradient)};
  for (;;) {
    decltype(recorded_)::node_type before;
    {
      const std::lock_guard<std::mutex> lock(mutex);
      before = recorded_.extract(key);
      if (before.empty()) {
        recorded_.emplace(key, std::move(mine));
        return;
      }
    }
    const Recorded& kept = before.mapped();
    mine = {kept.sum + mine.sum, kept.size + mine.size, mine.version, mine.changed || !kept.stands()};
  }
}

std::pair<std::optional<Tensor>, double> Recorder::take_recorded(int64_t task, int64_t parameter) {
  decltype(recorded_)::node_type found;
  {
    const std::lock_guard<std::mutex> lock(mutex);
    found = recorded_.extract({task, parameter});
  }
  if (found.empty() || !found.mapped().stands()) return {std::nullopt, 0};
  return {found.mapped().sum, found.mapped().size};
}

std::vector<std::pair<int64_t, int64_t>> Recorder::untaken(const std::vector<int64_t>& tasks) const {
  std::vector<std::pair<std::pair<int64_t, int64_t>, Tensor>> left;
  {
    const std::lock_guard<std::mutex> lock(mutex);
    for (const auto& [key, recorded] : recorded_)
      if (contains(tasks, key.first)) left.emplace_back(key, recorded.sum);
  }
  std::vector<std::pair<int64_t, int64_t>> untaken;
  for (const auto& [key, sum] : left)
    if (sum.any().item<bool>()) untaken.push_back(key);
  return untaken;
}

void Pass::enter(int64_t task, const Node* at) {
  py::gil_scoped_acquire gil;  // before the mutex: under it, the name of a Function in Python asks for it
  recorder->began.function(shared_from_this());
  const auto passes = recorder->living();
  const std::lock_guard<std::mutex> lock(recorder->mutex);
  if (!called_directly) audit_edges(at, passes);
  task_ = task;
}

Pass::State Pass::state() const {
  const std::lock_guard<std::mutex> lock(recorder->mutex);
  return {entries, tape_, dots, create_graph, retained};
}

void Pass::keep_on_tape(OnTape use) {
  const std::lock_guard<std::mutex> lock(recorder->mutex);
  tape_.push_back(std::move(use));
}

std::vector<OnTape> Pass::take_tape() {
  const std::lock_guard<std::mutex> lock(recorder->mutex);
  return std::exchange(tape_, {});
}

void Pass::restore(const State& state) {
  take_tape();
  for (const OnTape& use : state.tape) keep_on_tape(use);
  entries = state.entries, dots = state.dots;
  create_graph = state.create_graph, retained = state.retained;
}

void Pass::forget() {
  clear();
  create_graph = retained = false;
}

namespace {

// Not through the dispatcher, which is in no cache when the record is read.
Tensor zeros(int64_t n) {
  Tensor found = at::detail::empty_cpu({n}, at::kDouble);
  std::fill_n(found.mutable_data_ptr<double>(), n, 0.0);
  return found;
}

}  // namespace

Tensor Pass::total(const std::optional<std::vector<int64_t>>& parameters) const {
  const at::NoGradGuard no_grad;
  Tensor total;
  OnDevices elsewhere;
  if (!parameters)
    for (const Entry& entry : entries) add_to(total, elsewhere, entry);
  else
    for (const int64_t parameter : *parameters) add_to(total, elsewhere, entries[parameter]);
  // On a GPU two kernels add up all of its parameters, and nothing waits for it: no zeros are copied there. What holds
  // the norms of a weight and of its bias goes in whole: there a view of each would cost half a launch.
  for (const auto& [device, entries] : elsewhere) {
    std::unordered_map<const at::TensorImpl*, int64_t> met;
    for (const Entry* entry : entries) ++met[entry->sq_norms.unsafeGetTensorImpl()];
    std::vector<Tensor> rows;
    for (const Entry* entry : entries) {
      const Tensor& sq_norms = entry->sq_norms;
      int64_t& uses = met[sq_norms.unsafeGetTensorImpl()];
      const bool whole = sq_norms.dim() == 2 && uses == sq_norms.size(0);
      if (whole || uses > 0) rows.push_back(whole ? sq_norms : entry->final().unsqueeze(0));
      if (whole) uses = 0;
    }
    const Tensor more = at::cat(rows).sum(0, false, at::kDouble);
    total = total.defined() ? total.to(more.device()) + more : more;
  }
  return total.defined() ? total : zeros(n);
}

void Pass::add_to(Tensor& total, OnDevices& elsewhere, const Entry& entry) const {
  if (!entry.sq_norms.defined()) return;
  const bool narrow = entry.sq_norms.is_contiguous() && entry.sq_norms.scalar_type() == at::kFloat;
  if (entry.sq_norms.is_cuda() || (entry.sq_norms.is_cpu() && !narrow))
    return elsewhere[entry.sq_norms.device()].push_back(&entry);
  if (!total.defined()) total = zeros(n);
  // An addition of tensors for each of hundreds of parameters would take longer than their kernels.
  if (entry.sq_norms.is_cpu()) {
    const float* from = entry.sq_norms.const_data_ptr<float>() + entry.row * n;
    double* to = total.mutable_data_ptr<double>();
    for (int64_t i = 0; i < n; ++i) to[i] += from[i];
  } else {
    total += entry.final().to(at::kCPU);
  }
}

}  // namespace torchgradx
