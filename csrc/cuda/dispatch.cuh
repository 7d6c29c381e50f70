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

// A workspace by pieces, each aligned as the whole is.
class Carver {
 public:
  explicit Carver(void* workspace) : start_(static_cast<char*>(workspace)) {}

  template <class T>
  T* take(int64_t bytes) {
    char* const piece = start_ + size_;
    size_ += ceil_div<int64_t>(bytes, kAlignment) * kAlignment;
    return start_ ? reinterpret_cast<T*>(piece) : nullptr;
  }
  size_t size() const {
    return size_;
  }

 private:
  static constexpr int64_t kAlignment = 256;
  char* const start_;  // null: only the size is asked for
  int64_t size_ = 0;
};

}  // namespace torchgradx::cuda
