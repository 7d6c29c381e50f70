// Squared norms of what acts element by element on samples, at the node that the framework made for it: `weight * h` of
// a user's RMSNorm, a layer scale, the framework's norms under a user's class. The kernels read the node's gradient and
// its saved operand once, and make nothing of their size. torchgradx/shared/descent.py serves what this does not.
#include "at_node.h"

#include "../operators/ops.h"
#include "site.h"

#include <ATen/ATen.h>
#include <torch/csrc/autograd/generated/Functions.h>
#include <torch/csrc/autograd/python_cpp_function.h>

#include <algorithm>

namespace torchgradx {
namespace {

namespace generated = torch::autograd::generated;
using torch::autograd::variable_list;

// For affine_sq_norms: [N, T, G, K] twice, [N or 1, T or 1, G] twice. Of a sum, no input.
struct Arranged {
  Tensor input, grad;
  std::optional<Tensor> mean, rstd;
};

// [N, *what the node would get for one sample], of rows n*T+t or (sequence first) t*N+n. Leading 1s are skipped.
Tensor by_sample(const Tensor& t, int64_t n, bool sequence) {
  if (t.size(0) == 1 && n > 1) return by_sample(t[0], n, sequence);
  if (!sequence) return t.unflatten(0, {n, -1});
  return t.dim() > 1 && t.size(1) == n ? t.movedim(1, 0).unsqueeze(2) : t.unflatten(0, {-1, n}).movedim(1, 0);
}

Arranged over_features(const Tensor& x, const Tensor& g, const Tensor& mean, const Tensor& rstd, int64_t n,
                       bool sequence) {
  const auto rows = [&](const Tensor& t, int64_t k) {
    return (sequence ? by_sample(t, n, sequence) : t).reshape({n, -1, 1, k});
  };
  const auto by_row = [&](const Tensor& t) { return rows(t, 1).squeeze(-1); };
  const int64_t k = x.numel() / std::max<int64_t>(1, rstd.numel());
  return {rows(x, k), rows(g, k), mean.defined() ? std::optional(by_row(mean)) : std::nullopt, by_row(rstd)};
}

Arranged over_pixels(const Tensor& x, const Tensor& g, const Tensor& mean, const Tensor& rstd, int64_t n,
                     int64_t groups) {
  const auto rows = [&](const Tensor& t) { return t.movedim(1, -1).reshape({n, -1, groups, g.size(1) / groups}); };
  return {rows(x), rows(g), mean.view({-1, 1, groups}), rstd.view({-1, 1, groups})};
}

// Arranges what a parameter multiplies (nothing: it is added) and the gradient. operand: the parameter's, 0 or 1.
// Dimensions that it is broadcast over come first.
std::optional<Arranged> broadcast(const Node& node, int64_t operand, const Tensor& x, const Tensor& g, int64_t n,
                                  bool sequence) {
  const auto& edge = node.next_edge(operand);
  const auto shape = edge.function->input_metadata(edge.input_nr).shape_as_dim_vector();
  const bool last = shape.size() == 1 && g.dim() > 1 && shape[0] == g.size(-1);
  const auto rows_of = [](const Tensor& t, const auto& arranged) { return t.defined() ? arranged(t) : t; };
  if (last && !sequence && g.size(0) > 0 && g.size(0) % n == 0) {  // as most: a view is enough
    const auto viewed = [&](const Tensor& t) { return t.reshape({n, -1, 1, t.size(-1)}); };
    return Arranged{rows_of(x, viewed), viewed(g), {}, {}};
  }
  const Tensor rows = by_sample(g, n, sequence);
  const int64_t lead = rows.dim() - static_cast<int64_t>(shape.size());
  if (lead < 1) return std::nullopt;
  std::vector<int64_t> order = {0}, features;
  int64_t k = 1;
  for (int64_t d = 1; d < rows.dim(); ++d) {
    const int64_t size = d < lead ? 1 : shape[d - lead].maybe_as_int().value_or(-1);
    if (size != 1 && size != rows.size(d)) return std::nullopt;
    (size == 1 ? order : features).push_back(d);
    k *= size;
  }
  order.insert(order.end(), features.begin(), features.end());
  const auto arranged = [&](const Tensor& t) {
    return by_sample(t, n, sequence).permute(order).reshape({n, -1, 1, k});
  };
  return Arranged{rows_of(x, arranged), arranged(g), {}, {}};
}

std::optional<Arranged> operands_of(Node& node, int64_t weight, const Tensor& g, int64_t n, bool sequence) {
  if (g.is_complex()) return std::nullopt;
  const auto self = node.getptr();
  if (auto* of = dynamic_cast<generated::NativeLayerNormBackward0*>(&node))
    return over_features(of->input_.unpack(), g, of->result1_.unpack(self), of->result2_.unpack(self), n, sequence);
  if (auto* of = dynamic_cast<generated::FusedRmsNormBackward0*>(&node))
    return over_features(of->input_.unpack(), g, Tensor(), of->result1_.unpack(self), n, sequence);
  if (auto* of = dynamic_cast<generated::NativeGroupNormBackward0*>(&node)) {
    const Tensor mean = of->result1_.unpack(self);
    if (sequence || mean.size(0) != n) return std::nullopt;
    return over_pixels(of->input_.unpack(), g, mean, of->result2_.unpack(self), n, mean.size(1));
  }
  if (auto* of = dynamic_cast<generated::NativeBatchNormBackward0*>(&node)) {
    if (sequence || of->training) return std::nullopt;  // statistics of the batch
    const auto wide = accumulator_of(g);
    const Tensor mean = of->running_mean_.unpack().to(wide), var = of->running_var_.unpack().to(wide);
    return over_pixels(of->input_.unpack(), g, mean, (var + of->eps).rsqrt_(), n, g.size(1));
  }
  if (auto* of = dynamic_cast<generated::MulBackward0*>(&node)) {
    const Tensor x = (weight ? of->self_ : of->other_).unpack();
    return x.defined() && x.sizes() == g.sizes() ? broadcast(node, weight, x, g, n, sequence) : std::nullopt;
  }
  if (dynamic_cast<generated::AddBackward0*>(&node)) return broadcast(node, weight, {}, g, n, sequence);
  return std::nullopt;
}

template <class... Saved>
bool unhooked(const Saved&... saved) {  // not saved through hooks, which may give it out once
  return !(saved.has_hooks() || ...);
}

// Squared norms [1 or 2, N]; and for clipping gradients [1 or 2, N, P, C].
std::pair<Tensor, Tensor> answers(const Arranged& arranged, bool bias, bool clips) {
  const auto& [input, grad, mean, rstd] = arranged;
  if (!input.defined())
    return {bias_sq_norms(grad.squeeze(2)).unsqueeze(0),
            clips ? grad.sum(1, false, accumulator_of(grad)).unsqueeze(0) : Tensor()};
  if (!clips) return {affine_sq_norms(input.detach(), grad, mean, rstd, bias), Tensor()};
  const auto made = affine_by_sample(input.detach(), grad, std::nullopt, mean, rstd, /*frozen=*/false, bias);
  return {std::get<1>(made), std::get<2>(made)};
}

class AtNode : public torch::autograd::FunctionPreHook {
 public:
  AtNode(Node& node, std::shared_ptr<Pass> pass, std::shared_ptr<const Stop> stop, std::shared_ptr<Terms> terms)
      : node_(node), pass_(std::move(pass)), stop_(std::move(stop)), terms_(std::move(terms)) {}

