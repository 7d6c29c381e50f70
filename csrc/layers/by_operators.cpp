// The backward through time of recurrence.h by the framework's operators, for devices that have no kernels of ours.
// What the gradient of a state is multiplied by at each gate is made for all steps at once; a step is then a product
// and a few operators.
#include "recurrence.h"

#include <ATen/ATen.h>

namespace torchgradx {
namespace {

// [T, B, H]: an LSTM's cells after each step
Tensor cells_after(const Walk& walk, const Tensor& forget, const Tensor& added, const Tensor& first) {
  const Tensor after = at::zeros_like(added), cells = first.clone();
  for (int64_t k = 0; k < walk.steps; ++k) {
    const int64_t t = walk.at(k);
    const Tensor now = walk.first(cells, t);
    walk.of(after, t).copy_(now.mul_(walk.of(forget, t)).add_(walk.of(added, t)));
  }
  return after;
}

// A sigmoid's and a tanh's derivative, by their values.
Tensor sigmoid_slope(const Tensor& y) {
  return y * (1 - y);
}
Tensor tanh_slope(const Tensor& y) {
  return 1 - y * y;
}

}  // namespace

GateGradients by_operators(const Recurrence& of, const Walk& walk, const Weights& w, const Tensor& input,
                           const Steps& steps, const Tensor& first_cell, const OutputGradients& grads,
                           bool wants_input) {
  const bool lstm = of.cell == Cell::kLstm, gru = of.cell == Cell::kGru;
  const Tensor previous = widened(steps.previous());
  const int64_t h = walk.width, p = previous.size(2);
  const auto zeros = [&](at::IntArrayRef shape) { return at::zeros(shape, previous.options()); };
  const auto carried_from = [&](const Tensor& last, int64_t width) {
    return last.defined() ? widened(last).clone(at::MemoryFormat::Contiguous) : zeros({walk.rows, width});
  };
  GateGradients found;
  // What is multiplied by `gates` [T, B, gates, H]: the gradient of the cells, of an LSTM, or of the states. `passes`:
  // what of it passes the step by.
  Tensor gates, passes, out_gate, of_cells;
  if (lstm) {
    const Tensor all = lstm_gates(w, input, previous);
    const auto q = all.chunk(4, 2);  // input, forget, cell, output
    const Tensor after = cells_after(walk, q[1], q[0] * q[2], first_cell), y = after.tanh();
    const Tensor before = shifted(of, after, first_cell, walk.backwards);
    gates = at::stack({q[2] * sigmoid_slope(q[0]), before * sigmoid_slope(q[1]), q[0] * tanh_slope(q[2])}, 2);
    passes = q[1], out_gate = y * sigmoid_slope(q[3]), of_cells = q[3] * tanh_slope(y);
    if (of.projects) found.projected = q[3] * y, found.out = zeros({walk.steps, walk.rows, p});
    found.first_cell = carried_from(grads.cell, h);
  } else if (gru) {
    const auto x = at::linear(input, w.ih, maybe(w.ih_bias)).chunk(3, 2);  // reset, update, new
    const auto u = at::linear(previous, w.hh, maybe(w.hh_bias)).chunk(3, 2);
    const Tensor r = (x[0] + u[0]).sigmoid(), z = (x[1] + u[1]).sigmoid(), n = (x[2] + r * u[2]).tanh();
    const Tensor of_new = (1 - z) * tanh_slope(n);
    gates = at::stack({of_new * u[2] * sigmoid_slope(r), (previous - n) * sigmoid_slope(z), of_new * r}, 2);
    passes = z, out_gate = of_new;
  } else {
    const Tensor y = widened(steps.kept);
    gates = (of.cell == Cell::kTanh ? tanh_slope(y) : y.gt(0).to(y.scalar_type())).unsqueeze(2);
  }
  found.state = zeros({walk.steps, walk.rows, w.ih.size(0)});
  const Tensor states = gru ? zeros({walk.steps, walk.rows, h}) : Tensor();  // their gradients, at each step
  const Tensor carried = carried_from(grads.last, p);
  for (int64_t k = walk.steps; k-- > 0;) {
    const int64_t t = walk.at(k);
    Tensor carry = walk.first(carried, t), here = walk.of(found.state, t);
    Tensor g = carry.add_(walk.of(grads.states, t));
    if (of.projects) {
      walk.of(found.out, t).copy_(g);
      g = g.mm(w.hr);
    }
    Tensor by_gate = here.narrow(1, 0, gates.size(2) * h).unflatten(1, {gates.size(2), h});
    const Tensor cell = lstm ? walk.first(found.first_cell, t).addcmul_(g, walk.of(of_cells, t)) : g;
    at::mul_out(by_gate, cell.unsqueeze(1), walk.of(gates, t));
    if (lstm) {
      Tensor of_output = here.narrow(1, 3 * h, h);
      at::mul_out(of_output, g, walk.of(out_gate, t));
      cell.mul_(walk.of(passes, t));
    }
    if (gru) {
      walk.of(states, t).copy_(g);
      carry.mul_(walk.of(passes, t)).addmm_(here, w.hh);
    } else {
      at::mm_out(carry, here, w.hh);
    }
  }
  found.first_state = carried;
  // A GRU's new gate is multiplied by the reset gate at the state alone.
  found.input = gru ? at::cat({found.state.narrow(2, 0, 2 * h), states * out_gate}, 2) : found.state;
  if (wants_input) found.layer_input = found.input.matmul(w.ih);
  return found;
}

}  // namespace torchgradx
