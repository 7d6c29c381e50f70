// What surrounds a sweep: sharing the work among threads, adding up what they found, and samples whose
// squares underflowed, which are done again with squares in double.
#pragma once

#include "../operators/ops.h"
#include "sweep.h"

#include <ATen/EmptyTensor.h>
#include <ATen/ops/index_select.h>

#include <algorithm>
#include <array>
#include <optional>

namespace torchgradx::cpu {

struct Grid {
  int64_t sample_parts, row_parts;
  int64_t parts() const {
    return sample_parts * row_parts;
  }
  Share share(int64_t part, int64_t N, int64_t rows) const {
    const int64_t s = part / row_parts, r = part % row_parts;
    return {N * s / sample_parts, N * (s + 1) / sample_parts, rows * r / row_parts, rows * (r + 1) / row_parts};
  }
};

// The grid whose slowest share is smallest; sharing rows makes every sharer pack the same columns, hence the surcharge.
inline Grid make_grid(int64_t N, int64_t rows, double flop, double total_bytes) {
  constexpr double kWorthAThread = 2e5, kCopyBytes = 1 << 20, kPacking = 16;
  const int64_t threads =
      at::in_parallel_region() ? 1 : std::min<int64_t>(at::get_num_threads(), int64_t(flop / kWorthAThread));
  Grid best{1, 1};
  double best_cost = double(N) * (double(rows) + kPacking);
  for (int64_t s = 1; s <= std::min(threads, N); ++s) {
    if (s > 1 && total_bytes > kCopyBytes) break;
    const int64_t r = std::min(threads / s, rows);
    const double cost = double(ceil_div(N, s)) * (double(ceil_div(rows, r)) + kPacking);
    if (cost < best_cost) best_cost = cost, best = {s, r};
  }
  return best;
}

template <class Work>
void for_parts(int64_t parts, const Work& work) {
  if (parts == 1) return work(0);
  at::parallel_for(0, parts, 1, [&](int64_t begin, int64_t end) {
    for (int64_t part = begin; part < end; ++part) work(part);
  });
}

// A sum of squares so small that those float rounded to nothing may have mattered; zero too, unless an operand is all
// zeros. Not so large ones: float's squares overflow only where their sum does.
template <class acc_t>
bool underflowed(double sq_sum) {
  return sizeof(acc_t) == sizeof(float) && sq_sum < 1e-30;
}

template <class acc_t, class Layer>
void redo_underflowed(const Layer& layer, std::vector<double>& sq_sums) {
  if (std::none_of(sq_sums.begin(), sq_sums.end(), underflowed<acc_t>)) return;
  for_parts(layer.N, [&](int64_t n) {
    if (!underflowed<acc_t>(sq_sums[n])) return;
    sq_sums[n] = 0;
    if (layer.vanishes(n)) return;
    Sums<acc_t> sums;
    sums.sq_sums = sq_sums.data(), sums.wide = true;
    Sweep<acc_t, Layer>(layer, {n, n + 1, 0, layer.rows}, sums).run();
  });
}

template <class Layer>
double flop_of(const Layer& layer) {
  return 2.0 * double(layer.N) * double(layer.height * layer.width) * double(layer.rows) * double(layer.patch());
}

// weight [size] += each of copies [count, size], in order
template <class acc_t>
void add_copies(acc_t* weight, const acc_t* copies, int64_t size, int64_t count) {
  for (int64_t copy = 0; copy < count; ++copy)
    for (int64_t k = 0; k < size; ++k) weight[k] += copies[copy * size + k];
}

inline std::vector<double> sum_of_parts(std::vector<double> partial, int64_t parts, int64_t N) {
  add_copies(partial.data(), partial.data() + N, N, parts - 1);
  partial.resize(N);
  return partial;
}

template <class acc_t>
void write_row(const Tensor& sq_norms, int64_t row, const std::vector<double>& sums) {
  std::copy(sums.begin(), sums.end(), sq_norms.mutable_data_ptr<acc_t>() + row * sq_norms.size(1));
}

// Sums of the parts of a grid, apart until the end; each where its tensor is defined: grad_weight [O, ...] in
// acc_t, grad_bias [O], and sq_norms [1 or 2, N], of which row 1 is the bias's. Without sq_norms all positions are one
// sum.
template <class acc_t, class Layer>
class Parts {
 public:
  Parts(const Layer& layer, const Grid& grid, const Tensor& grad_weight, const Tensor& grad_bias,
        const Tensor& sq_norms)
      : layer_(layer),
        grid_(grid),
        size_(layer.rows * layer.patch()),
        grad_bias_(grad_bias),
        sq_norms_(sq_norms),
        squares_(sq_norms.defined() ? grid.parts() * layer.N : 0, 0.0),
        bias_squares_(sq_norms.defined() && sq_norms.size(0) > 1 ? squares_.size() : 0, 0.0),
        bias_(grad_bias.defined() && grad_bias.numel() ? grid.sample_parts * layer.rows : 0, 0.0) {
    if (!grad_weight.defined()) return;
    copies_ = at::empty({grid.sample_parts - 1, size_}, grad_weight.options());
    weight_ = grad_weight.mutable_data_ptr<acc_t>(), copy_ = copies_.mutable_data_ptr<acc_t>();
  }

