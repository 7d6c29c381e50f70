// The kernel of direct and fused. A block owns a tile of the weight gradient and a run of samples. For each it sums
// G_n = sum_t b_nt a_nt^T over all t in registers, squares it, and, fused, adds scale_n G_n to a second set of
// registers. Squares leave as one double a warp, sample and tile; what tiles lie beyond an edge is zero. Blocks of the
// first tile of columns sum b's rows too, for the bias.
#pragma once

#include "kernels.h"
#include "pipeline.cuh"
#include "product.cuh"

namespace torchgradx::cuda {

constexpr int kWarps = kThreads / warp_threads;

// Below it squares may have been denormal, and so rounded to a few bits; not so above, where at most 2^12 of them are
// lost.
constexpr float kLeastSquares = 1e-30f;

template <class Product, class Loader>
struct DirectArguments {
  using acc_t = typename Product::acc_t;
  Loader activations, grads;  // [N, T, I], [N, T, O] of one group
  int N, groups, parts, tiles_o, tiles_i;
  int last_positions;                  // of sample N - 1
  const uint8_t* mask;                 // [N], or null: all samples are wanted
  double* squares;                     // [N, groups, tiles_o, tiles_i, kWarps], or null
  double* bias_squares;                // [N, groups, tiles_o, kWarps], or null
  const acc_t* scale;                  // [N], or null
  acc_t* weight_copies;                // [parts, O, I], or null: there is one part
  acc_t* bias_copies;                  // [parts, O], or null
  typename Product::scalar_t* weight;  // [O, I] if there is one part
  typename Product::scalar_t* bias;    // [O], or null
};

// Over the warp, the same in every lane. In float where float can hold it.
template <class acc_t, int kGroups>
__device__ __forceinline__ double warp_sum_of_squares(const acc_t (&values)[kGroups][4]) {
  acc_t chains[4] = {};
#pragma unroll
  for (int group = 0; group < kGroups; ++group)
#pragma unroll
    for (int r = 0; r < 4; ++r) chains[r] += values[group][r] * values[group][r];
  const acc_t sum = warp_sum((chains[0] + chains[1]) + (chains[2] + chains[3]));
  if (sizeof(acc_t) == sizeof(double) || (sum >= acc_t(kLeastSquares) && sum <= acc_t(3e38f))) return sum;
  double wide = 0;
#pragma unroll
  for (int group = 0; group < kGroups; ++group)
#pragma unroll
    for (int r = 0; r < 4; ++r) wide += double(values[group][r]) * double(values[group][r]);
  return warp_sum(wide);
}

// Of all samples: most often none is, and to know it at once saves each block what it would prepare.
__device__ __forceinline__ bool any_wanted(const uint8_t* mask, int N) {
  bool wanted = false;
  for (int n = threadIdx.x % warp_threads; n < N; n += warp_threads) wanted = wanted || mask[n];
  return __any_sync(full_warp, wanted);
}

template <class Product, class Loader, bool kFused>
class DirectBlock {
  using scalar_t = typename Product::scalar_t;
  using acc_t = typename Product::acc_t;
  using LayoutO = typename Product::LayoutM;
  using LayoutI = typename Product::LayoutN;
  using CopyO = TileCopy<Loader, LayoutO, true>;
  using CopyI = TileCopy<Loader, LayoutI, true>;
  static constexpr int kStageElements = LayoutO::kElements + LayoutI::kElements;
  static constexpr int kTableBytes = CopyO::kTableBytes + CopyI::kTableBytes;

 public:
  static constexpr int kStages = stages(kStageElements * sizeof(scalar_t), kTableBytes);
  static constexpr int kSharedBytes = kStages * kStageElements * sizeof(scalar_t) + kTableBytes;

  struct Step {
    int n, k0;
  };

  __device__ __forceinline__ DirectBlock(const DirectArguments<Product, Loader>& arguments, unsigned char* shared)
      : a_(arguments),
        tile_i_(blockIdx.x % a_.tiles_i),
        tile_o_(blockIdx.x / a_.tiles_i % a_.tiles_o),
        group_(blockIdx.x / a_.tiles_i / a_.tiles_o % a_.groups),
        part_(blockIdx.x / a_.tiles_i / a_.tiles_o / a_.groups),
        end_(int(int64_t(a_.N) * (part_ + 1) / a_.parts)),
        sums_rows_(tile_i_ == 0 && (a_.bias_squares || a_.bias || a_.bias_copies)),
        ring_(reinterpret_cast<scalar_t*>(shared + kTableBytes)),
        copy_o_(a_.grads, tile_o_ * Product::kM, shared),
        copy_i_(a_.activations, tile_i_ * Product::kN, shared + CopyO::kTableBytes) {
    copy_o_.fill_table(), copy_i_.fill_table();
    product_.clear();
    if constexpr (kFused) {
#pragma unroll
      for (auto& group : total_)
        for (acc_t& value : group) value = 0;
      for (acc_t& value : row_total_) value = 0;
    }
  }

  __device__ __forceinline__ Step start() const {
    return {wanted(int(int64_t(a_.N) * part_ / a_.parts)), 0};
  }
  __device__ __forceinline__ bool more(const Step& step) const {
    return step.n < end_;
  }
  __device__ __forceinline__ void next(Step& step) const {
    step.k0 += Product::kK;
    if (step.k0 >= extent(step.n)) step = {wanted(step.n + 1), 0};
  }

