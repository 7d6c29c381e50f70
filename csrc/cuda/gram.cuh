// The kernel of gram. A block owns a pair of tiles of positions s >= t and a run of samples. For each it sums the tile
// of a a^T over I, keeps it, sums that of b b^T over O, and adds up the product of the two: both stay in registers.
// On the diagonal the two sides are one tile, copied once. Off it every pair stands for two.
// A warp leaves four numbers a sample: what verdict_kernel needs to tell a sum from the ruins of one.
#pragma once

#include "kernels.h"
#include "pipeline.cuh"
#include "product.cuh"

namespace torchgradx::cuda {

constexpr int kGramWarps = kThreads / warp_threads;

template <class Loader>
struct GramArguments {
  Loader operands[2];  // [N, T, I], [N, T, O] of one group
  int N, groups, parts, tiles;
  GramSums* sums;  // [N, groups, tiles (tiles + 1) / 2, kGramWarps]
};

struct TilePair {
  int s, t;  // s >= t
};
__device__ __forceinline__ TilePair tile_pair(int index) {  // s (s + 1) / 2 + t
  int s = int((sqrtf(8.f * float(index) + 1.f) - 1.f) / 2.f);
  while (int64_t(s) * (s + 1) / 2 > index) --s;
  while (int64_t(s + 1) * (s + 2) / 2 <= index) ++s;
  return {s, int(index - int64_t(s) * (s + 1) / 2)};
}

template <class Product, class Loader>
class GramBlock {
  using scalar_t = typename Product::scalar_t;
  using acc_t = typename Product::acc_t;
  using Layout = typename Product::LayoutM;
  using Copy = TileCopy<Loader, Layout, false>;
  static_assert(std::is_same_v<Layout, typename Product::LayoutN>, "the sides of a diagonal tile are one");
  static constexpr int kStageElements = 2 * Layout::kElements, kTableBytes = 4 * Copy::kTableBytes;
  static constexpr int kSquaresBytes = 2 * Product::kM * sizeof(acc_t);

 public:
  static constexpr int kPerMultiprocessor = Product::kM == 64 && sizeof(acc_t) == 4 ? 2 : 1;
  static constexpr int kStages = stages(kStageElements * sizeof(scalar_t), kTableBytes + kSquaresBytes);
  static constexpr int kSharedBytes = kStages * kStageElements * sizeof(scalar_t) + kTableBytes + kSquaresBytes;

  struct Step {
    int n, operand, k0;  // the activations' features first, then the gradients'
  };

  __device__ __forceinline__ GramBlock(const GramArguments<Loader>& arguments, unsigned char* shared)
      : a_(arguments),
        pairs_(int(int64_t(a_.tiles) * (a_.tiles + 1) / 2)),
        pair_(blockIdx.x % pairs_),
        group_(blockIdx.x / pairs_ % a_.groups),
        part_(blockIdx.x / pairs_ / a_.groups),
        end_(int(int64_t(a_.N) * (part_ + 1) / a_.parts)),
        tiles_(tile_pair(pair_)),
        tables_(shared),
        squares_(reinterpret_cast<acc_t*>(shared + kTableBytes)),
        ring_(reinterpret_cast<scalar_t*>(shared + kTableBytes + kSquaresBytes)) {
    for (int operand = 0; operand < 2; ++operand)
      for (int side = 0; side < 2; ++side) copy_of(operand, side).fill_table();
    product_.clear();
  }

  __device__ __forceinline__ Step start() const {
    return {int(int64_t(a_.N) * part_ / a_.parts), 0, 0};
  }
  __device__ __forceinline__ bool more(const Step& step) const {
    return step.n < end_;
  }
  __device__ __forceinline__ void next(Step& step) const {
    step.k0 += Product::kK;
    if (step.k0 >= extent(step)) step = {step.n + step.operand, 1 - step.operand, 0};
  }

  __device__ __forceinline__ void copy(const Step& step, int slot) const {
    scalar_t* const tile_s = ring_ + slot * kStageElements;
    scalar_t* const tile_t = tile_s + Layout::kElements;
    const scalar_t* const sample = a_.operands[step.operand].sample(step.n, group_);
    copy_of(step.operand, 0)(sample, step.k0, extent(step), tile_s);
    if (!on_diagonal()) copy_of(step.operand, 1)(sample, step.k0, extent(step), tile_t);
  }