  Sums<acc_t> of(int64_t part) {
    const int64_t sample_part = part / grid_.row_parts;
    Sums<acc_t> sums;
    if (weight_) sums.weight = sample_part ? copy_ + (sample_part - 1) * size_ : weight_;
    if (!squares_.empty()) sums.sq_sums = squares_.data() + part * layer_.N;
    if (!bias_squares_.empty()) sums.bias_sq_sums = bias_squares_.data() + part * layer_.N;
    if (!bias_.empty()) sums.bias = bias_.data() + sample_part * layer_.rows;
    return sums;
  }

  void write(bool squares_in_double = false) const {
    if (weight_) add_copies(weight_, copy_, size_, grid_.sample_parts - 1);
    if (sq_norms_.defined()) {
      auto sums = sum_of_parts(squares_, grid_.parts(), layer_.N);
      if (!squares_in_double) redo_underflowed<acc_t>(layer_, sums);
      write_row<acc_t>(sq_norms_, 0, sums);
    }
    write_bias();
  }

  void write_bias() const {
    if (!bias_squares_.empty()) write_row<acc_t>(sq_norms_, 1, sum_of_parts(bias_squares_, grid_.parts(), layer_.N));
    if (bias_.empty()) return;
    const auto sums = sum_of_parts(bias_, grid_.sample_parts, layer_.rows);
    std::copy(sums.begin(), sums.end(), grad_bias_.mutable_data_ptr<acc_t>());
  }

