// Conv2d: the linear algorithms over patches (patches.h); a 1 x 1 convolution is a Linear over pixels.
#include "../operators/views.h"
#include "direct.h"
#include "patch_gram.h"
#include "planes.h"

#include <ATen/ops/empty_like.h>

#include <torch/library.h>

namespace torchgradx::cpu {
namespace {

using at::IntArrayRef;

// [N, C, H, W] of a 1 x 1 convolution -> [N, H W, C] without a copy, or nothing where rows are apart
std::optional<Tensor> as_rows(const ConvShape& s, const Tensor& t) {
  const auto along = joint_stride(t, 2);
  if (!along || s.kH * s.kW > 1 || s.strideH * s.strideW > 1 || s.padH + s.padW > 0 || s.groups > 1)
    return std::nullopt;
  return viewed(t, {t.size(0), t.size(2) * t.size(3), t.size(1)}, {t.stride(0), *along, t.stride(1)});
}

// Of small images with many channels: the Gram matrices of pixels cost less than what becomes of each tile.
template <class acc_t>
bool gram_is_quicker(const Patches<acc_t>& layer, const ConvShape& s) {
  if (s.groups > 1 || !gram_of_pixels(s.outH * s.outW, s.H * s.W)) return false;
  const int64_t T = s.outH * s.outW, taps = s.kH * s.kW;
  const double of_taps = 2 * double(taps) * double(T) * double(s.outH);
  return gram_nanoseconds(s.H * s.W, s.C) + gram_nanoseconds(T, s.O) + of_taps <
         tile_end_nanoseconds<acc_t>(s.C * taps, s.O, std::min(layer.chunk().samples, s.N));
}

// The weight's gradient alone, as one sum over all pixels of all samples.
template <class acc_t>
void weight_pass(const Tensor& input, const Tensor& grad_output, const ConvShape& s, const acc_t* scale,
                 const Tensor& weight) {
  over_kept(input, grad_output, scale, weight, [&](const Tensor& x, const Tensor& grads, const acc_t* factors) {
    ConvShape kept = s;
    kept.N = x.size(0);
    fused_pass<acc_t>(Patches<acc_t>(x, grads, kept, true), factors, s.outH * s.outW, weight, {}, {});
  });
}

Tensor conv2d_direct_sq_norms(const Tensor& input, const Tensor& grad_output, IntArrayRef kernel_size,
                              IntArrayRef stride, IntArrayRef padding, IntArrayRef dilation, int64_t groups,
                              bool bias) {
  const ConvShape s = check_conv2d(input, grad_output, {kernel_size, stride, padding, dilation, groups});
  if (const auto a = as_rows(s, input), b = as_rows(s, grad_output); a && b) return direct_sq_norms(*a, *b, bias);
  return norm_results(input, s.N, bias, grad_output.numel() == 0, [&](auto zero, const Tensor& sq_norms) {
    using acc_t = decltype(zero);
    const Patches<acc_t> layer(input, grad_output, s, false);
    if (!suits_planes(s)) return fused_pass<acc_t>(layer, nullptr, 1, {}, {}, sq_norms);
    planes_pass<acc_t>(layer, nullptr, {}, sq_norms);
    if (bias) bias_pass<acc_t>(layer, nullptr, {}, sq_norms);
  });
}

Tensor conv2d_gram_sq_norms(const Tensor& input, const Tensor& grad_output, IntArrayRef kernel_size, IntArrayRef stride,
                            IntArrayRef padding, IntArrayRef dilation, int64_t groups, bool bias) {
  const ConvShape s = check_conv2d(input, grad_output, {kernel_size, stride, padding, dilation, groups});
  return norm_results(input, s.N, bias, grad_output.numel() == 0, [&](auto zero, const Tensor& sq_norms) {
    using acc_t = decltype(zero);
    // The groups are layers of their own, each with its share of the channels.
    ConvShape one = s;
    one.C /= s.groups, one.O /= s.groups, one.groups = 1;
    const auto share = [&](const Tensor& t, int64_t dim, int64_t first, int64_t count) {
      return s.groups == 1 ? t : t.narrow(dim, first, count);
    };
    const Tensor part = s.groups == 1 ? sq_norms : at::empty_like(sq_norms).select(0, 0).unsqueeze(0),
                 norms = share(sq_norms, 0, 0, 1);
    for (int64_t g = 0; g < s.groups; ++g) {
      const Patches<acc_t> layer(share(input, 1, g * one.C, one.C), share(grad_output, 1, g * one.O, one.O), one,
                                 false);
      gram_pass<acc_t>(PatchSource<acc_t>{layer}, layer, s.outH * s.outW, part);
      if (s.groups > 1) g ? norms.add_(part) : norms.copy_(part);
    }
    if (bias) bias_pass<acc_t>(Patches<acc_t>(input, grad_output, s, false), nullptr, {}, sq_norms);
  });
}

Fused conv2d_fused(const Tensor& input, const Tensor& grad_output, IntArrayRef kernel_size, IntArrayRef stride,
                   IntArrayRef padding, IntArrayRef dilation, int64_t groups, const std::optional<Tensor>& scale,
                   bool bias) {
  const ConvShape s = check_conv2d(input, grad_output, {kernel_size, stride, padding, dilation, groups});
  check_scale(scale, s.N, input);
  if (const auto a = as_rows(s, input), b = as_rows(s, grad_output); a && b) {
    auto [weight, grad_bias, sq_norms] = linear_fused(*a, *b, scale, bias);
    return {weight.view({s.O, s.C, 1, 1}), grad_bias, sq_norms};
  }
  return fused_results(
      input, {s.O, s.C / s.groups, s.kH, s.kW}, s.N, scale, bias, grad_output.numel() == 0,
      [&](auto zero, const auto* factors, const Tensor& weight, const Tensor& grad_bias, const Tensor& sq_norms) {
        using acc_t = decltype(zero);
        const Patches<acc_t> layer(input, grad_output, s, true);
        if (suits_planes(s)) {
          planes_pass<acc_t>(layer, factors, weight, sq_norms);
        } else if (gram_is_quicker(layer, s)) {
          weight_pass<acc_t>(input, grad_output, s, factors, weight);
          gram_pass<acc_t>(PatchSource<acc_t>{layer}, layer, s.outH * s.outW, sq_norms);
        } else {
          return fused_pass<acc_t>(layer, factors, s.outH * s.outW, weight, grad_bias, sq_norms);
        }
        if (bias) bias_pass<acc_t>(layer, factors, grad_bias, sq_norms);
      });
}

Scaled conv2d_scaled(const Tensor& input, const Tensor& grad_output, IntArrayRef kernel_size, IntArrayRef stride,
                     IntArrayRef padding, IntArrayRef dilation, int64_t groups, const Tensor& scale, bool bias) {
  const ConvShape s = check_conv2d(input, grad_output, {kernel_size, stride, padding, dilation, groups});
  check_scale(scale, s.N, input);
  if (const auto a = as_rows(s, input), b = as_rows(s, grad_output); a && b) {
    const auto [weight, grad_bias] = linear_scaled(*a, *b, scale, bias);
    return {weight.view({s.O, s.C, 1, 1}), grad_bias};
  }
  const auto [weight, grad_bias, none] = fused_results(
      input, {s.O, s.C / s.groups, s.kH, s.kW}, s.N, scale, bias, grad_output.numel() == 0,
      [&](auto zero, const auto* factors, const Tensor& weight, const Tensor& grad_bias, const Tensor& sq_norms) {
        using acc_t = decltype(zero);
        const Patches<acc_t> layer(input, grad_output, s, true);
        if (suits_planes(s))
          planes_pass<acc_t>(layer, factors, weight, sq_norms);
        else
          weight_pass<acc_t>(input, grad_output, s, factors, weight);
        if (bias) bias_pass<acc_t>(layer, factors, grad_bias, {});
      });
  return {weight, grad_bias};
}

}  // namespace
}  // namespace torchgradx::cpu

TORCH_LIBRARY_IMPL(torchgradx, CPU, m) {
  m.impl("conv2d_direct_sq_norms", torchgradx::cpu::conv2d_direct_sq_norms);
  m.impl("conv2d_gram_sq_norms", torchgradx::cpu::conv2d_gram_sq_norms);
  m.impl("conv2d_fused", torchgradx::cpu::conv2d_fused);
  m.impl("conv2d_scaled", torchgradx::cpu::conv2d_scaled);
}
