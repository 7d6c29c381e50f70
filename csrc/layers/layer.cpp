// Common to layers: a backward by running the forward again, and norms from operands.
#include "layer.h"

#include "../operators/formats.h"
#include "../operators/views.h"

#include <ATen/ATen.h>
#include <ATen/SavedTensorHooks.h>
#include <ATen/core/grad_mode.h>
#include <torch/csrc/autograd/autograd.h>

#include <cmath>

namespace torchgradx {

namespace {

// A checkpoint counts what is saved through its hooks; what is run here is none of its business.
struct UnseenByHooks {
  const bool before = at::SavedTensorDefaultHooks::set_tracing(true);
  ~UnseenByHooks() {
    at::SavedTensorDefaultHooks::set_tracing(before);
  }
};

}  // namespace

Gradients Layer::backward(const Saved& saved, const Tensor& weight, const Tensor& grad_output,
                          const Wanted& wanted) const {
  const bool create_graph = at::GradMode::is_enabled();
  const at::AutoGradMode enabled(true);
  const UnseenByHooks unseen;
  const auto source = [&](const Tensor& t) { return create_graph ? t : t.detach().requires_grad_(); };
  const Tensor x = source(saved.input), w = source(weight), b = at::zeros_like(weight).requires_grad_();
  Saved again{{}, saved.mean, saved.rstd};
  // The weight may be one number, expanded: torch's batch norm in channels_last would read beyond it.
  const Tensor output = forward(x, w.contiguous(), b, again);
  // All of them, wanted or not: the framework's group norm in channels_last fails without its input's.
  torch::autograd::variable_list sources;
  for (const Tensor& t : {x, w, b})
    if (t.requires_grad()) sources.push_back(t);
  const auto found = torch::autograd::grad({output}, sources, {grad_output}, create_graph, create_graph, true);
  auto next = found.begin();
  Gradients gradients;
  if (x.requires_grad()) gradients.input = *next++;
  if (w.requires_grad()) gradients.weight = *next++;
  gradients.bias = *next;
  if (!wanted.input) gradients.input = Tensor();
  if (!wanted.weight) gradients.weight = Tensor();
  if (!wanted.bias) gradients.bias = Tensor();
  return gradients;
}

Tensor in_format(const Tensor& t, at::MemoryFormat format) {
  return t.is_cuda() ? in_format(t, format, turned) : t.contiguous(format);
}

double norm_of(const Tensor& t) {
  // On a CPU the framework makes a copy in the wider type.
  const int64_t part = t.is_cpu() ? 1 << 16 : std::max<int64_t>(1, t.numel());
  double norm = 0;
  for (const Tensor& some : t.detach().reshape({-1}).split(part))
    norm = std::hypot(norm, at::linalg_vector_norm(some, 2, {}, false, at::kDouble).item<double>());
  return norm;
}

double epsilon(at::ScalarType dtype) {
  return dtype == at::kDouble     ? std::numeric_limits<double>::epsilon()
         : dtype == at::kHalf     ? std::ldexp(1.0, -10)
         : dtype == at::kBFloat16 ? std::ldexp(1.0, -7)
                                  : std::numeric_limits<float>::epsilon();
}

Tensor widened(const Tensor& t) {
  return t.defined() && at::isReducedFloatingType(t.scalar_type()) ? t.to(at::kFloat) : t;
}

std::optional<Tensor> rows_by_sample(const Tensor& t, int64_t n, Layout layout) {
  if (t.dim() < 2) return std::nullopt;
  const int64_t lead = t.size(0), features = t.size(-1);
  if (layout == Layout::kSecond && t.dim() < 3) return std::nullopt;
  if (layout == Layout::kSecond || (layout == Layout::kSequence && t.dim() > 2 && t.size(1) == n))
    return rows_by_sample(t.transpose(0, 1), n, Layout::kBatch);
  if (n == 0 ? lead != 0 : lead % n != 0) return std::nullopt;
  int64_t of_row = 1;
  for (int64_t d = 1; d < t.dim() - 1; ++d) of_row *= t.size(d);
  const int64_t positions = n == 0 ? 0 : lead / n * of_row;
  if (layout == Layout::kSequence && n > 0) {
    const Tensor minor = t.reshape({lead / n, n, of_row, features}).transpose(0, 1);
    return minor.size(2) == 1 ? minor.squeeze(2) : minor.reshape({n, positions, features});
  }
  return viewed(t, {n, positions, features});
}

Tensor scaled_rows(const Tensor& rows, const Tensor& scale) {
  const Tensor wide = widened(rows);  // rounded once
  at::DimVector shape(rows.dim(), 1);
  shape[0] = scale.numel();
  const Tensor by_row = scale.to(wide.scalar_type()).view(shape);
  return (wide * by_row).masked_fill_(by_row == 0, 0).to(rows.scalar_type());
}

Tensor Layer::scaled_bias(const Operands& operands, const Tensor& scale) const {
  const Tensor rows = bias_rows(operands);
  const Tensor by_sample = at::sum(rows, at::IntArrayRef({1}), false, widened(rows.new_empty({0})).scalar_type());
  return scaled_rows(by_sample, scale).sum(0).to(rows.scalar_type());
}

Gradients sum_of_samples(const Tensor& by_sample, const Tensor& weight, const std::optional<Tensor>& scale) {
  const auto sum = [&](int64_t k) {  // each in memory of its own, as .grad is to be
    return affine_sum(by_sample[k], scale, weight.scalar_type()).view(weight.sizes());
  };
  return {Tensor(), sum(0), by_sample.size(0) > 1 ? sum(1) : Tensor()};
}

Tensor Images::by_sample(const Tensor& t) const {
  return moved && t.defined() ? t.unflatten(0, {each, n}).transpose(0, 1).flatten(0, 1) : t;
}

std::optional<Images> images_of(const Tensor& t, int64_t n, Layout layout) {
  if (t.dim() == 0) return std::nullopt;
  const int64_t lead = t.size(0);
  if (n == 0 ? lead != 0 : lead % n != 0) return std::nullopt;
  const int64_t each = n ? lead / n : 1;
  return Images{n, each, each > 1 && layout == Layout::kSequence};
}

}  // namespace torchgradx
