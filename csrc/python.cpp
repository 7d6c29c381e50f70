// What Python sees of the passes and the sites; the operators reach it through the dispatcher, see library.cpp.
#include "nodes/node.h"
#include "nodes/site.h"
#include "record/pass.h"

#include <ATen/EmptyTensor.h>
#include <ATen/PythonTorchFunctionTLS.h>
#include <ATen/SequenceNumber.h>
#include <ATen/record_function.h>
#include <torch/csrc/PyInterpreter.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/functions/tensor.h>
#include <torch/csrc/autograd/python_cpp_function.h>
#include <torch/csrc/autograd/python_function.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/autograd/saved_variable.h>

namespace torchgradx {
namespace {

using torch::autograd::SavedVariable;

// getattr(module, name, None), where the module's class knows no such name, without the exception that
// Module.__getattr__ comes after: making it takes longer than a small layer's kernel.
py::object parameter_of(const py::object& module, PyObject* name) {
  static PyObject* const kParameters = PyUnicode_InternFromString("_parameters");
  const auto own = py::reinterpret_steal<py::object>(PyObject_GenericGetDict(module.ptr(), nullptr));
  PyObject* const held = own ? PyDict_GetItemWithError(own.ptr(), kParameters) : nullptr;
  const bool usual = held && PyDict_CheckExact(held) && !PyDict_GetItemWithError(own.ptr(), name);
  PyObject* const found = usual ? PyDict_GetItemWithError(held, name) : nullptr;
  if (PyErr_Occurred()) throw py::error_already_set();
  return found ? py::reinterpret_borrow<py::object>(found) : py::getattr(module, py::handle(name), py::none());
}

struct Held {  // by a module, now
  py::object weight, bias;

