// Convolutions of one to three dimensions. A transposed one is a convolution whose input and output have changed
// places: its weight's gradient is that of a convolution from grad_output to the input. The gradient of one of three
// dimensions is that of one of two, whose channels are those of each depth that the kernel spans, and whose image is a
// stack of all depths of the output. Several images of one sample are stacked likewise.
#include "layer.h"

#include <ATen/ATen.h>

namespace torchgradx {
namespace {

constexpr auto kLast = at::MemoryFormat::ChannelsLast;

template <class Op, class... More>
auto over(const Op& op, const Tensor& from, const Tensor& to, const Geometry& g, const More&... more) {
  return op(from, to, g.kernel_size, g.stride, g.padding, g.dilation, g.groups, more...);
}

class Convolution final : public Layer {
 public:
  explicit Convolution(ConvolutionOptions options)
      : o_(std::move(options)),
        kernel_(all(o_.kernel_size, 0)),
        stride_(all(o_.stride, 1)),
        padding_(all(o_.padding, 2)),
        dilation_(all(o_.dilation, 3)),
        none_(kernel_.size(), 0),
        across_{0, o_.padding[1]} {}

  bool batched(const Tensor& input) const override {  // or one sample alone, as the framework takes it
    return input.dim() == dims() || input.dim() == dims() - 1;
  }
  Tensor enter(const Tensor& input) const override {
    return lifted(o_.pre_pad.empty() ? input : at::pad(input, o_.pre_pad, o_.pad_mode));
  }
  Tensor lifted(const Tensor& t) const override {
    return o_.one_dimensional ? t.unsqueeze(-2) : t;
  }
  Tensor leave(const Tensor& output) const override {
    return o_.one_dimensional ? output.squeeze(-2) : output;
  }

  Tensor whole_forward(const Tensor& input, const Tensor& weight, const std::optional<Tensor>& bias) const override {
    if (dims() != 4 || !o_.pre_pad.empty() || o_.transposed) return {};
    return at::conv2d(input, weight, bias, stride_, padding_, dilation_, o_.groups);
  }
  Tensor forward(const Tensor& input, const Tensor& weight, const std::optional<Tensor>& bias, Saved&) const override {
    const Tensor x = batch(input);
    const Tensor made = at::convolution(channels_last(x, weight) ? in_format(x, kLast) : in_order(x), weight, bias,
                                        stride_, padding_, dilation_, o_.transposed, none_, o_.groups);
    return alone(input) ? made.squeeze(0) : made;
  }

  // The framework brings grad_output into the order of the input that it is given, then into that of cuDNN.
  void lay_out(Saved& saved, const Tensor& weight, Tensor& grad_output) const override {
    if (!saved.input.defined() || !channels_last(saved.input, weight)) return;
    saved.input = in_format(saved.input, kLast);
    grad_output = in_format(grad_output, kLast);
  }

  Gradients backward(const Saved& saved, const Tensor& weight, const Tensor& grad_output,
                     const Wanted& wanted) const override {
    if (alone(grad_output)) {
      Gradients gradients = backward({batch(saved.input), {}, {}}, weight, batch(grad_output), wanted);
      if (gradients.input.defined()) gradients.input = gradients.input.squeeze(0);
      return gradients;
    }
    Gradients gradients;
    if (wanted.input || wanted.weight) {
      std::tie(gradients.input, gradients.weight, std::ignore) = at::convolution_backward(
          in_order(grad_output), in_order(saved.input), weight, std::nullopt, stride_, padding_, dilation_,
          o_.transposed, output_padding(saved.input, grad_output), o_.groups, {wanted.input, wanted.weight, false});
    }
    if (wanted.bias) {  // several gradients at once have no flatten
      const auto sizes = grad_output.sizes();
      const int64_t pixels = c10::multiply_integers(sizes.slice(2));
      gradients.bias = grad_output.reshape({sizes[0], sizes[1], pixels}).sum(at::IntArrayRef({0, 2}));
    }
    return gradients;
  }

