// Depthwise and small-group convolutions, direct and fused: G_n[tap] = sum over pixels of grad_output's plane times the
// image's, shifted by the tap, for every pair of channels of a group. 2 FLOP a pair of loads: bound by memory.
// A lane is a group: 32 planes of each operand are staged tile by tile, pixel-major, with zeros for the padding, so no
// inner loop has a mask, no access a bank conflict (33 words a pixel) and no sum leaves its thread before a sample
// ends. Warps share the pixels. Each operand is read once from memory, and the halo of a tile again from L2 (budgeted).
// Workspace: 8 N units bytes of squares; fused, parts copies of grad_weight in the accumulator type, and the bias's.
// units = ceil(groups / 32) x pairs of channels in a group x ceil(taps / 9, or 25 for larger kernels), parts =
// ceil(1024 / units), at most N: no more than 7 MB (doubles 13) of copies if there are several.
#include "device.cuh"
#include "dispatch.cuh"
#include "kernels.h"

#include <algorithm>

namespace torchgradx::cuda {
namespace {

constexpr int kWarps = 8, kThreads = kWarps * warp_threads;
constexpr int kPitch = warp_threads + 1;  // of a pixel in shared memory
constexpr int64_t kTileBytes = 44 << 10;  // three blocks on an SM, as many as registers allow, of 164 KB too
constexpr int64_t kBlocks = 1024;         // wanted; not read off the device, so that all devices add up alike
constexpr int64_t kMostPairs = 16, kFewestGroups = 8;

struct Tile {
  int high, wide;              // of outputs
  int image_high, image_wide;  // what their taps reach
};

struct Planes {
  ConvOperand input, grads;
  int H, W, outH, outW, taps, kW, strideH, strideW, padH, padW, dilationH, dilationW;  // planes_suit has them fit
  Tile tile;
  int64_t N, groups;
  int channels, rows;  // of a group: inputs, outputs
  const void* scale;   // [N], or null
  void* copies;        // [gridDim.y, O, C / groups, kH, kW], or null
  double* partials;    // [N, gridDim.x]
};

// A window of pixels of 32 planes, counted from (y, x), to out[pixel * kPitch + plane]; zeros where there is nothing.
// Lanes go along planes or along pixels, whichever lie closer together in memory.
template <class scalar_t>
__device__ __forceinline__ void stage(accumulator<scalar_t>* out, const scalar_t* from, int64_t plane_stride,
                                      const ConvOperand& strides, int planes, int y0, int x0, int H, int W, int high,
                                      int wide) {
  const int lane = threadIdx.x % warp_threads, warp = threadIdx.x / warp_threads;
  const bool along_planes = plane_stride < strides.w;
  const int first = along_planes ? warp : lane, step = along_planes ? kWarps : warp_threads;
  const int first_plane = along_planes ? lane : warp, plane_step = along_planes ? warp_threads : kWarps;
  const int64_t plane_jump = plane_step * plane_stride;
  from += first_plane * plane_stride;
  int y = first / wide, x = first % wide;
#pragma unroll 1
  for (int pixel = first; pixel < high * wide; pixel += step) {
    const bool inside = y0 + y >= 0 && y0 + y < H && x0 + x >= 0 && x0 + x < W;
    const scalar_t* at = from + (y0 + y) * strides.h + (x0 + x) * strides.w;
#pragma unroll 4
    for (int plane = first_plane; plane < warp_threads; plane += plane_step, at += plane_jump)
      out[pixel * kPitch + plane] = inside && plane < planes ? widen(*at) : accumulator<scalar_t>(0);
    for (x += step; x >= wide; x -= wide) ++y;
  }
}

// That an SM is to hold: what registers allow without a spill.
template <class scalar_t>
constexpr int blocks_of(int taps) {
  return taps > 9 || sizeof(scalar_t) == sizeof(double) ? 1 : 3;
}

template <class scalar_t, int kTaps>
__global__ void __launch_bounds__(kThreads, blocks_of<scalar_t>(kTaps)) planes_kernel(const Planes p) {
  using acc_t = accumulator<scalar_t>;
  DYNAMIC_SHARED(acc_t, shared);
  const int lane = threadIdx.x % warp_threads, warp = threadIdx.x / warp_threads;

  // This block's unit: 32 groups, a pair of channels of each, and some of the taps
  const int slabs = int(ceil_div<int64_t>(p.groups, warp_threads)), pairs = p.channels * p.rows;
  const int slab = blockIdx.x % slabs, pair = blockIdx.x / slabs % pairs,
            first_tap = blockIdx.x / slabs / pairs * kTaps;
  const int channel = pair % p.channels, row = pair / p.channels, taps = p.taps;
  const int64_t group = int64_t(slab) * warp_threads;
  const int planes = int(min(int64_t(warp_threads), p.groups - group)), mine = min(kTaps, taps - first_tap);
  int reach[kTaps];
#pragma unroll
  for (int j = 0; j < kTaps; ++j) {
    const int tap = first_tap + min(j, mine - 1);
    reach[j] = (tap / p.kW * p.dilationH * p.tile.image_wide + tap % p.kW * p.dilationW) * kPitch;
  }

  // Each thread keeps this many of the block's sums over samples, in the order of sum over warps below.
  constexpr int kKept = (kTaps * warp_threads + kThreads - 1) / kThreads;
  acc_t total[kKept] = {};
  acc_t* const image = shared + p.tile.high * p.tile.wide * kPitch;
  const int64_t begin = p.N * blockIdx.y / gridDim.y, end = p.N * (blockIdx.y + 1) / gridDim.y;
  for (int64_t n = begin; n < end; ++n) {
    const scalar_t* const grads_at =
        static_cast<const scalar_t*>(p.grads.data) + n * p.grads.n + (group * p.rows + row) * p.grads.c;
    const scalar_t* const image_at =
        static_cast<const scalar_t*>(p.input.data) + n * p.input.n + (group * p.channels + channel) * p.input.c;
    acc_t sums[kTaps] = {};
    for (int y = 0; y < p.outH; y += p.tile.high)
      for (int x = 0; x < p.outW; x += p.tile.wide) {
        // The last tiles are cut, not filled with zeros: zero times an infinite pixel would be seen.
        const int high = min(p.tile.high, p.outH - y), wide = min(p.tile.wide, p.outW - x);
        __syncthreads();
        stage(shared, grads_at, p.rows * p.grads.c, p.grads, planes, y, x, p.outH, p.outW, high, wide);
        stage(image, image_at, p.channels * p.input.c, p.input, planes, y * p.strideH - p.padH, x * p.strideW - p.padW,
              p.H, p.W, p.tile.image_high, p.tile.image_wide);
        __syncthreads();
        int down = warp / wide, along = warp % wide;
#pragma unroll 1  // the taps are loads enough in flight; more would spill
        for (int pixel = warp; pixel < high * wide; pixel += kWarps) {
          const acc_t grad = shared[pixel * kPitch + lane];
          const acc_t* const at = image + (down * p.strideH * p.tile.image_wide + along * p.strideW) * kPitch + lane;
#pragma unroll
          for (int j = 0; j < kTaps; ++j) sums[j] += grad * at[reach[j]];
          for (along += kWarps; along >= wide; along -= wide) ++down;
        }
      }

    // Sum over warps
    __syncthreads();
#pragma unroll
    for (int j = 0; j < kTaps; ++j) shared[(warp * kTaps + j) * warp_threads + lane] = sums[j];
    __syncthreads();
    const acc_t factor = p.scale ? static_cast<const acc_t*>(p.scale)[n] : acc_t(1);
    double square = 0;
#pragma unroll
    for (int k = 0; k < kKept; ++k) {
      const int entry = threadIdx.x + k * kThreads;
      if (entry >= mine * warp_threads) break;
      acc_t sum = 0;
      for (int w = 0; w < kWarps; ++w) sum += shared[w * kTaps * warp_threads + entry];
      square += double(sum) * double(sum);
      total[k] += factor != acc_t(0) ? factor * sum : acc_t(0);  // 0 times nan is nan
    }
    square = block_sum(square);
    if (threadIdx.x == 0) p.partials[n * gridDim.x + blockIdx.x] = square;
  }

  if (!p.copies) return;
  acc_t* const copy = static_cast<acc_t*>(p.copies) + blockIdx.y * p.groups * pairs * taps;
#pragma unroll
  for (int k = 0; k < kKept; ++k) {
    const int entry = threadIdx.x + k * kThreads, plane = entry % warp_threads, tap = entry / warp_threads;
    if (tap < mine && plane < planes)
      copy[(((group + plane) * p.rows + row) * p.channels + channel) * taps + first_tap + tap] = total[k];
  }
}

int64_t tap_chunk(const Conv2dProblem& c) {
  return c.kH * c.kW <= 9 ? 9 : 25;
}

int64_t reach_of(int64_t outputs, int64_t stride, int64_t taps, int64_t dilation) {
  return (outputs - 1) * stride + (taps - 1) * dilation + 1;
}

int64_t cells(int64_t high, int64_t wide, const Conv2dProblem& c) {
  return high * wide + reach_of(high, c.strideH, c.kH, c.dilationH) * reach_of(wide, c.strideW, c.kW, c.dilationW);
}

// The largest tile that fits; of nothing, if not even a pixel a warp does.
Tile make_tile(const Conv2dProblem& c) {
  const int64_t most = kTileBytes / kPitch / accumulator_bytes(c.dtype);
  int64_t high = std::min<int64_t>(c.outH, 16), wide = std::min<int64_t>(c.outW, 16);
  const int64_t least = std::min<int64_t>(kWarps, high * wide);
  while (high * wide >= least && cells(high, wide, c) > most) --(high > wide ? high : wide);
  if (high * wide < least) return {};
  return {int(high), int(wide), int(reach_of(high, c.strideH, c.kH, c.dilationH)),
          int(reach_of(wide, c.strideW, c.kW, c.dilationW))};
}

// How a problem is cut: units along gridDim.x, samples along gridDim.y
struct Cut {
  int64_t units, parts, size;

