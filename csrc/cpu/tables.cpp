// Tables looked up by id: row v of sample n's gradient is the sum of grad_output over the positions whose id is v.
// The norm needs only the rows that occur: cost N T D and a sort of T ids, nothing of the table's size. Besides: T ids
// and a row a thread.
#include "../operators/checks.h"
#include "../operators/views.h"
#include "passes.h"
#include "rows.h"

#include <c10/util/BFloat16.h>
#include <c10/util/Half.h>
#include <torch/library.h>

#include <compare>

namespace torchgradx::cpu {
namespace {

// One sample's positions in the order of their ids: equal ids are a segment, whose rows belong to one row of the table.
// A radix sort by the bytes of the largest id: linear in T whatever the ids, and stable, so that sums have one order;
// of a few, by comparisons.
class Segments {
 public:
  struct Entry {
    int64_t id, position;
    auto operator<=>(const Entry&) const = default;
  };

  // of indices [N, T], int32 or int64; V: how many ids there are, if that is known
  void sort(const Tensor& indices, int64_t n, std::optional<int64_t> padding_idx, std::optional<int64_t> V = {}) {
    if (indices.scalar_type() == at::kInt)
      read(indices.const_data_ptr<int32_t>(), indices, n, padding_idx, V);
    else
      read(indices.const_data_ptr<int64_t>(), indices, n, padding_idx, V);
    if (entries_.size() <= 16) {  // counting bytes would take longer
      std::sort(entries_.begin(), entries_.end());
    } else {
      sorted_.resize(entries_.size());
      for (int shift = 0; shift < 64 && largest_ >> shift; shift += 8) by_byte(shift);
    }
    begins_.clear();
    for (size_t k = 0; k < entries_.size(); ++k)
      if (k == 0 || entries_[k].id != entries_[k - 1].id) begins_.push_back(int64_t(k));
    begins_.push_back(int64_t(entries_.size()));
  }

  int64_t count() const {
    return int64_t(begins_.size()) - 1;
  }
  int64_t id(int64_t segment) const {
    return entries_[begins_[segment]].id;
  }
  int64_t size(int64_t segment) const {
    return begins_[segment + 1] - begins_[segment];
  }
  int64_t position(int64_t segment, int64_t k) const {
    return entries_[begins_[segment] + k].position;
  }

 private:
  template <class id_t>
  void read(const id_t* ids, const Tensor& indices, int64_t n, std::optional<int64_t> padding_idx,
            std::optional<int64_t> V) {
    entries_.clear(), largest_ = 0;
    ids += n * indices.stride(0);
    for (int64_t t = 0; t < indices.size(1); ++t) {
      const int64_t id = ids[t * indices.stride(1)];
      if (id < 0 || (V && id >= *V))
        C10_THROW_ERROR(IndexError, text("indices must be from 0 ", V ? text("to ", *V - 1) : "on", "; got ", id,
                                         " in sample ", n, ", position ", t));
      if (padding_idx && id == *padding_idx) continue;
      entries_.push_back({id, t});
      largest_ |= uint64_t(id);
    }
  }

  void by_byte(int shift) {
    std::array<int64_t, 257> begin{};
    const auto byte = [&](const Entry& e) { return uint64_t(e.id) >> shift & 255; };
    for (const Entry& e : entries_) ++begin[byte(e) + 1];
    for (size_t b = 1; b < 256; ++b) begin[b] += begin[b - 1];
    for (const Entry& e : entries_) sorted_[begin[byte(e)]++] = e;
    std::swap(entries_, sorted_);
  }

  std::vector<Entry> entries_, sorted_;
  std::vector<int64_t> begins_;  // of segments, and the end of the last
  uint64_t largest_ = 0;         // its bytes: the ids' bits together
};

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

constexpr int64_t kSumsBytes = 1 << 18;  // of the r of the ids at work

// The cross term of a table that is looked up by id and is also a Linear's weight: with E_n = sum_t e_{id_t} g_t^T and
// H_n = sum_s b_s a_s^T, <E_n, H_n> = sum over the ids u that occur of r_u . (sum_s b_s[u] a_s), r_u the sum of u's g.
// The U columns of b are gathered into panels, multiplied with `a` in register tiles and met with r: 2 N S U D
// operations, nothing of the table's size. Besides: about 1/2 MiB a thread, r and panels of some ids at a time.
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
  m.impl("gather_sq_norms", torchgradx::cpu::gather_sq_norms);
  m.impl("gather_dots", torchgradx::cpu::gather_dots);
}
