// One bit per tensor of a forward: is it the same for any batch, computed from parameters and constants alone? See
// torchgradx/graph/constant.py, which says what for. Operators are observed as a profiler observes them: nothing is
// dispatched otherwise for it, so no number changes, whatever autocast or a compiler does.
#include "pass.h"

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/record_function.h>
#include <torch/csrc/autograd/python_cpp_function.h>
#include <torch/csrc/autograd/python_variable.h>

#include <algorithm>

namespace torchgradx {
namespace {

// Of a tensor's memory, which views and in-place writes share: is it constant; is it computed from Python's numbers
// alone, as a range; has data decided how many rows there are of it (x[mask], and what is computed from that); and how
// many elements are samples apart, 0 where that is not known. A weak reference keeps the address of what is gone.
struct Known {
  c10::weak_intrusive_ptr<c10::StorageImpl> memory;
  bool constant, ranged, picked;
  int64_t apart;
};

// Not of a tensor subclass, nor while a compiler traces with symbols: to ask those for their sizes runs Python.
bool has_storage(const Tensor& t) {
  if (!t.defined()) return false;
  const auto* impl = t.unsafeGetTensorImpl();
  return impl->has_storage() && !impl->is_python_dispatch() && !impl->has_symbolic_sizes_strides();
}

void tensors_in(const c10::IValue& value, std::vector<Tensor>& found) {
  if (value.isTensor())
    found.push_back(value.toTensor());
  else if (value.isTensorList())
    for (const Tensor& t : value.toTensorVector()) found.push_back(t);
  else if (value.isList())
    for (const c10::IValue& part : value.toListRef()) tensors_in(part, found);
  else if (value.isTuple())
    for (const c10::IValue& part : value.toTupleRef().elements()) tensors_in(part, found);
}

// Of an operator, which is observed around all that it calls.
struct Operation : at::ObserverContext {
  bool constant = true, ranged = false, pointwise = false, picks = false, picked = false, of_sizes = false;
  bool of_python = false;                  // torch.tensor(list): nobody knows of what data
  std::vector<std::vector<int64_t>> like;  // sizes of its operands that stand as an argument does
  std::vector<Tensor> written;
};

class Watch {
 public:
  Watch(const std::vector<Tensor>& constants, const std::vector<Tensor>& data, int64_t n, int64_t batch_dim)
      : n_(n), batch_dim_(batch_dim) {
    for (const Tensor& t : constants) mark(t, true, false, false, 0);
    for (const Tensor& t : data) mark(t, false, false, false, apart(t, batch_dim_));
    before_ = watching;
    watching = this;
    auto callback = at::RecordFunctionCallback(&Watch::begin, &Watch::end).needsInputs(true).needsOutputs(true);
    handle_ = at::addThreadLocalCallback(callback.scopes({at::RecordScope::FUNCTION}));
  }
  ~Watch() {
    stop();
  }
  void stop() {
    if (!handle_) return;
    at::removeCallback(*handle_);
    handle_.reset();
    Watch** at = &watching;
    while (*at && *at != this) at = &(*at)->before_;
    if (*at) *at = before_;
    known_.clear();
  }

  bool is_constant(const Tensor& t) const {
    if (const Known* const known = find(t)) return known->constant;
    // A number that Python made; parameters that fully_shard brings together; and positions that a compiled part made,
    // of whose operators none is seen: indices, not from NumPy, that are of no sample.
    return has_storage(t) && (t.dim() == 0 || (t.requires_grad() && t.is_leaf()) || are_positions(t));
  }
  bool is_picked(const Tensor& t) const {
    if (const Known* const known = find(t)) return known->picked;
    return picks && t.dim() > 0 && !(t.requires_grad() && t.is_leaf());  // of NumPy, or of a compiled part
  }
  // The graph shows which rows it took: see Forwards.note_routes.
  void unpick(const Tensor& t) {
    if (const Known* const known = find(t)) mark(t, known->constant, known->ranged, false, known->apart);
  }
  // Whether it has the samples where an argument has them: a view of one along its other dimensions, or made of such
  // element by element.
  bool stands(const Tensor& t) const {
    const int64_t known = known_apart(t);
    return known > 0 && known == apart(t, batch_dim_);
  }
  // In which of the first two dimensions it is seen to have them; -1: in none.
  int64_t holds(const Tensor& t) const {
    const int64_t known = known_apart(t);
    for (int64_t dim = 0; known > 0 && dim < 2; ++dim)
      if (known == apart(t, dim)) return dim;
    return -1;
  }
  void mark(const Tensor& t, bool constant, bool ranged, bool picked, int64_t apart) {
    if (!has_storage(t)) return;
    const auto key = t.storage().unsafeGetStorageImpl();
    known_.insert_or_assign(key, Known{t.storage().getWeakStorageImpl(), constant, ranged, picked, apart});
  }
  bool consumed(const py::object& node, uint32_t number) const {
    if (!py::hasattr(node, "_input_metadata") || !torch::autograd::THPCppFunction_Check(node.ptr())) return false;
    const Node* of = &*reinterpret_cast<torch::autograd::THPCppFunction*>(node.ptr())->cdata;
    const auto found = bits_.find({of, number});
    return found != bits_.end() && found->second;
  }
  bool picks = false;  // data decided a count of rows somewhere
  static thread_local Watch* watching;

