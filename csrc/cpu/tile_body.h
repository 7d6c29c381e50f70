// Tiles, and loops over operands. Included by affine_body.h, under the rules of gates_body.h.
#include "vectors_body.h"

#include "row_gram_body.h"

namespace torchgradx::cpu {
namespace {

// ---- the register tile ----

// sum += the positions of one sample, from x and g on; where its g end.
template <class T, int L, int R, int V>
INLINE const T* add_positions(Vector<T, L> (&sum)[R][V], const Tile<T>& job, const T* first, const T* g) {
  const int64_t g_along = job.g_along, x_along = job.x_along, width = job.width;
  for (int64_t y = 0; y < job.height; ++y) {
    const T* x = first + y * job.x_down;
    for (int64_t t = 0; t < width; ++t, x += x_along, g += g_along) {
      Vector<T, L> column[V];
#pragma GCC unroll 2
      for (int v = 0; v < V; ++v) column[v] = load<T, L>(x + v * L);
#pragma GCC unroll 16
      for (int r = 0; r < R; ++r)
#pragma GCC unroll 2
        for (int v = 0; v < V; ++v) sum[r][v] += column[v] * g[r];
    }
  }
  return g;
}

// Lanes past the last column hold other columns' products, or another sample's.
template <class T, int L, int R, int V>
INLINE void drop_lanes(Vector<T, L> (&sum)[R][V], int columns) {
  using Vec = Vector<T, L>;
  T keep[V * L];
  for (int c = 0; c < V * L; ++c) keep[c] = c < columns;
#pragma GCC unroll 2
  for (int v = 0; v < V; ++v) {
    const auto kept = load<T, L>(keep + v * L) != 0;
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r) sum[r][v] = (Vec)((decltype(kept))sum[r][v] & kept);
  }
}

template <class T, int L, int R, int V>
INLINE Vector<T, L> squares_by_lane(const Vector<T, L> (&sum)[R][V]) {
  Vector<T, L> squares[2] = {Vector<T, L>{}, Vector<T, L>{}};
#pragma GCC unroll 16
  for (int r = 0; r < R; ++r)
#pragma GCC unroll 2
    for (int v = 0; v < V; ++v) squares[(r + v) % 2] += sum[r][v] * sum[r][v];
  return squares[0] + squares[1];
}

template <class T, int L, int R, int V>
void tile(const Tile<T>& job) {
  using Vec = Vector<T, L>;
  Vec sum[R][V];
#pragma GCC unroll 16
  for (int r = 0; r < R; ++r)
#pragma GCC unroll 2
    for (int v = 0; v < V; ++v) sum[r][v] = Vec{};
  T* const target = job.suspend ? job.carry : job.total;
  const int64_t along = job.suspend ? 2 * L : job.total_along;
  if (target)
    for (int r = 0; r < R; ++r) {
      __builtin_prefetch(target + r * along, 1);
      if (V == 2) __builtin_prefetch(target + r * along + L, 1);
    }
  add_positions<T, L, R, V>(sum, job, job.x, job.g);
  if (job.resume) {
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r)
#pragma GCC unroll 2
      for (int v = 0; v < V; ++v) sum[r][v] += load<T, L>(job.carry + (r * 2 + v) * L);
  }
  if (job.suspend) {
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r)
#pragma GCC unroll 2
      for (int v = 0; v < V; ++v) store<T, L>(job.carry + (r * 2 + v) * L, sum[r][v]);
    return;
  }
  if (job.columns < V * L) drop_lanes<T, L, R, V>(sum, job.columns);
  if (job.sq_sum && job.wide) {
    double squares = 0;
    for (int r = 0; r < R; ++r)
      for (int v = 0; v < V; ++v)
        for (int l = 0; l < L; ++l) squares += double(sum[r][v][l]) * sum[r][v][l];
    *job.sq_sum += squares;
  } else if (job.sq_sum) {
    *job.sq_sum += sum_lanes<T, L>(squares_by_lane<T, L, R, V>(sum));
  }
  if (!job.total || (job.scale == 0 && !job.fresh)) return;  // a sample of factor 0 adds nothing, nan included
  if (job.scale == 0)
    for (int r = 0; r < R; ++r)
      for (int v = 0; v < V; ++v) sum[r][v] = Vec{};
