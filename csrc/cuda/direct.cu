// direct and fused, for Linear and Conv2d: 2 N T I O FLOP, operands read once from memory and again from L2 by every
// other tile. Samples are shared out among blocks where there are fewer tiles than multiprocessors.
// Workspace: for norms, 8 doubles a sample and tile of the weight (128 x 192; float32 128 x 128; float64 64 x 64), as
// many a sample and row of tiles for the bias; fused, [parts, O, I + 1] accumulators if there are several parts, of
// which there are so few that (parts - 1) x tiles is below twice the multiprocessors.
#include "direct.cuh"
#include "layer.cuh"
#include "plan.h"

namespace torchgradx::cuda {
namespace {

constexpr int64_t kJoined = 256;  // positions of joined samples
constexpr double kCopySteps = 4;  // what a tile of the total, copied, is worth in positions

// Calls f(Type<Product>) with what multiplies these operands.
template <class Loader, class F>
cudaError_t with_product(const Layer<Loader>& layer, const Device& device, const F& f) {
  using scalar_t = typename Loader::scalar_t;
  if constexpr (sizeof(scalar_t) == 2)
    return layer.inner_positions ? f(Type<HalfProduct<scalar_t, 128, 192, true>>())
                                 : f(Type<HalfProduct<scalar_t, 128, 192, false>>());
  else if constexpr (sizeof(scalar_t) == 4)
    return device.tf32 ? f(Type<Tf32Product<128, 128>>()) : f(Type<SimtProduct<float, 128, 128>>());
  else
    return f(Type<SimtProduct<double, 64, 64>>());
}

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

template <class Product, class Loader>
struct Plan {
  using Arguments = DirectArguments<Product, Loader>;
  using acc_t = typename Product::acc_t;
  Arguments arguments{};
  int64_t tiles = 0, norm_parts = 0, bias_parts = 0, weight_size = 0;
  size_t workspace_bytes = 0;