  __device__ __forceinline__ void copy(const Step& step, int slot) const {
    scalar_t* const tiles = ring_ + slot * kStageElements;
    copy_o_(a_.grads.sample(step.n, group_), step.k0, extent(step.n), tiles);
    copy_i_(a_.activations.sample(step.n, group_), step.k0, extent(step.n), tiles + LayoutO::kElements);
  }

  __device__ __forceinline__ void multiply(const Step& step, int slot) {
    const scalar_t* const tiles = ring_ + slot * kStageElements;
    const int left = extent(step.n) - step.k0;
    product_.multiply(tiles, tiles + LayoutO::kElements, left, sums_rows_);
    if (left <= Product::kK) finish(step.n);
  }

  __device__ __forceinline__ void write_totals() const {
    const int64_t O = int64_t(a_.groups) * a_.grads.features, I = a_.activations.features;
    const int64_t first_o = int64_t(group_) * a_.grads.features + tile_o_ * Product::kM;
#pragma unroll
    for (int group = 0; group < Product::kGroups; ++group)
#pragma unroll
      for (int r = 0; r < 4; ++r) {
        const int row = Product::row(group, r), column = Product::column(group, r);
        if (row >= rows_left() || column >= columns_left()) continue;
        const int64_t at = (first_o + row) * I + a_.activations.weight_column(tile_i_ * Product::kN + column);
        store(a_.weight_copies, a_.weight, O * I, at, total_[group][r]);
      }
    if (!sums_rows_ || !Product::owns_row_sums() || !(a_.bias || a_.bias_copies)) return;
    for (int i = 0; i < Product::kRowSums; ++i)
      if (Product::row_of_sum(i) < rows_left())
        store(a_.bias_copies, a_.bias, O, first_o + Product::row_of_sum(i), row_total_[i]);
  }

 private:
  __device__ __forceinline__ int extent(int n) const {
    return n == a_.N - 1 ? a_.last_positions : a_.activations.positions;
  }
  __device__ __forceinline__ int wanted(int n) const {
    if (a_.mask)
      while (n < end_ && !a_.mask[n]) ++n;
    return n;
  }
  __device__ __forceinline__ int rows_left() const {
    return a_.grads.features - tile_o_ * Product::kM;
  }
  __device__ __forceinline__ int columns_left() const {
    return a_.activations.features - tile_i_ * Product::kN;
  }

  // The end of a sample: what it was is squared, added to the total, and forgotten.
  __device__ __forceinline__ void finish(int n) {
    const acc_t scale = kFused && a_.scale ? a_.scale[n] : acc_t(1);
    const int warp = threadIdx.x / warp_threads;
    const int64_t tile_row = (int64_t(n) * a_.groups + group_) * a_.tiles_o + tile_o_;
    if (a_.squares) {
      // A warp beyond the edge holds zeros, and would take them for squares that underflowed.
      const bool inside = Product::warp_row() < rows_left() && Product::warp_column() < columns_left();
      const double sum = inside ? warp_sum_of_squares(product_.acc) : 0;
      if (threadIdx.x % warp_threads == 0) a_.squares[(tile_row * a_.tiles_i + tile_i_) * kWarps + warp] = sum;
    }
    if constexpr (kFused) {
      if (scale != acc_t(0)) {  // 0 times nan is nan
#pragma unroll
        for (int group = 0; group < Product::kGroups; ++group)
#pragma unroll
          for (int r = 0; r < 4; ++r) total_[group][r] += scale * product_.acc[group][r];
      }
    }
    if (sums_rows_) {
      double sum = 0;
#pragma unroll
      for (int i = 0; i < Product::kRowSums; ++i) {
        const acc_t row_sum = product_.row_sum(i);
        if constexpr (kFused) row_total_[i] += scale != acc_t(0) ? scale * row_sum : acc_t(0);
        if (Product::owns_row_sums()) sum += double(row_sum) * double(row_sum);
      }
      sum = warp_sum(sum);
      if (a_.bias_squares && threadIdx.x % warp_threads == 0) a_.bias_squares[tile_row * kWarps + warp] = sum;
    }
    product_.clear();
  }

  __device__ __forceinline__ void store(acc_t* copies, scalar_t* out, int64_t size, int64_t at, acc_t value) const {
    if (copies)
      copies[part_ * size + at] = value;
    else
      out[at] = narrow<scalar_t>(value);
  }

  const DirectArguments<Product, Loader>& a_;
  const int tile_i_, tile_o_, group_, part_, end_;
  const bool sums_rows_;
  scalar_t* const ring_;
  const CopyO copy_o_;
  const CopyI copy_i_;
  Product product_;
  acc_t total_[kFused ? Product::kGroups : 1][4];
  acc_t row_total_[Product::kRowSums];
};

template <class Product, class Loader, bool kFused>
__global__ void __launch_bounds__(kThreads, 1) direct_kernel(const DirectArguments<Product, Loader> arguments) {
  using Block = DirectBlock<Product, Loader, kFused>;
  DYNAMIC_SHARED(unsigned char, shared);
  if (arguments.mask && !any_wanted(arguments.mask, arguments.N)) return;
  Block block(arguments, shared);
  __syncthreads();  // the tables of Places
  run_pipeline<Block::kStages>(block);
  if constexpr (kFused) block.write_totals();
}

}  // namespace torchgradx::cuda
