// A tile of planes_kernel: how it comes to shared memory (stage), and the products of its pixels, for any
// kernel (EachTap) or for square ones of 3, 5 and 7 (Window).
#pragma once

#include "device.cuh"
#include "kernels.h"

namespace torchgradx::cuda {

constexpr int kFewestWarps = 4, kMostWarps = 8, kMostThreads = kMostWarps * warp_threads;
constexpr int kMostSide = 16;  // of a tile of grad_output; the pitch of its rows in shared memory

// Planes that one asynchronous copy takes, and the pitch of a pixel in shared memory: lanes that write along pixels are
// four to a bank.
constexpr int kPieceBytes = 16;
template <class scalar_t>
constexpr int kPiece = kPieceBytes / sizeof(scalar_t);
template <class scalar_t>
constexpr int kPitch = warp_threads + kPiece<scalar_t>;

struct Tile {
  int high, wide;              // of outputs
  int image_high, image_wide;  // what their taps reach
  int image_row;               // pixels from a row of the image to the next, in shared memory
};

// An operand and its part of a tile
struct Operand {
  ConvOperand of;
  int64_t plane_stride;              // from a group to the next
  int H, W;                          // planes_suit has them fit
  int stepH, stepW, padH, padW;      // the tile of output (y, x) begins at pixel (y stepH - padH, x stepW - padW)
  int high, wide, row, first_pixel;  // in shared memory, from row to row and from the tiles' beginning
};

struct Planes {
  Operand operands[2];  // grad_output, input
  bool in_pieces;       // both
  int outH, outW, taps, kW, strideH, strideW, dilationH, dilationW;
  Tile tile;
  int total_at;  // in shared memory, beyond the tiles
  int64_t N, groups;
  int channels, rows;                // of a group: inputs, outputs
  bool bias;                         // wanted too
  const void* scale;                 // [N], or null
  void *copies, *bias_copies;        // [gridDim.y, O, C / groups, kH, kW] and [gridDim.y, O], or null
  double *partials, *bias_partials;  // [N, gridDim.x], [N, ceil(groups / 32), rows]
};

// Pixels from (y0, x0) of the first planes of 32, to out[(y * row + x) * kPitch + plane], zeros where there is nothing.
// Threads go along planes or along pixels, whichever lie closer together in memory.
template <class scalar_t>
__device__ __forceinline__ void stage(scalar_t* out, const scalar_t* from, const Operand& o, int planes, int y0,
                                      int x0) {
  const int lane = threadIdx.x % warp_threads, warp = threadIdx.x / warp_threads, warps = blockDim.x / warp_threads;
  const bool along_planes = o.plane_stride < o.of.w;
  const int first = along_planes ? warp : threadIdx.x, step = along_planes ? warps : blockDim.x;
  const int first_plane = along_planes ? lane : 0, plane_step = along_planes ? warp_threads : 1;
  const int down = step / o.wide, across = step % o.wide;
  int y = first / o.wide, x = first % o.wide;
  const int64_t jump = plane_step * o.plane_stride;
  from += first_plane * o.plane_stride + (y0 + y) * o.of.h + (x0 + x) * o.of.w;
#pragma unroll 1
  while (y < o.high) {
    const bool inside = unsigned(y0 + y) < unsigned(o.H) && unsigned(x0 + x) < unsigned(o.W);
    const int until = inside ? planes : 0;
    scalar_t* const to = out + (y * o.row + x) * kPitch<scalar_t>;
    const scalar_t* at = from;
    int plane = first_plane;
#pragma unroll 4
    for (; plane < until; plane += plane_step, at += jump) to[plane] = *at;
#pragma unroll 1
    for (; plane < warp_threads; plane += plane_step) to[plane] = narrow<scalar_t>(0);
    y += down, x += across, from += down * o.of.h + across * o.of.w;
    if (x >= o.wide) ++y, x -= o.wide, from += o.of.h - o.wide * o.of.w;
  }
}

// The same by asynchronous copies: planes side by side, every pixel aligned, and no piece with planes that there are
// not. A warp takes a row, as many pixels at a time as a piece has planes.
template <class scalar_t>
__device__ __forceinline__ void stage_pieces(scalar_t* out, const scalar_t* from, const Operand& o, int planes, int y0,
                                             int x0) {
  constexpr int kSharers = warp_threads / kPiece<scalar_t>;
  const int lane = threadIdx.x % warp_threads, warp = threadIdx.x / warp_threads, warps = blockDim.x / warp_threads;
  const int plane = lane % kSharers * kPiece<scalar_t>;
#pragma unroll 1
  for (int x = lane / kSharers; x < o.wide; x += warp_threads / kSharers) {
    const bool inside = plane < planes && unsigned(x0 + x) < unsigned(o.W);
    const scalar_t* at = from + plane + (y0 + warp) * o.of.h + (x0 + x) * o.of.w;
    scalar_t* to = out + (warp * o.row + x) * kPitch<scalar_t> + plane;
#pragma unroll 1
    for (int y = warp; y < o.high; y += warps, at += warps * o.of.h, to += warps * o.row * kPitch<scalar_t>) {
      if (inside && unsigned(y0 + y) < unsigned(o.H))
        cp_async<16>(to, at);
      else
        *reinterpret_cast<uint4*>(to) = uint4{};
    }
  }
}

// The products of a tile for any kernel, kTaps of its taps, and the sum of grad_output behind them: an image value is
// read for each.
template <class scalar_t, int kCount>
struct EachTap {
  using scalar = scalar_t;
  static constexpr int kTaps = kCount;
  // Blocks that an SM is to hold: what registers allow without a spill.
  static constexpr int kResident = kTaps > 9 || sizeof(scalar_t) == sizeof(double) ? 1 : 2;

