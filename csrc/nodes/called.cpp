// A call of a module whose parameters were served at the graph's nodes when it was called last: what
// torchgradx/sites/rerun.py asks of any call, at once, for asking takes longer than a small norm.
#include "node.h"

#include <ATen/SavedTensorHooks.h>
#include <ATen/autocast_mode.h>
#include <ATen/core/grad_mode.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <c10/core/impl/TorchDispatchModeTLS.h>
#include <torch/csrc/autograd/python_cpp_function.h>
#include <torch/csrc/autograd/python_variable.h>

namespace torchgradx {
namespace {

// Tensors of no class of their own.
bool tensors(const py::tuple& given, std::vector<Tensor>& found) {
  for (const py::handle t : given) {
    if (!THPVariable_CheckExact(t.ptr())) return false;
    found.push_back(THPVariable_Unpack(t.ptr()));
    if (found.back().is_nested()) return false;
  }
  return true;
}

// Those that are trained, by their places; none where one is missing, or computed by others.
std::vector<Slot> trained(const py::object& module, const py::tuple& names, const py::tuple& places) {
  static PyObject* const kParameters = PyUnicode_InternFromString("_parameters");
  const auto own = py::reinterpret_steal<py::object>(PyObject_GenericGetDict(module.ptr(), nullptr));
  PyObject* const held = own ? PyDict_GetItemWithError(own.ptr(), kParameters) : nullptr;
  std::vector<Slot> slots;
  for (size_t k = 0; k < names.size(); ++k) {
    PyObject* const found = held ? PyDict_GetItemWithError(held, names[k].ptr()) : nullptr;
    if (!found || !THPVariable_Check(found)) {
      PyErr_Clear();
      return {};
    }
    const Tensor& p = THPVariable_Unpack(found);
    if (!p.is_leaf()) return {};
    if (p.requires_grad()) slots.emplace_back(places[k].cast<int64_t>(), p);
  }
  return slots;
}

bool observed() {
  return watching() || c10::impl::TorchDispatchModeTLS::stack_len() > 0 ||
         c10::impl::tls_is_dispatch_key_included(c10::DispatchKey::FuncTorchDynamicLayerFrontMode) ||
         at::SavedTensorDefaultHooks::get_hooks(/*ignore_is_tracing=*/true).has_value();
}

}  // namespace

void bind_called(py::module_& m) {
  m.def("called",  // None: there is more to ask; else (pass, use, node of the output, its number, version, autocast)
        [](const Recorder& recorder, int64_t site, const py::object& module, const py::tuple& names,
           const py::tuple& places, uint64_t first, const py::tuple& args, const py::object& out) -> py::object {
          std::vector<Tensor> given, outputs;
          if (!at::GradMode::is_enabled() || recorder.depth() == 0 || observed()) return py::none();
          if (!tensors(args, given) || !tensors(py::make_tuple(out), outputs)) return py::none();
          const Tensor& output = outputs[0];
          const auto slots = trained(module, names, places);
          const auto run = recorder.current();
          if (!run || slots.empty() || !output.requires_grad() || !output.grad_fn() || output.dim() == 0)
            return py::none();
          const int64_t use = run->call(site, slots, output.sizes(), given);
          std::vector<int64_t> those;
          for (const Slot& slot : slots) those.push_back(slot.first);
          run->enclose(those, first);
          const Tensor end = end_of(output);
          run->watch(use, end);
          const auto device = output.device().type();
          const bool casts = at::autocast::is_autocast_available(device) && at::autocast::is_autocast_enabled(device);
          const auto node = py::reinterpret_steal<py::object>(torch::autograd::functionToPyObject(end.grad_fn()));
          return py::make_tuple(run, use, node, end.output_nr(), output._version(),
                                casts ? py::cast(at::autocast::get_autocast_dtype(device)) : py::object(py::none()));
        });
  m.def("undelivered",  // calls a parameter's hook where `delivered` lacks its place, and in an audit
        [](const Recorder& recorder, const py::dict& delivered, int64_t place, const py::object& hook,
           const py::object& gradient) -> py::object {
          const py::int_ task(torch::autograd::get_current_graph_task_id());
          PyObject* const places = recorder.auditing ? nullptr : PyDict_GetItemWithError(delivered.ptr(), task.ptr());
          return places && PySet_Contains(places, py::int_(place).ptr()) == 1 ? py::none() : hook(gradient);
        });
}

}  // namespace torchgradx
