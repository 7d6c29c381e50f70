// Row sums: rank1, |a_n|^2 |b_n|^2 where T = 1; the bias, |sum_t b_nt|^2 and sum_nt scale_n b_nt; and the sums over
// blocks and samples with which other kernels end.
// Bound by memory, every operand read once. One element a lane and load: a warp's load of halves is 64 bytes, at one a
// clock thrice an H200's bandwidth, so vectors would gain nothing (budgeted).
// Squares are taken in double: neither factor of rank1, nor a sum of tiny squares, leaves float's range.
// Sums run in an order that depends on sizes and strides alone. Workspace: launch_bias, 8 N ceil(O / 32) bytes, and N O
// accumulators where the gradient is wanted.
#include "layer.cuh"

namespace torchgradx::cuda {
namespace {

constexpr int kColumns = warp_threads;  // of a block of bias_kernel
constexpr int kWarps = 8;               // of a block of sum_rows_kernel

// For thread 0 of the block.
template <class scalar_t>
__device__ double sum_of_squares(const scalar_t* row, int64_t size, int64_t stride) {
  double sum = 0;
#pragma unroll 4
  for (int64_t k = threadIdx.x; k < size; k += blockDim.x) {
    const double value = widen(row[k * stride]);
    sum += value * value;
  }
  return block_sum(sum);
}

// A block a sample.
template <class scalar_t>
__global__ void __launch_bounds__(256) rank1_kernel(DenseOperand activations, DenseOperand grads, int64_t I, int64_t O,
                                                    accumulator<scalar_t>* weight, accumulator<scalar_t>* bias) {
  using acc_t = accumulator<scalar_t>;
  const int64_t n = blockIdx.x;
  const scalar_t* const a = static_cast<const scalar_t*>(activations.data) + n * activations.n;
  const scalar_t* const b = static_cast<const scalar_t*>(grads.data) + n * grads.n;
  const double of_a = sum_of_squares(a, I, activations.feature), of_b = sum_of_squares(b, O, grads.feature);
  if (threadIdx.x > 0) return;
  if (weight) weight[n] = acc_t(of_a * of_b);
  if (bias) bias[n] = acc_t(of_b);
}

// Sums over the positions of 32 features of one sample, or of kWide times as many that neighbouring lanes read kWide at
// a time, and of each 32 the sum of their squares. Lanes go along whichever of positions and features lie closer
// together in memory.
template <class scalar_t, int kWide>
__global__ void __launch_bounds__(1024) bias_kernel(DenseOperand grads, int64_t T, int64_t O,
                                                    FastDivisor blocks,  // of a sample
                                                    int64_t parts,       // of kColumns, in O
                                                    bool along_positions,
                                                    accumulator<scalar_t>* sums,  // [N, O], or null
                                                    double* partials) {           // [N, parts]
  using acc_t = accumulator<scalar_t>;
  STATIC_SHARED(acc_t, tile, [warp_threads][kColumns * kWide + 1]);
  const int lane = threadIdx.x % warp_threads, warp = threadIdx.x / warp_threads, warps = blockDim.x / warp_threads;
  int block = int(blockIdx.x);  // all blocks along x, since y ends at 65535
  const int of_sample = blocks.take_remainder(block);
  const int64_t first = int64_t(of_sample) * kColumns * kWide, n = block;
  const scalar_t* const base = static_cast<const scalar_t*>(grads.data) + n * grads.n;
  if (along_positions) {
    for (int column = warp; column < kColumns * kWide; column += warps) {
      const int64_t o = first + column;
      acc_t sum = 0;
      if (o < O) {
#pragma unroll 8
        for (int64_t t = lane; t < T; t += warp_threads) sum += widen(base[t * grads.t + o * grads.feature]);
      }
      sum = warp_sum(sum);
      if (lane == 0) tile[0][column] = sum;
    }
  } else {
    const int64_t o = first + lane * kWide;
    acc_t sum[kWide] = {};
    if (o < O) {
#pragma unroll 8
      for (int64_t t = warp; t < T; t += warps) {
        using Read = Vector<scalar_t, kWide>;
        const Read read = *reinterpret_cast<const Read*>(base + t * grads.t + o * grads.feature);
#pragma unroll
        for (int j = 0; j < kWide; ++j) sum[j] += widen(read.at[j]);
      }
    }
#pragma unroll
    for (int j = 0; j < kWide; ++j) tile[warp][lane * kWide + j] = sum[j];
  }
  __syncthreads();
  const int64_t part = int64_t(of_sample) * kWide + warp;
  if (warp >= kWide || part >= parts) return;
  const int column = warp * kColumns + lane;
  acc_t sum = 0;
  for (int row = 0; row < (along_positions ? 1 : warps); ++row) sum += tile[row][column];
  if (sums && first + column < O) sums[n * O + first + column] = sum;
  const double square = warp_sum(double(sum) * double(sum));
  if (lane == 0) partials[n * parts + part] = square;
}

// out[k] = sum over rows r of weights[r / each] rows[r, k]. A block of 8 warps: `sharing` of them share 32 columns. A
// second row of blocks has the rows that follow, for `other`.
template <class scalar_t>
__global__ void __launch_bounds__(256)
    sum_rows_kernel(const accumulator<scalar_t>* rows,     // [R, K]
                    const accumulator<scalar_t>* weights,  // [R / each], or null
                    FastDivisor each, int64_t R, int64_t K, int sharing, scalar_t* out, scalar_t* other) {
  using acc_t = accumulator<scalar_t>;
  STATIC_SHARED(acc_t, tile, [kWarps][warp_threads]);
  const int lane = threadIdx.x % warp_threads, warp = threadIdx.x / warp_threads;
  const int64_t k = (int64_t(blockIdx.x) * (kWarps / sharing) + warp / sharing) * warp_threads + lane;
  rows += blockIdx.y * R * K;
  acc_t sum = 0;
  if (k < K) {
#pragma unroll 4
    for (int64_t r = warp % sharing; r < R; r += sharing) {
      const acc_t weight = weights ? weights[each.divide(int(r))] : acc_t(1), value = rows[r * K + k];
      sum += weight != acc_t(0) ? weight * value : acc_t(0);  // 0 times nan is nan
    }
  }
  tile[warp][lane] = sum;
  __syncthreads();
  if (warp % sharing > 0 || k >= K) return;
  for (int more = 1; more < sharing; ++more) sum += tile[warp + more][lane];
  (blockIdx.y ? other : out)[k] = narrow<scalar_t>(sum);
}

template <class acc_t>
__global__ void __launch_bounds__(256) sum_partials_kernel(const double* partials, int64_t parts,  // [N, parts]
                                                           const uint8_t* mask,                    // [N], or null
                                                           acc_t* sq_norms) {                      // [N]
  const int64_t n = blockIdx.x;
  if (mask && !mask[n]) return;
  double sum = 0;
  for (int64_t part = threadIdx.x; part < parts; part += blockDim.x) sum += partials[n * parts + part];
  sum = block_sum(sum);
  if (threadIdx.x == 0) sq_norms[n] = acc_t(sum);
}

// About eight elements a thread, so that short rows leave room for other blocks.
int row_threads(int64_t size) {
  return size <= 256 ? 32 : size <= 2048 ? 128 : 256;
}

// Whether halves can be read four at a time.
bool neighbours_of_four(const LinearProblem& p) {
  const DenseOperand& grads = p.grad_output;
  return grads.feature == 1 && p.O % 4 == 0 && chunk_bytes(grads.data, {grads.t, grads.n}, 2) >= 8;
}

}  // namespace

cudaError_t launch_rank1(const LinearProblem& p, const SqNorms& sq_norms, cudaStream_t stream) {
  if (p.N == 0) return cudaSuccess;
  if (p.N > kMostIndex) return cudaErrorInvalidConfiguration;
  return dispatch(p.dtype, [&](auto zero) {
    using scalar_t = decltype(zero);
    using acc_t = accumulator<scalar_t>;
    return launch(rank1_kernel<scalar_t>, dim3(p.N), dim3(row_threads(p.I + p.O)), 0, stream, p.activations,
                  p.grad_output, p.I, p.O, static_cast<acc_t*>(sq_norms.weight), static_cast<acc_t*>(sq_norms.bias));
  });
}

cudaError_t launch_bias(const LinearProblem& p, const Gradients& gradients, void* sq_norms, Workspace& workspace,
                        cudaStream_t stream) {
  const int64_t parts = ceil_div<int64_t>(p.O, kColumns);
  const DenseOperand& grads = p.grad_output;
  double* const partials = workspace.take<double>(p.N * parts * sizeof(double));
  void* const sums = gradients.bias ? workspace.take<void>(p.N * p.O * accumulator_bytes(p.dtype)) : nullptr;
  const bool along_positions = p.T > 1 && grads.feature != 1 && (grads.t < grads.feature || p.O == 1);
  const dim3 threads(p.T < 256 ? 256 : 1024);
  if (p.N > kMostIndex / std::max<int64_t>(parts, 1)) return cudaErrorInvalidConfiguration;
  if (workspace.counts()) return cudaSuccess;
  cudaError_t error = cudaSuccess;
  if (p.N > 0 && p.O > 0)
    error = dispatch(p.dtype, [&](auto zero) {
      using scalar_t = decltype(zero);
      const auto run = [&](auto kernel, int wide) {
        const int64_t blocks = ceil_div(parts, int64_t(wide));
        return launch(kernel, dim3(unsigned(p.N * blocks)), threads, 0, stream, grads, p.T, p.O, FastDivisor(blocks),
                      parts, along_positions, static_cast<accumulator<scalar_t>*>(sums), partials);
      };
      if constexpr (sizeof(scalar_t) == 2)
        if (neighbours_of_four(p)) return run(bias_kernel<scalar_t, 4>, 4);
      return run(bias_kernel<scalar_t, 1>, 1);
    });
  if (error == cudaSuccess && sq_norms)
    error = launch_sum_partials(p.dtype, partials, p.N, parts, nullptr, sq_norms, stream);
  if (error == cudaSuccess && gradients.bias)
    error = launch_sum_rows(p.dtype, sums, gradients.scale, p.N, p.O, gradients.bias, stream);
  return error;
}

cudaError_t launch_sum_partials(DType dtype, const double* partials, int64_t N, int64_t parts, const uint8_t* mask,
                                void* sq_norms, cudaStream_t stream) {
  if (N == 0) return cudaSuccess;
  if (N > kMostIndex) return cudaErrorInvalidConfiguration;
  const auto sum = [&](auto kernel, auto* out) {
    return launch(kernel, dim3(N), dim3(row_threads(parts)), 0, stream, partials, parts, mask, out);
  };
  return dtype == DType::kDouble ? sum(sum_partials_kernel<double>, static_cast<double*>(sq_norms))
                                 : sum(sum_partials_kernel<float>, static_cast<float*>(sq_norms));
}

cudaError_t launch_sum_rows(DType dtype, const void* rows, const void* weights, int64_t R, int64_t K, void* out,
                            cudaStream_t stream, int64_t each, void* other) {
  if (K == 0) return cudaSuccess;
  if (R > kMostIndex) return cudaErrorInvalidConfiguration;
  const int sharing = R > warp_threads ? kWarps : 1;
  const int64_t columns = kWarps / sharing * warp_threads;
  return dispatch(dtype, [&](auto zero) {
    using scalar_t = decltype(zero);
    using acc_t = accumulator<scalar_t>;
    return launch(sum_rows_kernel<scalar_t>, dim3(ceil_div(K, columns), other ? 2 : 1), dim3(kWarps * warp_threads), 0,
                  stream, static_cast<const acc_t*>(rows), static_cast<const acc_t*>(weights), FastDivisor(each), R, K,
                  sharing, static_cast<scalar_t*>(out), static_cast<scalar_t*>(other));
  });
}

}  // namespace torchgradx::cuda
