// How a forward's graph looks, so that what was found of its nodes can be taken over by another that looks the same.
#include "at_node.h"

#include <c10/util/flat_hash_map.h>
#include <torch/csrc/autograd/python_cpp_function.h>
#include <torch/csrc/autograd/python_hook.h>
#include <torch/csrc/autograd/python_variable.h>

#include <cstring>
#include <typeinfo>

namespace torchgradx {
namespace {

py::object python_of(const NodePtr& node) {
  return py::reinterpret_steal<py::object>(torch::autograd::functionToPyObject(node));
}

// By name: torch does not export the classes of what is written in Python.
template <class T>
bool is_a(const T& object, const char* name) {
  return std::strstr(typeid(object).name(), name) != nullptr;
}

// A graph's nodes, numbered as a walk from the outputs meets them. Held while a forward ends, for it owns the nodes.
class Outline {
 public:
  Outline(const Pass& pass, const std::vector<Tensor>& outputs) {
    numbers_.reserve(1024);
    key_.reserve(1 << 13);
    note(pass.n);
    for (const Tensor& t : outputs) note(t.grad_fn() ? number(t.grad_fn()) : -1), note(t.output_nr());
    for (size_t k = 0; k < nodes_.size(); ++k) describe(pass, k);  // grows as it goes
  }

  // The same for graphs of the same nodes, edges, sizes and dtypes, with the parameters in the same places.
  py::bytes key() const {
    return {reinterpret_cast<const char*>(key_.data()), key_.size() * sizeof(int64_t)};
  }
  bool looks(const py::bytes& other) const {
    const size_t size = key_.size() * sizeof(int64_t);
    return static_cast<size_t>(PyBytes_GET_SIZE(other.ptr())) == size &&
           std::memcmp(PyBytes_AS_STRING(other.ptr()), key_.data(), size) == 0;
  }
  std::vector<int64_t> served(const Trail& trail) const {  // the stations that serve() serves
    std::vector<int64_t> found;
    for (const Stop& stop : trail.stops)
      if (can_serve(*nodes_.at(stop.node), stop)) found.push_back(stop.station);
    return found;
  }
  void serve(const std::shared_ptr<Pass>& pass, const std::shared_ptr<Trail>& trail,
             const std::shared_ptr<Terms>& terms) const {
    for (const Stop& stop : trail->stops)
      if (Node& node = *nodes_.at(stop.node); can_serve(node, stop)) serve_at(node, pass, {trail, &stop}, terms);
  }
  py::list nodes(const std::vector<int64_t>& numbers) const {
    py::list found;
    for (const int64_t k : numbers) found.append(python_of(nodes_.at(k)));
    return found;
  }
  void guard(Pass& pass, const Trail& trail, std::vector<int64_t> sites) const {
    std::vector<std::pair<const Node*, bool>> those;
    for (const auto& [k, inside] : trail.guarded) those.emplace_back(&*nodes_.at(k), inside);
    pass.guard(those, std::move(sites));
  }
  py::dict numbers() const {  // of all nodes
    py::dict found;
    for (size_t k = 0; k < nodes_.size(); ++k) found[python_of(nodes_[k])] = k;
    return found;
  }

 private:
  std::vector<NodePtr> nodes_;
  ska::flat_hash_map<const Node*, int64_t> numbers_;  // which allocates nothing for an entry
  std::vector<int64_t> key_;

  void note(int64_t fact) {
    key_.push_back(fact);
  }

  int64_t number(const NodePtr& node) {
    const auto [entry, fresh] = numbers_.emplace(&*node, static_cast<int64_t>(nodes_.size()));
    if (fresh) nodes_.push_back(node);
    return entry->second;
  }