  __device__ __forceinline__ void multiply(const Step& step, int slot) {
    const scalar_t* const tile_s = ring_ + slot * kStageElements;
    const int left = extent(step) - step.k0;
    product_.multiply(tile_s, on_diagonal() ? tile_s : tile_s + Layout::kElements, left, false);
    if (left > Product::kK) return;
    if (step.operand) {
      const GramSums sums = join();
      if (threadIdx.x % warp_threads == 0)
        a_.sums[((int64_t(step.n) * a_.groups + group_) * pairs_ + pair_) * kGramWarps + threadIdx.x / warp_threads] =
            sums;
    }
    // A choice each, not one branch around all: the compiler would give both ways registers of their own, and spill.
#pragma unroll
    for (int group = 0; group < Product::kGroups; ++group)
#pragma unroll
      for (int r = 0; r < 4; ++r)
        of_activations_[group][r] = step.operand ? of_activations_[group][r] : product_.acc[group][r];
    product_.clear();
  }

 private:
  __device__ __forceinline__ int extent(const Step& step) const {
    return a_.operands[step.operand].features;
  }
  __device__ __forceinline__ Copy copy_of(int operand, int side) const {
    return {a_.operands[operand], (side ? tiles_.t : tiles_.s) * Product::kM,
            tables_ + (2 * operand + side) * Copy::kTableBytes};
  }
  __device__ __forceinline__ bool on_diagonal() const {
    return tiles_.s == tiles_.t;
  }

  __device__ __forceinline__ GramSums join() const {
    acc_t sum[4] = {}, magnitude[4] = {};
#pragma unroll
    for (int group = 0; group < Product::kGroups; ++group)
#pragma unroll
      for (int r = 0; r < 4; ++r) {
        const acc_t term = of_activations_[group][r] * product_.acc[group][r];
        sum[r] += term, magnitude[r] += fabs(term);
      }
    const double weight = on_diagonal() ? 1 : 2;
    GramSums sums{weight * warp_sum(double((sum[0] + sum[1]) + (sum[2] + sum[3]))),
                  weight * warp_sum(double((magnitude[0] + magnitude[1]) + (magnitude[2] + magnitude[3]))), 0, 0};
    if (on_diagonal()) add_squares_of_rows(sums);
    return sums;
  }

  // The diagonal's entries are few and anywhere: through shared memory, so that a thread has one of them. Doubles of
  // all accumulators, of which most are not wanted, would not fit into registers.
  __device__ __forceinline__ void add_squares_of_rows(GramSums& sums) const {
#pragma unroll
    for (int group = 0; group < Product::kGroups; ++group)
#pragma unroll
      for (int r = 0; r < 4; ++r)
        if (Product::row(group, r) == Product::column(group, r)) {
          squares_[Product::row(group, r)] = of_activations_[group][r];
          squares_[Product::kM + Product::row(group, r)] = product_.acc[group][r];
        }
    __syncthreads();
    const bool mine = threadIdx.x < Product::kM;
    const double of_a = mine ? squares_[threadIdx.x] : 0, of_b = mine ? squares_[Product::kM + threadIdx.x] : 0;
    sums.trace = warp_sum(of_a * of_b);
    sums.faint = warp_sum(fmin(of_a, of_b) < kFaint<acc_t> ? kFaint<acc_t> * fmax(of_a, of_b) : 0);
  }

  const GramArguments<Loader>& a_;
  const int pairs_, pair_, group_, part_, end_;
  const TilePair tiles_;
  unsigned char* const tables_;
  acc_t* const squares_;  // [2, kM]: of a diagonal tile's rows, of both operands
  scalar_t* const ring_;
  Product product_;
  acc_t of_activations_[Product::kGroups][4];
};

template <class Product, class Loader>
__global__ void __launch_bounds__(kThreads, GramBlock<Product, Loader>::kPerMultiprocessor)
    gram_kernel(const GramArguments<Loader> arguments) {
  using Block = GramBlock<Product, Loader>;
  DYNAMIC_SHARED(unsigned char, shared);
  Block block(arguments, shared);
  __syncthreads();  // the tables of Places
  run_pipeline<Block::kStages>(block);
}

}  // namespace torchgradx::cuda
