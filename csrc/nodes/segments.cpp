// Uses whose rows are of samples as a vector says. Each run of samples with as many rows is served as a batch by
// itself, by the kernels that serve any other; cost and memory are by rows, and nothing is padded.
#include "segments.h"

#include "site.h"

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>

namespace torchgradx {
namespace {

constexpr int64_t kFew = 16;  // rows of a run, below which a weight gradient of its own costs more than its product

// Lengths that never repeat would ask the planner anew for each: three leading bits are enough to choose by.
int64_t rounded(int64_t size) {
  int64_t step = 1;
  while (size / step >= 8) step *= 2;
  return (size + step - 1) / step * step;
}

// [1 + bias, N] of a layer that cannot join a sample's images: by the gradients of each.
Tensor sq_norms_of_images(const Layer& layer, const Operands& operands, bool bias) {
  const auto sq = [&](const Tensor& t) {
    return widened(t).unflatten(0, {-1, operands.images}).sum(1).flatten(1).square().sum(1);
  };
  const Tensor of_weight = sq(*layer.weight_gradients(operands));
  return bias ? at::stack({of_weight, sq(widened(layer.bias_rows(operands)).sum(1))}) : of_weight.unsqueeze(0);
}

}  // namespace

Segments::Segments(const Tensor& owners, const std::optional<Tensor>& order, const Tensor& samples,
                   const std::vector<std::pair<int64_t, int64_t>>& runs)
    : owners(owners), order(order.value_or(Tensor())), samples(samples) {
  int64_t row = 0, sample = 0;
  std::vector<int32_t> starts{0};
  for (const auto& [count, length] : runs) {
    this->runs.push_back({row, count, length, samples.narrow(0, sample, count)});
    for (int64_t k = 0; k < count; ++k) starts.push_back(static_cast<int32_t>(row += length));
    sample += count, longest = std::max(longest, length);
  }
  this->starts = at::tensor(starts, at::kInt).to(owners.device(), at::kInt, /*non_blocking=*/true);
}

std::optional<Tensor> Segments::flat(const Tensor& t) const {
  if (!t.defined()) return t;
  int64_t count = 1, dims = 0;
  while (dims < t.dim() && (count != rows() || dims == 0)) count *= t.size(dims++);
  if (count != rows() || t.dim() == 0) return std::nullopt;
  return dims == 1 ? t : t.flatten(0, dims - 1);
}

Tensor Segments::sorted(const Tensor& flat) const {
  return order.defined() && flat.defined() ? flat.index_select(0, order) : flat;
}

Tensor Segments::by_sample(const Tensor& flat, int64_t n) const {
  at::DimVector sizes(flat.sizes());
  sizes[0] = n + 1;
  const Tensor wide = widened(flat);
  Tensor sums = at::zeros(sizes, wide.options());  // a GPU's index_add_ has another order in each run
  sums = wide.is_cuda() ? sums.index_put_({owners}, wide, /*accumulate=*/true) : sums.index_add_(0, owners, wide);
  return sums.narrow(0, 0, n);
}

Tensor Segments::sq_norms(const Tensor& activations, const Tensor& grad_output,
                          const std::vector<int64_t>& algorithms) const {
  static const LayerPtr linear = linear_layer(/*transposed=*/false);
  const Tensor a = sorted(activations).narrow(0, 0, owned()), b = sorted(grad_output).narrow(0, 0, owned());
  if (runs.size() > 1)
    if (const auto made = segments_fused(a, b, starts, longest, /*weight=*/false, /*bias=*/false); !made.empty())
      return made.front()[0];
  std::vector<Tensor> found;
  for (size_t k = 0; k < runs.size(); ++k) {
    const auto& [first, count, length, samples] = runs[k];
    const auto of_run = [&](const Tensor& t) { return t.narrow(0, first, count * length).view({count, length, -1}); };
    found.push_back(linear->sq_norms({of_run(a), of_run(b)}, static_cast<Algorithm>(algorithms[k]), /*bias=*/false)[0]);
  }
  return at::cat(found);
}

FlatUse FlatUse::narrowed(int64_t first, int64_t count) const {
  const auto part = [&](const Tensor& t) { return t.defined() ? t.narrow(0, first, count) : t; };
  return {{part(saved.input), part(saved.mean), part(saved.rstd)}, part(grad_output)};
}

std::optional<FlatUse> flat_use(const Segments& segments, const Saved& saved, const Tensor& grad_output, bool sorts) {
  FlatUse use;
  const std::pair<const Tensor*, Tensor*> all[] = {{&saved.input, &use.saved.input},
                                                   {&saved.mean, &use.saved.mean},
                                                   {&saved.rstd, &use.saved.rstd},
                                                   {&grad_output, &use.grad_output}};
  for (const auto& [from, to] : all) {
    auto rows = segments.flat(*from);
    if (!rows) return std::nullopt;
    *to = sorts ? segments.sorted(*rows) : *rows;
  }
  return use;
}

std::optional<Operands> by_row(const Layer& layer, const Segments& segments, const std::optional<FlatUse>& flat) {
  if (!flat) return std::nullopt;
  return layer.operands(flat->saved, flat->grad_output, segments.rows(), Layout::kBatch);
}

Algorithm Use::plan_of_run(int64_t count, int64_t length, const Tensor& operand) const {
  return site->plan(rounded(count), rounded(length), operand);
}

// Norms of all runs; `gradients`: and the weight gradients, their sum.
Tensor Use::norms_of_runs(const Segments& segments, const FlatUse& sorted, const Tensor& weight, bool bias,
                          Gradients* gradients) const {
  const Layer& layer = *site->layer;
  Tensor sq_norms;
  const auto dtype = sorted.grad_output.options();  // the weight may not have been saved
  const Wanted wanted{false, true, bias};
  const auto add = [](Tensor& sum, const Tensor& part) {  // rounded once
    if (part.defined()) sum = sum.defined() ? sum.add_(part) : widened(part);
  };
  const auto add_all = [&](const Gradients& more) {
    add(gradients->weight, more.weight);
    if (bias) add(gradients->bias, more.bias);
  };
  const auto put = [&](const Tensor& samples, const Tensor& sq) {
    if (!sq_norms.defined()) sq_norms = at::zeros({1 + bias, pass->n}, sq.options());
    sq_norms.index_copy_(1, samples, sq);
  };
  const auto at_once = fuses_at_once(segments, sorted.grad_output)
                           ? layer.fused_segments(sorted.saved, sorted.grad_output, segments.starts, segments.longest,
                                                  {false, gradients != nullptr, bias})
                           : std::nullopt;
  if (at_once) {
    put(segments.samples, at_once->second);
    if (gradients) add_all(at_once->first);
  }
  for (size_t k = 0; !at_once && k < segments.runs.size(); ++k) {
    const Segments::Run& run = segments.runs[k];
    const FlatUse part = sorted.narrowed(run.first, run.count * run.length);
    const Operands images = *layer.operands(part.saved, part.grad_output, run.count, Layout::kBatch);
    const auto operands = layer.one_image(images);
    const auto algorithm =
        operands ? plan_of_run(run.count, layer.positions(*operands), operands->grad_output) : Algorithm::kDirect;
    if (gradients && algorithm == Algorithm::kFused) {
      const auto [made, sq] = layer.fused(*operands, weight, wanted);
      add_all(made);
      put(run.samples, sq);
      continue;
    }
    if (gradients) add_all(layer.backward(part.saved, weight, part.grad_output, wanted));
    put(run.samples, operands ? layer.sq_norms(*operands, algorithm, bias) : sq_norms_of_images(layer, images, bias));
  }
  const int64_t rest = segments.rows() - segments.owned();
  if (gradients && rest > 0) {  // padding: what it adds to .grad stays as the framework has it
    const FlatUse part = sorted.narrowed(segments.owned(), rest);
    add_all(layer.backward(part.saved, weight, part.grad_output, wanted));
  }
  if (gradients) {
    gradients->weight = gradients->weight.to(dtype.dtype());
    if (bias) gradients->bias = gradients->bias.to(dtype.dtype());
  }
  if (sq_norms.defined()) return sq_norms;
  return at::zeros({1 + bias, pass->n}, dtype.dtype(accumulator_of(sorted.grad_output)));
}

// True if one launch for all lengths suits them, planned as samples of the mean one.
bool Use::fuses_at_once(const Segments& segments, const Tensor& grad_output) const {
  if (segments.runs.size() < 2) return false;
  const int64_t count = segments.samples.size(0);
  const Algorithm typical = plan_of_run(count, segments.owned() / count, grad_output);
  return typical == Algorithm::kFused || typical == Algorithm::kDirect;
}

bool Use::fuses_runs(const Segments& segments, const Tensor& grad_output) const {
  const auto runs = static_cast<int64_t>(segments.runs.size());
  if (runs == 0 || segments.rows() < kFew * runs) return false;
  for (const Segments::Run& run : segments.runs)
    if (plan_of_run(run.count, run.length, grad_output) == Algorithm::kFused) return true;
  return false;
}

std::optional<Gradients> Use::fuse_segments(const Segments& segments, const Saved& saved, const Tensor& weight,
                                            const Tensor& grad_output) {
  const at::NoGradGuard no_grad;
  const Layer& layer = *site->layer;
  if (layer.makes_input || !fuses_runs(segments, grad_output)) return std::nullopt;
  const auto flat = flat_use(segments, saved, grad_output, /*sorts=*/false);
  const auto rows = by_row(layer, segments, flat);
  if (!rows || !layer.fuses(*rows, weight)) return std::nullopt;
  const auto sorted = segments.order.defined() ? flat_use(segments, saved, grad_output, /*sorts=*/true) : flat;
  Gradients gradients;
  finish(norms_of_runs(segments, *sorted, weight, wants_bias, &gradients));
  serve(*rows, saved, weight, grad_output);
  if (receives() && site->recorder->auditing) audit(*rows, gradients, grad_output);
  return gradients;
}

}  // namespace torchgradx