  void describe(const Pass& pass, size_t k) {
    const NodePtr node = nodes_[k];
    if (is_a(*node, "PyNode"))
      note(reinterpret_cast<int64_t>(Py_TYPE(python_of(node).ptr())));
    else
      note(reinterpret_cast<int64_t>(typeid(*node).name()));  // its address: no hash of it
    note(pass.place_of(*node));
    note(node->num_inputs());
    for (uint32_t i = 0; i < node->num_inputs(); ++i) {
      const auto& metadata = node->input_metadata(i);
      const bool shown = !metadata.was_default_constructed() && !metadata.is_nested_tensor();
      note(shown ? static_cast<int64_t>(metadata.dtype().toScalarType()) : -1);
      if (!shown) continue;
      const auto sizes = metadata.shape_as_dim_vector();
      note(static_cast<int64_t>(sizes.size()));
      for (const c10::SymInt& size : sizes) note(size.maybe_as_int().value_or(-1));
    }
    note(static_cast<int64_t>(node->next_edges().size()));
    for (const auto& edge : node->next_edges()) note(edge.function ? number(edge.function) : -1), note(edge.input_nr);
  }
};

// Counts the hooks beside the extension's own, of which Python's are in one dictionary. Their class is known by
// its name alone, which a sanitizer would look up.
template <class Python, class Hooks>
[[gnu::no_sanitize("vptr")]] size_t count(const Hooks& hooks, const char* python) {
  size_t found = 0;
  for (const auto& hook : hooks)
    if (!is_a(*hook, "torchgradx"))
      found += is_a(*hook, python) ? PyDict_Size(static_cast<const Python*>(hook.get())->dict) : 1;
  return found;
}

}  // namespace

void bind_outline(py::module_& m) {
  m.def("stand", [](const py::list& tables, const py::list& before) {  // whether these dictionaries hold what they did
    for (size_t k = 0; k < tables.size(); ++k) {
      PyObject* const table = PyList_GET_ITEM(tables.ptr(), k);
      PyObject* const then = PyList_GET_ITEM(before.ptr(), k);  // a tuple
      if (PyDict_GET_SIZE(table) != PyTuple_GET_SIZE(then)) return false;
      PyObject* value = nullptr;
      for (Py_ssize_t at = 0, i = 0; PyDict_Next(table, &at, nullptr, &value); ++i)
        if (PyTuple_GET_ITEM(then, i) != value) return false;
    }
    return true;
  });
  m.def("facts", [](const py::list& tables, const py::tuple& keys, const py::list& tensors) {
    std::string flags;  // of each dictionary: whether these are true; of each tensor: whether it is trained
    for (const py::handle table : tables)
      for (const py::handle key : keys) {
        PyObject* const found = PyDict_GetItemWithError(table.ptr(), key.ptr());
        flags.push_back(static_cast<char>(found && PyObject_IsTrue(found)));
      }
    for (const py::handle t : tensors) flags.push_back(static_cast<char>(THPVariable_Unpack(t.ptr()).requires_grad()));
    return py::bytes(flags);
  });
  py::class_<Outline>(m, "Outline")
      .def(py::init<const Pass&, const std::vector<Tensor>&>())
      .def_property_readonly("key", &Outline::key)
      .def("looks", &Outline::looks)
      .def("served", &Outline::served)
      .def("serve", &Outline::serve)
      .def("nodes", &Outline::nodes)
      .def("guard", &Outline::guard)
      .def("numbers", &Outline::numbers);
  m.def("hooked",  // whether a node has hooks besides so many, which may change gradients
        [](const py::object& node, size_t before, size_t after) {
          if (!torch::autograd::THPCppFunction_Check(node.ptr())) return true;
          Node& of = *reinterpret_cast<torch::autograd::THPCppFunction*>(node.ptr())->cdata;
          return !of.tensor_pre_hooks().empty() ||
                 count<torch::autograd::PyFunctionPreHook>(of.pre_hooks(), "PyFunctionPreHook") > before ||
                 count<torch::autograd::PyFunctionPostHook>(of.post_hooks(), "PyFunctionPostHook") > after;
        });
}

}  // namespace torchgradx
