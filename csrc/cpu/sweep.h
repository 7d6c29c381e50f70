// The mainloop of direct and fused, for linear and convolution alike: G_n = sum_t b_nt a_nt^T in register tiles over
// all t, each squared into |G_n|^2, added (times scale_n) to the running total if one is wanted, and dropped.
// Cost 2 N T I O. A layer says how rows of `a` are read: struct Rows in rows.h, struct Patches in patches.h.
// Threads own a static grid of sample ranges by ranges of O; a total is shared by the latter and copied for the former,
// which happens only where it is cache-sized. Besides: N doubles, and at most about 2 MiB a thread, kept between calls.
// A sample longer than a chunk leaves its unfinished tiles in `carry`; blocking of the columns keeps that cache-sized.
// The bias is summed from each chunk of grads just after it was packed, while it lies in cache.
#pragma once

#include "tile.h"

#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>

#include <algorithm>
#include <cmath>
#include <memory>
#include <utility>
#include <vector>

namespace torchgradx::cpu {

using at::Tensor;

constexpr int64_t kDepth = 256;           // positions in a chunk: a run of two vectors of them stays in L1
constexpr int64_t kRowBlock = 512;        // rows of O whose packed chunk stays in L2
constexpr int64_t kSummed = 1024;         // positions in one sum: each of more would be rounded as the whole is
constexpr int64_t kReread = 16;           // positions whose grads stay in L1 while all panels take theirs
constexpr int64_t kWorthPacking = 4;      // panels of rows that read a run of columns
constexpr int64_t kBlockBytes = 5 << 17;  // of the total (or of carry) that one block of columns touches

inline int64_t ceil_div(int64_t a, int64_t b) {
  return (a + b - 1) / b;
}
inline int64_t round_up(int64_t a, int64_t b) {
  return ceil_div(a, b) * b;
}

// An operand by strides: [N, height, width, channels], with rows of T positions as height 1.
struct Operand {
  const char* data;
  int64_t itemsize, n, y, x, c;
  const void* at(int64_t sample, int64_t down, int64_t along, int64_t channel) const {
    return data + (sample * n + down * y + along * x + channel * c) * itemsize;
  }
};

inline Operand operand_of(const Tensor& t, int64_t y, int64_t x, int64_t c) {  // by its strides
  return {static_cast<const char*>(t.const_data_ptr()), int64_t(t.element_size()), t.stride(0), y, x, c};
}
inline Operand rows_of(const Tensor& t) {  // [N, T, D]
  return operand_of(t, 0, t.stride(1), t.stride(2));
}
inline Operand pixels_of(const Tensor& t) {  // [N, C, H, W]
  return operand_of(t, t.stride(2), t.stride(3), t.stride(1));
}

// Cache-sized memory of one thread; grows, is not cleared between uses, and is kept: fresh pages cost more than small
// problems do. Zero at first: vectors past the last column compute with what lies there, which among the heap's
// leavings are denormals, at a hundred times the time.
template <class acc_t>
class Scratch {
 public:
  acc_t* get(int64_t count) {
    if (count > size_) {
      storage_.reset(new acc_t[count + 64]());
      size_ = count;
    }
    const auto address = reinterpret_cast<uintptr_t>(storage_.get());
    return reinterpret_cast<acc_t*>((address + 63) & ~uintptr_t(63));
  }

