// The layer of a Linear for a sweep: row t of `a` is as it lies in memory, or packed run by run where it does not suit.
// Where it is late, row t - 1 goes with position t, and zeros with the first.
#pragma once

#include "../operators/checks.h"
#include "sweep.h"

namespace torchgradx::cpu {

template <class acc_t>
struct Rows {
  Rows(const Tensor& activations,  // [N, T, I]
       const Tensor& grad_output,  // [N, T, O]
       bool total, bool late = false)
      : N(activations.size(0)),
        height(1),
        width(activations.size(1)),
        rows(grad_output.size(2)),
        inputs(activations.size(2)),
        source(rows_of(activations)),
        grads(rows_of(grad_output)),
        kernels_(&kernels<acc_t>()),
        source_kernels(&kernels_->of(activations.scalar_type())),
        grad_kernels(&kernels_->of(grad_output.scalar_type())),
        late(late),
        straight(source.c == 1 && source.itemsize == sizeof(acc_t) && !late),
        per_block(std::max<int64_t>(inputs, 1)) {
    const int64_t run = 2 * kernels_->lanes, block_rows = std::min(rows, kRowBlock);
    if (total || width > kDepth)
      per_block =
          std::max<int64_t>(run, kBlockBytes / int64_t(sizeof(acc_t)) / std::max<int64_t>(block_rows, 1) / run * run);
  }

  // All N T positions as one sample, where the strides allow it: the plain weight gradient needs no samples. In any
  // order: or as t N + n.
  Rows joined(bool in_any_order = false) const {
    const auto joins = [&](const Operand& o) { return N == 1 || width == 1 || o.n == width * o.x; };
    const auto crossed = [&](const Operand& o) { return o.x == N * o.n; };
    const bool across = in_any_order && crossed(source) && crossed(grads);
    if (!across && !(joins(source) && joins(grads))) return *this;
    Rows one = *this;
    if (across || width == 1) one.source.x = source.n, one.grads.x = grads.n;
    one.width = N * width, one.N = 1;
    return one;
  }

  int64_t patch() const {
    return inputs;
  }
  int64_t blocks() const {
    return std::max<int64_t>(1, ceil_div(inputs, per_block));  // none would have no bias
  }
  Block block(int64_t b) const {
    return {0, rows, b * per_block, std::min(per_block, inputs - b * per_block), b == 0};
  }
  ChunkSize chunk() const {
    if (width <= kDepth) return {std::max<int64_t>(1, kDepth / width), 1, width};
    return {1, 1, ceil_div(width, ceil_div(width, kDepth))};
  }
  int64_t runs(const Block& block) const {
    return ceil_div(block.columns, 2 * kernels_->lanes);
  }
  Run run(const Block& block, int64_t r) const {
    const int64_t offset = r * 2 * kernels_->lanes;
    return {offset, int(std::min<int64_t>(2 * kernels_->lanes, block.columns - offset))};
  }
  void open(const Block&, const Chunk&, Workspace<acc_t>&) {}
  View<acc_t> view(const Block& block, const Chunk& chunk, int64_t r, bool joined, int64_t panels,
                   Workspace<acc_t>& workspace) const {
    const Run run = this->run(block, r);
    if (straight && !joined && panels < kWorthPacking && run.columns % kernels_->lanes == 0)
      return {static_cast<const acc_t*>(source.at(chunk.sample, 0, chunk.x, block.first_column + run.column)), source.n,
              0, source.x};
    const int64_t along = 2 * kernels_->lanes, positions = chunk.positions();
    acc_t* const out = workspace.columns.get(chunk.samples * positions * along);
    const int64_t zeros = late && chunk.x == 0, from = chunk.x - late + zeros;
    for (int64_t n = 0; n < chunk.samples; ++n) {
      acc_t* const to = out + n * positions * along;
      std::fill(to, to + zeros * along, acc_t(0));
      source_kernels->pack(to + zeros * along, along,
                           source.at(chunk.sample + n, 0, from, block.first_column + run.column), positions - zeros,
                           run.columns, source.x, source.c);
    }
    return {out, positions * along, 0, along};
  }

  bool in_place() const {
    return inputs % kernels_->lanes == 0;
  }
  int64_t padded_columns(const Block& block) const {
    return round_up(block.columns, kernels_->lanes);
  }
  void unpack(const Block& block, const acc_t* total, acc_t* weight) const {
    std::copy(total, total + block.columns, weight + block.first_column);
  }

  bool vanishes(int64_t n) const {
    if (inputs == 0) return true;
    double largest[2] = {0, 0};
    for (int64_t t = 0; t < width; ++t) {
      largest[0] += source_kernels->sq_sum(source.at(n, 0, t, 0), inputs, source.c);
      largest[1] += grad_kernels->sq_sum(grads.at(n, 0, t, 0), rows, grads.c);
    }
    return largest[0] * largest[1] == 0;  // not where 0 meets inf or nan
  }

  int64_t N, height, width, rows, inputs;
  Operand source, grads;
  const Kernels<acc_t>* kernels_;
  const RowKernels<acc_t>*source_kernels, *grad_kernels;
  bool late, straight;
  int64_t per_block;
};

}  // namespace torchgradx::cpu
