// Site and Use: the operands of one use, and what its backward adds to the record. The autograd nodes are elsewhere.
#include "site.h"

#include "../operators/text.h"
#include "node.h"

#include <ATen/ATen.h>
#include <ATen/SavedTensorHooks.h>
#include <ATen/core/grad_mode.h>

#include <algorithm>

namespace torchgradx {

Tensor among(const Tensor& t, const Rows& rows, int64_t dim) {
  if (rows.parts == 1) return t;
  const bool last = dim == -1 || t.dim() == 1;
  if (last) return at::constant_pad_nd(t, {rows.before, rows.after});
  return at::constant_pad_nd(t, {0, 0, rows.before, rows.after});
}

Layout Site::layout_of(const Pass& pass, int64_t use) const {
  if (layout != Layout::kAuto) return layout;
  const bool proven = use >= 0 && use < static_cast<int64_t>(pass.layouts.size());
  return proven ? static_cast<Layout>(pass.layouts[use]) : presumed;
}

std::shared_ptr<Segments> Site::segments_of(const Pass& pass, int64_t use) const {
  const int64_t place = static_cast<int64_t>(layout_of(pass, use)) - static_cast<int64_t>(Layout::kSegments);
  return place < 0 || place >= static_cast<int64_t>(pass.segments.size()) ? nullptr : pass.segments[place];
}

std::optional<Operands> Site::operands(const Pass& pass, int64_t use, const Saved& saved,
                                       const Tensor& grad_output) const {
  const Layout how = layout_of(pass, use);
  if (how == Layout::kShared) return std::nullopt;  // torchgradx/shared brings its gradients by sample
  if (how == Layout::kNowhere) {
    if (grad_output.any().item<bool>()) recorder->refuse(index, "no_output");
    return std::nullopt;
  }
  const auto segments = segments_of(pass, use);
  const auto operands = segments ? by_row(*layer, *segments, flat_use(*segments, saved, grad_output, /*sorts=*/false))
                                 : layer->operands(saved, grad_output, pass.n, how);
  if (!operands)
    recorder->refuse(index, text("not_found", kField, "n=", pass.n, kField, "shape=", grad_output.sizes()));
  return operands;
}

Algorithm Site::plan(int64_t n, int64_t t, const Tensor& operand) {
  const std::array<int64_t, 3> key{n, t, static_cast<int64_t>(operand.element_size())};
  {
    const std::lock_guard<std::mutex> lock(plans_mutex_);
    const auto found = plans_.find(key);
    if (found != plans_.end()) return found->second;
  }
  py::gil_scoped_acquire gil;
  const auto chosen = static_cast<Algorithm>(planner->function(n, t, key[2]).cast<int64_t>());
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
      held(at::SavedTensorDefaultHooks::get_hooks(/*ignore_is_tracing=*/true).has_value()),
      borrows(this->site->layer->lends && this->site->weight_grad) {
  if (held) this->site->recorder->hold();
}

Use::~Use() {
  if (held) site->recorder->release();
}

c10::SmallVector<int64_t, 2> Use::parameters() const {
  c10::SmallVector<int64_t, 2> parameters;
  if (wants_weight) parameters.push_back(site->weight);
  if (wants_bias) parameters.push_back(site->bias);
  return parameters;
}

bool Use::arrive(const Node* at) const {
  return pass->arrive(parameters(), at, site->apart());
}

bool Use::waits_for_weight() const {
  return wants_weight && pass->waits(site->weight, site->weight_rows.parts);
}

bool Use::waits_for_bias() const {
  return wants_bias && pass->waits(site->bias, site->bias_rows.parts);
}

bool Use::receives() const {
  return site->weight_grad || contains(pass->hooked, site->weight) || contains(pass->hooked, site->bias);
}

bool Use::fuses_alone(int64_t positions, const Tensor& operand) const {
  const Recorder& recorder = *site->recorder;
  const bool asked = recorder.auditing || recorder.keeps_tape || !pass->directions.empty();
  return wants_weight && receives() && !asked && !waits_for_weight() && !waits_for_bias() &&
         site->layout_of(*pass, index) == Layout::kBatch &&
         site->plan(pass->n, positions, operand) == Algorithm::kFused;
}

bool Use::keeps_gradients(const Operands& operands) const {
  return site->recorder->keeps_tape && operands.images == 1 && site->layer->keeps_gradients(operands);
}

void Use::finish(const Tensor& sq_norms) {
  pass->finish(site->weight, sq_norms, 0, site->weight_rows.parts);
  if (sq_norms.size(0) > 1) pass->finish(site->bias, sq_norms, 1, site->bias_rows.parts);
}

// What is recorded, to be held against what the parameters receive.
void Use::audit(const Operands& operands, const Gradients& gradients, const Tensor& grad_output) {
  const double size = norm_of(grad_output) * epsilon(grad_output.scalar_type());
  const auto kept = [&](const Tensor& whole, const Rows& rows) {
    const Tensor gradient = among(whole, rows, 0);
    return pass->in_graph ? gradient.clone() : gradient;  // its memory serves again there
  };
  if (wants_weight)
    site->recorder->add_recorded(site->weight, kept(gradients.weight, site->weight_rows),
                                 size * site->layer->magnitude(operands));
  if (!wants_bias) return;
  // The framework may add up a bias gradient one term after the other: its rounding grows with their number.
  const auto terms = static_cast<double>(grad_output.numel()) / static_cast<double>(gradients.bias.numel());
  const double length = std::max(1.0, terms / 1024);
  site->recorder->add_recorded(site->bias, kept(gradients.bias, site->bias_rows),
                               size * std::sqrt(static_cast<double>(grad_output.numel())) * length);
}

void Use::record(Saved saved, const Tensor& weight, const Tensor& grad_output, bool received) {
  const at::NoGradGuard no_grad;
  const Layer& layer = *site->layer;
  // Under autocast a hook sees the input before the cast that the layer computed with.
  Tensor& input = saved.input;
  if (input.defined() && input.is_floating_point() && input.scalar_type() != grad_output.scalar_type())
    input = input.to(grad_output.scalar_type());
  const auto segments = site->segments_of(*pass, index);
  std::optional<at::AutoDispatchBelowADInplaceOrView> below(std::in_place);  // nothing recorded is differentiated
  const auto operands = site->operands(*pass, index, wants_weight ? saved : Saved{}, grad_output);
  if (!operands) return;
  below.reset();
  if (site->recorder->auditing && received) {
    Gradients gradients;
    if (wants_weight) gradients = layer.backward(saved, weight, grad_output, {false, true, false});
    if (wants_bias) gradients.bias = layer.bias_rows(*operands).sum(at::IntArrayRef({0, 1}));
    audit(*operands, gradients, grad_output);
  }
  below.emplace();
  // A sample of several uses is one sum: its norm must wait until all of it is there. So must several images that the
  // layer cannot join.
  const auto joined = waits_for_weight() || waits_for_bias() ? std::nullopt : layer.one_image(*operands);
  const Operands& whole_sample = joined ? *joined : *operands;
  const bool keep_weight = wants_weight && (whole_sample.images > 1 || waits_for_weight());
  const bool keep_bias = wants_bias && (whole_sample.images > 1 || waits_for_bias());
  const bool bias_now = wants_bias && !keep_bias;
  Tensor gradients;
  if (wants_weight && !keep_weight) {
    Tensor sq;
    if (segments)
      sq =
          norms_of_runs(*segments, *flat_use(*segments, saved, grad_output, /*sorts=*/true), weight, bias_now, nullptr);
    else if (bias_now == wants_bias && keeps_gradients(whole_sample))
      std::tie(std::ignore, sq, gradients) = layer.by_sample(whole_sample, weight, {false, true, bias_now});
    else
      sq = layer.sq_norms(whole_sample, site->plan(pass->n, layer.positions(whole_sample), grad_output), bias_now);
    finish(sq);
  } else if (bias_now) {
    const Tensor rows = layer.bias_rows(whole_sample);
    const Tensor sq = segments ? segments->by_sample(rows.sum(1), pass->n).square().sum(1) : bias_sq_norms(rows);
    pass->finish(site->bias, sq, 0, site->bias_rows.parts);
  }
  const auto kept = [&](const Tensor& t) { return borrows ? t.clone() : t; };
  const auto version = [&](const Tensor& t) { return borrows ? Version() : Version(t); };
  if (keep_weight) {
    if (const auto made = layer.weight_gradients(*operands)) {
      pass->add(site->weight, {-1, Tensor(), by_sample(*made, operands->images)});
    } else {
      const bool images = operands->activations.dim() > 3;  // one in each row
      const auto [of, g] = segments && !images ? *flat_use(*segments, saved, grad_output, /*sorts=*/false)
                                               : FlatUse{{operands->activations}, operands->grad_output};
      pass->add(site->weight, {site->index,
                               kept(of.input.detach()),  // not its graph
                               kept(among(g, site->weight_rows, -1)),
                               {version(input), version(grad_output)},
                               segments});
    }
  }
  if (keep_bias) {
    const Tensor of_bias = by_sample(widened(layer.bias_rows(*operands)).sum(1), operands->images);
    pass->add(site->bias, {-1, Tensor(), among(of_bias, site->bias_rows, -1)});
  }
  below.reset();
  serve(*operands, saved, weight, grad_output, gradients);
}

Gradients Use::gradients(const Saved& saved, const Tensor& weight, const Tensor& grad_output, Wanted wanted,
                         bool recorded) {
  const Layer& layer = *site->layer;
  if (several_at_once() && layer.makes_input) return layer.Layer::backward(saved, weight, grad_output, wanted);
  const bool received = !recorded || receives();
  if (!received) wanted.weight = wanted.bias = false;
  if (!recorded || at::GradMode::is_enabled()) return layer.backward(saved, weight, grad_output, wanted);
  Saved laid = saved;
  Tensor g = grad_output;
  std::optional<at::AutoDispatchBelowADInplaceOrView> below(std::in_place);  // nothing recorded is differentiated
  layer.lay_out(laid, weight, g);
  const auto input_gradient = [&] { return layer.backward(laid, weight, g, {true, false, false}).input; };
  const bool alone = wants_weight && !waits_for_weight() && !waits_for_bias();
  const auto segments = site->segments_of(*pass, index);
  if (segments && received && alone) {
    below.reset();
    if (auto gradients = fuse_segments(*segments, laid, weight, g)) {
      if (wanted.input) gradients->input = input_gradient();
      return *gradients;
    }
    below.emplace();
  }
  const bool fuses = alone && !segments && (received || layer.makes_input);
  const auto operands = fuses ? site->operands(*pass, index, laid, g) : std::nullopt;
  const auto joined = operands ? layer.one_image(*operands) : std::nullopt;
  if (joined && layer.fuses(*joined, weight) && site->plan(pass->n, layer.positions(*joined), g) == Algorithm::kFused) {
    const Wanted all{wanted.input, wants_weight, wants_bias};
    Gradients gradients;
    Tensor sq, by_sample;
    if (keeps_gradients(*joined)) {
      Tensor input;
      std::tie(input, sq, by_sample) = layer.by_sample(*joined, weight, all);
      if (received) gradients = sum_of_samples(by_sample, weight);
      gradients.input = input;
    } else {
      std::tie(gradients, sq) = layer.fused(*joined, weight, all);
    }
    if (wanted.input && !layer.makes_input) gradients.input = input_gradient();
    finish(sq);
    serve(*operands, laid, weight, g, by_sample);
    if (received && site->recorder->auditing) audit(*operands, gradients, g);
    return received ? gradients : Gradients{gradients.input};
  }
  below.reset();
  const Gradients gradients =
      layer.backward(laid, weight, g, {wanted.input, received && wants_weight, received && wants_bias});
  record(laid, weight, g, received);
  return gradients;
}

}  // namespace torchgradx
