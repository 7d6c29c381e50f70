// One thread's part of an affine layer: for each sample the sums over positions of g and of g f, by feature, which are
// the gradients of its bias and weight; their squares; their weighted totals; and grad_input from the same lines.
#pragma once

#include "affine_layer.h"
#include "passes.h"

namespace torchgradx::cpu {

template <class acc_t>
struct AffineResults {
  int64_t N = 0;                 // samples
  double* sq_sums = nullptr;     // [2, N]: weight, bias
  acc_t* totals = nullptr;       // [2, C]: of the weight's and the bias's gradients, or null
  const acc_t* scale = nullptr;  // [N], or null
  acc_t* unfinished = nullptr;   // [N, 2, C]: sums of samples whose positions are shared out, or null
  acc_t* of_weight = nullptr;    // [N, C]: each sample's, or null
  acc_t* of_bias = nullptr;      // likewise
};

template <class acc_t>
struct AffineLayer {
  AffineLayer(const Tensor& input,        // [N, T, G, K]
              const Tensor& grad_output,  // [N, T, G, K]
              const std::optional<Tensor>& mean, const std::optional<Tensor>& rstd, Feature feature)
      : N(input.size(0)),
        T(input.size(1)),
        G(input.size(2)),
        K(input.size(3)),
        feature(feature),
        rows(lines_are_rows(input, feature == Feature::kByRow)),
        mean(mean, 0),
        rstd(rstd, 1),
        dtype(input.scalar_type()),
        x(input, rows),
        g(grad_output, rows) {
    if (sizeof(acc_t) != input.element_size()) x.packs = g.packs = x.packs || g.packs;
  }

  int64_t C() const {
    return G * K;
  }
  bool packs() const {
    return x.packs || g.packs;
  }

  const int64_t N, T, G, K;
  const Feature feature;
  const bool rows;
  const Statistic<acc_t> mean, rstd;
  const at::ScalarType dtype;
  LineSource<acc_t> x, g;
  bool rows_are_samples = false;  // a LayerNorm's with T = 1, given as one sample of N positions

  // for grad_input, if it is wanted
  const acc_t* weight = nullptr;  // [G, K]
  bool frozen = false;            // statistics are constants
  bool centred = true;
  char* out = nullptr;
  Operand out_strides{};
};

// |values|^2, added to total [count] times scale if there is one; in double where float's squares underflow.
template <class acc_t>
double settle(const acc_t* values, int64_t count, acc_t scale, acc_t* total) {
  const double squares = kernels<acc_t>().settle(values, count, scale, total);
  return underflowed<acc_t>(squares) ? kernels<acc_t>().native.sq_sum(values, count, 1) : squares;
}

// One sample's gradients of columns [first, first + count).
template <class acc_t>
void finish_sample(int64_t n, int64_t first, int64_t count, int64_t C, const acc_t* sums, const acc_t* products,
                   const AffineResults<acc_t>& results) {
  const acc_t scale = results.scale ? results.scale[n] : acc_t(1);
  acc_t* const total = results.totals && scale != 0 ? results.totals + first : nullptr;
  results.sq_sums[n] += settle(products, count, scale, total);
  results.sq_sums[results.N + n] += settle(sums, count, scale, total ? total + C : nullptr);
  if (results.of_weight) std::copy(products, products + count, results.of_weight + n * C + first);
  if (results.of_bias) std::copy(sums, sums + count, results.of_bias + n * C + first);
}

// Adds sums [2 * columns] to the whole, which follows them, after every kSummed of their terms.
template <class acc_t>
void end_part(acc_t* sums, int64_t columns, int64_t first, int64_t count) {
  if (first / kSummed == (first + count) / kSummed) return;
  for (int64_t k = 0; k < 2 * columns; ++k) sums[2 * columns + k] += sums[k], sums[k] = 0;
}

template <class acc_t>
class AffineSweep {
 public:
  AffineSweep(const AffineLayer<acc_t>& layer, const Part& part, const AffineResults<acc_t>& results)
      : layer_(layer),
        part_(part),
        results_(results),
        first_(part.g0 * layer.K),
        columns_((part.g1 - part.g0) * layer.K),
        kernels_((layer.packs() ? kernels<acc_t>().native : kernels<acc_t>().of(layer.dtype)).lines),
        narrows_(layer.packs() && c10::elementSize(layer.dtype) != sizeof(acc_t)),
        itemsize_(layer.packs() ? sizeof(acc_t) : c10::elementSize(layer.dtype)) {
    acc_t* const scratch = scratch_.columns.get(8 * columns_);
    acc_t** const each[] = {&mean_, &rstd_, &shift_, &slope_, &sums_, &products_};
    for (int64_t k = 0; k < 6; ++k) *each[k] = scratch + k * columns_;
  }

