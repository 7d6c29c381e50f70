// Mean and 1 / sqrt(variance + eps) of each position's or each group's features, [N, T, G, K]. A block has one of them,
// in two passes, the second about the first's mean: the difference of two large sums would leave nothing of a small
// variance. Bound by memory: the second pass finds in a cache what the first has read.
// A thread's sums are acc, the block's double, in an order that depends on sizes and strides alone. Workspace: none;
// groups whose features lie side by side are affine_sweep.cu's, which has one.
#include "affine_sweep.cuh"

namespace torchgradx::cuda {
namespace {

struct Sets {
  FastDivisor T, G;   // of the sets, T = 1 if they go over positions
  FastDivisor inner;  // lanes go along positions, or along features
  bool along_positions;
  int size;  // elements of a set
};

template <class scalar_t>
__global__ void __launch_bounds__(256) moments_kernel(const ElementOperand input, const Sets sets, double eps,
                                                      accumulator<scalar_t>* mean,  // [N, T, G], or null
                                                      accumulator<scalar_t>* rstd) {
  using acc_t = accumulator<scalar_t>;
  STATIC_SHARED(acc_t, about, [1]);
  int set = int(blockIdx.x);
  const int g = sets.G.take_remainder(set), t0 = sets.T.take_remainder(set);
  const scalar_t* const x = place<scalar_t>(input, set, t0, g, 0);
  // First sums of value - `of`, and of its squares; for thread 0.
  const auto sums = [&](acc_t of, double& sum, double& square) {
    acc_t first = 0, second = 0;
#pragma unroll 4
    for (int element = threadIdx.x; element < sets.size; element += int(blockDim.x)) {
      int outer = element;
      const int inner = sets.inner.take_remainder(outer);
      const int64_t t = sets.along_positions ? inner : outer, k = sets.along_positions ? outer : inner;
      const acc_t value = widen(x[t * input.t + k * input.k]) - of;
      first += value, second += value * value;
    }
    sum = block_sum(double(first)), square = block_sum(double(second));
  };
  double sum = 0, square = 0;
  sums(acc_t(0), sum, square);
  if (mean) {
    if (threadIdx.x == 0) about[0] = mean[blockIdx.x] = acc_t(sum / sets.size);
    __syncthreads();
    sums(about[0], sum, square);
  }
  if (threadIdx.x > 0) return;
  const double excess = mean ? sum * sum / sets.size : 0;  // by the rounding of the mean
  rstd[blockIdx.x] = acc_t(1 / sqrt((square - excess) / sets.size + eps));
}

}  // namespace

cudaError_t launch_moments(const AffineProblem& p, bool over_positions, double eps, void* mean, void* rstd,
                           Workspace& workspace, cudaStream_t stream) {
  if (over_positions && mean && sweep_suits(p)) return launch_sweep_moments(p, eps, mean, rstd, workspace, stream);
  const int64_t size = over_positions ? p.T * p.K : p.K, T = over_positions ? 1 : p.T;
  if (p.N == 0 || T == 0 || p.G == 0 || workspace.counts()) return cudaSuccess;
  if (size > kMostIndex || p.N > kMostIndex / T / p.G) return cudaErrorInvalidConfiguration;
  const bool along = over_positions && p.T > 1 && (p.K == 1 || p.input.t < p.input.k);
  const Sets sets{FastDivisor(T), FastDivisor(p.G), FastDivisor(along ? p.T : p.K), along, int(size)};
  const int threads = size <= 256 ? 32 : size <= 1024 ? 128 : 256;
  return dispatch(p.dtype, [&](auto zero) {
    using scalar_t = decltype(zero);
    using acc_t = accumulator<scalar_t>;
    return launch(moments_kernel<scalar_t>, dim3(unsigned(p.N * T * p.G)), dim3(threads), 0, stream, p.input, sets, eps,
                  static_cast<acc_t*>(mean), static_cast<acc_t*>(rstd));
  });
}

}  // namespace torchgradx::cuda
