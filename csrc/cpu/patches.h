// The layer of a convolution for a sweep: row t of `a` is the patch under output position t, columns ordered (kernel
// row, kernel column, channel), so that with channels last a kernel row's columns are contiguous in the image itself:
// no im2col. `open` makes a channels-last, zero-padded copy of the part of the image a chunk sees, by blocks of
// channels: cache-sized. Where the runs so found would leave vectors half empty (few channels), they are packed densely
// from that copy; where not even one position's part fits (vast dilations), straight from the input.
#pragma once

#include "../operators/checks.h"
#include "sweep.h"

#include <numeric>

namespace torchgradx::cpu {

constexpr int64_t kImage = 3 << 15;  // elements of a chunk's image
constexpr int64_t kLongest = 1024;   // positions in a chunk that is read in place

struct Axis {  // one direction of a convolution, in units of the coarsest grid that holds every pixel used
  int64_t size, taps, step, stride, dilation, padding;
  Axis(int64_t size, int64_t taps, int64_t stride, int64_t dilation, int64_t padding)
      : size(size),
        taps(taps),
        step(std::gcd(stride, taps > 1 ? dilation : 0)),
        stride(stride / step),
        dilation(taps > 1 ? dilation / step : 1),
        padding(padding) {}
  int64_t extent(int64_t positions) const {
    return (positions - 1) * stride + (taps - 1) * dilation + 1;
  }
  int64_t pixel(int64_t position, int64_t offset) const {
    return (position * stride + offset) * step - padding;
  }
  // [begin, end): which of so many pixels, `first` and on by `by`, lie in the image
  std::pair<int64_t, int64_t> inside(int64_t first, int64_t by, int64_t count) const {
    const int64_t begin = std::min(count, first < 0 ? ceil_div(-first, by) : 0);
    return {begin, std::max(begin, first < size ? std::min(count, ceil_div(size - first, by)) : 0)};
  }
};

template <class acc_t>
struct Patches {
  Patches(const Tensor& input,        // [N, C, H, W]
          const Tensor& grad_output,  // [N, O, outH, outW]
          const ConvShape& s, bool total)
      : N(s.N),
        height(s.outH),
        width(s.outW),
        rows(s.O),
        channels(s.C / s.groups),
        group_rows(s.O / s.groups),
        groups(s.groups),
        down(s.H, s.kH, s.strideH, s.dilationH, s.padH),
        along(s.W, s.kW, s.strideW, s.dilationW, s.padW),
        source(pixels_of(input)),
        grads(pixels_of(grad_output)),
        kernels_(&kernels<acc_t>()),
        source_kernels(&kernels_->of(input.scalar_type())),
        grad_kernels(&kernels_->of(grad_output.scalar_type())),
        lanes(kernels_->lanes) {
    plan(total);
  }

  int64_t taps() const {
    return down.taps * along.taps;
  }
  int64_t patch() const {
    return channels * taps();
  }
  int64_t blocks() const {
    return groups * channel_blocks;
  }
  Block block(int64_t b) const {
    const int64_t group = b / channel_blocks, first = b % channel_blocks * per_block;
    return {group * group_rows, (group + 1) * group_rows, group * channels + first,
            std::min(per_block, channels - first), first == 0};
  }
  ChunkSize chunk() const {
    return size;
  }

  // Segments: columns contiguous in the image copy. A kernel row's, or a single tap's where taps are apart.
  int64_t segments() const {
    return along.dilation == 1 ? down.taps : taps();
  }
  int64_t segment_columns(const Block& block) const {
    return block.columns * taps() / segments();
  }
  int64_t padded_columns(const Block& block) const {
    return dense ? round_up(block.columns * taps(), lanes) : segments() * round_up(segment_columns(block), lanes);
  }
  int64_t runs(const Block& block) const {
    return dense ? ceil_div(block.columns * taps(), 2 * lanes)
                 : segments() * ceil_div(segment_columns(block), 2 * lanes);
  }
  Run run(const Block& block, int64_t r) const {
    const int64_t length = dense ? block.columns * taps() : segment_columns(block), each = ceil_div(length, 2 * lanes);
    const int64_t offset = r % each * 2 * lanes;
    return {r / each * round_up(length, lanes) + offset, int(std::min(2 * lanes, length - offset))};
  }

