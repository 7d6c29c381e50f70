// A graph node of our own: torch::autograd::Function costs half a microsecond more, which a small layer feels.
#pragma once

#include "pass.h"

#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/saved_variable.h>

#include <memory>
#include <type_traits>
#include <vector>

namespace torchgradx {

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
