// Squared norms of what acts element by element on samples, at the node that the framework made for it: `weight * h` of
// a user's RMSNorm, a layer scale, the framework's norms under a user's class. The kernels read the node's gradient and
// its saved operand once, and make nothing of their size. torchgradx/shared/descent.py serves what this does not.
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

// For affine_sq_norms: [N, T, G, K] twice, [N or 1, T or 1, G] twice.
struct Arranged {
  Tensor input, grad;
  std::optional<Tensor> mean, rstd;
};

at::ScalarType wide_of(const Tensor& t) {
  return t.scalar_type() == at::kDouble ? at::kDouble : at::kFloat;
}

// [N, T, 1, K] of rows by sample, n*T+t or (sequence first) t*N+n.
Tensor rows_of(const Tensor& t, int64_t n, int64_t k, bool sequence) {
  if (!sequence) return t.reshape({n, -1, 1, k});
  if (t.dim() > 1 && t.size(0) > 1 && t.size(1) == n) return t.movedim(1, 0).reshape({n, -1, 1, k});
  return t.reshape({-1, n, 1, k}).movedim(1, 0);
}

Arranged over_features(const Tensor& x, const Tensor& g, const Tensor& mean, const Tensor& rstd, int64_t n,
                       bool sequence) {
  const int64_t k = x.numel() / std::max<int64_t>(1, rstd.numel());
  const auto by_row = [&](const Tensor& t) { return rows_of(t, n, 1, sequence).squeeze(-1); };
  return {rows_of(x, n, k, sequence), rows_of(g, n, k, sequence),
          mean.defined() ? std::optional<Tensor>(by_row(mean)) : std::nullopt, by_row(rstd)};
}

std::optional<Arranged> layer_norm(generated::NativeLayerNormBackward0& node, const Tensor& g, int64_t n,
                                   bool sequence) {
  const auto self = node.getptr();
  return over_features(node.input_.unpack(), g, node.result1_.unpack(self), node.result2_.unpack(self), n, sequence);
}

std::optional<Arranged> rms_norm(generated::FusedRmsNormBackward0& node, const Tensor& g, int64_t n, bool sequence) {
  return over_features(node.input_.unpack(), g, Tensor(), node.result1_.unpack(node.getptr()), n, sequence);
}

std::optional<Arranged> group_norm(generated::NativeGroupNormBackward0& node, const Tensor& g, int64_t n,
                                   bool sequence) {
  const auto self = node.getptr();
  const Tensor mean = node.result1_.unpack(self), rstd = node.result2_.unpack(self);
  if (sequence || mean.size(0) != n) return std::nullopt;
  const int64_t groups = mean.size(1);
  const auto rows = [&](const Tensor& t) { return t.movedim(1, -1).reshape({n, -1, groups, g.size(1) / groups}); };
  return Arranged{rows(node.input_.unpack()), rows(g), mean.view({n, 1, -1}), rstd.view({n, 1, -1})};
}

std::optional<Arranged> batch_norm(generated::NativeBatchNormBackward0& node, const Tensor& g, int64_t n,
                                   bool sequence) {
  if (sequence || node.training) return std::nullopt;  // statistics of the batch
  const Tensor mean = node.running_mean_.unpack(), var = node.running_var_.unpack();
  const auto wide = wide_of(g);
  const auto rows = [&](const Tensor& t) { return t.movedim(1, -1).reshape({n, -1, g.size(1), 1}); };
  return Arranged{rows(node.input_.unpack()), rows(g), mean.to(wide).view({1, 1, -1}),
                  (var.to(wide) + node.eps).rsqrt_().view({1, 1, -1})};
}

// weight: which operand it is, 0 or 1. Dimensions that it is broadcast over come first.
std::optional<Arranged> product(generated::MulBackward0& node, int64_t weight, const Tensor& g, int64_t n,
                                bool sequence) {
  const Tensor x = (weight ? node.self_ : node.other_).unpack();
  const auto& edge = node.next_edge(weight);
  const auto shape = edge.function->input_metadata(edge.input_nr).shape_as_dim_vector();
  if (!x.defined() || x.sizes() != g.sizes() || g.is_complex()) return std::nullopt;
  const auto by_sample = [&](const Tensor& t) {  // [N, *what the node would get for one sample]
    if (t.size(0) == 1 && n > 1)
      return sequence ? t[0].unflatten(0, {-1, n}).movedim(1, 0) : t[0].unflatten(0, {n, -1});
    if (!sequence) return t.unflatten(0, {n, -1});
    return t.dim() > 1 && t.size(1) == n ? t.movedim(1, 0) : t.unflatten(0, {-1, n}).movedim(1, 0);
  };
  const Tensor rows = by_sample(x);
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
  const auto arranged = [&](const Tensor& t) { return t.permute(order).reshape({n, -1, 1, k}); };
  return Arranged{arranged(rows), arranged(by_sample(g)), {}, {}};
}