 private:
  Watch* before_ = nullptr;
  std::optional<at::CallbackHandle> handle_;
  const int64_t n_, batch_dim_;
  int64_t depth_ = 0;  // of the operations that run
  std::unordered_map<const c10::StorageImpl*, Known> known_;
  std::map<std::pair<const Node*, uint32_t>, bool> bits_;  // as consumed, by node and output
  std::vector<NodePtr> kept_;                              // so that no address serves again

  bool are_positions(const Tensor& t) const {
    if ((t.scalar_type() != at::kLong && t.scalar_type() != at::kInt) || !t.storage().resizable()) return false;
    return t.dim() <= batch_dim_ || t.size(batch_dim_) != n_;
  }
  // From one sample to the next, in elements, if they are in this dimension, n*T+t.
  int64_t apart(const Tensor& t, int64_t dim) const {
    if (!has_storage(t) || t.layout() != at::kStrided || t.dim() <= dim || t.size(dim) % n_) return 0;
    return t.stride(dim) * (t.size(dim) / n_);
  }
  const Known* find(const Tensor& t) const {
    const auto found = has_storage(t) ? known_.find(t.storage().unsafeGetStorageImpl()) : known_.end();
    return found == known_.end() ? nullptr : &found->second;
  }
  bool is_ranged(const Tensor& t) const {
    const Known* const known = find(t);
    return known ? known->ranged : t.dim() == 0;  // a number that Python made
  }
  int64_t known_apart(const Tensor& t) const {
    const Known* const known = find(t);
    return known ? known->apart : 0;
  }

  // True if places, from this dimension of x on, pick rows by data. Those of x[:, places] stay in their samples, and
  // numbers say which rows of a constant x come next, but not how many.
  bool takes(const Tensor& x, int64_t dim, const Tensor& places) const {
    const bool mask = places.scalar_type() == at::kBool;
    const int64_t end = dim + (mask ? places.dim() : 1);
    const bool of_samples = !stands(x) || (dim <= batch_dim_ && batch_dim_ < end);
    return of_samples && !is_ranged(places) && (mask || !is_constant(x));
  }
  // Says that of an operator that takes rows of its first operand; nothing of one that makes as many as data says.
  std::optional<bool> takes(const std::string& name, c10::ArrayRef<const c10::IValue> inputs) const {
    const auto of = [&](int64_t dim, size_t places) {
      const Tensor& x = inputs[0].toTensor();
      return takes(x, dim < 0 ? dim + x.dim() : dim, inputs[places].toTensor());
    };
    if ((name == "aten::index_select" || name == "aten::gather") && inputs[1].isInt()) return of(inputs[1].toInt(), 2);
    if (name == "aten::embedding") return of(0, 1);
    if (name == "aten::take") return !is_ranged(inputs[1].toTensor());
    const std::string writes = name.substr(0, name.find_last_not_of('_') + 1);
    if ((writes.rfind("aten::index_", 0) == 0 || writes.rfind("aten::scatter", 0) == 0) && inputs[1].isInt())
      return uint64_t(inputs[1].toInt()) <= uint64_t(batch_dim_) && !is_ranged(inputs[2].toTensor());
    if (name != "aten::index" && writes != "aten::index_put") return std::nullopt;
    int64_t dim = 0;
    for (const auto& places : inputs[1].toOptionalTensorVector()) {
      const bool given = places && places->defined();
      if (given && takes(inputs[0].toTensor(), dim, *places)) return true;
      dim += given && places->scalar_type() == at::kBool ? places->dim() : 1;
    }
    return false;
  }

  void consume(const Tensor& t, bool constant) {
    if (!t.grad_fn()) return;
    // What an operation saves of its own result, hooks may copy before it has ended.
    if (depth_ > 0 && has_storage(t) && !known_.count(t.storage().unsafeGetStorageImpl())) return;
    const auto [entry, fresh] = bits_.emplace(std::make_pair(&*t.grad_fn(), t.output_nr()), constant);
    if (fresh) kept_.push_back(t.grad_fn());
    entry->second = entry->second && constant;
  }

