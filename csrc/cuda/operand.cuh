// How an element of an operand is found: rows t (positions) by columns f (features) of one sample, each given by a
// Place; a pair of Places is an address, or padding. A Place costs a few divisions and is kept; a pair costs an
// addition. DenseRows are rows as they lie; Im2colRows are the patches of a convolution, of which no copy is ever made.
#pragma once

#include "device.cuh"

namespace torchgradx::cuda {

// x / divisor for 0 <= x < 2^31 by a multiplication: the GPU has no instruction to divide integers.
struct FastDivisor {
  uint32_t divisor = 1, multiplier = 1u << 31, shift = 0;

  FastDivisor() = default;
  explicit FastDivisor(int64_t d) {
    if (d == 0) return;  // of an operand without elements
    divisor = uint32_t(d);
    while ((uint64_t(1) << shift) < uint64_t(d)) ++shift;
    multiplier = uint32_t(((uint64_t(1) << (31 + shift)) + uint64_t(d) - 1) / uint64_t(d));
  }
  __device__ __forceinline__ int divide(int x) const {
    return int((uint64_t(uint32_t(x)) * multiplier) >> (31 + shift));
  }
  __device__ __forceinline__ int take_remainder(int& x) const {  // x becomes the quotient
    const int quotient = divide(x), remainder = x - quotient * int(divisor);
    x = quotient;
    return remainder;
  }
};

// What staging needs to know of either kind, set for one kernel's use of it.
struct Access {
  int chunk_bytes;  // 16, 8 or 4: chunks along the tile's inner dimension may be copied in pieces of it; 0: by element
  bool lanes_along_k;  // by element: neighbouring lanes take neighbours along the contracted dimension
};

template <class scalar_t_>
struct DenseRows {
  using scalar_t = scalar_t_;
  using Place = int64_t;
  static constexpr bool kPlain = true;  // kPlain: neither padding nor taps, only strides

  const scalar_t* data;
  int64_t n, group, t, f;  // strides
  int positions, features;
  Access access;

  __device__ __forceinline__ const scalar_t* sample(int64_t index, int g) const {
    return data + index * n + g * group;
  }
  __device__ __forceinline__ Place position(int index) const {
    return index * t;
  }
  __device__ __forceinline__ Place feature(int index) const {
    return index * f;
  }
  __device__ __forceinline__ const scalar_t* at(const scalar_t* sample, Place position, Place feature) const {
    return sample + position + feature;
  }
  // Where feature f stands in a row of the weight gradient.
  __device__ __forceinline__ int64_t weight_column(int index) const {
    return index;
  }
};

// Features are triples of digits (channel, kh, kw) in either order: with channels last in the image they come last
// here, so that neighbouring features are neighbours in memory.
template <class scalar_t_>
struct Im2colRows {
  using scalar_t = scalar_t_;
  struct alignas(16) Place {
    int64_t offset;
    int y, x;
  };
  static constexpr bool kPlain = false;

  struct Digit {
    int64_t offset;  // in the image
    int y, x;
    int weight;  // in a row of the weight gradient
  };

  const scalar_t* data;
  int64_t n, group, h, w;  // strides
  int H, W, positions, features;
  int strideH, strideW, padH, padW;
  FastDivisor out_width, last, middle;
  Digit digits[3];  // first, middle, last
  bool channels_last;
  Access access;

  const Digit& channel() const {
    return digits[channels_last ? 2 : 0];
  }

  __device__ __forceinline__ const scalar_t* sample(int64_t index, int g) const {
    return data + index * n + g * group;
  }
  __device__ __forceinline__ Place position(int index) const {
    const int x = out_width.take_remainder(index) * strideW - padW, y = index * strideH - padH;
    return {y * h + x * w, y, x};
  }
  __device__ __forceinline__ Place feature(int index) const {
    const int c = last.take_remainder(index), b = middle.take_remainder(index), a = index;
    return {a * digits[0].offset + b * digits[1].offset + c * digits[2].offset,
            a * digits[0].y + b * digits[1].y + c * digits[2].y, a * digits[0].x + b * digits[1].x + c * digits[2].x};
  }
  __device__ __forceinline__ const scalar_t* at(const scalar_t* sample, const Place& p, const Place& f) const {
    const bool inside = unsigned(p.y + f.y) < unsigned(H) && unsigned(p.x + f.x) < unsigned(W);
    return inside ? sample + (p.offset + f.offset) : nullptr;
  }
  __device__ __forceinline__ int64_t weight_column(int index) const {
    const int c = last.take_remainder(index), b = middle.take_remainder(index), a = index;
    return int64_t(a) * digits[0].weight + b * digits[1].weight + c * digits[2].weight;
  }
};

}  // namespace torchgradx::cuda