std::optional<Arranged> operands_of(Node& node, int64_t weight, const Tensor& g, int64_t n, bool sequence) {
  if (auto* of = dynamic_cast<generated::NativeLayerNormBackward0*>(&node)) return layer_norm(*of, g, n, sequence);
  if (auto* of = dynamic_cast<generated::FusedRmsNormBackward0*>(&node)) return rms_norm(*of, g, n, sequence);
  if (auto* of = dynamic_cast<generated::NativeGroupNormBackward0*>(&node)) return group_norm(*of, g, n, sequence);
  if (auto* of = dynamic_cast<generated::NativeBatchNormBackward0*>(&node)) return batch_norm(*of, g, n, sequence);
  if (auto* of = dynamic_cast<generated::MulBackward0*>(&node)) return product(*of, weight, g, n, sequence);
  return std::nullopt;
}

bool is_product(const Node& node) {
  return dynamic_cast<const generated::MulBackward0*>(&node) != nullptr;
}

struct Served {
  int64_t operand, place, counted;  // see stations.py
};

// A pass's answer whether a backward wants squared norms alone, or the samples' gradients beside them, for clipping.
// Python says it once, when the first gradient is there.
struct Terms {
  enum Wants : int64_t { kElse, kSquares, kGradients };
  Callback ask;
  std::atomic<int64_t> task{-1}, wants{kElse};
  explicit Terms(py::object ask) : ask{std::move(ask)} {}
};

class AtNode : public torch::autograd::FunctionPreHook {
 public:
  AtNode(Node& node, std::shared_ptr<Pass> pass, std::vector<Served> leaves, bool sequence,
         std::shared_ptr<Terms> terms, py::object otherwise)
      : node_(node),
        pass_(std::move(pass)),
        leaves_(std::move(leaves)),
        sequence_(sequence),
        terms_(std::move(terms)),
        otherwise_{std::move(otherwise)} {}

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
    for (size_t k = 0; k < grads.size(); ++k)
      given[k] = grads[k].defined() ? py::cast(grads[k]) : py::object(py::none());
    otherwise_.function(given);
    return grads;
  }

 private:
  Node& node_;  // which owns this
  const std::shared_ptr<Pass> pass_;
  const std::vector<Served> leaves_;
  const bool sequence_;
  const std::shared_ptr<Terms> terms_;
  Callback otherwise_;

  bool serve(const Tensor& g) {
    const bool bias = leaves_.back().operand == 2;
    std::optional<Arranged> found;
    try {
      found = operands_of(node_, leaves_[0].operand, g.detach(), pass_->n, sequence_);
    } catch (const std::exception&) {  // it is said where the others are
      return false;
    }
    if (!found) return false;
    if (!found->rstd) found->input = found->input.to(g.scalar_type());  // a product's, of a wider weight
    if (found->input.scalar_type() != g.scalar_type()) return false;
    if (found->rstd && found->rstd->scalar_type() != wide_of(g)) return false;  // rounded otherwise, under autocast
    const auto& [input, grad, mean, rstd] = *found;
    Tensor sq_norms, gradients;  // [1 or 2, N], [1 or 2, N, P, C]
    if (terms_->wants == Terms::kSquares)
      sq_norms = affine_sq_norms(input.detach(), grad, mean, rstd, bias);
    else
      std::tie(std::ignore, sq_norms, gradients) =
          affine_by_sample(input.detach(), grad, std::nullopt, mean, rstd, /*frozen=*/false, bias);
    for (size_t row = 0; row < leaves_.size(); ++row) {
      const auto& [operand, place, counted] = leaves_[row];
      if (!pass_->arrive({place}, nullptr)) continue;
      for (int64_t more = 1; more < counted; ++more) pass_->arrive({place}, nullptr);
      pass_->finish(place, sq_norms, static_cast<int64_t>(row));
      if (gradients.defined()) pass_->book(std::make_shared<Booked>(place, gradients[static_cast<int64_t>(row)]));
    }
    return true;
  }
};

}  // namespace

void bind_at_node(py::module_& m) {
  py::class_<Terms, std::shared_ptr<Terms>>(m, "Terms").def(py::init<py::object>(), py::arg("ask"));
  m.def(
      "serve_at",  // False: a node of no such kind, or of other operands
      [](const py::object& python, std::shared_ptr<Pass> pass, const std::map<int64_t, std::array<int64_t, 2>>& leaves,
         bool sequence, std::shared_ptr<Terms> terms, py::object otherwise) {
        if (!torch::autograd::THPCppFunction_Check(python.ptr())) return false;
        Node& node = *reinterpret_cast<torch::autograd::THPCppFunction*>(python.ptr())->cdata;
        const bool norm = dynamic_cast<generated::NativeLayerNormBackward0*>(&node) ||
                          dynamic_cast<generated::FusedRmsNormBackward0*>(&node) ||
                          dynamic_cast<generated::NativeGroupNormBackward0*>(&node) ||
                          dynamic_cast<generated::NativeBatchNormBackward0*>(&node);
        const bool whole = norm ? leaves.count(1) && leaves.size() == 1 + leaves.count(2) : leaves.size() == 1;
        if (!whole || !(norm || is_product(node)) || pass->n < 1) return false;
        std::vector<Served> those;
        for (const auto& [operand, leaf] : leaves) those.push_back({operand, leaf[0], leaf[1]});
        node.add_pre_hook(std::make_unique<AtNode>(node, std::move(pass), std::move(those), sequence, std::move(terms),
                                                   std::move(otherwise)));
        return true;
      },
      py::arg("node"), py::arg("run"), py::arg("leaves"), py::arg("sequence"), py::arg("terms"), py::arg("otherwise"));
}

}  // namespace torchgradx
