// Linear's norms from batched products of the framework's library (cuBLAS), which reach a GPU's arithmetic where our
// own tiles do not: a run of samples at a time, whose gradients or Grams stay in L2 until products.cu has read them.
#pragma once

#include "bindings.h"

#include <algorithm>

namespace torchgradx::cuda {

// Where they are the quicker way. In bfloat16 an H200 took 15 us for the Grams of T = 64 (N = 64, 768 x 768), where our
// tiles took 64, and 34 us for gradient and norms of T = 1024 (N = 8), where they took 93.
constexpr int64_t kManyPositions = 128, kSomePositions = 8;

#ifdef CUDA_EMULATION
extern "C" bool cuda_emulation_batched;  // off, that our own tiles are what is emulated; tests turn it on
#else
constexpr bool cuda_emulation_batched = true;
#endif

inline bool gradients_are_batched(const LinearProblem& p) {
  return cuda_emulation_batched && p.T >= kManyPositions && p.I > 0 && p.O > 0;
}
inline bool grams_are_batched(const LinearProblem& p) {
  return cuda_emulation_batched && p.T >= kSomePositions && p.T <= kMostGram && p.I > 0 && p.O > 0;
}

// One product of all samples needs no sample's bounds. With a scale it reads copies, which count 32-bit indices.
inline bool sums_are_batched(const Gradients& gradients, int64_t N, int64_t largest_sample) {
  return cuda_emulation_batched && (!gradients.scale || N * largest_sample < (int64_t(1) << 31) - 1024);
}
inline bool sums_are_batched(const Gradients& gradients, const LinearProblem& p) {
  return sums_are_batched(gradients, p.N, p.T * std::max(p.I, p.O));
}

// True if that beats Hopper's kernel, a launch for seven: on an H200 it did not at T = 197, by 5.9 to 5.1 ms for a
// ViT-B.
inline bool one_sum_is_quicker(const LinearProblem& p) {
  constexpr int64_t kShort = 32;
  return p.T <= kShort;
}

// |G_n|^2, with `gradients` their weighted sum too; the bias beside it.
void run_gradients(const Run& run, const LinearProblem& p, const Rows& rows, const Gradients& gradients,
                   const SqNorms& sq_norms);
// sum_n scale_n G_n of all samples at once, and the bias's: a scaled copy of the operands and one product.
void sum_gradients(const Run& run, const Rows& rows, const Gradients& gradients);
void sum_gradients(const Run& run, const ConvShape& s, const Tensor& input, const Tensor& grads,
                   const Gradients& gradients);
// |G_n|^2 by Grams; the weight's alone.
void run_grams(const Run& run, const LinearProblem& p, const Rows& rows, void* sq_norms);

}  // namespace torchgradx::cuda
