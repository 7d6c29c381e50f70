// direct and fused on Hopper's wgmma, of halves: |G_n|^2 for every sample and, with kGradient, sum_n scale_n G_n from
// the same products, for Linear and Conv2d without copies of patches. 2 N T I O FLOP at the tensor cores' own speed.
//
// A block is three warpgroups. One thread of the first copies boxes into a ring of stages; its warps 1 and 2 add up the
// bias from the same stages, each tile of a row of tiles for its own samples. The other two multiply: each has a tile
// of 64 x kColumns of one sample's gradient in registers, which it squares and adds to its sum over the samples, while
// the other's products go on. kTall: the two stand on top of each other (128 x kColumns), else side by side (64 x 2
// kColumns), for few outputs. Tiles which blocks have shared are added up after a barrier of the whole grid, in the
// order of samples: two runs give the same bits.
#pragma once

#include "device_sm90.cuh"
#include "direct_sm90.h"

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
  const float* scale;               // [N], or null
  void* weight;                     // [O, taps, channels] half_t
  void* bias_gradient;              // [O] half_t, or null
  float* sums;                      // [2 blocks][128 x kColumns in the order of registers], of shared tiles
  float* bias_sums;                 // [tiles + 2 blocks][128]: of tiles that one block has, and of shares
  float* squares;                   // [N, parts]
  float* bias_squares;              // [N, boxes of all outputs]
  float *sq_norms, *bias_sq_norms;  // [N]
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
  half_t halves[2];
  memcpy(halves, &word, sizeof(word));
  low += widen(halves[0]), high += widen(halves[1]);
}

// Of four lanes with four words each: lane c gets word c of all four, in the order of lanes.
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
  uint64_t *full, *empty, *first;  // [stages]: copied; read; the first warpgroup's products have been started
};

template <int kColumns, bool kTall>
struct Tile {
  static constexpr int kWide = kColumns / kBox;  // blocks of columns of a warpgroup
  static constexpr int kUnits = kTall ? 1 : 2;   // warpgroups side by side
  static constexpr int kGradBoxes = kTall ? 2 : 1;
  static constexpr int kHigh = kRows * kGradBoxes;
  static constexpr int kRegisters = kColumns / 2;
};

// One thread: boxes of every rectangle of every sample, a stage after the other.
template <int kColumns, bool kTall>
__device__ __forceinline__ void copy_boxes(const TensorMap& grads, const TensorMap& input, const Arguments& p,
                                           unsigned char* stages, const Barriers& barriers) {
  using Shape = Tile<kColumns, kTall>;
  constexpr int kMost = Shape::kUnits * Shape::kWide;
  const Boxes& boxes = p.boxes;
  const int count = boxes.halo ? Shape::kUnits : kMost;
  Ring ring;
  Segment at;
  for (int number = 0; segment_of(p.schedule, blockIdx.x, number, at); ++number) {
    const int row = at.down * Shape::kHigh;
    int channel[kMost], tap_x[kMost], tap_y[kMost];  // of the input's boxes, taps in pixels
#pragma unroll
    for (int j = 0; j < kMost; ++j) {
      const int per_unit = boxes.halo ? 1 : Shape::kWide;
      const Column column = column_of(boxes, Shape::kWide, at.across * Shape::kUnits + j / per_unit, j % per_unit);
      // beyond the last tap, channels that are outside: zeros
      channel[j] = column.tap < 0 ? boxes.channel_blocks * kBox : column.channel;
      const int tap = max(column.tap, 0), y = tap / boxes.kernel_width;
      tap_x[j] = (tap - y * boxes.kernel_width) * boxes.dilation_x - boxes.pad_x;
      tap_y[j] = y * boxes.dilation_y - boxes.pad_y;
    }
#pragma unroll 1
    for (int n = at.first; n < at.last; ++n)
#pragma unroll 1
      for (int down = 0; down < boxes.down; ++down)
#pragma unroll 1
        for (int across = 0; across < boxes.across; ++across) {
          const int x = across * boxes.width, y = down * boxes.height;
          uint64_t* const full = barriers.full + ring.stage;
          unsigned char* const stage = stages + ring.stage * boxes.stage_bytes;
          barrier_wait(barriers.empty + ring.stage, ring.parity ^ 1);
          barrier_expect(full, boxes.copied_bytes);
#pragma unroll
          for (int j = 0; j < Shape::kGradBoxes; ++j)
            copy_box(stage + j * boxes.grad_bytes, grads, full, row + j * kBox, x, y, n);
#pragma unroll
          for (int j = 0; j < kMost; ++j)
            if (j < count)
              copy_box(stage + boxes.input_offset + j * boxes.input_bytes, input, full, channel[j],
                       x * boxes.stride_x + tap_x[j], y * boxes.stride_y + tap_y[j], n);
          ring.advance(boxes.stages);
        }
  }
}

