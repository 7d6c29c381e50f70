// From a DType to a type: dispatch(dtype, [&](auto zero) { using scalar_t = decltype(zero); ... return cudaSuccess; })
#pragma once

#include "device.cuh"
#include "kernels.h"

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

}  // namespace torchgradx::cuda
