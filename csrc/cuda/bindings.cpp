// The operators on CUDA tensors: arguments are checked, results and workspace allocated, launchers chosen here; those
// on parameters that act element by element and on tables are in bindings_elementwise.cpp.
// Under CUDA_EMULATION the same operators on CPU tensors, as torchgradx_emulated::*, for the tests.
#include "batched.h"
#include "operands.h"

#include <ATen/ops/from_blob.h>

#ifdef CUDA_EMULATION
#include "../operators/schemas.h"
#else
#include <Python.h>
#endif

namespace torchgradx::cuda {
namespace {

// Which launcher serves what. All take every dtype and every stride; tensor cores, copies of 16 bytes and the
// treatment of a 1 x 1 convolution as rows are the launchers' own choice.
//
//   rank1_sq_norms           rank1
//   gram_sq_norms, conv2d's  batched Grams, of some positions; gram; the bias beside it
//   direct_sq_norms          batched gradients, of many positions; direct
//   conv2d_direct_sq_norms   planes, if it suits (many groups of few channels); direct
//
// On Hopper, direct and fused of halves go to direct_sm90 wherever it suits.
//   linear_fused             T = 1: one sum over all samples, by fused without norms where they are scaled; rank1
//                            few positions: one sum; Grams, and the bias beside them
//                            many: batched gradients
//                            else: fused
//   segments_fused           direct_sm90, or nothing
//   conv2d_fused             planes, if it suits; fused
//   linear_scaled            one sum where samples are short or direct_sm90 does not suit, which rounds the scaled
//                            gradients to their dtype; direct_sm90
//   conv2d_scaled            direct_sm90; planes, if it suits; one sum, the framework's
//
// A convolution of 1 x 1 is a Linear of its pixels wherever one of the batched ways would serve that.

// Where what becomes of every tile at a sample's end costs more than Grams. With weights samples are not joined.
bool gram_is_quicker(const LinearProblem& p, bool weighted) {
  const bool tensor_cores =
      p.dtype == DType::kHalf || p.dtype == DType::kBFloat16 || (p.dtype == DType::kFloat && p.device.tf32);
  return tensor_cores && !weighted && p.T <= 16 && p.I * p.O > 300 * (p.I + p.O);
}

void run_bias(const Run& run, const LinearProblem& p, void* sq_norms) {
  run("bias", [&](Workspace& workspace, cudaStream_t on) { return launch_bias(p, {}, sq_norms, workspace, on); });
}

template <class Problem>
void run_gram(const Run& run, const Problem& p, const SqNorms& sq_norms) {
  run("gram", [&](Workspace& workspace, cudaStream_t on) { return launch_gram(p, sq_norms.weight, workspace, on); });
  if (sq_norms.bias) run_bias(run, rows_of_bias(p), sq_norms.bias);
}

void run_rank1(const Run& run, const LinearProblem& p, const SqNorms& sq_norms) {
  run("rank1", [&](cudaStream_t stream) { return launch_rank1(p, sq_norms, stream); });
}

// Runs tiles; gradients of null: norms alone.
template <class Problem>
void run_direct(const Run& run, const Problem& p, const Gradients& gradients, const SqNorms& sq_norms) {
  run("direct", [&](Workspace& workspace, cudaStream_t stream) {
    if constexpr (std::is_same_v<Problem, Conv2dProblem>)
      if (planes_suit(p)) return launch_planes(p, gradients, sq_norms, workspace, stream);
    return launch_direct(p, gradients, sq_norms, workspace, stream);
  });
}

// Runs Hopper's kernel, if it serves.
bool run_sm90(const Run& run, const Conv2dProblem& p, const Gradients& gradients, const SqNorms& sq_norms) {
  if (!sm90_suits(p)) return false;
  run("direct_sm90", [&](Workspace& workspace, cudaStream_t stream) {
    return launch_sm90(p, gradients, sq_norms, workspace, stream);
  });
  return true;
}

bool rows_by_sm90(const Run& run, const Rows& rows, const Gradients& gradients, const SqNorms& sq_norms) {
  if (!run.device().sm90 || rows.activations.size(2) % 8) return false;
  const Rows aligned{aligned_rows(rows.activations), aligned_rows(rows.grad_output)};
  return run_sm90(run, images_of_rows(aligned, run), gradients, sq_norms);
}

// A convolution by it, and how the weight's gradient lies: channels last; rows of pixels as a Linear where the kernel
// is 1 x 1, rows of patches where it is as large as its step and channels are few.
enum class Served { kNot, kChannelsLast, kContiguous };

// One of few channels, such as an image's three: in a padded copy, channels last, the pixels under a row of the kernel
// lie side by side, so that they are the channels of a kernel that is one pixel wide.
Served rows_of_kernel_by_sm90(const Run& run, const ConvShape& s, const Tensor& input, const Tensor& g,
                              const Gradients& gradients, const SqNorms& sq_norms) {
  if (s.C > 8 || s.dilationW > 1) return Served::kNot;
  const int64_t C = s.C <= 4 && s.kW % 2 == 0 && s.strideW % 2 == 0 ? 4 : 8;  // rows of whole 16 bytes
  const int64_t high = s.H + 2 * s.padH, wide = s.W + 2 * s.padW;
  const Tensor padded = at::zeros({s.N, high, wide, C}, input.options());
  padded.narrow(1, s.padH, s.H).narrow(2, s.padW, s.W).narrow(3, 0, s.C).copy_(input.permute({0, 2, 3, 1}));
  ConvShape row = s;
  row.C = s.kW * C, row.H = high, row.W = s.outW, row.kW = row.strideW = 1, row.padH = row.padW = 0;
  const Tensor rows = padded.as_strided({s.N, row.C, high, s.outW}, {high * wide * C, 1, wide * C, s.strideW * C});
  const Conv2dProblem p = problem_of(row, rows, g, run);
  if (!gradients.weight) return run_sm90(run, p, {}, sq_norms) ? Served::kContiguous : Served::kNot;
  const Tensor weight = at::empty({s.O, s.kH, s.kW, C}, input.options());
  if (!run_sm90(run, p, {weight.mutable_data_ptr(), gradients.bias, gradients.scale}, sq_norms)) return Served::kNot;
  at::from_blob(gradients.weight, {s.O, s.C, s.kH, s.kW}, input.options())
      .copy_(weight.narrow(3, 0, s.C).permute({0, 3, 1, 2}));
  return Served::kContiguous;
}

Served images_by_sm90(const Run& run, const ConvShape& s, const Tensor& input, const Tensor& grads,
                      const Gradients& gradients, const SqNorms& sq_norms) {
  if (!run.device().sm90 || s.groups > 1 || s.O % 8 || input.element_size() != 2) return Served::kNot;
  const auto as_rows = [&](const Tensor& x, const Tensor& g) {
    return rows_by_sm90(run, {x, rows_of_pixels(g)}, gradients, sq_norms) ? Served::kContiguous : Served::kNot;
  };
  const Tensor g = in_format(grads, MemoryFormat::ChannelsLast);
  const bool unpadded = s.padH + s.padW == 0;
  if (s.C % 8) {
    const bool apart = unpadded && s.strideH == s.kH && s.strideW == s.kW && s.dilationH * s.dilationW == 1 &&
                       s.H == s.outH * s.kH && s.W == s.outW * s.kW;
    return apart ? as_rows(rows_of_patches(s, input), g)
                 : rows_of_kernel_by_sm90(run, s, input, g, gradients, sq_norms);
  }
  const Tensor x = in_format(input, MemoryFormat::ChannelsLast);
  if (s.kH * s.kW == 1 && unpadded && s.strideH * s.strideW == 1) return as_rows(rows_of_pixels(x), g);
  return run_sm90(run, problem_of(s, x, g, run), gradients, sq_norms) ? Served::kChannelsLast : Served::kNot;
}

void gram_of_rows(const Run& run, const Rows& rows, const SqNorms& sq_norms) {
  const LinearProblem p = problem_of(rows, run);
  if (!grams_are_batched(p)) return run_gram(run, p, sq_norms);
  run_grams(run, p, rows, sq_norms.weight);
  if (sq_norms.bias) run_bias(run, p, sq_norms.bias);
}

void direct_of_rows(const Run& run, const Rows& rows, const SqNorms& sq_norms) {
  if (rows_by_sm90(run, rows, {}, sq_norms)) return;
  const LinearProblem p = problem_of(rows, run);
  gradients_are_batched(p) ? run_gradients(run, p, rows, {}, sq_norms) : run_direct(run, p, {}, sq_norms);
}

void fused_of_rows(const Run& run, const Rows& rows, const Gradients& gradients, const SqNorms& sq_norms) {
  const LinearProblem p = problem_of(rows, run);
  const auto sum = [&] {
    gradients.scale || !sums_are_batched(gradients, p) ? run_direct(run, p, gradients, {})
                                                       : sum_gradients(run, rows, gradients);
  };
  if (p.T == 1) {
    sum();
    run_rank1(run, p, sq_norms);
  } else if (gram_is_quicker(p, gradients.scale)) {
    sum();
    gram_of_rows(run, rows, sq_norms);
  } else if (rows_by_sm90(run, rows, gradients, sq_norms)) {
    return;
  } else if (gradients_are_batched(p)) {
    run_gradients(run, p, rows, gradients, sq_norms);
  } else {
    run_direct(run, p, gradients, sq_norms);
  }
}

// sum_n scale_n G_n alone
void scaled_of_rows(const Run& run, const Rows& rows, const Gradients& gradients) {
  const LinearProblem p = problem_of(rows, run);
  const bool one_sum = sums_are_batched(gradients, p);
  if (!(one_sum && one_sum_is_quicker(p)) && rows_by_sm90(run, rows, gradients, {})) return;
  one_sum ? sum_gradients(run, rows, gradients) : run_direct(run, p, gradients, {});
}

// Operators

Tensor rank1_sq_norms(const Tensor& activations, const Tensor& grad_output, bool bias) {
  const RowShape s = check_rows(activations, grad_output);
  TORCHGRADX_CHECK(s.T <= 1, "rank1 needs activations [N, T, I] with T of 1 at most; got ", activations.sizes());
  return norms(activations, s.N, bias, grad_output.numel() == 0, [&](const Run& run, const SqNorms& sq_norms) {
    run_rank1(run, problem_of({activations, grad_output}, run), sq_norms);
  });
}

Tensor gram_sq_norms(const Tensor& activations, const Tensor& grad_output, bool bias) {
  const RowShape s = check_rows(activations, grad_output);
  return norms(activations, s.N, bias, grad_output.numel() == 0, [&](const Run& run, const SqNorms& sq_norms) {
    gram_of_rows(run, {activations, grad_output}, sq_norms);
  });
}

Tensor direct_sq_norms(const Tensor& activations, const Tensor& grad_output, bool bias) {
  const RowShape s = check_rows(activations, grad_output);
  return norms(activations, s.N, bias, grad_output.numel() == 0, [&](const Run& run, const SqNorms& sq_norms) {
    direct_of_rows(run, {activations, grad_output}, sq_norms);
  });
}

Tensor bias_sq_norms(const Tensor& grad_output) {
  check_operand(grad_output, "grad_output", 3, "[N, T, O]");
  const int64_t N = grad_output.size(0);
  const bool empty = grad_output.numel() == 0;
  return norms(grad_output, N, false, empty,
               [&](const Run& run, const SqNorms& out) {
                 run_bias(run, problem_of({grad_output, grad_output}, run), out.weight);
               })
      .view({N});
}

Fused linear_fused(const Tensor& activations, const Tensor& grad_output, const std::optional<Tensor>& scale,
                   bool bias) {
  const RowShape s = check_rows(activations, grad_output);
  check_scale(scale, s.N, activations);
  return gradients_and_norms(activations, {s.O, s.I}, s.N, scale, bias, grad_output.numel() == 0,
                             [&](const Run& run, const Gradients& gradients, const SqNorms& sq_norms) {
                               fused_of_rows(run, {activations, grad_output}, gradients, sq_norms);
                             });
}

// Returns true if the weight's gradient has come to be [O, kH, kW, C]; sq_norms of null: the gradients alone.
bool fused_of_images(const Run& run, const ConvShape& s, const Tensor& input, const Tensor& grads,
                     const Gradients& gradients, const SqNorms& sq_norms) {
  const Served served = images_by_sm90(run, s, input, grads, gradients, sq_norms);
  if (served != Served::kNot) return served == Served::kChannelsLast;
  const auto rows = sq_norms.weight ? rows_of_images(s, input, grads) : std::nullopt;
  const int64_t largest = std::max(s.C * s.H * s.W, s.O * s.outH * s.outW);
  const bool one_sum = !sq_norms.weight && sums_are_batched(gradients, s.N, largest);
  if (rows && gradients_are_batched(problem_of(*rows, run))) {
    fused_of_rows(run, *rows, gradients, sq_norms);
  } else if (one_sum && s.groups == 1) {
    sum_gradients(run, s, input, grads, gradients);
  } else {
    const Images images = in_one_order(s, input, grads);
    const Conv2dProblem p = problem_of(s, images.input, images.grads, run);
    one_sum && !planes_suit(p) ? sum_gradients(run, s, input, grads, gradients)
                               : run_direct(run, p, gradients, sq_norms);
  }
  return false;
}

Tensor conv2d_gram_sq_norms(const Tensor& input, const Tensor& grad_output, IntArrayRef kernel_size, IntArrayRef stride,
                            IntArrayRef padding, IntArrayRef dilation, int64_t groups, bool bias) {
  const ConvShape s = check_conv2d(input, grad_output, {kernel_size, stride, padding, dilation, groups});
  return norms(input, s.N, bias, grad_output.numel() == 0, [&](const Run& run, const SqNorms& sq_norms) {
    if (const auto rows = rows_of_images(s, input, grad_output); rows && grams_are_batched(problem_of(*rows, run)))
      return gram_of_rows(run, *rows, sq_norms);
    const Images images = in_one_order(s, input, grad_output);
    run_gram(run, problem_of(s, images.input, images.grads, run), sq_norms);
  });
}

Tensor conv2d_direct_sq_norms(const Tensor& input, const Tensor& grad_output, IntArrayRef kernel_size,
                              IntArrayRef stride, IntArrayRef padding, IntArrayRef dilation, int64_t groups,
                              bool bias) {
  const ConvShape s = check_conv2d(input, grad_output, {kernel_size, stride, padding, dilation, groups});
  return norms(input, s.N, bias, grad_output.numel() == 0, [&](const Run& run, const SqNorms& sq_norms) {
    if (images_by_sm90(run, s, input, grad_output, {}, sq_norms) != Served::kNot) return;
    if (const auto rows = rows_of_images(s, input, grad_output); rows && gradients_are_batched(problem_of(*rows, run)))
      return direct_of_rows(run, *rows, sq_norms);
    const Images images = in_one_order(s, input, grad_output);
    run_direct(run, problem_of(s, images.input, images.grads, run), {}, sq_norms);
  });
}

// The weight's gradient of halves lies as the input does, as the framework's: reference/fakes.py says so.
Tensor in_order_of(const Tensor& input, const ConvShape& s, const Tensor& weight, bool channels_last) {
  if (s.kH * s.kW == 1 || input.element_size() != 2) return weight;
  const Tensor made = channels_last ? weight.view({s.O, s.kH, s.kW, s.C}).permute({0, 3, 1, 2}) : weight;
  return made.contiguous(input.suggest_memory_format());
}

Fused conv2d_fused(const Tensor& input, const Tensor& grad_output, IntArrayRef kernel_size, IntArrayRef stride,
                   IntArrayRef padding, IntArrayRef dilation, int64_t groups, const std::optional<Tensor>& scale,
                   bool bias) {
  const ConvShape s = check_conv2d(input, grad_output, {kernel_size, stride, padding, dilation, groups});
  check_scale(scale, s.N, input);
  bool channels_last = false;  // as it was made
  const auto [weight, grad_bias, sq_norms] =
      gradients_and_norms(input, {s.O, s.C / s.groups, s.kH, s.kW}, s.N, scale, bias, grad_output.numel() == 0,
                          [&](const Run& run, const Gradients& gradients, const SqNorms& sq_norms) {
                            channels_last = fused_of_images(run, s, input, grad_output, gradients, sq_norms);
                          });
  return {in_order_of(input, s, weight, channels_last), grad_bias, sq_norms};
}

// Lengths that never repeat would be planned anew each time: three leading bits are enough to choose by.
int64_t rounded(int64_t length) {
  int64_t step = 16;  // direct_sm90's
  while (length > 8 * step) step *= 2;
  return (length + step - 1) / step * step;
}

std::vector<Tensor> segments_fused(const Tensor& activations, const Tensor& grad_output, const Tensor& starts,
                                   int64_t longest, bool weight, bool bias) {
  const Tensor all_a = activations.unsqueeze(0), all_g = grad_output.unsqueeze(0);
  const RowShape s = check_rows(all_a, all_g);
  TORCHGRADX_CHECK(starts.scalar_type() == at::kInt && starts.dim() == 1 && starts.is_contiguous() &&
                       starts.device() == activations.device(),
                   "starts must be [N + 1] of int32 on ", activations.device(), "; got ", starts.scalar_type(), " ",
                   starts.sizes(), " on ", starts.device());
  const int64_t N = starts.size(0) - 1;
  if (N < 1 || s.T == 0 || s.O == 0 || s.I % 8 || s.I == 0 || activations.element_size() != 2 ||
      !Run(activations).device().sm90)  // before rows are aligned
    return {};
  const Rows rows{aligned_rows(all_a), aligned_rows(all_g)};
  const auto problem = [&](const Run& run) {
    Conv2dProblem p = images_of_rows(rows, run);
    p.N = N, p.W = p.outW = rounded(longest), p.starts = starts.const_data_ptr<int>(), p.rows = s.T;
    return p;
  };
  if (!sm90_suits(problem(Run(activations)))) return {};
  if (!weight)
    return {norms(activations, N, bias, false,
                  [&](const Run& run, const SqNorms& sq_norms) { run_sm90(run, problem(run), {}, sq_norms); })};
  const auto [made, of_bias, sq] =
      gradients_and_norms(activations, {s.O, s.I}, N, std::nullopt, bias, false,
                          [&](const Run& run, const Gradients& gradients, const SqNorms& sq_norms) {
                            run_sm90(run, problem(run), gradients, sq_norms);
                          });
  return {made, of_bias, sq};
}

Scaled linear_scaled(const Tensor& activations, const Tensor& grad_output, const Tensor& scale, bool bias) {
  const RowShape s = check_rows(activations, grad_output);
  check_scale(scale, s.N, activations);
  const auto [weight, grad_bias, none] =
      gradients_and_norms(activations, {s.O, s.I}, std::nullopt, scale, bias, grad_output.numel() == 0,
                          [&](const Run& run, const Gradients& gradients, const SqNorms&) {
                            scaled_of_rows(run, {activations, grad_output}, gradients);
                          });
  return {weight, grad_bias};
}

Scaled conv2d_scaled(const Tensor& input, const Tensor& grad_output, IntArrayRef kernel_size, IntArrayRef stride,
                     IntArrayRef padding, IntArrayRef dilation, int64_t groups, const Tensor& scale, bool bias) {
  const ConvShape s = check_conv2d(input, grad_output, {kernel_size, stride, padding, dilation, groups});
  check_scale(scale, s.N, input);
  bool channels_last = false;
  const auto [weight, grad_bias, none] =
      gradients_and_norms(input, {s.O, s.C / s.groups, s.kH, s.kW}, std::nullopt, scale, bias, grad_output.numel() == 0,
                          [&](const Run& run, const Gradients& gradients, const SqNorms& no_norms) {
                            channels_last = fused_of_images(run, s, input, grad_output, gradients, no_norms);
                          });
  return {in_order_of(input, s, weight, channels_last), grad_bias};
}

}  // namespace
}  // namespace torchgradx::cuda