// Warp 1 or 2: the bias's gradient of every tiles_across-th sample, from one box of grad_output. Lane l takes the 16
// bytes l % 8 of rows l / 8, l / 8 + 4, ... wgmma keeps shared memory busy: many loads must be under way. `total` is
// this warp's, of shared memory: registers are few here.
template <class half_t, int kColumns, bool kTall>
__device__ __forceinline__ void add_bias(const Arguments& p, const unsigned char* stages, const Barriers& barriers,
                                         float* total, int which, int lane) {
  using Shape = Tile<kColumns, kTall>;
  constexpr int kPiece = 8, kRowsAtOnce = 4, kTogether = 5;
  const Boxes& boxes = p.boxes;
  const int positions = boxes.width * boxes.height;
  float* const mine = total + kPiece * lane;  // of lanes below 8
  Ring ring;
  Segment at;
  for (int number = 0; segment_of(p.schedule, blockIdx.x, number, at); ++number) {
    if (lane < kBox / kPiece) {
#pragma unroll
      for (int i = 0; i < kPiece; ++i) mine[i] = 0;
    }
#pragma unroll 1
    for (int n = at.first; n < at.last; ++n) {
      const bool takes = which < Shape::kGradBoxes && n % p.schedule.tiles_across == at.across;
      float sum[kPiece] = {};
#pragma unroll 1
      for (int rectangle = 0; rectangle < boxes.across * boxes.down; ++rectangle) {
        barrier_wait(barriers.full + ring.stage, ring.parity);
        const unsigned char* const box = stages + ring.stage * boxes.stage_bytes + which * boxes.grad_bytes;
#pragma unroll 1
        for (int r = lane / 8; takes && r < positions; r += kTogether * kRowsAtOnce) {
          uint4 pieces[kTogether];
#pragma unroll
          for (int j = 0; j < kTogether; ++j) {  // rows beyond are the last one, and count nothing
            const int row = min(r + j * kRowsAtOnce, positions - 1);
            pieces[j] = *reinterpret_cast<const uint4*>(box + row * 2 * kBox + ((lane ^ row) % 8) * 16);
          }
#pragma unroll
          for (int j = 0; j < kTogether; ++j)
            if (r + j * kRowsAtOnce < positions) {
              add_halves<half_t>(sum[0], sum[1], pieces[j].x), add_halves<half_t>(sum[2], sum[3], pieces[j].y);
              add_halves<half_t>(sum[4], sum[5], pieces[j].z), add_halves<half_t>(sum[6], sum[7], pieces[j].w);
            }
        }
        __syncwarp();
        if (lane == 0) barrier_arrive(barriers.empty + ring.stage);
        ring.advance(boxes.stages);
      }
      if (!takes) continue;
      float square = 0;
#pragma unroll
      for (int i = 0; i < kPiece; ++i) {
        sum[i] += __shfl_xor_sync(full_warp, sum[i], 8);
        sum[i] += __shfl_xor_sync(full_warp, sum[i], 16);
        square = fmaf(sum[i], sum[i], square);
      }
#pragma unroll
      for (int distance = 4; distance; distance /= 2) square += __shfl_xor_sync(full_warp, square, distance);
      if (lane == 0)
        p.bias_squares[(int64_t(n) * p.schedule.tiles_down + at.down) * Shape::kGradBoxes + which] = square;
      const float scale = p.scale ? p.scale[n] : 1.f;
      if (scale == 0 || lane >= kBox / kPiece) continue;
#pragma unroll
      for (int i = 0; i < kPiece; ++i) mine[i] = fmaf(scale, sum[i], mine[i]);
    }
    if (which >= Shape::kGradBoxes || !p.bias_gradient || lane >= kBox / kPiece) continue;
    const int place = at.slot < 0 ? at.tile : p.schedule.tiles() + at.slot;
    float* const out = p.bias_sums + int64_t(place) * Shape::kHigh + which * kRows + kPiece * lane;
#pragma unroll
    for (int i = 0; i < kPiece; ++i) out[i] = mine[i];
  }
}

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

