// Rows of a use that are not n*T+t: which sample each is of. Sorted by sample they are segments, and samples of as many
// rows, one after another, are one view [count, length, *], which the kernels take as any other.
#pragma once

#include "../layers/layer.h"

#include <vector>

namespace torchgradx {

struct Segments {
  struct Run {  // of samples with as many rows each
    int64_t first, count, length;
    Tensor samples;  // [count]
  };
  Tensor owners;          // [rows]: the sample of each, N where it is of none
  Tensor order;           // [rows]: sorted, those of no sample last; undefined: they are so already
  Tensor samples;         // those that have rows, in that order
  std::vector<Run> runs;  // of them
  Tensor starts;          // [samples + 1] int32: their rows, sorted
  int64_t longest = 0;    // of the samples

  // runs: how many samples, and how many rows each of them has
  Segments(const Tensor& owners, const std::optional<Tensor>& order, const Tensor& samples,
           const std::vector<std::pair<int64_t, int64_t>>& runs);

  int64_t rows() const {
    return owners.size(0);
  }
  int64_t owned() const {  // rows that are of a sample: the first ones
    return runs.empty() ? 0 : runs.back().first + runs.back().count * runs.back().length;
  }
  // [rows, *] of [*, *], as they are and sorted; nothing where these are no rows of that number.
  std::optional<Tensor> flat(const Tensor& t) const;
  Tensor sorted(const Tensor& flat) const;
  // [N, *]: sums over the rows [rows, *] of each sample.
  Tensor by_sample(const Tensor& flat, int64_t n) const;
  // [samples]: the squared norms of sums of outer products, of rows [rows, *]; an algorithm for each run.
  Tensor sq_norms(const Tensor& activations, const Tensor& grad_output, const std::vector<int64_t>& algorithms) const;
};

// What a use saved, and its output's gradient, row by row.
struct FlatUse {
  Saved saved;
  Tensor grad_output;
  FlatUse narrowed(int64_t first, int64_t count) const;
};
std::optional<FlatUse> flat_use(const Segments& segments, const Saved& saved, const Tensor& grad_output, bool sorts);
// Each row as a sample; nothing where these are no rows.
std::optional<Operands> by_row(const Layer& layer, const Segments& segments, const std::optional<FlatUse>& flat);

}  // namespace torchgradx