  void open(const Block& block, const Chunk& chunk, Workspace<acc_t>& workspace) {
    if (gathered) return;
    const int64_t C = block.columns, wide = along.extent(chunk.width), high = down.extent(chunk.height);
    line = wide * C, image_size = high * line;
    image = workspace.image.get(chunk.samples * image_size + 4 * lanes);
    const int64_t first = along.pixel(chunk.x, 0);
    const auto [begin, end] = along.inside(first, along.step, wide);
    for (int64_t n = 0; n < chunk.samples; ++n)
      for (int64_t y = 0; y < high; ++y) {
        acc_t* const out = image + n * image_size + y * line;
        const int64_t pixel = down.pixel(chunk.y, y);
        const bool inside = pixel >= 0 && pixel < down.size && begin < end;
        std::fill(out, out + (inside ? begin * C : line), acc_t(0));
        if (!inside) continue;
        std::fill(out + end * C, out + line, acc_t(0));
        source_kernels->pack(out + begin * C, C,
                             source.at(chunk.sample + n, pixel, first + begin * along.step, block.first_column),
                             end - begin, C, source.x * along.step, source.c);
      }
  }

  View<acc_t> view(const Block& block, const Chunk& chunk, int64_t r, bool joined, int64_t panels,
                   Workspace<acc_t>& workspace) const {
    const int64_t C = block.columns, length = segment_columns(block), each = ceil_div(length, 2 * lanes);
    if (!dense && !joined && (chunk.samples == 1 || panels < kWorthPacking))
      return {image + segment_offset(r / each, C) + r % each * 2 * lanes, image_size, down.stride * line,
              along.stride * C};
    const int64_t ld = 2 * lanes, positions = chunk.positions(),
                  first = dense ? r * ld : r / each * length + r % each * ld;
    const int64_t columns = run(block, r).columns;
    acc_t* const out = workspace.columns.get(chunk.samples * positions * ld);
    if (gathered) {
      gather(block, chunk, first, columns, out);
    } else {
      for (int64_t c = 0; c < columns;) {
        const int64_t segment = (first + c) / length, offset = (first + c) % length,
                      count = std::min(columns - c, length - offset);
        for (int64_t n = 0; n < chunk.samples; ++n)
          for (int64_t y = 0; y < chunk.height; ++y)
            kernels_->native.pack(out + (n * positions + y * chunk.width) * ld + c, ld,
                                  image + n * image_size + y * down.stride * line + segment_offset(segment, C) + offset,
                                  chunk.width, count, along.stride * C, 1);
        c += count;
      }
    }
    return {out, positions * ld, chunk.width * ld, ld};
  }

  bool in_place() const {
    return false;
  }
  void unpack(const Block& block, const acc_t* total,
              acc_t* weight) const {  // [taps, channels of the block] -> [channels, taps]
    const int64_t C = block.columns, group_taps = taps() / segments();
    acc_t* const out = weight + block.first_column % channels * taps();
    if (dense || segment_columns(block) % lanes == 0) return kernels_->native.pack(out, taps(), total, C, taps(), 1, C);
    for (int64_t s = 0; s < segments(); ++s)
      kernels_->native.pack(out + s * group_taps, taps(), total + s * round_up(segment_columns(block), lanes), C,
                            group_taps, 1, C);
  }

  bool vanishes(int64_t n) const {
    if (channels == 0) return true;
    double sums[2] = {0, 0};
    for (int64_t c = 0; c < channels * groups; ++c)
      for (int64_t y = 0; y < down.size; ++y)
        sums[0] += source_kernels->sq_sum(source.at(n, y, 0, c), along.size, source.x);
    for (int64_t o = 0; o < rows; ++o)
      for (int64_t y = 0; y < height; ++y) sums[1] += grad_kernels->sq_sum(grads.at(n, y, 0, o), width, grads.x);
    return sums[0] * sums[1] == 0;  // not where 0 meets inf or nan
  }