 private:
  std::unique_ptr<acc_t[]> storage_;
  int64_t size_ = 0;
};

template <class acc_t>
struct Workspace {
  Scratch<acc_t> panels, columns, carry, total, image, bias;
  Scratch<acc_t> x, g, out, rows;  // of affine layers, with columns
  static Workspace& mine() {
    static thread_local Workspace workspace;
    return workspace;
  }
};

struct Chunk {  // several whole samples, or a rectangle of one sample's positions
  int64_t sample, samples, y, height, x, width;
  bool begins, ends;  // its samples
  int64_t positions() const {
    return height * width;
  }
};

struct ChunkSize {
  int64_t samples, height, width;
};

struct Block {  // columns of the weight gradient that are worked on together, and the rows of their group
  int64_t row_begin, row_end, first_column, columns;
  bool first;  // of its rows'
};

struct Run {       // up to two vectors of columns
  int64_t column;  // among the block's, whose total is laid out in whole vectors
  int columns;
};

template <class acc_t>
struct View {  // a run's elements
  const acc_t* x;
  int64_t sample, down, along;  // strides
};

struct Share {  // of one thread
  int64_t sample_begin, sample_end, row_begin, row_end;
};

struct Panels {  // rows cut into register tiles, as even as can be
  int64_t count, rows, last;
  Panels(int64_t total, int64_t most) : count(ceil_div(total, most)), rows(ceil_div(total, count)) {
    count = ceil_div(total, rows), last = total - (count - 1) * rows;
  }
};

template <class acc_t>
struct Sums {                 // where a share's results go
  double* sq_sums = nullptr;  // [N], or null: only the weight, all positions of a chunk as one sum
  acc_t* weight = nullptr;    // [O, patch], or null: only the norms
  // One for every `scale_every` positions, or null. A sample of factor 0 is left out, except where all positions are
  // one sum: of those, see over_kept.
  const acc_t* scale = nullptr;
  int64_t scale_every = 1;
  bool wide = false;
  double* bias_sq_sums = nullptr;  // [N], or null
  double* bias = nullptr;          // [O], or null: only its norms
};

// A chunk of grads as lines of positions that are equally far apart: count and length.
inline std::pair<int64_t, int64_t> lines_of(const Operand& grads, const Chunk& chunk) {
  const bool flat = chunk.height == 1 || grads.y == chunk.width * grads.x;
  return flat ? std::pair(int64_t(1), chunk.positions()) : std::pair(chunk.height, chunk.width);
}

// sums [rows] += what sample n has of the chunk, of rows that begin at `row`
template <class acc_t, class Layer>
void add_grads(acc_t* sums, const Layer& layer, const Chunk& chunk, int64_t n, int64_t row, int64_t rows) {
  const Operand& grads = layer.grads;
  const auto [lines, length] = lines_of(grads, chunk);
  for (int64_t y = 0; y < lines; ++y)
    for (int64_t x = 0; x < length; x += kSummed)
      layer.grad_kernels->add_rows(sums, grads.at(n, chunk.y + y, chunk.x + x, row), std::min(kSummed, length - x),
                                   rows, grads.x, grads.c);
}

// What becomes of the sums over one sample's positions.
template <class acc_t>
void finish_bias(const Sums<acc_t>& to, const acc_t* sums, int64_t n, int64_t row, int64_t rows) {
  if (to.bias_sq_sums) to.bias_sq_sums[n] += kernels<acc_t>().native.sq_sum(sums, rows, 1);
  const acc_t scale = to.scale ? to.scale[n] : acc_t(1);
  if (to.bias && scale != 0)
    for (int64_t r = 0; r < rows; ++r) to.bias[row + r] += double(sums[r]) * scale;
}

template <class acc_t, class Layer>
class Sweep {
 public:
  // `beside`: of the same grads, which are packed once for both; each of one block, in place, of chunks of whole
  // samples.
  Sweep(const Layer& layer, const Share& share, const Sums<acc_t>& sums, Sweep* beside = nullptr)
      : layer_(layer), share_(share), sums_(sums), beside_(beside) {}

  void run() {
    for (int64_t b = 0; b < layer_.blocks(); ++b) {
      const Block block = layer_.block(b);
      const int64_t begin = std::max(block.row_begin, share_.row_begin), end = std::min(block.row_end, share_.row_end);
      if (begin >= end) continue;
      const int64_t parts = ceil_div(end - begin, kRowBlock), each = ceil_div(end - begin, parts);
      for (int64_t row = begin; row < end; row += each) rows(block, row, std::min(row + each, end));
    }
  }

 private:
  bool merged() const {
    return !sums_.sq_sums;
  }

  void rows(const Block& block, int64_t row_begin, int64_t row_end) {
    begin(block, row_begin, row_end);
    if (beside_) beside_->begin(beside_->layer_.block(0), row_begin, row_end);
    samples(block, row_begin, row_end);
    if (sums_.weight && !layer_.in_place())
      for (int64_t row = row_begin; row < row_end; ++row)
        layer_.unpack(block, total_ + (row - row_begin) * total_along_, sums_.weight + row * layer_.patch());
  }