 private:
  const Layer& layer_;
  const Grid grid_;
  const int64_t size_;
  const Tensor grad_bias_, sq_norms_;
  Tensor copies_;
  acc_t *weight_ = nullptr, *copy_ = nullptr;
  std::vector<double> squares_, bias_squares_, bias_;
};

// |sum_t b_nt|^2 for the samples and rows of a share.
template <class acc_t, class Layer>
void bias_sweep(const Layer& layer, const Share& share, const Sums<acc_t>& to) {
  constexpr int64_t kWide = 512;
  acc_t sums[kWide];
  for (int64_t n = share.sample_begin; n < share.sample_end; ++n)
    for (int64_t row = share.row_begin; row < share.row_end; row += kWide) {
      const int64_t rows = std::min(kWide, share.row_end - row);
      std::fill(sums, sums + rows, acc_t(0));
      add_grads(sums, layer, Chunk{n, 1, 0, layer.height, 0, layer.width, true, true}, n, row, rows);
      finish_bias(to, sums, n, row, rows);
    }
}

// Row 1 of sq_norms, and grad_bias [O], as far as they are defined: for algorithms that do not read the grads by
// chunks.
template <class acc_t, class Layer>
void bias_pass(const Layer& layer, const acc_t* scale, const Tensor& grad_bias, const Tensor& sq_norms) {
  constexpr double kCostOfAnElement = 8;  // in FLOP: bound by memory
  const int64_t N = layer.N, rows = layer.rows;
  const double elements = double(N) * double(layer.height * layer.width) * double(rows);
  const Grid grid = make_grid(N, rows, kCostOfAnElement * elements, 8.0 * double(rows));
  Parts<acc_t, Layer> parts(layer, grid, {}, grad_bias, sq_norms);
  for_parts(grid.parts(), [&](int64_t part) {
    Sums<acc_t> sums = parts.of(part);
    sums.scale = scale;
    bias_sweep(layer, grid.share(part, N, rows), sums);
  });
  parts.write_bias();
}

template <class acc_t, class Layer>
Grid grid_of(const Layer& layer, bool weight) {
  const double bytes = weight ? double(layer.rows * layer.patch()) * sizeof(acc_t) : 0;
  return make_grid(layer.N, layer.rows, flop_of(layer), bytes);
}

// Results as of Parts: with sq_norms alone, direct.
template <class acc_t, class Layer>
void fused_pass(const Layer& layer, const acc_t* scale, int64_t scale_every, const Tensor& grad_weight,
                const Tensor& grad_bias, const Tensor& sq_norms) {
  const Grid grid = grid_of<acc_t>(layer, grad_weight.defined());
  Parts<acc_t, Layer> parts(layer, grid, grad_weight, grad_bias, sq_norms);
  for_parts(grid.parts(), [&](int64_t part) {
    Sums<acc_t> sums = parts.of(part);
    sums.scale = scale, sums.scale_every = scale_every;
    Sweep<acc_t, Layer>(layer, grid.share(part, layer.N, layer.rows), sums).run();
  });
  parts.write();
}

// pass(activations, grad_output, scale) of the samples whose factor is not 0, to write `weight`: in one sum over all
// positions, 0 times nan is nan.
template <class acc_t, class Pass>
void over_kept(const Tensor& activations, const Tensor& grad_output, const acc_t* scale, const Tensor& weight,
               const Pass& pass) {
  const int64_t N = activations.size(0), kept = scale ? N - std::count(scale, scale + N, acc_t(0)) : N;
  if (kept == N) return pass(activations, grad_output, scale);
  if (kept == 0) return void(weight.zero_());
  const Tensor index = at::detail::empty_cpu({kept}, at::kLong);
  int64_t* to = index.mutable_data_ptr<int64_t>();
  std::vector<acc_t> factors;
  for (int64_t n = 0; n < N; ++n)
    if (scale[n] != 0) *to++ = n, factors.push_back(scale[n]);
  pass(at::index_select(activations, 0, index), at::index_select(grad_output, 0, index), factors.data());
}

// Of two weights with the same grads: `first` has the bias, if any. See Sweep for where both may go together.
template <class acc_t, class Layer>
void fused_pair(const Layer& first, const Layer& second, const Tensor& grad_bias, const std::array<Tensor, 2>& weights,
                const std::array<Tensor, 2>& sq_norms) {
  const Grid grid = grid_of<acc_t>(second, true);
  Parts<acc_t, Layer> of_first(first, grid, weights[0], grad_bias, sq_norms[0]);
  Parts<acc_t, Layer> of_second(second, grid, weights[1], {}, sq_norms[1]);
  for_parts(grid.parts(), [&](int64_t part) {
    const Share share = grid.share(part, first.N, first.rows);
    Sweep<acc_t, Layer> beside(second, share, of_second.of(part));
    Sweep<acc_t, Layer>(first, share, of_first.of(part), &beside).run();
  });
  of_first.write(), of_second.write();
}

// f(acc_t{}), for dtypes as of accumulator_of.
template <class F>
void as_accumulator(at::ScalarType dtype, const F& f) {
  if (dtype == at::kDouble)
    f(double{});
  else
    f(float{});
}

// Not through the dispatcher, which takes longer than a small layer's arithmetic.
inline Tensor results(at::IntArrayRef sizes, at::ScalarType dtype, bool zero) {
  const Tensor made = at::detail::empty_cpu(sizes, dtype);
  return zero ? made.zero_() : made;
}

// The operator around a pass: results of the right dtypes, halves accumulated in float and rounded once.
// pass(acc_t{}, scale or null, grad_weight, grad_bias, sq_norms); called only if there is something to add up.
template <class Pass>
Fused fused_results(const Tensor& like, at::IntArrayRef weight_sizes, int64_t N, const std::optional<Tensor>& scale,
                    bool bias, bool empty, const Pass& pass) {
  const auto acc_dtype = accumulator_of(like);
  const auto make = [&](at::IntArrayRef sizes) { return results(sizes, acc_dtype, empty); };
  Tensor weight = make(weight_sizes), grad_bias = make({bias ? weight_sizes[0] : 0}),
         sq_norms = make({1 + int64_t(bias), N});
  if (!empty) {
    Tensor factors;
    if (scale) factors = scale->to(acc_dtype).contiguous();
    as_accumulator(acc_dtype, [&](auto zero) {
      pass(zero, scale ? factors.const_data_ptr<decltype(zero)>() : nullptr, weight, grad_bias, sq_norms);
    });
  }
  if (like.scalar_type() != acc_dtype)
    weight = weight.to(like.scalar_type()), grad_bias = grad_bias.to(like.scalar_type());
  return {weight, grad_bias, sq_norms};
}

template <class Pass>
Tensor norm_results(const Tensor& like, int64_t N, bool bias, bool empty, const Pass& pass) {
  const auto acc_dtype = accumulator_of(like);
  const Tensor sq_norms = results({1 + int64_t(bias), N}, acc_dtype, empty);
  if (!empty) as_accumulator(acc_dtype, [&](auto zero) { pass(zero, sq_norms); });
  return sq_norms;
}

}  // namespace torchgradx::cpu
