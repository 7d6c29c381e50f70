// The bias's part of direct_sm90.cuh: its gradient by sample from the boxes that lie in shared memory anyway.
#pragma once

#include "sm90_tile.cuh"

namespace torchgradx::cuda::sm90 {

// Warp 1 or 2: the bias's gradient of every tiles_across-th sample, from one box of grad_output. Lane l takes the 16
// bytes l % 8 of rows l / 8, l / 8 + 4, ... A box has whole steps of rows; those that no position fills are zero.
// `total` is this warp's, of shared memory: registers are few here.
template <class half_t, int kColumns, bool kTall, int kCluster>
__device__ __forceinline__ void add_bias(const Arguments& p, const unsigned char* stages, const Barriers& barriers,
                                         float* total, int which, int lane) {
  using Shape = Tile<kColumns, kTall>;
  constexpr int kPiece = 8, kLoads = 4;  // of a step: rows l / 8 + 4 j
  const Boxes& boxes = p.boxes;
  const int first_row = lane / 8, odd_row = first_row + 4;
  const int even = first_row * 2 * kBox + (lane % 8 ^ first_row) * 16,
            odd = odd_row * 2 * kBox + (lane % 8 ^ odd_row) * 16;
  float* const mine = total + kPiece * lane;  // of lanes below 8
  Ring ring;
  Segment at;
  for (int number = 0; segment_of<kCluster>(p.schedule, blockIdx.x, number, at); ++number) {
    if (lane < kBox / kPiece) {
#pragma unroll
      for (int i = 0; i < kPiece; ++i) mine[i] = 0;
    }
#pragma unroll 1
    for (int n = at.first; n < at.last; ++n) {
      const bool takes = which < Shape::kGradBoxes && n % p.schedule.tiles_across == at.across;
      const Extent extent(p, n);
      float sum[kPiece] = {};
#pragma unroll 1
      for (int rectangle = 0; rectangle < extent.rectangles; ++rectangle) {
        barrier_wait(barriers.full + ring.stage, ring.parity);
        const unsigned char* const box = stages + ring.stage * boxes.stage_bytes + which * boxes.grad_bytes;
        const int steps = extent.rows ? extent.steps(boxes, rectangle) : boxes.steps;
#pragma unroll 2
        for (int step = 0; takes && step < steps; ++step) {
          uint4 pieces[kLoads];
#pragma unroll
          for (int j = 0; j < kLoads; ++j)
            pieces[j] =
                *reinterpret_cast<const uint4*>(box + step * kDepth * 2 * kBox + j / 2 * 1024 + (j % 2 ? odd : even));
#pragma unroll
          for (int j = 0; j < kLoads; ++j) {
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
        p.bias_squares[(int64_t(n) * p.schedule.tiles_down * kCluster + at.down) * Shape::kGradBoxes + which] = square;
      const float scale = p.scale ? p.scale[n] : 1.f;
      if (scale == 0 || lane >= kBox / kPiece) continue;
#pragma unroll
      for (int i = 0; i < kPiece; ++i) mine[i] = fmaf(scale, sum[i], mine[i]);
    }
    if (which >= Shape::kGradBoxes || !p.bias_gradient || lane >= kBox / kPiece) continue;
    const int place = at.slot < 0 ? at.tile : p.schedule.tiles() * kCluster + at.slot;
    float* const out = p.bias_sums + int64_t(place) * Shape::kHigh + which * kRows + kPiece * lane;
#pragma unroll
    for (int i = 0; i < kPiece; ++i) out[i] = mine[i];
  }
}

// Four outputs of the bias's gradient: a lane takes every 32nd of the sums that the row's tiles and their sharers left.
template <class half_t, int kHigh, int kCluster>
__device__ __forceinline__ void finish_bias(const Arguments& p, int item, int lane) {
  const Schedule& s = p.schedule;
  const int down = item / (kHigh / 4), row = item % (kHigh / 4) * 4, most = s.most_sharers();
  float sum[4] = {};
#pragma unroll 1
  for (int i = lane; i < s.tiles_across * most; i += warp_threads) {
    const int across = i / most, share = i - across * most, tile = s.tile_at(down / kCluster, across);
    const int left = tile - s.whole * s.teams;
    int place = share ? -1 : tile;
    if (left >= 0) {
      const Sharers sharers(s, left);
      if (sharers.count) place = share < sharers.count ? s.tiles() + sharers.slot(share) : -1;
    }
    if (place < 0) continue;
    const int64_t at = int64_t(place) * kCluster + down % kCluster;
    const float4 part = __ldcg(reinterpret_cast<const float4*>(p.bias_sums + at * kHigh + row));
    sum[0] += part.x, sum[1] += part.y, sum[2] += part.z, sum[3] += part.w;
  }
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    sum[i] = warp_sum(sum[i]);
    const int out = down * kHigh + row + i;
    if (lane == 0 && out < p.O) static_cast<half_t*>(p.bias_gradient)[out] = narrow<half_t>(sum[i]);
  }
}

}  // namespace torchgradx::cuda::sm90
