// One layer's arithmetic, by kind: its forward, the framework's own backward, and what the kernels make of its
// operands. A layer knows its module's constants, and nothing of passes, graphs or parameters' places; sites do
// (site.h).
#pragma once

#include "../operators/ops.h"
#include "../operators/text.h"

#include <memory>
#include <tuple>

namespace torchgradx {

// rows n*T+t | rows t*N+n | rows of no sample, as those of a position table | no way to them shows | [T, N K, *] | from
// here on: as one of the pass's Segments says
enum class Layout : int64_t { kAuto = -1, kBatch, kSequence, kShared, kNowhere, kSecond, kSegments = 16 };
enum class Algorithm : int64_t { kRank1 = 0, kGram = 1, kDirect = 2, kFused = 3 };  // as in plan/cost.py

namespace cpu {
struct SharedGrads;
}

inline std::optional<Tensor> maybe(const Tensor& t) {
  return t.defined() ? std::optional<Tensor>(t) : std::nullopt;
}

double norm_of(const Tensor& t);

struct Saved {  // of a forward, besides the weight
  Tensor input, mean, rstd;
  std::shared_ptr<cpu::SharedGrads> shared = nullptr;  // where the gradient is that of other weights too
};

struct Wanted {
  bool input, weight, bias;
};

struct Gradients {
  Tensor input, weight, bias;
};

struct Operands {  // with the samples in front; each kind has its own shapes
  Tensor activations, grad_output, mean, rstd;
  int64_t images = 1;       // K, of one sample: the first dimension is N K
  bool rearranged = false;  // the samples were not in front
  at::DimVector shape;      // of the layer's input
  Tensor bias_grad;         // where grad_output stands as the weight alone needs it
  bool padded = false;      // rows of padding lie within activations
  std::shared_ptr<cpu::SharedGrads> shared = nullptr;
};

struct Layer {
  virtual ~Layer() = default;

  bool lowered = true;       // autocast computes it in its lower precision
  bool biased = true;        // a module of this kind may have a bias
  bool reads_input = true;   // for its input's gradient
  bool makes_input = false;  // fused() makes its input's gradient too
  bool lends = false;        // its weight's gradient may hold the memory of its output's, as a sparse one does

  virtual bool batched(const Tensor& input) const = 0;  // it has a dimension for samples
  virtual bool fuses(const Operands&, const Tensor& /*weight*/) const {
    return true;
  }

  // Around the operator: what it cannot say, such as a padding mode or a missing dimension.
  virtual Tensor enter(const Tensor& input) const {
    return input;
  }
  virtual Tensor lifted(const Tensor& t) const {  // the weight, or grad_output
    return t;
  }
  virtual Tensor leave(const Tensor& output) const {
    return output;
  }

  // The module's own forward, where it is one operator and Python does nothing else around it; undefined: it does for
  // this input.
  virtual Tensor whole_forward(const Tensor& /*input*/, const Tensor& /*weight*/,
                               const std::optional<Tensor>& /*bias*/) const {
    return {};
  }

  // The operator; statistics that its backward needs go into `saved`.
  virtual Tensor forward(const Tensor& input, const Tensor& weight, const std::optional<Tensor>& bias,
                         Saved& saved) const = 0;
  // As the framework makes them; what is not wanted stays undefined. By running the forward again, for those kinds
  // whose norms rarely stand beside the framework's own gradients. The bias is shaped as the weight there.
  virtual Gradients backward(const Saved& saved, const Tensor& weight, const Tensor& grad_output,
                             const Wanted& wanted) const;

  // On a GPU: brings what a backward reads, once, into the memory order that all that follows wants.
  virtual void lay_out(Saved&, const Tensor& /*weight*/, Tensor& /*grad_output*/) const {}

