// Rows times a weight that stays the same over many calls, as a recurrent layer's over the steps: packed once, where a
// BLAS packs it anew for each handful of rows. Cost 2 * rows * depth * columns, in the register tiles of the sweep.
#pragma once

#include "sweep.h"

namespace torchgradx::cpu {

// [depth, columns] as [part of the depth][run of two vectors of columns][position][two vectors]
template <class T>
class PackedWeight {
 public:
  explicit PackedWeight(const Tensor& weight)
      : depth_(weight.size(0)),
        columns_(weight.size(1)),
        packed_(at::empty({depth_, runs() * run_}, weight.options())) {
    const T* const from = weight.const_data_ptr<T>();
    for (int64_t d = 0; d < depth_; d += kPart)
      for (int64_t r = 0; r < runs(); ++r) {
        if (columns(r) < run_) std::fill_n(at(d, r), part(d) * run_, T(0));
        kernels_.native.pack(at(d, r), run_, from + d * weight.stride(0) + r * run_ * weight.stride(1), part(d),
                             columns(r), weight.stride(0), weight.stride(1));
      }
  }

  int64_t depth() const {
    return depth_;
  }
  int64_t runs() const {
    return ceil_div(columns_, run_);
  }
  int64_t part(int64_t d) const {  // its length, from d on
    return std::min(kPart, depth_ - d);
  }
  // out[k, c] = the sum over the part of g[k] times the weight, added to what is there if `add`. g: [position][rows]
  void multiply(const T* g, int64_t d, int64_t r, int64_t rows, T* out, int64_t along, bool add) const {
    T margin[kMaxRows * kMostColumns];
    Tile<T> job{};
    job.x = at(d, r), job.x_along = run_, job.height = 1, job.width = part(d), job.g = g, job.g_along = rows;
    job.scale = 1, job.columns = int(run_);
    const bool whole = columns(r) == run_;
    job.total = whole ? out + r * run_ : margin, job.total_along = whole ? along : run_, job.fresh = !(whole && add);
    kernels_.tile[1][rows](job);
    if (whole) return;
    for (int64_t k = 0; k < rows; ++k)
      for (int64_t c = 0; c < columns(r); ++c) {
        T& to = out[k * along + r * run_ + c];
        to = add ? to + margin[k * run_ + c] : margin[k * run_ + c];
      }
  }

  static constexpr int64_t kPart = 512;  // of the depth: a run of it stays in L2, a panel of rows in L1

 private:
  static constexpr int64_t kMostColumns = 2 * 64 / sizeof(T);

  T* at(int64_t d, int64_t r) const {
    return packed_.template mutable_data_ptr<T>() + (d * runs() + r * part(d)) * run_;
  }
  int64_t columns(int64_t r) const {
    return std::min(run_, columns_ - r * run_);
  }

  const Kernels<T>& kernels_ = kernels<T>();
  const int64_t run_ = 2 * kernels_.lanes, depth_, columns_;
  const Tensor packed_;
};

template <class T>
struct Product {
  const PackedWeight<T>* weight;
  T* out;  // [rows, columns]
  int64_t along;
  bool add;
};

// in [count, depth] times each of the weights. Threads share the columns.
template <class T>
void multiply(const T* in, int64_t along, int64_t count, std::initializer_list<Product<T>> products) {
  const Kernels<T>& k = kernels<T>();
  const Panels panels(count, k.max_rows);
  const PackedWeight<T>& first = *products.begin()->weight;
  T* const packed = Workspace<T>::mine().panels.get(count * PackedWeight<T>::kPart);
  for (int64_t d = 0; d < first.depth(); d += PackedWeight<T>::kPart) {
    const int64_t part = first.part(d);
    const auto each_panel = [&](const auto& f) {
      for (int64_t p = 0; p < panels.count; ++p)
        f(p * panels.rows, p + 1 < panels.count ? panels.rows : panels.last, packed + p * panels.rows * part);
    };
    each_panel(
        [&](int64_t row, int64_t rows, T* g) { k.native.pack(g, rows, in + row * along + d, part, rows, 1, along); });
    for (const Product<T>& product : products) {
      const int64_t grain = 1 + (1 << 17) / (count * part * 2 * k.lanes);
      at::parallel_for(0, product.weight->runs(), grain, [&](int64_t begin, int64_t end) {
        for (int64_t r = begin; r < end; ++r)
          each_panel([&](int64_t row, int64_t rows, const T* g) {
            product.weight->multiply(g, d, r, rows, product.out + row * product.along, product.along,
                                     product.add || d > 0);
          });
      });
    }
  }
}

}  // namespace torchgradx::cpu