  variable_list operator()(const variable_list& grads) override {
    const int64_t task = torch::autograd::get_current_graph_task_id();
    if (terms_->task != task) {
      py::gil_scoped_acquire gil;
      terms_->wants = terms_->ask.function().cast<int64_t>();
      terms_->task = task;
    }
    if (terms_->wants != Terms::kElse && grads[0].defined() && serve(grads[0])) return grads;
    py::gil_scoped_acquire gil;
    py::tuple given(grads.size());
    for (size_t k = 0; k < grads.size(); ++k) given[k] = grads[k];  // None where it is not defined
    terms_->otherwise.function(stop_->station, given);
    return grads;
  }

 private:
  Node& node_;  // which owns this
  const std::shared_ptr<Pass> pass_;
  const std::shared_ptr<const Stop> stop_;
  const std::shared_ptr<Terms> terms_;

  bool serve(const Tensor& g) {
    const auto& leaves = stop_->leaves;
    const bool bias = leaves.count(2) > 0;
    std::optional<Arranged> found;
    try {
      found = operands_of(node_, leaves.begin()->first, g.detach(), pass_->n, stop_->sequence);
    } catch (const std::exception&) {  // it is said where the others are
      return false;
    }
    if (!found) return false;
    Tensor& input = found->input;
    if (input.defined() && !found->rstd) input = input.to(g.scalar_type());  // a product's, of a wider weight
    if (input.defined() && input.scalar_type() != g.scalar_type()) return false;
    if (found->rstd && found->rstd->scalar_type() != accumulator_of(g))
      return false;  // rounded otherwise, under autocast
    const auto [sq_norms, gradients] = answers(*found, bias, terms_->wants == Terms::kGradients);
    int64_t row = -1;
    for (const auto& [operand, leaf] : leaves) {
      const auto [place, counted] = leaf;
      ++row;
      if (!pass_->arrive({place}, nullptr)) continue;
      for (int64_t more = 1; more < counted; ++more) pass_->arrive({place}, nullptr);
      pass_->finish(place, sq_norms, row);
      if (gradients.defined()) pass_->keep_on_tape(std::make_shared<TapeEntry>(place, gradients[row]));
    }
    return true;
  }
};

}  // namespace

bool can_serve(const Node& node, const Stop& stop) {
  const auto whole = [&] { return stop.leaves.count(1) && stop.leaves.size() == 1 + stop.leaves.count(2); };
  if (auto* of = dynamic_cast<const generated::MulBackward0*>(&node))
    return stop.leaves.size() == 1 && unhooked(of->self_, of->other_);
  if (auto* of = dynamic_cast<const generated::AddBackward0*>(&node))
    return stop.leaves.size() == 1 && (stop.leaves.count(0) || of->alpha.equal(1));
  if (auto* of = dynamic_cast<const generated::NativeLayerNormBackward0*>(&node))
    return whole() && unhooked(of->input_, of->weight_, of->result1_, of->result2_);
  if (auto* of = dynamic_cast<const generated::FusedRmsNormBackward0*>(&node))
    return whole() && unhooked(of->input_, of->weight_, of->result1_);
  if (auto* of = dynamic_cast<const generated::NativeGroupNormBackward0*>(&node))
    return whole() && unhooked(of->input_, of->weight_, of->result1_, of->result2_);
  if (auto* of = dynamic_cast<const generated::NativeBatchNormBackward0*>(&node))
    return whole() &&
           unhooked(of->input_, of->weight_, of->running_mean_, of->running_var_, of->result1_, of->result2_);
  return false;
}

void serve_at(Node& node, std::shared_ptr<Pass> pass, std::shared_ptr<const Stop> stop, std::shared_ptr<Terms> terms) {
  node.add_pre_hook(std::make_unique<AtNode>(node, std::move(pass), std::move(stop), std::move(terms)));
}

void bind_at_node(py::module_& m) {
  py::class_<Terms, std::shared_ptr<Terms>>(m, "Terms").def(py::init<py::object, py::object>());
  using Given = std::tuple<int64_t, int64_t, bool, std::map<int64_t, std::array<int64_t, 2>>>;  // of a Stop
  py::class_<Trail, std::shared_ptr<Trail>>(m, "Trail")
      .def(py::init([](std::vector<std::pair<int64_t, bool>> guarded, const std::vector<Given>& stops) {
        auto trail = std::make_shared<Trail>(Trail{std::move(guarded), {}});
        for (const auto& [node, station, sequence, leaves] : stops)
          trail->stops.push_back({node, station, sequence, leaves});
        return trail;
      }));
}

}  // namespace torchgradx