  int64_t N, height, width, rows, channels, group_rows, groups;
  Axis down, along;
  Operand source, grads;
  const Kernels<acc_t>* kernels_;
  const RowKernels<acc_t>*source_kernels, *grad_kernels;
  int64_t lanes, per_block = 0, channel_blocks = 1;
  bool dense = false, gathered = false;
  ChunkSize size{1, 1, 1};

 private:
  int64_t segment_offset(int64_t segment, int64_t C) const {
    if (along.dilation == 1) return segment * down.dilation * line;
    return segment / along.taps * down.dilation * line + segment % along.taps * along.dilation * C;
  }

  // Pixels of one chunk's image, in double: absurd geometries overflow
  double pixels(int64_t high, int64_t wide) const {
    return double(down.extent(high)) * double(along.extent(wide));
  }

  void plan(bool total) {
    const int64_t block_rows = std::max<int64_t>(1, std::min(group_rows, kRowBlock)), all = height * width;
    per_block = std::max<int64_t>(channels, 1);
    const auto fits = [&](int64_t high, int64_t wide) {
      return pixels(high, wide) * double(per_block) <= double(kImage) &&
             double(high) * double(wide) * double(block_rows) <= double(kDepth * kRowBlock) && high * wide <= kLongest;
    };
    const auto narrow = [&] {  // true if that leaves fewer
      const int64_t before = std::exchange(per_block, round_up(ceil_div(per_block, 2), 2 * lanes));
      return per_block < before;
    };
    const auto shrink = [&] {
      size = {1, std::max<int64_t>(height, 1), std::max<int64_t>(width, 1)};
      while (!fits(size.height, size.width) && size.height > 1) size.height = ceil_div(size.height, 2);
      while (!fits(size.height, size.width) && size.width > 1) size.width = ceil_div(size.width, 2);
      return fits(size.height, size.width) && size.height * size.width >= std::min<int64_t>(all, 64);
    };
    while (!shrink() && per_block > lanes && narrow()) continue;
    const bool split = size.height < height || size.width < width;
    while ((total || split) && per_block > lanes &&
           double(block_rows) * double(per_block) * double(taps()) * sizeof(acc_t) > kBlockBytes && narrow())
      continue;
    channel_blocks = std::max<int64_t>(1, ceil_div(channels, per_block));
    gathered = pixels(size.height, size.width) * double(per_block) > 8.0 * kImage;
    const Block first{0, group_rows, 0, per_block, true};
    const double loose = double(segments()) * double(ceil_div(segment_columns(first), lanes));
    const double tight = double(ceil_div(per_block * taps(), lanes));
    dense = gathered || loose * block_rows > tight * block_rows + 4 * tight;
    if (!split && all > 0)
      size.samples =
          std::max<int64_t>(1, std::min(kDepth / all, int64_t(kImage / (pixels(height, width) * double(per_block)))));
  }

  void gather(const Block& block, const Chunk& chunk, int64_t first, int64_t columns, acc_t* out) const {
    const int64_t ld = 2 * lanes;
    for (int64_t n = 0; n < chunk.samples; ++n)
      for (int64_t y = 0; y < chunk.height; ++y)
        for (int64_t x = 0; x < chunk.width; ++x, out += ld)
          for (int64_t c = 0; c < columns; ++c) {
            const int64_t tap = (first + c) / block.columns, channel = block.first_column + (first + c) % block.columns;
            const int64_t pixel_y = down.pixel(chunk.y + y, tap / along.taps * down.dilation);
            const int64_t pixel_x = along.pixel(chunk.x + x, tap % along.taps * along.dilation);
            const bool inside = pixel_y >= 0 && pixel_y < down.size && pixel_x >= 0 && pixel_x < along.size;
            out[c] = 0;
            if (inside)
              source_kernels->pack(out + c, 1, source.at(chunk.sample + n, pixel_y, pixel_x, channel), 1, 1, 1, 1);
          }
  }

  acc_t* image = nullptr;
  int64_t line = 0, image_size = 0;
};

}  // namespace torchgradx::cpu
