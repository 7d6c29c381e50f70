// How operands [N, T, G, K] are read line by line. A line is one position's features where those are contiguous
// (a LayerNorm's, channels_last), else one feature's positions (planes of pixels). What is not contiguous either way,
// or differs from its partner, is packed into cache-sized scratch.
#pragma once

#include "../operators/checks.h"
#include "../operators/lines.h"
#include "affine.h"
#include "sweep.h"

namespace torchgradx::cpu {

// Of one operand's lines that are worked on together. Rows of features: as few as keep a vector's loads shared, since
// memory stands still while a block is computed (2 KiB to 8 KiB measured alike, 32 KiB 1.3 times slower).
constexpr int64_t kRowBytes = 1 << 12;
constexpr int64_t kPlaneBytes = 1 << 17;   // planes, which are read twice
constexpr int64_t kPackedBytes = 1 << 15;  // of planes that are packed

inline Operand affine_operand(const Tensor& t) {  // [N, T, G, K]
  return operand_of(t, t.stride(2), t.stride(1), t.stride(3));
}

template <class acc_t>
struct Statistic {  // mean or rstd [N, T or 1, G], or a number where there is none
  const acc_t* data = nullptr;
  int64_t n = 0, t = 0, g = 0;
  acc_t absent = 0;

  Statistic(const std::optional<Tensor>& tensor, acc_t absent) : absent(absent) {
    if (!tensor) return;
    data = tensor->template const_data_ptr<acc_t>();
    const auto along = [&](int64_t d) { return tensor->size(d) == 1 ? 0 : tensor->stride(d); };
    n = along(0), t = along(1), g = along(2);
  }
  acc_t at(int64_t sample, int64_t position, int64_t group) const {
    return data ? data[sample * n + position * t + group * g] : absent;
  }
};

struct Part {  // of the work: ranges of samples, positions and groups
  int64_t n0, n1, t0, t1, g0, g1;
};

// Samples are shared out; if there are fewer than two a thread, a sample's positions, where they have nothing to do
// with each other (`by_row`), or its groups.
inline std::vector<Part> parts_of(int64_t N, int64_t T, int64_t G, int64_t C, bool by_row) {
  constexpr double kWorthAThread = 1 << 15;  // elements
  const double worth = 1 + double(N) * double(T) * double(C) / kWorthAThread;
  const int64_t most = at::in_parallel_region() ? 1 : int64_t(std::min(double(at::get_num_threads()), worth));
  const bool by_sample = N >= 2 * most;
  const int64_t count = std::max<int64_t>(1, std::min(most, by_sample ? N : by_row ? T : G));
  std::vector<Part> parts;
  for (int64_t p = 0; p < count; ++p) {
    Part part{0, N, 0, T, 0, G};
    const auto share = [&](int64_t& begin, int64_t& end, int64_t size) {
      begin = size * p / count, end = size * (p + 1) / count;
    };
    if (by_sample)
      share(part.n0, part.n1, N);
    else if (by_row)
      share(part.t0, part.t1, T);
    else
      share(part.g0, part.g1, G);
    parts.push_back(part);
  }
  return parts;
}

// f(first feature, features, first position, positions) over planes: all at once, or, if they are packed, as much at a
// time as fits the cache
template <class acc_t, class F>
void each_plane_block(int64_t features, int64_t T, bool packs, const F& f) {
  const int64_t most = kPackedBytes / int64_t(sizeof(acc_t)), length = packs ? std::min(T, most) : T;
  const int64_t count = packs ? std::max<int64_t>(1, most / std::max<int64_t>(1, length)) : features;
  for (int64_t k = 0; k < features; k += count)
    for (int64_t t = 0; t < T; t += length) f(k, std::min(count, features - k), t, std::min(length, T - t));
}

// f(first position, positions) over rows, as many at a time as fit the cache
template <class F>
void each_row_block(int64_t t0, int64_t t1, int64_t count, const F& f) {
  for (int64_t t = t0; t < t1; t += count) f(t, std::min(count, t1 - t));
}
template <class acc_t>
int64_t rows_in_cache(int64_t columns, int64_t T) {
  return std::min(T, std::max<int64_t>(1, kRowBytes / int64_t(sizeof(acc_t)) / std::max<int64_t>(1, columns)));
}

// One operand's lines. `packs`: into acc_t, whatever they are.
template <class acc_t>
struct LineSource {
  LineSource(const Tensor& t, bool rows)  // [N, T, G, K]
      : operand(affine_operand(t)),
        K(t.size(3)),
        pack(kernels<acc_t>().of(t.scalar_type()).pack),
        packs(rows ? !rows_contiguous(t) : t.stride(1) != 1) {}

  struct View {
    const void* data;
    int64_t along;
  };

  // [count positions, (g1 - g0) K features]
  View rows(int64_t n, int64_t t, int64_t count, int64_t g0, int64_t g1, Scratch<acc_t>& scratch) const {
    if (!packs) return {operand.at(n, g0, t, 0), operand.x};
    const int64_t along = (g1 - g0) * K;
    acc_t* const out = scratch.get(count * along);
    if (K == 1) {
      pack(out, along, operand.at(n, g0, t, 0), count, along, operand.x, operand.y);
    } else {
      for (int64_t g = g0; g < g1; ++g)
        pack(out + (g - g0) * K, along, operand.at(n, g, t, 0), count, K, operand.x, operand.c);
    }
    return {out, along};
  }

  // Whether all features are one stride apart, so that planes of several groups are lines of one block.
  bool joint(int64_t G) const {
    return G == 1 || K == 1 || operand.y == K * operand.c;
  }

  // [features, count]: planes of the groups from g on, of several only if they are joint
  View planes(int64_t n, int64_t g, int64_t k, int64_t features, int64_t t, int64_t count,
              Scratch<acc_t>& scratch) const {
    const int64_t along = K == 1 ? operand.y : operand.c;
    if (!packs) return {operand.at(n, g, t, k), along};
    acc_t* const out = scratch.get(features * count);
    pack(out, count, operand.at(n, g, t, k), features, count, along, operand.x);
    return {out, count};
  }

  Operand operand;
  int64_t K;
  decltype(RowKernels<acc_t>::pack) pack;
  bool packs;
};

}  // namespace torchgradx::cpu
