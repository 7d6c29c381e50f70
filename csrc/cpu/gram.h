// gram: |G_n|^2 = sum over positions s, t of (a_s . a_t)(b_s . b_t), for T small against I and O. Cost N T^2 (I + O).
// Both Gram matrices are computed in squares of kSpan positions with the same register tiles, the upper triangle of
// squares only; a square of each and its packed operands are all there is in memory: about 1/2 MiB a thread (and, where
// several weights share the grads, these's square of each sample). A sum much
// smaller than its terms has lost its digits, as has one with a row whose own square underflowed: such samples are done
// again by direct.
#pragma once

#include "direct.h"
#include "passes.h"

namespace torchgradx::cpu {

constexpr int64_t kSpan = 128;      // positions along a square
constexpr int64_t kChannels = 256;  // packed at a time

// Fitted to measurements (one AVX-512 core, 175 GFLOP/s); only the ratio of the two matters, and that is alike
// elsewhere.
inline double gram_nanoseconds(int64_t T, int64_t channels) {
  return 150 + double(channels) * (1.5 + double(T) * double(T + 20) / 150);
}
// What fused takes longer than the plain weight gradient: a tile's end costs about as much as twelve positions, or, of
// chunks of several samples where there are registers for a series, as two and a half.
template <class acc_t>
double tile_end_nanoseconds(int64_t I, int64_t O, int64_t samples, double more_positions = 0) {
  const double positions = samples > 1 && kernels<acc_t>().series_rows ? 2.5 : 12;
  return (positions + more_positions) * double(I) * double(O) / 87;
}

// Squares of the Gram matrix of one operand. Packed: [run of positions][channel][two vectors of positions].
template <class acc_t>
class GramSquare {
 public:
  GramSquare(int64_t positions, const Kernels<acc_t>& kernels)
      : kernels_(kernels),
        run_(2 * kernels.lanes),
        panels_(run_, kernels.max_rows),
        span_(std::min(kSpan, round_up(positions, run_))),
        runs_(span_ / run_),
        tile_size_(panels_.rows * run_) {}

  int64_t size() const {
    return runs_ * runs_ * panels_.count * tile_size_;
  }
  int64_t span() const {
    return span_;
  }
  int64_t runs() const {
    return runs_;
  }

  // square[s, t] for s in [s0, s0 + span), t in [t0, t0 + span); pack(out, first channel, channels, first position,
  // positions)
  template <class Pack>
  void compute(int64_t channels, int64_t T, int64_t s0, int64_t t0, acc_t* packed, acc_t* square,
               const Pack& pack) const {
    const int64_t side = runs_ * run_ * kChannels;
    for (int64_t c = 0; c < channels; c += kChannels) {
      const int64_t depth = std::min(kChannels, channels - c);
      for (int64_t k = 0; k < (s0 == t0 ? 1 : 2); ++k) {
        const int64_t first = k ? s0 : t0;
        for (int64_t r = 0; r < runs_ && first + r * run_ < T; ++r)
          pack(packed + k * side + r * run_ * depth, c, depth, first + r * run_, std::min(run_, T - first - r * run_));
      }
      tiles(depth, T, s0, t0, packed, packed + (s0 == t0 ? 0 : side), square, c > 0);
    }
  }

  // f(offset into the square, s, t, valid columns) for each row of each tile that holds something of the upper triangle
  template <class Row>
  void each_row(int64_t T, int64_t s0, int64_t t0, const Row& f) const {
    each_tile(T, s0, t0, [&](int64_t index, int64_t s, int64_t rows, int64_t t) {
      for (int64_t row = 0; row < rows; ++row) f(index * tile_size_ + row * run_, s + row, t, std::min(run_, T - t));
    });
  }

 private:
  template <class F>
  void each_tile(int64_t T, int64_t s0, int64_t t0, const F& f) const {
    for (int64_t r = 0; r < runs_ && t0 + r * run_ < T; ++r)
      for (int64_t q = 0; q < (s0 == t0 ? r + 1 : runs_) && s0 + q * run_ < T; ++q)
        for (int64_t p = 0; p < panels_.count; ++p) {
          const int64_t s = s0 + q * run_ + p * panels_.rows;
          const int64_t rows = std::min(p + 1 < panels_.count ? panels_.rows : panels_.last, T - s);
          if (rows > 0) f((r * runs_ + q) * panels_.count + p, s, rows, t0 + r * run_);
        }
  }

