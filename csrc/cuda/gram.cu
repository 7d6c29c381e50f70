// gram, for Linear and Conv2d: |G_n|^2 = sum_{s,t} (a_s . a_t)(b_s . b_t), N T^2 (I + O) FLOP by the upper triangle of
// tiles; for T small against I and O. A sum that has lost its digits, by cancellation or by leaving float32's range, is
// found on the device and done again by direct, under a mask.
// Workspace: 8 x 32 bytes a sample and pair of tiles (128 x 128, or 64 x 64 where T <= 64 and for float64), N bytes of
// mask, and direct's. Nothing the size of T x T.
#include "gram.cuh"
#include "layer.cuh"
#include "plan.h"

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

// Calls f(Type<Product>) with what multiplies these operands, in tiles of kTile.
template <int kTile, class Loader, class F>
cudaError_t with_product_of(const Layer<Loader>& layer, const Device& device, const F& f) {
  using scalar_t = typename Loader::scalar_t;
  if constexpr (sizeof(scalar_t) == 2)
    return layer.inner_positions ? f(Type<HalfProduct<scalar_t, kTile, kTile, false>>())
                                 : f(Type<HalfProduct<scalar_t, kTile, kTile, true>>());
  else if constexpr (sizeof(scalar_t) == 4)
    return device.tf32 ? f(Type<Tf32Product<kTile, kTile>>()) : f(Type<SimtProduct<float, kTile, kTile>>());
  else
    return f(Type<SimtProduct<double, 64, 64>>());
}
template <class Loader, class F>
cudaError_t with_product(const Layer<Loader>& layer, const Device& device, const F& f) {
  return layer.grads.positions <= 64 ? with_product_of<64>(layer, device, f) : with_product_of<128>(layer, device, f);
}

template <class Product, class Loader>
struct Plan {
  GramArguments<Loader> arguments{};
  int64_t blocks, warp_parts;

  Plan(const Layer<Loader>& layer, const Device& device) {
    auto& a = arguments;
    a.operands[0] = layer.activations, a.operands[1] = layer.grads;
    a.N = int(layer.N), a.groups = layer.groups;
    a.tiles = int(ceil_div(layer.grads.positions, Product::kM));
    const int64_t pairs = int64_t(a.tiles) * (a.tiles + 1) / 2 * a.groups;
    const int64_t steps = int64_t(layer.activations.features) + layer.grads.features;
    a.parts =
        choose_parts(layer.N, pairs, steps, device.multiprocessors * GramBlock<Product, Loader>::kPerMultiprocessor);
    blocks = pairs * a.parts, warp_parts = pairs * kGramWarps;
  }
};

struct Workspace {
  GramSums* sums;
  uint8_t* doubtful;
  void* of_direct;
  size_t bytes;

  Workspace(int64_t N, int64_t warp_parts, size_t direct_bytes, void* workspace) {
    Carver carver(workspace);
    sums = carver.take<GramSums>(N * warp_parts * sizeof(GramSums));
    doubtful = carver.take<uint8_t>(N);
    of_direct = carver.take<char>(direct_bytes);
    bytes = carver.size();
  }
};

// Calls f(plan) for the problem's layer and product.
template <class Problem, class F>
cudaError_t with_plan(const Problem& problem, const F& f) {
  return with_layer(problem, [&](auto layer) {
    using Loader = typename decltype(layer)::Loader;
    choose_access(layer, false);
    return with_product(layer, problem.device, [&](auto product) {
      return f(Plan<typename decltype(product)::type, Loader>(layer, problem.device));
    });
  });
}

template <class Problem>
size_t workspace_bytes(const Problem& problem) {
  size_t bytes = 0;
  with_plan(problem, [&](const auto& plan) {
    bytes = Workspace(problem.N, plan.warp_parts, direct_workspace(problem), nullptr).bytes;
    return cudaSuccess;
  });
  return bytes;
}