// f(std::integral_constant of steps): the compiler lets wgmmas run on only where it knows how many there are.
template <class F>
__device__ __forceinline__ void with_constant(int steps, const F& f) {
  static_assert(kMostSteps == 8);
  switch (steps) {
    case 1:
      return f(std::integral_constant<int, 1>());
    case 2:
      return f(std::integral_constant<int, 2>());
    case 3:
      return f(std::integral_constant<int, 3>());
    case 4:
      return f(std::integral_constant<int, 4>());
    case 5:
      return f(std::integral_constant<int, 5>());
    case 6:
      return f(std::integral_constant<int, 6>());
    case 7:
      return f(std::integral_constant<int, 7>());
    default:
      return f(std::integral_constant<int, 8>());
  }
}

template <class half_t, int kColumns, bool kTall, bool kGradient>
__device__ __forceinline__ void multiply(const Arguments& p, uint32_t stages, const Barriers& barriers, int thread) {
  using Shape = Tile<kColumns, kTall>;
  const Boxes& boxes = p.boxes;
  const int group = thread / kGroup, warp = thread / warp_threads, lane = thread % warp_threads;
  const Descriptor grads(stages + (kTall ? group * boxes.grad_bytes : 0), boxes.grad_bytes, 1024);
  const Descriptor input(
      stages + boxes.input_offset + (kTall ? 0 : group * (boxes.halo ? 1 : Shape::kWide) * boxes.input_bytes),
      boxes.between, boxes.group);
  const int rectangles = boxes.across * boxes.down;
  float d[Shape::kRegisters], total[kGradient ? Shape::kRegisters : 1];
  Ring ring;
  Segment at;
  for (int number = 0; segment_of(p.schedule, blockIdx.x, number, at); ++number) {
    if constexpr (kGradient) {
#pragma unroll
      for (int i = 0; i < Shape::kRegisters; ++i) total[i] = 0;
    }
    float square = 0;                      // of the sample before: added up while the next one's products go on
    const auto keep_square = [&](int n) {  // by tile; or by block, whose first tile has all samples
      square = warp_sum(square);
      if (lane != 0) return;
      const int part = p.schedule.whole ? int(blockIdx.x) : at.tile;
      float* const out = p.squares + (int64_t(n) * p.parts + part * kWarps + warp);
      *out = p.schedule.whole && number > 0 ? *out + square : square;
    };
    for (int n = at.first; n < at.last; ++n) {
      int before = ring.stage;
      const auto release = [&](int stage) {
        if (lane == 0) barrier_arrive(barriers.empty + stage);
      };
#pragma unroll 1
      for (int rectangle = 0; rectangle < rectangles; ++rectangle) {
        if (kGradient && group == 1 && rectangle == 0) barrier_wait(barriers.first + ring.stage, ring.parity);
        barrier_wait(barriers.full + ring.stage, ring.parity);
        const int steps = rectangle < boxes.shorter ? boxes.steps : boxes.last_steps;
        const uint32_t stage = ring.stage * boxes.stage_bytes;
        with_constant(steps, [&](auto constant) {
          keep(d);
          wgmma_fence();
#pragma unroll
          for (int step = 0; step < decltype(constant)::value; ++step)
            wgmma<kColumns, half_t>(d, grads.at(stage + step * kDepth * 2 * kBox),
                                    input.at(stage + step * boxes.input_step), step > 0 || rectangle > 0);
          wgmma_commit();
          keep(d);
        });
        if (rectangle == 0) {
          if (n > at.first) keep_square(n - 1);
        } else {
          if (kGradient && group == 0 && lane == 0) barrier_arrive(barriers.first + before);
          wgmma_wait<1>();
          release(before);
        }
        before = ring.stage;
        ring.advance(boxes.stages);
      }
      wgmma_wait<0>();
      keep(d);
      if (kGradient && group == 0 && lane == 0) barrier_arrive(barriers.first + before);
      release(before);
      float sums[4] = {};
#pragma unroll
      for (int i = 0; i < Shape::kRegisters; ++i) sums[i % 4] = fmaf(d[i], d[i], sums[i % 4]);
      square = (sums[0] + sums[1]) + (sums[2] + sums[3]);
      if constexpr (kGradient) {
        const float scale = p.scale ? p.scale[n] : 1.f;
        if (scale != 0) {
#pragma unroll
          for (int i = 0; i < Shape::kRegisters; ++i) total[i] = fmaf(scale, d[i], total[i]);
        }
      }
    }
    keep_square(at.last - 1);
    if constexpr (kGradient) {
      if (at.slot >= 0) {
        float4* const out = reinterpret_cast<float4*>(p.sums) + int64_t(at.slot) * kMultiplying * Shape::kRegisters / 4;
#pragma unroll
        for (int i = 0; i < Shape::kRegisters / 4; ++i)
          out[i * kMultiplying + thread] =
              make_float4(total[4 * i], total[4 * i + 1], total[4 * i + 2], total[4 * i + 3]);
      } else {
#pragma unroll
        for (int strip = 0; strip < kColumns / 32; ++strip) {
          float part[16];
#pragma unroll
          for (int i = 0; i < 16; ++i) part[i] = total[16 * strip + i];
          const int unit = at.across * Shape::kUnits + (kTall ? 0 : group);
          store_strip<half_t>(p, part, row_of<kTall>(at.down, warp), column_of(boxes, Shape::kWide, unit, strip / 2),
                              strip % 2 * 32, lane);
        }
      }
    }
  }
}

