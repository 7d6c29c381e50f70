// direct and fused, for Linear and Conv2d: 2 N T I O FLOP, operands read once from memory and again from L2 by every
// other tile. Samples are shared out among blocks where there are fewer tiles than multiprocessors.
// Workspace: for norms, 8 doubles a sample and tile of the weight (128 x 192; float32 128 x 128; float64 64 x 64), as
// many a sample and row of tiles for the bias; fused, [parts, O, I + 1] accumulators if there are several parts, of
// which there are so few that (parts - 1) x tiles is below twice the multiprocessors.
#include "direct.cuh"
#include "layer.cuh"

namespace torchgradx::cuda {
namespace {

constexpr int64_t kJoined = 256;  // positions of joined samples
constexpr double kCopySteps = 4;  // what a tile of the total, copied, is worth in positions

// N T positions as one sequence, cut anew: without squares and without scales there is nothing to be kept apart.
template <class Loader>
void join_samples(Layer<Loader>& layer) {
  if constexpr (std::is_same_v<Loader, DenseRows<typename Loader::scalar_t>>) {
    Loader &a = layer.activations, &b = layer.grads;
    const int64_t T = a.positions, total = layer.N * T;
    if (T == 1) a.t = a.n, b.t = b.n;
    if (layer.N == 1 || layer.groups > 1 || total > kMostIndex || a.n != T * a.t || b.n != T * b.t) return;
    layer.N = ceil_div(total, kJoined);
    layer.last_positions = int(total - (layer.N - 1) * kJoined);
    a.positions = b.positions = int(kJoined);
    a.n = kJoined * a.t, b.n = kJoined * b.t;
  }
}

template <class Loader>
cudaError_t clear_results(const Layer<Loader>& layer, const Gradients& gradients, const SqNorms& sq_norms,
                          cudaStream_t stream) {
  using scalar_t = typename Loader::scalar_t;
  const int64_t norm_bytes = layer.N * sizeof(accumulator<scalar_t>);
  cudaError_t error = clear(sq_norms.weight, norm_bytes, stream);
  if (error == cudaSuccess) error = clear(sq_norms.bias, norm_bytes, stream);
  if (error == cudaSuccess)
    error = clear(gradients.weight, layer.O() * layer.activations.features * sizeof(scalar_t), stream);
  if (error == cudaSuccess) error = clear(gradients.bias, layer.O() * sizeof(scalar_t), stream);
  return error;
}

template <class Product, class Loader>
cudaError_t launch_tiles(const Layer<Loader>& layer, DType dtype, int multiprocessors, const Gradients& gradients,
                         const SqNorms& sq_norms, const uint8_t* mask, Workspace& workspace, cudaStream_t stream) {
  using acc_t = typename Product::acc_t;
  using scalar_t = typename Product::scalar_t;
  const bool fused = gradients.weight || gradients.bias;
  DirectArguments<Product, Loader> a{};
  a.activations = layer.activations, a.grads = layer.grads, a.mask = mask;
  a.N = int(layer.N), a.groups = layer.groups, a.last_positions = layer.last_positions;
  a.tiles_o = int(ceil_div(a.grads.features, Product::kM));
  a.tiles_i = std::max(1, int(ceil_div(a.activations.features, Product::kN)));
  const int64_t rows = int64_t(a.groups) * a.tiles_o, tiles = rows * a.tiles_i;
  const int64_t O = layer.O(), size = O * a.activations.features;
  a.parts = choose_parts(layer.N, tiles, a.grads.positions, multiprocessors, fused ? kCopySteps : 0);
  if (sq_norms.weight) a.squares = workspace.take<double>(layer.N * tiles * kWarps * sizeof(double));
  if (sq_norms.bias) a.bias_squares = workspace.take<double>(layer.N * rows * kWarps * sizeof(double));
  a.scale = static_cast<const acc_t*>(gradients.scale);
  a.weight = static_cast<scalar_t*>(gradients.weight), a.bias = static_cast<scalar_t*>(gradients.bias);
  if (a.weight && a.parts > 1) a.weight_copies = workspace.take<acc_t>(a.parts * size * sizeof(acc_t));
  if (a.bias && a.parts > 1) a.bias_copies = workspace.take<acc_t>(a.parts * O * sizeof(acc_t));
  if (tiles * a.parts > kMostIndex) return cudaErrorInvalidConfiguration;
  if (workspace.counts()) return cudaSuccess;
  const auto kernel = fused ? direct_kernel<Product, Loader, true> : direct_kernel<Product, Loader, false>;
  const int shared_bytes = DirectBlock<Product, Loader, true>::kSharedBytes;
  cudaError_t error = launch(kernel, dim3(unsigned(tiles * a.parts)), dim3(kThreads), shared_bytes, stream, a);
  if (error == cudaSuccess && a.squares)
    error = launch_sum_partials(dtype, a.squares, a.N, tiles * kWarps, mask, sq_norms.weight, stream);
  if (error == cudaSuccess && a.bias_squares)
    error = launch_sum_partials(dtype, a.bias_squares, a.N, rows * kWarps, mask, sq_norms.bias, stream);
  if (error == cudaSuccess && a.weight_copies)
    error = launch_sum_rows(dtype, a.weight_copies, nullptr, a.parts, size, gradients.weight, stream);
  if (error == cudaSuccess && a.bias_copies)
    error = launch_sum_rows(dtype, a.bias_copies, nullptr, a.parts, O, gradients.bias, stream);
  return error;
}

}  // namespace

template <class Problem>
cudaError_t launch_direct(const Problem& problem, const Gradients& gradients, const SqNorms& sq_norms,
                          Workspace& workspace, cudaStream_t stream, const uint8_t* mask) {
  return with_layer(problem, [&](auto layer) {
    using Loader = typename decltype(layer)::Loader;
    const int64_t I = layer.activations.features, T = layer.grads.positions;
    if (layer.N == 0 || T == 0 || layer.O() == 0 || (I == 0 && !sq_norms.bias && !gradients.bias))
      return mask || workspace.counts() ? cudaSuccess : clear_results(layer, gradients, sq_norms, stream);
    if (!sq_norms.weight && !sq_norms.bias && !gradients.scale) join_samples(layer);
    choose_access(layer, true);
    const auto run = [&](auto product) {
      return launch_tiles<decltype(product)>(layer, problem.dtype, problem.device.multiprocessors, gradients, sq_norms,
                                             mask, workspace, stream);
    };
    return with_product<typename Loader::scalar_t, 128, 128, 192>(layer.inner_positions, problem.device, run);
  });
}
template cudaError_t launch_direct(const LinearProblem&, const Gradients&, const SqNorms&, Workspace&, cudaStream_t,
                                   const uint8_t*);
template cudaError_t launch_direct(const Conv2dProblem&, const Gradients&, const SqNorms&, Workspace&, cudaStream_t,
                                   const uint8_t*);

}  // namespace torchgradx::cuda
