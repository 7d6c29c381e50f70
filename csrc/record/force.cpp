// The passes in force on a thread, and the pass that a recomputation belongs to.
#include "pass.h"

#include <ATen/SequenceNumber.h>
#include <ATen/core/grad_mode.h>
#include <ATen/record_function.h>
#include <torch/csrc/autograd/engine.h>

#include <algorithm>

namespace torchgradx {
namespace {

using torch::autograd::get_current_graph_task_id;

struct InForce {
  const Recorder* recorder;
  std::shared_ptr<Pass> pass;
  uint64_t first;  // of the graph nodes that its forward makes
};

thread_local std::vector<InForce> in_force;  // of each probe: replicas and other threads run at the same time

constexpr size_t kUnrecorded = 64;

// A recomputation that asked for its pass. The nodes that it makes are of that pass too, and are run by backwards
// inside of this one.
struct Asked {
  const Recorder* recorder;
  int64_t task;
  std::weak_ptr<void> running;  // gone when that backward ends
  std::weak_ptr<Pass> pass;     // empty: none was recorded
};

thread_local std::vector<Asked> asked;

}  // namespace

bool Stretch::holds(const Node& node) const {
  return node.thread_id() == thread && node.sequence_nr() >= first && node.sequence_nr() < last;
}

void Recorder::enlist(const std::shared_ptr<Pass>& pass) {
  const std::lock_guard<std::mutex> lock(mutex);
  alive_.erase(std::remove_if(alive_.begin(), alive_.end(), [](const auto& weak) { return weak.expired(); }),
               alive_.end());
  alive_.push_back(pass);
}

std::vector<std::shared_ptr<Pass>> Recorder::living() const {
  std::vector<std::shared_ptr<Pass>> found;
  const std::lock_guard<std::mutex> lock(mutex);
  for (const auto& weak : alive_)
    if (auto pass = weak.lock()) found.push_back(std::move(pass));
  return found;
}

void Recorder::push(std::shared_ptr<Pass> pass) {
  if (pass) enlist(pass);
  in_force.push_back({this, std::move(pass), at::sequence_number::peek()});
}

void Recorder::pop() {
  for (auto i = in_force.size(); i-- > 0;)
    if (in_force[i].recorder == this) {
      const InForce left = std::move(in_force[i]);
      in_force.erase(in_force.begin() + static_cast<int64_t>(i));
      const Stretch made{at::RecordFunction::currentThreadId(), left.first, at::sequence_number::peek()};
      if (left.pass) left.pass->forget_uses();
      const std::lock_guard<std::mutex> lock(mutex);
      if (left.pass) {
        left.pass->made.push_back(made);
      } else if (made.first < made.last) {
        if (unrecorded_.size() == kUnrecorded) unrecorded_.erase(unrecorded_.begin());
        unrecorded_.push_back(made);
      }
      return;
    }
}

int64_t Recorder::depth() const {
  return std::count_if(in_force.begin(), in_force.end(),
                       [this](const InForce& entry) { return entry.recorder == this; });
}

std::optional<std::shared_ptr<Pass>> Recorder::own(const Node& node) const {
  const auto holds = [&](const Stretch& stretch) { return stretch.holds(node); };
  const auto passes = living();
  const std::lock_guard<std::mutex> lock(mutex);
  for (auto pass = passes.rbegin(); pass != passes.rend(); ++pass)
    if (std::any_of((*pass)->made.begin(), (*pass)->made.end(), holds)) return *pass;
  if (std::any_of(unrecorded_.begin(), unrecorded_.end(), holds)) return nullptr;
  const int64_t task = get_current_graph_task_id();
  for (auto outer = asked.rbegin(); outer != asked.rend(); ++outer)
    if (outer->recorder == this && outer->task < task && !outer->running.expired()) return outer->pass.lock();
  return std::nullopt;
}

void Recorder::remember(const std::shared_ptr<Pass>& pass) const {
  const int64_t task = get_current_graph_task_id();
  std::shared_ptr<void> running;
  const auto over = [&](const Asked& before) {
    if (before.task == task) running = before.running.lock();
    return before.running.expired() || (before.task == task && before.recorder == this);
  };
  asked.erase(std::remove_if(asked.begin(), asked.end(), over), asked.end());
  if (!running) {
    running = std::make_shared<int>();
    torch::autograd::Engine::get_default_engine().queue_callback([running] {});
  }
  asked.push_back({this, task, running, pass});
}

std::optional<std::shared_ptr<Pass>> Recorder::original(const Node& node) const {
  if (auto known = own(node)) return known;
  if (before_.holds(node)) return nullptr;
  return std::nullopt;
}

std::shared_ptr<Pass> Recorder::current() const {
  for (auto i = in_force.size(); i-- > 0;)
    if (in_force[i].recorder == this) return in_force[i].pass;
  if (get_current_graph_task_id() == -1) {
    if (!at::GradMode::is_enabled()) return nullptr;
  } else {
    const NodePtr node = torch::autograd::get_current_node();
    if (const auto known = node ? original(*node) : std::nullopt) {
      remember(*known);
      return *known;
    }
    const auto passes = living();  // of what is called outside of the model no stretch is known
    const auto is_direct = [](const auto& pass) { return pass->called_directly; };
    if (held_ <= 0 || std::none_of(passes.begin(), passes.end(), is_direct)) return nullptr;
  }
  py::gil_scoped_acquire gil;
  return called_directly.function().cast<std::shared_ptr<Pass>>();
}

void Recorder::hold() {
  ++held_;
}

void Recorder::release() {
  if (--held_ > 0) return;
  py::gil_scoped_acquire gil;
  const py::error_scope pending;  // of a checkpoint, which ends its recomputation early by an exception
  try {
    drained.function();
  } catch (py::error_already_set& interrupt) {  // a destructor calls
    interrupt.discard_as_unraisable("torchgradx");
  }
}

}  // namespace torchgradx