  std::optional<Operands> operands(const Saved& saved, const Tensor& grad_output, int64_t n,
                                   Layout layout) const override {
    const Tensor g = batch(grad_output);
    const auto images = images_of(g, n, layout);
    if (!images) return std::nullopt;
    Operands o{images->by_sample(batch(saved.input)), images->by_sample(g), {}, {}, images->each, images->moved};
    if (deep()) o.bias_grad = o.grad_output;
    if (deep() && o.activations.defined()) stack(o, o_.depth);
    return o;
  }
  std::optional<Operands> one_image(const Operands& operands) const override {
    if (operands.images == 1) return operands;
    if (!operands.activations.defined()) return std::nullopt;
    const auto in_depth = [&](const Tensor& t) { return t.unflatten(0, {-1, operands.images}).transpose(1, 2); };
    Operands whole{in_depth(operands.activations), in_depth(operands.grad_output)};
    whole.padded = operands.padded;
    if (operands.bias_grad.defined()) whole.bias_grad = in_depth(operands.bias_grad);
    stack(whole, {1, 1, 0, 1});
    return whole;
  }

  int64_t positions(const Operands& operands) const override {
    const Tensor& t = o_.transposed ? operands.activations : operands.grad_output;
    return t.size(2) * t.size(3);
  }
  Tensor bias_rows(const Operands& operands) const override {
    const Tensor& g = operands.bias_grad.defined() ? operands.bias_grad : operands.grad_output;
    return g.flatten(2).transpose(1, 2);
  }

  Tensor sq_norms(const Operands& operands, Algorithm algorithm, bool bias) const override {
    const bool together = bias && !o_.transposed;
    const auto [from, to] = ends(operands);
    const Geometry g = geometry(operands);
    const Tensor sq = algorithm == Algorithm::kRank1  ? of_one_pixel(from, to, g)
                      : algorithm == Algorithm::kGram ? over(conv2d_gram_sq_norms, from, to, g, together)
                                                      : over(conv2d_direct_sq_norms, from, to, g, together);
    if (bias && sq.size(0) == 1) return at::cat({sq, bias_sq_norms(bias_rows(operands)).unsqueeze(0)});
    return sq;
  }

  std::pair<Gradients, Tensor> fused(const Operands& operands, const Tensor& w, const Wanted& wanted) const override {
    const bool together = wanted.bias && !o_.transposed;
    const auto [from, to] = ends(operands);
    auto [gradient, bias, sq] = over(conv2d_fused, from, to, geometry(operands), std::nullopt, together);
    const Tensor weight = gradient.reshape(w.sizes());
    if (!wanted.bias) return {{Tensor(), weight, Tensor()}, sq};
    if (together) return {{Tensor(), weight, bias}, sq};
    const Tensor of_bias = bias_sq_norms(bias_rows(operands)).unsqueeze(0);
    return {{Tensor(), weight, bias_rows(operands).sum(at::IntArrayRef({0, 1}))}, at::cat({sq, of_bias})};
  }

  Gradients scaled(const Operands& operands, const Tensor& w, const Tensor& scale,
                   const Wanted& wanted) const override {
    const bool together = wanted.bias && !o_.transposed;
    const auto [from, to] = ends(operands);
    auto [weight, bias] = over(conv2d_scaled, from, to, geometry(operands), scale, together);
    if (!together) bias = wanted.bias ? scaled_bias(operands, scale) : Tensor();
    return {Tensor(), weight.reshape(w.sizes()), bias};
  }

  Tensor weight_dots(const Operands& operands, const Tensor& direction) const override {
    const auto [from, to] = ends(operands);
    const Geometry g = geometry(operands);
    const Tensor kernel = direction.reshape({direction.size(0), -1, g.kernel_size[0], g.kernel_size[1]});
    const Tensor made = at::conv2d(widened(from), kernel, std::nullopt, g.stride, g.padding, g.dilation, g.groups);
    return (made * widened(to)).flatten(1).sum(1);
  }

