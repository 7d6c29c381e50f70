// As oneDNN lays it out (src/cpu/rnn/rnn_utils.cpp, set_offsets): regions of whole pages, the gates, the states that
// cells hide, the states of two layers (the input and its own), then the cells of two layers. Rows of the former three
// are of whole cache lines (get_good_ld); a multiple of 1 KiB gets one more.
#include "workspace.h"

#include "../cpu/sweep.h"

#include <algorithm>
#include <cmath>

namespace torchgradx {
namespace {

constexpr int64_t kPage = 4096 / sizeof(float);

int64_t row_of(int64_t size) {
  const int64_t lines = cpu::round_up(size, 16);
  return lines % 256 == 0 ? lines + 16 : lines;
}

int64_t in_pages(int64_t size) {
  return cpu::round_up(size, kPage);
}

bool agree(double found, double wanted, double size) {  // nan with nothing
  return std::abs(found - wanted) <= 1e-3 * size;
}

}  // namespace

LstmWorkspace::LstmWorkspace(const Steps& of, const Weights& w, const Tensor& input, const Tensor& first_cell,
                             bool backwards) {
  const Tensor& workspace = of.kept;
  if (!workspace.defined()) return;
  const int64_t steps = input.size(0), rows = input.size(1), h = w.hh.size(1), along = row_of(4 * h);
  const int64_t floats = workspace.numel() * workspace.element_size() / int64_t(sizeof(float));
  const auto region = [&](int64_t begin, int64_t size) {
    const int64_t scale = int64_t(sizeof(float)) / workspace.element_size();
    return workspace.view({-1}).narrow(0, begin * scale, size * scale).view(at::kFloat);
  };
  if (floats < steps * rows * along) return;
  const Tensor all = region(0, steps * rows * along).view({steps, rows, along}).narrow(2, 0, 4 * h);
  const auto in_place = all.accessor<float, 3>(), x = input.accessor<float, 3>(), y = of.states.accessor<float, 3>();
  const auto product = [](const auto& weight, const auto& with) {
    double sum = 0;
    for (int64_t k = 0; k < with.size(0); ++k) sum += double(weight[k]) * with[k];
    return sum;
  };
  const auto gates_at = [&](int64_t k, int64_t row) {  // of an iteration
    const int64_t t = backwards ? steps - 1 - k : k;
    for (int64_t gate = 0; gate < 4; ++gate)
      for (const int64_t unit : {gate * h, gate * h + h - 1}) {
        double z = product(w.ih.accessor<float, 2>()[unit], x[t][row]);
        if (t >= of.late) z += product(w.hh.accessor<float, 2>()[unit], y[t - of.late][row]);
        for (const Tensor& b : {w.ih_bias, w.hh_bias})
          if (b.defined()) z += b.accessor<float, 1>()[unit];
        if (!agree(in_place[k][row][unit], gate == 2 ? std::tanh(z) : 1 / (1 + std::exp(-z)), 1)) return false;
      }
    return true;
  };
  if (!gates_at(0, rows - 1) || !gates_at(steps - 1, 0)) return;
  gates = all;

  const int64_t layer = (steps + 1) * rows, begin = in_pages(steps * rows * along) +
                                                    in_pages(2 * layer * row_of(std::max(input.size(2), h))) +
                                                    in_pages(steps * rows * row_of(h)) + layer * h;
  if (floats < begin + layer * h) return;
  const Tensor both = region(begin, layer * h).view({steps + 1, rows, h});  // before the first step, and after each
  const auto c = both.accessor<float, 3>();
  const auto first = first_cell.accessor<float, 2>();
  const auto cells_after = [&](int64_t k, int64_t row) {
    for (const int64_t unit : {int64_t(0), h - 1}) {
      const auto gate = [&](int64_t which) { return double(in_place[k][row][which * h + unit]); };
      const double kept = gate(1) * (k > 0 ? c[k][row][unit] : first[row][unit]), added = gate(0) * gate(2);
      if (!agree(c[k + 1][row][unit], kept + added, std::abs(kept) + std::abs(added))) return false;
    }
    return true;
  };
  if (steps == 1 || (cells_after(0, rows - 1) && cells_after(steps - 2, 0))) cells = both.narrow(0, 1, steps);
}

}  // namespace torchgradx
