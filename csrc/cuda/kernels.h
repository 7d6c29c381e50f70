// Every launcher of the CUDA backend in plain types: this header and the .cu files know nothing of torch.
// Strides count elements. A launcher enqueues on `stream` of the current device, allocates nothing, never waits, and
// returns the first error. `workspace` is uninitialised device memory, 256-byte aligned, of at least as many bytes as
// the launcher's companion says. Sums are float32, float64 for float64 operands: `acc` below.
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>

namespace torchgradx::cuda {

enum class DType { kFloat, kDouble, kHalf, kBFloat16 };

struct DenseOperand {  // [N, T, features]
  const void* data;
  int64_t n, t, feature;  // strides
};

struct ConvOperand {  // [N, channels, height, width]
  const void* data;
  int64_t n, c, h, w;  // strides
};

struct Device {
  int multiprocessors;  // work is cut to fill so many; results are deterministic for a given number
  bool tf32;            // float32 operands may be rounded to TF32: torch's own flag for the layer at hand
  bool sm90;            // it has Hopper's instructions, and these kernels were compiled for them
};

struct LinearProblem {
  DType dtype;
  int64_t N, T, I, O;
  DenseOperand activations;  // [N, T, I]
  DenseOperand grad_output;  // [N, T, O]
  Device device;
  // Samples of several lengths, up to T, of direct_sm90 alone: n's are rows starts[n] to starts[n + 1] of [1, rows, *].
  const int* starts = nullptr;
  int64_t rows = 0;
};

struct Conv2dProblem {
  DType dtype;
  int64_t N, C, H, W, O, outH, outW, kH, kW, strideH, strideW, padH, padW, dilationH, dilationW, groups;
  ConvOperand input;        // [N, C, H, W]
  ConvOperand grad_output;  // [N, O, outH, outW]
  Device device;
};

struct ElementOperand {  // [N, T, G, K]
  const void* data;
  int64_t n, t, g, k;  // strides
};

struct Statistic {   // mean or rstd [N, T, G] acc
  const void* data;  // null: there is none
  int64_t n, t, g;   // strides, 0 where one number is for all
};

struct AffineProblem {
  DType dtype;
  int64_t N, T, G, K;
  ElementOperand input, grad_output;
  Statistic mean, rstd;
  bool negative;  // the feature is min(x, 0), not (x - mean) rstd
  Device device;
};

struct InputGradient {  // of what acts element by element
  void* data;           // as the operands are, of their dtype
  int64_t n, t, g, k;   // strides
  const void* weight;   // [G, K] acc, contiguous
  DType weight_dtype;   // of the weight's and the bias's gradients
  bool frozen;          // statistics are constants, or there are none
  bool by_row;          // else they are of each position (G = 1), or of each group
};

struct GatherProblem {
  DType dtype;
  int64_t N, T, D;
  const int64_t *ids, *positions;  // [N, T], contiguous: each sample's ids in order, and where they stood
  DenseOperand rows;               // [N, T, D]
  int64_t padding;                 // the id whose rows count nothing; -1: none
};

struct SqNorms {  // null: not wanted
  void* weight;   // [N] acc
  void* bias;     // [N] acc
};

// Weighted sums over the samples, in the operands' dtype, rounded once. A sample of scale 0 is left out, nan included.
struct Gradients {
  void* weight;       // [O, I] or [O, C / groups, kH, kW], contiguous
  void* bias;         // [O], or null
  const void* scale;  // [N] acc, contiguous; null: all ones
};

// direct.cu: |G_n|^2 by tiles of G_n = sum_t b_nt a_nt^T, and the bias's |sum_t b_nt|^2; where there is a mask [N],
// samples of mask[n] == 0 keep what they have.
size_t direct_workspace(const LinearProblem& problem);
size_t direct_workspace(const Conv2dProblem& problem);
cudaError_t launch_direct(const LinearProblem& problem, const SqNorms& sq_norms, void* workspace, cudaStream_t stream,
                          const uint8_t* mask = nullptr);
cudaError_t launch_direct(const Conv2dProblem& problem, const SqNorms& sq_norms, void* workspace, cudaStream_t stream,
                          const uint8_t* mask = nullptr);

// direct.cu: the same tiles, times scale_n, also summed over the samples. sq_norms are of gradients not scaled; where
// sq_norms.weight is null they are not taken, and neighbouring samples may be joined.
size_t fused_workspace(const LinearProblem& problem, const Gradients& gradients, const SqNorms& sq_norms);
size_t fused_workspace(const Conv2dProblem& problem, const Gradients& gradients, const SqNorms& sq_norms);
cudaError_t launch_fused(const LinearProblem& problem, const Gradients& gradients, const SqNorms& sq_norms,
                         void* workspace, cudaStream_t stream);
cudaError_t launch_fused(const Conv2dProblem& problem, const Gradients& gradients, const SqNorms& sq_norms,
                         void* workspace, cudaStream_t stream);

// direct_sm90.cu: direct (gradients of null) and fused by Hopper's wgmma, bias included, where they suit: halves whose
// features lie side by side, in rows of whole 16 bytes. Norms of null are not taken. The weight's gradient of a
// convolution is [O, kH, kW, C].
bool sm90_suits(const LinearProblem& problem);
bool sm90_suits(const Conv2dProblem& problem);
size_t sm90_workspace(const LinearProblem& problem, const Gradients* gradients, const SqNorms& sq_norms);
size_t sm90_workspace(const Conv2dProblem& problem, const Gradients* gradients, const SqNorms& sq_norms);
cudaError_t launch_sm90(const LinearProblem& problem, const Gradients* gradients, const SqNorms& sq_norms,
                        void* workspace, cudaStream_t stream);
cudaError_t launch_sm90(const Conv2dProblem& problem, const Gradients* gradients, const SqNorms& sq_norms,
                        void* workspace, cudaStream_t stream);

// gram.cu: |G_n|^2 = sum_{s,t} (a_s . a_t)(b_s . b_t), the weight's alone (the bias's is a row sum: rowwise.cu).
// Samples whose terms cancel, or leave float32's range, are done again by direct, on the device.
size_t gram_workspace(const LinearProblem& problem);
size_t gram_workspace(const Conv2dProblem& problem);
cudaError_t launch_gram(const LinearProblem& problem, void* sq_norms, void* workspace, cudaStream_t stream);
cudaError_t launch_gram(const Conv2dProblem& problem, void* sq_norms, void* workspace, cudaStream_t stream);

// gram.cu and products.cu: the same of Grams [n, T, T] acc that were made elsewhere, T of kMostGram at most, a run of
// samples from `first` on after the other; then the verdict. T is rounded up to gram_pitch, with zeros.
constexpr int64_t kMostGram = 2048;
constexpr int64_t gram_pitch(int64_t T) {
  return (T + 7) / 8 * 8;
}
int64_t gram_parts(int64_t T);
size_t joined_workspace(const LinearProblem& problem);
cudaError_t launch_join(const LinearProblem& problem, const void* of_activations, const void* of_grads, int64_t first,
                        int64_t n, void* workspace, cudaStream_t stream);
cudaError_t launch_verdict(const LinearProblem& problem, void* sq_norms, void* workspace, cudaStream_t stream);

struct GramsOfRun {
  const void *of_activations, *of_grads;  // [n, T, T] acc, T of gram_pitch
  int64_t n, T, parts;                    // gram_parts
  void* sums;                             // [n, parts] GramSums
};
cudaError_t launch_grams(DType dtype, const GramsOfRun& run, cudaStream_t stream);

// products.cu: gradients of samples that were made elsewhere. Their squares are left in parts, for launch_sum_partials.
struct GradientsOfRun {
  const void* gradients;  // [n, size] acc
  int64_t n, size;
  const void* scale;   // [n] acc; null: ones
  const void* before;  // [size] acc: the sum over earlier runs; null: there is none
  void* sum;           // [size]: with this run's; acc, of the operands' dtype where `last`; null: not wanted
  bool last;
  double* squares;  // [n, parts] from here on, or null
  int64_t parts;    // from one sample's squares to the next one's
};
int64_t square_parts(int64_t size);
cudaError_t launch_gradients(DType dtype, const GradientsOfRun& run, cudaStream_t stream);

// products.cu: samples of `size` elements each, side by side, times their scale, rounded; zeros where that is 0,
// whatever they are. `masks`: that alone is heeded of the scale.
struct SamplesToScale {
  const void* from;
  void* to;
  int64_t N, size;
  const void* scale;  // [N] acc
  bool masks;
};
cudaError_t launch_scale_samples(DType dtype, const SamplesToScale& samples, cudaStream_t stream);

// rowwise.cu: |a_n|^2 |b_n|^2 for T = 1, and |b_n|^2 for the bias.
cudaError_t launch_rank1(const LinearProblem& problem, const SqNorms& sq_norms, cudaStream_t stream);

// rowwise.cu: the bias alone, |sum_t b_nt|^2 -> sq_norms [N] acc, or null, and gradients.bias, or null. Of problem it
// reads grad_output; of gradients, not weight.
inline LinearProblem rows_of_bias(const LinearProblem& p) {
  return p;
}
inline LinearProblem rows_of_bias(const Conv2dProblem& p) {  // pixels evenly spaced
  const ConvOperand& g = p.grad_output;
  const DenseOperand rows{g.data, g.n, p.outW > 1 ? g.w : g.h, g.c};
  return {p.dtype, p.N, p.outH * p.outW, 0, p.O, {}, rows, p.device};
}
size_t bias_workspace(const LinearProblem& problem, bool gradient);
cudaError_t launch_bias(const LinearProblem& problem, const Gradients& gradients, void* sq_norms, void* workspace,
                        cudaStream_t stream);

// rowwise.cu: what blocks found, in a fixed order. partials [N, parts] -> sq_norms [N] acc; where there is a mask,
// samples of mask[n] == 0 keep what they have.
cudaError_t launch_sum_partials(DType dtype, const double* partials, int64_t N, int64_t parts, const uint8_t* mask,
                                void* sq_norms, cudaStream_t stream);
// rows [R, K] acc, each times its weight (acc; null: ones), which `each` rows share -> out [K] of dtype; the R rows
// that follow them -> other, unless that is null
cudaError_t launch_sum_rows(DType dtype, const void* rows, const void* weights, int64_t R, int64_t K, void* out,
                            cudaStream_t stream, int64_t each = 1, void* other = nullptr);

// affine.cu: parameters that act element by element. |sum_t b_nt f_nt|^2 and, `bias`, |sum_t b_nt|^2 -> sq_norms
// [1 + bias, N] acc.
size_t affine_workspace(const AffineProblem& problem, bool bias);
cudaError_t launch_affine(const AffineProblem& problem, bool bias, void* sq_norms, void* workspace,
                          cudaStream_t stream);
// The same, the input's gradient, and the parameters' [G, K] with their scale: the bias's if gradients.bias is there.
// to.weight is as it is where affine_reads_weight and it is of halves, else accumulators.
bool affine_reads_weight(const AffineProblem& problem, const InputGradient& to);
size_t affine_fused_workspace(const AffineProblem& problem, const InputGradient& to, const Gradients& gradients);
cudaError_t launch_affine_fused(const AffineProblem& problem, const InputGradient& to, const Gradients& gradients,
                                void* sq_norms, void* workspace, cudaStream_t stream);

// The samples' own gradients in place of their sum: by_sample [2, N, P, C] acc, the weight's and the bias's, each the
// sum over P parts. to.data null: without the input's gradient; `bias`: sq_norms has its second row.
int64_t affine_parts(const AffineProblem& problem, const InputGradient& to);
size_t affine_by_sample_workspace(const AffineProblem& problem, const InputGradient& to);
cudaError_t launch_affine_by_sample(const AffineProblem& problem, const InputGradient& to, bool bias, void* by_sample,
                                    void* sq_norms, void* workspace, cudaStream_t stream);

// affine_rows.cu: all of that in one sweep, for statistics of each position, if affine_rows_suit.
bool affine_rows_suit(const AffineProblem& problem, const InputGradient& to);
size_t affine_rows_workspace(const AffineProblem& problem, const Gradients& gradients);
cudaError_t launch_affine_rows(const AffineProblem& problem, const InputGradient& to, const Gradients& gradients,
                               void* sq_norms, void* workspace, cudaStream_t stream);
int64_t affine_rows_parts(const AffineProblem& problem);
size_t affine_rows_by_sample_workspace(const AffineProblem& problem);
cudaError_t launch_affine_rows_by_sample(const AffineProblem& problem, const InputGradient& to, bool bias,
                                         void* by_sample, void* sq_norms, void* workspace, cudaStream_t stream);

// moments.cu: mean and rstd [N, T, G] acc of the K features of each position, or, [N, 1, G], of all positions; mean of
// null: nothing is subtracted.
struct MomentsProblem {
  DType dtype;
  int64_t N, T, G, K;
  ElementOperand input;
  bool over_positions;
};
size_t moments_workspace(const MomentsProblem& problem, bool centred);
cudaError_t launch_moments(const MomentsProblem& problem, double eps, void* mean, void* rstd, void* workspace,
                           cudaStream_t stream);

// turn.cu: from [N, R, C] with strides n, 1, c -> to, contiguous; any elements of 2, 4 or 8 bytes.
struct TurnProblem {
  int64_t bytes, N, R, C;
  const void* from;
  int64_t n, c;
  void* to;
};
cudaError_t launch_turn(const TurnProblem& problem, cudaStream_t stream);

// gather.cu: tables looked up by id, |E_n|^2 -> sq_norms [N] acc; NaN where an id is below 0.
size_t gather_workspace(const GatherProblem& problem);
cudaError_t launch_gather(const GatherProblem& problem, void* sq_norms, void* workspace, cudaStream_t stream);

// planes.cu: direct and fused for convolutions of many groups of few channels, if planes_suit. Pixels of grad_output
// are evenly spaced: h = W' w.
bool planes_suit(const Conv2dProblem& problem);
size_t planes_direct_workspace(const Conv2dProblem& problem);
size_t planes_fused_workspace(const Conv2dProblem& problem);
cudaError_t launch_planes_direct(const Conv2dProblem& problem, const SqNorms& sq_norms, void* workspace,
                                 cudaStream_t stream);
cudaError_t launch_planes_fused(const Conv2dProblem& problem, const Gradients& gradients, const SqNorms& sq_norms,
                                void* workspace, cudaStream_t stream);

}  // namespace torchgradx::cuda
