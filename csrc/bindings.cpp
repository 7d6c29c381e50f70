// What Python sees of the passes and the sites; the operators reach it through the dispatcher, see library.cpp.
#include "pass.h"
#include "site.h"

#include <ATen/SequenceNumber.h>
#include <torch/csrc/autograd/python_cpp_function.h>
#include <torch/csrc/autograd/saved_variable.h>

namespace torchgradx {
namespace {

using torch::autograd::SavedVariable;

// A tensor kept as autograd keeps one, for layers that run again in Python.
struct Saved {
  SavedVariable value;
  explicit Saved(const Tensor& t) : value(t.detach(), /*is_output=*/false) {}
  Tensor unpack() const {
    return value.unpack();
  }
};

}  // namespace

void bind_pass(py::module_& m) {
  py::class_<Recorder, std::shared_ptr<Recorder>>(m, "Recorder")
      .def(py::init<int64_t, py::object, py::object, py::object>())
      .def("push", &Recorder::push, py::arg("run").none(true))
      .def("pop", &Recorder::pop)
      .def("depth", &Recorder::depth)
      .def("current", &Recorder::current)
      .def("refuse", &Recorder::refuse)
      .def("clear", &Recorder::clear)
      .def("hold", &Recorder::hold)
      .def("release", &Recorder::release)
      .def("take_recorded", &Recorder::take_recorded)
      .def("add_recorded", &Recorder::add_recorded)
      .def("forget_recorded", &Recorder::forget_recorded)
      .def_readwrite("auditing", &Recorder::auditing)
      .def_readwrite("idle", &Recorder::idle)
      .def("audited",
           [](const Recorder& self, int64_t task) {
             return std::find(self.audited.begin(), self.audited.end(), task) != self.audited.end();
           })
      .def_property_readonly("balanced",
                             [](const Recorder& self) {
                               return std::all_of(self.balance.begin(), self.balance.end(),
                                                  [](int64_t b) { return b == 0; });
                             })
      .def_readonly("balance", &Recorder::balance)
      .def_readonly("refusals", &Recorder::refusals)
      .def_property_readonly("held", &Recorder::held);

  m.def("sequence_number", &at::sequence_number::peek);  // of the next graph node on this thread

  py::class_<Pass, std::shared_ptr<Pass>>(m, "Pass")
      .def(py::init<std::shared_ptr<Recorder>, int64_t, const std::vector<Tensor>&>())
      .def_readonly("n", &Pass::n)
      .def_readonly("create_graph", &Pass::create_graph)
      .def_readonly("structure", &Pass::structure)
      .def_readwrite("recorded", &Pass::recorded)
      .def_readwrite("keep", &Pass::keep)
      .def_readonly("retained", &Pass::retained)
      .def_readwrite("layouts", &Pass::layouts)
      .def_readwrite("serial", &Pass::serial)
      .def_readonly("refusals", &Pass::refusals)
      .def("refuse",
           [](Pass& self, int64_t site, const std::string& reason) { self.refusals.emplace_back(site, reason); })
      .def("call", &Pass::call)
      .def("note", &Pass::note)
      .def("watch", &Pass::watch)
      .def("uses",  // -> [(site, sizes, node or None, output_nr)]
           [](const Pass& self) {
             py::list uses;
             for (const Pass::Use& use : self.uses) {
               py::object node = py::none();
               if (use.node) node = py::reinterpret_steal<py::object>(torch::autograd::functionToPyObject(use.node));
               uses.append(py::make_tuple(use.site, use.sizes, node, use.output_nr));
             }
             return uses;
           })
      .def("enclose", &Pass::enclose)
      .def(
          "arrive",
          [](Pass& self, const std::vector<int64_t>& parameters, bool enclosed) {
            return self.arrive(parameters, nullptr, enclosed);
          },
          py::arg("parameters"), py::arg("enclosed") = false)
      .def("waits", &Pass::waits)
      .def("finish", &Pass::finish, py::arg("parameter"), py::arg("sq_norms"), py::arg("row") = 0)
      .def("clear", &Pass::clear)
      .def("add",
           [](Pass& self, int64_t parameter, const Tensor& grads) { self.add(parameter, {-1, Tensor(), grads}); })
      .def("total", &Pass::total)
      .def("waiting", &Pass::waiting)
      .def("late", &Pass::late)
      .def("terms", [](const Pass& self, int64_t parameter) {
        py::list terms;
        for (const Term& term : self.entries[parameter].terms)
          terms.append(py::make_tuple(term.site, term.activations.defined() ? py::cast(term.activations) : py::none(),
                                      term.grads));
        return terms;
      });
}

void bind_capture(py::module_& m) {
  py::class_<Site, std::shared_ptr<Site>>(m, "Site")
      .def(py::init([](std::shared_ptr<Recorder> recorder, int64_t index, int64_t weight, int64_t bias,
                       bool weight_grad, int64_t layout, int64_t presumed, py::object planner) {
             auto site = std::make_shared<Site>();
             site->recorder = std::move(recorder);
             site->index = index;
             site->weight = weight;
             site->bias = bias;
             site->weight_grad = weight_grad;
             site->layout = static_cast<Layout>(layout);
             site->presumed = static_cast<Layout>(presumed);
             site->planner.reset(new Callback{std::move(planner)});
             return site;
           }),
           py::arg("recorder"), py::arg("index"), py::arg("weight"), py::arg("bias"), py::arg("weight_grad"),
           py::arg("layout"), py::arg("presumed"), py::arg("planner"))
      .def_readwrite("kernel_size", &Site::kernel_size)
      .def_readwrite("stride", &Site::stride)
      .def_readwrite("padding", &Site::padding)
      .def_readwrite("dilation", &Site::dilation)
      .def_readwrite("groups", &Site::groups)
      .def_readwrite("pre_pad", &Site::pre_pad)
      .def_readwrite("pad_mode", &Site::pad_mode)
      .def_readwrite("one_dimensional", &Site::one_dimensional);
  m.def("linear", &linear);
  m.def("convolution", &convolution);
  m.def("tap", &tap);

  py::class_<Saved>(m, "Saved").def(py::init<const Tensor&>()).def("unpack", &Saved::unpack);
}

}  // namespace torchgradx
