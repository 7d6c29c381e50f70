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
        auto found = std::find(phases_.begin(), phases_.end(), phase);
        if (found == phases_.end()) found = phases_.insert(found, phase);
        offsets_.push_back((found - phases_.begin()) * plane_ + y / down.stride * line_ + x / along.stride);
      }
  }

  // Groups [first, last) of samples [begin, end); total [O, channels, taps] is added to if it is not null.
  void run(int64_t begin, int64_t end, int64_t first, int64_t last, const acc_t* scale, acc_t* total, double* sq_sums) {
    const int64_t pairs = layer_.group_rows * layer_.channels, taps = layer_.taps();
    Workspace<acc_t>& workspace = Workspace<acc_t>::mine();
    std::vector<acc_t> sums(pairs * taps);
    for (int64_t n = begin; n < end; ++n)
      for (int64_t group = first; group < last; ++group) {
        std::fill(sums.begin(), sums.end(), acc_t(0));
        for (int64_t y = 0; y < layer_.height; y += high_)
          for (int64_t x = 0; x < layer_.width; x += wide_) band(n, group, y, x, workspace, sums.data());
        const acc_t factor = scale ? scale[n] : acc_t(1);
        acc_t* const out = total && factor != 0 ? total + group * pairs * taps : nullptr;
        for (int64_t k = 0; k < pairs * taps; ++k) {
          sq_sums[n] += double(sums[k]) * sums[k];
          if (out) out[k] += factor * sums[k];
        }
      }
  }

 private:
  struct Phase {
    int64_t y, x;
    bool operator==(const Phase& other) const {
      return y == other.y && x == other.x;
    }
  };

  void band(int64_t n, int64_t group, int64_t y, int64_t x, Workspace<acc_t>& workspace, acc_t* sums) {
    const int64_t high = std::min(high_, layer_.height - y), wide = std::min(wide_, layer_.width - x),
                  taps = layer_.taps();
    const int64_t image = plane_ * int64_t(phases_.size()), count = round_up(high * line_, layer_.lanes);
    acc_t* const images = workspace.image.get(layer_.channels * image);
    acc_t* const grads = workspace.panels.get(plane_);
    for (int64_t c = 0; c < layer_.channels; ++c)
      for (size_t p = 0; p < phases_.size(); ++p)
        pack_image(images + c * image + int64_t(p) * plane_, n, group * layer_.channels + c, y, x, phases_[p]);
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
  void pack_image(acc_t* out, int64_t n, int64_t channel, int64_t y, int64_t x, const Phase& phase) const {
    std::fill(out, out + plane_, acc_t(0));
    const Span down = inside(layer_.down, layer_.down.pixel(y, phase.y), lines_);
    const Span along = inside(layer_.along, layer_.along.pixel(x, phase.x), line_);
    if (down.begin >= down.end || along.begin >= along.end) return;
    layer_.source_kernels->pack(out + down.begin * line_ + along.begin, line_,
                                layer_.source.at(n, down.first, along.first, channel), down.end - down.begin,
                                along.end - along.begin, layer_.source.y * down.step, layer_.source.x * along.step);
  }

  struct Span {  // places of a line whose pixels lie in the image, from pixel `first` by `step`
    int64_t begin, end, first, step;
  };
  static Span inside(const Axis& axis, int64_t pixel, int64_t places) {
    const int64_t step = axis.stride * axis.step, begin = std::min(places, pixel < 0 ? ceil_div(-pixel, step) : 0);
    const int64_t end = pixel < axis.size ? std::min(places, ceil_div(axis.size - pixel, step)) : 0;
    return {begin, end, pixel + begin * step, step};
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
  return few && taps <= kMostTaps && pairs * taps <= kMostKept &&
         high * wide * std::min(taps, double(s.strideH) * double(s.strideW)) <= kMostPixels;
}

// Row 0 of sq_norms, and grad_weight [O, C / groups, kH, kW] if it is defined.
template <class acc_t>
void planes_pass(const Patches<acc_t>& layer, const acc_t* scale, const Tensor& grad_weight, const Tensor& sq_norms) {
  const int64_t N = layer.N, size = layer.rows * layer.patch();
  const Grid grid = make_grid(N, layer.groups, flop_of(layer), double(size) * sizeof(acc_t));
  const bool total = grad_weight.defined();
  const Tensor copies = total ? at::zeros({grid.sample_parts - 1, size}, grad_weight.options()) : Tensor();
  acc_t* const weight = total ? grad_weight.zero_().template mutable_data_ptr<acc_t>() : nullptr;
  acc_t* const copy = total ? copies.mutable_data_ptr<acc_t>() : nullptr;
  std::vector<double> partial(grid.parts() * N, 0.0);
  for_parts(grid.parts(), [&](int64_t part) {
    const Share share = grid.share(part, N, layer.groups);
    const int64_t sample_part = part / grid.row_parts;
    PlaneCorrelation<acc_t>(layer).run(share.sample_begin, share.sample_end, share.row_begin, share.row_end, scale,
                                       total && sample_part ? copy + (sample_part - 1) * size : weight,
                                       partial.data() + part * N);
  });
  write_row<acc_t>(sq_norms, 0, sum_of_parts(partial, grid.parts(), N));
  if (total) add_copies(weight, copy, size, grid.sample_parts - 1);
}

}  // namespace torchgradx::cpu
