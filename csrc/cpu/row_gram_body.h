// The Gram matrix of a few rows as they lie. Included by tile_body.h, under the rules of gates_body.h.

namespace torchgradx::cpu {
namespace {

template <int... I>
using Indices = std::integer_sequence<int, I...>;
template <int N>
using IndicesTo = std::make_integer_sequence<int, N>;

// In each run of 2 H lanes the sums of a's halves, then of b's.
template <int H, class Vec, int... I>
INLINE Vec add_halves(Vec a, Vec b, Indices<I...>) {
  constexpr int L = sizeof...(I);
#define FROM(half) (I % (2 * H) < H ? I / (2 * H) * 2 * H + half + I % H : L + I / (2 * H) * 2 * H + half + I % H)
#if defined(__clang__)
  return __builtin_shufflevector(a, b, FROM(0)...) + __builtin_shufflevector(a, b, FROM(H)...);
#else
  using Mask = decltype(a == b);
  return __builtin_shuffle(a, b, Mask{FROM(0)...}) + __builtin_shuffle(a, b, Mask{FROM(H)...});
#endif
#undef FROM
}

// Lane k of the result: the sum of v[k]'s lanes. L vectors.
template <class T, int L, int H = L / 2>
INLINE void transpose_add(Vector<T, L>* v) {
#pragma GCC unroll 8
  for (int k = 0; k < H; ++k) v[k] = add_halves<H>(v[k], v[k + H], IndicesTo<L>());
  if constexpr (H > 1) transpose_add<T, L, H / 2>(v);
}

// R rows of a tile. Its columns' vectors are loaded once for all of them.
template <class T, int L, int R>
INLINE void row_products(const T* rows, const T* columns, int64_t ld, int64_t depth, bool resume, T* out) {
  using Vec = Vector<T, L>;
  Vec sums[R * kSide];
#pragma GCC unroll 16
  for (int k = 0; k < R * kSide; ++k) sums[k] = Vec{};
  for (int64_t c = 0; c < depth; c += L) {
    Vec y[kSide];
#pragma GCC unroll 4
    for (int t = 0; t < kSide; ++t) y[t] = load<T, L>(columns + t * ld + c);
#pragma GCC unroll 4
    for (int s = 0; s < R; ++s) {
      const Vec x = load<T, L>(rows + s * ld + c);
#pragma GCC unroll 4
      for (int t = 0; t < kSide; ++t) sums[s * kSide + t] += x * y[t];
    }
  }
#pragma GCC unroll 16
  for (int k = 0; k < R * kSide; k += L) {
    transpose_add<T, L>(sums + k);
    store<T, L>(out + k, resume ? load<T, L>(out + k) + sums[k] : sums[k]);
  }
}

template <class T, int L, int R>
void row_gram(const T* rows, int64_t ld, int64_t count, int64_t depth, bool resume, T* tiles) {
  static_assert(kSide % R == 0 && R * kSide % L == 0, "whole tiles, whole vectors of sums");
  T *diagonal = tiles, *above = tiles + count * kSide;
  for (int64_t t = 0; t < count; t += kSide)
    for (int64_t s = 0; s <= t; s += kSide) {
      T*& out = s == t ? diagonal : above;
#pragma GCC unroll 2
      for (int r = 0; r < kSide; r += R, out += R * kSide)
        row_products<T, L, R>(rows + (s + r) * ld, rows + t * ld, ld, depth, resume, out);
    }
}

}  // namespace
}  // namespace torchgradx::cpu