  void begin(const Block& block, int64_t row_begin, int64_t row_end) {
    if (sums_.weight && layer_.in_place()) {
      total_along_ = layer_.patch();
      total_ = sums_.weight + row_begin * total_along_ + block.first_column;
    } else if (sums_.weight) {
      total_along_ = layer_.padded_columns(block);
      total_ = workspace_.total.get((row_end - row_begin) * total_along_);
    }
  }

  void samples(const Block& block, int64_t row_begin, int64_t row_end) {
    const ChunkSize size = layer_.chunk();
    for (int64_t n = share_.sample_begin; n < share_.sample_end; n += size.samples) {
      const int64_t samples = std::min(size.samples, share_.sample_end - n);
      for (int64_t y = 0; y < layer_.height; y += size.height)
        for (int64_t x = 0; x < layer_.width; x += size.width) {
          Chunk chunk{n,          samples,
                      y,          std::min(size.height, layer_.height - y),
                      x,          std::min(size.width, layer_.width - x),
                      y + x == 0, false};
          chunk.ends = chunk.y + chunk.height == layer_.height && chunk.x + chunk.width == layer_.width;
          one(block, chunk, row_begin, row_end);
        }
    }
  }

  void one(const Block& block, const Chunk& chunk, int64_t row_begin, int64_t row_end) {
    const bool series = kernels_.series_rows && chunk.samples > 1 && sums_.weight && sums_.sq_sums && !sums_.wide;
    const Panels panels(row_end - row_begin, series ? 2 * kernels_.series_rows : kernels_.max_rows);
    const acc_t* g = pack_grads(chunk, row_begin, panels);
    if (sums_.bias_sq_sums && block.first) add_bias(chunk, row_begin, row_end - row_begin);
    tiles(block, chunk, panels, g, series);
    if (beside_) beside_->tiles(beside_->layer_.block(0), chunk, panels, g, series);
  }

  void tiles(const Block& block, const Chunk& chunk, const Panels& panels, const acc_t* g, bool series) {
    const int64_t positions = chunk.samples * chunk.positions(), tile_size = 2 * kernels_.lanes * kernels_.max_rows;
    layer_.open(block, chunk, workspace_);
    const int64_t runs = layer_.runs(block);
    const bool joined = merged() && chunk.samples > 1;
    const bool whole = chunk.begins && chunk.ends;
    acc_t* carry = whole || merged() ? nullptr : workspace_.carry.get(runs * panels.count * tile_size);
    for (int64_t r = 0; r < runs; ++r) {
      const Run run = layer_.run(block, r);
      const View<acc_t> view = layer_.view(block, chunk, r, joined, panels.count, workspace_);
      Tile<acc_t> job{};
      job.x_down = view.down, job.x_along = view.along, job.height = chunk.height, job.width = chunk.width;
      job.columns = run.columns, job.wide = sums_.wide, job.total_along = total_along_;
      job.resume = carry && !chunk.begins, job.suspend = carry && !chunk.ends;
      if (joined) job.height = 1, job.width = positions;
      const auto& tiles = kernels_.tile[run.columns > kernels_.lanes];
      for (int64_t p = 0; p < panels.count; ++p) {
        job.g_along = p + 1 < panels.count ? panels.rows : panels.last;
        job.g = g + p * panels.rows * positions;
        job.x = view.x;
        job.total = total_ ? total_ + p * panels.rows * total_along_ + run.column : nullptr;
        if (carry) job.carry = carry + (r * panels.count + p) * tile_size;
        if (merged()) {
          job.scale = 1, job.fresh = chunk.sample == share_.sample_begin && chunk.begins;
          tiles[job.g_along](job);
          continue;
        }
        if (series) {
          in_series(job, chunk, view.sample);
          continue;
        }
        for (int64_t n = chunk.sample; n < chunk.sample + chunk.samples; ++n) {
          job.scale = sums_.scale ? sums_.scale[n] : acc_t(1);
          job.fresh = n == share_.sample_begin;
          job.sq_sum = sums_.sq_sums + n;
          tiles[job.g_along](job);
          job.x += view.sample, job.g += chunk.positions() * job.g_along;
        }
      }
    }
  }