  static std::unique_ptr<at::ObserverContext> begin(const at::RecordFunction& function) {
    auto operation = std::make_unique<Operation>();
    Watch* self = watching;
    if (!self) return operation;
    std::vector<Tensor> operands;
    for (const c10::IValue& value : function.inputs()) tensors_in(value, operands);
    const auto name_of = function.operator_name().value_or(c10::OperatorName("", ""));
    const auto handle = c10::Dispatcher::singleton().findOp(name_of);
    if (handle) {
      operation->pointwise = handle->hasTag(at::Tag::pointwise);
      const std::string& name = handle->schema().name();
      const auto is = [&](const char* start) { return name.rfind(start, 0) == 0; };
      if (c10::ends_with(name, "_as")) operands.resize(1);  // expand_as(other) reads the sizes of `other` alone
      // Places alone are no rows, and what has a gradient is in the graph (routes.py).
      const bool by_data = handle->hasTag(at::Tag::dynamic_output_shape) && !is("aten::nonzero");
      operation->picks = self->takes(name, function.inputs()).value_or(by_data);
      operation->ranged = !is("aten::empty") && !handle->hasTag(at::Tag::nondeterministic_seeded);
      const bool drawn = name == "aten::bernoulli" && handle->schema().overload_name() == "p";
      operation->of_sizes = c10::ends_with(name, "_like") || drawn || is("aten::new_");
      operation->of_python = name == "aten::lift_fresh";
      const auto& arguments = handle->schema().arguments();
      for (size_t k = 0; k < arguments.size() && k < function.inputs().size(); ++k)
        if (arguments[k].alias_info() && arguments[k].alias_info()->isWrite())
          tensors_in(function.inputs()[k], operation->written);
    }
    for (const Tensor& t : operands) {
      if (!t.defined()) continue;
      const bool constant = self->is_constant(t);
      operation->constant = operation->constant && constant;
      operation->ranged = operation->ranged && self->is_ranged(t);
      operation->picks = operation->picks && !t.requires_grad();
      if (self->depth_ == 0 || self->find(t)) operation->picked = operation->picked || self->is_picked(t);
      self->consume(t, constant);
      if (t.is_view())
        self->consume(Tensor(t._base()), constant);  // of one that was written into, the graph has the base
      if (self->stands(t))
        operation->like.push_back(t.sizes().vec());
      else
        operation->pointwise = operation->pointwise && constant;
    }
    ++self->depth_;
    if (!operation->pointwise) operation->like.clear();
    operation->picks = operation->picks && !operation->constant;
    operation->picked = operation->picked || operation->picks;
    self->picks = self->picks || operation->picks;
    return operation;
  }

  static void end(const at::RecordFunction& function, at::ObserverContext* context) {
    Watch* self = watching;
    auto* operation = static_cast<Operation*>(context);
    if (!self || !operation) return;
    self->depth_ = std::max<int64_t>(0, self->depth_ - 1);
    std::vector<Tensor> made;
    for (const c10::IValue& value : function.outputs()) tensors_in(value, made);
    if (!operation->constant)
      for (const Tensor& t : operation->written) self->mark(t, false, false, operation->picked, 0);
    const auto& like = operation->like;
    for (const Tensor& t : made) {
      if (!has_storage(t)) continue;
      const bool alike = std::find(like.begin(), like.end(), t.sizes().vec()) != like.end();
      const bool constant = (operation->constant && !(operation->of_python && t.dim() > 0)) || operation->of_sizes;
      const int64_t apart = alike ? self->apart(t, self->batch_dim_) : self->known_apart(t);
      const Known* const known = self->find(t);  // by an operator that this one calls
      const bool picked = operation->picked || (known && known->picked);
      self->mark(t, constant, operation->ranged && constant && !operation->of_sizes, picked, apart);
    }
  }
};

thread_local Watch* Watch::watching = nullptr;

}  // namespace

void bind_watch(py::module_& m) {
  py::class_<Watch, std::shared_ptr<Watch>>(m, "Watch")
      .def(py::init<const std::vector<Tensor>&, const std::vector<Tensor>&, int64_t, int64_t>())
      .def("stop", &Watch::stop)
      .def("holds", &Watch::holds)
      .def("knows_constant", &Watch::is_constant)
      .def("is_constant", &Watch::consumed)
      .def("is_picked", &Watch::is_picked)
      .def("unpick", &Watch::unpick)
      .def_readonly("picks", &Watch::picks);
}

bool watching() {
  return Watch::watching != nullptr;
}

}  // namespace torchgradx