  void run() {
    for (int64_t n = part_.n0; n < part_.n1; ++n) {
      if (!layer_.rows)
        sample_by_planes(n);
      else if (layer_.rows_are_samples)
        samples_by_rows();
      else
        sample_by_rows(n);
      if (results_.totals) end_part(results_.totals, layer_.C(), n, 1);
    }
  }

 private:
  void finish(int64_t n) {
    if (!results_.unfinished) return finish_sample(n, first_, columns_, layer_.C(), sums_, products_, results_);
    acc_t* const mine = results_.unfinished + n * 2 * layer_.C() + first_;
    std::copy(products_, products_ + columns_, mine);
    std::copy(sums_, sums_ + columns_, mine + layer_.C());
  }

  // ---- lines of features ----

  void sample_by_rows(int64_t n) {
    const int64_t used = (layer_.T < kSummed ? 2 : 4) * columns_;  // products_ too, and the whole of both
    std::fill(sums_, sums_ + used, acc_t(0));
    const bool by_row = layer_.feature == Feature::kByRow;
    if (layer_.feature == Feature::kByColumn) spread_statistics(n, part_.g0, part_.g1);
    each_rows(n, [&](const Lines<acc_t>& lines, int64_t t) {
      end_part(sums_, columns_, t, lines.rows);
      if (layer_.out && by_row) return layer_norm(lines, n, t, {sums_, products_, ones_}, nullptr, nullptr);
      // The gradient first: it walks row by row, which is how memory is read fastest.
      if (layer_.out && layer_.frozen) gradient(lines, n, part_.g0, t, 0, layer_.out_strides.x, true);
      kernels_.columns[int(layer_.feature)](lines, sums_, products_);
    });
    for (int64_t k = 2 * columns_; k < used; ++k) sums_[k - 2 * columns_] += sums_[k];
    finish(n);
    if (!layer_.out || layer_.frozen || by_row) return;
    for (int64_t g = part_.g0; g < part_.g1; ++g) group_coefficients(g);
    each_rows(n, [&](const Lines<acc_t>& lines, int64_t t) {
      gradient(lines, n, part_.g0, t, 0, layer_.out_strides.x, true);
    });
  }

  // Sums of a row are a sample's, sums by column the totals.
  void samples_by_rows() {
    each_rows(0, [&](const Lines<acc_t>& lines, int64_t t) {
      acc_t* const squares = row_sums_ + 2 * row_count_;
      std::fill(squares, squares + 2 * row_count_, acc_t(0));
      if (layer_.out) {
        acc_t* const totals = results_.totals;
        end_part(totals, columns_, t, lines.rows);
        layer_norm(lines, 0, t, {totals + columns_, totals, results_.scale ? results_.scale + t : ones_}, squares,
                   squares + row_count_);
      } else {
        std::fill(row_sums_, row_sums_ + 2 * row_count_, acc_t(0));
        kernels_.dots[0](lines, nullptr, {row_sums_, row_sums_ + row_count_, squares, squares + row_count_});
      }
      for (int64_t r = 0; r < lines.rows; ++r) {
        double bias = squares[r], weight = squares[row_count_ + r];
        if (underflowed<acc_t>(bias) || underflowed<acc_t>(weight)) one_row_again(lines, r, &weight, &bias);
        results_.sq_sums[t + r] += weight, results_.sq_sums[results_.N + t + r] += bias;
      }
    });
  }

