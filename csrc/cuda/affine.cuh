// What the kernels of parameters that act element by element share. Operands are [N, T, G, K]: T positions that share
// the parameters, which are [G, K], C = G K columns. A column's feature is f = (x - mean) rstd, or min(x, 0).
#pragma once

#include "dispatch.cuh"
#include "operand.cuh"

namespace torchgradx::cuda {

struct Affine : AffineProblem {
  InputGradient to;  // data null: not wanted
  int64_t C;
  FastDivisor features;  // K

  explicit Affine(const AffineProblem& p, const InputGradient& to = {})
      : AffineProblem(p), to(to), C(p.G * p.K), features(p.K) {}
};

template <class scalar_t>
__device__ __forceinline__ scalar_t* place(const ElementOperand& x, int64_t n, int64_t t, int64_t g, int64_t k) {
  return static_cast<scalar_t*>(const_cast<void*>(x.data)) + n * x.n + t * x.t + g * x.g + k * x.k;
}

template <class acc_t>
__device__ __forceinline__ acc_t read(const Statistic& s, int64_t n, int64_t t, int64_t g, acc_t otherwise) {
  return s.data ? static_cast<const acc_t*>(s.data)[n * s.n + t * s.t + g * s.g] : otherwise;
}

// A number of the weight, where affine_reads_weight: halves as they are, others as accumulators.
template <class acc_t>
__device__ __forceinline__ acc_t weight_at(const InputGradient& to, int64_t column) {
  if (to.weight_dtype == DType::kHalf) return widen(static_cast<const __half*>(to.weight)[column]);
  if (to.weight_dtype == DType::kBFloat16) return widen(static_cast<const __nv_bfloat16*>(to.weight)[column]);
  return static_cast<const acc_t*>(to.weight)[column];
}

inline bool fits(const AffineProblem& p) {
  return p.N <= kMostIndex && p.T <= kMostIndex && p.G <= kMostIndex && p.K <= kMostIndex / std::max<int64_t>(p.G, 1);
}

}  // namespace torchgradx::cuda
