// Embedding: rows of a table looked up by id. Its forward and its gradient stay the framework's own.
#include "../operators/views.h"
#include "layer.h"

#include <ATen/ATen.h>

namespace torchgradx {
namespace {

class Embedding final : public Layer {
 public:
  Embedding(int64_t rows, int64_t padding_idx, bool sparse, double max_norm)
      : rows_(rows), padding_idx_(padding_idx), sparse_(sparse), bounded_(max_norm >= 0) {
    lowered = biased = false;
    lends = sparse;
  }

  bool batched(const Tensor& input) const override {
    return input.dim() > 0;
  }
  bool fuses(const Operands&, const Tensor&) const override {
    return false;
  }

  Tensor whole_forward(const Tensor& input, const Tensor& weight, const std::optional<Tensor>&) const override {
    if (bounded_) return {};
    return at::embedding(weight, input, padding_idx_, /*scale_grad_by_freq=*/false, sparse_);
  }
  Tensor forward(const Tensor& input, const Tensor& weight, const std::optional<Tensor>&, Saved&) const override {
    return at::embedding(weight, input, padding_idx_, /*scale_grad_by_freq=*/false, /*sparse=*/false);
  }
  Gradients backward(const Saved& saved, const Tensor&, const Tensor& grad_output,
                     const Wanted& wanted) const override {
    if (!wanted.weight) return {};
    return {{}, at::embedding_dense_backward(grad_output, saved.input, rows_, padding_idx_, false), {}};
  }

  std::optional<Operands> operands(const Saved& saved, const Tensor& grad_output, int64_t n,
                                   Layout layout) const override {
    at::DimVector sizes(saved.input.sizes());
    sizes.push_back(1);
    const auto ids = rows_by_sample(viewed(saved.input, sizes), n, layout);
    const auto rows = rows_by_sample(grad_output, n, layout);
    if (!ids || !rows) return std::nullopt;
    return Operands{viewed(*ids, ids->sizes().slice(0, 2), ids->strides().slice(0, 2)), *rows};
  }
  double magnitude(const Operands& operands) const override {
    return std::sqrt(static_cast<double>(operands.activations.numel()));
  }
  Tensor sq_norms(const Operands& operands, Algorithm, bool) const override {
    const auto padding = padding_idx_ < 0 ? std::nullopt : std::optional<int64_t>(padding_idx_);
    const Tensor sq = gather_sq_norms(operands.activations, operands.grad_output, padding);
    return viewed(sq, {1, sq.numel()});
  }
  Tensor weight_dots(const Operands& operands, const Tensor& direction) const override {
    const Tensor is_padding = operands.activations.eq(padding_idx_).unsqueeze(-1);
    const Tensor dots = at::embedding(direction, operands.activations) * widened(operands.grad_output);
    return dots.masked_fill(is_padding, 0).sum({1, 2});
  }
  Gradients scaled(const Operands& operands, const Tensor&, const Tensor& scale, const Wanted&) const override {
    const Tensor rows = scaled_rows(operands.grad_output, scale);
    return {{}, at::embedding_backward(rows, operands.activations, rows_, padding_idx_, false, sparse_), {}};
  }
  std::pair<Gradients, Tensor> fused(const Operands&, const Tensor&, const Wanted&) const override {
    TORCHGRADX_CHECK(false, "an embedding has no fused kernel");
  }

 private:
  const int64_t rows_, padding_idx_;  // -1: none
  const bool sparse_, bounded_;       // bounded: its own forward shortens the rows that it looks up
};

}  // namespace

LayerPtr embedding_layer(int64_t rows, int64_t padding_idx, bool sparse, double max_norm) {
  return std::make_shared<Embedding>(rows, padding_idx, sparse, max_norm);
}

}  // namespace torchgradx
