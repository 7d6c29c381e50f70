// gram, for Linear and Conv2d: |G_n|^2 = sum_{s,t} (a_s . a_t)(b_s . b_t), N T^2 (I + O) FLOP by the upper triangle of
// tiles; for T small against I and O. A sum that has lost its digits, by cancellation or by leaving float32's range, is
// found on the device and done again by direct, under a mask.
// Workspace: 8 x 32 bytes a sample and pair of tiles (128 x 128, or 64 x 64 where T <= 64 and for float64), N bytes of
// mask, and direct's. Nothing the size of T x T.
#include "gram.cuh"
#include "layer.cuh"

#include <cfloat>

namespace torchgradx::cuda {
namespace {

constexpr double kCancelled = 1e-4;  // as in reference.py: below it a sum has lost four digits
constexpr double kAddsNothing = 1e-14, kLargest = DBL_MAX;

// A block a sample. Rows of zeros are no doubt: their sum is exactly that.
template <class acc_t>
__global__ void __launch_bounds__(128)
    verdict_kernel(const GramSums* sums, int64_t parts, acc_t* sq_norms, uint8_t* doubtful) {
  const int64_t n = blockIdx.x;
  GramSums mine{};
  for (int64_t part = threadIdx.x; part < parts; part += blockDim.x) {
    const GramSums& other = sums[n * parts + part];
    mine.sum += other.sum, mine.magnitude += other.magnitude, mine.trace += other.trace, mine.faint += other.faint;
  }
  mine = {block_sum(mine.sum), block_sum(mine.magnitude), block_sum(mine.trace), block_sum(mine.faint)};
  if (threadIdx.x) return;
  const bool vanishes = mine.trace == 0 && mine.faint == 0;
  const bool sound = mine.sum > kCancelled * mine.magnitude && mine.sum >= kFaint<acc_t> && mine.sum <= kLargest &&
                     mine.faint <= kAddsNothing * mine.sum;
  sq_norms[n] = acc_t(mine.sum);
  doubtful[n] = !vanishes && !sound;
}

}  // namespace

template <class Problem>
cudaError_t launch_verdict(const Problem& problem, const GramSums* sums, int64_t parts, void* sq_norms,
                           Workspace& workspace, cudaStream_t stream) {
  if (problem.N > kMostIndex) return cudaErrorInvalidConfiguration;
  uint8_t* const doubtful = workspace.take<uint8_t>(problem.N);
  const auto judge = [&](auto kernel, auto* to) {
    return launch(kernel, dim3(unsigned(problem.N)), dim3(128), 0, stream, sums, parts, to, doubtful);
  };
  cudaError_t error = cudaSuccess;
  if (!workspace.counts())
    error = problem.dtype == DType::kDouble ? judge(verdict_kernel<double>, static_cast<double*>(sq_norms))
                                            : judge(verdict_kernel<float>, static_cast<float*>(sq_norms));
  if (error != cudaSuccess) return error;
  return launch_direct(problem, {}, {sq_norms, nullptr}, workspace, stream, doubtful);
}
template cudaError_t launch_verdict(const LinearProblem&, const GramSums*, int64_t, void*, Workspace&, cudaStream_t);

template <class Problem>
cudaError_t launch_gram(const Problem& problem, void* sq_norms, Workspace& workspace, cudaStream_t stream) {
  return with_layer(problem, [&](auto layer) {
    using Loader = typename decltype(layer)::Loader;
    choose_access(layer, false);
    const int64_t positions = layer.grads.positions, steps = int64_t(layer.activations.features) + layer.grads.features;
    if (layer.N == 0) return cudaSuccess;
    if (positions == 0 || layer.activations.features == 0 || layer.grads.features == 0)
      return workspace.counts() ? cudaSuccess : clear(sq_norms, layer.N * accumulator_bytes(problem.dtype), stream);
    const auto run = [&](auto product) {
      using Product = decltype(product);
      using Block = GramBlock<Product, Loader>;
      GramArguments<Loader> a{{layer.activations, layer.grads}, int(layer.N), layer.groups, 0, 0, nullptr};
      a.tiles = int(ceil_div<int64_t>(positions, Product::kM));
      const int64_t pairs = int64_t(a.tiles) * (a.tiles + 1) / 2 * a.groups;
      a.parts = choose_parts(layer.N, pairs, steps, problem.device.multiprocessors * Block::kPerMultiprocessor);
      a.sums = workspace.take<GramSums>(layer.N * pairs * kGramWarps * sizeof(GramSums));
      if (pairs * a.parts > kMostIndex) return cudaErrorInvalidConfiguration;
      cudaError_t error = cudaSuccess;
      if (!workspace.counts())
        error = launch(gram_kernel<Product, Loader>, dim3(unsigned(pairs * a.parts)), dim3(kThreads),
                       Block::kSharedBytes, stream, a);
      if (error != cudaSuccess) return error;
      return launch_verdict(problem, a.sums, pairs * kGramWarps, sq_norms, workspace, stream);
    };
    using scalar_t = typename Loader::scalar_t;
    return positions <= 64 ? with_product<scalar_t, 64, 64>(!layer.inner_positions, problem.device, run)
                           : with_product<scalar_t, 128, 128>(!layer.inner_positions, problem.device, run);
  });
}
template cudaError_t launch_gram(const LinearProblem&, void*, Workspace&, cudaStream_t);
template cudaError_t launch_gram(const Conv2dProblem&, void*, Workspace&, cudaStream_t);

}  // namespace torchgradx::cuda
