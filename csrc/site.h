// One module of an attached model: where its parameters stand in the probe's table, its geometry, and what is done with
// a use.
#pragma once

#include "ops.h"
#include "pass.h"

#include <map>

namespace torchgradx {

enum class Layout : int64_t { kAuto = -1, kBatch = 0, kSequence = 1 };              // rows n*T+t | rows t*N+n
enum class Algorithm : int64_t { kRank1 = 0, kGram = 1, kDirect = 2, kFused = 3 };  // as in cost.py

struct Site {
  std::shared_ptr<Recorder> recorder;
  int64_t index;
  int64_t weight, bias;               // places in the table of parameters, -1 where there is none
  bool weight_grad;                   // false: norms only
  Layout layout;                      // as declared
  Layout presumed = Layout::kBatch;   // where nothing is declared or proven
  std::unique_ptr<Callback> planner;  // (N, T) -> Algorithm; asked once a size

  // Convolutions only; a one-dimensional one is a two-dimensional one of height 1.
  std::vector<int64_t> kernel_size, stride, padding, dilation;
  int64_t groups = 0;            // 0: a Linear
  std::vector<int64_t> pre_pad;  // what `padding` cannot say: other modes than zeros, or uneven sides
  std::string pad_mode;
  bool one_dimensional = false;

  bool linear() const {
    return groups == 0;
  }
  Geometry geometry() const {
    return {kernel_size, stride, padding, dilation, groups};
  }
  Tensor padded(const Tensor& input) const;

  struct Operands {
    Tensor activations;  // [N, T, I], or [N * K, C, H, W] padded as it was
    Tensor grad_output;  // [N, T, O], or [N * K, O, H', W']
    int64_t images = 1;  // K, of one sample
  };
  // Operands with the samples in front; nothing, and a refusal in the record, where they cannot be found.
  std::optional<Operands> canonical(const Pass& pass, int64_t use, const Tensor& input,
                                    const Tensor& grad_output) const;

  Algorithm plan(int64_t n, int64_t t);

 private:
  std::map<std::pair<int64_t, int64_t>, Algorithm> plans_;
  std::mutex plans_mutex_;
};

// One call of a module in a forward, owned by the graph.
struct Use : torch::CustomClassHolder {
  std::shared_ptr<Site> site;
  std::shared_ptr<Pass> pass;
  int64_t index;
  bool wants_weight, wants_bias;
  bool held;  // its saved tensors go through hooks

  Use(std::shared_ptr<Site> site, std::shared_ptr<Pass> pass, int64_t index, bool wants_weight, bool wants_bias);
  ~Use() override;

  std::vector<int64_t> parameters() const;
  // Norms beside the framework's own gradient, or operands kept for the other uses of the same parameters.
  void record(const Tensor& input, const Tensor& grad_output);
  // {grad_weight, grad_bias}, and the norms from the same pass where a kernel has it.
  std::pair<Tensor, Tensor> record_fused(const Tensor& input, const Tensor& weight, const Tensor& grad_output);
};

// A use of `site` on this thread, or nothing where the plain layer should run.
c10::intrusive_ptr<Use> begin_use(const std::shared_ptr<Site>& site, at::IntArrayRef sizes, const Tensor& weight,
                                  const std::optional<Tensor>& bias);

// The layer's forward, with a backward that also records.
Tensor linear(const std::shared_ptr<Site>& site, const Tensor& input, const Tensor& weight,
              const std::optional<Tensor>& bias);
Tensor convolution(const std::shared_ptr<Site>& site, const Tensor& input, const Tensor& weight,
                   const std::optional<Tensor>& bias);
// Listens at the output of the framework's own layer.
void tap(const std::shared_ptr<Site>& site, const Tensor& input, const Tensor& weight,
         const std::optional<Tensor>& bias, const Tensor& output);

// {grad_weight, grad_bias} as plain PyTorch makes them, differentiable.
std::pair<Tensor, Tensor> plain_gradients(const Site& site, const Tensor& input, const Tensor& weight,
                                          const Tensor& grad_output, bool want_weight, bool want_bias);

}  // namespace torchgradx
