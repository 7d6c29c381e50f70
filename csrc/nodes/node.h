// A graph node of our own: torch::autograd::Function costs half a microsecond more, which a small layer feels.
#pragma once

#include "../record/pass.h"

#include <ATen/LegacyVmapMode.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/saved_variable.h>

#include <memory>
#include <type_traits>
#include <vector>

namespace torchgradx {

// Whether gradients come for several backwards at once (is_grads_batched=True): what the framework differentiates takes
// them, and no kernel. Nothing of it is recorded, since no .grad receives it.
inline bool several_at_once() {
  return at::impl::VmapMode::current_vmap_level() > 0;
}

// Of forward-mode differentiation, for which no node of ours has a formula.
inline bool has_tangent(const Tensor& t) {
  return t.defined() && t._fw_grad(/*level=*/0).defined();
}

// The tensor whose node receives the gradient of t: in-place operations replace a view's node (a Linear's output in
// three dimensions is a view), not its base's. As `end_of` in torchgradx/sites/several.py.
inline Tensor end_of(const Tensor& t) {
  if (!t.is_view()) return t;
  const Tensor base(t._base());
  return base.grad_fn() && base.numel() == t.numel() && base.is_contiguous() && t.is_contiguous() ? base : t;
}

struct SavingNode : Node {  // Python sees nothing of what it saved
  virtual std::vector<const torch::autograd::SavedVariable*> all_saved() const = 0;
};

template <class T>
auto make_node() {
  if constexpr (std::is_same_v<NodePtr, std::shared_ptr<Node>>)
    return std::shared_ptr<T>(new T(), [](T* node) { deleteNode(node); });  // torch's, found by its argument
  else
    return c10::make_intrusive<T>();
}

}  // namespace torchgradx