  // Nothing where the samples cannot be found. Without saved.input only the bias can be served.
  virtual std::optional<Operands> operands(const Saved& saved, const Tensor& grad_output, int64_t n,
                                           Layout layout) const = 0;
  // With the images of a sample as one; nothing where they have no such form.
  virtual std::optional<Operands> one_image(const Operands& operands) const {
    return operands.images == 1 ? std::optional(operands) : std::nullopt;
  }
  virtual int64_t positions(const Operands& operands) const {  // T, for the plan
    return operands.grad_output.size(1);
  }
  virtual Tensor bias_rows(const Operands& operands) const {  // [N K, T, O], whose sum over T is the bias's gradient
    return operands.grad_output;
  }
  // How large a sample's gradient rounds: the norm of what grad_output is multiplied by.
  virtual double magnitude(const Operands& operands) const {
    return norm_of(operands.activations);
  }
  virtual Tensor sq_norms(const Operands& operands, Algorithm algorithm, bool bias) const = 0;  // [1 + bias, N]
  // Gradients and [1 + bias, N] from one pass.
  virtual std::pair<Gradients, Tensor> fused(const Operands& operands, const Tensor& weight,
                                             const Wanted& wanted) const = 0;
  // The same of rows in which samples of several lengths follow each other, as segments_fused has them; without
  // wanted.weight norms alone. Nothing where no kernel serves them so.
  virtual std::optional<std::pair<Gradients, Tensor>> fused_segments(const Saved&, const Tensor& /*grad_output*/,
                                                                     const Tensor& /*starts*/, int64_t /*longest*/,
                                                                     const Wanted&) const {
    return std::nullopt;
  }
  // The sum over the samples of scale [N K] times each one's gradient; a sample of scale 0 is left out, nan included.
  virtual Gradients scaled(const Operands& operands, const Tensor& weight, const Tensor& scale,
                           const Wanted& wanted) const = 0;
  Tensor scaled_bias(const Operands& operands, const Tensor& scale) const;
  // True if the samples' own gradients are no larger than the operands, to be kept for clipping in their place.
  virtual bool keeps_gradients(const Operands&) const {
    return false;
  }
  // The input's gradient if wanted, norms, and the samples' gradients [1 + bias, N, P, size of the weight], each the
  // sum over P parts.
  virtual std::tuple<Tensor, Tensor, Tensor> by_sample(const Operands&, const Tensor& /*weight*/, const Wanted&) const {
    TORCHGRADX_CHECK(false, "a layer whose operands are kept");
  }
  // [N K]: <gradient, direction>, which is shaped as the weight.
  virtual Tensor weight_dots(const Operands& operands, const Tensor& direction) const = 0;
  // [N K, size of the weight] where that is no larger than the operands, to be kept in their place.
  virtual std::optional<Tensor> weight_gradients(const Operands&) const {
    return std::nullopt;
  }
};

// The sum of Layer::by_sample's gradients, with a scale as Layer::scaled has it.
Gradients sum_of_samples(const Tensor& by_sample, const Tensor& weight, const std::optional<Tensor>& scale = {});

// Rows [N, T, F] of [*, F], or nothing; see Layout.
std::optional<Tensor> rows_by_sample(const Tensor& t, int64_t n, Layout layout);

// [N, *], each sample's share times its scale [N]; 0 where that is 0.
Tensor scaled_rows(const Tensor& rows, const Tensor& scale);

struct Images {  // [N K, ...], K of each sample
  int64_t n, each;
  bool moved;  // the samples are not in front
  Tensor by_sample(const Tensor& t) const;
};
std::optional<Images> images_of(const Tensor& t, int64_t n, Layout layout);  // or nothing

// t.contiguous(format), on a GPU by our own copy.
Tensor in_format(const Tensor& t, at::MemoryFormat format);

double epsilon(at::ScalarType dtype);
Tensor widened(const Tensor& t);  // halves as float32

using LayerPtr = std::shared_ptr<Layer>;

struct ConvolutionOptions {  // a one-dimensional one is a two-dimensional one of height 1
  std::vector<int64_t> kernel_size, stride, padding, dilation;
  int64_t groups = 1;
  bool transposed = false;
  bool one_dimensional = false;
  std::vector<int64_t> depth;    // kernel size, stride, padding, dilation of the first of three dimensions
  std::vector<int64_t> pre_pad;  // what `padding` cannot say: other modes than zeros, or uneven sides
  std::string pad_mode;
};

LayerPtr embedding_layer(int64_t rows, int64_t padding_idx, bool sparse, double max_norm);  // -1: none
LayerPtr layer_norm_layer(std::vector<int64_t> shape, double eps);
LayerPtr rms_norm_layer(std::vector<int64_t> shape, double eps);  // eps < 0: the dtype's
LayerPtr group_norm_layer(int64_t groups, double eps);
LayerPtr instance_norm_layer(double eps);
LayerPtr batch_norm_layer(double eps);
LayerPtr prelu_layer(int64_t slopes);
LayerPtr linear_layer(bool transposed);  // weight [O, I], or [I, O]
LayerPtr convolution_layer(ConvolutionOptions options);

}  // namespace torchgradx
