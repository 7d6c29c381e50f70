// The Gram matrices of a Linear's rows. Of no more than a span of positions: dot products of the rows as they lie, some
// channels of all of them at a time, in tiles of the upper triangle. Beyond that: the squares of gram.h, whose packing
// then costs little.
#pragma once

#include "gram.h"
#include "rows.h"

namespace torchgradx::cpu {

// Of one operand, as gram_nanoseconds; what a sample costs besides, it costs any algorithm.
inline double row_gram_nanoseconds(int64_t T, int64_t channels) {
  if (T > kSpan) return gram_nanoseconds(T, channels);
  return double(channels) * double(T) * (0.05 + double(T + 8) / 160);
}

// Tiles of a sample's Gram matrix, see Kernels::row_gram. What pads it adds nothing.
template <class acc_t>
class RowGram {
 public:
  RowGram(int64_t T, const Kernels<acc_t>& kernels)
      : T_(T), kernels_(kernels), count_(round_up(T, kSide)), ld_(kRowBytes / int64_t(sizeof(acc_t)) + kernels.lanes) {}

  int64_t packed() const {
    return count_ * ld_;
  }
  int64_t size() const {
    return count_ * (count_ + kSide) / 2;
  }

  void compute(const Operand& from, const RowKernels<acc_t>& kernels, int64_t n, int64_t channels, acc_t* packed,
               acc_t* tiles) const {
    const int64_t most = ld_ - kernels_.lanes;
    std::fill(packed + T_ * ld_, packed + count_ * ld_, acc_t(0));
    for (int64_t c = 0; c < channels; c += most) {
      const int64_t depth = std::min(most, channels - c), whole = round_up(depth, kernels_.lanes);
      kernels.pack(packed, ld_, from.at(n, 0, 0, c), T_, depth, from.x, from.c);
      for (int64_t t = 0; depth < whole && t < T_; ++t)
        std::fill(packed + t * ld_ + depth, packed + t * ld_ + whole, acc_t(0));
      kernels_.row_gram(packed, ld_, count_, whole, c > 0, tiles);
    }
  }

  GramSum sum(const acc_t* of_a, const acc_t* of_b) const {
    GramSum result, above;
    const int64_t diagonal = kSide * count_;
    kernels_.products(of_a, of_b, diagonal, &result.sum, &result.magnitude);
    kernels_.products(of_a + diagonal, of_b + diagonal, size() - diagonal, &above.sum, &above.magnitude);
    result.sum += 2 * above.sum, result.magnitude += 2 * above.magnitude;
    for (int64_t t = 0; t < T_; ++t) {
      const int64_t place = t / kSide * kSide * kSide + t % kSide * (kSide + 1);
      result.meet(of_a[place], of_b[place]);
    }
    return result;
  }

 private:
  static constexpr int64_t kRowBytes = 1 << 10;  // 32 such rows stay in L1

  const int64_t T_;
  const Kernels<acc_t>& kernels_;
  const int64_t count_, ld_;
};

template <class acc_t>
struct RowSource {
  const Operand a, b;
  const RowKernels<acc_t>& pack;
  acc_t* kept = nullptr;  // of all samples' grads, for other weights
  bool known = false;

  RowSource(const Tensor& activations, const Tensor& grad_output, SharedGrads* shared = nullptr)
      : a(rows_of(activations)), b(rows_of(grad_output)), pack(kernels<acc_t>().of(activations.scalar_type())) {
    const int64_t N = grad_output.size(0), T = grad_output.size(1);
    if (!shared || T > kSpan) return;
    known = shared->gram.defined();
    const int64_t size = RowGram<acc_t>(T, kernels<acc_t>()).size();
    if (!known) shared->gram = results({N, size}, c10::CppTypeToScalarType<acc_t>(), false);
    kept = shared->gram.mutable_data_ptr<acc_t>();
  }

  GramSum sum(int64_t n, int64_t T, int64_t I, int64_t O) const {
    if (T > kSpan) return gram_sum<acc_t>(*this, n, T, I, O);
    const RowGram<acc_t> gram(T, kernels<acc_t>());
    Workspace<acc_t>& workspace = Workspace<acc_t>::mine();
    acc_t* const packed = workspace.panels.get(gram.packed());
    acc_t* const of_a = workspace.columns.get(gram.size());
    acc_t* const of_b = kept ? kept + n * gram.size() : workspace.carry.get(gram.size());
    gram.compute(a, pack, n, I, packed, of_a);
    if (!known) gram.compute(b, pack, n, O, packed, of_b);
    return gram.sum(of_a, of_b);
  }

  void transposed(const Operand& from, acc_t* out, int64_t n, int64_t c, int64_t depth, int64_t t,
                  int64_t count) const {
    pack.pack(out, 2 * kernels<acc_t>().lanes, from.at(n, 0, t, c), depth, count, from.c, from.x);
  }
  void activations(const GramSquare<acc_t>& square, int64_t n, int64_t T, int64_t I, int64_t s0, int64_t t0,
                   acc_t* packed, acc_t* out) const {
    square.compute(I, T, s0, t0, packed, out, [&](acc_t* to, int64_t c, int64_t depth, int64_t t, int64_t count) {
      transposed(a, to, n, c, depth, t, count);
    });
  }
  void pack_grads(acc_t* to, int64_t n, int64_t c, int64_t depth, int64_t t, int64_t count) const {
    transposed(b, to, n, c, depth, t, count);
  }
};

}  // namespace torchgradx::cpu
