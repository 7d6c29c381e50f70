// direct and fused on Hopper's wgmma, of halves: |G_n|^2 for every sample and, with kGradient, sum_n scale_n G_n from
// the same products, for Linear and Conv2d without copies of patches. 2 N T I O FLOP at the tensor cores' own speed.
//
// A block is three warpgroups. One thread of the first copies boxes into a ring of stages; its warps 1 and 2 add up the
// bias from the same stages, each tile of a row of tiles for its own samples; its warp 3 parts samples of several
// lengths, whose rows stand one after another. The other two multiply: each has a tile
// of 64 x kColumns of one sample's gradient in registers, which it squares and adds to its sum over the samples, while
// the other's products go on. kTall: the two stand on top of each other (128 x kColumns), else side by side (64 x 2
// kColumns), for few outputs. kCluster: two blocks stand on top of each other and get the same boxes of the input, of
// which each copies every other one for both. Tiles which blocks have shared are added up after a barrier of the whole
// grid, in the order of samples: two runs give the same bits.
#pragma once

#include "sm90_bias.cuh"
#include "sm90_tile.cuh"

namespace torchgradx::cuda::sm90 {

// One thread: boxes of every rectangle of every sample, a stage after the other.
template <int kColumns, bool kTall, int kCluster>
__device__ __forceinline__ void copy_boxes(const TensorMap& grads, const TensorMap& input, const Arguments& p,
                                           unsigned char* stages, const Barriers& barriers) {
  using Shape = Tile<kColumns, kTall>;
  constexpr int kMost = Shape::kUnits * Shape::kWide;
  const Boxes& boxes = p.boxes;
  const int count = boxes.halo ? Shape::kUnits : kMost;
  Ring ring;
  Segment at;
  for (int number = 0; segment_of<kCluster>(p.schedule, blockIdx.x, number, at); ++number) {
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
    for (int n = at.first; n < at.last; ++n) {
      const Extent extent(p, n);
#pragma unroll 1
      for (int down = 0; down < boxes.down; ++down)
#pragma unroll 1
        for (int across = 0; across < extent.count; ++across) {
          const int x = extent.first + across * boxes.width, y = down * boxes.height;
          uint64_t* const copied = barriers.copied + ring.stage;
          unsigned char* const stage = stages + ring.stage * boxes.stage_bytes;
          barrier_wait(barriers.empty + ring.stage, ring.parity ^ 1);
          barrier_expect(copied, boxes.copied_bytes);
#pragma unroll
          for (int j = 0; j < Shape::kGradBoxes; ++j)
            copy_box(stage + j * boxes.grad_bytes, grads, copied, row + j * kBox, x, y, extent.image);
#pragma unroll
          for (int j = 0; j < kMost; ++j)
            if (j < count) {
              unsigned char* const to = stage + boxes.input_offset + j * boxes.input_bytes;
              const int left = x * boxes.stride_x + tap_x[j], top = y * boxes.stride_y + tap_y[j];
              if constexpr (kCluster == 1)
                copy_box(to, input, copied, channel[j], left, top, extent.image);
              else if ((j + ring.stage) % kCluster == int(blockIdx.x) % kCluster)
                copy_box_to_both(to, input, copied, channel[j], left, top, extent.image);
            }
          ring.advance(boxes.stages);
        }
    }
  }
}

// A warp, where samples differ in length: rows behind a sample's last one, up to a whole step, are the next sample's in
// its last boxes, and become zeros. All boxes of a stage are alike there.
template <int kColumns, bool kTall, int kCluster>
__device__ __forceinline__ void clear_tails(const Arguments& p, unsigned char* stages, const Barriers& barriers,
                                            int lane) {
  using Shape = Tile<kColumns, kTall>;
  constexpr int kBoxes = Shape::kGradBoxes + Shape::kUnits * Shape::kWide, kPieces = 2 * kBox / 16;  // of a row
  const Boxes& boxes = p.boxes;
  Ring ring;
  Segment at;
  for (int number = 0; segment_of<kCluster>(p.schedule, blockIdx.x, number, at); ++number)
#pragma unroll 1
    for (int n = at.first; n < at.last; ++n) {
      const Extent extent(p, n);
#pragma unroll 1
      for (int rectangle = 0; rectangle < extent.rectangles; ++rectangle) {
        barrier_wait(barriers.copied + ring.stage, ring.parity);
        const int first = extent.rows - rectangle * boxes.width, last = extent.steps(boxes, rectangle) * kDepth;
        const int pieces = (last - first) * kPieces;
        if (pieces > 0) {
          unsigned char* const stage = stages + ring.stage * boxes.stage_bytes + first * 2 * kBox;
          for (int i = lane; i < pieces * kBoxes; i += warp_threads)
            *reinterpret_cast<uint4*>(stage + i / pieces * boxes.grad_bytes + i % pieces * 16) = make_uint4(0, 0, 0, 0);
          fence_async_shared();
        }
        __syncwarp();
        if (lane == 0) barrier_arrive(barriers.full + ring.stage);
        ring.advance(boxes.stages);
      }
    }
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

template <class half_t, int kColumns, bool kTall, bool kGradient, int kCluster>
__device__ __forceinline__ void multiply(const Arguments& p, uint32_t stages, const Barriers& barriers, int thread) {
  using Shape = Tile<kColumns, kTall>;
  const Boxes& boxes = p.boxes;
  const int group = thread / kGroup, warp = thread / warp_threads, lane = thread % warp_threads;
  const Descriptor grads(stages + (kTall ? group * boxes.grad_bytes : 0), boxes.grad_bytes, 1024);
  const Descriptor input(
      stages + boxes.input_offset + (kTall ? 0 : group * (boxes.halo ? 1 : Shape::kWide) * boxes.input_bytes),
      boxes.between, boxes.group);
  float d[Shape::kRegisters], total[kGradient ? Shape::kRegisters : 1];
  Ring ring;
  Segment at;
  for (int number = 0; segment_of<kCluster>(p.schedule, blockIdx.x, number, at); ++number) {
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
      const Extent extent(p, n);
      int before = ring.stage;
      const auto release = [&](int stage) {  // to all who copy into it
        if (kCluster == 1 && lane == 0) barrier_arrive(barriers.empty + stage);
        if (kCluster > 1 && lane < kCluster) barrier_arrive_at(barriers.empty + stage, lane);
      };
#pragma unroll 1
      for (int rectangle = 0; rectangle < extent.rectangles; ++rectangle) {
        if (kGradient && group == 1 && rectangle == 0) barrier_wait(barriers.first + ring.stage, ring.parity);
        barrier_wait(barriers.full + ring.stage, ring.parity);
        const int steps = extent.steps(boxes, rectangle);
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

__device__ __forceinline__ void sum_squares(const float* parts, int count, float* out, int lane) {
  double sum = 0;
#pragma unroll 4
  for (int i = lane; i < count; i += warp_threads) sum += double(__ldcg(parts + i));
  sum = warp_sum(sum);
  if (lane == 0) *out = float(sum);
}

// One warp's part of what is left once all blocks have been through: sums of squares, and of shared tiles.
template <class half_t, int kColumns, bool kTall, bool kGradient, int kCluster>
__device__ __forceinline__ void finish(const Arguments& p, int worker, int workers, int lane) {
  using Shape = Tile<kColumns, kTall>;
  constexpr int kStrips = kColumns / 32;
  const Schedule& s = p.schedule;
  for (int item = worker; item < s.N; item += workers) {
    if (p.sq_norms) sum_squares(p.squares + int64_t(item) * p.parts, p.parts, p.sq_norms + item, lane);
    const int boxes = s.tiles_down * kCluster * Shape::kGradBoxes;
    if (p.bias_sq_norms) sum_squares(p.bias_squares + int64_t(item) * boxes, boxes, p.bias_sq_norms + item, lane);
  }
  if constexpr (kGradient) {
    for (int item = worker; item < s.left * kCluster * kWarps * kStrips; item += workers) {
      const int strip = item % kStrips, warp = item / kStrips % kWarps, tile = item / (kStrips * kWarps);
      const int left = tile / kCluster, rank = tile % kCluster;
      const Sharers sharers(s, left);
      if (sharers.count == 0) continue;
      float sum[16] = {};
      sharers.add(sum, [&](float (&values)[16], int slot) {
        const float4* const from = reinterpret_cast<const float4*>(p.sums) +
                                   (int64_t(slot) * kCluster + rank) * kMultiplying * Shape::kRegisters / 4 +
                                   strip * 4 * kMultiplying + warp * warp_threads + lane;
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const float4 part = __ldcg(from + i * kMultiplying);
          values[4 * i] = part.x, values[4 * i + 1] = part.y, values[4 * i + 2] = part.z, values[4 * i + 3] = part.w;
        }
      });
      int down, across;
      s.place(s.whole * s.teams + left, down, across);
      const int unit = across * Shape::kUnits + (kTall ? 0 : warp / 4);
      store_strip<half_t>(p, sum, row_of<kTall>(down * kCluster + rank, warp),
                          column_of(p.boxes, Shape::kWide, unit, strip / 2), strip % 2 * 32, lane);
    }
    if (p.bias_gradient)
      for (int item = workers - 1 - worker; item < s.tiles_down * kCluster * Shape::kHigh / 4; item += workers)
        finish_bias<half_t, Shape::kHigh, kCluster>(p, item, lane);
  }
}

template <class half_t, int kColumns, bool kTall, bool kGradient, int kCluster>
__global__ void __launch_bounds__(kThreads, 1)
    direct_sm90_kernel(const GRID_CONSTANT TensorMap grads, const GRID_CONSTANT TensorMap input,
                       const GRID_CONSTANT Arguments p) {
#if defined(CUDA_EMULATION) || defined(__CUDA_ARCH_FEAT_SM90_ALL)
  DYNAMIC_SHARED(unsigned char, shared);
  STATIC_SHARED(uint64_t, barrier_words, [4][kMostStages]);
  STATIC_SHARED(float, bias_totals, [kBiasWarps][kBox]);
  const Barriers barriers{barrier_words[p.starts ? 3 : 0], barrier_words[0], barrier_words[1], barrier_words[2]};
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
      if (p.starts) barrier_init(barriers.copied + i, 1);
      barrier_init(barriers.empty + i, kWarps * kCluster + (p.bias ? kBiasWarps : 0));
      barrier_init(barriers.first + i, kWarps / 2);
    }
    barrier_init_fence();
  }
  __syncthreads();
  if constexpr (kCluster > 1) cluster_barrier();  // the end's is the grid's

  // Each role keeps to its branch up to the end: what follows both would have the registers of the poorer one.
  if (group == 0) {
    give_registers<56>();
    if (warp == 0 && lane == 0) copy_boxes<kColumns, kTall, kCluster>(grads, input, p, stages, barriers);
    if (p.bias && (warp == 1 || warp == 2))
      add_bias<half_t, kColumns, kTall, kCluster>(p, stages, barriers, bias_totals[warp - 1], warp - 1, lane);
    if (p.starts && warp == 3) clear_tails<kColumns, kTall, kCluster>(p, stages, barriers, lane);
    __syncwarp();
    grid_barrier();
  } else {
    take_registers<224>();
    multiply<half_t, kColumns, kTall, kGradient, kCluster>(p, aligned, barriers, int(threadIdx.x) - kGroup);
    grid_barrier();
    finish<half_t, kColumns, kTall, kGradient, kCluster>(p, int(blockIdx.x) * kWarps + warp - kGroup / warp_threads,
                                                         int(gridDim.x) * kWarps, lane);
  }
#endif
}

}  // namespace torchgradx::cuda::sm90