  int reach[kTaps];

  __device__ EachTap(const Planes& p, int first_tap) {
#pragma unroll
    for (int j = 0; j < kTaps; ++j) {
      const int tap = min(first_tap + j, p.taps - 1);
      reach[j] = (tap / p.kW * p.dilationH * p.tile.image_row + tap % p.kW * p.dilationW) * kPitch<scalar_t>;
    }
  }

  __device__ __forceinline__ void add(accumulator<scalar_t> (&sums)[kTaps + 1], const scalar_t* grads,
                                      const scalar_t* image, int high, int wide, const Planes& p) const {
    const int warps = blockDim.x / warp_threads;
    int y = threadIdx.x / warp_threads / wide, x = threadIdx.x / warp_threads % wide;
#pragma unroll 1  // the taps are loads enough in flight; more would spill
    while (y < high) {
      const accumulator<scalar_t> grad = widen(grads[(y * kMostSide + x) * kPitch<scalar_t>]);
      const scalar_t* const at = image + (y * p.strideH * p.tile.image_row + x * p.strideW) * kPitch<scalar_t>;
#pragma unroll
      for (int j = 0; j < kTaps; ++j) sums[j] += grad * widen(at[reach[j]]);
      sums[kTaps] += grad;
      for (x += warps; x >= wide; x -= wide) ++y;
    }
  }
};

// The same for a kernel of kSide x kSide, all taps at once. A warp goes along two rows of outputs with what their taps
// reach of the image in registers, as a ring of columns: a step reads kStride new ones.
template <class scalar_t, int kSide, int kStride>
struct Window {
  using scalar = scalar_t;
  static constexpr int kTaps = kSide * kSide, kImageRow = (kMostSide - 1) * kStride + kSide;
  static constexpr int kImageRows = kStride + kSide;
  static constexpr int kResident = 2;  // as many as their tiles leave room for

  Window() = default;
  __device__ Window(const Planes&, int) {}

  __device__ __forceinline__ void add(float (&sums)[kTaps + 1], const scalar_t* grads, const scalar_t* image, int high,
                                      int wide, const Planes&) const {
    const int warp = threadIdx.x / warp_threads, warps = blockDim.x / warp_threads;
#pragma unroll 1
    for (int y = 2 * warp; y < high; y += 2 * warps) {
      const scalar_t* grads_at = grads + y * kMostSide * kPitch<scalar_t>;
      const scalar_t* image_at = image + y * kStride * kImageRow * kPitch<scalar_t>;
      const bool both = y + 1 < high;
      float window[kImageRows][kSide] = {};
      const auto read = [&](int column) {
#pragma unroll
        for (int i = 0; i < kImageRows; ++i)
          if (i < kSide || both)
            window[i][column % kSide] = widen(image_at[(i * kImageRow + column) * kPitch<scalar_t>]);
      };
#pragma unroll
      for (int column = 0; column < kSide - kStride; ++column) read(column);
#pragma unroll 1
      for (int x = 0; x < wide; x += kSide) {
#pragma unroll
        for (int j = 0; j < kSide; ++j) {
          if (x + j >= wide) break;
#pragma unroll
          for (int column = 0; column < kStride; ++column) read(kSide + (j - 1) * kStride + column);
#pragma unroll
          for (int i = 0; i < 2; ++i) {
            if (i == 1 && !both) break;
            const float grad = widen(grads_at[(i * kMostSide + j) * kPitch<scalar_t>]);
#pragma unroll
            for (int tap = 0; tap < kTaps; ++tap)
              sums[tap] += grad * window[i * kStride + tap / kSide][(j * kStride + tap % kSide) % kSide];
            sums[kTaps] += grad;
          }
        }
        grads_at += kSide * kPitch<scalar_t>, image_at += kSide * kStride * kPitch<scalar_t>;
      }
    }
  }
};

}  // namespace torchgradx::cuda
