// What the bindings share: a launch's device, stream and workspace, and dtypes.
// Device and stream by c10's guard for any device: no header and no library of a CUDA torch is needed, so that this
// compiles, links and loads where there is none. Nothing waits: errors are those of the launch.
#pragma once

#include "../operators/checks.h"
#include "../operators/formats.h"
#include "../operators/ops.h"
#include "kernels.h"

#include <ATen/Context.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <torch/library.h>

#include <string_view>

// Registers m.impl(...) for the backend: CUDA, or the tests' emulation of it on CPU tensors.
#ifdef CUDA_EMULATION
#define IMPLEMENT_OPERATORS(m) TORCH_LIBRARY_IMPL(torchgradx_emulated, CPU, m)
#else
#define IMPLEMENT_OPERATORS(m) TORCH_LIBRARY_IMPL(torchgradx, CUDA, m)
#endif

namespace torchgradx::cuda {

// True if Hopper's kernel serves: on its architecture alone, if compiled for that. The emulation turns it on and off.
#ifdef CUDA_EMULATION
extern "C" bool cuda_emulation_sm90;
inline bool has_sm90(int) {
  return cuda_emulation_sm90;
}
#else
inline bool has_sm90(int device) {
  static const bool compiled = std::string_view(TORCHGRADX_CUDA_ARCHITECTURES).find("9.0a") != std::string_view::npos;
  int major = 0, minor = 0;
  return compiled && cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device) == cudaSuccess &&
         cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, device) == cudaSuccess && major == 9 &&
         minor == 0;
}
#endif

// Launches for one operator on its operands' device and torch's current stream of it.
class Run {
 public:
  explicit Run(const Tensor& like)
      : guard_(like.device()),
        bytes_(like.options().dtype(at::kByte)),
        stream_(like.is_cpu()  // the emulation's
                    ? nullptr
                    : static_cast<cudaStream_t>(
                          c10::impl::VirtualGuardImpl(like.device().type()).getStream(like.device()).native_handle())) {
  }

  const Device& device() const {
    return device_;
  }

  // launch(stream), or launch(workspace, stream), first to count: torch's allocator keeps the memory until the stream
  // has done with it.
  template <class Launch>
  void operator()(const char* kernel, const Launch& launch) const {
    if constexpr (std::is_invocable_v<Launch, cudaStream_t>) {
      check(kernel, launch(stream_));
    } else {
      Workspace counted;
      check(kernel, launch(counted, stream_));
      const Tensor memory = counted.size() ? at::empty({counted.size()}, bytes_) : Tensor();
      Workspace workspace(counted.size() ? memory.mutable_data_ptr() : nullptr);
      check(kernel, launch(workspace, stream_));
    }
  }

 private:
  static Device current_device() {
    int index = 0, multiprocessors = 0;
    check("cudaGetDevice", cudaGetDevice(&index));
    check("cudaDeviceGetAttribute", cudaDeviceGetAttribute(&multiprocessors, cudaDevAttrMultiProcessorCount, index));
    // One flag for both layers: that of cuDNN is set unless someone clears it, and float32 is exact unless asked.
    // Read as cuBLAS does: the older getter refuses to answer once the newer setting has been used.
    const auto precision = at::globalContext().float32Precision(at::Float32Backend::CUDA, at::Float32Op::MATMUL);
    return {multiprocessors, precision == at::Float32Precision::TF32, has_sm90(index)};
  }

  static void check(const char* what, cudaError_t error) {
    if (error != cudaSuccess) cudaGetLastError();  // else the next launch would report it
    TORCHGRADX_CHECK(error == cudaSuccess, "torchgradx could not launch ", what, ": ", cudaGetErrorName(error), ", ",
                     cudaGetErrorString(error));
  }

  const c10::DeviceGuard guard_;
  const at::TensorOptions bytes_;
  const cudaStream_t stream_;
  const Device device_ = current_device();  // behind the guard
};

struct Rows {
  const Tensor activations, grad_output;  // [N, T, I], [N, T, O], however they lie
};

inline DType dtype_of(const Tensor& t) {
  switch (t.scalar_type()) {
    case at::kFloat:
      return DType::kFloat;
    case at::kDouble:
      return DType::kDouble;
    case at::kHalf:
      return DType::kHalf;
    case at::kBFloat16:
      return DType::kBFloat16;
    default:
      TORCHGRADX_CHECK(false, "expected float32, float64, bfloat16 or float16; got ", t.scalar_type());
  }
}

// turn.cu, for [N, R, C] of which operators/formats.h says that it turns.
Tensor turned(const Tensor& input);

inline Tensor in_format(const Tensor& t, at::MemoryFormat format) {
  return torchgradx::in_format(t, format, turned);
}

}  // namespace torchgradx::cuda
