// A tile is kK steps of the contraction by kMn rows or columns of the product, in shared memory. `inner` is the
// dimension that is contiguous there: mn, except for halves that lie contiguous along k in memory, where it is k. Rows
// are padded so that the eight rows of an ldmatrix (an odd number of 16-byte units apart), or the four of a tf32
// fragment (8 words apart mod 32), fall in different banks.
// Every thread copies elements of one k a stage, so the contracted index is turned into a Place once a stage; the
// Places along mn do not change while a block works and wait in a table in shared memory.
#pragma once

#include "operand.cuh"

namespace torchgradx::cuda {

constexpr int kThreads = 256;

template <class scalar_t, int kMn_, int kK_, bool kInnerK_>
struct TileLayout {
  static constexpr int kMn = kMn_, kK = kK_;
  static constexpr bool kInnerK = kInnerK_;
  static constexpr int kVector = 16 / sizeof(scalar_t);
  static constexpr int kPitch = (kInnerK ? kK : kMn) + (sizeof(scalar_t) == 8 ? 2 : 8);
  static constexpr int kElements = kPitch * (kInnerK ? kMn : kK);
  static_assert(kPitch % kVector == 0 && kMn % 64 == 0 && kK % 8 == 0);
  static_assert(sizeof(scalar_t) == 2 || !kInnerK, "only halves are read along k");

  static constexpr __device__ __forceinline__ int offset(int k, int mn) {
    return kInnerK ? mn * kPitch + k : k * kPitch + mn;
  }
};

// Copies tiles of one operand. kOverPositions: t is contracted and features run along mn (direct); else the other way
// round (gram).
template <class Loader, class Layout, bool kOverPositions>
class TileCopy {
 public:
  using scalar_t = typename Loader::scalar_t;
  using Place = typename Loader::Place;
  static constexpr int kTableBytes = Layout::kMn * sizeof(Place);

  __device__ __forceinline__ TileCopy(const Loader& loader, int first, void* table)
      : loader_(loader), first_(first), table_(static_cast<Place*>(table)) {}

  // Once, by all threads; the table is read after the next barrier.
  __device__ __forceinline__ void fill_table() const {
    for (int mn = threadIdx.x; mn < Layout::kMn; mn += kThreads) table_[mn] = mn_place(mn);
  }

  // Steps k0 .. k0 + kK of the k_extent of one sample; zeros beyond, and beyond the operand's own mn.
  __device__ __forceinline__ void operator()(const scalar_t* sample, int k0, int k_extent, scalar_t* tile) const {
    if (loader_.access.chunk_bytes == 16 && k_extent - k0 >= kK && mn_left(0) >= kMn && kHasWhole)
      whole(sample, k0, tile);
    else if (loader_.access.chunk_bytes)
      chunks(sample, k0, k_extent, tile);
    else
      elements(sample, k0, k_extent, tile);
  }

 private:
  static constexpr int kVector = Layout::kVector, kK = Layout::kK, kMn = Layout::kMn;

  __device__ __forceinline__ Place k_place(int k) const {
    return kOverPositions ? loader_.position(k) : loader_.feature(k);
  }
  __device__ __forceinline__ Place mn_place(int mn) const {
    return kOverPositions ? loader_.feature(first_ + mn) : loader_.position(first_ + mn);
  }
  __device__ __forceinline__ int mn_left(int mn) const {
    return (kOverPositions ? loader_.features : loader_.positions) - first_ - mn;
  }

  // A thread's chunks of 16 bytes: one k, kStep apart along mn; neighbouring lanes along the inner dimension.
  static constexpr int kLanes = Layout::kInnerK ? kK / kVector : kThreads / kK;
  static constexpr int kStep = Layout::kInnerK ? kThreads / kLanes : kLanes * kVector;
  static_assert(kMn % kStep == 0);

  static __device__ __forceinline__ void share_of_chunks(int& k, int& first) {
    const int along = threadIdx.x % kLanes * kVector, across = threadIdx.x / kLanes;
    k = Layout::kInnerK ? along : across, first = Layout::kInnerK ? across : along;
  }

