// Every launcher of the CUDA backend in plain types: this header and the .cu files know nothing of torch.
// Strides count elements. A launcher enqueues on `stream` of the current device, allocates nothing, never waits, and
// returns the first error. Sums are float32, float64 for float64 operands: `acc` below.
#pragma once

#include "../operators/shapes.h"

#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>

namespace torchgradx::cuda {

enum class DType { kFloat, kDouble, kHalf, kBFloat16 };

// Uninitialised device memory, 256-byte aligned, of which a launcher takes pieces as aligned. Without memory it counts
// bytes: the launcher, called so first, takes the same pieces, and launches nothing.
class Workspace {
 public:
  Workspace() = default;
  explicit Workspace(void* memory) : start_(static_cast<char*>(memory)), counts_(false) {}

  template <class T>
  T* take(int64_t bytes) {
    char* const piece = start_ + size_;
    size_ += (bytes + kAlignment - 1) / kAlignment * kAlignment;
    return reinterpret_cast<T*>(piece);
  }
  bool counts() const {
    return counts_;
  }
  int64_t size() const {
    return size_;
  }

 private:
  static constexpr int64_t kAlignment = 256;
  char* start_ = reinterpret_cast<char*>(kAlignment);  // counting: nobody reads what lies there, and no piece is null
  int64_t size_ = 0;
  bool counts_ = true;
};

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
};

struct Conv2dProblem : ConvShape {
  DType dtype;
  ConvOperand input;        // [N, C, H, W]
  ConvOperand grad_output;  // [N, O, outH, outW]
  Device device;
  // Samples of several lengths, up to W, of direct_sm90 alone: n's are pixels starts[n] to starts[n + 1] of one row.
  const int* starts = nullptr;
  int64_t rows = 0;
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
};