  Plan(const Layer<Loader>& layer, const Device& device, bool fused, bool norms, void* workspace) {
    Arguments& a = arguments;
    a.activations = layer.activations, a.grads = layer.grads;
    a.N = int(layer.N), a.groups = layer.groups, a.last_positions = layer.last_positions;
    a.tiles_o = int(ceil_div(a.grads.features, Product::kM));
    a.tiles_i = std::max(1, int(ceil_div(a.activations.features, Product::kN)));
    tiles = int64_t(a.groups) * a.tiles_o * a.tiles_i;
    a.parts = choose_parts(layer.N, tiles, a.grads.positions, device.multiprocessors, fused ? kCopySteps : 0);
    norm_parts = tiles * kWarps, bias_parts = int64_t(a.groups) * a.tiles_o * kWarps;
    weight_size = layer.O() * a.activations.features;
    Carver carver(workspace);
    if (norms) {
      a.squares = carver.take<double>(layer.N * norm_parts * sizeof(double));
      a.bias_squares = carver.take<double>(layer.N * bias_parts * sizeof(double));
    }
    if (fused && a.parts > 1) {
      a.weight_copies = carver.take<acc_t>(a.parts * weight_size * sizeof(acc_t));
      a.bias_copies = carver.take<acc_t>(a.parts * layer.O() * sizeof(acc_t));
    }
    workspace_bytes = carver.size();
  }
};

bool takes_norms(const Gradients* gradients, const SqNorms& sq_norms) {
  return !gradients || sq_norms.weight || sq_norms.bias;
}

// Calls f(plan); gradients of null: direct.
template <class Problem, class F>
cudaError_t with_plan(const Problem& problem, const Gradients* gradients, const SqNorms& sq_norms, void* workspace,
                      const F& f) {
  return with_layer(problem, [&](auto layer) {
    const bool norms = takes_norms(gradients, sq_norms);
    if (!norms && !gradients->scale) join_samples(layer);
    choose_access(layer, true);
    return with_product(layer, problem.device, [&](auto product) {
      Plan<typename decltype(product)::type, typename decltype(layer)::Loader> plan(
          layer, problem.device, gradients != nullptr, norms, workspace);
      return f(plan);
    });
  });
}

template <class Problem>
size_t workspace_bytes(const Problem& problem, const Gradients* gradients, const SqNorms& sq_norms) {
  size_t bytes = 0;
  with_plan(problem, gradients, sq_norms, nullptr, [&](const auto& plan) {
    bytes = plan.workspace_bytes;
    return cudaSuccess;
  });
  return bytes;
}

template <class Loader>
cudaError_t clear_results(const Layer<Loader>& layer, const Gradients* gradients, const SqNorms& sq_norms,
                          cudaStream_t stream) {
  using scalar_t = typename Loader::scalar_t;
  const int64_t norm_bytes = layer.N * sizeof(accumulator<scalar_t>);
  cudaError_t error = clear(sq_norms.weight, norm_bytes, stream);
  if (error == cudaSuccess) error = clear(sq_norms.bias, norm_bytes, stream);
  if (error == cudaSuccess && gradients)
    error = clear(gradients->weight, layer.O() * layer.activations.features * sizeof(scalar_t), stream);
  if (error == cudaSuccess && gradients) error = clear(gradients->bias, layer.O() * sizeof(scalar_t), stream);
  return error;
}

template <class Product, class Loader>
cudaError_t launch(Plan<Product, Loader>& plan, DType dtype, const Gradients* gradients, const SqNorms& sq_norms,
                   const uint8_t* mask, cudaStream_t stream) {
  auto& a = plan.arguments;
  a.mask = mask;
  if (!sq_norms.weight) a.squares = nullptr;
  if (!sq_norms.bias) a.bias_squares = nullptr;
  if (gradients) {
    a.scale = static_cast<const typename Product::acc_t*>(gradients->scale);
    a.weight = static_cast<typename Product::scalar_t*>(gradients->weight);
    a.bias = static_cast<typename Product::scalar_t*>(gradients->bias);
    if (!a.bias) a.bias_copies = nullptr;
  }
  const int64_t blocks = plan.tiles * a.parts;
  if (blocks > kMostIndex) return cudaErrorInvalidConfiguration;
  const auto kernel = gradients ? direct_kernel<Product, Loader, true> : direct_kernel<Product, Loader, false>;
  const int shared_bytes = DirectBlock<Product, Loader, true>::kSharedBytes;
  cudaError_t error = launch(kernel, dim3(unsigned(blocks)), dim3(kThreads), shared_bytes, stream, a);
  if (error == cudaSuccess && a.squares)
    error = launch_sum_partials(dtype, a.squares, a.N, plan.norm_parts, mask, sq_norms.weight, stream);
  if (error == cudaSuccess && a.bias_squares)
    error = launch_sum_partials(dtype, a.bias_squares, a.N, plan.bias_parts, mask, sq_norms.bias, stream);
  if (error == cudaSuccess && a.weight_copies)
    error = launch_sum_rows(dtype, a.weight_copies, nullptr, a.parts, plan.weight_size, gradients->weight, stream);
  if (error == cudaSuccess && a.bias_copies)
    error = launch_sum_rows(dtype, a.bias_copies, nullptr, a.parts, int64_t(a.groups) * a.grads.features,
                            gradients->bias, stream);
  return error;
}

template <class Problem>
cudaError_t launch_any(const Problem& problem, const Gradients* gradients, const SqNorms& sq_norms, const uint8_t* mask,
                       void* workspace, cudaStream_t stream) {
  return with_layer(problem, [&](auto layer) {
    const bool wants_bias = sq_norms.bias || (gradients && gradients->bias);
    const int64_t I = layer.activations.features, T = layer.grads.positions;
    if (layer.N == 0 || T == 0 || layer.O() == 0 || (I == 0 && !wants_bias))
      return mask ? cudaSuccess : clear_results(layer, gradients, sq_norms, stream);
    return with_plan(problem, gradients, sq_norms, workspace,
                     [&](auto& plan) { return launch(plan, problem.dtype, gradients, sq_norms, mask, stream); });
  });
}

}  // namespace

size_t direct_workspace(const LinearProblem& problem) {
  return workspace_bytes(problem, nullptr, {});
}
size_t direct_workspace(const Conv2dProblem& problem) {
  return workspace_bytes(problem, nullptr, {});
}
size_t fused_workspace(const LinearProblem& problem, const Gradients& gradients, const SqNorms& sq_norms) {
  return workspace_bytes(problem, &gradients, sq_norms);
}
size_t fused_workspace(const Conv2dProblem& problem, const Gradients& gradients, const SqNorms& sq_norms) {
  return workspace_bytes(problem, &gradients, sq_norms);
}

cudaError_t launch_direct(const LinearProblem& problem, const SqNorms& sq_norms, void* workspace, cudaStream_t stream,
                          const uint8_t* mask) {
  return launch_any(problem, nullptr, sq_norms, mask, workspace, stream);
}
cudaError_t launch_direct(const Conv2dProblem& problem, const SqNorms& sq_norms, void* workspace, cudaStream_t stream,
                          const uint8_t* mask) {
  return launch_any(problem, nullptr, sq_norms, mask, workspace, stream);
}
cudaError_t launch_fused(const LinearProblem& problem, const Gradients& gradients, const SqNorms& sq_norms,
                         void* workspace, cudaStream_t stream) {
  return launch_any(problem, &gradients, sq_norms, nullptr, workspace, stream);
}
cudaError_t launch_fused(const Conv2dProblem& problem, const Gradients& gradients, const SqNorms& sq_norms,
                         void* workspace, cudaStream_t stream) {
  return launch_any(problem, &gradients, sq_norms, nullptr, workspace, stream);
}

}  // namespace torchgradx::cuda
