#include "site.h"

#include <ATen/ATen.h>
#include <ATen/SavedTensorHooks.h>

namespace torchgradx {
namespace {

Tensor wide(const Tensor& t) {
  return at::isReducedFloatingType(t.scalar_type()) ? t.to(at::kFloat) : t;
}

// [N, T, F] view of a layer's rows.
std::optional<Tensor> rows(const Tensor& t, int64_t n, Layout layout) {
  if (t.dim() < 2) return std::nullopt;
  const int64_t lead = t.size(0), features = t.size(-1);
  if (layout == Layout::kSequence && t.dim() > 2 && t.size(1) == n) return rows(t.transpose(0, 1), n, Layout::kBatch);
  if (n == 0 ? lead != 0 : lead % n != 0) return std::nullopt;
  int64_t positions = n == 0 ? 0 : lead / n;
  for (int64_t d = 1; d < t.dim() - 1; ++d) positions *= t.size(d);
  if (layout == Layout::kSequence && n > 0) {
    const Tensor minor = t.reshape({lead / n, n, -1, features}).transpose(0, 1);
    return minor.size(2) == 1 ? minor.squeeze(2) : minor.reshape({n, positions, features});
  }
  return t.reshape({n, positions, features});
}

double epsilon(const Tensor& t) {
  switch (t.scalar_type()) {
    case at::kDouble:
      return std::numeric_limits<double>::epsilon();
    case at::kHalf:
      return std::ldexp(1.0, -10);
    case at::kBFloat16:
      return std::ldexp(1.0, -7);
    default:
      return std::numeric_limits<float>::epsilon();
  }
}

// What the rounding of a sum of products with this factor is measured by.
double magnitude(const Tensor& t) {
  return at::linalg_vector_norm(t.detach(), 2, {}, false, at::kDouble).item<double>();
}

}  // namespace

Tensor Site::padded(const Tensor& input) const {
  return pre_pad.empty() ? input : at::pad(input, pre_pad, pad_mode);
}

std::optional<Site::Operands> Site::canonical(const Pass& pass, int64_t use, const Tensor& input,
                                              const Tensor& grad_output) const {
  Layout how = layout;
  if (how == Layout::kAuto) {
    const bool proven = use >= 0 && use < static_cast<int64_t>(pass.layouts.size());
    how = proven ? static_cast<Layout>(pass.layouts[use]) : presumed;
  }
  Operands operands;
  if (linear()) {
    const auto b = rows(grad_output, pass.n, how);
    const auto a = input.defined() ? rows(input, pass.n, how) : std::optional<Tensor>(Tensor());
    if (a && b) operands = {*a, *b, 1};
  } else if (grad_output.dim() == 4 && (pass.n == 0 ? grad_output.size(0) == 0 : grad_output.size(0) % pass.n == 0)) {
    const int64_t k = pass.n == 0 ? 1 : grad_output.size(0) / pass.n;
    const auto sorted = [&](const Tensor& t) {
      if (!t.defined() || k == 1 || how != Layout::kSequence) return t;
      return t.unflatten(0, {k, pass.n}).transpose(0, 1).flatten(0, 1);
    };
    operands = {sorted(input), sorted(grad_output), k};
  }
  if (!operands.grad_output.defined()) {
    std::ostringstream reason;
    reason << "the " << pass.n << " samples of the pass cannot be found in its output of shape " << grad_output.sizes()
           << "; if they are there, say layout=";
    recorder->refuse(index, reason.str());
    return std::nullopt;
  }
  // Under autocast a hook sees the input before the cast that the layer computed with.
  if (operands.activations.defined() && operands.activations.scalar_type() != operands.grad_output.scalar_type())
    operands.activations = operands.activations.to(operands.grad_output.scalar_type());
  return operands;
}

Algorithm Site::plan(int64_t n, int64_t t) {
  const std::pair<int64_t, int64_t> key(n, t);
  {
    const std::lock_guard<std::mutex> lock(plans_mutex_);
    const auto found = plans_.find(key);
    if (found != plans_.end()) return found->second;
  }
  py::gil_scoped_acquire gil;
  const auto chosen = static_cast<Algorithm>(planner->function(n, t).cast<int64_t>());
  const std::lock_guard<std::mutex> lock(plans_mutex_);
  if (plans_.size() > 4096) plans_.clear();  // lengths that never repeat must not grow without bound
  plans_[key] = chosen;
  return chosen;
}

Use::Use(std::shared_ptr<Site> site, std::shared_ptr<Pass> pass, int64_t index, bool wants_weight, bool wants_bias)
    : site(std::move(site)),
      pass(std::move(pass)),
      index(index),
      wants_weight(wants_weight),
      wants_bias(wants_bias),
      held(at::SavedTensorDefaultHooks::get_hooks(/*ignore_is_tracing=*/true).has_value()) {
  if (held) this->site->recorder->hold();
}

Use::~Use() {
  if (held) site->recorder->release();
}

std::vector<int64_t> Use::parameters() const {
  std::vector<int64_t> parameters;
  if (wants_weight) parameters.push_back(site->weight);
  if (wants_bias) parameters.push_back(site->bias);
  return parameters;
}

void Use::record(const Tensor& input, const Tensor& grad_output) {
  const at::NoGradGuard no_grad;
  const auto operands = site->canonical(*pass, index, wants_weight ? input : Tensor(), grad_output);
  if (!operands) return;
  const auto& [a, g, images] = *operands;
  if (site->recorder->auditing && site->weight_grad) {  // norms only: nothing of ours is received
    const auto [grad_weight, grad_bias] = plain_gradients(*site, a, Tensor(), g, wants_weight, wants_bias);
    const double size = magnitude(g) * epsilon(g);
    if (wants_weight) site->recorder->add_recorded(site->weight, grad_weight, size * magnitude(a));
    if (wants_bias)
      site->recorder->add_recorded(site->bias, grad_bias, size * std::sqrt(static_cast<double>(g.numel())));
  }
  const bool keep_weight = wants_weight && (images > 1 || pass->waits(site->weight));
  const bool keep_bias = wants_bias && (images > 1 || pass->waits(site->bias));
  const bool bias_now = wants_bias && !keep_bias;
  const Tensor flat = site->linear() ? g : g.flatten(2).transpose(1, 2);  // [N * K, T, O]
  if (wants_weight && !keep_weight) {
    const Algorithm algorithm = site->plan(pass->n, flat.size(1));
    Tensor sq;
    if (!site->linear() && algorithm == Algorithm::kRank1) {
      // One output pixel: its patch is all there is, and each group an outer product of its own.
      const int64_t groups = site->groups;
      const Tensor patch =
          at::im2col(a, site->kernel_size, site->dilation, site->padding, site->stride);  // [N, groups * I, 1]
      const Tensor parts =
          rank1_sq_norms(patch.reshape({pass->n * groups, 1, patch.numel() / std::max<int64_t>(1, pass->n * groups)}),
                         g.reshape({pass->n * groups, 1, g.size(1) / groups}), false);
      sq = parts.view({pass->n, groups}).sum(1, true).t();
      if (bias_now) sq = at::cat({sq, bias_sq_norms(flat).unsqueeze(0)});
    } else if (site->linear())
      sq = algorithm == Algorithm::kRank1  ? rank1_sq_norms(a, g, bias_now)
           : algorithm == Algorithm::kGram ? gram_sq_norms(a, g, bias_now)
                                           : direct_sq_norms(a, g, bias_now);
    else
      sq = algorithm == Algorithm::kGram ? conv2d_gram_sq_norms(a, g, site->geometry(), bias_now)
                                         : conv2d_direct_sq_norms(a, g, site->geometry(), bias_now);
    pass->finish(site->weight, sq, 0);
    if (bias_now) pass->finish(site->bias, sq, 1);
  } else if (bias_now) {
    pass->finish(site->bias, bias_sq_norms(flat));
  }
  if (keep_weight) pass->add(site->weight, {site->index, a, g});
  if (keep_bias) pass->add(site->bias, {-1, Tensor(), wide(flat).sum(1).unflatten(0, {pass->n, images}).sum(1)});
}

std::pair<Tensor, Tensor> Use::record_fused(const Tensor& input, const Tensor& weight, const Tensor& grad_output) {
  const bool simple = wants_weight && !at::GradMode::is_enabled() && !pass->waits(site->weight) &&
                      (!wants_bias || !pass->waits(site->bias));
  if (simple) {
    const auto operands = site->canonical(*pass, index, input, grad_output);
    const int64_t t = !operands        ? 0
                      : site->linear() ? operands->grad_output.size(1)
                                       : grad_output.size(2) * grad_output.size(3);
    if (operands && operands->images == 1 && site->plan(pass->n, t) == Algorithm::kFused) {
      auto [grad_weight, grad_bias, sq] =
          site->linear()
              ? linear_fused(operands->activations, operands->grad_output, std::nullopt, wants_bias)
              : conv2d_fused(operands->activations, operands->grad_output, site->geometry(), std::nullopt, wants_bias);
      pass->finish(site->weight, sq, 0);
      if (wants_bias) pass->finish(site->bias, sq, 1);
      if (site->recorder->auditing) {
        const double size = magnitude(grad_output) * epsilon(grad_output);
        site->recorder->add_recorded(site->weight, grad_weight, size * magnitude(input));
        if (wants_bias)
          site->recorder->add_recorded(site->bias, grad_bias,
                                       size * std::sqrt(static_cast<double>(grad_output.numel())));
      }
      return {grad_weight, wants_bias ? grad_bias : Tensor()};
    }
  }
  auto gradients = plain_gradients(*site, input, weight, grad_output, wants_weight, wants_bias);
  if (!at::GradMode::is_enabled()) record(input, grad_output);
  return gradients;
}

std::pair<Tensor, Tensor> plain_gradients(const Site& site, const Tensor& input, const Tensor& weight,
                                          const Tensor& grad_output, bool want_weight, bool want_bias) {
  Tensor grad_weight, grad_bias;
  if (site.linear()) {
    const Tensor g = grad_output.reshape({-1, grad_output.size(-1)});
    if (want_weight) grad_weight = g.t().mm(input.reshape({-1, input.size(-1)}));
    if (want_bias) grad_bias = g.sum(0);
    return {grad_weight, grad_bias};
  }
  if (want_weight) {
    const int64_t o = grad_output.size(1), c = input.size(1) / site.groups;
    const Tensor shape =
        weight.defined()
            ? weight
            : at::empty({1}, grad_output.options()).expand({o, c, site.kernel_size[0], site.kernel_size[1]});
    grad_weight =
        std::get<1>(at::convolution_backward(grad_output, input, shape, std::nullopt, site.stride, site.padding,
                                             site.dilation, false, {0, 0}, site.groups, {false, true, false}));
  }
  if (want_bias) grad_bias = grad_output.sum({0, 2, 3});
  return {grad_weight, grad_bias};
}

}  // namespace torchgradx
