// Launchers called as the binding calls them, but for what it never passes on: sizes of zero. For ctypes.
#include "kernels.h"

namespace torchgradx::cuda {
namespace {

enum Which { kDirect, kFused, kGram, kBias };

template <class Problem>
int run(int which, const Problem& p, float* sq_norms, float* gradients, void* memory, size_t bytes) {
  const SqNorms norms{sq_norms, sq_norms + p.N};
  const Gradients sums{gradients, gradients + 64, nullptr};
  const auto launch = [&](Workspace& workspace) {
    switch (which) {
      case kDirect:
      case kFused:
        return launch_direct(p, which == kFused ? sums : Gradients{}, norms, workspace, nullptr);
      case kGram:
        return launch_gram(p, norms.weight, workspace, nullptr);
      default:
        return launch_bias(rows_of_bias(p), sums, norms.bias, workspace, nullptr);
    }
  };
  Workspace counted, workspace(memory);
  if (const cudaError_t error = launch(counted)) return int(error);
  return size_t(counted.size()) > bytes ? -1 : int(launch(workspace));
}

}  // namespace
}  // namespace torchgradx::cuda

using namespace torchgradx::cuda;

// operands: zeros, for both. The results: sq_norms [2, N], gradients [64] and [64].
extern "C" {

int launch_linear(int which, int dtype, int64_t N, int64_t T, int64_t I, int64_t O, const void* operands,
                  float* sq_norms, float* gradients, void* workspace, size_t bytes) {
  const DenseOperand a{operands, T * I, I, 1}, b{operands, T * O, O, 1};
  const LinearProblem p{DType(dtype), N, T, I, O, a, b, {4, false}};
  return run(which, p, sq_norms, gradients, workspace, bytes);
}

// Channels last, with gaps; 1 x 1 filters over padding, which is what makes it no linear layer.
int launch_conv2d(int which, int dtype, int64_t N, int64_t side, int64_t C, int64_t O, const void* operands,
                  float* sq_norms, float* gradients, void* workspace, size_t bytes) {
  const auto image = [&](int64_t channels) {
    const int64_t w = channels + 2;
    return ConvOperand{operands, side * side * w, 1, side * w, w};
  };
  const Conv2dProblem p{
      {N, C, side, side, O, side, side, 1, 1, 2, 2, 1, 1, 1, 1, 1}, DType(dtype), image(C), image(O), {4, false}};
  return run(which, p, sq_norms, gradients, workspace, bytes);
}
}