  // A panel, by halves: narrower ones would take longer to pack.
  void in_series(Tile<acc_t> job, const Chunk& chunk, int64_t x_sample) {
    const auto& tiles = kernels_.series[job.columns > kernels_.lanes];
    for (int64_t n = chunk.sample; n < chunk.sample + chunk.samples; n += kMaxSeries) {
      const int64_t samples = std::min(kMaxSeries, chunk.sample + chunk.samples - n);
      job.fresh = n == share_.sample_begin, job.sq_sum = sums_.sq_sums + n;
      Tile<acc_t> half = job;
      for (int64_t row = 0; row < job.g_along; row += kernels_.series_rows) {
        tiles[std::min<int64_t>(kernels_.series_rows, job.g_along - row)](
            {half, samples, x_sample, sums_.scale ? sums_.scale + n : nullptr});
        half.g += kernels_.series_rows, half.total += kernels_.series_rows * job.total_along;
      }
      job.x += samples * x_sample, job.g += samples * chunk.positions() * job.g_along;
    }
  }

  void add_bias(const Chunk& chunk, int64_t row, int64_t rows) {
    acc_t* const sums = workspace_.bias.get(rows);
    for (int64_t n = chunk.sample; n < chunk.sample + chunk.samples; ++n) {
      if (chunk.begins) std::fill(sums, sums + rows, acc_t(0));
      add_grads(sums, layer_, chunk, n, row, rows);
      if (chunk.ends) finish_bias(sums_, sums, n, row, rows);
    }
  }

  // [panel][sample, position][row of the panel]
  const acc_t* pack_grads(const Chunk& chunk, int64_t row_begin, const Panels& panels) {
    const Operand& grads = layer_.grads;
    const int64_t positions = chunk.samples * chunk.positions();
    acc_t* const packed = workspace_.panels.get(positions * ((panels.count - 1) * panels.rows + panels.last));
    const auto [lines, length] = lines_of(grads, chunk);
    const int64_t few = grads.c == 1 ? kReread : length;
    int64_t position = 0;  // among the chunk's
    for (int64_t n = chunk.sample; n < chunk.sample + chunk.samples; ++n)
      for (int64_t y = 0; y < lines; ++y)
        for (int64_t x = 0; x < length; x += few) {
          const int64_t count = std::min(few, length - x);
          for (int64_t p = 0; p < panels.count; ++p) {
            const int64_t rows = p + 1 < panels.count ? panels.rows : panels.last, row = p * panels.rows;
            layer_.grad_kernels->pack(packed + row * positions + position * rows, rows,
                                      grads.at(n, chunk.y + y, chunk.x + x, row_begin + row), count, rows, grads.x,
                                      grads.c);
          }
          position += count;
        }
    if (merged() && sums_.scale) scale_grads(packed, chunk, panels);
    return packed;
  }

  void scale_grads(acc_t* packed, const Chunk& chunk, const Panels& panels) const {
    for (int64_t p = 0; p < panels.count; ++p)
      for (int64_t n = chunk.sample; n < chunk.sample + chunk.samples; ++n) {
        const int64_t first = (n * layer_.height + chunk.y) * layer_.width + chunk.x;
        for (int64_t t = first; t < first + chunk.positions(); ++t)
          for (int64_t row = p + 1 < panels.count ? panels.rows : panels.last; row > 0; --row)
            *packed++ *= sums_.scale[t / sums_.scale_every];
      }
  }

  Layer layer_;  // a copy: it remembers what it opened
  const Share share_;
  const Sums<acc_t> sums_;
  Sweep* const beside_;
  acc_t* total_ = nullptr;  // of the rows and columns at work
  int64_t total_along_ = 0;
  const Kernels<acc_t>& kernels_ = kernels<acc_t>();
  Workspace<acc_t>& workspace_ = Workspace<acc_t>::mine();
};

}  // namespace torchgradx::cpu