#pragma GCC unroll 16
  for (int r = 0; r < R; ++r)
#pragma GCC unroll 2
    for (int v = 0; v < V; ++v) {
      T* out = job.total + r * job.total_along + v * L;
      const Vec term = sum[r][v] * job.scale;
      store<T, L>(out, job.fresh ? term : load<T, L>(out) + term);
    }
}

template <class T, int L, int R, int V>
void series(const Series<T>& job) {
  using Vec = Vector<T, L>;
  const Tile<T>& tile = job.tile;
  Vec total[R][V];
#pragma GCC unroll 16
  for (int r = 0; r < R; ++r)
#pragma GCC unroll 2
    for (int v = 0; v < V; ++v)
      total[r][v] = tile.fresh ? Vec{} : load<T, L>(tile.total + r * tile.total_along + v * L);
  const T *g = tile.g, *sample = tile.x;
  T squares[kMaxSeries * L];
  for (int64_t n = 0; n < job.samples; ++n, sample += job.x_sample) {
    Vec sum[R][V];
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r)
#pragma GCC unroll 2
      for (int v = 0; v < V; ++v) sum[r][v] = Vec{};
    g = add_positions<T, L, R, V>(sum, tile, sample, g);
    if (tile.columns < V * L) drop_lanes<T, L, R, V>(sum, tile.columns);
    store<T, L>(squares + n * L, squares_by_lane<T, L, R, V>(sum));
    const T scale = job.scale ? job.scale[n] : T(1);
    if (scale == 0) continue;
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r)
#pragma GCC unroll 2
      for (int v = 0; v < V; ++v) total[r][v] += sum[r][v] * scale;
  }
  // Here, where those of the samples overlap: each is a chain of steps that wait for one another.
  for (int64_t n = 0; n < job.samples; ++n) tile.sq_sum[n] += sum_lanes<T, L>(load<T, L>(squares + n * L));
#pragma GCC unroll 16
  for (int r = 0; r < R; ++r)
#pragma GCC unroll 2
    for (int v = 0; v < V; ++v) store<T, L>(tile.total + r * tile.total_along + v * L, total[r][v]);
}

// ---- loops over operands ----

template <class T, int W, class S>
INLINE void copy(T* out, const S* in) {
  store<T, W>(out, load<T, W>(in));
}

// Tails are copied by a second, overlapping vector: no reads or writes outside the row, no scalar loop.
template <class T, int L, class S>
INLINE void copy_row(T* out, const S* in, int64_t n) {
  if (n >= L) {
    for (int64_t c = 0; c + L <= n; c += L) copy<T, L>(out + c, in + c);
    if (n % L) copy<T, L>(out + n - L, in + n - L);
  } else if constexpr (L > 2) {
    copy_row<T, L / 2>(out, in, n);
  } else {
    for (int64_t c = 0; c < n; ++c) out[c] = value(in[c]);
  }
}

#if defined(__clang__)
#define SHUFFLE(a, b, i, j, k, l) __builtin_shufflevector(a, b, i, j, k, l)
#else
#define SHUFFLE(a, b, i, j, k, l) __builtin_shuffle(a, b, Mask{i, j, k, l})
#endif