 private:
  int64_t dims() const {  // of what the layer is given
    return o_.one_dimensional ? 3 : spatial() + 2;
  }
  bool alone(const Tensor& t) const {  // one sample, without a dimension of samples
    return t.defined() && t.dim() == spatial() + 1;
  }
  Tensor batch(const Tensor& t) const {
    return alone(t) ? t.unsqueeze(0) : t;
  }
  // As the framework has it of one dimension: its channels would come last where those of its input are.
  Tensor in_order(const Tensor& t) const {
    return o_.one_dimensional ? t.contiguous() : t;
  }
  // True if cuDNN has it so, as it does where either lies so.
  bool channels_last(const Tensor& input, const Tensor& weight) const {
    const bool suits = input.is_cuda() && input.dim() == 4 && !o_.one_dimensional && !deep() && o_.groups == 1 &&
                       input.scalar_type() != at::kDouble;
    return suits && (input.suggest_memory_format() == kLast || weight.suggest_memory_format() == kLast);
  }
  bool deep() const {
    return !o_.depth.empty();
  }
  int64_t spatial() const {
    return static_cast<int64_t>(kernel_.size());
  }
  std::vector<int64_t> all(const std::vector<int64_t>& pair, size_t which) const {  // dimensions
    return deep() ? std::vector<int64_t>{o_.depth[which], pair[0], pair[1]} : pair;
  }
  Geometry geometry(const Operands& operands) const {
    return {o_.kernel_size, o_.stride, operands.padded ? across_ : o_.padding, o_.dilation, o_.groups};
  }
  void stack(Operands& o, const std::vector<int64_t>& depth) const {  // depth: as in ConvolutionOptions
    const int64_t above = o.padded ? 0 : o_.padding[0];
    if (o_.transposed)
      std::tie(o.grad_output, o.activations) = stacked(o.grad_output, o.activations, depth, above);
    else
      std::tie(o.activations, o.grad_output) = stacked(o.activations, o.grad_output, depth, above);
    o.padded = true;
  }
  // [M, C, D, H, W] -> [M, C kD, D' R sH, W] and [M, O, D', H', W'] -> [M, O, D' R, W']: R rows of the output for each
  // of its depths, of which those beyond H', where the kernel would span two depths, are zero.
  std::pair<Tensor, Tensor> stacked(const Tensor& from, const Tensor& to, at::IntArrayRef depth, int64_t above) const {
    const int64_t kernel = depth[0], stride = depth[1], padding = depth[2], dilation = depth[3];
    const int64_t depths = to.size(2), height = from.size(3) + 2 * above, step = o_.stride[0];
    const int64_t rows = depths == 1 ? to.size(3) : (height + step - 1) / step;
    const int64_t below = depths == 1 ? 0 : rows * step - height;
    const Tensor padded = at::constant_pad_nd(from, {0, 0, above, above + below, padding, padding});
    const Tensor spans = padded.unfold(2, (kernel - 1) * dilation + 1, stride).slice(-1, 0, std::nullopt, dilation);
    const Tensor image = spans.narrow(2, 0, depths).permute({0, 1, 5, 2, 3, 4}).flatten(3, 4).flatten(1, 2);
    // Where the kernel is taller than a step, the last of the rows need more below them.
    const int64_t last = depths == 1 ? 0 : std::max<int64_t>(0, o_.dilation[0] * (o_.kernel_size[0] - 1) + 1 - step);
    const Tensor grads = at::constant_pad_nd(to, {0, 0, 0, rows - to.size(3)}).flatten(2, 3);
    return {at::constant_pad_nd(image, {0, 0, 0, last}), grads};
  }
  // Rows and columns of a transposed convolution's output that its sizes alone do not call for.
  std::vector<int64_t> output_padding(const Tensor& input, const Tensor& grad_output) const {
    std::vector<int64_t> more(none_);
    for (int64_t d = 0; d < spatial() && o_.transposed; ++d)
      more[d] = grad_output.size(2 + d) - (input.size(2 + d) - 1) * stride_[d] + 2 * padding_[d] -
                dilation_[d] * (kernel_[d] - 1) - 1;
    return more;
  }
  // Of the convolution whose weight's gradient it is: input and grad_output.
  std::pair<Tensor, Tensor> ends(const Operands& operands) const {
    if (o_.transposed) return {operands.grad_output, operands.activations};
    return {operands.activations, operands.grad_output};
  }
  // One output pixel: its patch is all there is, and each group an outer product of its own.
  Tensor of_one_pixel(const Tensor& input, const Tensor& grad_output, const Geometry& g) const {
    const int64_t rows = grad_output.size(0) * o_.groups;
    const Tensor patch = at::im2col(input, g.kernel_size, g.dilation, g.padding, g.stride);  // [N, groups * I, 1]
    const Tensor sq = rank1_sq_norms(patch.reshape({rows, 1, patch.numel() / std::max<int64_t>(1, rows)}),
                                     grad_output.reshape({rows, 1, grad_output.size(1) / o_.groups}), false);
    return sq.view({grad_output.size(0), o_.groups}).sum(1).unsqueeze(0);
  }

  const ConvolutionOptions o_;                                              // of the last two dimensions
  const std::vector<int64_t> kernel_, stride_, padding_, dilation_, none_;  // of all
  const std::vector<int64_t> across_;                                       // the padding that stacked() leaves
};

}  // namespace

LayerPtr convolution_layer(ConvolutionOptions options) {
  return std::make_shared<Convolution>(std::move(options));
}

}  // namespace torchgradx
