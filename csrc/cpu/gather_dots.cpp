// The cross term of a table that is looked up by id and is also a Linear's weight: with E_n = sum_t e_{id_t} g_t^T and
// H_n = sum_s b_s a_s^T, <E_n, H_n> = sum over the ids u that occur of r_u . (sum_s b_s[u] a_s), r_u the sum of u's g.
// The U columns of b are gathered into panels, multiplied with `a` in register tiles and met with r: 2 N S U D
// operations, nothing of the table's size. Besides: about 1/2 MiB a thread, r and panels of some ids at a time.
#include "rows.h"
#include "segments.h"

#include "passes.h"

#include <c10/util/BFloat16.h>
#include <c10/util/Half.h>
#include <torch/library.h>

namespace torchgradx::cpu {
namespace {

constexpr int64_t kSumsBytes = 1 << 18;  // of the r of the ids at work

template <class acc_t>
class CrossTerm {
 public:
  CrossTerm(const Tensor& grad_rows,    // [N, T, D]
            const Tensor& activations,  // [N, S, D]
            const Tensor& grad_output)  // [N, S, V]
      : S_(activations.size(1)),
        D_(activations.size(2)),
        grads_(rows_of(grad_rows)),
        output_(rows_of(grad_output)),
        dtype_(grad_output.scalar_type()),
        layer_(activations, activations, false),
        of_(kernels_.of(grad_rows.scalar_type())) {}

  // of sample n's segments [begin, end)
  double run(const Segments& segments, int64_t n, int64_t begin, int64_t end) {
    const int64_t most = std::max<int64_t>(1, kSumsBytes / int64_t(sizeof(acc_t)) / D_ / kernels_.max_rows);
    const int64_t ids = std::min(most, kWorthPacking) * kernels_.max_rows;
    double dot = 0;
    for (int64_t s = begin; s < end; s += ids) dot += some(segments, n, s, std::min(ids, end - s));
    return dot;
  }

 private:
  double some(const Segments& segments, int64_t n, int64_t first, int64_t count) {
    acc_t* const sums = workspace_.total.get(count * D_);
    std::fill(sums, sums + count * D_, acc_t(0));
    for (int64_t u = 0; u < count; ++u)
      for (int64_t k = 0; k < segments.size(first + u); ++k)
        of_.add_rows(sums + u * D_, grads_.at(n, 0, segments.position(first + u, k), 0), 1, D_, 0, grads_.c);
    const Panels panels(count, kernels_.max_rows);
    double dot = 0;
    for (int64_t s = 0; s < S_; s += kDepth) {
      const int64_t depth = std::min(kDepth, S_ - s);
      acc_t* const packed = workspace_.panels.get(depth * count);
      pack(segments, n, first, count, s, depth, panels, packed);
      dot += tiles(n, s, depth, panels, packed, sums);
    }
    return dot;
  }

  // [panel][position][id of the panel]
  void pack(const Segments& segments, int64_t n, int64_t first, int64_t count, int64_t s, int64_t depth,
            const Panels& panels, acc_t* out) const {
    if (dtype_ == at::kBFloat16)
      gather<c10::BFloat16>(segments, n, first, count, s, depth, panels, out);
    else if (dtype_ == at::kHalf)
      gather<c10::Half>(segments, n, first, count, s, depth, panels, out);
    else
      gather<acc_t>(segments, n, first, count, s, depth, panels, out);
  }

  template <class S>
  void gather(const Segments& segments, int64_t n, int64_t first, int64_t count, int64_t s, int64_t depth,
              const Panels& panels, acc_t* out) const {
    for (int64_t d = 0; d < depth; ++d) {
      const S* const row = static_cast<const S*>(output_.at(n, 0, s + d, 0));
      for (int64_t u = 0; u < count; ++u) {
        const int64_t panel = u / panels.rows, begin = panel * panels.rows;
        const int64_t rows = std::min(panels.rows, count - begin);
        out[begin * depth + d * rows + u - begin] = acc_t(row[segments.id(first + u) * output_.c]);
      }
    }
  }

  double tiles(int64_t n, int64_t s, int64_t depth, const Panels& panels, const acc_t* packed, const acc_t* sums) {
    const Block block{0, layer_.rows, 0, D_};
    const Chunk chunk{n, 1, 0, 1, s, depth, true, true};
    acc_t* const product = workspace_.carry.get(kMaxRows * 2 * kernels_.lanes);
    double dot = 0, magnitude = 0;
    for (int64_t r = 0; r < layer_.runs(block); ++r) {
      const Run run = layer_.run(block, r);
      const View<acc_t> view = layer_.view(block, chunk, r, false, panels.count, workspace_);
      for (int64_t p = 0; p < panels.count; ++p) {
        const int64_t rows = p + 1 < panels.count ? panels.rows : panels.last, first = p * panels.rows;
        Tile<acc_t> job{};
        job.x = view.x, job.x_along = view.along, job.height = 1, job.width = depth;
        job.g = packed + first * depth, job.g_along = rows, job.carry = product, job.suspend = true;
        kernels_.tile[run.columns > kernels_.lanes][rows](job);
        for (int64_t u = 0; u < rows; ++u)
          kernels_.products(product + u * 2 * kernels_.lanes, sums + (first + u) * D_ + run.column, run.columns, &dot,
                            &magnitude);
      }
    }
    return dot;
  }

  const Kernels<acc_t>& kernels_ = kernels<acc_t>();
  Workspace<acc_t>& workspace_ = Workspace<acc_t>::mine();
  const int64_t S_, D_;
  const Operand grads_, output_;
  const at::ScalarType dtype_;
  const Rows<acc_t> layer_;
  const RowKernels<acc_t>& of_;
};

Tensor gather_dots(const Tensor& indices, const Tensor& grad_rows, const Tensor& activations, const Tensor& grad_output,
                   std::optional<int64_t> padding_idx) {
  const RowShape s = check_gather_dots(indices, grad_rows, activations, grad_output);
  const int64_t T = grad_rows.size(1);
  const auto pass = [&](auto zero, const Tensor& dots) {
    using acc_t = decltype(zero);
    const Grid grid = make_grid(s.N, T, 2.0 * double(s.N) * double(T) * double(s.T) * double(s.I), 0);
    std::vector<double> partial(grid.parts() * s.N, 0.0);
    for_parts(grid.parts(), [&](int64_t part) {
      const Share share = grid.share(part, s.N, T);
      CrossTerm<acc_t> term(grad_rows, activations, grad_output);
      Segments segments;
      for (int64_t n = share.sample_begin; n < share.sample_end; ++n) {
        segments.sort(indices, n, padding_idx, s.O);
        const int64_t U = segments.count();
        partial[part * s.N + n] = term.run(segments, n, U * share.row_begin / T, U * share.row_end / T);
      }
    });
    write_row<acc_t>(dots, 0, sum_of_parts(partial, grid.parts(), s.N));
  };
  const bool empty = grad_rows.numel() == 0 || activations.numel() == 0 || grad_output.numel() == 0;
  return norm_results(activations, s.N, false, empty, pass).squeeze(0);
}

}  // namespace
}  // namespace torchgradx::cpu

TORCH_LIBRARY_IMPL(torchgradx, CPU, m) {
  m.impl("gather_dots", torchgradx::cpu::gather_dots);
}
