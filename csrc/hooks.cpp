// What hooks on parameters leave behind: torch keeps the dictionary that they stood in, and to look into it each
// backward takes Python's lock and wraps the gradient. That costs half a microsecond a parameter though it is empty.
#include "pass.h"

#include <ATen/PythonTorchFunctionTLS.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/autograd/variable.h>

namespace torchgradx {
namespace {

struct NothingInBetween {  // no finalizers, no modes, no classes' own ways
  using TorchFunction = at::impl::PythonTorchFunctionTLS;
  const int collects = PyGC_Disable();
  const at::impl::TorchFunctionDisabledState asks = TorchFunction::get_disabled_state();
  NothingInBetween() {
    TorchFunction::set_disabled_state(at::impl::TorchFunctionDisabledState::ALL_DISABLED);
  }
  ~NothingInBetween() {
    TorchFunction::set_disabled_state(asks);
    if (collects) PyGC_Enable();
  }
};

// On whatever thread: it may be about to call a hook.
bool any_backward() {
  const py::object runs = py::module_::import("torch.autograd.graph").attr("_engine_run_backward").attr("__code__");
  const py::dict frames = py::module_::import("sys").attr("_current_frames")();
  for (const auto& [thread, top] : frames)
    for (auto frame = py::reinterpret_borrow<py::object>(top); !frame.is_none(); frame = frame.attr("f_back"))
      if (py::object(frame.attr("f_code")).is(runs)) return true;
  return false;
}

// Of leaves. Nothing is done, and false returned, while a backward runs: from here to the end Python's lock is not let
// go, so none begins.
bool drop_emptied_hooks(const std::vector<py::object>& leaves) {
  const NothingInBetween nothing;
  if (any_backward()) return false;
  const auto dropped = [](const py::object& leaf, const char* kind) {
    const py::object hooks = leaf.attr(kind);
    if (hooks.is_none() || py::len(hooks) > 0) return false;
    leaf.attr(kind) = py::none();
    return true;
  };
  for (const py::object& leaf : leaves) {
    dropped(leaf, "_backward_hooks");
    if (dropped(leaf, "_post_accumulate_grad_hooks"))  // Python's end of it alone
      torch::autograd::impl::set_post_acc_grad_hooks(THPVariable_Unpack(leaf.ptr()), nullptr);
  }
  return true;
}

}  // namespace

void bind_hooks(py::module_& m) {
  m.def("drop_emptied_hooks", drop_emptied_hooks, py::arg("leaves"));
}

}  // namespace torchgradx
