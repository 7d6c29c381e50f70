// The backward through time of recurrence.h: from the gradient of the states to those at the gates, and from these to
// the gradients of the states before and of the layer's input.
#include "../cpu/product.h"
#include "../cpu/tile.h"
#include "recurrence.h"
#include "workspace.h"

#include <ATen/ATen.h>
#include <ATen/Parallel.h>

#include <array>

namespace torchgradx {
namespace {

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

template <class T>
GateGradients walked(const Recurrence& of, const Walk& walk, const Weights& w, const Tensor& input, const Steps& steps,
                     const Tensor& first_cell, const OutputGradients& grads, bool wants_input) {
  const Tensor states = widened(steps.states);
  const int64_t h = walk.width, rows = walk.rows, p = states.size(2), gates = w.ih.size(0);
  const auto fresh = [&](int64_t width) {  // rows a multiple of 1 KiB apart would share a few sets of the caches
    const bool apart = width * sizeof(T) % 1024 == 0;
    const std::array<int64_t, 3> sizes{walk.steps, rows, width + (apart ? int64_t(64 / sizeof(T)) : 0)};
    const Tensor made = walk.sizes ? at::zeros(sizes, states.options()) : at::empty(sizes, states.options());
    return made.narrow(2, 0, width);
  };
  const auto begun = [&](const Tensor& from, int64_t width) {  // what is carried backwards
    return from.defined() ? widened(from).clone(at::MemoryFormat::Contiguous)
                          : at::zeros({rows, width}, states.options());
  };
  const cpu::Kernels<T>& kernels = cpu::kernels<T>();
  const bool divides = !of.projects && states.is_same(steps.states);  // halves are rounded too much for it
  GateGradients found;
  Tensor q, u, cells, squashed;  // as LstmRow and GruRow have them
  View<T> ran, c;                // the gates, or the states of a plain RNN; the cells
  const T* const first = first_cell.defined() ? first_cell.const_data_ptr<T>() : nullptr;
  const auto before = [&](int64_t t, int64_t b) {  // the cells
    const int64_t s = walk.before(t, b);
    return s < 0 ? first + b * h : c.at(s, b);
  };
  if (of.cell == Cell::kLstm) {
    const LstmWorkspace theirs(steps, w, input, first_cell, walk.backwards);
    q = theirs.gates.defined() ? theirs.gates : lstm_gates(w, input, widened(steps.previous()));
    cells = theirs.cells.defined() ? theirs.cells : fresh(h);
    ran = View<T>(q), c = View<T>(cells);
    if (theirs.gates.defined() && walk.backwards) ran.turn_round(walk.steps);
    if (theirs.cells.defined() && walk.backwards) c.turn_round(walk.steps);
    if (steps.spent && theirs.gates.defined() && !walk.backwards) found.input = q;
    squashed = divides ? at::empty({rows, h}, states.options()) : Tensor();
    T* const last = divides ? squashed.data_ptr<T>() : nullptr;
    walk.each_part([&](int64_t begin, int64_t end) {
      for (int64_t k = 0; k < walk.steps; ++k) {
        const int64_t t = walk.at(k);
        for (int64_t b = begin; b < std::min(end, walk.size(t)); ++b) {
          const bool ends = walk.after(t, b) < 0;
          if (ends || !theirs.cells.defined())
            kernels.gates.cells(ran.at(t, b), before(t, b), ends && divides ? last + b * h : c.at(t, b), h);
        }
      }
    });
    if (divides)  // of each row's last: at other steps it is the state, which the next began with, over the gate
      squashed.tanh_();
    else
      squashed = at::tanh(cells);
    found.first_cell = begun(grads.cell, h);
  } else if (of.cell == Cell::kGru) {
    q = at::linear(input.contiguous(), w.ih, maybe(w.ih_bias)), u = at::linear(states, w.hh, maybe(w.hh_bias));
    q.narrow(2, 0, 2 * h).add_(u.narrow(2, 0, 2 * h)).sigmoid_();
    q.narrow(2, 2 * h, h).addcmul_(q.narrow(2, 0, h), u.narrow(2, 2 * h, h)).tanh_();
    ran = View<T>(q);
    found.state = fresh(gates);
  } else {
    q = widened(steps.kept);
    ran = View<T>(q);
  }
  if (!found.input.defined()) found.input = fresh(gates);
  if (!found.state.defined()) found.state = found.input;
  if (of.projects) {
    found.projected = q.narrow(2, 3 * h, h) * squashed;
    found.out = fresh(p);
  }
  const cpu::PackedWeight<T> of_state(w.hh);
  std::optional<cpu::PackedWeight<T>> of_input;
  if (wants_input) {  // as the input lies, which autograd then keeps, unless features lie apart
    const auto format = input.stride(2) == 1 ? at::MemoryFormat::Preserve : at::MemoryFormat::Contiguous;
    of_input.emplace(w.ih);
    found.layer_input = at::empty_like(input, format);
  }
  const View<T> hidden(u), prior(states), d(found.input), e(found.state), arrives(grads.states), x(found.layer_input);
  const View<T> tanh_of(divides ? Tensor() : squashed);
  const T* const last_tanh = squashed.defined() ? squashed.const_data_ptr<T>() : nullptr;
  T* const carried_cell = found.first_cell.defined() ? found.first_cell.template data_ptr<T>() : nullptr;
  const auto row = [&](int64_t t, int64_t b, T* grad, const T* arriving) {  // from the state's gradient to the gates'
    if (of.cell == Cell::kLstm) {
      const int64_t next = divides ? walk.after(t, b) : -1;
      const T* const state = next < 0 ? nullptr : prior.at(next - steps.late, b);
      const T* const tanh = divides ? last_tanh + b * h : tanh_of.at(t, b);
      kernels.gates.lstm({ran.at(t, b), before(t, b), state, tanh, grad, arriving, d.at(t, b), carried_cell + b * h},
                         h);
    } else if (of.cell == Cell::kGru)
      kernels.gates.gru({ran.at(t, b), hidden.at(t, b), prior.at(t, b), arriving, grad, d.at(t, b), e.at(t, b)}, h);
    else
      (of.cell == Cell::kTanh ? kernels.gates.tanh : kernels.gates.relu)(ran.at(t, b), grad, arriving, d.at(t, b), h);
  };
  const Tensor carried = begun(grads.last, p);  // the gradient of the state
  T* const carry = carried.data_ptr<T>();
  const auto back = [&](int64_t begin, int64_t end) {
    const at::AutoDispatchBelowADInplaceOrView below;  // another thread may be in grad mode
    for (int64_t k = walk.steps; k-- > 0;) {
      const int64_t t = walk.at(k), last = std::min(end, walk.size(t));
      if (last <= begin) continue;
      walk.each_row(begin, last, [&](int64_t b) {
        if (of.projects)
          kernels.native.add_rows(carry + b * p, arrives.at(t, b), 1, p, 0, 1);
        else
          row(t, b, carry + b * p, arrives.at(t, b));
      });
      if (of.projects) {
        const Tensor to = carried.narrow(0, begin, last - begin), of_cells = to.mm(w.hr);
        found.out[t].narrow(0, begin, last - begin).copy_(to);
        T* const grads_of_cells = of_cells.data_ptr<T>();
        walk.each_row(begin, last, [&](int64_t b) { row(t, b, grads_of_cells + (b - begin) * h, nullptr); });
      }
      const bool gru = of.cell == Cell::kGru;
      const cpu::Product<T> state{&of_state, carry + begin * p, p, /*add=*/gru};
      const auto times = [&](const View<T>& gates, std::initializer_list<cpu::Product<T>> products) {
        cpu::multiply(gates.at(t, begin), gates.row, last - begin, products);
      };
      if (!wants_input) {
        times(e, {state});
        continue;
      }
      const cpu::Product<T> input{&*of_input, x.at(t, begin), x.row, false};
      if (gru)
        times(e, {state}), times(d, {input});
      else
        times(d, {state, input});
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

}  // namespace

bool operators_everywhere = false;

Tensor lstm_gates(const Weights& w, const Tensor& input, const Tensor& previous) {
  const Tensor gates = at::linear(input.contiguous(), w.ih, maybe(w.ih_bias));
  gates.add_(at::linear(previous, w.hh, maybe(w.hh_bias)));
  const int64_t h = gates.size(-1) / 4;  // of input, forget, cell, output
  gates.narrow(-1, 0, 2 * h).sigmoid_();
  gates.narrow(-1, 2 * h, h).tanh_();
  gates.narrow(-1, 3 * h, h).sigmoid_();
  return gates;
}

GateGradients through_time(const Recurrence& of, int64_t direction, const Tensor& input, const Sequence& in,
                           const Steps& steps, const OutputGradients& grads, bool wants_input) {
  const at::AutoDispatchBelowADInplaceOrView below;  // nothing here is differentiated
  Weights w = weights_of(of, in.weights, direction);
  for (Tensor* t : {&w.ih, &w.hh, &w.ih_bias, &w.hh_bias, &w.hr}) *t = widened(*t);
  const Tensor x = widened(input), c = in.cell.defined() ? widened(in.cell[direction]).contiguous() : Tensor();
  const Tensor states = widened(grads.states);  // rows may lie in any order, as those of a batch_first module
  const OutputGradients g{states.stride(2) == 1 ? states : states.contiguous(), grads.last, grads.cell};
  const Tensor& sizes = of.packing.batch_sizes;
  const int64_t gates = of.cell == Cell::kLstm ? 4 : of.cell == Cell::kGru ? 3 : 1;
  const Walk walk{x.size(0), x.size(1), w.ih.size(0) / gates, direction == 1,
                  sizes.defined() ? sizes.const_data_ptr<int64_t>() : nullptr};
  if (!x.is_cpu() || operators_everywhere) return by_operators(of, walk, w, x, steps, c, g, wants_input);
  return x.scalar_type() == at::kDouble ? walked<double>(of, walk, w, x, steps, c, g, wants_input)
                                        : walked<float>(of, walk, w, x, steps, c, g, wants_input);
}

}  // namespace torchgradx
