// Loops over lines. Included by gates_body.h, under its rules.
#include "tile_body.h"

namespace torchgradx::cpu {
namespace {

template <class T, int W>
INLINE Vector<T, W> splat(T v) {
  return Vector<T, W>{} + v;
}
template <class T, int W>
INLINE Vector<T, W> where(decltype(Vector<T, W>{} > T(0)) mask, Vector<T, W> yes, Vector<T, W> no) {
  using Mask = decltype(mask);
  return (Vector<T, W>)((mask & (Mask)yes) | (~mask & (Mask)no));
}

// Rounded to nearest, ties to even.
template <class T, int W>
INLINE void store_as(T* p, Vector<T, W> v) {
  store<T, W>(p, v);
}
template <class T, int W>
INLINE void store_as(bfloat16_bits* p, Vector<float, W> v) {
  const auto bits = (Vector<uint32_t, W>)v;
  const auto nan = (Vector<uint32_t, W>)(v != v);
  const auto rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
  const auto half = __builtin_convertvector((rounded & ~nan) | (nan & 0x7fc0u), Vector<uint16_t, W>);
  __builtin_memcpy(p, &half, sizeof half);
}
template <class T, int W>
INLINE void store_as(float16_bits* p, Vector<float, W> v) {
  using Bits = Vector<uint32_t, W>;
  const auto bits = (Bits)v, sign = (bits >> 16) & 0x8000u, size = bits & 0x7fffffffu;
  const auto normal = (size - 0x38000000u + 0xfffu + ((size >> 13) & 1u)) >> 13;
  // Adding 1/2 leaves a subnormal's bits at the foot of the mantissa, rounded.
  const auto subnormal = (Bits)((Vector<float, W>)size + 0.5f) - 0x3f000000u;
  const auto is_small = (Bits)(size < 0x38800000u), is_large = (Bits)(size >= 0x47800000u),
             is_nan = (Bits)(size > 0x7f800000u);
  const auto finite = (is_small & subnormal) | (~is_small & normal);
  const auto special = 0x7c00u | (is_nan & 0x200u);
  const auto half = __builtin_convertvector(sign | (is_large & special) | (~is_large & finite), Vector<uint16_t, W>);
  __builtin_memcpy(p, &half, sizeof half);
}

template <class T, int W, bool kNegative>
INLINE Vector<T, W> feature(Vector<T, W> x, Vector<T, W> mean, Vector<T, W> rstd) {
  if constexpr (kNegative)
    return where<T, W>(x > T(0), Vector<T, W>{}, x);
  else
    return (x - mean) * rstd;
}

// ---- a line's tail ----

template <class T, int L>
struct TailMask {  // L lanes off, L lanes on
  T lanes[2 * L];
  constexpr TailMask() : lanes{} {
    for (int l = L; l < 2 * L; ++l) lanes[l] = 1;
  }
};
template <class T, int L>
constexpr TailMask<T, L> kTailMask;

// The last n % L elements of a line of n in the last lanes, `fill` in the others: no scalar loop over whole lines, no
// reads outside of them.
template <class T, int L, class S>
INLINE Vector<T, L> load_tail(const S* line, int64_t n, T fill) {
  const int64_t tail = n % L;
  const Vector<T, L> others = splat<T, L>(fill);
  if (n >= L) return where<T, L>(load<T, L>(kTailMask<T, L>.lanes + tail) != T(0), load<T, L>(line + n - L), others);
  T padded[L];
  store<T, L>(padded, others);
  for (int64_t c = 0; c < tail; ++c) padded[L - tail + c] = value(line[c]);
  return load<T, L>(padded);
}

// ---- sums along a line ----

// add(accumulator's index, loader of a vector of a line) for each vector of a line
template <int L, class Add>
INLINE void each_vector(int64_t count, const Add& add) {
  int64_t c = 0;
  for (; c + 2 * L <= count; c += 2 * L) add(0, c, false), add(1, c + L, false);
  if (c + L <= count) add(0, c, false), c += L;
  if (c < count) add(1, c, true);
}

template <class T, int L, class S, bool kNegative, bool kWeighted, bool kSquares>
INLINE void dots_rows(const Lines<T>& b, const T* w, const RowSums<T>& to) {
  using Vec = Vector<T, L>;
  const S *x = static_cast<const S*>(b.x), *g = static_cast<const S*>(b.g);
  const int64_t count = b.columns;
  for (int64_t r = 0; r < b.rows; ++r, x += b.x_along, g += b.g_along) {
    const T mean = b.mean[r];
    const Vec means = splat<T, L>(mean), rstds = splat<T, L>(b.rstd[r]);
    Vec sums[2][4] = {};
    each_vector<L>(count, [&](int a, int64_t c, bool tail) __attribute__((always_inline)) {
      const Vec grad = tail ? load_tail<T, L>(g, count, 0) : load<T, L>(g + c);
      const Vec f = feature<T, L, kNegative>(tail ? load_tail<T, L>(x, count, mean) : load<T, L>(x + c), means, rstds);
      Vec weighted = grad;
      if constexpr (kWeighted) weighted *= tail ? load_tail<T, L>(w, count, 0) : load<T, L>(w + c);
      sums[a][0] += weighted, sums[a][1] += weighted * f;
      if constexpr (kSquares) sums[a][2] += grad * grad, sums[a][3] += grad * f * (grad * f);
    });
    const auto sum = [&](int k) __attribute__((always_inline)) { return sum_lanes<T, L>(sums[0][k] + sums[1][k]); };
    to.sums[r] += sum(0), to.products[r] += sum(1);
    if constexpr (kSquares) to.squares[r] += sum(2), to.sq_products[r] += sum(3);
  }
}

template <class T, int L, class S, bool kNegative>
void dots(const Lines<T>& lines, const T* w, const RowSums<T>& to) {
  if (to.squares && w)
    dots_rows<T, L, S, kNegative, true, true>(lines, w, to);
  else if (to.squares)
    dots_rows<T, L, S, kNegative, false, true>(lines, w, to);
  else if (w)
    dots_rows<T, L, S, kNegative, true, false>(lines, w, to);
  else
    dots_rows<T, L, S, kNegative, false, false>(lines, w, to);
}

template <class T, int L, class S>
void moments(const Lines<T>& b, T* sums, T* squares) {
  using Vec = Vector<T, L>;
  const S* x = static_cast<const S*>(b.x);
  for (int64_t r = 0; r < b.rows; ++r, x += b.x_along) {
    Vec sum[2] = {}, square[2] = {};
    const Vec mean = splat<T, L>(b.mean[r]);
    each_vector<L>(b.columns, [&](int a, int64_t c, bool tail) __attribute__((always_inline)) {
      const Vec off = (tail ? load_tail<T, L>(x, b.columns, b.mean[r]) : load<T, L>(x + c)) - mean;
      sum[a] += off, square[a] += off * off;
    });
    sums[r] += sum_lanes<T, L>(sum[0] + sum[1]), squares[r] += sum_lanes<T, L>(square[0] + square[1]);
  }
}

template <class T, int L>
T settle(const T* values, int64_t count, T scale, T* sum) {
  Vector<T, L> squares[2] = {};
  const auto step = [&](int a, int64_t c) __attribute__((always_inline)) {
    const Vector<T, L> v = load<T, L>(values + c);
    squares[a] += v * v;
    if (sum) store<T, L>(sum + c, load<T, L>(sum + c) + v * scale);
  };
  int64_t c = 0;
  for (; c + 2 * L <= count; c += 2 * L) step(0, c), step(1, c + L);
  if (c + L <= count) step(0, c), c += L;
  T all = sum_lanes<T, L>(squares[0] + squares[1]);
  for (; c < count; ++c) {
    all += values[c] * values[c];
    if (sum) sum[c] += values[c] * scale;
  }
  return all;
}

// ---- sums by column ----

// R rows of columns [c, c + W)
template <class T, int W, int R, class S, Feature kFeature>
INLINE void columns_at(const Lines<T>& b, int64_t r0, int64_t c, T* sums, T* products) {
  using Vec = Vector<T, W>;
  Vec sum = load<T, W>(sums + c), product = load<T, W>(products + c), mean{}, rstd{};
  if constexpr (kFeature == Feature::kByColumn) mean = load<T, W>(b.mean + c), rstd = load<T, W>(b.rstd + c);
  const S *x = static_cast<const S*>(b.x) + r0 * b.x_along + c, *g = static_cast<const S*>(b.g) + r0 * b.g_along + c;
#pragma GCC unroll 4
  for (int r = 0; r < R; ++r, x += b.x_along, g += b.g_along) {
    if constexpr (kFeature == Feature::kByRow) mean = splat<T, W>(b.mean[r0 + r]), rstd = splat<T, W>(b.rstd[r0 + r]);
    const Vec grad = load<T, W>(g);
    sum += grad;
    product += grad * feature<T, W, kFeature == Feature::kNegative>(load<T, W>(x), mean, rstd);
  }
  store<T, W>(sums + c, sum), store<T, W>(products + c, product);
}

template <class T, int L, int R, class S, Feature kFeature>
INLINE void columns_rows(const Lines<T>& b, int64_t r, T* sums, T* products) {
  int64_t c = 0;
  for (; c + L <= b.columns; c += L) columns_at<T, L, R, S, kFeature>(b, r, c, sums, products);
  for (; c < b.columns; ++c) columns_at<T, 1, R, S, kFeature>(b, r, c, sums, products);
}

template <class T, int L, class S, Feature kFeature>
void columns(const Lines<T>& b, T* sums, T* products) {
  int64_t r = 0;
  for (; r + 4 <= b.rows; r += 4) columns_rows<T, L, 4, S, kFeature>(b, r, sums, products);
  for (; r < b.rows; ++r) columns_rows<T, L, 1, S, kFeature>(b, r, sums, products);
}

template <class T, int W, class S>
INLINE void column_moments_at(const Lines<T>& b, int64_t c, T* sums, T* squares) {
  const S* x = static_cast<const S*>(b.x) + c;
  Vector<T, W> sum = load<T, W>(sums + c), square = load<T, W>(squares + c);
  const Vector<T, W> mean = load<T, W>(b.mean + c);
  for (int64_t r = 0; r < b.rows; ++r, x += b.x_along) {
    const Vector<T, W> off = load<T, W>(x) - mean;
    sum += off, square += off * off;
  }
  store<T, W>(sums + c, sum), store<T, W>(squares + c, square);
}

template <class T, int L, class S>
void column_moments(const Lines<T>& b, T* sums, T* squares) {
  int64_t c = 0;
  for (; c + L <= b.columns; c += L) column_moments_at<T, L, S>(b, c, sums, squares);
  for (; c < b.columns; ++c) column_moments_at<T, 1, S>(b, c, sums, squares);
}

// ---- the input's gradient ----

enum class Formula { kNormalised, kFrozen, kPrelu };

template <class T, int W, bool kByColumn>
INLINE Vector<T, W> coefficient(const T* from, int64_t r, int64_t c) {
  if constexpr (kByColumn)
    return load<T, W>(from + c);
  else
    return splat<T, W>(from[r]);
}

// R rows of columns [c, end) in steps of W, so that what stands by column is read once for them all
template <class T, int W, int R, class S, Formula kFormula, bool kStatistics, bool kWeight, bool kSums>
INLINE int64_t gradient_span(const Lines<T>& b, const Gradient<T>& to, const ColumnSums<T>& by_column, int64_t r0,
                             int64_t c, int64_t end) {
  using Vec = Vector<T, W>;
  const S *x = static_cast<const S*>(b.x) + r0 * b.x_along, *g = static_cast<const S*>(b.g) + r0 * b.g_along;
  S* const out = static_cast<S*>(to.out) + r0 * to.along;
  constexpr bool kNormal = kFormula == Formula::kNormalised, kScaled = kFormula != Formula::kPrelu;
  Vec mean[R], rstd[R], weight[R], shift[R], slope[R], factor[R];
  const auto fetch = [&](int64_t at, bool inside) __attribute__((always_inline)) {
#pragma GCC unroll 4
    for (int r = 0; r < R; ++r) {
      const int64_t row = r0 + r;
      if (kStatistics == inside && kScaled) rstd[r] = coefficient<T, W, kStatistics>(b.rstd, row, at);
      if (kStatistics == inside && kNormal) {
        mean[r] = coefficient<T, W, kStatistics>(b.mean, row, at);
        shift[r] = coefficient<T, W, kStatistics>(to.shift, row, at);
        slope[r] = coefficient<T, W, kStatistics>(to.slope, row, at);
      }
      if (kSums && !inside) factor[r] = splat<T, W>(by_column.factor[row]);
      if (kWeight == inside) weight[r] = coefficient<T, W, kWeight>(to.weight, row, at);
    }
  };
  fetch(0, false);
  for (; c + W <= end; c += W) {
    fetch(c, true);
    Vec sum{}, product{};
    if constexpr (kSums) sum = load<T, W>(by_column.sums + c), product = load<T, W>(by_column.products + c);
#pragma GCC unroll 4
    for (int r = 0; r < R; ++r) {
      const Vec grad = load<T, W>(g + r * b.g_along + c);
      Vec result = grad * weight[r];
      if constexpr (kFormula == Formula::kPrelu)
        result = where<T, W>(load<T, W>(x + r * b.x_along + c) > T(0), grad, result);
      if constexpr (kNormal) {
        const Vec xhat = (load<T, W>(x + r * b.x_along + c) - mean[r]) * rstd[r];
        result -= shift[r] + xhat * slope[r];
        if constexpr (kSums) {
          if (W > 1) {  // of the next block: the processor's own prefetching ends with a line
            __builtin_prefetch(x + r * b.x_along + c + b.rows * b.x_along);
            __builtin_prefetch(g + r * b.g_along + c + b.rows * b.g_along);
          }
          const Vec scaled = grad * factor[r];
          sum += scaled, product += scaled * xhat;
        }
      }
      if constexpr (kScaled) result *= rstd[r];
      store_as<T, W>(out + r * to.along + c, result);
    }
    if constexpr (kSums) store<T, W>(by_column.sums + c, sum), store<T, W>(by_column.products + c, product);
  }
  return c;
}

template <class T, int L, int R, class S, Formula kFormula, bool kStatistics, bool kWeight, bool kSums>
INLINE void gradient_rows(const Lines<T>& b, const Gradient<T>& to, const ColumnSums<T>& sums, int64_t r) {
  const int64_t c = gradient_span<T, L, R, S, kFormula, kStatistics, kWeight, kSums>(b, to, sums, r, 0, b.columns);
  if (c == b.columns) return;
  if (!kSums && b.columns >= L)  // once more a few of the last vector's, with the same result
    gradient_span<T, L, R, S, kFormula, kStatistics, kWeight, kSums>(b, to, sums, r, b.columns - L, b.columns);
  else
    gradient_span<T, 1, R, S, kFormula, kStatistics, kWeight, kSums>(b, to, sums, r, c, b.columns);
}

template <class T, int L, class S, Formula kFormula, bool kStatistics, bool kWeight, bool kSums>
INLINE void gradients(const Lines<T>& b, const Gradient<T>& to, const ColumnSums<T>& sums) {
  int64_t r = 0;
  for (; r + 4 <= b.rows; r += 4) gradient_rows<T, L, 4, S, kFormula, kStatistics, kWeight, kSums>(b, to, sums, r);
  for (; r < b.rows; ++r) gradient_rows<T, L, 1, S, kFormula, kStatistics, kWeight, kSums>(b, to, sums, r);
}

template <class T, int L, class S, Formula kFormula, bool kByColumn>
void gradient(const Lines<T>& lines, const Gradient<T>& to) {
  gradients<T, L, S, kFormula, kByColumn, kByColumn, false>(lines, to, {});
}

template <class T, int L, class S>
void layer_norm(const Lines<T>& lines, const Gradient<T>& to, const ColumnSums<T>& sums) {
  gradients<T, L, S, Formula::kNormalised, false, true, true>(lines, to, sums);
}

template <class T, int L, class S>
void narrow(void* out, const T* in, int64_t count) {
  S* const to = static_cast<S*>(out);
  int64_t c = 0;
  for (; c + L <= count; c += L) store_as<T, L>(to + c, load<T, L>(in + c));
  for (; c < count; ++c) store_as<T, 1>(to + c, load<T, 1>(in + c));
}

template <class T, int L, class S>
constexpr LineKernels<T> line_kernels() {
  return {
      {dots<T, L, S, false>, dots<T, L, S, true>},
      {columns<T, L, S, Feature::kByRow>, columns<T, L, S, Feature::kByColumn>, columns<T, L, S, Feature::kNegative>},
      {gradient<T, L, S, Formula::kNormalised, false>, gradient<T, L, S, Formula::kNormalised, true>},
      {gradient<T, L, S, Formula::kFrozen, false>, gradient<T, L, S, Formula::kFrozen, true>},
      {gradient<T, L, S, Formula::kPrelu, false>, gradient<T, L, S, Formula::kPrelu, true>},
      layer_norm<T, L, S>,
      moments<T, L, S>,
      column_moments<T, L, S>,
      narrow<T, L, S>};
}

}  // namespace
}  // namespace torchgradx::cpu