  void one_row_again(Lines<acc_t> lines, int64_t r, double* weight, double* bias) {
    std::fill(sums_, sums_ + 2 * columns_, acc_t(0));
    lines.x = static_cast<const char*>(lines.x) + r * lines.x_along * itemsize_;
    lines.g = static_cast<const char*>(lines.g) + r * lines.g_along * itemsize_;
    lines.mean += r, lines.rstd += r, lines.rows = 1;
    kernels_.columns[int(Feature::kByRow)](lines, sums_, products_);
    const auto& native = kernels<acc_t>().native;
    *weight = native.sq_sum(products_, columns_, 1), *bias = native.sq_sum(sums_, columns_, 1);
  }

  void layer_norm(const Lines<acc_t>& lines, int64_t n, int64_t t, const ColumnSums<acc_t>& sums, acc_t* squares,
                  acc_t* sq_products) {
    acc_t *const shift = row_sums_, *const slope = row_sums_ + row_count_;
    std::fill(shift, shift + 2 * row_count_, acc_t(0));  // slope too
    const acc_t* const weight = layer_.weight + first_;
    kernels_.dots[0](lines, weight, {shift, slope, squares, sq_products});
    const acc_t mean = acc_t(1) / acc_t(columns_);
    for (int64_t r = 0; r < lines.rows; ++r) shift[r] *= layer_.centred ? mean : acc_t(0), slope[r] *= mean;
    write(n, 0, t, 0, layer_.out_strides.x, lines,
          [&](void* out, int64_t along) { kernels_.layer_norm(lines, {out, along, weight, shift, slope}, sums); });
  }

  // f(lines, first position); statistics by row are at hand for them, those by column for the sample
  template <class F>
  void each_rows(int64_t n, const F& f) {
    row_count_ = rows_in_cache<acc_t>(columns_, layer_.T);
    acc_t* const by_row = scratch_.rows.get(7 * row_count_);
    acc_t *const mean = by_row, *const rstd = mean + row_count_, *const ones = rstd + row_count_;
    std::fill(ones, ones + row_count_, acc_t(1));
    ones_ = ones, row_sums_ = ones + row_count_;
    each_row_block(part_.t0, part_.t1, row_count_, [&](int64_t t, int64_t rows) {
      const auto x = layer_.x.rows(n, t, rows, part_.g0, part_.g1, scratch_.x);
      const auto g = layer_.g.rows(n, t, rows, part_.g0, part_.g1, scratch_.g);
      Lines<acc_t> lines{x.data, g.data, x.along, g.along, rows, columns_, mean_, rstd_};
      if (layer_.feature == Feature::kByRow) {
        for (int64_t r = 0; r < rows; ++r) mean[r] = layer_.mean.at(n, t + r, 0), rstd[r] = layer_.rstd.at(n, t + r, 0);
        lines.mean = mean, lines.rstd = rstd;
      }
      f(lines, t);
    });
  }

  // ---- lines of positions ----

  void sample_by_planes(int64_t n) {
    const bool joint = layer_.x.joint(layer_.G) && layer_.g.joint(layer_.G);
    const int64_t of_group = layer_.K * layer_.T * int64_t(sizeof(acc_t));
    const int64_t groups = joint ? std::max<int64_t>(1, kPlaneBytes / std::max<int64_t>(1, of_group)) : 1;
    spread_statistics(n, part_.g0, part_.g1);
    std::fill(sums_, sums_ + 2 * columns_, acc_t(0));  // products_ too
    for (int64_t g0 = part_.g0; g0 < part_.g1; g0 += groups) {
      const int64_t g1 = std::min(part_.g1, g0 + groups);
      each_planes(n, g0, g1, [&](const Lines<acc_t>& lines, int64_t c, int64_t) {
        kernels_.dots[layer_.feature == Feature::kNegative](lines, nullptr,
                                                            {sums_ + c, products_ + c, nullptr, nullptr});
      });
      if (!layer_.out) continue;
      if (!layer_.frozen)
        for (int64_t g = g0; g < g1; ++g) group_coefficients(g);
      each_planes(n, g0, g1, [&](const Lines<acc_t>& lines, int64_t c, int64_t t) {
        const int64_t along = layer_.K == 1 ? layer_.out_strides.y : layer_.out_strides.c;
        gradient(lines, n, part_.g0 + c / layer_.K, t, c % layer_.K, along, false);
      });
    }
    finish(n);
  }

