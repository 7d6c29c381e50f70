// Normalisations, whose weight and bias act element by element on what is normalised. Each kind says how its input is
// seen as [N, T, G, K] (ops.h); the rest is one. Statistics that a forward does not hand out are taken again.
#include "../operators/views.h"
#include "elementwise.h"

#include <ATen/autocast_mode.h>

namespace torchgradx {
namespace {

class Affine : public Elementwise {
 public:
  explicit Affine(double eps) : eps_(eps) {}

  std::optional<Operands> operands(const Saved& saved, const Tensor& grad_output, int64_t n,
                                   Layout layout) const override {
    const auto b = by_sample(grad_output, n, layout);
    if (!b) return std::nullopt;
    Operands o{{}, b->first, {}, {}, n ? b->first.size(0) / n : 1, b->second, at::DimVector(grad_output.sizes())};
    if (!saved.input.defined()) return o;
    o.activations = by_sample(saved.input, n, layout)->first;
    std::tie(o.mean, o.rstd) = statistics(saved, o.activations, n);
    return o;
  }

  Tensor sq_norms(const Operands& o, Algorithm, bool bias) const override {
    return affine_sq_norms(o.activations, o.grad_output, maybe(o.mean), o.rstd, bias);
  }
  std::pair<Gradients, Tensor> fused(const Operands& o, const Tensor& weight, const Wanted& wanted) const override {
    auto [input, grad_weight, grad_bias, sq] =
        affine_fused(o.activations, o.grad_output, weight, maybe(o.mean), o.rstd, frozen(), std::nullopt, wanted.bias);
    return {{restored(input, o.shape), grad_weight, wanted.bias ? grad_bias : Tensor()}, sq};
  }

  bool keeps_gradients(const Operands& o) const override {
    constexpr int64_t kWorthIt = 4;  // positions: two accumulators stand for two operands of so many
    return positions(o) >= kWorthIt;
  }
  std::tuple<Tensor, Tensor, Tensor> by_sample(const Operands& o, const Tensor& weight,
                                               const Wanted& wanted) const override {
    const std::optional<Tensor> to = wanted.input ? std::optional<Tensor>(weight) : std::nullopt;
    auto [input, sq, gradients] =
        affine_by_sample(o.activations, o.grad_output, to, maybe(o.mean), o.rstd, frozen(), wanted.bias);
    return {wanted.input ? restored(input, o.shape) : Tensor(), sq, gradients};
  }

  Gradients scaled(const Operands& o, const Tensor& weight, const Tensor& scale, const Wanted& wanted) const override {
    const auto [input, grad_weight, grad_bias, sq] =
        affine_fused(o.activations, o.grad_output, weight, maybe(o.mean), o.rstd, frozen(), scale, wanted.bias);
    return {{}, grad_weight, wanted.bias ? grad_bias : Tensor()};
  }

 protected:
  // [N K, T, G, K'], and whether the samples had to be brought to the front.
  virtual std::optional<std::pair<Tensor, bool>> by_sample(const Tensor& t, int64_t n, Layout layout) const = 0;
  virtual Tensor restored(const Tensor& t, at::IntArrayRef shape) const = 0;  // the inverse, where they had not
  // As ops.h wants them for a [N, T, G, K]; mean undefined where nothing is subtracted.
  virtual std::tuple<Tensor, Tensor> statistics(const Saved& saved, const Tensor& a, int64_t n) const = 0;
  virtual bool frozen() const {
    return false;
  }

  Tensor features(const Operands& o) const override {
    const Tensor x = o.activations.to(o.rstd.scalar_type());
    return (o.mean.defined() ? x - o.mean.unsqueeze(3) : x) * o.rstd.unsqueeze(3);
  }

  const double eps_;
};

// LayerNorm and RMSNorm: rows of the last dimensions, [N, T, 1, D].
class LastDimensions final : public Affine {
 public:
  LastDimensions(std::vector<int64_t> shape, double eps, bool centred)
      : Affine(eps), shape_(std::move(shape)), centred_(centred) {
    biased = centred;
  }

  bool batched(const Tensor& input) const override {
    return input.dim() > static_cast<int64_t>(shape_.size());
  }

