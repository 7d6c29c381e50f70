// Norms from batched products of cuBLAS, a run of samples at a time: Linear's, and a table's that is a Linear's weight
// too.
#include "batched.h"

#include <ATen/autocast_mode.h>
#include <ATen/ceil_div.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/bmm.h>
#include <ATen/ops/constant_pad_nd.h>
#include <ATen/ops/convolution_backward.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/gather.h>
#include <ATen/ops/mm.h>
#include <ATen/ops/sum.h>

#include <algorithm>
#include <limits>

#ifdef CUDA_EMULATION
bool cuda_emulation_batched = false;
#endif

namespace torchgradx::cuda {
namespace {

// Bytes of a run's products: an H200's L2 holds them. The emulation's are few, so that small problems have many runs.
// Scores of gather_dots: what a run of them takes beside the model.
#ifdef CUDA_EMULATION
constexpr int64_t kRun = int64_t(8) << 10, kScores = int64_t(1) << 11;
#else
constexpr int64_t kRun = int64_t(32) << 20, kScores = int64_t(1) << 25;
#endif

// What is called here is seen by nobody else.
class Unseen {
  const at::AutoDispatchBelowADInplaceOrView no_history_;
  const c10::impl::ExcludeDispatchKeyGuard no_autocast_{c10::autocast_dispatch_keyset};
};

// x [n, R, K] times y [n, K, C] -> [n, R, C] in the accumulator's dtype
Tensor product(const Tensor& x, const Tensor& y) {
  const at::ScalarType wide = accumulator_of(x);
#ifdef CUDA_EMULATION
  return at::bmm(x.to(wide), y.to(wide));  // a CPU has no such product of halves
#else
  return x.scalar_type() == wide ? at::bmm(x, y) : at::bmm(x, y, wide);
#endif
}

// [n, T, K] with rows of zeros up to `positions`: for sizes of no whole vectors an H200's library had but a kernel of
// 70 TFLOP/s (T = 197).
Tensor padded(const Tensor& x, int64_t positions) {
  return x.size(1) == positions ? x : at::constant_pad_nd(x, {0, 0, 0, positions - x.size(1)});
}

using at::ceil_div;

// Samples of a run, if each takes so many bytes: the runs are about equal.
int64_t samples_of_run(int64_t N, int64_t bytes) {
  return ceil_div(N, std::min(N, ceil_div(N * bytes, kRun)));
}

// A weight of more than a run's bytes is cut into rows.
int64_t rows_of_run(int64_t O, int64_t bytes_of_row) {
  constexpr int64_t kAligned = 128;
  return O * bytes_of_row <= kRun ? O : std::min(O, ceil_div(kRun / bytes_of_row, kAligned) * kAligned);
}

}  // namespace

void run_gradients(const Run& run, const LinearProblem& p, const Rows& rows, const Gradients& gradients,
                   const SqNorms& sq_norms) {
  const Unseen unseen;
  const auto wide = rows.activations.options().dtype(accumulator_of(rows.activations));
  const int64_t bytes = int64_t(wide.dtype().itemsize());
  const int64_t high = rows_of_run(p.O, p.I * bytes), each = samples_of_run(p.N, high * p.I * bytes);
  const int64_t parts = p.O / high * square_parts(high * p.I) + square_parts(p.O % high * p.I);
  const Tensor squares = at::empty({p.N, sq_norms.weight ? parts : 0}, wide.dtype(at::kDouble));
  const Tensor sum = at::empty({gradients.weight && each < p.N ? high * p.I : 0}, wide);
  const auto at_byte = [](const void* base, int64_t offset) {
    return base ? static_cast<char*>(const_cast<void*>(base)) + offset : nullptr;
  };
  int64_t part = 0;
  for (int64_t row = 0; row < p.O; row += high) {
    const int64_t tall = std::min(high, p.O - row), size = tall * p.I;
    const Tensor grads = rows.grad_output.narrow(2, row, tall);
    for (int64_t n = 0; n < p.N; n += each) {
      const int64_t count = std::min(each, p.N - n);
      const bool last = n + count == p.N;
      const Tensor made = product(grads.narrow(0, n, count).mT(), rows.activations.narrow(0, n, count)).contiguous();
      GradientsOfRun of{made.const_data_ptr(), count, size};
      if (gradients.weight) {
        of.scale = at_byte(gradients.scale, n * bytes);
        of.before = n ? sum.const_data_ptr() : nullptr;
        of.last = last;
        of.sum = last ? at_byte(gradients.weight, row * p.I * rows.activations.element_size()) : sum.mutable_data_ptr();
      }
      of.squares = sq_norms.weight ? squares.mutable_data_ptr<double>() + n * parts + part : nullptr;
      of.parts = parts;
      run("gradients", [&](cudaStream_t stream) { return launch_gradients(p.dtype, of, stream); });
    }
    part += square_parts(size);
  }
  if (sq_norms.weight)
    run("squares", [&](cudaStream_t stream) {
      return launch_sum_partials(p.dtype, squares.const_data_ptr<double>(), p.N, parts, nullptr, sq_norms.weight,
                                 stream);
    });
  if (sq_norms.bias || gradients.bias)
    run("bias", [&](Workspace& workspace, cudaStream_t stream) {
      return launch_bias(p, gradients, sq_norms.bias, workspace, stream);
    });
}

namespace {

// Each sample times its scale, zeros where that is 0. masks: the others as they are.
Tensor scaled(const Run& run, const Tensor& t, const void* scale, bool masks) {
  const int64_t N = t.size(0), size = t.numel() / std::max<int64_t>(1, N);
  const bool apart = t.is_non_overlapping_and_dense() && (N <= 1 || t.stride(0) == size);
  const Tensor from = apart ? t : t.contiguous(t.suggest_memory_format());
  const Tensor to = at::empty_like(from);
  const SamplesToScale samples{from.const_data_ptr(), to.mutable_data_ptr(), N, size, scale, masks};
  run("scale", [&](cudaStream_t stream) { return launch_scale_samples(dtype_of(t), samples, stream); });
  return to;
}

}  // namespace

void sum_gradients(const Run& run, const Rows& rows, const Gradients& gradients) {
  const Unseen unseen;
  const auto flat = [&](const Tensor& t, bool masks) {
    return (gradients.scale ? scaled(run, t, gradients.scale, masks) : t).flatten(0, 1);
  };
  const Tensor a = flat(rows.activations, true), b = flat(rows.grad_output, false);
  Tensor weight = at::from_blob(gradients.weight, {b.size(1), a.size(1)}, a.options());
  at::mm_out(weight, b.t(), a);
  if (!gradients.bias) return;
  Tensor bias = at::from_blob(gradients.bias, {b.size(1)}, b.options());
  at::sum_out(bias, b, at::IntArrayRef({0}));
}

// As the framework makes it, and no more reproducible than that.
void sum_gradients(const Run& run, const ConvShape& s, const Tensor& input, const Tensor& grads,
                   const Gradients& gradients) {
  const Unseen unseen;
  const auto operand = [&](const Tensor& t, bool masks) {
    const Tensor made = scaled(run, t, gradients.scale, masks);
#ifdef CUDA_EMULATION
    return made.to(accumulator_of(t));  // a CPU has no such convolution of halves
#else
    return made;
#endif
  };
  const Tensor x = operand(input, true), g = operand(grads, false);
  const int64_t sizes[] = {s.O, s.C / s.groups, s.kH, s.kW};
  const Tensor weight = at::empty(sizes, x.options());  // of which sizes alone are read
  const auto [none, made, bias] = at::convolution_backward(
      g, x, weight, at::IntArrayRef({s.O}), {s.strideH, s.strideW}, {s.padH, s.padW}, {s.dilationH, s.dilationW},
      /*transposed=*/false, {0, 0}, s.groups, {false, true, gradients.bias != nullptr});
  at::from_blob(gradients.weight, sizes, input.options()).copy_(made);
  if (gradients.bias) at::from_blob(gradients.bias, {s.O}, input.options()).copy_(bias);
}

void run_grams(const Run& run, const LinearProblem& p, const Rows& rows, void* sq_norms) {
  const Unseen unseen;
  const int64_t bytes = int64_t(c10::elementSize(accumulator_of(rows.activations)));
  const int64_t pitch = gram_pitch(p.T), each = samples_of_run(p.N, 2 * pitch * pitch * bytes), parts = gram_parts(p.T);
  const Tensor memory =
      at::empty({p.N * parts * int64_t(sizeof(GramSums))}, rows.activations.options().dtype(at::kByte));
  GramSums* const sums = static_cast<GramSums*>(memory.mutable_data_ptr());
  for (int64_t n = 0; n < p.N; n += each) {
    const int64_t count = std::min(each, p.N - n);
    const auto gram = [&](const Tensor& of) {
      const Tensor mine = padded(of.narrow(0, n, count), pitch);
      return product(mine, mine.mT());
    };
    const Tensor of_a = gram(rows.activations), of_b = gram(rows.grad_output);
    const GramsOfRun of{of_a.const_data_ptr(), of_b.const_data_ptr(), count, p.T, parts, sums + n * parts};
    run("gram", [&](cudaStream_t stream) { return launch_grams(p.dtype, of, stream); });
  }
  run("gram", [&](Workspace& workspace, cudaStream_t stream) {
    return launch_verdict(p, sums, parts, sq_norms, workspace, stream);
  });
}

namespace {

// <E_n, H_n> = sum over t, s of (grad_rows_t . activations_s) grad_output[s, ids_t]: [n, S, T] products, and as many
// numbers taken from grad_output. Nothing waits: an id outside of the table makes its sample NaN.
Tensor gather_dots(const Tensor& indices, const Tensor& grad_rows, const Tensor& activations, const Tensor& grad_output,
                   std::optional<int64_t> padding_idx) {
  const RowShape s = check_gather_dots(indices, grad_rows, activations, grad_output);
  const auto options = grad_rows.options().dtype(accumulator_of(grad_rows));
  const int64_t T = grad_rows.size(1);
  if (grad_rows.numel() == 0 || activations.numel() == 0 || grad_output.numel() == 0) return at::zeros({s.N}, options);
  const c10::DeviceGuard guard(grad_rows.device());
  const Unseen unseen;
  const Tensor dots = at::empty({s.N}, options.dtype(at::kDouble));
  const int64_t each = std::max<int64_t>(1, kScores / (s.T * T));
  for (int64_t n = 0; n < s.N; n += each) {
    const int64_t count = std::min(each, s.N - n);
    const auto mine = [&](const Tensor& t) { return t.narrow(0, n, count); };
    const Tensor ids = mine(indices).to(at::kLong).unsqueeze(1);  // [n, 1, T]
    const Tensor outside = (ids < 0).logical_or_(ids >= s.O);
    const Tensor known = ids.masked_fill(outside, 0).expand({count, s.T, T});
    Tensor taken = mine(grad_output).gather(2, known).to(options.dtype());  // [n, S, T]
    if (padding_idx) taken.masked_fill_(ids == *padding_idx, 0);
    taken.masked_fill_(outside, std::numeric_limits<double>::quiet_NaN());
    const Tensor scores = product(mine(activations), mine(grad_rows).mT());
    mine(dots).copy_((taken * scores).sum(at::IntArrayRef({1, 2}), false, at::kDouble));
  }
  return dots.to(options.dtype());
}

}  // namespace
}  // namespace torchgradx::cuda

IMPLEMENT_OPERATORS(m) {
  m.impl("gather_dots", torchgradx::cuda::gather_dots);
}
