// Tables looked up by id: row v of sample n's gradient is the sum of grad_output over the positions whose id is v.
// The norm needs only the rows that occur: cost N T D and a sort of T ids, nothing of the table's size. Besides: T ids
// and a row a thread.
#include "segments.h"

#include "../operators/checks.h"
#include "../operators/views.h"
#include "passes.h"

#include <torch/library.h>

namespace torchgradx::cpu {
namespace {

template <class acc_t>
double sq_norm(const Segments& segments, const Operand& grads, const RowKernels<acc_t>& of, int64_t n, int64_t begin,
               int64_t count) {
  const RowKernels<acc_t>& native = kernels<acc_t>().native;
  acc_t* const sum = Workspace<acc_t>::mine().total.get(count);
  double squares = 0;
  for (int64_t s = 0; s < segments.count(); ++s) {
    if (segments.size(s) == 1) {
      squares += of.sq_sum(grads.at(n, 0, segments.position(s, 0), begin), count, grads.c);
      continue;
    }
    std::fill(sum, sum + count, acc_t(0));
    for (int64_t k = 0; k < segments.size(s); ++k)
      of.add_rows(sum, grads.at(n, 0, segments.position(s, k), begin), 1, count, 0, grads.c);
    squares += native.sq_sum(sum, count, 1);
  }
  return squares;
}

Tensor gather_sq_norms(const Tensor& indices, const Tensor& grad_output, std::optional<int64_t> padding_idx) {
  check_operand(grad_output, "grad_output", 3, "[N, T, D]");
  check_indices(indices, grad_output, "grad_output");
  const int64_t N = grad_output.size(0), D = grad_output.size(2);
  const auto pass = [&](auto zero, const Tensor& sq_norms) {
    using acc_t = decltype(zero);
    constexpr double kCostOfAnElement = 4;  // in FLOP: bound by memory
    const Operand grads = rows_of(grad_output);
    const auto& of = kernels<acc_t>().of(grad_output.scalar_type());
    const Grid grid = make_grid(N, D, kCostOfAnElement * double(grad_output.numel()), 0);
    std::vector<double> partial(grid.parts() * N, 0.0);
    for_parts(grid.parts(), [&](int64_t part) {
      const Share share = grid.share(part, N, D);
      Segments segments;
      for (int64_t n = share.sample_begin; n < share.sample_end; ++n) {
        segments.sort(indices, n, padding_idx);
        partial[part * N + n] =
            sq_norm<acc_t>(segments, grads, of, n, share.row_begin, share.row_end - share.row_begin);
      }
    });
    write_row<acc_t>(sq_norms, 0, sum_of_parts(partial, grid.parts(), N));
  };
  return viewed(norm_results(grad_output, N, false, grad_output.numel() == 0, pass), {N});
}

}  // namespace
}  // namespace torchgradx::cpu

TORCH_LIBRARY_IMPL(torchgradx, CPU, m) {
  m.impl("gather_sq_norms", torchgradx::cpu::gather_sq_norms);
}
