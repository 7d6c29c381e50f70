// Depthwise and small-group convolutions, direct and fused: G_n[tap] = sum over pixels of grad_output's plane times the
// image's, shifted by the tap, for every pair of channels of a group. A lane is a group: 32 planes of each operand are
// staged tile by tile, pixel-major, with zeros for the padding, so no inner loop has a mask, no read a bank conflict
// and no sum leaves its thread before a sample ends. Warps share the pixels. Each operand is read once from memory, and
// the halo of a tile again from L2. Shared memory bounds a loop that reads the image for every tap, so square kernels
// of 3, 5 and 7 keep a window of it in registers (Window); others do not (EachTap).
// The bias is one more sum, of grad_output alone, of the units that have a group's first channel and tap.
// Workspace: 8 N units bytes of squares; fused, parts copies of grad_weight in the accumulator type; the bias's less.
// units = ceil(groups / 32) x pairs of channels in a group x passes over the taps, parts = ceil(1024 / units), at most
// N: no more than 13 MB of copies if there are several.
#include "dispatch.cuh"
#include "planes.cuh"

#include <algorithm>

namespace torchgradx::cuda {
namespace {

constexpr int kTotalPitch = warp_threads + 1;
// Blocks of four warps for halves: three on an SM. Others have blocks of eight: two.
constexpr int64_t kTileBytes = 56 << 10, kWiderTileBytes = 72 << 10;
// Not read off the device, so that all devices add up alike: blocks wanted, and too few for blocks of four warps.
constexpr int64_t kBlocks = 1024, kFewSamples = 264;
constexpr int64_t kMostPairs = 16, kFewestGroups = 8;

template <class Taps>
__global__ void __launch_bounds__(kMostThreads, Taps::kResident) planes_kernel(const Planes p) {
  using scalar_t = typename Taps::scalar;
  using acc_t = accumulator<scalar_t>;
  constexpr int kTaps = Taps::kTaps, kSums = kTaps + 1;
  DYNAMIC_SHARED(acc_t, warp_sums);             // [warps, kSums, 32], in place of the tiles
  acc_t* const total = warp_sums + p.total_at;  // [kSums, kTotalPitch]: of this block's samples
  const int lane = threadIdx.x % warp_threads, warp = threadIdx.x / warp_threads, warps = blockDim.x / warp_threads;

  // This block's unit: 32 groups, a pair of channels of each, and some of the taps
  const int slabs = int(ceil_div<int64_t>(p.groups, warp_threads)), pairs = p.channels * p.rows;
  const int slab = blockIdx.x % slabs, pair = blockIdx.x / slabs % pairs,
            first_tap = blockIdx.x / slabs / pairs * kTaps;
  const int channel = pair % p.channels, row = pair / p.channels;
  const int64_t group = int64_t(slab) * warp_threads;
  const int planes = int(min(int64_t(warp_threads), p.groups - group)), mine = min(kTaps, p.taps - first_tap);
  const bool sums_bias = p.bias && channel == 0 && first_tap == 0;
  const Taps taps(p, first_tap);

  scalar_t* const tiles = reinterpret_cast<scalar_t*>(warp_sums);
  const int64_t begin = p.N * blockIdx.y / gridDim.y, end = p.N * (blockIdx.y + 1) / gridDim.y;
  for (int64_t n = begin; n < end; ++n) {
    acc_t sums[kSums] = {};
    for (int y = 0; y < p.outH; y += p.tile.high)
      for (int x = 0; x < p.outW; x += p.tile.wide) {
        __syncthreads();
#pragma unroll 1  // once in the code: registers are short
        for (int k = 0; k < 2; ++k) {
          const Operand& o = p.operands[k];
          const int64_t at = n * o.of.n + group * o.plane_stride + (k ? channel : row) * o.of.c;
          const scalar_t* const from = static_cast<const scalar_t*>(o.of.data) + at;
          scalar_t* const to = tiles + o.first_pixel * kPitch<scalar_t>;
          const int y0 = y * o.stepH - o.padH, x0 = x * o.stepW - o.padW;
          if (p.in_pieces)
            stage_pieces(to, from, o, planes, y0, x0);
          else
            stage(to, from, o, planes, y0, x0);
        }
        cp_async_commit();
        cp_async_wait<0>();
        __syncthreads();
        // The last tiles are cut, not filled with zeros: zero times an infinite pixel would be seen.
        const int high = min(p.tile.high, p.outH - y), wide = min(p.tile.wide, p.outW - x);
        const scalar_t* const image = tiles + p.operands[1].first_pixel * kPitch<scalar_t>;
        taps.add(sums, tiles + lane, image + lane, high, wide, p);
      }

    // Sum over warps
    __syncthreads();
#pragma unroll
    for (int j = 0; j < kSums; ++j) warp_sums[(warp * kSums + j) * warp_threads + lane] = sums[j];
    __syncthreads();
    const acc_t factor = p.scale ? static_cast<const acc_t*>(p.scale)[n] : acc_t(1);
    double square = 0;
    for (int entry = warp; entry < mine + sums_bias; entry += warps) {
      const int tap = entry < mine ? entry : kTaps;
      acc_t sum = 0;
#pragma unroll 1
      for (int w = 0; w < warps; w += kFewestWarps)
#pragma unroll
        for (int j = 0; j < kFewestWarps; ++j) sum += warp_sums[((w + j) * kSums + tap) * warp_threads + lane];
      if (tap < kTaps) {
        square += double(sum) * double(sum);
      } else {
        const double bias_square = warp_sum(double(sum) * double(sum));
        if (lane == 0) p.bias_partials[(n * slabs + slab) * p.rows + row] = bias_square;
      }
      acc_t& of_samples = total[tap * kTotalPitch + lane];
      const acc_t before = n == begin ? acc_t(0) : of_samples;
      of_samples = factor != acc_t(0) ? before + factor * sum : before;  // 0 times nan is nan
    }
    square = block_sum(square);
    if (threadIdx.x == 0) p.partials[n * gridDim.x + blockIdx.x] = square;
  }

  if (!p.copies) return;  // block_sum had a barrier: the totals are there
  for (int plane = warp; plane < planes; plane += warps) {
    const int64_t filter = (((blockIdx.y * p.groups + group + plane) * p.rows + row) * p.channels + channel) * p.taps;
    acc_t* const copy = static_cast<acc_t*>(p.copies) + filter + first_tap;
    for (int tap = lane; tap < mine; tap += warp_threads) copy[tap] = total[tap * kTotalPitch + plane];
  }
  if (sums_bias && warp == 0 && lane < planes)
    static_cast<acc_t*>(p.bias_copies)[(blockIdx.y * p.groups + group + lane) * p.rows + row] =
        total[kTaps * kTotalPitch + lane];
}

// The side of the kernel if Window has it, or zero.
int64_t window_side(const Conv2dProblem& c) {
  const bool square = c.kH == c.kW && c.strideH == c.strideW && c.dilationH == 1 && c.dilationW == 1;
  const bool small = (c.kW == 3 || c.kW == 5) && c.strideW <= 2, large = c.kW == 7 && c.strideW == 1;
  return square && (small || large) && c.dtype != DType::kDouble ? c.kW : 0;
}

int64_t taps_at_once(const Conv2dProblem& c) {
  return window_side(c) || c.kH * c.kW <= 9 ? c.kH * c.kW : 25;
}

int64_t reach_of(int64_t outputs, int64_t stride, int64_t taps, int64_t dilation) {
  return (outputs - 1) * stride + (taps - 1) * dilation + 1;
}

// The largest tile that fits, and equal ones; of nothing, if not even eight pixels fit.
Tile make_tile(const Conv2dProblem& c) {
  const int64_t pixel = warp_threads * bytes_of(c.dtype) + kPieceBytes, side = window_side(c);
  const int64_t most = (bytes_of(c.dtype) == 2 ? kTileBytes : kWiderTileBytes) / pixel;
  const auto evenly = [](int64_t outputs) { return ceil_div(outputs, ceil_div<int64_t>(outputs, kMostSide)); };
  int64_t high = evenly(c.outH), wide = evenly(c.outW);
  for (const int64_t least = std::min<int64_t>(8, high * wide); high * wide >= least;) {
    const int64_t image_high = reach_of(high, c.strideH, c.kH, c.dilationH),
                  image_wide = reach_of(wide, c.strideW, c.kW, c.dilationW),
                  image_row = side ? reach_of(kMostSide, c.strideW, side, 1) : image_wide;
    if (high * kMostSide + image_high * image_row <= most)
      return {int(high), int(wide), int(image_high), int(image_wide), int(image_row)};
    --(side || high > wide ? high : wide);
  }
  return {};
}

// How a problem is cut: units along gridDim.x, samples along gridDim.y
struct Cut {
  int64_t slabs, units, parts, size;
  int threads;

