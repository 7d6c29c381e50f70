#include "recurrence.h"
#include "../cpu/gates.h"

#include <ATen/ATen.h>
#include <ATen/Parallel.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/addmm_cpu_dispatch.h>

#include <array>

namespace torchgradx {
namespace {

constexpr int64_t kLstmMode = 2;  // as ideep numbers them

struct Weights {  // of one direction
  Tensor ih, hh, ih_bias, hh_bias, hr;
};

Weights weights_of(const Recurrence& of, const Tensors& all, int64_t direction) {
  const Tensor* w = all.data() + direction * of.weights();
  Weights found{w[0], w[1], {}, {}, {}};
  if (of.biases) found.ih_bias = w[2], found.hh_bias = w[3];
  if (of.projects) found.hr = w[of.weights() - 1];
  return found;
}

std::optional<Tensor> maybe(const Tensor& t) {
  return t.defined() ? std::optional<Tensor>(t) : std::nullopt;
}

// Where at::lstm goes to oneDNN in float32 (ATen/native/RNN.cpp, use_mkldnn).
bool in_onednn(const Recurrence& of, const Sequence& in) {
  return of.cell == Cell::kLstm && !of.single && !of.projects && !of.packing.rows.defined() && at::hasMKLDNN() &&
         at::globalContext().userEnabledMkldnn() && in.input.scalar_type() == at::kFloat;
}

// [T, B, states] of the rows of a sequence, in the order in which the packed data has them.
Tensor padded(const Packing& packing, const Tensor& data) {
  const int64_t steps = packing.batch_sizes.size(0), rows = packing.batch_sizes[0].item<int64_t>();
  return at::zeros({steps * rows, data.size(1)}, data.options())
      .index_copy_(0, packing.rows, data)
      .view({steps, rows, data.size(1)});
}

struct Ran {                   // as the framework has it
  Tensor states, last, cells;  // [T, B, *], or packed; [directions, B, *]
};

Ran stepwise(const Recurrence& of, const Sequence& in) {
  const auto& w = in.weights;
  if (of.single) {
    const Tensor x = in.input.squeeze(1), h = in.state[0];
    const auto b_ih = of.biases ? maybe(w[2]) : std::nullopt, b_hh = of.biases ? maybe(w[3]) : std::nullopt;
    if (of.cell == Cell::kLstm) {
      const auto [y, c] = at::lstm_cell(x, {h, in.cell[0]}, w[0], w[1], b_ih, b_hh);
      return {y.unsqueeze(0), {}, c.unsqueeze(0)};
    }
    const auto cell = of.cell == Cell::kGru    ? at::gru_cell
                      : of.cell == Cell::kTanh ? at::rnn_tanh_cell
                                               : at::rnn_relu_cell;
    return {cell(x, h, w[0], w[1], b_ih, b_hh).unsqueeze(0), {}, {}};
  }
  Ran ran;
  if (of.packing.rows.defined()) {
    const Tensor& sizes = of.packing.batch_sizes;
    if (of.cell == Cell::kLstm) {
      std::tie(ran.states, ran.last, ran.cells) =
          at::lstm(in.input, sizes, {in.state, in.cell}, w, of.biases, 1, 0.0, of.training, of.both_ways);
      return ran;
    }
    const auto layer = of.cell == Cell::kGru    ? at::_ops::gru_data::call
                       : of.cell == Cell::kTanh ? at::_ops::rnn_tanh_data::call
                                                : at::_ops::rnn_relu_data::call;
    std::tie(ran.states, ran.last) = layer(in.input, sizes, in.state, w, of.biases, 1, 0.0, of.training, of.both_ways);
    return ran;
  }
  const Tensor x = in.input.transpose(0, 1);
  if (of.cell == Cell::kLstm) {
    std::tie(ran.states, ran.last, ran.cells) =
        at::lstm(x, {in.state, in.cell}, w, of.biases, 1, 0.0, of.training, of.both_ways, /*batch_first=*/false);
    return ran;
  }
  const auto layer = of.cell == Cell::kGru    ? at::_ops::gru_input::call
                     : of.cell == Cell::kTanh ? at::_ops::rnn_tanh_input::call
                                              : at::_ops::rnn_relu_input::call;
  std::tie(ran.states, ran.last) = layer(x, in.state, w, of.biases, 1, 0.0, of.training, of.both_ways, false);
  return ran;
}

// As at::lstm does, with what oneDNN leaves for its own backward.
Ran onednn(const Recurrence& of, const Sequence& in, std::vector<Steps>& steps) {
  const at::AutoDispatchBelowADInplaceOrView below;  // no graph; yet without grad mode it keeps no workspace
  const at::AutoGradMode enabled(true);
  const Tensor x = in.input.transpose(0, 1).contiguous();
  Tensors states, last, cells;
  for (int64_t d = 0; d < of.directions(); ++d) {
    const Weights w = weights_of(of, in.weights, d);
    const Tensor none = of.biases ? Tensor() : at::zeros({w.ih.size(0)}, w.ih.options());
    auto [y, h, c, workspace] = at::mkldnn_rnn_layer(
        x, w.ih, w.hh, of.biases ? w.ih_bias : none, of.biases ? w.hh_bias : none, in.state[d], in.cell[d], d == 1, {},
        kLstmMode, w.hh.size(1), 1, of.biases, of.both_ways, false, /*train=*/true);
    states.push_back(y), last.push_back(h), cells.push_back(c);
    steps[d].kept = workspace;
  }
  const auto stacked = [&](const Tensors& t) { return at::stack(t).view_as(in.state); };
  return {of.both_ways ? at::cat(states, -1) : states[0], stacked(last), stacked(cells)};
}

// [T, B, P]: the state that each step began with.
Tensor shifted(const Recurrence& of, const Tensor& states, const Tensor& first, bool backwards) {
  const int64_t steps = states.size(0);
  if (!backwards) return at::cat({first.unsqueeze(0), states.narrow(0, 0, steps - 1)});
  const Tensor previous = at::cat({states.narrow(0, 1, steps - 1), first.unsqueeze(0)});
  if (of.packing.rows.defined()) {  // each begins at its own end
    const auto sizes = of.packing.batch_sizes.accessor<int64_t, 1>();
    for (int64_t t = 0; t < steps; ++t) {
      const int64_t longer = t + 1 < steps ? sizes[t + 1] : 0;
      previous[t].narrow(0, longer, sizes[t] - longer).copy_(first.narrow(0, longer, sizes[t] - longer));
    }
  }
  return previous;
}

void activate(const Tensor& gates) {  // of an LSTM: input, forget, cell, output
  const int64_t h = gates.size(-1) / 4;
  gates.narrow(-1, 0, 2 * h).sigmoid_();
  gates.narrow(-1, 2 * h, h).tanh_();
  gates.narrow(-1, 3 * h, h).sigmoid_();
}

Tensor lstm_gates(const Weights& w, const Tensor& input, const Tensor& previous) {
  const Tensor gates = at::linear(input, w.ih, maybe(w.ih_bias));
  gates.add_(at::linear(previous, w.hh, maybe(w.hh_bias)));
  activate(gates);
  return gates;
}

// oneDNN's workspace begins with the gates, by iteration, in rows of whole cache lines; a multiple of 1 KiB gets one
// more. That is nowhere documented: the first and the last unit of two rows, which any other order would place
// elsewhere, are computed again each time.
Tensor gates_in(const Tensor& workspace, const Weights& w, const Tensor& input, const Tensor& previous,
                bool backwards) {
  const int64_t steps = input.size(0), rows = input.size(1), gates = w.ih.size(0), h = gates / 4;
  int64_t along = (gates + 15) / 16 * 16;
  if (along % 256 == 0) along += 16;
  const int64_t bytes = steps * rows * along * int64_t(sizeof(float));
  if (!workspace.defined() || workspace.numel() * workspace.element_size() < bytes) return {};
  const Tensor found = workspace.view({-1})
                           .narrow(0, 0, bytes / workspace.element_size())
                           .view(at::kFloat)
                           .view({steps, rows, along})
                           .narrow(2, 0, gates);
  const auto in_place = found.accessor<float, 3>(), x = input.accessor<float, 3>(), y = previous.accessor<float, 3>();
  const auto product = [](const auto& weight, const auto& with) {
    double sum = 0;
    for (int64_t k = 0; k < with.size(0); ++k) sum += double(weight[k]) * with[k];
    return sum;
  };
  const auto holds = [&](int64_t k, int64_t row) {  // iteration k
    const int64_t t = backwards ? steps - 1 - k : k;
    for (int64_t gate = 0; gate < 4; ++gate)
      for (const int64_t unit : {gate * h, gate * h + h - 1}) {
        double z =
            product(w.ih.accessor<float, 2>()[unit], x[t][row]) + product(w.hh.accessor<float, 2>()[unit], y[t][row]);
        for (const Tensor& b : {w.ih_bias, w.hh_bias})
          if (b.defined()) z += b.accessor<float, 1>()[unit];
        const double wanted = gate == 2 ? std::tanh(z) : 1 / (1 + std::exp(-z));
        if (!(std::abs(wanted - in_place[k][row][unit]) < 1e-3)) return false;
      }
    return true;
  };
  return holds(0, rows - 1) && holds(steps - 1, 0) ? found : Tensor();
}

template <class T>
struct View {  // [T, B, *]
  T* data = nullptr;
  int64_t step = 0, row = 0;
  View() = default;
  explicit View(const Tensor& t) {
    if (t.defined()) data = t.data_ptr<T>(), step = t.stride(0), row = t.stride(1);
  }
  void turn_round(int64_t steps) {
    data += (steps - 1) * step, step = -step;
  }
  T* at(int64_t t, int64_t b) const {
    return data + t * step + b * row;
  }
};

struct Walk {  // the order of the steps
  int64_t steps, rows, width;
  bool backwards;
  const int64_t* sizes;  // null: all rows at every step

