// The framework's forward of a recurrent layer, step by step where its steps are wanted.
#include "recurrence.h"

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>

namespace torchgradx {
namespace {

constexpr int64_t kLstmMode = 2;  // as ideep numbers them

// Where at::lstm goes to oneDNN in float32 (ATen/native/RNN.cpp, use_mkldnn).
bool in_onednn(const Recurrence& of, const Sequence& in) {
  return of.cell == Cell::kLstm && !of.single && !of.projects && !of.packing.rows.defined() && at::hasMKLDNN() &&
         at::globalContext().userEnabledMkldnn() && in.input.is_cpu() && in.input.scalar_type() == at::kFloat;
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
  const bool lstm = of.cell == Cell::kLstm, gru = of.cell == Cell::kGru, tanh = of.cell == Cell::kTanh;
  if (of.single) {
    const Tensor x = in.input.squeeze(1), h = in.state[0];
    const auto b_ih = of.biases ? maybe(w[2]) : std::nullopt, b_hh = of.biases ? maybe(w[3]) : std::nullopt;
    if (lstm) {
      const auto [y, c] = at::lstm_cell(x, {h, in.cell[0]}, w[0], w[1], b_ih, b_hh);
      return {y.unsqueeze(0), {}, c.unsqueeze(0)};
    }
    const auto cell = gru ? at::gru_cell : tanh ? at::rnn_tanh_cell : at::rnn_relu_cell;
    return {cell(x, h, w[0], w[1], b_ih, b_hh).unsqueeze(0), {}, {}};
  }
  Ran ran;
  if (!of.packing.rows.defined()) {
    const Tensor x = in.input.transpose(0, 1);
    const auto layer = gru    ? at::_ops::gru_input::call
                       : tanh ? at::_ops::rnn_tanh_input::call
                              : at::_ops::rnn_relu_input::call;
    if (lstm)
      std::tie(ran.states, ran.last, ran.cells) =
          at::lstm(x, {in.state, in.cell}, w, of.biases, 1, 0.0, of.training, of.both_ways, /*batch_first=*/false);
    else
      std::tie(ran.states, ran.last) = layer(x, in.state, w, of.biases, 1, 0.0, of.training, of.both_ways, false);
    return ran;
  }
  const Tensor& sizes = of.packing.batch_sizes;
  const auto layer = gru    ? at::_ops::gru_data::call
                     : tanh ? at::_ops::rnn_tanh_data::call
                            : at::_ops::rnn_relu_data::call;
  if (lstm)
    std::tie(ran.states, ran.last, ran.cells) =
        at::lstm(in.input, sizes, {in.state, in.cell}, w, of.biases, 1, 0.0, of.training, of.both_ways);
  else
    std::tie(ran.states, ran.last) = layer(in.input, sizes, in.state, w, of.biases, 1, 0.0, of.training, of.both_ways);
  ran.states = padded(of.packing, ran.states);
  return ran;
}

// As at::lstm does, with what oneDNN leaves for its own backward.
Ran onednn(const Recurrence& of, const Sequence& in, std::vector<Steps>& steps, bool late) {
  const at::AutoDispatchBelowADInplaceOrView below;  // no graph; yet without grad mode it keeps no workspace
  const at::AutoGradMode enabled(true);
  const Tensor x = in.input.transpose(0, 1).contiguous();
  Tensors states, last, cells;
  for (int64_t d = 0; d < of.directions(); ++d) {
    const Weights w = weights_of(of, in.weights, d);
    const Tensor none = of.biases ? Tensor() : at::zeros({w.ih.size(0)}, w.ih.options());
    auto [y, h, c, workspace] =
        at::mkldnn_rnn_layer(x, w.ih, w.hh, of.biases ? w.ih_bias : none, of.biases ? w.hh_bias : none,
                             in.state[d].contiguous(), in.cell[d].contiguous(), d == 1, {}, kLstmMode, w.hh.size(1), 1,
                             of.biases, of.both_ways, false, /*train=*/true);
    states.push_back(y), last.push_back(h), cells.push_back(c);
    steps[d].kept = workspace;
    if (late && d == 0) steps[d].states = y, steps[d].late = true;
  }
  const auto stacked = [&](const Tensors& t) { return (of.both_ways ? at::stack(t) : t[0]).view_as(in.state); };
  return {of.both_ways ? at::cat(states, -1) : states[0], stacked(last), stacked(cells)};
}

struct Silence : c10::WarningHandler {
  void process(const c10::Warning&) override {}
};

Output arranged(const Recurrence& of, const Ran& ran) {
  const Tensor& order = of.packing.unsorted;
  const auto by_sample = [&](const Tensor& t) {  // [*, B, *] -> [B, *, *]
    if (!t.defined()) return t;
    return (order.defined() ? t.index_select(1, order) : t).transpose(0, 1);
  };
  return {by_sample(ran.states), by_sample(ran.last), by_sample(ran.cells)};
}

}  // namespace

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

Tensor Steps::previous() const {
  return late ? at::constant_pad_nd(states.narrow(0, 0, states.size(0) - 1), {0, 0, 0, 0, 1, 0}) : states;
}

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

Output run(const Recurrence& of, const Sequence& in, std::vector<Steps>& steps, bool late) {
  Silence silence;  // of cuDNN, whose weights of a layer are no piece of memory alone
  std::optional<c10::WarningUtils::WarningHandlerGuard> silent;
  if (!in.input.is_cpu()) silent.emplace(&silence);
  steps.resize(of.directions());
  const at::NoGradGuard no_grad;
  const Ran ran = in_onednn(of, in) ? onednn(of, in, steps, late) : stepwise(of, in);
  // Not before: below autograd a transposed weight no longer says that it wants a gradient, on which the choice of
  // product depends, and with it the last bits.
  const at::AutoDispatchBelowADInplaceOrView below;
  const int64_t width = ran.states.size(2) / of.directions();
  for (int64_t d = 0; d < of.directions(); ++d) {
    const Tensor mine = ran.states.narrow(2, d * width, width);
    if (!steps[d].late) steps[d].states = shifted(of, mine, in.state[d], d == 1);
    if (of.cell <= Cell::kTanh) steps[d].kept = mine.clone(at::MemoryFormat::Contiguous);
  }
  return arranged(of, ran);
}

}  // namespace torchgradx