  void tiles(int64_t depth, int64_t T, int64_t s0, int64_t t0, const acc_t* right, const acc_t* left, acc_t* square,
             bool resume) const {
    each_tile(T, s0, t0, [&](int64_t index, int64_t s, int64_t rows, int64_t t) {
      Tile<acc_t> job{};
      job.x = right + (t - t0) * depth, job.x_along = run_, job.height = 1, job.width = depth;
      job.g = left + (s - s0) / run_ * run_ * depth + (s - s0) % run_, job.g_along = run_;
      job.carry = square + index * tile_size_, job.resume = resume, job.suspend = true;
      kernels_.tile[T - t > kernels_.lanes][rows](job);
    });
  }

  const Kernels<acc_t>& kernels_;
  const int64_t run_;
  const Panels panels_;
  const int64_t span_, runs_, tile_size_;
};

struct GramSum {
  double sum = 0, magnitude = 0;
  double faint = 0;  // what a row whose own square underflowed might have added, squared

  void meet(double a, double b) {  // a row's squares
    if (std::min(a, b) < 1e-30) faint = std::max(faint, 1e-30 * std::max(a, b));
  }
  bool doubtful() const {
    return !(sum > 1e-4 * magnitude) || faint > 1e-14 * sum || !std::isfinite(sum);
  }
};

// One sample, square by square. source.activations computes one, source.pack_grads packs as GramSquare::compute has it.
template <class acc_t, class Source>
GramSum gram_sum(const Source& source, int64_t n, int64_t T, int64_t I, int64_t O) {
  const Kernels<acc_t>& k = kernels<acc_t>();
  const GramSquare<acc_t> square(T, k);
  Workspace<acc_t>& workspace = Workspace<acc_t>::mine();
  acc_t* const packed = workspace.panels.get(2 * kSpan * kChannels);  // for squares of any number of positions
  acc_t *const of_a = workspace.columns.get(square.size()), *const of_b = workspace.carry.get(square.size());
  const auto pack_grads = [&](acc_t* to, int64_t c, int64_t depth, int64_t t, int64_t count) {
    source.pack_grads(to, n, c, depth, t, count);
  };
  GramSum result;
  for (int64_t t0 = 0; t0 < T; t0 += square.span())
    for (int64_t s0 = 0; s0 <= t0; s0 += square.span()) {
      source.activations(square, n, T, I, s0, t0, packed, of_a);
      square.compute(O, T, s0, t0, packed, of_b, pack_grads);
      double twice = 0, twice_magnitude = 0;
      square.each_row(T, s0, t0, [&](int64_t offset, int64_t s, int64_t t, int64_t columns) {
        const bool on_diagonal = s >= t && s < t + columns;
        double* const sum = s >= t ? &result.sum : &twice;
        k.products(of_a + offset, of_b + offset, columns, sum, s >= t ? &result.magnitude : &twice_magnitude);
        if (on_diagonal) result.meet(of_a[offset + s - t], of_b[offset + s - t]);
      });
      result.sum += 2 * twice, result.magnitude += 2 * twice_magnitude;
    }
  return result;
}

// Row 0 of sq_norms; `layer` is the sweep's, for samples that gram cannot do
template <class acc_t, class Source, class Layer>
void gram_pass(const Source& source, const Layer& layer, int64_t T, const Tensor& sq_norms) {
  const int64_t N = layer.N;
  std::vector<double> sums(N, 0.0);
  if (layer.patch() == 0 || layer.rows == 0) return write_row<acc_t>(sq_norms, 0, sums);  // an empty sum
  const double flop = double(T) * T * (double(layer.patch()) + double(layer.rows));
  at::parallel_for(0, N, std::max<int64_t>(1, int64_t(2e5 / std::max(flop, 1.0))), [&](int64_t begin, int64_t end) {
    for (int64_t n = begin; n < end; ++n) {
      const GramSum gram = source.sum(n, T, layer.patch(), layer.rows);
      const bool doubtful = gram.doubtful() || underflowed<acc_t>(gram.sum);
      sums[n] = doubtful ? 0 : gram.sum;
      if (doubtful && !layer.vanishes(n)) {
        Sums<acc_t> again;
        again.sq_sums = sums.data(), again.wide = true;
        Sweep<acc_t, Layer>(layer, {n, n + 1, 0, layer.rows}, again).run();
      }
    }
  });
  write_row<acc_t>(sq_norms, 0, sums);
}

}  // namespace torchgradx::cpu