// out[r * ld + c] = in[r + c * stride], 4 x 4
template <class T, class S>
INLINE void transpose4(T* out, int64_t ld, const S* in, int64_t stride) {
  using Vec = Vector<T, 4>;
#if !defined(__clang__)
  using Mask = decltype(Vec{} == Vec{});
#endif
  const Vec a = load<T, 4>(in), b = load<T, 4>(in + stride), c = load<T, 4>(in + 2 * stride),
            d = load<T, 4>(in + 3 * stride);
  const Vec ab_low = SHUFFLE(a, b, 0, 4, 1, 5), ab_high = SHUFFLE(a, b, 2, 6, 3, 7);
  const Vec cd_low = SHUFFLE(c, d, 0, 4, 1, 5), cd_high = SHUFFLE(c, d, 2, 6, 3, 7);
  store<T, 4>(out, SHUFFLE(ab_low, cd_low, 0, 1, 4, 5));
  store<T, 4>(out + ld, SHUFFLE(ab_low, cd_low, 2, 3, 6, 7));
  store<T, 4>(out + 2 * ld, SHUFFLE(ab_high, cd_high, 0, 1, 4, 5));
  store<T, 4>(out + 3 * ld, SHUFFLE(ab_high, cd_high, 2, 3, 6, 7));
}

template <class T, int L, class S>
void pack(T* out, int64_t ld, const void* source, int64_t rows, int64_t columns, int64_t row_stride,
          int64_t column_stride) {
  const S* in = static_cast<const S*>(source);
  if (column_stride == 1) {
    for (int64_t r = 0; r < rows; ++r) {
      const S* const row = in + r * row_stride;
      copy_row<T, L>(out + r * ld, row, columns);
      // The columns that are wanted next, too far apart to be foreseen. A number: they may lie past the end.
      const auto next = (__UINTPTR_TYPE__)(row + columns);
      __builtin_prefetch((const void*)next, 0, 2);
      __builtin_prefetch((const void*)(next + (columns - 1) * sizeof(S)), 0, 2);
    }
  } else if (L >= 4 && row_stride == 1 && rows >= 4 && columns >= 4) {
    if constexpr (L >= 4)
      for (int64_t block = 0; block < columns; block += 4) {
        const int64_t c = block + 4 <= columns ? block : columns - 4;
        for (int64_t r = 0; r + 4 <= rows; r += 4)
          transpose4(out + r * ld + c, ld, in + r + c * column_stride, column_stride);
        if (rows % 4) transpose4(out + (rows - 4) * ld + c, ld, in + rows - 4 + c * column_stride, column_stride);
      }
  } else {
    for (int64_t r = 0; r < rows; ++r)
      for (int64_t c = 0; c < columns; ++c) out[r * ld + c] = value(in[r * row_stride + c * column_stride]);
  }
}

template <class T, int L, class S>
INLINE T sum_along(const S* in, int64_t count, int64_t stride) {
  T sum = 0;
  int64_t k = 0;
  if (stride == 1) {
    Vector<T, L> lanes[2] = {Vector<T, L>{}, Vector<T, L>{}};
    for (; k + 2 * L <= count; k += 2 * L) lanes[0] += load<T, L>(in + k), lanes[1] += load<T, L>(in + k + L);
    sum = sum_lanes<T, L>(lanes[0] + lanes[1]);
  }
  for (; k < count; ++k) sum += value(in[k * stride]);
  return sum;
}

template <class T, int L, class S>
void add_rows(T* sum, const void* source, int64_t rows, int64_t columns, int64_t row_stride, int64_t column_stride) {
  const S* in = static_cast<const S*>(source);
  if (column_stride != 1) {
    for (int64_t c = 0; c < columns; ++c) sum[c] += sum_along<T, L>(in + c * column_stride, rows, row_stride);
    return;
  }
  int64_t c = 0;
  for (; c + 2 * L <= columns; c += 2 * L) {
    Vector<T, L> lanes[2] = {Vector<T, L>{}, Vector<T, L>{}};
    for (int64_t r = 0; r < rows; ++r) {
      lanes[0] += load<T, L>(in + r * row_stride + c);
      lanes[1] += load<T, L>(in + r * row_stride + c + L);
    }
    store<T, L>(sum + c, load<T, L>(sum + c) + lanes[0]);
    store<T, L>(sum + c + L, load<T, L>(sum + c + L) + lanes[1]);
  }
  T rest[2 * L] = {};
  for (int64_t r = 0; r < rows; ++r)
    for (int64_t k = c; k < columns; ++k) rest[k - c] += value(in[r * row_stride + k]);
  for (int64_t k = c; k < columns; ++k) sum[k] += rest[k - c];
}