// The blocks that share the tile which is number `left` of those left over, in the order of samples. None if one block
// has it whole, and has written it.
struct Sharers {
  int block, count, first_slot;

  __device__ __forceinline__ Sharers(const Schedule& s, int left) {
    const int begin = left * s.N, end = begin + s.N;
    block = begin / (s.each + 1);
    while (s.first_item(block + 1) <= begin) ++block;
    const int from = s.first_item(block);
    first_slot = 2 * block + (from >= begin ? 0 : 1);
    if (from <= begin && s.first_item(block + 1) >= end) {
      count = 0;
      return;
    }
    for (count = 1; block + count < s.blocks && s.first_item(block + count) < end;) ++count;
  }

  __device__ __forceinline__ int slot(int which) const {
    return which ? 2 * (block + which) : first_slot;
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

__device__ __forceinline__ void sum_squares(const float* parts, int count, float* out, int lane) {
  double sum = 0;
#pragma unroll 4
  for (int i = lane; i < count; i += warp_threads) sum += double(__ldcg(parts + i));
  sum = warp_sum(sum);
  if (lane == 0) *out = float(sum);
}

// Four outputs of the bias's gradient: a lane takes every 32nd of the sums that the row's tiles and their sharers left.
template <class half_t, int kHigh>
__device__ __forceinline__ void finish_bias(const Arguments& p, int item, int lane) {
  const Schedule& s = p.schedule;
  const int down = item / (kHigh / 4), row = item % (kHigh / 4) * 4, most = s.most_sharers();
  float sum[4] = {};
#pragma unroll 1
  for (int i = lane; i < s.tiles_across * most; i += warp_threads) {
    const int across = i / most, share = i - across * most, tile = s.tile_at(down, across);
    const int left = tile - s.whole * s.blocks;
    int place = share ? -1 : tile;
    if (left >= 0) {
      const Sharers sharers(s, left);
      if (sharers.count) place = share < sharers.count ? s.tiles() + sharers.slot(share) : -1;
    }
    if (place < 0) continue;
    const float4 part = __ldcg(reinterpret_cast<const float4*>(p.bias_sums + int64_t(place) * kHigh + row));
    sum[0] += part.x, sum[1] += part.y, sum[2] += part.z, sum[3] += part.w;
  }
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    sum[i] = warp_sum(sum[i]);
    const int out = down * kHigh + row + i;
    if (lane == 0 && out < p.O) static_cast<half_t*>(p.bias_gradient)[out] = narrow<half_t>(sum[i]);
  }
}

// One warp's part of what is left once all blocks have been through: sums of squares, and of shared tiles.
template <class half_t, int kColumns, bool kTall, bool kGradient>
__device__ __forceinline__ void finish(const Arguments& p, int worker, int workers, int lane) {
  using Shape = Tile<kColumns, kTall>;
  constexpr int kStrips = kColumns / 32;
  const Schedule& s = p.schedule;
  for (int item = worker; item < s.N; item += workers) {
    sum_squares(p.squares + int64_t(item) * p.parts, p.parts, p.sq_norms + item, lane);
    const int boxes = s.tiles_down * Shape::kGradBoxes;
    if (p.bias) sum_squares(p.bias_squares + int64_t(item) * boxes, boxes, p.bias_sq_norms + item, lane);
  }
  if constexpr (kGradient) {
    for (int item = worker; item < s.left * kWarps * kStrips; item += workers) {
      const int strip = item % kStrips, warp = item / kStrips % kWarps, left = item / (kStrips * kWarps);
      const Sharers sharers(s, left);
      if (sharers.count == 0) continue;
      float sum[16] = {};
      sharers.add(sum, [&](float (&values)[16], int slot) {
        const float4* const from = reinterpret_cast<const float4*>(p.sums) +
                                   int64_t(slot) * kMultiplying * Shape::kRegisters / 4 + strip * 4 * kMultiplying +
                                   warp * warp_threads + lane;
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const float4 part = __ldcg(from + i * kMultiplying);
          values[4 * i] = part.x, values[4 * i + 1] = part.y, values[4 * i + 2] = part.z, values[4 * i + 3] = part.w;
        }
      });
      int down, across;
      s.place(s.whole * s.blocks + left, down, across);
      const int unit = across * Shape::kUnits + (kTall ? 0 : warp / 4);
      store_strip<half_t>(p, sum, row_of<kTall>(down, warp), column_of(p.boxes, Shape::kWide, unit, strip / 2),
                          strip % 2 * 32, lane);
    }
    if (p.bias_gradient)
      for (int item = workers - 1 - worker; item < s.tiles_down * Shape::kHigh / 4; item += workers)
        finish_bias<half_t, Shape::kHigh>(p, item, lane);
  }
}

