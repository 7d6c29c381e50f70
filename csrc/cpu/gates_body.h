// Included after affine_body.h by the same files, under the same rules.

namespace torchgradx::cpu {
namespace {

// f(place, width as a constant): whole vectors, then single lanes
template <int W>
struct Width {
  static constexpr int value = W;
};
template <int L, class F>
INLINE void each_lane(int64_t count, const F& f) {
  int64_t j = 0;
  for (; j + L <= count; j += L) f(j, Width<L>{});
  for (; j < count; ++j) f(j, Width<1>{});
}

template <class T, int L>
void add(T* to, const T* from, int64_t count) {
  each_lane<L>(count, [&](int64_t j, auto width) __attribute__((always_inline)) {
    constexpr int W = decltype(width)::value;
    store<T, W>(to + j, load<T, W>(to + j) + load<T, W>(from + j));
  });
}

template <class T, int L>
void lstm_cells(const T* gates, const T* before, T* out, int64_t h) {
  each_lane<L>(h, [&](int64_t j, auto width) __attribute__((always_inline)) {
    constexpr int W = decltype(width)::value;
    const auto i = load<T, W>(gates + j), f = load<T, W>(gates + h + j), g = load<T, W>(gates + 2 * h + j);
    store<T, W>(out + j, f * load<T, W>(before + j) + i * g);
  });
}

template <class T, int L>
void lstm_row(const LstmRow<T>& row, int64_t h) {
  each_lane<L>(h, [&](int64_t j, auto width) __attribute__((always_inline)) {
    constexpr int W = decltype(width)::value;
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
  each_lane<L>(h, [&](int64_t j, auto width) __attribute__((always_inline)) {
    constexpr int W = decltype(width)::value;
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

template <class T, int L>
void tanh_row(const T* states, const T* grad, const T* arriving, T* out, int64_t h) {
  each_lane<L>(h, [&](int64_t j, auto width) __attribute__((always_inline)) {
    constexpr int W = decltype(width)::value;
    const auto s = load<T, W>(states + j);
    store<T, W>(out + j, (load<T, W>(grad + j) + load<T, W>(arriving + j)) * (1 - s * s));
  });
}

template <class T, int L>
void relu_row(const T* states, const T* grad, const T* arriving, T* out, int64_t h) {
  each_lane<L>(h, [&](int64_t j, auto width) __attribute__((always_inline)) {
    constexpr int W = decltype(width)::value;
    const auto s = load<T, W>(states + j);
    const auto whole = load<T, W>(grad + j) + load<T, W>(arriving + j);
    store<T, W>(out + j, where<T, W>(s <= T(0), Vector<T, W>{}, whole));
  });
}

template <class T, int L>
GateKernels<T> make_gate_kernels() {
  return {add<T, L>, lstm_cells<T, L>, lstm_row<T, L>, gru_row<T, L>, tanh_row<T, L>, relu_row<T, L>};
}

// All that is compiled for vectors of so many bytes, with tiles of R rows.
template <class T, int bytes, int R>
Isa<T> make_isa() {
  constexpr int L = bytes / sizeof(T);
  return {make_kernels<T, L, R>(), make_affine_kernels<T, L>(), make_gate_kernels<T, L>()};
}

}  // namespace
}  // namespace torchgradx::cpu
