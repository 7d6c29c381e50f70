// moments: mean and 1 / sqrt(variance + eps) of each position's or each group's features. Two stages, the second about
// the first's mean: the difference of two large sums would leave nothing of a small variance.
#include "affine_layer.h"
#include "passes.h"

#include <torch/library.h>

namespace torchgradx::cpu {
namespace {

template <class acc_t>
class Moments {
 public:
  Moments(const Tensor& input,  // [N, T, G, K]
          double eps, bool centred, bool over_positions,
          const Tensor& mean,  // [N, T or 1, G], or [0]
          const Tensor& rstd)  // [N, T or 1, G]
      : T_(input.size(1)),
        G_(input.size(2)),
        K_(input.size(3)),
        eps_(eps),
        centred_(centred),
        over_positions_(over_positions),
        rows_(lines_are_rows(input, !over_positions)),
        source_(input, rows_),
        kernels_((source_.packs ? kernels<acc_t>().native : kernels<acc_t>().of(input.scalar_type())).lines),
        mean_(centred ? mean.mutable_data_ptr<acc_t>() : nullptr),
        rstd_(rstd.mutable_data_ptr<acc_t>()) {}

  void run(const Part& part) const {
    for (int64_t n = part.n0; n < part.n1; ++n) {
      if (over_positions_)
        groups(n, part.g0, part.g1);
      else
        for (int64_t g = part.g0; g < part.g1; ++g) positions(n, g, part.t0, part.t1);
    }
  }

 private:
  // Statistics [count], to stand `along` apart, of sets of `size` elements: pass(mean, sums, squares) adds to the last
  // two what there is about `mean`.
  template <class Pass>
  void two_stages(int64_t index, int64_t along, int64_t count, double size, const Pass& pass) const {
    acc_t *const mean = scratch_.rows.get(3 * count), *const sums = mean + count, *const squares = sums + count;
    std::fill(mean, mean + 3 * count, acc_t(0));
    pass(mean, sums, squares);
    if (centred_) {
      for (int64_t k = 0; k < count; ++k) mean[k] = acc_t(sums[k] / size);
      std::fill(sums, sums + 2 * count, acc_t(0));
      pass(mean, sums, squares);
    }
    for (int64_t k = 0; k < count; ++k) {
      const double excess = centred_ ? double(sums[k]) * sums[k] / size : 0;  // by the rounding of `mean`
      if (mean_) mean_[index + k * along] = mean[k] + acc_t(sums[k] / size);
      rstd_[index + k * along] = acc_t(1 / std::sqrt((squares[k] - excess) / size + eps_));
    }
  }

  void positions(int64_t n, int64_t g, int64_t t0, int64_t t1) const {
    each_row_block(t0, t1, rows_in_cache<acc_t>(K_, T_), [&](int64_t t, int64_t rows) {
      const auto view = source_.rows(n, t, rows, g, g + 1, scratch_.x);
      two_stages((n * T_ + t) * G_ + g, G_, rows, double(K_), [&](const acc_t* mean, acc_t* sums, acc_t* squares) {
        kernels_.moments({view.data, nullptr, view.along, 0, rows, K_, mean, nullptr}, sums, squares);
      });
    });
  }

  void groups(int64_t n, int64_t g0, int64_t g1) const {
    const int64_t of_group = K_ * T_ * int64_t(sizeof(acc_t)),
                  plane_groups = kPlaneBytes / std::max<int64_t>(1, of_group);
    const int64_t together = rows_ ? g1 - g0 : source_.joint(G_) ? std::max<int64_t>(1, plane_groups) : 1;
    for (int64_t g = g0; g < g1; g += together) some_groups(n, g, std::min(g1, g + together));
  }

  // By feature first, whose sums then add up to their group's.
  void some_groups(int64_t n, int64_t g0, int64_t g1) const {
    const int64_t count = (g1 - g0) * K_;
    acc_t *const means = scratch_.columns.get(3 * count), *const sums = means + count, *const squares = sums + count;
    const auto pass = [&](const acc_t* mean, acc_t* group_sums, acc_t* group_squares) {
      for (int64_t c = 0; c < count; ++c) means[c] = mean[c / K_];
      std::fill(sums, sums + 2 * count, acc_t(0));  // squares too
      if (rows_)
        by_rows(n, g0, g1, means, sums, squares);
      else
        by_planes(n, g0, count, means, sums, squares);
      for (int64_t c = 0; c < count; ++c) group_sums[c / K_] += sums[c], group_squares[c / K_] += squares[c];
    };
    two_stages(n * G_ + g0, 1, g1 - g0, double(K_) * double(T_), pass);
  }

  void by_rows(int64_t n, int64_t g0, int64_t g1, const acc_t* means, acc_t* sums, acc_t* squares) const {
    const int64_t columns = (g1 - g0) * K_;
    each_row_block(0, T_, rows_in_cache<acc_t>(columns, T_), [&](int64_t t, int64_t rows) {
      const auto view = source_.rows(n, t, rows, g0, g1, scratch_.x);
      kernels_.column_moments({view.data, nullptr, view.along, 0, rows, columns, means, nullptr}, sums, squares);
    });
  }

  void by_planes(int64_t n, int64_t g0, int64_t features, const acc_t* means, acc_t* sums, acc_t* squares) const {
    each_plane_block<acc_t>(features, T_, source_.packs, [&](int64_t k, int64_t rows, int64_t t, int64_t length) {
      const auto view = source_.planes(n, g0 + k / K_, k % K_, rows, t, length, scratch_.x);
      kernels_.moments({view.data, nullptr, view.along, 0, rows, length, means + k, nullptr}, sums + k, squares + k);
    });
  }

  const int64_t T_, G_, K_;
  const double eps_;
  const bool centred_, over_positions_, rows_;
  const LineSource<acc_t> source_;
  const LineKernels<acc_t>& kernels_;
  acc_t *const mean_, *const rstd_;
  Workspace<acc_t>& scratch_ = Workspace<acc_t>::mine();
};

std::tuple<Tensor, Tensor> moments(const Tensor& input, double eps, bool centred, bool over_positions) {
  check_operand(input, "input", 4, "[N, T, G, K]");
  const int64_t N = input.size(0), T = input.size(1), G = input.size(2), K = input.size(3);
  const auto dtype = accumulator_of(input);
  constexpr int64_t kNone[] = {0};
  const Tensor rstd = results({N, over_positions ? 1 : T, G}, dtype, false);
  const Tensor mean = results(centred ? rstd.sizes() : IntArrayRef(kNone), dtype, false);
  as_accumulator(dtype, [&](auto zero) {
    using acc_t = decltype(zero);
    const auto parts = parts_of(N, T, G, G * K, !over_positions);
    for_parts(int64_t(parts.size()), [&](int64_t p) {
      Moments<acc_t>(input, eps, centred, over_positions, mean, rstd).run(parts[p]);  // its scratch is its thread's
    });
  });
  return {mean, rstd};
}

}  // namespace
}  // namespace torchgradx::cpu

TORCH_LIBRARY_IMPL(torchgradx, CPU, m) {
  m.impl("moments", torchgradx::cpu::moments);
}
