// Host: what launches share. dispatch(dtype, [&](auto zero) { using scalar_t = decltype(zero); ... return cudaSuccess;
// }) makes a type of a DType; the rest is how work is cut into blocks.
#pragma once

#include "device.cuh"
#include "kernels.h"

#include <algorithm>

namespace torchgradx::cuda {

template <class F>
cudaError_t dispatch(DType dtype, const F& f) {
  switch (dtype) {
    case DType::kFloat:
      return f(float{});
    case DType::kDouble:
      return f(double{});
    case DType::kBFloat16:
      return f(__nv_bfloat16{});
    case DType::kHalf:
      return f(__half{});
  }
  return cudaErrorInvalidValue;
}

inline int64_t accumulator_bytes(DType dtype) {
  return dtype == DType::kDouble ? sizeof(double) : sizeof(float);
}

inline int64_t bytes_of(DType dtype) {
  return dtype == DType::kDouble ? 8 : dtype == DType::kFloat ? 4 : 2;
}

constexpr int64_t kMostIndex = (int64_t(1) << 31) - 1024;  // an int, and a tile's more

// Sizes that are ints from here on. The binding lets none of the operands' own be 2^31; products of them may.
inline bool fits(const LinearProblem& p) {
  return std::max({p.N, p.T, p.I, p.O}) <= kMostIndex;
}
inline bool fits(const Conv2dProblem& p) {
  const int64_t T = p.outH * p.outW, I = p.C / p.groups * p.kH * p.kW;
  return std::max({p.N, T, I, p.O, p.H + 2 * p.padH, p.W + 2 * p.padW}) <= kMostIndex;
}

// Into how many runs the samples are cut, each a block per tile, so that the multiprocessors are done soonest. Time is
// counted in steps of the contraction, of which a multiprocessor does one in about 10 ns (budgeted); a copy of a tile,
// written and read while all of them wait, is worth copy_steps.
inline int choose_parts(int64_t N, int64_t tiles, int64_t steps, int64_t slots, double copy_steps = 0) {
  constexpr double kBlock = 128;  // filling the pipeline, and leaving
  if (tiles == 0) return 1;       // nothing to do
  slots = std::max<int64_t>(slots, 1);
  const int64_t most = std::min(N, (2 * slots + tiles - 1) / tiles);
  int64_t best = 1;
  double least = 0;
  for (int64_t parts = 1; parts <= most; ++parts) {
    const int64_t rounds = (tiles * parts + slots - 1) / slots, samples = (N + parts - 1) / parts;
    const double time =
        double(rounds) * (double(samples * steps) + kBlock) + (parts > 1 ? copy_steps * double(tiles * parts) : 0);
    if (parts == 1 || time < least) least = time, best = parts;
  }
  return int(best);
}

inline cudaError_t clear(void* out, int64_t bytes, cudaStream_t stream) {
  return out && bytes ? cudaMemsetAsync(out, 0, size_t(bytes), stream) : cudaSuccess;
}

}  // namespace torchgradx::cuda
