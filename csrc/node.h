// A graph node of our own: torch::autograd::Function costs half a microsecond more, which a small layer feels.
#pragma once

#include "pass.h"

#include <torch/csrc/autograd/function.h>

#include <memory>
#include <type_traits>

namespace torchgradx {

template <class T>
auto make_node() {
  if constexpr (std::is_same_v<NodePtr, std::shared_ptr<Node>>)
    return std::shared_ptr<T>(new T(), [](T* node) { deleteNode(node); });  // torch's, found by its argument
  else
    return c10::make_intrusive<T>();
}

}  // namespace torchgradx
