// direct and fused by wgmma: which tile and which rectangles suit a problem, its tensor maps, and the launch.
// Workspace: for every block two tiles of sums in float32; squares, 8 floats a sample and tile, or a sample and block
// where there are more tiles than blocks; 128 floats of the bias a tile and twice a block, 2 a sample and row of tiles.
#include "direct_sm90.cuh"
#include "dispatch.cuh"
#include "kernels.h"
#include "plan.h"

#include <algorithm>
#include <array>
#include <map>
#include <mutex>

namespace torchgradx::cuda {
namespace {

using namespace sm90;

// Both kinds of layer: images [N, height, width, channels], of which a Linear's are one row of T pixels.
struct Image {
  const void* data;
  int64_t channels, width, height;
  int64_t x, y, n;  // strides
};

struct Layer {
  Image input, grads;
  int64_t N;
  int kernel_width, taps, stride_x, stride_y, dilation_x, dilation_y, pad_x, pad_y;
  const int* starts = nullptr;  // of a LinearProblem
  int64_t rows = 0;
};

// Lengths that never repeat would be planned anew each time: three leading bits are enough to choose by.
int64_t rounded(int64_t length) {
  int64_t step = kDepth;
  while (length > 8 * step) step *= 2;
  return (length + step - 1) / step * step;
}

Layer layer_of(const LinearProblem& p) {
  const int64_t length = p.starts ? rounded(p.T) : p.T;
  const auto image = [&](const DenseOperand& x, int64_t features) {
    return Image{x.data, features, length, 1, x.t, p.T * x.t, x.n};
  };
  return {image(p.activations, p.I), image(p.grad_output, p.O), p.N, 1, 1, 1, 1, 1, 1, 0, 0, p.starts, p.rows};
}

Layer layer_of(const Conv2dProblem& p) {
  const Image input{p.input.data, p.C, p.W, p.H, p.input.w, p.input.h, p.input.n};
  const ConvOperand& g = p.grad_output;
  const Image grads{g.data, p.O, p.outW, p.outH, g.w, g.h, g.n};
  return {input,
          grads,
          p.N,
          int(p.kW),
          int(p.kH * p.kW),
          int(p.strideW),
          int(p.strideH),
          int(p.dilationW),
          int(p.dilationH),
          int(p.padW),
          int(p.padH)};
}

// True if a tensor map can describe the image: its rows begin at multiples of 16 bytes.
constexpr int64_t kPiece = 8;
bool fits_a_map(const Image& image) {
  constexpr int64_t kMost = int64_t(1) << 38;
  const auto whole = [](int64_t stride) { return stride > 0 && stride % kPiece == 0 && stride < kMost; };
  return reinterpret_cast<uintptr_t>(image.data) % 16 == 0 && (image.width == 1 || whole(image.x)) &&
         (image.height == 1 || whole(image.y)) && whole(image.n);
}

bool suits(const Layer& layer, int64_t features) {
  constexpr int64_t kMost = int64_t(1) << 24;
  return layer.N > 0 && layer.grads.width > 0 && layer.grads.height > 0 && layer.input.channels > 0 &&
         layer.input.channels % kPiece == 0 &&  // the weight's rows are written in such pieces
         fits_a_map(layer.input) && fits_a_map(layer.grads) && layer.stride_x <= 8 && layer.stride_y <= 8 &&
         std::max({layer.N, layer.input.width, layer.input.height, layer.rows, features}) < kMost;
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
bool lay_out(const Layer& layer, const Kind& kind, int width, int height, Boxes& b) {
  const int wide = kind.columns / kBox, row_bytes = 2 * kBox;
  const int grad_boxes = kind.tall ? 2 : 1, input_boxes = (kind.tall ? 1 : 2) * (kind.halo ? 1 : wide);
  const int64_t most = 256;  // of a box, along any dimension
  const auto steps_of = [](int64_t positions) { return int(ceil_div<int64_t>(positions, kDepth)); };
  b = {};
  b.width = width, b.height = height, b.halo = kind.halo;
  b.steps = steps_of(width * height);
  if (b.steps > kMostSteps || int64_t(width + (kind.halo ? 2 : 0)) * layer.stride_x > most ||
      int64_t(height) * layer.stride_y > most)
    return false;
  b.across = int(ceil_div<int64_t>(layer.grads.width, width)),
  b.down = int(ceil_div<int64_t>(layer.grads.height, height));
  b.shorter = height == 1 ? b.across * b.down - 1 : b.across * (b.down - 1);
  const int64_t rest = height == 1 ? layer.grads.width - int64_t(b.across - 1) * width
                                   : (layer.grads.height - int64_t(b.down - 1) * height) * width;
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
  b.channel_blocks = int(ceil_div<int64_t>(layer.input.channels, kBox));
  b.kernel_width = layer.kernel_width, b.taps = layer.taps, b.blocks = b.taps * b.channel_blocks;
  b.stride_x = layer.stride_x, b.stride_y = layer.stride_y;
  b.dilation_x = layer.dilation_x, b.dilation_y = layer.dilation_y, b.pad_x = layer.pad_x, b.pad_y = layer.pad_y;
  return b.stages >= 3;
}

// Clocks of one sample of one tile: the products, or the bytes that L2 gives a multiprocessor, of which rows outside of
// the operands are none, and narrow boxes come slower; a barrier's round for each rectangle, and the squares and sums
// at the end. Fewer than four stages leave the products waiting. Measured on an H200. Blocks of a cluster wait for each
// other: they win 2 to 12 % there, where half as many bytes of the input would win 14.
double clocks_of(const Layer& layer, const Boxes& b, const Kind& kind, bool gradient) {
  const double rectangles = double(b.across) * b.down, positions = double(layer.grads.width) * layer.grads.height;
  const double steps = double(b.shorter) * b.steps + (rectangles - b.shorter) * b.last_steps;
  const double products = 1.2 * steps * kind.columns + 70 * rectangles;
  const double read = b.copied_bytes - (kind.cluster - 1) * kind.columns * b.width * b.height;  // by this block
  const double bytes = read * positions / (b.width * b.height) / 36 * (1 + 1.0 / b.width);
  return (std::max(products, bytes) + 0.05 * (products + bytes)) * (b.stages < 4 ? 1.3 : 1) *
             (kind.cluster > 1 ? 1.06 : 1) +
         (gradient ? 4.4 : 2.4) * kind.columns - 0.001 * b.width;
}

Plan plan_for(const Layer& layer, const Kind& kind, bool gradient, int blocks) {
  Plan best{kind, {}, {}, 0};
  const bool rows = layer.grads.height == 1;
  const int64_t width = layer.grads.width, height = layer.grads.height, most = kMostSteps * kDepth;
  for (int64_t w = 1; w <= most; ++w)
    for (int64_t h = 1; h * w <= most; ++h) {
      if (rows ? h > 1 || (w % kDepth && w < width) : h > height + (kind.halo ? 1 : 0)) break;
      if (!kind.halo && w > (rows ? ceil_div<int64_t>(width, kDepth) * kDepth : width)) break;
      Boxes boxes;
      if (!lay_out(layer, kind, int(w), int(h), boxes)) continue;
      const double clocks = clocks_of(layer, boxes, kind, gradient);
      if (best.clocks == 0 || clocks < best.clocks) best.boxes = boxes, best.clocks = clocks;
    }
  if (best.clocks == 0) return best;
  const Boxes& b = best.boxes;
  const int wide = kind.columns / kBox,
            units = kind.halo ? b.taps / b.kernel_width * b.channel_blocks : int(ceil_div(b.blocks, wide));
  Schedule& s = best.schedule;
  s.N = int(layer.N), s.teams = blocks / kind.cluster;
  s.tiles_down = int(ceil_div<int64_t>(layer.grads.channels, kRows * (kind.tall ? 2 : 1) * kind.cluster));
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

Plan choose_plan(const Layer& layer, bool gradient, int blocks) {
  const bool halo = layer.kernel_width == 3 && layer.stride_x == 1 && layer.dilation_x == 1;
  Plan best{};
  for (const Kind kind : {Kind{192, true, false}, Kind{192, false, false}, Kind{gradient ? 128 : 256, true, false},
                          Kind{192, true, true}, Kind{192, false, true}, Kind{192, true, false, 2}}) {
    if ((kind.halo && !halo) || (kind.cluster > 1 && !(gradient && pairs_fit(blocks)))) continue;
    const Plan plan = plan_for(layer, kind, gradient, blocks);
    if (plan.clocks > 0 && (best.clocks == 0 || plan.clocks < best.clocks)) best = plan;
  }
  return best;
}

// The plan of a problem that was planned before: choosing rectangles takes longer than a launch.
const Plan& plan_of(const Layer& layer, bool gradient, int blocks) {
  using Key = std::array<int64_t, 17>;
  static std::mutex mutex;
  static std::map<Key, Plan> known;
  const Image &x = layer.input, &g = layer.grads;
  const Key key{
      layer.N,     x.channels,         x.width,        x.height,       g.channels,       g.width,          g.height,
      layer.taps,  layer.kernel_width, layer.stride_x, layer.stride_y, layer.dilation_x, layer.dilation_y, layer.pad_x,
      layer.pad_y, gradient,           blocks};
  const std::lock_guard<std::mutex> lock(mutex);
  const auto found = known.find(key);
  return found != known.end() ? found->second : known.emplace(key, choose_plan(layer, gradient, blocks)).first->second;
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

// Boxes of 64 channels x width x height; neighbours in a box stand stride_x and stride_y apart in the image.
cudaError_t encode(TensorMap& map, const Image& image, int64_t samples, DType dtype, int width, int height,
                   int stride_x, int stride_y) {
  const Encode encode = encoder();
  if (!encode) return cudaErrorNotSupported;
  const auto bytes = [](int64_t stride, int64_t size) { return cuuint64_t(size == 1 ? 16 : 2 * stride); };
  const cuuint64_t sizes[4] = {cuuint64_t(image.channels), cuuint64_t(image.width), cuuint64_t(image.height),
                               cuuint64_t(samples)};
  const cuuint64_t strides[3] = {bytes(image.x, image.width), bytes(image.y, image.height), cuuint64_t(2 * image.n)};
  const cuuint32_t box[4] = {kBox, cuuint32_t(width * stride_x), cuuint32_t(height * stride_y), 1};
  const cuuint32_t steps[4] = {1, cuuint32_t(stride_x), cuuint32_t(stride_y), 1};
  const auto type = dtype == DType::kHalf ? CU_TENSOR_MAP_DATA_TYPE_FLOAT16 : CU_TENSOR_MAP_DATA_TYPE_BFLOAT16;
  const CUresult result =
      encode(&map, type, 4, const_cast<void*>(image.data), sizes, strides, box, steps, CU_TENSOR_MAP_INTERLEAVE_NONE,
             CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  return result == CUDA_SUCCESS ? cudaSuccess : cudaErrorInvalidValue;
}

Arguments carve(const Plan& plan, const Layer& layer, const Gradients* gradients, const SqNorms& sq_norms,
                Carver& carver) {
  Arguments p{};
  p.schedule = plan.schedule, p.boxes = plan.boxes;
  p.starts = layer.starts;
  p.O = int(layer.grads.channels), p.channels = int(layer.input.channels);
  const int cluster = plan.kind.cluster, blocks = p.schedule.teams * cluster, tiles = p.schedule.tiles() * cluster;
  p.parts = (p.schedule.whole ? blocks : tiles) * kWarps;
  const int high = plan.kind.tall ? 2 : 1;
  const int64_t slots = gradients && p.schedule.left ? 2 * blocks : 0;
  p.sums = carver.take<float>(slots * kMultiplying * plan.kind.columns / 2 * sizeof(float));
  const int64_t bias_sums = gradients && gradients->bias ? tiles + 2 * blocks : 0;
  p.bias_sums = carver.take<float>(bias_sums * high * kRows * sizeof(float));
  p.squares = carver.take<float>(layer.N * p.parts * sizeof(float));
  p.bias_squares = carver.take<float>(layer.N * p.schedule.tiles_down * cluster * high * sizeof(float));
  p.sq_norms = static_cast<float*>(sq_norms.weight), p.bias_sq_norms = static_cast<float*>(sq_norms.bias);
  p.bias = sq_norms.bias || (gradients && gradients->bias);
  if (!gradients) return p;
  p.scale = static_cast<const float*>(gradients->scale);
  p.weight = gradients->weight, p.bias_gradient = gradients->bias;
  return p;
}

template <class half_t, int columns, bool tall, bool gradient, int cluster>
cudaError_t start(const Plan& plan, const TensorMap& grads, const TensorMap& input, const Arguments& p,
                  cudaStream_t stream) {
  const size_t shared = size_t(plan.boxes.stages) * plan.boxes.stage_bytes + 1024;
  return launch_together(direct_sm90_kernel<half_t, columns, tall, gradient, cluster>, cluster,
                         unsigned(plan.schedule.teams * cluster), kThreads, shared, stream, grads, input, p);
}

template <class half_t>
cudaError_t start(const Plan& plan, bool gradient, const TensorMap& grads, const TensorMap& input, const Arguments& p,
                  cudaStream_t stream) {
  const auto with = [&](auto columns, auto tall, auto sums) {
    return start<half_t, decltype(columns)::value, decltype(tall)::value, decltype(sums)::value, 1>(plan, grads, input,
                                                                                                    p, stream);
  };
  if (plan.kind.cluster > 1) return start<half_t, 192, true, true, 2>(plan, grads, input, p, stream);
  using Yes = std::true_type;
  using No = std::false_type;
  if (plan.kind.columns == 128) return with(std::integral_constant<int, 128>(), Yes(), Yes());
  if (plan.kind.columns == 256) return with(std::integral_constant<int, 256>(), Yes(), No());
  const std::integral_constant<int, 192> columns;
  if (gradient) return plan.kind.tall ? with(columns, Yes(), Yes()) : with(columns, No(), Yes());
  return plan.kind.tall ? with(columns, Yes(), No()) : with(columns, No(), No());
}

cudaError_t launch_layer(const Layer& layer, DType dtype, int blocks, const Gradients* gradients,
                         const SqNorms& sq_norms, void* workspace, cudaStream_t stream) {
  const Plan& plan = plan_of(layer, gradients, blocks);
  if (plan.clocks == 0) return cudaErrorInvalidValue;
  Carver carver(workspace);
  const Arguments p = carve(plan, layer, gradients, sq_norms, carver);
  TensorMap grads, input;
  const Boxes& b = plan.boxes;
  const auto map = [&](TensorMap& to, Image image, int more, int stride_x, int stride_y) {
    if (layer.starts) image.width = layer.rows;  // of all samples
    return encode(to, image, layer.starts ? 1 : layer.N, dtype, b.width + more, b.height, stride_x, stride_y);
  };
  cudaError_t error = map(grads, layer.grads, 0, 1, 1);
  if (error == cudaSuccess) error = map(input, layer.input, b.halo ? 2 : 0, b.stride_x, b.stride_y);
  if (error != cudaSuccess) return error;
  return dtype == DType::kHalf ? start<__half>(plan, gradients, grads, input, p, stream)
                               : start<__nv_bfloat16>(plan, gradients, grads, input, p, stream);
}

size_t workspace_of(const Layer& layer, int blocks, const Gradients* gradients, const SqNorms& sq_norms) {
  Carver carver(nullptr);
  carve(plan_of(layer, gradients, blocks), layer, gradients, sq_norms, carver);
  return carver.size();
}

bool has_halves(DType dtype) {
  return dtype == DType::kHalf || dtype == DType::kBFloat16;
}

}  // namespace

bool sm90_suits(const LinearProblem& p) {
  return p.device.sm90 && has_halves(p.dtype) && fits(p) && p.activations.feature == 1 && p.grad_output.feature == 1 &&
         suits(layer_of(p), std::max(p.I, p.O));
}
bool sm90_suits(const Conv2dProblem& p) {
  return p.device.sm90 && has_halves(p.dtype) && fits(p) && p.groups == 1 && p.input.c == 1 && p.grad_output.c == 1 &&
         suits(layer_of(p), std::max(p.C * p.kH * p.kW, p.O));
}

size_t sm90_workspace(const LinearProblem& p, const Gradients* gradients, const SqNorms& sq_norms) {
  return workspace_of(layer_of(p), p.device.multiprocessors, gradients, sq_norms);
}
size_t sm90_workspace(const Conv2dProblem& p, const Gradients* gradients, const SqNorms& sq_norms) {
  return workspace_of(layer_of(p), p.device.multiprocessors, gradients, sq_norms);
}
cudaError_t launch_sm90(const LinearProblem& p, const Gradients* gradients, const SqNorms& sq_norms, void* workspace,
                        cudaStream_t stream) {
  return launch_layer(layer_of(p), p.dtype, p.device.multiprocessors, gradients, sq_norms, workspace, stream);
}
cudaError_t launch_sm90(const Conv2dProblem& p, const Gradients* gradients, const SqNorms& sq_norms, void* workspace,
                        cudaStream_t stream) {
  return launch_layer(layer_of(p), p.dtype, p.device.multiprocessors, gradients, sq_norms, workspace, stream);
}

}  // namespace torchgradx::cuda