  int64_t at(int64_t k) const {
    return backwards ? steps - 1 - k : k;
  }
  int64_t size(int64_t t) const {
    return sizes ? sizes[t] : rows;
  }
  // The step before, for row b, or -1 where it began.
  int64_t before(int64_t t, int64_t b) const {
    const int64_t other = backwards ? t + 1 : t - 1;
    return other >= 0 && other < steps && b < size(other) ? other : -1;
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

template <class T>
GateGradients walked(const Recurrence& of, const Walk& walk, const Weights& w, const Tensor& input, const Steps& steps,
                     const Tensor& first_cell, const OutputGradients& grads) {
  const Tensor previous = widened(steps.previous);
  const int64_t h = walk.width, rows = walk.rows, p = previous.size(2), gates = w.ih.size(0);
  const auto fresh = [&](int64_t width) {
    const std::array<int64_t, 3> sizes{walk.steps, rows, width};
    return walk.sizes ? at::zeros(sizes, previous.options()) : at::empty(sizes, previous.options());
  };
  const auto begun = [&](const Tensor& from, int64_t width) {  // what is carried backwards
    return from.defined() ? widened(from).clone(at::MemoryFormat::Contiguous)
                          : at::zeros({rows, width}, previous.options());
  };
  const cpu::GateKernels<T>& kernels = cpu::gate_kernels<T>();
  GateGradients found;
  found.input = found.state = fresh(gates);
  Tensor q, u, cells, squashed;  // as LstmRow and GruRow have them
  View<T> ran, c;                // the gates, or the states of a plain RNN; the cells
  const T* const first = first_cell.defined() ? first_cell.const_data_ptr<T>() : nullptr;
  const auto before = [&](int64_t t, int64_t b) {  // the cells
    const int64_t s = walk.before(t, b);
    return s < 0 ? first + b * h : c.at(s, b);
  };
  if (of.cell == Cell::kLstm) {
    q = gates_in(steps.kept, w, input, previous, walk.backwards);
    const bool theirs = q.defined();
    if (!theirs) q = lstm_gates(w, input, previous);
    ran = View<T>(q);
    if (theirs && walk.backwards) ran.turn_round(walk.steps);
    cells = fresh(h);
    c = View<T>(cells);
    walk.each_part([&](int64_t begin, int64_t end) {
      for (int64_t k = 0; k < walk.steps; ++k) {
        const int64_t t = walk.at(k);
        for (int64_t b = begin; b < std::min(end, walk.size(t)); ++b)
          kernels.cells(ran.at(t, b), before(t, b), c.at(t, b), h);
      }
    });
    squashed = at::tanh(cells);
    found.first_cell = begun(grads.cell, h);
  } else if (of.cell == Cell::kGru) {
    q = at::linear(input, w.ih, maybe(w.ih_bias)), u = at::linear(previous, w.hh, maybe(w.hh_bias));
    q.narrow(2, 0, 2 * h).add_(u.narrow(2, 0, 2 * h)).sigmoid_();
    q.narrow(2, 2 * h, h).addcmul_(q.narrow(2, 0, h), u.narrow(2, 2 * h, h)).tanh_();
    ran = View<T>(q);
    found.state = fresh(gates);
  } else {
    q = widened(steps.kept);
    ran = View<T>(q);
  }
  if (of.projects) {
    found.projected = q.narrow(2, 3 * h, h) * squashed;
    found.out = fresh(p);
  }
  const View<T> hidden(u), prior(previous), tanh_of(squashed), d(found.input), e(found.state), arrives(grads.states);
  T* const carried_cell = found.first_cell.defined() ? found.first_cell.template data_ptr<T>() : nullptr;
  const auto row = [&](int64_t t, int64_t b, T* grad, const T* arriving) {  // from the state's gradient to the gates'
    if (of.cell == Cell::kLstm)
      kernels.lstm({ran.at(t, b), before(t, b), tanh_of.at(t, b), grad, arriving, d.at(t, b), carried_cell + b * h}, h);
    else if (of.cell == Cell::kGru)
      kernels.gru({ran.at(t, b), hidden.at(t, b), prior.at(t, b), arriving, grad, d.at(t, b), e.at(t, b)}, h);
    else
      (of.cell == Cell::kTanh ? kernels.tanh : kernels.relu)(ran.at(t, b), grad, arriving, d.at(t, b), h);
  };
  const Tensor carried = begun(grads.last, p);  // the gradient of the state
  T* const carry = carried.data_ptr<T>();
  const auto back = [&](int64_t begin, int64_t end) {
    const at::AutoDispatchBelowADInplaceOrView below;  // another thread may be in grad mode
    const auto each_step = found.state.unbind();
    for (int64_t k = walk.steps; k-- > 0;) {
      const int64_t t = walk.at(k), last = std::min(end, walk.size(t));
      if (last <= begin) continue;
      walk.each_row(begin, last, [&](int64_t b) {
        if (of.projects)
          kernels.add(carry + b * p, arrives.at(t, b), p);
        else
          row(t, b, carry + b * p, arrives.at(t, b));
      });
      const bool all = begin == 0 && last == rows;
      const auto mine = [&](const Tensor& t) { return all ? t : t.narrow(0, begin, last - begin); };
      Tensor to = mine(carried);
      if (of.projects) {
        const Tensor of_cells = to.mm(w.hr);
        mine(found.out[t]).copy_(to);
        T* const grads_of_cells = of_cells.data_ptr<T>();
        walk.each_row(begin, last, [&](int64_t b) { row(t, b, grads_of_cells + (b - begin) * h, nullptr); });
      }
      at::cpu::addmm_(to, mine(each_step[t]), w.hh, /*beta=*/of.cell == Cell::kGru ? 1 : 0, /*alpha=*/1);
    }
  };
  // A weight that no thread's cache holds is read once a step, by all of them.
  constexpr int64_t kCached = 1 << 20;
  if (w.hh.numel() * w.hh.element_size() <= kCached)
    walk.each_part(back);
  else
    back(0, rows);
  found.first_state = carried;
  return found;
}

Output arranged(const Recurrence& of, const Ran& ran) {
  const Tensor& order = of.packing.unsorted;
  const auto by_sample = [&](const Tensor& t) {  // [*, B, *] -> [B, *, *]
    if (!t.defined()) return t;
    return (order.defined() ? t.index_select(1, order) : t).transpose(0, 1);
  };
  const Tensor states = of.packing.rows.defined() ? padded(of.packing, ran.states) : ran.states;
  return {by_sample(states), by_sample(ran.last), by_sample(ran.cells)};
}

}  // namespace

Tensor by_step(const Recurrence& of, const Tensor& input) {
  return of.packing.rows.defined() ? padded(of.packing, input) : input.transpose(0, 1);
}

Tensor from_steps(const Recurrence& of, const Tensor& by_step, const Tensor& like) {
  const Tensor found =
      of.packing.rows.defined() ? by_step.flatten(0, 1).index_select(0, of.packing.rows) : by_step.transpose(0, 1);
  return found.to(like.scalar_type());
}

Output framework(const Recurrence& of, const Sequence& in) {
  return arranged(of, stepwise(of, in));
}

Output run(const Recurrence& of, const Sequence& in, std::vector<Steps>& steps) {
  steps.resize(of.directions());
  const at::NoGradGuard no_grad;
  const Ran ran = in_onednn(of, in) ? onednn(of, in, steps) : stepwise(of, in);
  // Not before: below autograd a transposed weight no longer says that it wants a gradient, on which the choice of
  // product depends, and with it the last bits.
  const at::AutoDispatchBelowADInplaceOrView below;
  const Tensor states = of.packing.rows.defined() ? padded(of.packing, ran.states) : ran.states;
  const int64_t width = states.size(2) / of.directions();
  for (int64_t d = 0; d < of.directions(); ++d) {
    const Tensor mine = states.narrow(2, d * width, width);
    steps[d].previous = shifted(of, mine, in.state[d], d == 1);
    if (of.cell <= Cell::kTanh) steps[d].kept = mine.clone(at::MemoryFormat::Contiguous);
  }
  return arranged(of, ran);
}

GateGradients through_time(const Recurrence& of, int64_t direction, const Tensor& input, const Sequence& in,
                           const Steps& steps, const OutputGradients& grads) {
  Weights w = weights_of(of, in.weights, direction);
  for (Tensor* t : {&w.ih, &w.hh, &w.ih_bias, &w.hh_bias, &w.hr}) *t = widened(*t);
  const Tensor x = widened(input), c = in.cell.defined() ? widened(in.cell[direction]).contiguous() : Tensor();
  const Tensor states = widened(grads.states);  // rows may lie in any order, as those of a batch_first module
  const OutputGradients g{states.stride(2) == 1 ? states : states.contiguous(), grads.last, grads.cell};
  const Tensor& sizes = of.packing.batch_sizes;
  const int64_t gates = of.cell == Cell::kLstm ? 4 : of.cell == Cell::kGru ? 3 : 1;
  const Walk walk{x.size(0), x.size(1), w.ih.size(0) / gates, direction == 1,
                  sizes.defined() ? sizes.const_data_ptr<int64_t>() : nullptr};
  return x.scalar_type() == at::kDouble ? walked<double>(of, walk, w, x, steps, c, g)
                                        : walked<float>(of, walk, w, x, steps, c, g);
}

}  // namespace torchgradx
