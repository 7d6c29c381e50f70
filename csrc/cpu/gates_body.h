// Steps of recurrent cells, and the table of all kernels.
// Included by tile_default.cpp, tile_avx2.cpp and tile_avx512.cpp after their target pragma; not a header of its own.
// Everything is in an anonymous namespace and nothing of std is instantiated: a function compiled for AVX-512 that the
// linker merged with its namesake elsewhere would fault on older processors.
#include "affine_body.h"

namespace torchgradx::cpu {
namespace {

// f<width>(place): whole vectors, then single lanes
template <int L, class F>
INLINE void each_lane(int64_t count, const F& f) {
  int64_t j = 0;
  for (; j + L <= count; j += L) f.template operator()<L>(j);
  for (; j < count; ++j) f.template operator()<1>(j);
}

template <class T, int L>
void lstm_cells(const T* gates, const T* before, T* out, int64_t h) {
  each_lane<L>(h, [&]<int W>(int64_t j) __attribute__((always_inline)) {
    const auto i = load<T, W>(gates + j), f = load<T, W>(gates + h + j), g = load<T, W>(gates + 2 * h + j);
    store<T, W>(out + j, f * load<T, W>(before + j) + i * g);
  });
}

template <class T, int L>
void lstm_row(const LstmRow<T>& row, int64_t h) {
  each_lane<L>(h, [&]<int W>(int64_t j) __attribute__((always_inline)) {
    const T *const q = row.gates + j, *const carried = row.carried + j;
    const auto i = load<T, W>(q), f = load<T, W>(q + h), g = load<T, W>(q + 2 * h), o = load<T, W>(q + 3 * h);
    const auto c = load<T, W>(row.before + j);
    auto y = load<T, W>((row.state ? row.state : row.squashed) + j);
    if (row.state) y = where<T, W>(o == T(0), Vector<T, W>{}, y / o);  // a division takes less than tanh
    auto grad = load<T, W>(row.grad + j);
    if (row.arriving) grad += load<T, W>(row.arriving + j);
    const auto dc = load<T, W>(carried) + grad * o * (1 - y * y);
    T* const d = row.out + j;
    store<T, W>(d, dc * g * i * (1 - i));
    store<T, W>(d + h, dc * c * f * (1 - f));
    store<T, W>(d + 2 * h, dc * i * (1 - g * g));
    store<T, W>(d + 3 * h, grad * y * o * (1 - o));
    store<T, W>(row.carried + j, dc * f);
  });
}

template <class T, int L>
void gru_row(const GruRow<T>& row, int64_t h) {
  each_lane<L>(h, [&]<int W>(int64_t j) __attribute__((always_inline)) {
    const T* const q = row.gates + j;
    const auto r = load<T, W>(q), z = load<T, W>(q + h), n = load<T, W>(q + 2 * h);
    const auto p = load<T, W>(row.previous + j), grad = load<T, W>(row.grad + j) + load<T, W>(row.arriving + j);
    const auto dn = grad * (1 - z) * (1 - n * n), dz = grad * (p - n) * z * (1 - z);
    const auto dr = dn * load<T, W>(row.hidden + 2 * h + j) * r * (1 - r);
    T *const d = row.out + j, *const e = row.out_hidden + j;
    store<T, W>(d, dr), store<T, W>(e, dr);
    store<T, W>(d + h, dz), store<T, W>(e + h, dz);
    store<T, W>(d + 2 * h, dn), store<T, W>(e + 2 * h, dn * r);
    store<T, W>(row.grad + j, grad * z);
  });
}

template <class T, int L, bool kRelu>
void plain_row(const T* states, const T* grad, const T* arriving, T* out, int64_t h) {
  each_lane<L>(h, [&]<int W>(int64_t j) __attribute__((always_inline)) {
    const auto s = load<T, W>(states + j), whole = load<T, W>(grad + j) + load<T, W>(arriving + j);
    store<T, W>(out + j, kRelu ? where<T, W>(s <= T(0), Vector<T, W>{}, whole) : whole * (1 - s * s));
  });
}

// ---- the table ----

template <class T, int L, class S>
constexpr RowKernels<T> row_kernels() {
  return {pack<T, L, S>, add_rows<T, L, S>, sq_sum<T, L, S>, line_kernels<T, L, S>()};
}

// For vectors of so many bytes, with tiles of up to R rows.
template <class T, int bytes, int R>
Kernels<T> make_kernels() {
  static_assert(R <= kMaxRows, "the table has no room for this many rows");
  constexpr int L = bytes / sizeof(T);
  Kernels<T> table{};
  table.lanes = L, table.max_rows = R;
  [&]<int... K>(Indices<K...>) {
    ((table.tile[0][K + 1] = tile<T, L, K + 1, 1>, table.tile[1][K + 1] = tile<T, L, K + 1, 2>), ...);
  }(IndicesTo<R>());
  if constexpr (R > kMaxSeriesRows) {
    table.series_rows = kMaxSeriesRows;
    [&]<int... K>(Indices<K...>) {
      ((table.series[0][K + 1] = series<T, L, K + 1, 1>, table.series[1][K + 1] = series<T, L, K + 1, 2>), ...);
    }(IndicesTo<kMaxSeriesRows>());
  }
  [&]<int... K>(Indices<K...>) { ((table.correlate[K + 1] = correlate<T, L, K + 1>), ...); }(IndicesTo<kMaxTaps>());
  table.native = row_kernels<T, L, T>();
  if constexpr (sizeof(T) == sizeof(float)) {
    table.bfloat16 = row_kernels<T, L, bfloat16_bits>();
    table.float16 = row_kernels<T, L, float16_bits>();
  }
  table.products = products<T, L>;
  table.row_gram = row_gram<T, L, (R > 6 ? 4 : 2)>;
  table.settle = settle<T, L>;
  table.gates = {lstm_cells<T, L>, lstm_row<T, L>, gru_row<T, L>, plain_row<T, L, false>, plain_row<T, L, true>};
  return table;
}

}  // namespace
}  // namespace torchgradx::cpu
