// What a step of a recurrent cell does element by element, on the way back: loops over one row, compiled for each
// processor as the tiles are.
#pragma once

#include <cstdint>

namespace torchgradx::cpu {

template <class T>
struct LstmRow {              // gates: input, forget, cell, output
  const T *gates, *before;    // [4, H]; the cells before
  const T *state, *squashed;  // [H], after: the state, or if there is none tanh of the cells
  const T *grad, *arriving;   // [H], of the state: their sum; arriving may be null
  T *out, *carried;           // [4, H]; of the cells, after the step and then before it
};

template <class T>
struct GruRow {                        // gates: reset, update, new
  const T *gates, *hidden, *previous;  // [3, H]; W_hh h + b_hh [3, H]; the state before
  const T* arriving;                   // [H], of the state, beside grad
  T *grad, *out, *out_hidden;          // [H], becomes what passes the step by; [3, H], at x and at h
};

template <class T>
struct GateKernels {
  void (*cells)(const T* gates, const T* before, T* out, int64_t h);  // of an LSTM
  void (*lstm)(const LstmRow<T>& row, int64_t h);
  void (*gru)(const GruRow<T>& row, int64_t h);
  void (*tanh)(const T* states, const T* grad, const T* arriving, T* out, int64_t h);  // of a plain RNN
  void (*relu)(const T* states, const T* grad, const T* arriving, T* out, int64_t h);
};

}  // namespace torchgradx::cpu
