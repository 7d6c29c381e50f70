// One layer of nn.LSTM, nn.GRU or nn.RNN, in one direction or in both, or one step of their cells: the framework's
// forward, and a backward through time that leaves the gradients at each step's gates. With those, every weight is a
// Linear over all steps at once, and what makes a Linear's gradient and norms makes theirs.
// Inside, everything is [T, B, *]: the rows of a step lie together. With packed sequences the rows are sorted by
// length, and a step has the first `sizes[t]` of them.
#pragma once

#include "layer.h"

#include <ATen/Parallel.h>

namespace torchgradx {

enum class Cell : int64_t { kRelu = 0, kTanh = 1, kLstm = 2, kGru = 3 };

struct Packing {             // of a PackedSequence; all undefined for a plain tensor
  Tensor batch_sizes, rows;  // [T]; [total]: t B + b of each row of the data
  Tensor sorted, unsorted;   // [B], as the sequence has them
};

struct Recurrence {
  Cell cell;
  bool biases, both_ways, projects, single, training;  // single: one step, of nn.LSTMCell and the like
  Packing packing;

  int64_t directions() const {
    return both_ways ? 2 : 1;
  }
  int64_t weights() const {  // of one direction
    return (biases ? 4 : 2) + (projects ? 1 : 0);
  }
};

using Tensors = std::vector<Tensor>;

struct Sequence {  // inputs of a layer: [B, T, I] or the packed data; [directions, B, *]; as the module holds them
  Tensor input, state, cell;
  Tensors weights;
};

struct Weights {  // of one direction
  Tensor ih, hh, ih_bias, hh_bias, hr;
};

inline Weights weights_of(const Recurrence& of, const Tensors& all, int64_t direction) {
  const Tensor* w = all.data() + direction * of.weights();
  Weights found{w[0], w[1], {}, {}, {}};
  if (of.biases) found.ih_bias = w[2], found.hh_bias = w[3];
  if (of.projects) found.hr = w[of.weights() - 1];
  return found;
}

struct Steps {         // of one direction's forward, for its backward
  Tensor states;       // [T, B, P]: before each step; where they are late, after it
  Tensor kept;         // LSTM: where oneDNN keeps the gates, if it ran; RNN: [T, B, H], the states
  bool late = false;   // as oneDNN gave them: the first step began with zeros, and the direction is forwards
  bool spent = false;  // nobody reads `kept` again: the gates' gradients may lie there, over the gates

  Tensor previous() const;  // before each step
};

struct Output {
  Tensor states;            // [B, T, directions P], 0 beyond a sequence's end
  Tensor last, last_cells;  // [B, directions, P] and, of an LSTM, [B, directions, H]
};

struct GateGradients {    // of one direction
  Tensor input, state;    // [T, B, gates H], at W_ih x + b_ih and at W_hh h + b_hh; the same but for a GRU
  Tensor projected, out;  // operands of W_hr: [T, B, H], and the gradient of the states [T, B, P]
  Tensor layer_input;     // [T, B, I], this direction's part of its gradient, if it is wanted
  Tensor first_state, first_cell;
};

// As the framework computes it, with whatever graph is being recorded.
Output framework(const Recurrence& of, const Sequence& in);
// The same bits, and what the backward needs. `late`: states may be so.
Output run(const Recurrence& of, const Sequence& in, std::vector<Steps>& steps, bool late);
struct OutputGradients {  // of one direction
  Tensor states;          // [T, B, P]
  Tensor last, cell;      // [B, P], [B, H], or undefined
};

// input [T, B, I]
GateGradients through_time(const Recurrence& of, int64_t direction, const Tensor& input, const Sequence& in,
                           const Steps& steps, const OutputGradients& grads, bool wants_input);

struct Walk {  // the order of the steps, and their rows of what is [T, B, *]
  int64_t steps, rows, width;
  bool backwards;
  const int64_t* sizes;  // null: all rows at every step

  int64_t at(int64_t k) const {
    return backwards ? steps - 1 - k : k;
  }
  int64_t size(int64_t t) const {
    return sizes ? sizes[t] : rows;
  }
  Tensor first(const Tensor& all, int64_t t) const {  // a step's rows of [B, *]: of packed sequences, those that go on
    return all.narrow(0, 0, size(t));
  }
  Tensor of(const Tensor& all, int64_t t) const {
    return first(all[t], t);
  }
  // The step before, or after it, for row b: -1 where there is none.
  int64_t before(int64_t t, int64_t b) const {
    return among(backwards ? t + 1 : t - 1, b);
  }
  int64_t after(int64_t t, int64_t b) const {
    return among(backwards ? t - 1 : t + 1, b);
  }
  int64_t among(int64_t t, int64_t b) const {
    return t >= 0 && t < steps && b < size(t) ? t : -1;
  }
  // f(begin, end): the rows among which threads share all steps, enough of them to make a product of
  template <class F>
  void each_part(const F& f) const {
    constexpr int64_t kRows = 8, kElements = 1 << 15;
    at::parallel_for(0, rows, std::max(kRows, kElements / std::max<int64_t>(1, steps * width)), f);
  }
  template <class F>
  void each_row(int64_t begin, int64_t end, const F& f) const {  // of a step
    const int64_t grain = std::max<int64_t>(1, 8192 / std::max<int64_t>(1, width));
    at::parallel_for(begin, end, grain, [&](int64_t first, int64_t last) {
      for (int64_t b = first; b < last; ++b) f(b);
    });
  }
};

// The same on any device; input, weights and gradients in float32 at least.
GateGradients by_operators(const Recurrence& of, const Walk& walk, const Weights& w, const Tensor& input,
                           const Steps& steps, const Tensor& first_cell, const OutputGradients& grads,
                           bool wants_input);
extern bool operators_everywhere;  // on a CPU too: for tests

Tensor lstm_gates(const Weights& w, const Tensor& input, const Tensor& previous);  // activated, [T, B, 4 H]
// [T, B, *]: what each step began with, from what it left and what the first one began with
Tensor shifted(const Recurrence& of, const Tensor& after, const Tensor& first, bool backwards);

// [T, B, *] of a layer's input or of its states, and back.
Tensor by_step(const Recurrence& of, const Tensor& input);
Tensor from_steps(const Recurrence& of, const Tensor& by_step, const Tensor& like);

}  // namespace torchgradx