template <class acc_t>
cudaError_t launch_verdict_on(const Workspace& workspace, int64_t N, int64_t parts, void* sq_norms,
                              cudaStream_t stream) {
  return launch(verdict_kernel<acc_t>, dim3(unsigned(N)), dim3(128), 0, stream, workspace.sums, parts,
                static_cast<acc_t*>(sq_norms), workspace.doubtful);
}

template <class Product, class Loader>
cudaError_t launch(const Plan<Product, Loader>& plan, const Workspace& workspace, void* sq_norms, cudaStream_t stream) {
  auto arguments = plan.arguments;
  arguments.sums = workspace.sums;
  if (plan.blocks > kMostIndex) return cudaErrorInvalidConfiguration;
  const cudaError_t error = launch(gram_kernel<Product, Loader>, dim3(unsigned(plan.blocks)), dim3(kThreads),
                                   GramBlock<Product, Loader>::kSharedBytes, stream, arguments);
  if (error != cudaSuccess) return error;
  return launch_verdict_on<typename Product::acc_t>(workspace, arguments.N, plan.warp_parts, sq_norms, stream);
}

template <class Problem>
cudaError_t launch_any(const Problem& problem, void* sq_norms, void* workspace, cudaStream_t stream) {
  return with_plan(problem, [&](const auto& plan) {
    const auto& a = plan.arguments;
    if (a.N == 0) return cudaSuccess;
    if (a.tiles == 0 || a.operands[0].features == 0 || a.operands[1].features == 0)
      return clear(sq_norms, a.N * accumulator_bytes(problem.dtype), stream);
    const Workspace pieces(problem.N, plan.warp_parts, direct_workspace(problem), workspace);
    const cudaError_t error = launch(plan, pieces, sq_norms, stream);
    if (error != cudaSuccess) return error;
    return launch_direct(problem, {sq_norms, nullptr}, pieces.of_direct, stream, pieces.doubtful);
  });
}

Workspace joined(const LinearProblem& p, void* workspace) {
  return {p.N, gram_parts(p.T), direct_workspace(p), workspace};
}

}  // namespace

size_t joined_workspace(const LinearProblem& problem) {
  return joined(problem, nullptr).bytes;
}
cudaError_t launch_join(const LinearProblem& p, const void* of_activations, const void* of_grads, int64_t first,
                        int64_t n, void* workspace, cudaStream_t stream) {
  const int64_t parts = gram_parts(p.T);
  const GramsOfRun run{of_activations, of_grads, n, p.T, parts, joined(p, workspace).sums + first * parts};
  return launch_grams(p.dtype, run, stream);
}
cudaError_t launch_verdict(const LinearProblem& p, void* sq_norms, void* workspace, cudaStream_t stream) {
  const Workspace own = joined(p, workspace);
  if (p.N == 0) return cudaSuccess;
  if (p.N > kMostIndex) return cudaErrorInvalidConfiguration;
  const auto verdict = p.dtype == DType::kDouble ? launch_verdict_on<double> : launch_verdict_on<float>;
  const cudaError_t error = verdict(own, p.N, gram_parts(p.T), sq_norms, stream);
  return error == cudaSuccess ? launch_direct(p, {sq_norms, nullptr}, own.of_direct, stream, own.doubtful) : error;
}

size_t gram_workspace(const LinearProblem& problem) {
  return workspace_bytes(problem);
}
size_t gram_workspace(const Conv2dProblem& problem) {
  return workspace_bytes(problem);
}
cudaError_t launch_gram(const LinearProblem& problem, void* sq_norms, void* workspace, cudaStream_t stream) {
  return launch_any(problem, sq_norms, workspace, stream);
}
cudaError_t launch_gram(const Conv2dProblem& problem, void* sq_norms, void* workspace, cudaStream_t stream) {
  return launch_any(problem, sq_norms, workspace, stream);
}

}  // namespace torchgradx::cuda
