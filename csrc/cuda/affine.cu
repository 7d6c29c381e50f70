// Parameters that act element by element (normalisations, scales, PReLU): the weight's gradient is sum_t b_nt f_nt, the
// bias's sum_t b_nt. Bound by memory: column sums read both operands once, and write grad_input on the way where it
// needs nothing but its own element (frozen statistics, PReLU); a GroupNorm's needs its group's sums, and so both
// operands again (from L2, where they fit it), as does a LayerNorm whose rows affine_rows.cu cannot hold.
// Squares are taken in double. Sums run in an order that depends on sizes and strides alone.
// Features that lie side by side and wait for their sums are affine_sweep.cu's.
// Workspace: 16 N ceil(C / 32) bytes at most; fused, 2 N C accumulators more. C = G K.
#include "affine_sweep.cuh"

#include <cstdlib>

namespace torchgradx::cuda {
namespace {

constexpr int kMostWarps = 16;  // of a block that sums columns

struct Columns {
  FastDivisor blocks;    // of a sample
  int sharing;           // warps that share columns: 32 of them, or one at a time
  bool along_positions;  // lanes go along positions, which lie closer together in memory
  bool moving;           // statistics are of each position
  double* partials;      // [2, N, blocks]
  void* sums;            // [2, N, C] acc, or null
};

// Sums over positions first, first + step, ... of column c of sample n.
template <class scalar_t, bool kNegative, bool kWrites>
__device__ __forceinline__ void add_column(const Affine& p, bool moving, int64_t n, int c, int64_t first, int64_t step,
                                           accumulator<scalar_t>& sum, accumulator<scalar_t>& product) {
  using acc_t = accumulator<scalar_t>;
  int g = c;
  const int k = p.features.take_remainder(g);
  const scalar_t* const x = place<scalar_t>(p.input, n, 0, g, k);
  const scalar_t* const b = place<scalar_t>(p.grad_output, n, 0, g, k);
  scalar_t* const out = kWrites ? place<scalar_t>(p.to, n, 0, g, k) : nullptr;
  const acc_t weight = kWrites ? static_cast<const acc_t*>(p.to.weight)[c] : acc_t(0);
  acc_t mean = read<acc_t>(p.mean, n, 0, g, 0), rstd = read<acc_t>(p.rstd, n, 0, g, 1);
#pragma unroll 4
  for (int64_t t = first; t < p.T; t += step) {
    if (!kNegative && moving) mean = read<acc_t>(p.mean, n, t, g, 0), rstd = read<acc_t>(p.rstd, n, t, g, 1);
    const acc_t value = widen(x[t * p.input.t]), grad = widen(b[t * p.grad_output.t]);
    const bool positive = value > acc_t(0);
    const acc_t feature = !kNegative ? (value - mean) * rstd : positive ? acc_t(0) : value;
    sum += grad;
    product += grad * feature;
    if (kWrites) out[t * p.to.t] = narrow<scalar_t>(kNegative && positive ? grad : rstd * (weight * grad));
  }
}

template <class scalar_t, bool kNegative, bool kWrites>
__global__ void __launch_bounds__(kMostWarps* warp_threads, 1)
    affine_columns_kernel(const Affine p, const Columns cut) {
  using acc_t = accumulator<scalar_t>;
  STATIC_SHARED(acc_t, tile, [2][kMostWarps][warp_threads]);
  const int lane = threadIdx.x % warp_threads, warp = threadIdx.x / warp_threads;
  const int sharing = cut.sharing, teams = int(blockDim.x) / warp_threads / sharing;
  const int team = warp / sharing, member = warp % sharing;
  int block = int(blockIdx.x);
  const int part = cut.blocks.take_remainder(block);
  const int64_t n = block;
  const int first = cut.along_positions ? part * warp_threads : (part * teams + team) * warp_threads;
  // A lane has a column of its own, or a warp has one after the other.
  const int from = cut.along_positions ? member * warp_threads + lane : member;
  const int step = cut.along_positions ? sharing * warp_threads : sharing;
#pragma unroll 1
  for (int j = cut.along_positions ? team : lane; j < warp_threads; j += cut.along_positions ? teams : warp_threads) {
    acc_t sum = 0, product = 0;
    if (first + j < p.C)
      add_column<scalar_t, kNegative, kWrites>(p, cut.moving, n, first + j, from, step, sum, product);
    if (cut.along_positions) sum = warp_sum(sum), product = warp_sum(product);
    const int row = cut.along_positions ? member : warp;
    if (!cut.along_positions || lane == 0) tile[0][row][j] = product, tile[1][row][j] = sum;
  }
  __syncthreads();
  const bool mine = (cut.along_positions ? warp : member) == 0 && first + lane < p.C;
#pragma unroll
  for (int kind = 0; kind < 2; ++kind) {
    acc_t sum = 0;
    if (mine)
      for (int other = 0; other < sharing; ++other) sum += tile[kind][warp + other][lane];
    if (mine && cut.sums) static_cast<acc_t*>(cut.sums)[(kind * p.N + n) * p.C + first + lane] = sum;
    const double square = block_sum(double(sum) * double(sum));
    if (threadIdx.x == 0) cut.partials[kind * int64_t(gridDim.x) + blockIdx.x] = square;
  }
}

struct Elements {
  const void* sums;       // [2, N, C] acc, as affine_columns_kernel leaves them
  int positions;          // of a block
  FastDivisor blocks, G;  // of a group
  FastDivisor inner;      // lanes go along positions, or along features
  bool along_positions;
};

// grad_input = rstd (w b - shift - f slope) of some positions of one group, or of one row: shift is the mean of w b,
// slope of w b f, over all that the statistics are of.
template <class scalar_t, bool kByRow>
__global__ void __launch_bounds__(256) affine_input_kernel(const Affine p, const Elements cut) {
  using acc_t = accumulator<scalar_t>;
  STATIC_SHARED(acc_t, means, [2]);
  int block = int(blockIdx.x);
  const int64_t first = int64_t(cut.blocks.take_remainder(block)) * cut.positions;
  const int g = cut.G.take_remainder(block), K = int(p.features.divisor);
  const int64_t n = block;
  const acc_t* const weight = static_cast<const acc_t*>(p.to.weight) + int64_t(g) * K;
  const acc_t *const products = static_cast<const acc_t*>(cut.sums) + n * p.C + int64_t(g) * K, *const sums = products +
                                                                                                              p.N * p.C;
  const scalar_t* const x = place<scalar_t>(p.input, n, 0, g, 0);
  const scalar_t* const b = place<scalar_t>(p.grad_output, n, 0, g, 0);
  const auto feature = [&](int64_t t, int k, acc_t mean, acc_t rstd) {
    return (widen(x[t * p.input.t + k * p.input.k]) - mean) * rstd;
  };
  const int64_t t0 = kByRow ? first : 0;
  const acc_t mean = read<acc_t>(p.mean, n, t0, g, 0), rstd = read<acc_t>(p.rstd, n, t0, g, 1);
  acc_t shift = 0, slope = 0;
#pragma unroll 4
  for (int k = threadIdx.x; k < K; k += int(blockDim.x)) {
    const acc_t sum = kByRow ? widen(b[first * p.grad_output.t + k * p.grad_output.k]) : sums[k];
    shift += weight[k] * sum;
    slope += weight[k] * (kByRow ? sum * feature(first, k, mean, rstd) : products[k]);
  }
  shift = block_sum(shift), slope = block_sum(slope);
  if (threadIdx.x == 0) {
    const acc_t count = acc_t(kByRow ? 1 : p.T) * acc_t(K);
    means[0] = p.mean.data ? shift / count : acc_t(0), means[1] = slope / count;
  }
  __syncthreads();
  shift = means[0], slope = means[1];
  scalar_t* const out = place<scalar_t>(p.to, n, 0, g, 0);
#pragma unroll 4
  for (int element = threadIdx.x; element < cut.positions * K; element += int(blockDim.x)) {
    int outer = element;
    const int inner = cut.inner.take_remainder(outer);
    const int64_t t = first + (cut.along_positions ? inner : outer);
    const int k = cut.along_positions ? outer : inner;
    if (t < p.T) {
      const acc_t grad = weight[k] * widen(b[t * p.grad_output.t + k * p.grad_output.k]);
      out[t * p.to.t + k * p.to.k] = narrow<scalar_t>(rstd * (grad - shift - feature(t, k, mean, rstd) * slope));
    }
  }
}

// Host

bool positions_closer(const AffineProblem& p) {
  const int64_t t = std::abs(p.input.t), column = std::abs(p.K > 1 ? p.input.k : p.input.g);
  return p.T > 1 && (p.G * p.K == 1 || (column != 1 && t < column));
}

// How columns are dealt out: `blocks` of `threads` a sample
struct Cut {
  bool along_positions;
  int threads, sharing;
  int64_t blocks;

