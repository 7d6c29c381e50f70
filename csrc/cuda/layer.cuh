// Host: a problem of either kind as two operands of rows, on which the kernels work. A 1x1 convolution whose pixels are
// evenly spaced becomes a linear layer. Here it is also decided in what pieces an operand can be copied, and so which
// of its dimensions lies contiguous in the tiles.
#pragma once

#include "dispatch.cuh"
#include "operand.cuh"

#include <cstdlib>

namespace torchgradx::cuda {

template <class Loader_>
struct Layer {
  using Loader = Loader_;
  Loader activations, grads;  // of one group
  int64_t N;
  int groups;
  int last_positions;    // of the last sample, which is shorter where samples were joined
  bool inner_positions;  // in shared memory, for halves

  int64_t O() const {
    return int64_t(groups) * grads.features;
  }
};

// The largest of 16, 8 and 4 that divides the address and every step taken from it; 0 if that is no more than an
// element.
inline int chunk_bytes(const void* data, std::initializer_list<int64_t> strides, int itemsize) {
  for (int bytes = 16; bytes > itemsize && bytes >= 4; bytes /= 2) {
    bool divides = reinterpret_cast<uintptr_t>(data) % bytes == 0;
    for (const int64_t stride : strides) divides = divides && stride * itemsize % bytes == 0;
    if (divides) return bytes;
  }
  return 0;
}

template <class scalar_t>
int chunks_along(const DenseRows<scalar_t>& rows, bool positions) {
  if ((positions ? rows.t : rows.f) != 1) return 0;
  return chunk_bytes(rows.data, {positions ? rows.f : rows.t, rows.n, rows.group}, sizeof(scalar_t));
}

// Along features a chunk lies within one tap; along positions there must be no taps, and no step between rows of
// pixels.
template <class scalar_t>
int chunks_along(const Im2colRows<scalar_t>& rows, bool positions) {
  constexpr int64_t kVector = 16 / sizeof(scalar_t);
  if (positions) {
    const bool rows_joined = rows.strideH == 1 && rows.strideW == 1 && rows.padH == 0 && rows.padW == 0 &&
                             rows.last.divisor == 1 && rows.middle.divisor == 1 && rows.w == 1 && rows.h == rows.W;
    return rows_joined ? chunk_bytes(rows.data, {rows.channel().offset, rows.n, rows.group}, sizeof(scalar_t)) : 0;
  }
  if (!rows.channels_last || rows.channel().offset != 1 || rows.last.divisor % kVector) return 0;
  return chunk_bytes(rows.data, {rows.h, rows.w, rows.n, rows.group}, sizeof(scalar_t));
}

template <class scalar_t>
bool positions_closer(const DenseRows<scalar_t>& rows) {
  return std::abs(rows.t) < std::abs(rows.f);
}
template <class scalar_t>
bool positions_closer(const Im2colRows<scalar_t>& rows) {
  return std::abs(rows.w) < std::abs(rows.channel().offset);
}

// Halves are read from tiles that lie either way; wide types only along mn, and are transposed in copying if need be.
template <class Loader>
void choose_access(Layer<Loader>& layer, bool over_positions) {
  Loader &a = layer.activations, &b = layer.grads;
  const int by_position = chunks_along(a, true) + chunks_along(b, true);
  const int by_feature = chunks_along(a, false) + chunks_along(b, false);
  layer.inner_positions = by_position == by_feature ? positions_closer(a) : by_position > by_feature;
  const bool inner = sizeof(typename Loader::scalar_t) == 2 ? layer.inner_positions : !over_positions;
  for (Loader* rows : {&a, &b}) rows->access = {chunks_along(*rows, inner), positions_closer(*rows) == over_positions};
}

template <class scalar_t>
DenseRows<scalar_t> dense_rows(const DenseOperand& operand, int64_t positions, int64_t features, int64_t group) {
  return {static_cast<const scalar_t*>(operand.data),
          operand.n,
          group,
          operand.t,
          operand.feature,
          int(positions),
          int(features),
          {}};
}

template <class scalar_t>
Layer<DenseRows<scalar_t>> make_layer(const LinearProblem& p) {
  return {dense_rows<scalar_t>(p.activations, p.T, p.I, 0),
          dense_rows<scalar_t>(p.grad_output, p.T, p.O, 0),
          p.N,
          1,
          int(p.T),
          false};
}

// A stride that is never taken counts as the one that makes the pixels evenly spaced.
inline bool evenly_spaced(const ConvOperand& operand, int64_t H, int64_t W) {
  return H == 1 || W == 1 || operand.h == W * operand.w;
}
inline bool is_pointwise(const Conv2dProblem& p) {
  return p.kH == 1 && p.kW == 1 && p.strideH == 1 && p.strideW == 1 && p.padH == 0 && p.padW == 0 &&
         evenly_spaced(p.input, p.H, p.W) && evenly_spaced(p.grad_output, p.outH, p.outW);
}

template <class scalar_t>
Layer<DenseRows<scalar_t>> make_pointwise_layer(const Conv2dProblem& p) {
  const int64_t C = p.C / p.groups, O = p.O / p.groups, T = p.H * p.W;
  const auto rows = [&](const ConvOperand& x, int64_t channels) {
    return dense_rows<scalar_t>({x.data, x.n, p.W == 1 ? x.h : x.w, x.c}, T, channels, channels * x.c);
  };
  return {rows(p.input, C), rows(p.grad_output, O), p.N, int(p.groups), int(T), false};
}

template <class scalar_t>
Im2colRows<scalar_t> im2col_rows(const ConvOperand& x, int64_t channels, int64_t H, int64_t W, const Conv2dProblem& p) {
  Im2colRows<scalar_t> rows{};
  rows.data = static_cast<const scalar_t*>(x.data);
  rows.n = x.n, rows.group = channels * x.c, rows.h = x.h, rows.w = x.w;
  rows.channels_last = std::abs(x.c) < std::abs(x.w);
  rows.H = int(H), rows.W = int(W);
  rows.positions = int(p.outH * p.outW);
  rows.out_width = FastDivisor(p.outW);
  return rows;
}

template <class scalar_t>
Im2colRows<scalar_t> patches(const Conv2dProblem& p) {
  using Digit = typename Im2colRows<scalar_t>::Digit;
  const int64_t C = p.C / p.groups;
  auto rows = im2col_rows<scalar_t>(p.input, C, p.H, p.W, p);
  rows.features = int(C * p.kH * p.kW);
  rows.strideH = int(p.strideH), rows.strideW = int(p.strideW), rows.padH = int(p.padH), rows.padW = int(p.padW);
  const Digit channel{p.input.c, 0, 0, int(p.kH * p.kW)};
  const Digit down{p.dilationH * p.input.h, int(p.dilationH), 0, int(p.kW)};
  const Digit along{p.dilationW * p.input.w, 0, int(p.dilationW), 1};
  if (rows.channels_last) {
    rows.digits[0] = down, rows.digits[1] = along, rows.digits[2] = channel;
    rows.middle = FastDivisor(p.kW), rows.last = FastDivisor(C);
  } else {
    rows.digits[0] = channel, rows.digits[1] = down, rows.digits[2] = along;
    rows.middle = FastDivisor(p.kH), rows.last = FastDivisor(p.kW);
  }
  return rows;
}

template <class scalar_t>
Im2colRows<scalar_t> pixels(const Conv2dProblem& p) {  // of grad_output: patches of one pixel
  const int64_t O = p.O / p.groups;
  auto rows = im2col_rows<scalar_t>(p.grad_output, O, p.outH, p.outW, p);
  rows.features = int(O);
  rows.strideH = rows.strideW = 1;
  rows.digits[rows.channels_last ? 2 : 0] = {p.grad_output.c, 0, 0, 1};
  rows.middle = FastDivisor(1), rows.last = FastDivisor(rows.channels_last ? O : 1);
  return rows;
}

template <class scalar_t>
Layer<Im2colRows<scalar_t>> make_patch_layer(const Conv2dProblem& p) {
  return {patches<scalar_t>(p), pixels<scalar_t>(p), p.N, int(p.groups), int(p.outH * p.outW), false};
}

// Calls f(layer) with the problem's operands.
template <class F>
cudaError_t with_layer(const LinearProblem& p, const F& f) {
  if (!fits(p)) return cudaErrorInvalidValue;
  return dispatch(p.dtype, [&](auto zero) { return f(make_layer<decltype(zero)>(p)); });
}
template <class F>
cudaError_t with_layer(const Conv2dProblem& p, const F& f) {
  if (!fits(p)) return cudaErrorInvalidValue;
  return dispatch(p.dtype, [&](auto zero) {
    return is_pointwise(p) ? f(make_pointwise_layer<decltype(zero)>(p)) : f(make_patch_layer<decltype(zero)>(p));
  });
}

}  // namespace torchgradx::cuda
