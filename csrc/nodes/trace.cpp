// What a compiled graph calls. The compiler does not look into these operators, so that recording is what it is
// outside of graphs; a token goes from each to the next, so that none is moved, merged or left out. Its storage owns
// what the layer's backward needs besides tensors.
#include "../operators/text.h"
#include "site.h"

#include <ATen/ATen.h>
#include <torch/csrc/autograd/function.h>
#include <torch/library.h>

#include <mutex>
#include <unordered_map>

namespace torchgradx {
namespace {

struct Link {  // of the chain that a pass is in a graph
  std::shared_ptr<Pass> pass;
  std::shared_ptr<Site> site;
  c10::intrusive_ptr<Use> use;
  Tensor mean, rstd;
};

// Links by their token's number, and sites by their key: a graph holds tensors and constants alone. Of these a number
// might become a symbol, so a key is written out.
template <class T>
class Numbered {
 public:
  int64_t add(T value) {
    const std::lock_guard<std::mutex> lock(mutex_);
    values_.emplace(++last_, std::move(value));
    return last_;
  }
  T find(int64_t number) {
    const std::lock_guard<std::mutex> lock(mutex_);
    const auto found = values_.find(number);
    return found == values_.end() ? T() : found->second;
  }
  size_t count() {
    const std::lock_guard<std::mutex> lock(mutex_);
    return values_.size();
  }
  void drop(int64_t number) {
    T last;  // dies after the lock: it may call back
    const std::lock_guard<std::mutex> lock(mutex_);
    const auto found = values_.find(number);
    if (found == values_.end()) return;
    last = std::move(found->second);
    values_.erase(found);
  }

 private:
  std::mutex mutex_;
  std::unordered_map<int64_t, T> values_;
  int64_t last_ = 0;
};

Numbered<std::shared_ptr<Link>>& links() {
  static auto* const all = new Numbered<std::shared_ptr<Link>>();  // graphs may outlive what is static
  return *all;
}

Numbered<std::weak_ptr<Site>>& sites() {
  static auto* const all = new Numbered<std::weak_ptr<Site>>();
  return *all;
}

struct Key {  // of a site, while this lives
  const int64_t number;
  explicit Key(const std::shared_ptr<Site>& site) : number(sites().add(site)) {}
  Key(const Key&) = delete;
  ~Key() {
    sites().drop(number);
  }
};

Tensor token_of(std::shared_ptr<Link> link) {
  auto* const number = new int64_t(links().add(std::move(link)));
  const auto drop = [](void* p) {
    links().drop(*static_cast<int64_t*>(p));
    delete static_cast<int64_t*>(p);
  };
  return at::from_blob(number, {1}, drop, at::kLong);
}

std::shared_ptr<Link> link_of(const Tensor& token) {
  TORCHGRADX_CHECK(token.is_cpu() && token.numel() == 1, "token must be that of the layer before; got ",
                   token.toString(), token.sizes());
  return links().find(*token.const_data_ptr<int64_t>());
}

// Of a use in a graph: its site's key, and which of all that were ever traced it is.
std::pair<std::shared_ptr<Site>, int64_t> named(c10::string_view name) {
  const std::string text(name);
  const size_t slash = text.find('/');
  TORCHGRADX_CHECK(slash != std::string::npos, "use must be 'site/number'; got ", text);
  auto site = sites().find(std::stoll(text)).lock();
  TORCHGRADX_CHECK(site, "a graph compiled from an attached model runs without its probe: compile the model again");
  return {std::move(site), std::stoll(text.substr(slash + 1))};
}

// As the compiler was told: laid out like the tensor whose gradient it is.
Tensor like(const Tensor& gradient, const Tensor& of) {
  if (!gradient.defined()) return at::empty({0}, of.options());
  return gradient.to(of.scalar_type()).contiguous(of.suggest_memory_format());
}

std::tuple<Tensor, Tensor> trace_layer(const Tensor& input, const Tensor& weight, const std::optional<Tensor>& bias,
                                       const Tensor& token, c10::string_view name) {
  const at::NoGradGuard no_grad;
  const auto [site, number] = named(name);
  const auto before = link_of(token);
  auto link = std::make_shared<Link>();
  link->site = site;
  if (before) link->pass = before->pass;
  if (link->pass && site->layer->batched(input)) {
    link->use = use_in_graph(site, link->pass, input, weight, bias);
    link->pass->note(number);  // another trace, another structure
  }
  Saved saved;
  const Tensor output = site->layer->forward(input, weight, bias, saved);
  link->mean = saved.mean, link->rstd = saved.rstd;
  return {output, token_of(std::move(link))};
}

std::tuple<Tensor, Tensor, Tensor> trace_backward(const Tensor& grad_output, const Tensor& input, const Tensor& weight,
                                                  const std::optional<Tensor>& bias, const Tensor& token,
                                                  c10::string_view name, std::array<bool, 3> wanted) {
  const auto link = link_of(token);
  const auto site = link && link->site ? link->site : named(name).first;
  if (!link) site->recorder->refuse(site->index, "graph_copied");
  const Saved saved{input, link ? link->mean : Tensor(), link ? link->rstd : Tensor()};
  const Wanted want{wanted[0], wanted[1], wanted[2]};
  Gradients gradients;
  if (link && link->use) {
    const auto node = torch::autograd::get_current_node();
    if (!node) site->recorder->refuse(site->index, "compiled_autograd");
    const bool recorded = node && link->use->pass->arrive(link->use->parameters(), &*node, Pass::compiled(*node));
    gradients = link->use->gradients(saved, weight, grad_output, want, recorded);
  } else {
    gradients = site->layer->backward(saved, weight, grad_output, want);
  }
  return {like(gradients.input, input), like(gradients.weight, weight), like(gradients.bias, bias.value_or(weight))};
}

}  // namespace

void bind_trace(py::module_& m) {
  m.def(
      "token",
      [](std::shared_ptr<Pass> pass) {
        return token_of(std::make_shared<Link>(Link{std::move(pass), {}, {}, {}, {}}));
      },
      py::arg("run").none(true));
  m.def("links", [] { return links().count(); });  // alive
  py::class_<Key>(m, "Key")
      .def(py::init([](const std::shared_ptr<Site>& site) { return std::make_unique<Key>(site); }), py::arg("site"))
      .def("__str__", [](const Key& key) { return std::to_string(key.number); });
}

}  // namespace torchgradx

TORCH_LIBRARY_FRAGMENT(torchgradx, m) {
  m.def("trace_begin(Tensor[] inputs, SymInt n, str probe, str call) -> Tensor");
  m.def("trace_layer(Tensor input, Tensor weight, Tensor? bias, Tensor token, str use) -> (Tensor, Tensor)");
  m.def(
      "trace_backward(Tensor grad_output, Tensor input, Tensor weight, Tensor? bias, Tensor token, str use, "
      "bool[3] wanted) -> (Tensor, Tensor, Tensor)");
  for (const auto key : {c10::DispatchKey::CPU, c10::DispatchKey::CUDA}) {
    m.impl("trace_layer", torch::dispatch(key, torchgradx::trace_layer));
    m.impl("trace_backward", torch::dispatch(key, torchgradx::trace_backward));
  }
}