  explicit Cut(const AffineProblem& p) : along_positions(positions_closer(p)) {
    const int64_t lines = along_positions ? ceil_div<int64_t>(p.T, warp_threads) : p.T;  // a warp's, one to itself
    threads = lines < 256 ? 256 : kMostWarps * warp_threads;
    sharing = 1;
    while (sharing < threads / warp_threads && 4 * sharing < lines) sharing *= 2;
    const int columns = along_positions ? warp_threads : threads / sharing;
    blocks = ceil_div<int64_t>(p.G * p.K, columns);
  }
};

// Sums, their squares, and grad_input where it waits for none of them.
cudaError_t launch_columns(const AffineProblem& p, const InputGradient& to, bool bias, void* sums, void* sq_norms,
                           Workspace& workspace, cudaStream_t stream) {
  const Cut cut(p);
  double* const partials = workspace.take<double>(2 * p.N * cut.blocks * sizeof(double));
  if (!fits(p) || p.N > kMostIndex / 2 / std::max<int64_t>(cut.blocks, 1)) return cudaErrorInvalidConfiguration;
  if (workspace.counts()) return cudaSuccess;
  const bool moving = p.mean.t != 0 || p.rstd.t != 0, writes = to.data && to.frozen;
  const Columns columns{FastDivisor(cut.blocks), cut.sharing, cut.along_positions, moving, partials, sums};
  cudaError_t error = cudaSuccess;
  if (p.N > 0 && cut.blocks > 0)
    error = dispatch(p.dtype, [&](auto zero) {
      using scalar_t = decltype(zero);
      const auto run = [&](auto kernel) {
        return launch(kernel, dim3(unsigned(p.N * cut.blocks)), dim3(cut.threads), 0, stream, Affine(p, to), columns);
      };
      if (p.negative)
        return writes ? run(affine_columns_kernel<scalar_t, true, true>)
                      : run(affine_columns_kernel<scalar_t, true, false>);
      return writes ? run(affine_columns_kernel<scalar_t, false, true>)
                    : run(affine_columns_kernel<scalar_t, false, false>);
    });
  if (error != cudaSuccess) return error;
  return launch_sum_partials(p.dtype, partials, p.N * (1 + int64_t(bias)), cut.blocks, nullptr, sq_norms, stream);
}

cudaError_t launch_input(const AffineProblem& p, const InputGradient& to, const void* sums, cudaStream_t stream) {
  constexpr int64_t kElements = 1 << 13;  // of a block
  if (p.N == 0 || p.T == 0 || p.G == 0 || p.K == 0) return cudaSuccess;
  const int64_t positions = to.by_row ? 1 : std::clamp<int64_t>(kElements / p.K, 1, p.T);
  const int64_t blocks = ceil_div(p.T, positions);
  if (p.N > kMostIndex / p.G / blocks) return cudaErrorInvalidConfiguration;
  const bool along_positions = positions > 1 && positions_closer(p);
  const Elements cut{sums,
                     int(positions),
                     FastDivisor(blocks),
                     FastDivisor(p.G),
                     FastDivisor(along_positions ? positions : p.K),
                     along_positions};
  return dispatch(p.dtype, [&](auto zero) {
    using scalar_t = decltype(zero);
    const auto run = [&](auto kernel) {
      return launch(kernel, dim3(unsigned(p.N * p.G * blocks)), dim3(256), 0, stream, Affine(p, to), cut);
    };
    return to.by_row ? run(affine_input_kernel<scalar_t, true>) : run(affine_input_kernel<scalar_t, false>);
  });
}

}  // namespace

bool affine_reads_weight(const AffineProblem& p, const InputGradient& to) {
  return affine_rows_suit(p, to) || sweep_input_suits(p, to);
}

cudaError_t launch_affine(const AffineProblem& p, const InputGradient& to, const AffineResults& results,
                          Workspace& workspace, cudaStream_t stream) {
  if (affine_rows_suit(p, to)) return launch_affine_rows(p, to, results, workspace, stream);
  const Gradients& gradients = results.gradients;
  void* sums = results.by_sample;
  if (!sums && to.data) sums = workspace.take<void>(2 * p.N * p.G * p.K * accumulator_bytes(p.dtype));
  void* const means =
      sweep_input_suits(p, to) ? workspace.take<void>(2 * p.N * p.G * accumulator_bytes(p.dtype)) : nullptr;
  cudaError_t error = sweep_suits(p) && !(to.data && to.frozen)
                          ? launch_sweep(p, to, results.bias, sums, means, results.sq_norms, workspace, stream)
                          : launch_columns(p, to, results.bias, sums, results.sq_norms, workspace, stream);
  if (workspace.counts()) return error;
  if (error == cudaSuccess && to.data && !to.frozen)
    error = means ? launch_sweep_input(p, to, means, stream) : launch_input(p, to, sums, stream);
  if (error == cudaSuccess && gradients.weight)
    error = launch_sum_rows(to.weight_dtype, sums, gradients.scale, p.N, p.G * p.K, gradients.weight, stream, 1,
                            gradients.bias);
  return error;
}

}  // namespace torchgradx::cuda