template <class half_t, int kColumns, bool kTall, bool kGradient>
__global__ void __launch_bounds__(kThreads, 1)
    direct_sm90_kernel(const GRID_CONSTANT TensorMap grads, const GRID_CONSTANT TensorMap input,
                       const GRID_CONSTANT Arguments p) {
#if defined(CUDA_EMULATION) || defined(__CUDA_ARCH_FEAT_SM90_ALL)
  DYNAMIC_SHARED(unsigned char, shared);
  STATIC_SHARED(uint64_t, barrier_words, [3][kMostStages]);
  STATIC_SHARED(float, bias_totals, [kBiasWarps][kBox]);
  const Barriers barriers{barrier_words[0], barrier_words[1], barrier_words[2]};
  const uint32_t address = shared_address(shared), aligned = (address + 1023) & ~1023u;
  unsigned char* const stages = shared + (aligned - address);
  const int group = __shfl_sync(full_warp, int(threadIdx.x) / kGroup, 0);
  const int warp = __shfl_sync(full_warp, int(threadIdx.x) / warp_threads, 0), lane = threadIdx.x % warp_threads;

  if (p.boxes.clears) {
    for (int i = int(threadIdx.x) * 16; i < p.boxes.stages * p.boxes.stage_bytes; i += kThreads * 16)
      *reinterpret_cast<uint4*>(stages + i) = make_uint4(0, 0, 0, 0);
    fence_async_shared();
  }
  if (threadIdx.x == 0) {
    for (int i = 0; i < p.boxes.stages; ++i) {
      barrier_init(barriers.full + i, 1);
      barrier_init(barriers.empty + i, kWarps + (p.bias ? kBiasWarps : 0));
      barrier_init(barriers.first + i, kWarps / 2);
    }
    barrier_init_fence();
  }
  __syncthreads();

  // Each role keeps to its branch up to the end: what follows both would have the registers of the poorer one.
  if (group == 0) {
    give_registers<56>();
    if (warp == 0 && lane == 0) copy_boxes<kColumns, kTall>(grads, input, p, stages, barriers);
    if (p.bias && (warp == 1 || warp == 2)) add_bias<half_t, kColumns, kTall>(p, stages, barriers, bias_totals[warp - 1], warp - 1, lane);
    __syncwarp();
    grid_barrier();
  } else {
    take_registers<224>();
    multiply<half_t, kColumns, kTall, kGradient>(p, aligned, barriers, int(threadIdx.x) - kGroup);
    grid_barrier();
    finish<half_t, kColumns, kTall, kGradient>(p, int(blockIdx.x) * kWarps + warp - kGroup / warp_threads,
                                               int(gridDim.x) * kWarps, lane);
  }
#endif
}

}  // namespace torchgradx::cuda::sm90
