// Operands [N, T, C] whose features lie side by side: how they are dealt out, and pieces of 16 bytes of them.
#pragma once

#include "affine.cuh"

namespace torchgradx::cuda {

constexpr int kSweepThreads = 256, kSweepWarps = kSweepThreads / warp_threads;
constexpr int kJoinThreads = 512;

template <class scalar_t, int kV>
__device__ __forceinline__ Vector<scalar_t, kV> vector_at(const ElementOperand& x, int64_t n, int64_t t, int column) {
  return *reinterpret_cast<const Vector<scalar_t, kV>*>(static_cast<const scalar_t*>(x.data) + n * x.n + t * x.t +
                                                        column);
}

// The power of two that holds so many, a warp at most.
inline int lanes_for(int64_t count) {
  int lanes = 1;
  while (lanes < warp_threads && lanes < count) lanes *= 2;
  return lanes;
}

// Blocks of a sample: `parts` of its positions by `chunks` of its columns, of which a warp has `lanes` vectors side by
// side, and a block's other lanes and warps other positions.
struct SweepCut {
  int lanes, V;
  int64_t chunks, parts;

  SweepCut(const AffineProblem& p, int vector) : V(vector) {
    constexpr int64_t kBlocks = 1024;  // wanted; not read off the device, so that all devices add up alike
    const int64_t vectors = ceil_div<int64_t>(p.G * p.K, V);
    lanes = lanes_for(vectors);
    chunks = ceil_div<int64_t>(vectors, lanes);
    const int64_t most = ceil_div<int64_t>(p.T, int64_t(4) * kSweepThreads / lanes);
    parts = std::clamp<int64_t>(ceil_div(kBlocks, std::max<int64_t>(p.N * chunks, 1)), 1, std::max<int64_t>(most, 1));
  }
};

inline bool side_by_side(const AffineProblem& p, int64_t g, int64_t k) {  // strides
  return (p.K == 1 || k == 1) && (p.G == 1 || g == p.K);
}

// affine_sweep.cu: if features lie side by side and there are positions enough.
inline bool sweep_suits(const AffineProblem& p) {
  constexpr int64_t kPositions = 8;
  return !p.negative && p.N > 0 && p.T >= kPositions && p.G * p.K > 0 && side_by_side(p, p.input.g, p.input.k) &&
         side_by_side(p, p.grad_output.g, p.grad_output.k);
}
// Sums [2, N, C] acc and, with them, `means` [N, G, 2] acc, or null; squares as launch_affine.
cudaError_t launch_sweep(const AffineProblem& problem, const InputGradient& to, bool bias, void* sums, void* means,
                         void* sq_norms, Workspace& workspace, cudaStream_t stream);
// The same as launch_moments over positions.
cudaError_t launch_sweep_moments(const AffineProblem& problem, double eps, void* mean, void* rstd, Workspace& workspace,
                                 cudaStream_t stream);
// grad_input of statistics of each group, by the means that launch_sweep leaves.
bool sweep_input_suits(const AffineProblem& problem, const InputGradient& to);
cudaError_t launch_sweep_input(const AffineProblem& problem, const InputGradient& to, const void* means,
                               cudaStream_t stream);

}  // namespace torchgradx::cuda