  explicit Cut(const Conv2dProblem& c)
      : slabs(ceil_div<int64_t>(c.groups, warp_threads)),
        units(slabs * (c.C / c.groups) * (c.O / c.groups) * ceil_div(c.kH * c.kW, taps_at_once(c))),
        parts(std::max<int64_t>(1, std::min(c.N, ceil_div(kBlocks, std::max<int64_t>(1, units))))),
        size(c.O * (c.C / c.groups) * c.kH * c.kW),
        threads(bytes_of(c.dtype) == 2 && window_side(c) && units * c.N >= kFewSamples ? kFewestWarps * warp_threads
                                                                                       : kMostThreads) {}
};

// Channels side by side, one a group, and every pixel aligned
bool in_pieces(const Conv2dProblem& c, const ConvOperand& of) {
  const int64_t piece = kPieceBytes / bytes_of(c.dtype);
  return of.c == 1 && reinterpret_cast<uintptr_t>(of.data) % kPieceBytes == 0 && of.n % piece == 0 &&
         of.h % piece == 0 && of.w % piece == 0;
}

template <class Taps>
cudaError_t launch_taps(Planes p, const Cut& cut, cudaStream_t stream) {
  using scalar_t = typename Taps::scalar;
  using acc_t = accumulator<scalar_t>;
  const int64_t pixels = p.tile.high * kMostSide + p.tile.image_high * p.tile.image_row;
  p.total_at = int(
      std::max<int64_t>(pixels * kPitch<scalar_t> * sizeof(scalar_t) / sizeof(acc_t), (Taps::kTaps + 1) * cut.threads));
  return launch(planes_kernel<Taps>, dim3(cut.units, cut.parts), dim3(cut.threads),
                (p.total_at + (Taps::kTaps + 1) * kTotalPitch) * sizeof(acc_t), stream, p);
}

template <class scalar_t>
cudaError_t launch_kernel(const Conv2dProblem& c, const Planes& p, const Cut& cut, cudaStream_t stream) {
  if constexpr (sizeof(scalar_t) < sizeof(double)) {
    const auto either = [&](auto one, auto two) {
      return c.strideW == 1 ? launch_taps<decltype(one)>(p, cut, stream) : launch_taps<decltype(two)>(p, cut, stream);
    };
    switch (window_side(c)) {
      case 3:
        return either(Window<scalar_t, 3, 1>{}, Window<scalar_t, 3, 2>{});
      case 5:
        return either(Window<scalar_t, 5, 1>{}, Window<scalar_t, 5, 2>{});
      case 7:
        return launch_taps<Window<scalar_t, 7, 1>>(p, cut, stream);
    }
  }
  return c.kH * c.kW <= 9 ? launch_taps<EachTap<scalar_t, 9>>(p, cut, stream)
                          : launch_taps<EachTap<scalar_t, 25>>(p, cut, stream);
}

}  // namespace

bool planes_suit(const Conv2dProblem& c) {
  constexpr int64_t kMostSide = 1 << 28, kMostTaps = 1 << 10;  // what keeps int exact in the kernel
  const int64_t pairs = c.C / c.groups * (c.O / c.groups);
  if (c.groups < kFewestGroups || pairs == 0 || pairs > kMostPairs || c.kH * c.kW > kMostTaps) return false;
  if (c.N == 0 || c.outH == 0 || c.outW == 0 || std::max({c.H, c.W, c.outH, c.outW}) > kMostSide) return false;
  return make_tile(c).high > 0;
}

cudaError_t launch_planes(const Conv2dProblem& c, const Gradients& gradients, const SqNorms& sq_norms,
                          Workspace& workspace, cudaStream_t stream) {
  const Cut cut(c);
  Planes p{};
  const Tile tile = make_tile(c);
  const int64_t rows = c.O / c.groups, channels = c.C / c.groups;
  p.operands[0] = {
      c.grad_output, rows * c.grad_output.c, int(c.outH), int(c.outW), 1, 1, 0, 0, tile.high, tile.wide, kMostSide, 0};
  p.operands[1] = {c.input,         channels * c.input.c, int(c.H),       int(c.W),
                   int(c.strideH),  int(c.strideW),       int(c.padH),    int(c.padW),
                   tile.image_high, tile.image_wide,      tile.image_row, tile.high * kMostSide};
  p.in_pieces = rows == 1 && channels == 1 && c.groups * bytes_of(c.dtype) % kPieceBytes == 0 &&
                in_pieces(c, c.input) && in_pieces(c, c.grad_output);
  p.outH = int(c.outH), p.outW = int(c.outW), p.taps = int(c.kH * c.kW), p.kW = int(c.kW);
  p.strideH = int(c.strideH), p.strideW = int(c.strideW);
  p.dilationH = int(c.dilationH), p.dilationW = int(c.dilationW);
  p.tile = tile, p.N = c.N, p.groups = c.groups, p.channels = int(channels), p.rows = int(rows);
  p.scale = gradients.scale, p.bias = sq_norms.bias || gradients.bias;
  p.partials = workspace.take<double>(c.N * cut.units * sizeof(double));
  p.bias_partials = workspace.take<double>(c.N * cut.slabs * rows * sizeof(double));
  if (gradients.weight) {
    p.copies = workspace.take<void>(cut.parts * cut.size * accumulator_bytes(c.dtype));
    p.bias_copies = workspace.take<void>(cut.parts * c.O * accumulator_bytes(c.dtype));
  }
  if (workspace.counts()) return cudaSuccess;
  cudaError_t error = dispatch(c.dtype, [&](auto zero) { return launch_kernel<decltype(zero)>(c, p, cut, stream); });
  if (error == cudaSuccess && sq_norms.weight)
    error = launch_sum_partials(c.dtype, p.partials, c.N, cut.units, nullptr, sq_norms.weight, stream);
  if (error == cudaSuccess && gradients.weight)
    error = launch_sum_rows(c.dtype, p.copies, nullptr, cut.parts, cut.size, gradients.weight, stream);
  if (error == cudaSuccess && sq_norms.bias)
    error = launch_sum_partials(c.dtype, p.bias_partials, c.N, cut.slabs * rows, nullptr, sq_norms.bias, stream);
  if (error == cudaSuccess && gradients.bias)
    error = launch_sum_rows(c.dtype, p.bias_copies, nullptr, cut.parts, c.O, gradients.bias, stream);
  return error;
}

}  // namespace torchgradx::cuda
