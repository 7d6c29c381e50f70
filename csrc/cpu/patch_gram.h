// The Gram matrix of a convolution's patches. Of a small image: the Gram matrix of its pixels, C at a time instead of C
// kH kW, then summed over the taps: (a_s . a_t) = sum_k (pixel under s at k . pixel under t at k). Of a larger one: of
// the patches, packed tap by tap from the image.
#pragma once

#include "gram.h"
#include "patches.h"

namespace torchgradx::cpu {

inline bool gram_of_pixels(int64_t T, int64_t pixels) {
  return T <= kSpan && pixels <= kSpan;
}

template <class acc_t>
struct PatchSource {
  Patches<acc_t> layer;

  GramSum sum(int64_t n, int64_t T, int64_t patch, int64_t O) const {
    return gram_sum<acc_t>(*this, n, T, patch, O);
  }

  void activations(const GramSquare<acc_t>& square, int64_t n, int64_t T, int64_t patch, int64_t s0, int64_t t0,
                   acc_t* packed, acc_t* out) const {
    const int64_t pixels = layer.down.size * layer.along.size;
    if (gram_of_pixels(T, pixels) && layer.taps() > 1) return from_pixels(square, n, T, pixels, packed, out);
    square.compute(patch, T, s0, t0, packed, out,
                   [&](acc_t* to, int64_t column, int64_t depth, int64_t t, int64_t count) {
                     pack_patches(to, n, column, depth, t, count);
                   });
  }

  void pack_grads(acc_t* to, int64_t n, int64_t c, int64_t depth, int64_t t, int64_t count) const {
    pack_pixels(layer.grads, *layer.grad_kernels, layer.width, to, n, c, depth, t, count);
  }

 private:
  int64_t ld() const {
    return 2 * layer.lanes;
  }

  // out[channel, position]
  void pack_pixels(const Operand& from, const RowKernels<acc_t>& kernels, int64_t width, acc_t* out, int64_t n,
                   int64_t c, int64_t depth, int64_t t, int64_t count) const {
    const bool flat = from.y == width * from.x;
    for (int64_t k = 0; k < count;) {
      const int64_t x = (t + k) % width, length = flat ? count : std::min(count - k, width - x);
      kernels.pack(out + k, ld(), from.at(n, (t + k) / width, x, c), depth, length, from.c, from.x);
      k += length;
    }
  }

  void pack_patches(acc_t* out, int64_t n, int64_t column, int64_t depth, int64_t t, int64_t count) const {
    for (int64_t d = 0; d < depth; ++d) {
      const int64_t channel = (column + d) / layer.taps(), tap = (column + d) % layer.taps();
      const int64_t offset_y = tap / layer.along.taps * layer.down.dilation,
                    offset_x = tap % layer.along.taps * layer.along.dilation;
      for (int64_t k = 0; k < count;) {
        const int64_t y = (t + k) / layer.width, x = (t + k) % layer.width,
                      length = std::min(count - k, layer.width - x);
        line(out + d * ld() + k, n, channel, layer.down.pixel(y, offset_y), x, offset_x, length);
        k += length;
      }
    }
  }

  // out[0 .. length): the pixels one tap sees along an output row
  void line(acc_t* out, int64_t n, int64_t channel, int64_t pixel_y, int64_t x, int64_t offset_x,
            int64_t length) const {
    const Axis& along = layer.along;
    const int64_t step = along.stride * along.step;
    auto [begin, end] = along.inside(along.pixel(x, offset_x), step, length);
    if (pixel_y < 0 || pixel_y >= layer.down.size) begin = end = length;
    std::fill(out, out + begin, acc_t(0));
    if (begin < end)
      layer.source_kernels->pack(out + begin, 0, layer.source.at(n, pixel_y, along.pixel(x + begin, offset_x), channel),
                                 1, end - begin, 0, layer.source.x * step);
    std::fill(out + end, out + length, acc_t(0));
  }

  void from_pixels(const GramSquare<acc_t>& square, int64_t n, int64_t T, int64_t pixels, acc_t* packed,
                   acc_t* out) const {
    const GramSquare<acc_t> of_pixels(pixels, *layer.kernels_);
    acc_t* const tiles = Workspace<acc_t>::mine().image.get(of_pixels.size() + kSpan * (kSpan + T));
    acc_t* const gram = tiles + of_pixels.size();  // [pixels, kSpan]
    acc_t* const summed = gram + kSpan * kSpan;    // [T, kSpan]
    of_pixels.compute(layer.channels, pixels, 0, 0, packed, tiles,
                      [&](acc_t* to, int64_t c, int64_t depth, int64_t t, int64_t count) {
                        pack_pixels(layer.source, *layer.source_kernels, layer.along.size, to, n, c, depth, t, count);
                      });
    of_pixels.each_row(pixels, 0, 0, [&](int64_t offset, int64_t s, int64_t t, int64_t columns) {
      for (int64_t k = 0; k < columns; ++k) gram[s * kSpan + t + k] = gram[(t + k) * kSpan + s] = tiles[offset + k];
    });
    std::fill(summed, summed + T * kSpan, acc_t(0));
    for (int64_t ky = 0; ky < layer.down.taps; ++ky)
      for (int64_t kx = 0; kx < layer.along.taps; ++kx)
        add_tap(ky * layer.down.dilation, kx * layer.along.dilation, gram, summed);
    for (int64_t s = 0; s < T; ++s)
      for (int64_t t = 0; t < s; ++t) summed[s * kSpan + t] = summed[t * kSpan + s];
    square.each_row(T, 0, 0, [&](int64_t offset, int64_t s, int64_t t, int64_t columns) {
      std::copy(summed + s * kSpan + t, summed + s * kSpan + t + columns, out + offset);
    });
  }

  void add_tap(int64_t offset_y, int64_t offset_x, const acc_t* gram, acc_t* summed) const {
    const Axis &down = layer.down, &along = layer.along;
    const int64_t step = along.stride * along.step;
    const auto [top, bottom] = down.inside(down.pixel(0, offset_y), down.stride * down.step, layer.height);
    const auto [left, right] = along.inside(along.pixel(0, offset_x), step, layer.width);
    for (int64_t sy = top; sy < bottom; ++sy)
      for (int64_t sx = left; sx < right; ++sx) {
        const acc_t* const row = gram + (down.pixel(sy, offset_y) * along.size + along.pixel(sx, offset_x)) * kSpan;
        acc_t* const out = summed + (sy * layer.width + sx) * kSpan;
        for (int64_t ty = sy; ty < bottom; ++ty) {
          const acc_t* const from = row + down.pixel(ty, offset_y) * along.size + along.pixel(left, offset_x);
          for (int64_t k = 0; k < right - left; ++k) out[ty * layer.width + left + k] += from[k * step];
        }
      }
  }
};

}  // namespace torchgradx::cpu
