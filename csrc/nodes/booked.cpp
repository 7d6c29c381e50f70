// What a pass asks of a use besides norms: to be kept until its gradients are wanted once more, each sample's share
// times a factor; and the products of each sample's gradient with given directions.
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

Booked::Booked(const Use& use, const Saved& saved, const Tensor& weight, const Tensor& grad_output)
    : site_(use.site),
      layout_(site_->layout_of(*use.pass, use.index)),
      saved_(saved),
      weight_(weight),
      grad_output_(grad_output.detach()),
      of_weight_(use.wants_weight),
      of_bias_(use.wants_bias) {
  const bool alone = use.pass->n == 1;  // its gradient may become the .grad of what is expanded over the batch
  if (!use.borrows) versions_ = {Version(saved.input), alone ? Version() : Version(grad_output)};
  for (Tensor* t : {&saved_.input, &weight_})
    if (t->defined()) *t = t->detach();
  for (Tensor* t : {&saved_.mean, &saved_.rstd})
    if (t->defined()) *t = t->detach().clone();  // of a BatchNorm: its own, which move without a trace
  saved_.shared = nullptr;                       // of the gradient as it came
  if (use.borrows || alone) grad_output_ = grad_output_.clone();
  if (use.borrows && saved_.input.defined()) saved_.input = saved_.input.clone();
}

std::vector<int64_t> Booked::parameters() const {
  std::vector<int64_t> parameters;
  if (of_weight_) parameters.push_back(site_->weight);
  if (of_bias_) parameters.push_back(site_->bias);
  return parameters;
}

bool Booked::intact() const {
  return versions_[0].stands() && versions_[1].stands();
}

std::vector<Tensor> Booked::weighted(const Tensor& factors, const std::vector<int64_t>& parameters) const {
  const at::NoGradGuard no_grad;
  const auto asked = [&](int64_t parameter) {
    return std::find(parameters.begin(), parameters.end(), parameter) != parameters.end();
  };
  const Layer& layer = *site_->layer;
  const Wanted wanted{false, of_weight_ && asked(site_->weight), of_bias_ && asked(site_->bias)};
  // For a bias alone the input may not have been kept.
  const Operands o = *layer.operands(wanted.weight ? saved_ : Saved{}, grad_output_, factors.numel(), layout_);
  const Tensor scale = o.images == 1 ? factors : factors.repeat_interleave(o.images);
  Gradients made;
  if (wanted.weight)
    made = layer.scaled(o, weight_, scale, wanted);
  else if (wanted.bias)
    made.bias = layer.scaled_bias(o, scale);
  std::vector<Tensor> found;
  if (wanted.weight) found.push_back(among(made.weight, site_->weight_rows, 0));
  if (wanted.bias) found.push_back(among(made.bias, site_->bias_rows, 0));
  return found;
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

void Use::serve(const Operands& operands, const Saved& saved, const Tensor& weight, const Tensor& grad_output) {
  const auto direction = [&](int64_t parameter) {
    const bool given = !pass->directions.empty() && pass->directions[parameter];
    return given ? *pass->directions[parameter] : Tensor();
  };
  const auto add = [&](const Tensor& by_image) {  // [N K]
    pass->add_dots(by_image.unflatten(0, {pass->n, operands.images}).sum(1));
  };
  if (const Tensor v = wants_weight ? direction(site->weight) : Tensor(); v.defined())
    add(site->layer->weight_dots(operands, of_part(v, site->weight_rows)));
  if (const Tensor v = wants_bias ? direction(site->bias) : Tensor(); v.defined())
    add(widened(site->layer->bias_rows(operands)).sum(1).mv(of_part(v, site->bias_rows).flatten()));
  if (!site->recorder->books) return;
  auto booked = std::make_shared<Booked>(*this, saved, weight, grad_output);
  py::gil_scoped_acquire gil;
  site->recorder->booked()(pass, std::move(booked));
}

}  // namespace torchgradx
