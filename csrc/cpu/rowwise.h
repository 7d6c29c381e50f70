// rank1: |a|^2 |b|^2 for rows [N, 1, D]. Squares and their product in double, so neither factor can leave float's
// range.
#pragma once

#include "passes.h"
#include "rows.h"

namespace torchgradx::cpu {

template <class acc_t>
void rank1_pass(const Tensor& activations,  // [N, 1, I]
                const Tensor& grad_output,  // [N, 1, O]
                bool bias, const Tensor& sq_norms) {
  constexpr int64_t kGrain = 1 << 15;  // elements worth a thread
  const int64_t N = activations.size(0), I = activations.size(2), O = grad_output.size(2);
  const Operand a = rows_of(activations), b = rows_of(grad_output);
  const auto& of = kernels<acc_t>().of(activations.scalar_type());
  acc_t* const out = sq_norms.mutable_data_ptr<acc_t>();
  at::parallel_for(0, N, std::max<int64_t>(1, kGrain / std::max<int64_t>(1, I + O)), [&](int64_t begin, int64_t end) {
    for (int64_t n = begin; n < end; ++n) {
      const double grads = of.sq_sum(b.at(n, 0, 0, 0), O, b.c);
      out[n] = acc_t(of.sq_sum(a.at(n, 0, 0, 0), I, a.c) * grads);
      if (bias) out[N + n] = acc_t(grads);
    }
  });
}

}  // namespace torchgradx::cpu
