// What a sum of products of Grams leaves for its verdict (gram.cu): enough to tell a sum from the ruins of one.
#pragma once

#include "kernels.h"

namespace torchgradx::cuda {

// Below it the square of a row, or a sum of products, may have been denormal, and so rounded to a few bits.
template <class acc_t>
constexpr double kFaint = sizeof(acc_t) == sizeof(double) ? 1e-290 : 1e-30;

struct GramSums {
  double sum, magnitude;  // of the terms, and of their absolute values
  double trace;           // of the terms s = t: sum_t |a_t|^2 |b_t|^2
  double faint;           // at least what rows may have added whose square a_t . a_t or b_t . b_t underflowed
};

}  // namespace torchgradx::cuda
