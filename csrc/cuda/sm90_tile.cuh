// Shared by the roles of direct_sm90.cuh: the launch's arguments, the ring of stages, a tile's place in the gradient
// and how it is written, and who has left sums of one.
#pragma once

#include "device_sm90.cuh"
#include "direct_sm90.h"

#include <cstring>

namespace torchgradx::cuda::sm90 {

constexpr int kThreads = 384, kGroup = 128, kMultiplying = 256;
constexpr int kWarps = kMultiplying / warp_threads;
constexpr int kBiasWarps = 2;

struct Arguments {
  Schedule schedule;
  Boxes boxes;
  int O, channels;                  // of the weight [O, taps, channels]
  int parts;                        // of a sample's squares
  bool bias;                        // its squares are wanted
  const int* starts;                // [N + 1]: rows of each sample, where these differ in length; or null
  const float* scale;               // [N], or null
  void* weight;                     // [O, taps, channels] half_t
  void* bias_gradient;              // [O] half_t, or null
  float* sums;                      // [2 blocks][128 x kColumns in the order of registers], of shared tiles
  float* bias_sums;                 // [tiles of blocks + 2 blocks][128]: of tiles that one team has, and of shares
  float* squares;                   // [N, parts]
  float* bias_squares;              // [N, boxes of all outputs]
  float *sq_norms, *bias_sq_norms;  // [N], or null
};

// A sample's rectangles, and how many steps each of them has.
struct Extent {
  int image, first, rows, count, rectangles;  // rows: of a sample, where these differ; count: along x

  __device__ __forceinline__ Extent(const Arguments& p, int n) : image(n), first(0), rows(0), count(p.boxes.across) {
    if (p.starts) {
      image = 0, first = p.starts[n], rows = p.starts[n + 1] - first;
      count = (rows + p.boxes.width - 1) / p.boxes.width;
    }
    rectangles = count * p.boxes.down;
  }
  __device__ __forceinline__ int steps(const Boxes& boxes, int rectangle) const {
    if (rows) return min((rows - rectangle * boxes.width + kDepth - 1) / kDepth, boxes.steps);
    return rectangle < boxes.shorter ? boxes.steps : boxes.last_steps;
  }
};

template <class half_t>
__device__ __forceinline__ uint32_t pack(float low, float high) {
  const half_t halves[2] = {narrow<half_t>(low), narrow<half_t>(high)};
  uint32_t word;
  memcpy(&word, halves, sizeof(word));
  return word;
}

template <class half_t>
__device__ __forceinline__ void add_halves(float& low, float& high, uint32_t word) {
  if constexpr (std::is_same_v<half_t, __nv_bfloat16>) {  // the upper half of a float32
    low += __uint_as_float(word << 16), high += __uint_as_float(word & 0xffff0000u);
  } else {
    half_t halves[2];
    memcpy(halves, &word, sizeof(word));
    low += widen(halves[0]), high += widen(halves[1]);
  }
}

// Transposes four lanes of four words each: lane c gets word c of all four, in the order of lanes.
__device__ __forceinline__ uint4 transpose_quad(const uint32_t (&w)[4], int lane) {
  const bool odd = lane & 1, high = lane & 2;
  uint32_t x = __shfl_xor_sync(full_warp, odd ? w[0] : w[1], 1);
  uint32_t y = __shfl_xor_sync(full_warp, odd ? w[2] : w[3], 1);
  const uint32_t a0 = odd ? x : w[0], a1 = odd ? w[1] : x, b0 = odd ? y : w[2], b1 = odd ? w[3] : y;
  x = __shfl_xor_sync(full_warp, high ? a0 : b0, 2);
  y = __shfl_xor_sync(full_warp, high ? a1 : b1, 2);
  return high ? make_uint4(x, y, b0, b1) : make_uint4(a0, a1, x, y);
}

struct Ring {  // the stage at hand, and the parity of its barriers' phase
  int stage = 0, parity = 0;

  __device__ __forceinline__ void advance(int stages) {
    if (++stage == stages) stage = 0, parity ^= 1;
  }
};

struct Barriers {
  // [stages]: copied; to be read; read; the first warpgroup's products have been started. The first two are one, but
  // where a warp has to put zeros behind the last row of a sample.
  uint64_t *copied, *full, *empty, *first;
};

template <int kColumns, bool kTall>
struct Tile {
  static constexpr int kWide = kColumns / kBox;  // blocks of columns of a warpgroup
  static constexpr int kUnits = kTall ? 1 : 2;   // warpgroups side by side
  static constexpr int kGradBoxes = kTall ? 2 : 1;
  static constexpr int kHigh = kRows * kGradBoxes;
  static constexpr int kRegisters = kColumns / 2;
};

// 16 rows x 32 columns of a warp's sum, from its registers: rows of 8 columns, 16 bytes a lane.
template <class half_t>
__device__ __forceinline__ void store_strip(const Arguments& p, const float (&d)[16], int row, Column column,
                                            int within, int lane) {
  const int channel = column.channel + within + 8 * (lane % 4);
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    uint32_t words[4];
#pragma unroll
    for (int j = 0; j < 4; ++j) words[j] = pack<half_t>(d[4 * j + 2 * h], d[4 * j + 2 * h + 1]);
    const uint4 piece = transpose_quad(words, lane);
    const int64_t r = row + lane / 4 + 8 * h;
    if (r < p.O && column.tap >= 0 && channel < p.channels)
      *reinterpret_cast<uint4*>(static_cast<half_t*>(p.weight) + (r * p.boxes.taps + column.tap) * p.channels +
                                channel) = piece;
  }
}

// Row of the gradient where a multiplying warp's part of a tile begins; 0 <= warp < 8.
template <bool kTall>
__device__ __forceinline__ int row_of(int down, int warp) {
  return kTall ? down * 2 * kRows + warp * 16 : down * kRows + warp % 4 * 16;
}

// The teams that share the tile which is number `left` of those left over, in the order of samples. None if one team
// has it whole, and has written it.
struct Sharers {
  int team, count, first_slot;

  __device__ __forceinline__ Sharers(const Schedule& s, int left) {
    const int begin = left * s.N, end = begin + s.N;
    team = begin / (s.each + 1);
    while (s.first_item(team + 1) <= begin) ++team;
    const int from = s.first_item(team);
    first_slot = 2 * team + (from >= begin ? 0 : 1);
    if (from <= begin && s.first_item(team + 1) >= end) {
      count = 0;
      return;
    }
    for (count = 1; team + count < s.teams && s.first_item(team + count) < end;) ++count;
  }

  __device__ __forceinline__ int slot(int which) const {
    return which ? 2 * (team + which) : first_slot;
  }

  // sum += the value of every sharer's slot, several loads in flight.
  template <int size, class Load>
  __device__ __forceinline__ void add(float (&sum)[size], const Load& load) const {
    constexpr int kTogether = 4;
#pragma unroll 1
    for (int i = 0; i < count; i += kTogether) {
      float values[kTogether][size];
#pragma unroll
      for (int j = 0; j < kTogether; ++j) {
        const int which = min(i + j, count - 1);
        load(values[j], slot(which));
      }
#pragma unroll
      for (int j = 0; j < kTogether; ++j)
        if (i + j < count) {
#pragma unroll
          for (int k = 0; k < size; ++k) sum[k] += values[j][k];
        }
    }
  }
};

}  // namespace torchgradx::cuda::sm90