struct InputGradient : ElementOperand {  // of what acts element by element; written to
  const void* weight;                    // [G, K] acc, contiguous
  DType weight_dtype;                    // of the weight's and the bias's gradients
  bool frozen;                           // statistics are constants, or there are none
  bool by_row;                           // else they are of each position (G = 1), or of each group
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
struct Gradients {    // null: not wanted
  void* weight;       // [O, I] or [O, C / groups, kH, kW], contiguous
  void* bias;         // [O]
  const void* scale;  // [N] acc, contiguous; null: all ones
};

// direct.cu: |G_n|^2 by tiles of G_n = sum_t b_nt a_nt^T, and the bias's |sum_t b_nt|^2; where there is a mask [N],
// samples of mask[n] == 0 keep what they have. The same tiles, times scale_n, are also summed over the samples if
// gradients are wanted. sq_norms are of gradients not scaled; without them neighbouring samples may be joined.
// Problem, here and below: a LinearProblem or a Conv2dProblem.
template <class Problem>
cudaError_t launch_direct(const Problem& problem, const Gradients& gradients, const SqNorms& sq_norms,
                          Workspace& workspace, cudaStream_t stream, const uint8_t* mask = nullptr);

// direct_sm90.cu: the same by Hopper's wgmma, bias included, where it suits: halves whose features lie side by side, in
// rows of whole 16 bytes. The weight's gradient is [O, kH, kW, C]. A Linear's rows are images of one row.
bool sm90_suits(const Conv2dProblem& problem);
cudaError_t launch_sm90(const Conv2dProblem& problem, const Gradients& gradients, const SqNorms& sq_norms,
                        Workspace& workspace, cudaStream_t stream);

// gram.cu: |G_n|^2 = sum_{s,t} (a_s . a_t)(b_s . b_t), the weight's alone (the bias's is a row sum: rowwise.cu).
// Samples whose terms cancel, or leave float32's range, are done again by direct, on the device.
template <class Problem>
cudaError_t launch_gram(const Problem& problem, void* sq_norms, Workspace& workspace, cudaStream_t stream);

// Facts that such a sum leaves for its verdict: enough to tell a sum from the ruins of one.
struct GramSums {
  double sum, magnitude;  // of the terms, and of their absolute values
  double trace;           // of the terms s = t: sum_t |a_t|^2 |b_t|^2
  double faint;           // at least what rows may have added whose square a_t . a_t or b_t . b_t underflowed
};

// Below it the square of a row, or a sum of products, may have been denormal, and so rounded to a few bits.
template <class acc_t>
constexpr double kFaint = sizeof(acc_t) == sizeof(double) ? 1e-290 : 1e-30;

// products.cu: the sums of a run of samples, of Grams that were made elsewhere, T of kMostGram at most.
constexpr int64_t kMostGram = 2048;
constexpr int64_t gram_pitch(int64_t T) {
  return (T + 7) / 8 * 8;
}
int64_t gram_parts(int64_t T);

struct GramsOfRun {
  const void *of_activations, *of_grads;  // [n, T, T] acc, T rounded up to gram_pitch, with zeros
  int64_t n, T, parts;                    // gram_parts
  GramSums* sums;                         // [n, parts]
};
cudaError_t launch_grams(DType dtype, const GramsOfRun& run, cudaStream_t stream);

// gram.cu: sums [N, parts] -> sq_norms [N] acc, by direct where they tell nothing.
template <class Problem>
cudaError_t launch_verdict(const Problem& problem, const GramSums* sums, int64_t parts, void* sq_norms,
                           Workspace& workspace, cudaStream_t stream);

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
cudaError_t launch_bias(const LinearProblem& problem, const Gradients& gradients, void* sq_norms, Workspace& workspace,
                        cudaStream_t stream);

// rowwise.cu: what blocks found, in a fixed order. partials [N, parts] -> sq_norms [N] acc; where there is a mask,
// samples of mask[n] == 0 keep what they have.
cudaError_t launch_sum_partials(DType dtype, const double* partials, int64_t N, int64_t parts, const uint8_t* mask,
                                void* sq_norms, cudaStream_t stream);
// rows [R, K] acc, each times its weight (acc; null: ones), which `each` rows share -> out [K] of dtype; the R rows
// that follow them -> other, unless that is null
cudaError_t launch_sum_rows(DType dtype, const void* rows, const void* weights, int64_t R, int64_t K, void* out,
                            cudaStream_t stream, int64_t each = 1, void* other = nullptr);

// affine.cu: parameters that act element by element, whose norms are those of sum_t b_nt f_nt and of sum_t b_nt.
struct AffineResults {
  void* sq_norms;       // [1 + bias, N] acc
  bool bias;            // it has the bias's row
  Gradients gradients;  // [G, K] each, of weight_dtype
  void* by_sample;      // the samples' own instead: [2, N, affine_parts, C] acc, the weight's and the bias's; or null
};
// The weight is read as it is where affine_reads_weight and it is of halves, else as accumulators. to.data null: norms
// and by_sample alone.
bool affine_reads_weight(const AffineProblem& problem, const InputGradient& to);
int64_t affine_parts(const AffineProblem& problem, const InputGradient& to);
cudaError_t launch_affine(const AffineProblem& problem, const InputGradient& to, const AffineResults& results,
                          Workspace& workspace, cudaStream_t stream);

// affine_rows.cu: all of that in one sweep, for statistics of each position, if affine_rows_suit.
bool affine_rows_suit(const AffineProblem& problem, const InputGradient& to);
cudaError_t launch_affine_rows(const AffineProblem& problem, const InputGradient& to, const AffineResults& results,
                               Workspace& workspace, cudaStream_t stream);

// moments.cu: mean and rstd [N, T, G] acc of the K features of each position of the input, or, [N, 1, G], of all
// positions; mean of null: nothing is subtracted.
cudaError_t launch_moments(const AffineProblem& problem, bool over_positions, double eps, void* mean, void* rstd,
                           Workspace& workspace, cudaStream_t stream);

// turn.cu: from [N, R, C] with strides n, 1, c -> to, contiguous; any elements of 2, 4 or 8 bytes.
struct TurnProblem {
  int64_t bytes, N, R, C;
  const void* from;
  int64_t n, c;
  void* to;
};
cudaError_t launch_turn(const TurnProblem& problem, cudaStream_t stream);

// gather.cu: tables looked up by id, |E_n|^2 -> sq_norms [N] acc; NaN where an id is below 0.
cudaError_t launch_gather(const GatherProblem& problem, void* sq_norms, Workspace& workspace, cudaStream_t stream);

// planes.cu: direct and fused for convolutions of many groups of few channels, if planes_suit. Pixels of grad_output
// are evenly spaced: h = W' w.
bool planes_suit(const Conv2dProblem& problem);
cudaError_t launch_planes(const Conv2dProblem& problem, const Gradients& gradients, const SqNorms& sq_norms,
                          Workspace& workspace, cudaStream_t stream);

}  // namespace torchgradx::cuda