  // Most stages of most problems have no edge: one address, and steps from it. Not for doubles, whose arithmetic hides
  // the rest, and which would lose a block a multiprocessor to the registers.
  static constexpr bool kHasWhole = Loader::kPlain && sizeof(scalar_t) < 8;
  __device__ __forceinline__ void whole(const scalar_t* sample, int k0, scalar_t* tile) const {
    if constexpr (kHasWhole) {
      int k, first;
      share_of_chunks(k, first);
      const scalar_t* const from = loader_.at(sample, k_place(k0 + k), table_[first]);
      const int64_t step = Layout::kInnerK ? mn_stride() * kStep : kStep;
#pragma unroll
      for (int i = 0; i < kMn / kStep; ++i) cp_async<16>(tile + Layout::offset(k, first + i * kStep), from + i * step);
    }
  }
  __device__ __forceinline__ int64_t mn_stride() const {
    return kOverPositions ? loader_.f : loader_.t;
  }

  __device__ __forceinline__ void chunks(const scalar_t* sample, int k0, int k_extent, scalar_t* tile) const {
    int k, first;
    share_of_chunks(k, first);
    const int k_left = k_extent - k0 - k;
    const Place of_k = k_place(k0 + k);
#pragma unroll
    for (int mn = 0; mn < kMn; mn += kStep) {
      const int inner_left = Layout::kInnerK ? k_left : mn_left(first + mn);
      const int outer_left = Layout::kInnerK ? mn_left(first + mn) : k_left;
      const scalar_t* from = loader_.at(sample, of_k, table_[first + mn]);
      const int valid = outer_left > 0 && from ? min(max(inner_left, 0), kVector) : 0;
      copy_chunk(tile + Layout::offset(k, first + mn), valid ? from : loader_.data, valid * int(sizeof(scalar_t)));
    }
  }

  __device__ __forceinline__ void copy_chunk(scalar_t* to, const scalar_t* from, int bytes) const {
    if (loader_.access.chunk_bytes == 16)
      cp_async<16>(to, from, bytes);
    else if (loader_.access.chunk_bytes == 8)
      copy_pieces<8>(to, from, bytes);
    else
      copy_pieces<4>(to, from, bytes);
  }
  template <int piece>
  __device__ __forceinline__ void copy_pieces(scalar_t* to, const scalar_t* from, int bytes) const {
#pragma unroll
    for (int at = 0; at < 16; at += piece)
      cp_async<piece>(to + at / int(sizeof(scalar_t)), bytes > at ? from + at / int(sizeof(scalar_t)) : loader_.data,
                      min(max(bytes - at, 0), piece));
  }

  // Whatever the strides and the alignment. Wide types still arrive asynchronously; a lone half is below the 4 bytes of
  // the least cp.async and takes the way through registers, kBatch loads in flight.
  __device__ __forceinline__ void elements(const scalar_t* sample, int k0, int k_extent, scalar_t* tile) const {
    constexpr int kApart = kThreads / kK, kBatch = 4;
    static_assert(kMn % (kApart * kBatch) == 0);
    int k, first;
    share_of_elements(k, first);
    const bool k_valid = k0 + k < k_extent;
    const Place of_k = k_place(k0 + k);
    for (int batch = 0; batch < kMn; batch += kApart * kBatch) {
      scalar_t values[kBatch];
#pragma unroll
      for (int b = 0; b < kBatch; ++b) {
        const int mn = first + batch + b * kApart;
        const scalar_t* from = loader_.at(sample, of_k, table_[mn]);
        const bool valid = k_valid && mn_left(mn) > 0 && from;
        if constexpr (sizeof(scalar_t) > 2)
          cp_async<sizeof(scalar_t)>(tile + Layout::offset(k, mn), valid ? from : loader_.data,
                                     valid ? sizeof(scalar_t) : 0);
        else
          values[b] = valid ? *from : scalar_t();
      }
      if constexpr (sizeof(scalar_t) == 2) {
#pragma unroll
        for (int b = 0; b < kBatch; ++b) tile[Layout::offset(k, first + batch + b * kApart)] = values[b];
      }
    }
  }

  // One k a thread. Along k in memory, a warp takes 8 steps of k by 4 of mn: whole sectors of float32, and no more than
  // two lanes to a bank where the tile is the other way round.
  __device__ __forceinline__ void share_of_elements(int& k, int& mn) const {
    const int thread = threadIdx.x;
    if constexpr (Layout::kInnerK) {
      k = thread % kK, mn = thread / kK;
    } else if (loader_.access.lanes_along_k) {
      k = thread % 8 + thread / 32 % (kK / 8) * 8, mn = thread / 8 % 4 + thread / (4 * kK) * 4;
    } else {
      k = thread / (kThreads / kK), mn = thread % (kThreads / kK);
    }
  }

  const Loader& loader_;
  const int first_;
  Place* const table_;
};

}  // namespace torchgradx::cuda