  Held(const Site& site, const py::object& module) {
    static PyObject* const kWeight = PyUnicode_InternFromString("weight");
    static PyObject* const kBias = PyUnicode_InternFromString("bias");
    weight = parameter_of(module, kWeight);
    bias = site.layer->biased ? parameter_of(module, kBias) : py::none();
  }
  std::optional<Tensor> maybe_bias() const {
    return bias.is_none() ? std::nullopt : std::optional<Tensor>(bias.cast<Tensor>());
  }
};

// Of a class of its own, or under a mode, a tensor may have another function called than the operator.
bool overridden(const py::object& input, const Held& held) {
  const auto exact = [](const py::object& t) { return THPVariable_CheckExact(t.ptr()); };
  return !exact(input) || !exact(held.weight) || !(held.bias.is_none() || exact(held.bias)) ||
         at::impl::torch_function_mode_enabled();
}

const NodePtr& node_of(const py::object& python) {
  return reinterpret_cast<torch::autograd::THPCppFunction*>(python.ptr())->cdata;
}

}  // namespace

void bind_pass(py::module_& m) {
  py::class_<Recorder, std::shared_ptr<Recorder>>(m, "Recorder")
      .def(py::init<int64_t, py::object, py::object, py::object, py::object, py::object, py::object>())
      .def("push", &Recorder::push, py::arg("run").none(true))
      .def("enlist", &Recorder::enlist)
      .def("pop", &Recorder::pop)
      .def("depth", &Recorder::depth)
      .def("current", &Recorder::current)
      .def_static("next_node",  // that is made on this thread: the thread, and its number there
                  [] { return std::pair(at::RecordFunction::currentThreadId(), at::sequence_number::peek()); })
      .def_static("running_node",  // of a backward, on this thread
                  []() -> std::optional<std::pair<uint64_t, uint64_t>> {
                    const NodePtr node = torch::autograd::get_current_node();
                    if (!node) return std::nullopt;
                    return std::pair(node->thread_id(), node->sequence_nr());
                  })
      .def("refuse", &Recorder::refuse)
      .def("clear", &Recorder::clear)
      .def("hold", &Recorder::hold)
      .def("release", &Recorder::release)
      .def("take_recorded", &Recorder::take_recorded)
      .def("untaken", &Recorder::untaken)
      .def("add_recorded", &Recorder::add_recorded)
      .def_readwrite("auditing", &Recorder::auditing)
      .def_property("asking", &Recorder::asking, &Recorder::set_asking)
      .def_readwrite("keeps_tape", &Recorder::keeps_tape)
      .def_readwrite("shields", &Recorder::shields)
      .def("audited", &Recorder::audited)
      .def_property_readonly("sound",  // nothing was refused, and every edge belongs to a use
                             [](const Recorder& self) {
                               const auto [balance, refusals] = self.whole();
                               const auto even = [](int64_t b) { return b == 0; };
                               return refusals.empty() && std::all_of(balance.begin(), balance.end(), even);
                             })
      .def_property_readonly("balance", [](const Recorder& self) { return self.whole().balance; })
      .def_property_readonly("refusals", [](const Recorder& self) { return self.whole().refusals; })
      .def("open", &Recorder::open)
      .def("merge", &Recorder::merge)
      .def("drop", &Recorder::drop)
      .def_property_readonly("held", &Recorder::held);

  py::class_<Segments, std::shared_ptr<Segments>>(m, "Segments")
      .def(py::init<const Tensor&, const std::optional<Tensor>&, const Tensor&,
                    const std::vector<std::pair<int64_t, int64_t>>&>(),
           py::arg("owners"), py::arg("order"), py::arg("samples"), py::arg("runs"))
      .def_readonly("owners", &Segments::owners)
      .def_readonly("samples", &Segments::samples)
      .def("sq_norms", &Segments::sq_norms);
  py::class_<Pass::State>(m, "State");
  py::class_<Pass, std::shared_ptr<Pass>>(m, "Pass")
      .def(py::init<std::shared_ptr<Recorder>, int64_t, const std::vector<Tensor>&>())
      .def_readonly("n", &Pass::n)
      .def_readonly("wide", &Pass::wide)
      .def_readonly("trainable", &Pass::trainable)
      .def_readonly("create_graph", &Pass::create_graph)
      .def_readonly("structure", &Pass::structure)
      .def_readwrite("called_directly", &Pass::called_directly)
      .def_readwrite("recorded", &Pass::recorded)
      .def_readwrite("keep", &Pass::keep)
      .def_readonly("in_graph", &Pass::in_graph)
      .def_property(
          "outside", [](const Pass& self) { return self.outside ? self.outside->function : py::none(); },
          [](Pass& self, py::object function) {
            self.in_graph = true;
            self.outside = function.is_none() ? nullptr : std::make_unique<Callback>(Callback{std::move(function)});
          })
      .def_readonly("retained", &Pass::retained)
      .def_readwrite("layouts", &Pass::layouts)
      .def_readwrite("segments", &Pass::segments)
      .def_readwrite("hooked", &Pass::hooked)
      .def_readwrite("serial", &Pass::serial)
      .def_readwrite("refusals", &Pass::refusals)
      .def_readonly("silent", &Pass::silent)
      .def("refuse",
           [](Pass& self, int64_t site, const std::string& reason) { self.refusals.emplace_back(site, reason); })
      .def("call", &Pass::call, py::arg("site"), py::arg("slots"), py::arg("sizes"), py::arg("given"))
      .def("expect", &Pass::expect)
      .def("note", &Pass::note)
      .def("watch", &Pass::watch)
      .def("uses",  // -> [(site, sizes, node or None, output_nr)]
           [](const Pass& self) {
             py::list uses;
             for (const Pass::Use& use : self.uses) {
               py::object node = py::none();
               if (use.node) node = py::reinterpret_steal<py::object>(torch::autograd::functionToPyObject(use.node));
               uses.append(py::make_tuple(use.site, at::IntArrayRef(use.sizes).vec(), node, use.output_nr));
             }
             return uses;
           })
      .def("enclose", &Pass::enclose)
      .def("disclose", &Pass::disclose)
      .def(
          "arrive",
          [](Pass& self, const std::vector<int64_t>& parameters, bool enclosed) {
            return self.arrive(parameters, nullptr, enclosed);
          },
          py::arg("parameters"), py::arg("enclosed") = false)
      .def("reaches", [](const Pass& self, const std::vector<int64_t>& parameters) { return self.reaches(parameters); })
      .def("waits", [](Pass& self, int64_t parameter) { return self.waits(parameter); })
      .def_readwrite("directions", &Pass::directions)
      .def_property_readonly("dots", [](const Pass& self) { return self.dots; })  // an undefined tensor is None
      .def("add_dots", &Pass::add_dots)
      .def("keep_on_tape",
           [](Pass& self, py::object use) { self.keep_on_tape(std::make_shared<Callback>(Callback{std::move(use)})); })
      .def("take_tape",
           [](Pass& self) {
             py::list uses;
             for (const OnTape& use : self.take_tape())
               uses.append(use.index() == 0 ? py::cast(std::get<0>(use)) : std::get<1>(use)->function);
             return uses;
           })
      .def(
          "finish",
          [](Pass& self, int64_t parameter, const Tensor& sq_norms, int64_t parts) {
            self.finish(parameter, sq_norms, 0, parts);
          },
          py::arg("parameter"), py::arg("sq_norms"), py::arg("parts") = 1)
      .def("clear", &Pass::clear)
      .def("state", &Pass::state)
      .def("restore", &Pass::restore)
      .def("forget", &Pass::forget)
      .def(
          "add",  // gradients [N, *]; or those of [N, T, O] and activations [N, T, I]
          [](Pass& self, int64_t parameter, const Tensor& grads, const std::optional<Tensor>& activations) {
            const Tensor a = activations.value_or(Tensor());
            self.add(parameter, {-1, a, grads, {Version(a), Version(grads)}});
          },
          py::arg("parameter"), py::arg("grads"), py::arg("activations") = std::nullopt)
      .def("total", &Pass::total, py::arg("parameters") = std::nullopt)
      .def("waiting", &Pass::waiting)
      .def_property_readonly(
          "sound", [](const Pass& self) { return !self.create_graph && self.late().empty() && self.changed().empty(); })
      .def("late", &Pass::late)
      .def("changed", &Pass::changed)
      .def("terms", [](const Pass& self, int64_t parameter) {
        py::list terms;
        for (const Term& term : self.entries[parameter].terms)
          terms.append(py::make_tuple(term.site, term.activations, term.grads, term.segments));
        return terms;
      });
}

void bind_capture(py::module_& m) {
  py::class_<Layer, std::shared_ptr<Layer>>(m, "Layer");
  m.def("embedding_layer", &embedding_layer, py::arg("rows"), py::arg("padding_idx"), py::arg("sparse"),
        py::arg("max_norm"));
  m.def("layer_norm_layer", &layer_norm_layer, py::arg("shape"), py::arg("eps"));
  m.def("rms_norm_layer", &rms_norm_layer, py::arg("shape"), py::arg("eps"));
  m.def("group_norm_layer", &group_norm_layer, py::arg("groups"), py::arg("eps"));
  m.def("instance_norm_layer", &instance_norm_layer, py::arg("eps"));
  m.def("batch_norm_layer", &batch_norm_layer, py::arg("eps"));
  m.def("prelu_layer", &prelu_layer, py::arg("slopes"));
  m.def("linear_layer", &linear_layer, py::arg("transposed") = false);
  m.def(
      "convolution_layer",
      [](std::vector<int64_t> kernel_size, std::vector<int64_t> stride, std::vector<int64_t> padding,
         std::vector<int64_t> dilation, int64_t groups, bool transposed, bool one_dimensional,
         std::vector<int64_t> depth, std::vector<int64_t> pre_pad, std::string pad_mode) {
        return convolution_layer(
            {kernel_size, stride, padding, dilation, groups, transposed, one_dimensional, depth, pre_pad, pad_mode});
      },
      py::arg("kernel_size"), py::arg("stride"), py::arg("padding"), py::arg("dilation"), py::arg("groups"),
      py::arg("transposed"), py::arg("one_dimensional"), py::arg("depth"), py::arg("pre_pad"), py::arg("pad_mode"));

  py::class_<Site, std::shared_ptr<Site>>(m, "Site").def(
      py::init([](std::shared_ptr<Recorder> recorder, int64_t index, int64_t weight, int64_t bias, bool weight_grad,
                  bool taps, int64_t layout, int64_t presumed, py::object planner, LayerPtr layer,
                  const std::array<int64_t, 3>& weight_rows, const std::array<int64_t, 3>& bias_rows) {
        auto site = std::make_shared<Site>();
        site->recorder = std::move(recorder);
        site->index = index;
        site->weight = weight;
        site->bias = bias;
        site->weight_grad = weight_grad;
        site->taps = taps;
        site->layout = static_cast<Layout>(layout);
        site->presumed = static_cast<Layout>(presumed);
        site->planner.reset(new Callback{std::move(planner)});
        site->layer = std::move(layer);
        site->weight_rows = {weight_rows[0], weight_rows[1], weight_rows[2]};
        site->bias_rows = {bias_rows[0], bias_rows[1], bias_rows[2]};
        return site;
      }),
      py::arg("recorder"), py::arg("index"), py::arg("weight"), py::arg("bias"), py::arg("weight_grad"),
      py::arg("taps"), py::arg("layout"), py::arg("presumed"), py::arg("planner"), py::arg("layer"),
      py::arg("weight_rows"), py::arg("bias_rows"));
  m.def("call", &call);
  m.def("packed",  // of what a node saved through hooks: the one that unpacks, and what it is given; None: of others
        [](const py::object& node) -> std::optional<std::vector<std::pair<py::object, py::object>>> {
          const auto* ours = dynamic_cast<const SavingNode*>(&*node_of(node));
          if (!ours) return std::nullopt;
          const auto object = [](const c10::SafePyObject& held) {
            return py::reinterpret_borrow<py::object>(held.ptr(getPyInterpreter()));
          };
          std::vector<std::pair<py::object, py::object>> found;
          for (const SavedVariable* saved : ours->all_saved())
            if (const auto hooks = saved->retrieve_unpack_hook_data())
              found.emplace_back(object(hooks->first), object(hooks->second));
          return found;
        });
  m.def("packs",  // whether a Function in Python saved tensors through hooks
        [](const py::object& node) {
          const auto& saved = reinterpret_cast<THPFunction*>(node.ptr())->saved_variables;
          return std::any_of(saved.begin(), saved.end(),
                             [](const auto& t) { return bool(t.retrieve_unpack_hook_data()); });
        });
  m.def("materialized",  // gradients for a Function in Python, with zeros where the engine gives them in place of None
        [](const py::object& node, std::vector<std::optional<Tensor>> grads) {
          const auto* function = reinterpret_cast<THPFunction*>(node.ptr());
          at::OptionalDeviceGuard guard;
          for (size_t k = 0; k < grads.size() && function->materialize_grads; ++k)
            if (!grads[k]) grads[k] = function->output_info.at(k).zeros(guard);
          return grads;
        });
  m.def("into_slice",  // of the node of an operation that wrote into a view: the operation's own
        [](const py::object& node) -> py::object {
          const auto* slices = dynamic_cast<const torch::autograd::CopySlices*>(&*node_of(node));
          if (!slices || !slices->fn) return py::none();
          return py::reinterpret_steal<py::object>(torch::autograd::functionToPyObject(slices->fn));
        });
  m.def("slice_of",  // of the same: the sizes, strides and offset of the view in its base; None: the base has gaps
        [](const py::object& node) -> std::optional<std::tuple<std::vector<int64_t>, std::vector<int64_t>, int64_t>> {
          const auto* slices = dynamic_cast<const torch::autograd::CopySlices*>(&*node_of(node));
          if (!slices || !slices->base.is_contiguous()) return std::nullopt;
          const auto& view = slices->view;
          return std::tuple(view.sizes().vec(), view.strides().vec(),
                            view.storage_offset() - slices->base.storage_offset());
        });
  m.def("at_node",  // a tensor without memory, whose gradient goes to a node as that of its output
        [](const py::object& node, uint32_t number) {
          const auto& known = node_of(node)->input_metadata(number);
          const auto shape = known.shape_as_dim_vector();
          const at::DimVector strides(shape.size(), 0);
          const Tensor t = at::empty_strided(C10_AS_INTARRAYREF_SLOW(shape), strides, known.options());
          torch::autograd::impl::set_gradient_edge(t, {node_of(node), number});
          return t;
        });
  m.def("forward",  // of a module; None: its own is to be called, and then listen()
        [](const std::shared_ptr<Site>& site, const py::object& module, const py::object& input) -> Tensor {
          if (!THPVariable_Check(input.ptr())) return {};
          const Held held(*site, module);
          if (site->taps && overridden(input, held)) return {};
          const Tensor x = input.cast<Tensor>(), weight = held.weight.cast<Tensor>();
          const auto bias = held.maybe_bias();
          return site->taps ? call_tapped(site, x, weight, bias) : call(site, x, weight, bias);
        });
  m.def("listen",
        [](const std::shared_ptr<Site>& site, const py::object& module, const Tensor& input, const Tensor& output) {
          if (!site->taps) return;  // nothing was to be recorded
          const Held held(*site, module);
          tap(site, {input}, held.weight.cast<Tensor>(), held.maybe_bias(), output);
        });
  m.def("count", [](const std::shared_ptr<Site>& site, const Tensor& input, const Tensor& weight,
                    const std::optional<Tensor>& bias) { begin_use(site, input, weight, bias); });
  m.def(
      "tap",
      [](const std::shared_ptr<Site>& site, const Tensor& input, const Tensor& weight,
         const std::optional<Tensor>& bias, const Tensor& output, const std::optional<Tensor>& mean,
         const std::optional<Tensor>& var) {
        tap(site, {input, mean.value_or(Tensor()), var.value_or(Tensor())}, weight, bias, output);
      },
      py::arg("site"), py::arg("input"), py::arg("weight"), py::arg("bias"), py::arg("output"),
      py::arg("mean") = std::nullopt, py::arg("var") = std::nullopt);

  py::class_<TapeEntry, std::shared_ptr<TapeEntry>>(m, "TapeEntry")
      .def_property_readonly("parameters", &TapeEntry::parameters)
      .def_property_readonly("intact", &TapeEntry::intact)
      .def("weighted", &TapeEntry::weighted, py::arg("factors"), py::arg("parameters"),
           py::call_guard<py::gil_scoped_release>())  // it may run autograd
      .attr("runs_again") = false;

  py::class_<Recurrence>(m, "Recurrence")
      .def(py::init([](int64_t cell, bool biases, bool both_ways, bool projects, bool single, bool training,
                       const std::vector<std::optional<Tensor>>& packing) {
        Recurrence of{static_cast<Cell>(cell), biases, both_ways, projects, single, training, {}};
        Tensor* const to[] = {&of.packing.batch_sizes, &of.packing.rows, &of.packing.sorted, &of.packing.unsorted};
        for (size_t k = 0; k < packing.size() && k < 4; ++k) *to[k] = packing[k].value_or(Tensor());
        return of;
      }));
  py::class_<Gathered, std::shared_ptr<Gathered>>(m, "Gathered")
      .def(py::init<>())
      .def_readonly("operands", &Gathered::operands);
  m.def(
      "call_recurrent",
      [](const std::vector<std::shared_ptr<Site>>& sites, const Recurrence& of, const Tensor& input,
         const std::optional<Tensor>& state, const std::optional<Tensor>& cell, const Tensors& weights,
         const std::shared_ptr<Gathered>& into) {
        const Output out =
            call_recurrent(sites, of, {input, state.value_or(Tensor()), cell.value_or(Tensor()), weights}, into);
        const auto turned = [](const Tensor& t) {  // [directions, B, *]
          return t.defined() ? of_its_own(t.transpose(0, 1)) : t;
        };
        return std::make_tuple(of_its_own(out.states), turned(out.last), turned(out.last_cells));
      },
      py::arg("sites"), py::arg("of"), py::arg("input"), py::arg("state"), py::arg("cell"), py::arg("weights"),
      py::arg("into").none(true) = nullptr);
  m.def("of_its_own", &of_its_own);
  m.def("use_operators_everywhere", [](bool on) { operators_everywhere = on; });  // for tests: as on a GPU

  // A chain of tensor operations takes longer than a small layer's backward, at a time when their code is in no cache.
  m.def("norms_of", [](const Tensor& sq_norms, double factor, bool wide) {  // [N] in float64, on a CPU
    const at::NoGradGuard no_grad;
    const auto from = sq_norms.accessor<double, 1>();
    const Tensor found = at::detail::empty_cpu({from.size(0)}, wide ? at::kDouble : at::kFloat);
    const auto fill = [&](auto* to) {
      for (int64_t n = 0; n < from.size(0); ++n)
        to[n] = static_cast<std::decay_t<decltype(*to)>>(std::sqrt(from[n] < 0 ? 0 : from[n]) * factor);
    };
    if (wide)
      fill(found.mutable_data_ptr<double>());
    else
      fill(found.mutable_data_ptr<float>());
    return found;
  });

  py::class_<SavedVariable>(m, "Saved", py::module_local())  // a tensor kept as autograd keeps one
      .def(py::init([](const Tensor& t) { return SavedVariable(t.detach(), /*is_output=*/false); }))
      .def("unpack", [](const SavedVariable& self) { return self.unpack(); });
}

void bind_at_node(py::module_& m);
void bind_called(py::module_& m);
void bind_outline(py::module_& m);
void bind_trace(py::module_& m);
void bind_watch(py::module_& m);

}  // namespace torchgradx

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  torchgradx::bind_pass(m);
  torchgradx::bind_capture(m);
  torchgradx::bind_outline(m);
  torchgradx::bind_at_node(m);
  torchgradx::bind_called(m);
  torchgradx::bind_watch(m);
  torchgradx::bind_trace(m);
}