  // f(lines, their first feature within the part, first position)
  template <class F>
  void each_planes(int64_t n, int64_t g0, int64_t g1, const F& f) {
    const int64_t features = (g1 - g0) * layer_.K, first = (g0 - part_.g0) * layer_.K;
    each_plane_block<acc_t>(
        features, layer_.T, layer_.packs(), [&](int64_t k, int64_t count, int64_t t, int64_t length) {
          const int64_t g = g0 + k / layer_.K, inside = k % layer_.K, c = first + k;
          const auto x = layer_.x.planes(n, g, inside, count, t, length, scratch_.x);
          const auto grads = layer_.g.planes(n, g, inside, count, t, length, scratch_.g);
          f(Lines<acc_t>{x.data, grads.data, x.along, grads.along, count, length, mean_ + c, rstd_ + c}, c, t);
        });
  }

  // ---- both ----

  void spread_statistics(int64_t n, int64_t g0, int64_t g1) {
    for (int64_t g = g0; g < g1; ++g) {
      const int64_t c = (g - part_.g0) * layer_.K;
      std::fill(mean_ + c, mean_ + c + layer_.K, layer_.mean.at(n, 0, g));
      std::fill(rstd_ + c, rstd_ + c + layer_.K, layer_.rstd.at(n, 0, g));
    }
  }

  // Means over the group of w g and w g xhat, from the sums by feature.
  void group_coefficients(int64_t g) {
    const int64_t c = (g - part_.g0) * layer_.K;
    const acc_t* const weight = layer_.weight + first_ + c;
    double shift = 0, slope = 0;
    for (int64_t k = 0; k < layer_.K; ++k)
      shift += double(weight[k]) * sums_[c + k], slope += double(weight[k]) * products_[c + k];
    const double count = double(layer_.K) * double(layer_.T);
    std::fill(shift_ + c, shift_ + c + layer_.K, layer_.centred ? acc_t(shift / count) : acc_t(0));
    std::fill(slope_ + c, slope_ + c + layer_.K, acc_t(slope / count));
  }

  void gradient(const Lines<acc_t>& lines, int64_t n, int64_t g, int64_t t, int64_t k, int64_t along, bool by_column) {
    const int64_t c = (g - part_.g0) * layer_.K + k;
    const auto& kernel = layer_.feature == Feature::kNegative ? kernels_.prelu
                         : layer_.frozen                      ? kernels_.frozen
                                                              : kernels_.normalised;
    write(n, g, t, k, along, lines, [&](void* out, int64_t out_along) {
      kernel[by_column](lines, {out, out_along, layer_.weight + first_ + c, shift_ + c, slope_ + c});
    });
  }

  // f(where these lines of grad_input go, their stride): by way of scratch where they have to be narrowed
  template <class F>
  void write(int64_t n, int64_t g, int64_t t, int64_t k, int64_t along, const Lines<acc_t>& lines, const F& f) {
    const Operand& o = layer_.out_strides;
    char* const out = layer_.out + (n * o.n + g * o.y + t * o.x + k * o.c) * o.itemsize;
    if (!narrows_) return f(out, along);
    acc_t* const wide = scratch_.out.get(lines.rows * lines.columns);
    f(wide, lines.columns);
    const auto narrow = kernels<acc_t>().of(layer_.dtype).lines.narrow;
    for (int64_t r = 0; r < lines.rows; ++r)
      narrow(out + r * along * o.itemsize, wide + r * lines.columns, lines.columns);
  }

  const AffineLayer<acc_t>& layer_;
  const Part part_;
  const AffineResults<acc_t> results_;
  const int64_t first_, columns_;
  const LineKernels<acc_t>& kernels_;
  const bool narrows_;
  const int64_t itemsize_;  // of what the kernels read
  Workspace<acc_t>& scratch_ = Workspace<acc_t>::mine();
  acc_t *sums_, *products_, *mean_, *rstd_, *shift_, *slope_;  // [columns]
  int64_t row_count_ = 0;
  acc_t *ones_ = nullptr, *row_sums_ = nullptr;  // [rows], [4, rows]
};

}  // namespace torchgradx::cpu