// In float, eight squares a lane before they join a sum in double: half the time of squares in double. Rounds by less
// than the float that the sum ends in. Where squares may have left float's range: nothing like a sum.
template <int L, class S>
INLINE double short_sq_sum(const S* in, int64_t count) {
  using Floats = Vector<float, L>;
  constexpr int64_t kBlock = 4 * L, kRun = 8 * kBlock;
  double sum = 0;
  int64_t k = 0;
  while (k + kBlock <= count) {
    const int64_t end = k + kRun < count ? k + kRun : count;
    Floats lanes[4] = {Floats{}, Floats{}, Floats{}, Floats{}};
    for (; k + kBlock <= end; k += kBlock)
#pragma GCC unroll 4
      for (int v = 0; v < 4; ++v) {
        const Floats x = load<float, L>(in + k + v * L);
        lanes[v] += x * x;
      }
    sum += sum_lanes<float, L>((lanes[0] + lanes[1]) + (lanes[2] + lanes[3]));
  }
  for (; k < count; ++k) sum += double(value(in[k])) * value(in[k]);
  return sum;
}

template <class T, int L, class S>
double sq_sum(const void* source, int64_t count, int64_t stride) {
  const S* in = static_cast<const S*>(source);
  if constexpr (sizeof(T) == sizeof(float))
    if (stride == 1) {
      const double sum = short_sq_sum<L>(in, count);
      if (sum > double(count) * 1e-30 && sum < 1e300) return sum;
    }
  constexpr int D = L * sizeof(T) / sizeof(double);
  using Doubles = Vector<double, D>;
  double sum = 0;
  int64_t k = 0;
  if (stride == 1) {
    Doubles lanes[2] = {Doubles{}, Doubles{}};
    for (; k + 2 * D <= count; k += 2 * D) {
      const auto first = __builtin_convertvector((load<T, D>(in + k)), Doubles);
      const auto second = __builtin_convertvector((load<T, D>(in + k + D)), Doubles);
      lanes[0] += first * first, lanes[1] += second * second;
    }
    sum = sum_lanes<double, D>(lanes[0] + lanes[1]);
  }
  for (; k < count; ++k) sum += double(value(in[k * stride])) * value(in[k * stride]);
  return sum;
}

template <class T, int L>
void products(const T* a, const T* b, int64_t count, double* sum, double* magnitude) {
  constexpr int D = L * sizeof(T) / sizeof(double);
  using Doubles = Vector<double, D>;
  Doubles totals{}, absolutes{};
  int64_t k = 0;
  for (; k + D <= count; k += D) {
    const Doubles term =
        __builtin_convertvector((load<T, D>(a + k)), Doubles) * __builtin_convertvector((load<T, D>(b + k)), Doubles);
    totals += term;
    absolutes += term < 0 ? -term : term;
  }
  double total = sum_lanes<double, D>(totals), absolute = sum_lanes<double, D>(absolutes);
  for (; k < count; ++k) {
    const double term = double(a[k]) * b[k];
    total += term, absolute += term < 0 ? -term : term;
  }
  *sum += total, *magnitude += absolute;
}

template <class T, int L, int K>
void correlate(const T* g, const T* x, const int64_t* offsets, int64_t count, T* out) {
  Vector<T, L> sums[K];
  const T* shifted[K];
#pragma GCC unroll 16
  for (int k = 0; k < K; ++k) sums[k] = Vector<T, L>{}, shifted[k] = x + offsets[k];
  for (int64_t i = 0; i < count; i += L) {
    const Vector<T, L> grad = load<T, L>(g + i);
#pragma GCC unroll 16
    for (int k = 0; k < K; ++k) sums[k] += grad * load<T, L>(shifted[k] + i);
  }
#pragma GCC unroll 16
  for (int k = 0; k < K; ++k) out[k] += sum_lanes<T, L>(sums[k]);
}

}  // namespace
}  // namespace torchgradx::cpu
