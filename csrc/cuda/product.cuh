// A block's kM x kN tile of a product, in the registers of its 256 threads: the mainloop's arithmetic. A thread has
// `groups` of four accumulators; row(), column() say where each stands. multiply() adds one stage of both operands.
// HalfProduct: mma m16n8k16. Tf32Product: mma m16n8k8. SimtProduct: fma, exact float32 and float64.
// Each also sums the rows of the left operand over k (the bias), one or two sums a thread, so that no warp has more of
// that work than another.
#pragma once

#include "kernels.h"
#include "tile.cuh"

namespace torchgradx::cuda {

// How an mma product is shared: 2 x 4 warps, each kTilesM x kTilesN fragments of 16 x 8.
template <class scalar_t_, int kM_, int kN_, int kK_, bool kInnerK>
struct MmaShare {
  using scalar_t = scalar_t_;
  using acc_t = float;
  static constexpr int kM = kM_, kN = kN_, kK = kK_;
  static constexpr int kWarpsN = 4, kTilesM = kM / 2 / 16, kTilesN = kN / kWarpsN / 8;
  static constexpr int kGroups = kTilesM * kTilesN;
  using LayoutM = TileLayout<scalar_t, kM, kK, kInnerK>;
  using LayoutN = TileLayout<scalar_t, kN, kK, kInnerK>;
  static_assert(kM % 32 == 0 && kN % 64 == 0);

  float acc[kGroups][4];

  static __device__ __forceinline__ int lane() {
    return threadIdx.x % warp_threads;
  }
  static __device__ __forceinline__ int warp_n() {
    return threadIdx.x / warp_threads % kWarpsN;
  }
  static __device__ __forceinline__ int warp_row() {
    return threadIdx.x / warp_threads / kWarpsN * (kM / 2);
  }
  static __device__ __forceinline__ int warp_column() {
    return warp_n() * (kN / kWarpsN);
  }
  static __device__ __forceinline__ int row(int group, int r) {
    return warp_row() + group / kTilesN * 16 + r / 2 * 8 + lane() / 4;
  }
  static __device__ __forceinline__ int column(int group, int r) {
    return warp_column() + group % kTilesN * 8 + lane() % 4 * 2 + r % 2;
  }
};

template <class scalar_t, int kM, int kN, bool kInnerK>
struct HalfProduct : MmaShare<scalar_t, kM, kN, 32, kInnerK> {
  using Share = MmaShare<scalar_t, kM, kN, 32, kInnerK>;
  using Share::kTilesM, Share::kTilesN, Share::acc, Share::lane;
  using typename Share::LayoutM, typename Share::LayoutN;
  static constexpr bool kSumsRows = kTilesM == Share::kWarpsN;
  static constexpr int kRowSums = 2;

  float row_sums_mma[4];

  __device__ __forceinline__ void clear() {
#pragma unroll
    for (auto& group : acc)
      for (float& value : group) value = 0;
    for (float& value : row_sums_mma) value = 0;
  }

  __device__ __forceinline__ void multiply(const scalar_t* tile_m, const scalar_t* tile_n, int k_count, bool sum_rows) {
    const scalar_t* const m = tile_m + offset_m();
    const scalar_t* const n = tile_n + offset_n();
#pragma unroll
    for (int k = 0; k < Share::kK; k += 16) {
      if (k >= k_count) break;
      uint32_t b[kTilesN][2];
#pragma unroll
      for (int j = 0; j < kTilesN; j += 2) {
        uint32_t two[4];
        load(two, n + LayoutN::offset(k, j * 8));
        b[j][0] = two[0], b[j][1] = two[1], b[j + 1][0] = two[2], b[j + 1][1] = two[3];
      }
#pragma unroll
      for (int i = 0; i < kTilesM; ++i) {
        uint32_t a[4];
        load(a, m + LayoutM::offset(k, i * 16));
#pragma unroll
        for (int j = 0; j < kTilesN; ++j) mma_m16n8k16<scalar_t>(acc[i * kTilesN + j], a, b[j]);
        if (kSumsRows && sum_rows && Share::warp_n() == i) mma_m16n8k16<scalar_t>(row_sums_mma, a, ones());
      }
    }
  }

