// Depthwise convolutions and others with very few channels a group: each tap of each pair of channels is one flat dot
// product of the output gradient's plane with the image's, both copied to lines of the same length with zeros between,
// so that a tap is an offset. A stride splits the image into planes of every stride-th pixel. Cost 2 N T I O / groups,
// bound by loads. A sample's gradients of one group are kept, 64 Ki at most; large planes are done in bands. Squares
// are summed in double.
#pragma once

#include "passes.h"
#include "patches.h"

namespace torchgradx::cpu {

constexpr int64_t kPlane = 1 << 14;  // positions in a band

template <class acc_t>
class PlaneCorrelation {
 public:
  PlaneCorrelation(const Patches<acc_t>& layer) : layer_(layer) {
    const Axis &down = layer_.down, &along = layer_.along;
    high_ = std::min(layer_.height, std::max<int64_t>(1, kPlane / std::max<int64_t>(1, layer_.width)));
    wide_ = std::min(layer_.width, kPlane);
    const auto reach = [](const Axis& axis) { return (axis.taps - 1) * axis.dilation / axis.stride; };
    line_ = wide_ + reach(along), lines_ = high_ + reach(down);
    // One spare line: the last lines' taps run past the plane's end by less than that, and by the rounding to whole
    // vectors.
    plane_ = round_up((lines_ + 1) * line_ + layer_.lanes, layer_.lanes);
    for (int64_t ky = 0; ky < down.taps; ++ky)
      for (int64_t kx = 0; kx < along.taps; ++kx) {
        const int64_t y = ky * down.dilation, x = kx * along.dilation;
        const Phase phase{y % down.stride, x % along.stride};
        auto found = std::find_if(phases_.begin(), phases_.end(),
                                  [&](const Phase& p) { return p.y == phase.y && p.x == phase.x; });
        if (found == phases_.end()) found = phases_.insert(found, phase);
        found->down = std::max(found->down, y / down.stride), found->along = std::max(found->along, x / along.stride);
        offsets_.push_back((found - phases_.begin()) * plane_ + y / down.stride * line_ + x / along.stride);
      }
  }

  // A share of the samples and groups.
  void run(const Share& share, const Sums<acc_t>& to) {
    const int64_t taps = layer_.taps(), size = layer_.group_rows * layer_.channels * taps;  // of a group's gradient
    Workspace<acc_t>& workspace = Workspace<acc_t>::mine();
    std::vector<acc_t> sums(size);
    if (to.weight) std::fill(to.weight + share.row_begin * size, to.weight + share.row_end * size, acc_t(0));
    for (int64_t n = share.sample_begin; n < share.sample_end; ++n)
      for (int64_t group = share.row_begin; group < share.row_end; ++group) {
        std::fill(sums.begin(), sums.end(), acc_t(0));
        for (int64_t y = 0; y < layer_.height; y += high_)
          for (int64_t x = 0; x < layer_.width; x += wide_) band(n, group, y, x, workspace, sums.data());
        const acc_t factor = to.scale ? to.scale[n] : acc_t(1);
        acc_t* const out = to.weight && factor != 0 ? to.weight + group * size : nullptr;
        for (int64_t k = 0; k < size; ++k) {
          to.sq_sums[n] += double(sums[k]) * sums[k];
          if (out) out[k] += factor * sums[k];
        }
      }
  }

 private:
  struct Phase {
    int64_t y, x, down = 0, along = 0;  // and how far its taps reach, beyond which pixels may be inf or nan
  };