IMPLEMENT_OPERATORS(m) {
  using namespace torchgradx::cuda;
  m.impl("rank1_sq_norms", rank1_sq_norms);
  m.impl("gram_sq_norms", gram_sq_norms);
  m.impl("direct_sq_norms", direct_sq_norms);
  m.impl("bias_sq_norms", bias_sq_norms);
  m.impl("linear_fused", linear_fused);
  m.impl("segments_fused", segments_fused);
  m.impl("linear_scaled", linear_scaled);
  m.impl("conv2d_gram_sq_norms", conv2d_gram_sq_norms);
  m.impl("conv2d_direct_sq_norms", conv2d_direct_sq_norms);
  m.impl("conv2d_fused", conv2d_fused);
  m.impl("conv2d_scaled", conv2d_scaled);
}

#ifdef CUDA_EMULATION

TORCH_LIBRARY(torchgradx_emulated, m) {
  torchgradx::define_operators(m);
}

#else

// The module is there to be imported, and says what was compiled in.
PyMODINIT_FUNC PyInit__cuda() {
  static PyModuleDef definition = {
      PyModuleDef_HEAD_INIT, "_cuda", nullptr, -1, nullptr, nullptr, nullptr, nullptr, nullptr};
  PyObject* const module = PyModule_Create(&definition);
  if (module) PyModule_AddStringConstant(module, "architectures", TORCHGRADX_CUDA_ARCHITECTURES);
  return module;
}

#endif
