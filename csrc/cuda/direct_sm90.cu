// direct and fused by wgmma: which tile and which rectangles suit a problem, its tensor maps, and the launch.
// Workspace: for every block two tiles of sums in float32; squares, 8 floats a sample and tile, or a sample and block
// where there are more tiles than blocks; 128 floats of the bias a tile and twice a block, 2 a sample and row of tiles.
#include "direct_sm90.cuh"
#include "dispatch.cuh"

#include <algorithm>
#include <array>
#include <map>
#include <mutex>

namespace torchgradx::cuda {
namespace {

using namespace sm90;

// True if a tensor map can describe the images: their rows begin at multiples of 16 bytes.
constexpr int64_t kPiece = 8;
bool fits_a_map(const ConvOperand& images, int64_t height, int64_t width) {
  constexpr int64_t kMost = int64_t(1) << 38;
  const auto whole = [](int64_t stride) { return stride > 0 && stride % kPiece == 0 && stride < kMost; };
  return images.c == 1 && reinterpret_cast<uintptr_t>(images.data) % 16 == 0 && (width == 1 || whole(images.w)) &&
         (height == 1 || whole(images.h)) && whole(images.n);
}

struct Kind {
  int columns;
  bool tall, halo;
  int cluster = 1;
};

struct Plan {
  Kind kind;
  Boxes boxes;
  Schedule schedule;
  double clocks;
};

// Shared memory for a rectangle; false if less than three stages of it fit.
bool lay_out(const Conv2dProblem& p, const Kind& kind, int width, int height, Boxes& b) {
  const int wide = kind.columns / kBox, row_bytes = 2 * kBox;
  const int grad_boxes = kind.tall ? 2 : 1, input_boxes = (kind.tall ? 1 : 2) * (kind.halo ? 1 : wide);
  const int64_t most = 256;  // of a box, along any dimension
  const auto steps_of = [](int64_t positions) { return int(ceil_div<int64_t>(positions, kDepth)); };
  b = {};
  b.width = width, b.height = height, b.halo = kind.halo;
  b.steps = steps_of(width * height);
  if (b.steps > kMostSteps || int64_t(width + (kind.halo ? 2 : 0)) * p.strideW > most ||
      int64_t(height) * p.strideH > most)
    return false;
  b.across = int(ceil_div<int64_t>(p.outW, width)), b.down = int(ceil_div<int64_t>(p.outH, height));
  b.shorter = height == 1 ? b.across * b.down - 1 : b.across * (b.down - 1);
  const int64_t rest =
      height == 1 ? p.outW - int64_t(b.across - 1) * width : (p.outH - int64_t(b.down - 1) * height) * width;
  b.last_steps = b.down > 1 && height == 1 ? b.steps : steps_of(rest);
  b.grad_bytes = b.steps * kDepth * row_bytes;
  b.input_bytes = b.grad_bytes, b.input_step = kDepth * row_bytes, b.between = b.input_bytes, b.group = 1024;
  int rows = width * height;
  if (kind.halo) {  // 8 or 16 pixels a row, two more in the box: the descriptor skips them
    if (width != 8 && width != 16) return false;
    const int pitch = width + 2, step_rows = width == 8 ? 2 : 1;
    rows = pitch * height;
    const int read = (step_rows * b.steps - 1) * pitch + width + 2;
    b.input_bytes = int(ceil_div(std::max(read, rows) * row_bytes, 1024)) * 1024;
    b.input_step = step_rows * pitch * row_bytes, b.between = row_bytes;
    b.group = width == 8 ? pitch * row_bytes : 1024;
  }
  b.clears = width * height % kDepth != 0;
  b.input_offset = grad_boxes * b.grad_bytes;
  b.stage_bytes = b.input_offset + input_boxes * b.input_bytes;
  b.copied_bytes = (grad_boxes * width * height + input_boxes * rows) * row_bytes;
  b.stages = std::min(kMostStages, (kSharedBytes - 1024) / b.stage_bytes);
  b.channel_blocks = int(ceil_div<int64_t>(p.C, kBox));
  b.kernel_width = int(p.kW), b.taps = int(p.kH * p.kW), b.blocks = b.taps * b.channel_blocks;
  b.stride_x = int(p.strideW), b.stride_y = int(p.strideH), b.pad_x = int(p.padW), b.pad_y = int(p.padH);
  b.dilation_x = int(p.dilationW), b.dilation_y = int(p.dilationH);
  return b.stages >= 3;
}

// Clocks of one sample of one tile: the products, or the bytes that L2 gives a multiprocessor, of which rows outside of
// the operands are none, and narrow boxes come slower; a barrier's round for each rectangle, and the squares and sums
// at the end. Fewer than four stages leave the products waiting. Measured on an H200. Blocks of a cluster wait for each
// other: they win 2 to 12 % there, where half as many bytes of the input would win 14.
double clocks_of(const Conv2dProblem& p, const Boxes& b, const Kind& kind, bool gradient) {
  const double rectangles = double(b.across) * b.down, positions = double(p.outW) * p.outH;
  const double steps = double(b.shorter) * b.steps + (rectangles - b.shorter) * b.last_steps;
  const double products = 1.2 * steps * kind.columns + 70 * rectangles;
  const double read = b.copied_bytes - (kind.cluster - 1) * kind.columns * b.width * b.height;  // by this block
  const double bytes = read * positions / (b.width * b.height) / 36 * (1 + 1.0 / b.width);
  return (std::max(products, bytes) + 0.05 * (products + bytes)) * (b.stages < 4 ? 1.3 : 1) *
             (kind.cluster > 1 ? 1.06 : 1) +
         (gradient ? 4.4 : 2.4) * kind.columns - 0.001 * b.width;
}

Plan plan_for(const Conv2dProblem& p, const Kind& kind, bool gradient, int blocks) {
  Plan best{kind, {}, {}, 0};
  const bool rows = p.outH == 1;
  const int64_t width = p.outW, height = p.outH, most = kMostSteps * kDepth;
  for (int64_t w = 1; w <= most; ++w)
    for (int64_t h = 1; h * w <= most; ++h) {
      if (rows ? h > 1 || (w % kDepth && w < width) : h > height + (kind.halo ? 1 : 0)) break;
      if (!kind.halo && w > (rows ? ceil_div<int64_t>(width, kDepth) * kDepth : width)) break;
      Boxes boxes;
      if (!lay_out(p, kind, int(w), int(h), boxes)) continue;
      const double clocks = clocks_of(p, boxes, kind, gradient);
      if (best.clocks == 0 || clocks < best.clocks) best.boxes = boxes, best.clocks = clocks;
    }
  if (best.clocks == 0) return best;
  const Boxes& b = best.boxes;
  const int wide = kind.columns / kBox,
            units = kind.halo ? b.taps / b.kernel_width * b.channel_blocks : int(ceil_div(b.blocks, wide));
  Schedule& s = best.schedule;
  s.N = int(p.N), s.teams = blocks / kind.cluster;
  s.tiles_down = int(ceil_div<int64_t>(p.O, kRows * (kind.tall ? 2 : 1) * kind.cluster));
  s.tiles_across = kind.tall ? units : ceil_div(units, 2);
  s.band = std::min(s.tiles_down, 16 / kind.cluster);
  s.whole = s.tiles() / s.teams, s.left = s.tiles() % s.teams;
  const int64_t items = int64_t(s.left) * s.N;
  s.each = int(items / s.teams), s.more = int(items % s.teams);
  best.clocks *= double(s.whole) * s.N + double(ceil_div<int64_t>(items, s.teams));
  return best;
}

// True if clusters of two blocks fill the device.
bool pairs_fit(int blocks) {
  const auto kernel = direct_sm90_kernel<__nv_bfloat16, 192, true, true, 2>;
  return blocks % 2 == 0 && 2 * resident_pairs(kernel, kThreads, kSharedBytes) >= blocks;
}

Plan choose_plan(const Conv2dProblem& p, bool gradient, int blocks) {
  const bool halo = p.kW == 3 && p.strideW == 1 && p.dilationW == 1;
  Plan best{};
  for (const Kind kind : {Kind{192, true, false}, Kind{192, false, false}, Kind{gradient ? 128 : 256, true, false},
                          Kind{192, true, true}, Kind{192, false, true}, Kind{192, true, false, 2}}) {
    if ((kind.halo && !halo) || (kind.cluster > 1 && !(gradient && pairs_fit(blocks)))) continue;
    const Plan plan = plan_for(p, kind, gradient, blocks);
    if (plan.clocks > 0 && (best.clocks == 0 || plan.clocks < best.clocks)) best = plan;
  }
  return best;
}

// The plan of a problem that was planned before: choosing rectangles takes longer than a launch.
const Plan& plan_of(const Conv2dProblem& p, bool gradient) {
  using Key = std::array<int64_t, 17>;
  static std::mutex mutex;
  static std::map<Key, Plan> known;
  const int blocks = p.device.multiprocessors;
  const Key key{p.N,       p.C,       p.H,    p.W,    p.O,         p.outH,      p.outW,   p.kH,  p.kW,
                p.strideH, p.strideW, p.padH, p.padW, p.dilationH, p.dilationW, gradient, blocks};
  const std::lock_guard<std::mutex> lock(mutex);
  const auto found = known.find(key);
  return found != known.end() ? found->second : known.emplace(key, choose_plan(p, gradient, blocks)).first->second;
}

// The driver's encoder: the runtime finds it, so that nothing is linked with the driver.
using Encode = CUresult (*)(CUtensorMap*, CUtensorMapDataType, cuuint32_t, void*, const cuuint64_t*, const cuuint64_t*,
                            const cuuint32_t*, const cuuint32_t*, CUtensorMapInterleave, CUtensorMapSwizzle,
                            CUtensorMapL2promotion, CUtensorMapFloatOOBfill);

Encode encoder() {
  static const Encode found = [] {
    void* function = nullptr;
    cudaDriverEntryPointQueryResult result;
    const cudaError_t error =
        cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &function, 12000, cudaEnableDefault, &result);
    return error == cudaSuccess && result == cudaDriverEntryPointSuccess ? reinterpret_cast<Encode>(function) : nullptr;
  }();
  return found;
}

// Boxes of 64 channels x width x height; neighbours in a box stand stride_x and stride_y apart in the image. Samples of
// several lengths are one image of one row.
cudaError_t encode(TensorMap& map, const Conv2dProblem& p, const ConvOperand& images, int64_t channels, int64_t image_w,
                   int64_t image_h, int width, int height, int stride_x, int stride_y) {
  const Encode encode = encoder();
  if (!encode) return cudaErrorNotSupported;
  const auto bytes = [](int64_t stride, int64_t size) { return cuuint64_t(size == 1 ? 16 : 2 * stride); };
  if (p.starts) image_w = p.rows;
  const cuuint64_t sizes[4] = {cuuint64_t(channels), cuuint64_t(image_w), cuuint64_t(image_h),
                               cuuint64_t(p.starts ? 1 : p.N)};
  const cuuint64_t strides[3] = {bytes(images.w, image_w), bytes(images.h, image_h), cuuint64_t(2 * images.n)};
  const cuuint32_t box[4] = {kBox, cuuint32_t(width * stride_x), cuuint32_t(height * stride_y), 1};
  const cuuint32_t steps[4] = {1, cuuint32_t(stride_x), cuuint32_t(stride_y), 1};
  const auto type = p.dtype == DType::kHalf ? CU_TENSOR_MAP_DATA_TYPE_FLOAT16 : CU_TENSOR_MAP_DATA_TYPE_BFLOAT16;
  const CUresult result =
      encode(&map, type, 4, const_cast<void*>(images.data), sizes, strides, box, steps, CU_TENSOR_MAP_INTERLEAVE_NONE,
             CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  return result == CUDA_SUCCESS ? cudaSuccess : cudaErrorInvalidValue;
}

template <class half_t>
cudaError_t start(const Plan& plan, bool gradient, const TensorMap& grads, const TensorMap& input, const Arguments& p,
                  cudaStream_t stream) {
  const auto run = [&](auto kernel) {
    const size_t shared = size_t(plan.boxes.stages) * plan.boxes.stage_bytes + 1024;
    const unsigned cluster = unsigned(plan.kind.cluster), blocks = unsigned(plan.schedule.teams) * cluster;
    return launch_together(kernel, cluster, blocks, kThreads, shared, stream, grads, input, p);
  };
  const bool tall = plan.kind.tall;
  if (plan.kind.cluster > 1) return run(direct_sm90_kernel<half_t, 192, true, true, 2>);
  if (plan.kind.columns == 128) return run(direct_sm90_kernel<half_t, 128, true, true, 1>);
  if (plan.kind.columns == 256) return run(direct_sm90_kernel<half_t, 256, true, false, 1>);
  if (gradient)
    return run(tall ? direct_sm90_kernel<half_t, 192, true, true, 1> : direct_sm90_kernel<half_t, 192, false, true, 1>);
  return run(tall ? direct_sm90_kernel<half_t, 192, true, false, 1> : direct_sm90_kernel<half_t, 192, false, false, 1>);
}

}  // namespace

bool sm90_suits(const Conv2dProblem& p) {
  constexpr int64_t kMost = int64_t(1) << 24;
  const bool halves = p.dtype == DType::kHalf || p.dtype == DType::kBFloat16;
  return p.device.sm90 && halves && fits(p) && p.groups == 1 && p.N > 0 && p.outW > 0 && p.outH > 0 && p.C > 0 &&
         p.C % kPiece == 0 &&  // the weight's rows are written in such pieces
         fits_a_map(p.input, p.H, p.W) && fits_a_map(p.grad_output, p.outH, p.outW) && p.strideW <= 8 &&
         p.strideH <= 8 && std::max({p.N, p.W, p.H, p.rows, p.C * p.kH * p.kW, p.O}) < kMost;
}

cudaError_t launch_sm90(const Conv2dProblem& problem, const Gradients& gradients, const SqNorms& sq_norms,
                        Workspace& workspace, cudaStream_t stream) {
  const Plan& plan = plan_of(problem, gradients.weight);
  if (plan.clocks == 0) return cudaErrorInvalidValue;
  const Boxes& b = plan.boxes;
  const Schedule& s = plan.schedule;
  Arguments p{};
  p.schedule = s, p.boxes = b, p.starts = problem.starts;
  p.O = int(problem.O), p.channels = int(problem.C);
  const int cluster = plan.kind.cluster, blocks = s.teams * cluster, tiles = s.tiles() * cluster;
  const int high = plan.kind.tall ? 2 : 1;
  p.parts = (s.whole ? blocks : tiles) * kWarps;
  const int64_t slots = gradients.weight && s.left ? 2 * blocks : 0;
  const int64_t bias_sums = gradients.bias ? tiles + 2 * blocks : 0;
  p.sums = workspace.take<float>(slots * kMultiplying * plan.kind.columns / 2 * sizeof(float));
  p.bias_sums = workspace.take<float>(bias_sums * high * kRows * sizeof(float));
  p.squares = workspace.take<float>(problem.N * p.parts * sizeof(float));
  p.bias_squares = workspace.take<float>(problem.N * s.tiles_down * cluster * high * sizeof(float));
  if (workspace.counts()) return cudaSuccess;
  p.sq_norms = static_cast<float*>(sq_norms.weight), p.bias_sq_norms = static_cast<float*>(sq_norms.bias);
  p.bias = sq_norms.bias || gradients.bias;
  p.scale = static_cast<const float*>(gradients.scale), p.weight = gradients.weight, p.bias_gradient = gradients.bias;
  TensorMap grads, input;
  cudaError_t error =
      encode(grads, problem, problem.grad_output, problem.O, problem.outW, problem.outH, b.width, b.height, 1, 1);
  if (error == cudaSuccess)
    error = encode(input, problem, problem.input, problem.C, problem.W, problem.H, b.width + (b.halo ? 2 : 0), b.height,
                   b.stride_x, b.stride_y);
  if (error != cudaSuccess) return error;
  return problem.dtype == DType::kHalf ? start<__half>(plan, gradients.weight, grads, input, p, stream)
                                       : start<__nv_bfloat16>(plan, gradients.weight, grads, input, p, stream);
}

}  // namespace torchgradx::cuda