  void band(int64_t n, int64_t group, int64_t y, int64_t x, Workspace<acc_t>& workspace, acc_t* sums) {
    const int64_t high = std::min(high_, layer_.height - y), wide = std::min(wide_, layer_.width - x),
                  taps = layer_.taps();
    const int64_t image = plane_ * int64_t(phases_.size()), count = round_up(high * line_, layer_.lanes);
    acc_t* const images = workspace.image.get(layer_.channels * image);
    acc_t* const grads = workspace.panels.get(plane_);
    for (int64_t c = 0; c < layer_.channels; ++c)
      for (size_t p = 0; p < phases_.size(); ++p)
        pack_image(images + c * image + int64_t(p) * plane_, n, group * layer_.channels + c, y, x, high, wide,
                   phases_[p]);
    for (int64_t r = 0; r < layer_.group_rows; ++r) {
      std::fill(grads, grads + count, acc_t(0));
      layer_.grad_kernels->pack(grads, line_, layer_.grads.at(n, y, x, group * layer_.group_rows + r), high, wide,
                                layer_.grads.y, layer_.grads.x);
      for (int64_t c = 0; c < layer_.channels; ++c, sums += taps)
        for (int64_t k = 0; k < taps; k += kMaxTaps)
          layer_.kernels_->correlate[std::min<int64_t>(kMaxTaps, taps - k)](grads, images + c * image,
                                                                            offsets_.data() + k, count, sums + k);
    }
  }

  // out[line, pixel] = the padded image's pixel ((y + line) stride + phase.y, (x + pixel) stride + phase.x)
  void pack_image(acc_t* out, int64_t n, int64_t channel, int64_t y, int64_t x, int64_t high, int64_t wide,
                  const Phase& phase) const {
    std::fill(out, out + plane_, acc_t(0));
    const Axis &down = layer_.down, &along = layer_.along;
    const int64_t first_y = down.pixel(y, phase.y), step_y = down.stride * down.step;
    const int64_t first_x = along.pixel(x, phase.x), step_x = along.stride * along.step;
    const auto [top, bottom] = down.inside(first_y, step_y, high + phase.down);
    const auto [left, right] = along.inside(first_x, step_x, wide + phase.along);
    if (top == bottom || left == right) return;
    layer_.source_kernels->pack(out + top * line_ + left, line_,
                                layer_.source.at(n, first_y + top * step_y, first_x + left * step_x, channel),
                                bottom - top, right - left, layer_.source.y * step_y, layer_.source.x * step_x);
  }

  const Patches<acc_t> layer_;
  int64_t high_, wide_, lines_, line_, plane_;
  std::vector<Phase> phases_;
  std::vector<int64_t> offsets_;  // of each tap
};

inline bool suits_planes(const ConvShape& s) {
  constexpr double kMostPixels = 1 << 20, kMostTaps = 1 << 10, kMostKept = 1 << 16;
  const double taps = double(s.kH) * double(s.kW), pairs = double(s.C / s.groups) * double(s.O / s.groups);
  const double high = double(std::min(s.outH, kPlane)) + double(s.kH - 1) * double(s.dilationH);
  const double wide = double(std::min(s.outW, kPlane)) + double(s.kW - 1) * double(s.dilationW);
  const bool few = s.C == s.groups || (s.groups > 1 && pairs <= 4);
  // Taps further apart than the outputs reach leave out pixels between them, which zeros would meet here.
  const auto gaps = [](int64_t taps, int64_t dilation, int64_t stride, int64_t outputs) {
    return taps > 1 && dilation / std::gcd(dilation, stride) > outputs;
  };
  if (gaps(s.kH, s.dilationH, s.strideH, s.outH) || gaps(s.kW, s.dilationW, s.strideW, s.outW)) return false;
  return few && taps <= kMostTaps && pairs * taps <= kMostKept &&
         high * wide * std::min(taps, double(s.strideH) * double(s.strideW)) <= kMostPixels;
}

// Row 0 of sq_norms, and grad_weight [O, C / groups, kH, kW] if it is defined. Row 1, if any, is bias_pass's.
template <class acc_t>
void planes_pass(const Patches<acc_t>& layer, const acc_t* scale, const Tensor& grad_weight, const Tensor& sq_norms) {
  const double bytes = double(layer.rows * layer.patch()) * sizeof(acc_t);
  const Grid grid = make_grid(layer.N, layer.groups, flop_of(layer), bytes);
  Parts<acc_t, Patches<acc_t>> parts(layer, grid, grad_weight, {}, sq_norms);
  for_parts(grid.parts(), [&](int64_t part) {
    Sums<acc_t> sums = parts.of(part);
    sums.scale = scale;
    PlaneCorrelation<acc_t>(layer).run(grid.share(part, layer.N, layer.groups), sums);
  });
  parts.write(/*squares_in_double=*/true);
}

}  // namespace torchgradx::cpu
