// Convolutions of one and two dimensions. A transposed one is a convolution whose input and output have changed places:
// its weight's gradient is that of a convolution from grad_output to the input.
#include "layer.h"

#include <ATen/ATen.h>

namespace torchgradx {
namespace {

class Convolution final : public Layer {
 public:
  explicit Convolution(ConvolutionOptions options) : o_(std::move(options)) {}

  bool batched(const Tensor& input) const override {
    return input.dim() == (o_.one_dimensional ? 3 : 4);
  }
  Tensor enter(const Tensor& input) const override {
    const Tensor padded = o_.pre_pad.empty() ? input : at::pad(input, o_.pre_pad, o_.pad_mode);
    return lifted(padded);
  }
  Tensor enter_weight(const Tensor& weight) const override {
    return lifted(weight);
  }
  Tensor enter_grad(const Tensor& grad_output) const override {
    return lifted(grad_output);
  }
  Tensor leave(const Tensor& output) const override {
    return o_.one_dimensional ? output.squeeze(-2) : output;
  }

  Tensor forward(const Tensor& input, const Tensor& weight, const std::optional<Tensor>& bias, Saved&) const override {
    return at::convolution(input, weight, bias, o_.stride, o_.padding, o_.dilation, o_.transposed, {0, 0}, o_.groups);
  }

  Gradients backward(const Saved& saved, const Tensor& weight, const Tensor& grad_output,
                     const Wanted& wanted) const override {
    Gradients gradients;
    if (wanted.input || wanted.weight) {
      std::tie(gradients.input, gradients.weight, std::ignore) = at::convolution_backward(
          grad_output, saved.input, weight, std::nullopt, o_.stride, o_.padding, o_.dilation, o_.transposed,
          output_padding(saved.input, grad_output), o_.groups, {wanted.input, wanted.weight, false});
    }
    if (wanted.bias) gradients.bias = grad_output.sum({0, 2, 3});
    return gradients;
  }

  std::optional<Operands> operands(const Saved& saved, const Tensor& grad_output, int64_t n,
                                   Layout layout) const override {
    if (grad_output.dim() != 4) return std::nullopt;
    const auto images = images_of(grad_output, n, layout);
    if (!images) return std::nullopt;
    return Operands{
        images->by_sample(saved.input), images->by_sample(grad_output), {}, {}, images->each, images->moved};
  }

  int64_t positions(const Operands& operands) const override {
    const Tensor& t = o_.transposed ? operands.activations : operands.grad_output;
    return t.size(2) * t.size(3);
  }
  Tensor bias_rows(const Operands& operands) const override {
    return operands.grad_output.flatten(2).transpose(1, 2);
  }
  double magnitude(const Operands& operands) const override {
    return norm_of(operands.activations);
  }

  Tensor sq_norms(const Operands& operands, Algorithm algorithm, bool bias) const override {
    const bool together = bias && !o_.transposed;
    const auto [from, to] = ends(operands);
    const Tensor sq = algorithm == Algorithm::kRank1  ? of_one_pixel(from, to)
                      : algorithm == Algorithm::kGram ? conv2d_gram_sq_norms(from, to, geometry(), together)
                                                      : conv2d_direct_sq_norms(from, to, geometry(), together);
    if (bias && sq.size(0) == 1) return at::cat({sq, bias_sq_norms(bias_rows(operands)).unsqueeze(0)});
    return sq;
  }

  std::pair<Gradients, Tensor> fused(const Operands& operands, const Tensor&, const Wanted& wanted) const override {
    const bool together = wanted.bias && !o_.transposed;
    const auto [from, to] = ends(operands);
    auto [weight, bias, sq] = conv2d_fused(from, to, geometry(), std::nullopt, together);
    if (!wanted.bias) return {{Tensor(), weight, Tensor()}, sq};
    if (together) return {{Tensor(), weight, bias}, sq};
    const Tensor of_bias = bias_sq_norms(bias_rows(operands)).unsqueeze(0);
    return {{Tensor(), weight, operands.grad_output.sum({0, 2, 3})}, at::cat({sq, of_bias})};
  }

 private:
  Tensor lifted(const Tensor& t) const {
    return o_.one_dimensional ? t.unsqueeze(-2) : t;
  }
  Geometry geometry() const {
    return {o_.kernel_size, o_.stride, o_.padding, o_.dilation, o_.groups};
  }
  // Rows and columns of a transposed convolution's output that its sizes alone do not call for.
  std::vector<int64_t> output_padding(const Tensor& input, const Tensor& grad_output) const {
    std::vector<int64_t> more(2, 0);
    for (int64_t d = 0; d < 2 && o_.transposed; ++d)
      more[d] = grad_output.size(2 + d) - (input.size(2 + d) - 1) * o_.stride[d] + 2 * o_.padding[d] -
                o_.dilation[d] * (o_.kernel_size[d] - 1) - 1;
    return more;
  }
  // Of the convolution whose weight's gradient it is: input and grad_output.
  std::pair<Tensor, Tensor> ends(const Operands& operands) const {
    if (o_.transposed) return {operands.grad_output, operands.activations};
    return {operands.activations, operands.grad_output};
  }
  // One output pixel: its patch is all there is, and each group an outer product of its own.
  Tensor of_one_pixel(const Tensor& input, const Tensor& grad_output) const {
    const int64_t rows = grad_output.size(0) * o_.groups;
    const Tensor patch = at::im2col(input, o_.kernel_size, o_.dilation, o_.padding, o_.stride);  // [N, groups * I, 1]
    const Tensor sq = rank1_sq_norms(patch.reshape({rows, 1, patch.numel() / std::max<int64_t>(1, rows)}),
                                     grad_output.reshape({rows, 1, grad_output.size(1) / o_.groups}), false);
    return sq.view({grad_output.size(0), o_.groups}).sum(1).unsqueeze(0);
  }

  const ConvolutionOptions o_;
};

}  // namespace

LayerPtr convolution_layer(ConvolutionOptions options) {
  return std::make_shared<Convolution>(std::move(options));
}

}  // namespace torchgradx