  // The rows of fragment warp_n() times a matrix of ones: the four lanes of a row hold the same sum.
  static __device__ __forceinline__ bool owns_row_sums() {
    return lane() % 4 == 0;
  }
  __device__ __forceinline__ float row_sum(int i) const {
    return row_sums_mma[2 * i];
  }
  static __device__ __forceinline__ int row_of_sum(int i) {
    return Share::warp_row() + Share::warp_n() * 16 + i * 8 + lane() / 4;
  }

 private:
  using Ones = const uint32_t (&)[2];
  static __device__ __forceinline__ Ones ones() {
    static constexpr uint32_t pair = std::is_same_v<scalar_t, __half> ? 0x3c003c00u : 0x3f803f80u;
    static constexpr uint32_t pairs[2] = {pair, pair};
    return pairs;
  }
  static __device__ __forceinline__ void load(uint32_t (&r)[4], const scalar_t* from) {
    if constexpr (kInnerK)
      ldmatrix_x4(r, from);
    else
      ldmatrix_x4_trans(r, from);
  }
  // Which row of which of an ldmatrix's four 8x8 this lane names; the orders are those of device.cuh.
  static __device__ __forceinline__ int offset_m() {
    const int matrix = lane() / 8, inside = lane() % 8, low = matrix % 2 * 8, high = matrix / 2 * 8;
    return kInnerK ? LayoutM::offset(high, Share::warp_row() + low + inside)
                   : LayoutM::offset(high + inside, Share::warp_row() + low);
  }
  static __device__ __forceinline__ int offset_n() {
    const int matrix = lane() / 8, inside = lane() % 8, low = matrix % 2 * 8, high = matrix / 2 * 8;
    return kInnerK ? LayoutN::offset(low, Share::warp_column() + high + inside)
                   : LayoutN::offset(low + inside, Share::warp_column() + high);
  }
};

// Row sums of float32 products are of the operand as it is, not rounded to TF32: 16 rows a warp, a lane every other k.
template <int kM, int kN>
struct Tf32Product : MmaShare<float, kM, kN, 16, false> {
  using Share = MmaShare<float, kM, kN, 16, false>;
  using Share::kTilesM, Share::kTilesN, Share::acc, Share::lane;
  using typename Share::LayoutM, typename Share::LayoutN;
  static constexpr bool kSumsRows = kM == 128;
  static constexpr int kRowSums = 1;

  float row_sum_half;

  __device__ __forceinline__ void clear() {
#pragma unroll
    for (auto& group : acc)
      for (float& value : group) value = 0;
    row_sum_half = 0;
  }

  __device__ __forceinline__ void multiply(const float* tile_m, const float* tile_n, int k_count, bool sum_rows) {
    const int g = lane() / 4, p = lane() % 4;
    const float* const m = tile_m + LayoutM::offset(p, Share::warp_row() + g);
    const float* const n = tile_n + LayoutN::offset(p, Share::warp_column() + g);
#pragma unroll
    for (int k = 0; k < Share::kK; k += 8) {
      if (k >= k_count) break;
      uint32_t b[kTilesN][2];
#pragma unroll
      for (int j = 0; j < kTilesN; ++j)
        for (int half = 0; half < 2; ++half) b[j][half] = to_tf32(n[LayoutN::offset(k + half * 4, j * 8)]);
#pragma unroll
      for (int i = 0; i < kTilesM; ++i) {
        uint32_t a[4];
#pragma unroll
        for (int part = 0; part < 4; ++part)
          a[part] = to_tf32(m[LayoutM::offset(k + part / 2 * 4, i * 16 + part % 2 * 8)]);
#pragma unroll
        for (int j = 0; j < kTilesN; ++j) mma_m16n8k8_tf32(acc[i * kTilesN + j], a, b[j]);
      }
    }
    if (kSumsRows && sum_rows)
      for (int k = lane() / 16; k < Share::kK; k += 2) row_sum_half += tile_m[LayoutM::offset(k, row_of_sum(0))];
  }