  Tensor whole_forward(const Tensor& input, const Tensor& weight, const std::optional<Tensor>& bias) const override {
    return centred_ ? at::layer_norm(input, shape_, weight, bias, eps_, at::globalContext().userEnabledCuDNN())
                    : root_mean_square(input, weight);
  }
  Tensor forward(const Tensor& input, const Tensor& weight, const std::optional<Tensor>& bias,
                 Saved& saved) const override {
    if (!centred_) return root_mean_square(input, weight);
    Tensor output;
    std::tie(output, saved.mean, saved.rstd) = at::native_layer_norm(input, shape_, weight, bias, eps_);
    return output;
  }
  Gradients backward(const Saved& saved, const Tensor& weight, const Tensor& grad_output,
                     const Wanted& wanted) const override {
    if (!saved.mean.defined() || wanted.input) return Affine::backward(saved, weight, grad_output, wanted);
    Gradients gradients;
    std::tie(gradients.input, gradients.weight, gradients.bias) =
        at::native_layer_norm_backward(grad_output, saved.input, shape_, saved.mean, saved.rstd, weight,
                                       weight /* for a bias: of its shape */, {false, wanted.weight, wanted.bias});
    return gradients;
  }

 protected:
  std::optional<std::pair<Tensor, bool>> by_sample(const Tensor& t, int64_t n, Layout layout) const override {
    const Tensor flat = shape_.size() == 1 ? t : t.flatten(t.dim() - static_cast<int64_t>(shape_.size()));
    const auto rows = rows_by_sample(flat, n, layout);
    if (!rows) return std::nullopt;
    const auto s = rows->strides();
    const Tensor grouped = viewed(*rows, {rows->size(0), rows->size(1), 1, rows->size(2)}, {s[0], s[1], s[1], s[2]});
    return std::pair(grouped, layout != Layout::kBatch && n != 1);
  }
  Tensor restored(const Tensor& t, at::IntArrayRef shape) const override {
    return viewed(t, shape);
  }
  std::tuple<Tensor, Tensor> statistics(const Saved& saved, const Tensor& a, int64_t) const override {
    const bool kept = saved.rstd.defined() && saved.rstd.scalar_type() == accumulator_of(a);
    const bool in_order = kept && a.is_contiguous() && saved.input.is_contiguous() && a.is_alias_of(saved.input);
    const auto by_row = [&](const Tensor& t) { return viewed(t, {a.size(0), a.size(1), 1}); };
    if (in_order) return {saved.mean.defined() ? by_row(saved.mean) : saved.mean, by_row(saved.rstd)};
    const double eps = eps_ < 0 ? epsilon(accumulator_of(a)) : eps_;
    auto [mean, rstd] = moments(a, eps, centred_, /*over_positions=*/false);
    return {centred_ ? mean : Tensor(), rstd};
  }

 private:
  Tensor root_mean_square(const Tensor& input, const Tensor& weight) const {
    return at::rms_norm(input, shape_, weight, eps_ < 0 ? std::nullopt : std::optional<double>(eps_));
  }
  const std::vector<int64_t> shape_;
  const bool centred_;
};

// GroupNorm, InstanceNorm, BatchNorm: channels second, [N, HW, G, C / G].
class Channels : public Affine {
 public:
  Channels(int64_t groups, double eps) : Affine(eps), groups_(groups) {}

  bool batched(const Tensor& input) const override {
    return input.dim() > 1 && (!groups_ || input.numel() != groups_);  // what a GroupNorm's own forward refuses
  }

 protected:
  std::optional<std::pair<Tensor, bool>> by_sample(const Tensor& t, int64_t n, Layout layout) const override {
    const auto images = t.dim() > 1 ? images_of(t, n, layout) : std::nullopt;
    if (!images) return std::nullopt;
    const Tensor front = images->by_sample(t);
    const int64_t c = t.size(1), each = groups(t) ? c / groups(t) : 0;
    if (const auto along = joint_stride(front, 2); along && each > 0) {
      const int64_t n = front.size(0), s = front.stride(1);
      const Tensor grouped = viewed(front, {n, c10::multiply_integers(t.sizes().slice(2)), c / each, each},
                                    {front.stride(0), *along, each * s, s});
      return std::pair(grouped, images->moved);
    }
    const Tensor pixels = t.dim() > 2 ? front.flatten(2) : front.unsqueeze(2);  // [N K, C, HW]
    return std::pair(pixels.unflatten(1, {groups(t), -1}).permute({0, 3, 1, 2}), images->moved);
  }
  Tensor restored(const Tensor& t, at::IntArrayRef shape) const override {
    const bool joint = t.size(2) == 1 || t.size(3) == 1 || t.stride(2) == t.size(3) * t.stride(3);
    if (!joint) return t.permute({0, 2, 3, 1}).reshape(shape);
    at::DimVector strides(shape.size());
    strides[0] = t.stride(0), strides[1] = t.size(3) == 1 ? t.stride(2) : t.stride(3);
    int64_t along = t.stride(1);
    for (size_t d = shape.size(); d-- > 2;) strides[d] = along, along *= std::max<int64_t>(shape[d], 1);
    return viewed(t, shape, strides);
  }
  std::tuple<Tensor, Tensor> statistics(const Saved& saved, const Tensor& a, int64_t n) const override {
    const bool kept = saved.rstd.defined() && saved.rstd.scalar_type() == accumulator_of(a) && a.size(0) == n;
    const auto by_group = [&](const Tensor& t) { return viewed(t, {a.size(0), 1, a.size(2)}); };
    if (kept) return {by_group(saved.mean), by_group(saved.rstd)};
    return moments(a, eps_, /*centred=*/true, /*over_positions=*/true);
  }
  int64_t groups(const Tensor& input) const {
    return groups_ ? groups_ : input.size(1);
  }