  explicit Cut(const Conv2dProblem& c)
      : units(ceil_div<int64_t>(c.groups, warp_threads) * (c.C / c.groups) * (c.O / c.groups) *
              ceil_div(c.kH * c.kW, tap_chunk(c))),
        parts(std::max<int64_t>(1, std::min(c.N, ceil_div(kBlocks, std::max<int64_t>(1, units))))),
        size(c.O * (c.C / c.groups) * c.kH * c.kW) {}
};

struct PlanesWorkspace {
  Carver carver;
  double* partials;
  void *copies, *bias;

  PlanesWorkspace(const Conv2dProblem& c, bool fused, void* workspace)
      : carver(workspace),
        partials(carver.take<double>(c.N * Cut(c).units * sizeof(double))),
        copies(fused ? carver.take<void>(Cut(c).parts * Cut(c).size * accumulator_bytes(c.dtype)) : nullptr),
        bias(carver.take<void>(bias_workspace(rows_of_bias(c), fused))) {}
};

template <class scalar_t, int kTaps>
cudaError_t launch_taps(const Planes& p, const Cut& cut, cudaStream_t stream) {
  const int64_t staged = (p.tile.high * p.tile.wide + p.tile.image_high * p.tile.image_wide) * kPitch;
  const int64_t elements = std::max<int64_t>(staged, kTaps * kThreads);
  return launch(planes_kernel<scalar_t, kTaps>, dim3(cut.units, cut.parts), dim3(kThreads),
                elements * sizeof(accumulator<scalar_t>), stream, p);
}

cudaError_t launch_planes(const Conv2dProblem& c, const Gradients& gradients, const SqNorms& sq_norms, void* workspace,
                          cudaStream_t stream) {
  if (!planes_suit(c)) return cudaErrorInvalidValue;
  const PlanesWorkspace own(c, gradients.weight, workspace);
  const Cut cut(c);
  Planes p{};
  p.input = c.input, p.grads = c.grad_output;
  p.H = int(c.H), p.W = int(c.W), p.outH = int(c.outH), p.outW = int(c.outW);
  p.taps = int(c.kH * c.kW), p.kW = int(c.kW);
  p.strideH = int(c.strideH), p.strideW = int(c.strideW), p.padH = int(c.padH), p.padW = int(c.padW);
  p.dilationH = int(c.dilationH), p.dilationW = int(c.dilationW);
  p.tile = make_tile(c), p.N = c.N, p.groups = c.groups;
  p.channels = int(c.C / c.groups), p.rows = int(c.O / c.groups);
  p.scale = gradients.scale, p.copies = own.copies, p.partials = own.partials;
  cudaError_t error = dispatch(c.dtype, [&](auto zero) {
    using scalar_t = decltype(zero);
    return tap_chunk(c) == 9 ? launch_taps<scalar_t, 9>(p, cut, stream) : launch_taps<scalar_t, 25>(p, cut, stream);
  });
  if (error == cudaSuccess && sq_norms.weight)
    error = launch_sum_partials(c.dtype, own.partials, c.N, cut.units, nullptr, sq_norms.weight, stream);
  if (error == cudaSuccess && gradients.weight)
    error = launch_sum_rows(c.dtype, own.copies, nullptr, cut.parts, cut.size, gradients.weight, stream);
  if (error == cudaSuccess && (sq_norms.bias || gradients.bias))
    error = launch_bias(rows_of_bias(c), gradients, sq_norms.bias, own.bias, stream);
  return error;
}

}  // namespace

bool planes_suit(const Conv2dProblem& c) {
  constexpr int64_t kMostSide = 1 << 28, kMostTaps = 1 << 10;  // what keeps int exact in the kernel
  const int64_t pairs = c.C / c.groups * (c.O / c.groups);
  if (c.groups < kFewestGroups || pairs == 0 || pairs > kMostPairs || c.kH * c.kW > kMostTaps) return false;
  if (c.N == 0 || c.outH == 0 || c.outW == 0 || std::max({c.H, c.W, c.outH, c.outW}) > kMostSide) return false;
  return make_tile(c).high > 0;
}

size_t planes_direct_workspace(const Conv2dProblem& problem) {
  return PlanesWorkspace(problem, false, nullptr).carver.size();
}

size_t planes_fused_workspace(const Conv2dProblem& problem) {
  return PlanesWorkspace(problem, true, nullptr).carver.size();
}

cudaError_t launch_planes_direct(const Conv2dProblem& problem, const SqNorms& sq_norms, void* workspace,
                                 cudaStream_t stream) {
  return launch_planes(problem, {}, sq_norms, workspace, stream);
}

cudaError_t launch_planes_fused(const Conv2dProblem& problem, const Gradients& gradients, const SqNorms& sq_norms,
                                void* workspace, cudaStream_t stream) {
  return launch_planes(problem, gradients, sq_norms, workspace, stream);
}

}  // namespace torchgradx::cuda
