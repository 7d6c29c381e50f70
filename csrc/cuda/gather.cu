// Tables of rows looked up by id: |E_n|^2 = sum over ids u of |sum of u's rows|^2, E_n the gradient [V, D] of sample n.
// Ids come sorted, with the positions they stood at: equal ids are a run, whose rows are one row of the table. Nothing
// of the table's size, nothing T x T. A lane has a column, a warp some of the entries, read once; what begins before a
// warp's entries or ends after them is joined in the order of the warps, so that one id over all positions (types of
// tokens) is shared out as well as ids that occur once. 1 FLOP an element: bound by memory.
// Squares are taken in double. Workspace: 8 N ceil(D / 32) bytes.
#include "dispatch.cuh"
#include "operand.cuh"

#include <limits>

namespace torchgradx::cuda {
namespace {

constexpr int kMostWarps = 16;
constexpr int kAhead = 8;  // rows under way

template <class acc_t>
__device__ __forceinline__ double squared(acc_t value) {
  return double(value) * double(value);
}

template <class scalar_t>
__global__ void __launch_bounds__(kMostWarps* warp_threads) gather_kernel(const GatherProblem p, FastDivisor blocks,
                                                                          double* partials) {  // [N, blocks]
  using acc_t = accumulator<scalar_t>;
  STATIC_SHARED(acc_t, heads, [kMostWarps][warp_threads]);  // of the run that a warp finds begun
  STATIC_SHARED(acc_t, tails, [kMostWarps][warp_threads]);  // of the run that it leaves unfinished
  STATIC_SHARED(int, begins, [kMostWarps]);                 // whether any run begins in it
  const int lane = threadIdx.x % warp_threads, warp = threadIdx.x / warp_threads;
  const int warps = int(blockDim.x) / warp_threads;
  int block = int(blockIdx.x);
  const int64_t column = int64_t(blocks.take_remainder(block)) * warp_threads + lane, n = block;
  const int64_t* const ids = p.ids + n * p.T;
  const int64_t* const positions = p.positions + n * p.T;
  const scalar_t* const rows = static_cast<const scalar_t*>(p.rows.data) + n * p.rows.n + column * p.rows.feature;
  const int64_t begin = p.T * warp / warps, end = p.T * (warp + 1) / warps;

  acc_t sum = 0;
  double square = 0;
  bool begun = false;
  int64_t last = begin > 0 ? ids[begin - 1] : -1;  // of the entry before
  for (int64_t k = begin; k < end; k += kAhead) {
    acc_t values[kAhead];
#pragma unroll
    for (int i = 0; i < kAhead; ++i) {
      const bool counts = k + i < end && column < p.D && ids[k + i] != p.padding;
      values[i] = counts ? acc_t(widen(rows[positions[k + i] * p.rows.t])) : acc_t(0);
    }
#pragma unroll
    for (int i = 0; i < kAhead; ++i) {
      if (k + i < end && ids[k + i] != last) {  // as all of the warp find
        last = ids[k + i];
        if (!begun) heads[warp][lane] = sum;
        if (begun) square += squared(sum);
        begun = true, sum = 0;
      }
      sum += values[i];
    }
  }
  if (!begun) heads[warp][lane] = sum;
  tails[warp][lane] = begun ? sum : acc_t(0);
  if (lane == 0) begins[warp] = begun;
  __syncthreads();
  if (warp == 0) {
    acc_t open = 0;
    for (int other = 0; other < warps; ++other) {
      open += heads[other][lane];
      if (begins[other]) square += squared(open), open = tails[other][lane];
    }
    square += squared(open);
  }
  square = block_sum(square);
  // An id below 0 is no row's: the framework's own look-up would have stopped, and no number is right.
  if (threadIdx.x == 0) partials[blockIdx.x] = ids[0] < 0 ? std::numeric_limits<double>::quiet_NaN() : square;
}

}  // namespace

cudaError_t launch_gather(const GatherProblem& p, void* sq_norms, Workspace& workspace, cudaStream_t stream) {
  const int64_t blocks = ceil_div<int64_t>(p.D, warp_threads);
  if (p.T > kMostIndex || p.N > kMostIndex / std::max<int64_t>(blocks, 1)) return cudaErrorInvalidConfiguration;
  double* const partials = workspace.take<double>(p.N * blocks * sizeof(double));
  if (workspace.counts()) return cudaSuccess;
  const int warps = p.T <= 64 ? 4 : p.T <= 512 ? 8 : kMostWarps;
  cudaError_t error = cudaSuccess;
  if (p.N > 0 && p.T > 0 && blocks > 0)
    error = dispatch(p.dtype, [&](auto zero) {
      return launch(gather_kernel<decltype(zero)>, dim3(unsigned(p.N * blocks)), dim3(warps * warp_threads), 0, stream,
                    p, FastDivisor(blocks), partials);
    });
  if (error == cudaSuccess)
    error = launch_sum_partials(p.dtype, partials, p.N, p.T > 0 ? blocks : 0, nullptr, sq_norms, stream);
  return error;
}

}  // namespace torchgradx::cuda