 private:
  const int64_t groups_;  // 0: as many as there are channels
};

class GroupNorm final : public Channels {
 public:
  using Channels::Channels;

  Tensor whole_forward(const Tensor& input, const Tensor& weight, const std::optional<Tensor>& bias) const override {
    if (!batched(input)) return {};  // refused there
    return at::group_norm(input, groups(input), weight, bias, eps_, at::globalContext().userEnabledCuDNN());
  }
  Tensor forward(const Tensor& input, const Tensor& weight, const std::optional<Tensor>& bias,
                 Saved& saved) const override {
    // A GPU's autocast widens this one's input and not native_group_norm's.
    if (at::autocast::is_autocast_enabled(input.device().type())) return whole_forward(input, weight, bias);
    const Tensor x =
        in_format(input, input.device().is_cpu() ? input.suggest_memory_format() : at::MemoryFormat::Contiguous);
    const int64_t n = x.size(0), c = x.size(1), pixels = c10::multiply_integers(x.sizes().slice(2));
    Tensor output;
    std::tie(output, saved.mean, saved.rstd) =
        at::native_group_norm(x, weight.contiguous(), bias ? std::optional<Tensor>(bias->contiguous()) : std::nullopt,
                              n, c, pixels, groups(x), eps_);
    return output;
  }
};

class InstanceNorm final : public Channels {
 public:
  explicit InstanceNorm(double eps) : Channels(0, eps) {}

  Tensor forward(const Tensor& input, const Tensor& weight, const std::optional<Tensor>& bias, Saved&) const override {
    return at::instance_norm(input, weight, bias, std::nullopt, std::nullopt, true, 0.0, eps_,
                             at::globalContext().userEnabledCuDNN());
  }
};

// With statistics of its own, saved as (running_mean, running_var).
class BatchNorm final : public Channels {
 public:
  explicit BatchNorm(double eps) : Channels(0, eps) {}

  Tensor forward(const Tensor& input, const Tensor& weight, const std::optional<Tensor>& bias,
                 Saved& saved) const override {
    return at::batch_norm(input, weight, bias, saved.mean, saved.rstd, /*training=*/false, 0.0, eps_,
                          at::globalContext().userEnabledCuDNN());
  }

 protected:
  std::tuple<Tensor, Tensor> statistics(const Saved& saved, const Tensor& a, int64_t) const override {
    const auto wide = accumulator_of(a);
    return {saved.mean.to(wide).view({1, 1, -1}), saved.rstd.to(wide).add(eps_).rsqrt().view({1, 1, -1})};
  }
  bool frozen() const override {
    return true;
  }
};

}  // namespace

LayerPtr layer_norm_layer(std::vector<int64_t> shape, double eps) {
  return std::make_shared<LastDimensions>(std::move(shape), eps, /*centred=*/true);
}

LayerPtr rms_norm_layer(std::vector<int64_t> shape, double eps) {
  return std::make_shared<LastDimensions>(std::move(shape), eps, /*centred=*/false);
}

LayerPtr group_norm_layer(int64_t groups, double eps) {
  return std::make_shared<GroupNorm>(groups, eps);
}

LayerPtr instance_norm_layer(double eps) {
  return std::make_shared<InstanceNorm>(eps);
}

LayerPtr batch_norm_layer(double eps) {
  return std::make_shared<BatchNorm>(eps);
}

}  // namespace torchgradx