  static __device__ __forceinline__ bool owns_row_sums() {
    return lane() < 16;
  }
  __device__ __forceinline__ float row_sum(int) const {
    return row_sum_half + __shfl_xor_sync(full_warp, row_sum_half, 16);
  }
  static __device__ __forceinline__ int row_of_sum(int) {
    return Share::warp_row() + Share::warp_n() * 16 + lane() % 16;
  }
};

// 16 x 16 threads, each with runs of four rows by runs of four columns, 64 apart.
template <class scalar_t_, int kM_, int kN_>
struct SimtProduct {
  using scalar_t = scalar_t_;
  using acc_t = scalar_t;
  static constexpr int kM = kM_, kN = kN_, kK = 16;
  static constexpr int kRows = kM / 16, kColumnRuns = kN / 64, kGroups = kRows * kColumnRuns;
  static constexpr bool kSumsRows = true;
  static constexpr int kRowSums = 1;
  using LayoutM = TileLayout<scalar_t, kM, kK, false>;
  using LayoutN = TileLayout<scalar_t, kN, kK, false>;

  scalar_t acc[kGroups][4];
  scalar_t sum_of_row;

  static __device__ __forceinline__ int down() {
    return threadIdx.x / 16;
  }
  static __device__ __forceinline__ int along() {
    return threadIdx.x % 16;
  }
  static __device__ __forceinline__ int thread_row(int i) {
    return i / 4 * 64 + down() * 4 + i % 4;
  }
  static __device__ __forceinline__ int row(int group, int) {
    return thread_row(group / kColumnRuns);
  }
  static __device__ __forceinline__ int column(int group, int r) {
    return group % kColumnRuns * 64 + along() * 4 + r;
  }
  static __device__ __forceinline__ int warp_row() {
    return threadIdx.x / warp_threads * 8;
  }
  static __device__ __forceinline__ int warp_column() {
    return 0;
  }

  __device__ __forceinline__ void clear() {
#pragma unroll
    for (auto& group : acc)
      for (scalar_t& value : group) value = 0;
    sum_of_row = 0;
  }

  __device__ __forceinline__ void multiply(const scalar_t* tile_m, const scalar_t* tile_n, int k_count, bool sum_rows) {
#pragma unroll 4
    for (int k = 0; k < kK; ++k) {
      if (k >= k_count) break;
      scalar_t m[kRows], n[kColumnRuns * 4];
#pragma unroll
      for (int i = 0; i < kRows; i += 4) read(m + i, tile_m + LayoutM::offset(k, thread_row(i)));
#pragma unroll
      for (int j = 0; j < kColumnRuns; ++j) read(n + 4 * j, tile_n + LayoutN::offset(k, column(j, 0)));
#pragma unroll
      for (int group = 0; group < kGroups; ++group)
#pragma unroll
        for (int r = 0; r < 4; ++r) acc[group][r] += m[group / kColumnRuns] * n[group % kColumnRuns * 4 + r];
      if (sum_rows) sum_of_row += tile_m[LayoutM::offset(k, row_of_sum(0))];
    }
  }

  static __device__ __forceinline__ bool owns_row_sums() {
    return along() < kRows;
  }
  __device__ __forceinline__ scalar_t row_sum(int) const {
    return sum_of_row;
  }
  static __device__ __forceinline__ int row_of_sum(int) {
    return thread_row(along() % kRows);
  }

 private:
  static __device__ __forceinline__ void read(scalar_t* to, const scalar_t* from) {  // four, by 16 bytes
    using Unit = Vector<scalar_t, 16 / sizeof(scalar_t)>;
#pragma unroll
    for (int i = 0; i < 4; i += int(16 / sizeof(scalar_t))) {
      const Unit unit = *reinterpret_cast<const Unit*>(from + i);
#pragma unroll
      for (int e = 0; e < int(16 / sizeof(scalar_t)); ++e) to[i + e] = unit.at[e];
    }
  }
};

// Host: calls f(product) with what multiplies tiles of kM x kN, of halves kM x kHalfN; inner_k: halves lie along k.
template <class scalar_t, int kM, int kN, int kHalfN = kN, class F>
cudaError_t with_product(bool inner_k, const Device& device, const F& f) {
  if constexpr (sizeof(scalar_t) == 2)
    return inner_k ? f(HalfProduct<scalar_t, kM, kHalfN, true>()) : f(HalfProduct<scalar_t, kM, kHalfN, false>());
  else if constexpr (sizeof(scalar_t) == 4)
    return device.tf32 ? f(Tf32Product<kM, kN>()) : f(SimtProduct<float, kM, kN>());
  else
    return f(SimtProduct<double, 64, 64>());
}

}  // namespace torchgradx::cuda
