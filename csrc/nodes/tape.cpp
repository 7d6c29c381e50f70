// What a pass asks of a use besides norms: to be kept until its gradients are wanted once more, each sample's share
// times a factor; and the products of each sample's gradient with given directions.
#include "../operators/ops.h"
#include "site.h"

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>

#include <algorithm>
#include <utility>

namespace torchgradx {
namespace {

// The rows of a parameter that one part of a module uses.
Tensor of_part(const Tensor& t, const Rows& rows) {
  return rows.parts == 1 ? t : t.narrow(0, rows.before, t.size(0) - rows.before - rows.after);
}

}  // namespace

TapeEntry::TapeEntry(const Use& use, const Saved& saved, const Tensor& weight, const Tensor& grad_output,
                     const Tensor& gradients)
    : site_(use.site),
      layout_(site_->layout_of(*use.pass, use.index)),
      segments_(site_->segments_of(*use.pass, use.index)),
      parameters_(use.parameters()),
      weight_(weight.defined() ? weight.detach() : weight),
      gradients_(gradients) {
  if (gradients_.defined()) return;
  saved_ = saved, grad_output_ = grad_output.detach();
  const bool alone = use.pass->n == 1;  // its gradient may become the .grad of what is expanded over the batch
  if (!use.borrows) versions_ = {Version(saved.input), alone ? Version() : Version(grad_output)};
  if (saved_.input.defined()) saved_.input = saved_.input.detach();
  for (Tensor* t : {&saved_.mean, &saved_.rstd})
    if (t->defined()) *t = t->detach().clone();  // of a BatchNorm: its own, which move without a trace
  saved_.shared = nullptr;                       // of the gradient as it came
  if (use.borrows || alone) grad_output_ = grad_output_.clone();
  if (use.borrows && saved_.input.defined()) saved_.input = saved_.input.clone();
}

TapeEntry::TapeEntry(int64_t parameter, Tensor gradients)
    : parameters_({parameter}), gradients_(std::move(gradients)) {}

bool TapeEntry::intact() const {
  return versions_[0].stands() && versions_[1].stands();
}

std::vector<Tensor> TapeEntry::weighted(const Tensor& factors, const std::vector<int64_t>& parameters) const {
  const at::NoGradGuard no_grad;
  if (!site_) return {affine_sum(gradients_, factors, gradients_.scalar_type())};
  const Layer& layer = *site_->layer;
  const Wanted wanted{false, contains(parameters, site_->weight), contains(parameters, site_->bias)};
  std::vector<Tensor> found;
  const auto give = [&](const Gradients& made) {
    if (wanted.weight) found.push_back(among(made.weight, site_->weight_rows, 0));
    if (wanted.bias) found.push_back(among(made.bias, site_->bias_rows, 0));
    return found;
  };
  if (gradients_.defined()) return give(sum_of_samples(gradients_, weight_, factors));
  // For a bias alone the input may not have been kept.
  const Saved saved = wanted.weight ? saved_ : Saved{};
  const auto rows = segments_ ? flat_use(*segments_, saved, grad_output_, /*sorts=*/false) : std::nullopt;
  const Operands o =
      rows ? *by_row(layer, *segments_, rows) : *layer.operands(saved, grad_output_, factors.numel(), layout_);
  const Tensor scale = rows ? at::constant_pad_nd(factors, {0, 1}).index_select(0, segments_->owners)
                            : (o.images == 1 ? factors : factors.repeat_interleave(o.images));
  Gradients made;
  if (wanted.weight)
    made = layer.scaled(o, weight_, scale, wanted);
  else if (wanted.bias)
    made.bias = layer.scaled_bias(o, scale);
  return give(made);
}

void Pass::add_dots(const Tensor& more) {
  const at::NoGradGuard no_grad;
  Tensor sum = more.to(at::kDouble);
  const auto exchanged = [&] {  // what is there, if anything; else the sum is put there
    const std::lock_guard<std::mutex> lock(recorder->mutex);
    return std::exchange(dots, dots.defined() ? Tensor() : sum);
  };
  for (Tensor before = exchanged(); before.defined(); before = exchanged()) sum = before + sum.to(before.device());
}

Tensor Use::by_sample(const Tensor& t, int64_t images) const {
  if (const auto segments = site->segments_of(*pass, index)) return segments->by_sample(t, pass->n);
  return widened(t).unflatten(0, {pass->n, images}).sum(1);
}

void Use::serve(const Operands& operands, const Saved& saved, const Tensor& weight, const Tensor& grad_output,
                const Tensor& gradients) {
  const auto direction = [&](int64_t parameter) {
    return !pass->directions.empty() && pass->directions[parameter] ? *pass->directions[parameter] : Tensor();
  };
  const auto add = [&](const Tensor& dots) { pass->add_dots(by_sample(dots, operands.images)); };
  if (const Tensor v = wants_weight ? direction(site->weight) : Tensor(); v.defined())
    add(site->layer->weight_dots(operands, of_part(v, site->weight_rows)));
  if (const Tensor v = wants_bias ? direction(site->bias) : Tensor(); v.defined())
    add(widened(site->layer->bias_rows(operands)).sum(1).mv(of_part(v, site->bias_rows).flatten()));
  if (site->recorder->keeps_tape)
    pass->keep_on_tape(std::make_shared<TapeEntry>(*this, saved, weight, grad_output, gradients));
}

}  // namespace torchgradx
