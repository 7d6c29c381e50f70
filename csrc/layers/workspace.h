// What oneDNN's LSTM keeps for its own backward, read in place.
#pragma once

#include "recurrence.h"

namespace torchgradx {

// Where things lie is nowhere documented: a few numbers, which any other order would place elsewhere, are computed
// again each time. What they do not agree with is undefined.
struct LstmWorkspace {
  Tensor gates;  // [T, B, 4 H], by iteration: input, forget, cell, output, activated
  Tensor cells;  // [T, B, H], by iteration, after each step but the last, whose are elsewhere

  // of a direction: input [T, B, I], first_cell [B, H]
  LstmWorkspace(const Steps& of, const Weights& w, const Tensor& input, const Tensor& first_cell, bool backwards);
};

}  // namespace torchgradx
