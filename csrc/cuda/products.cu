// What batched products of the framework's library come to, which are made a run of samples at a time (library.cpp).
// Gradients G_n of a run: their squares, and scale_n G_n added to the sum over the runs before. Grams of a run: the sum
// of their product, for gram.cu's verdict. Operands of a weighted sum, of which one product is made.
// Bound by memory, L2's where a run fits it; every product is read once. One element a lane and load, a warp's side by
// side; sums in double, in an order that depends on sizes alone. Workspace: none.
#include "dispatch.cuh"
#include "operand.cuh"

namespace torchgradx::cuda {
namespace {

constexpr int kBlock = 256, kEach = 8;  // elements of a thread
constexpr int kBlockWarps = kBlock / warp_threads;

template <class scalar_t>
__global__ void __launch_bounds__(kBlock) gradients_kernel(const GradientsOfRun run) {
  using acc_t = accumulator<scalar_t>;
  STATIC_SHARED(double, squares, [kBlockWarps][kBlockWarps]);  // of so many samples, by warp
  const int64_t first = int64_t(blockIdx.x) * kBlock * kEach + threadIdx.x;
  const acc_t* const scale = static_cast<const acc_t*>(run.scale);
  acc_t total[kEach];
#pragma unroll
  for (int j = 0; j < kEach; ++j) {
    const int64_t at = first + j * kBlock;
    total[j] = run.before && at < run.size ? static_cast<const acc_t*>(run.before)[at] : acc_t(0);
  }
#pragma unroll 1
  for (int64_t n0 = 0; n0 < run.n; n0 += kBlockWarps) {
    const int count = int(min(int64_t(kBlockWarps), run.n - n0));
#pragma unroll 2
    for (int sample = 0; sample < count; ++sample) {
      const acc_t* const from = static_cast<const acc_t*>(run.gradients) + (n0 + sample) * run.size;
      const acc_t weight = scale ? scale[n0 + sample] : acc_t(1);
      acc_t values[kEach];
#pragma unroll
      for (int j = 0; j < kEach; ++j) {
        const int64_t at = first + j * kBlock;
        values[j] = at < run.size ? from[at] : acc_t(0);
      }
      double square = 0;
#pragma unroll
      for (int j = 0; j < kEach; ++j) {
        square += double(values[j]) * double(values[j]);
        total[j] += weight != acc_t(0) ? weight * values[j] : acc_t(0);  // 0 times nan is nan
      }
      square = warp_sum(square);
      if (threadIdx.x % warp_threads == 0) squares[sample][threadIdx.x / warp_threads] = square;
    }
    __syncthreads();
    if (run.squares && int(threadIdx.x) < count) {
      double sum = 0;
      for (int warp = 0; warp < kBlockWarps; ++warp) sum += squares[threadIdx.x][warp];
      run.squares[(n0 + threadIdx.x) * run.parts + blockIdx.x] = sum;
    }
    __syncthreads();
  }
  if (!run.sum) return;
#pragma unroll
  for (int j = 0; j < kEach; ++j) {
    const int64_t at = first + j * kBlock;
    if (at >= run.size) break;
    if (run.last)
      static_cast<scalar_t*>(run.sum)[at] = narrow<scalar_t>(total[j]);
    else
      static_cast<acc_t*>(run.sum)[at] = total[j];
  }
}

template <class acc_t>
__global__ void __launch_bounds__(kBlock) grams_kernel(const GramsOfRun run, FastDivisor blocks, FastDivisor pitch) {
  const int numbers = int(pitch.divisor * pitch.divisor);
  int sample = int(blockIdx.x);
  const int block = blocks.take_remainder(sample);
  const int64_t n = sample;
  const acc_t* const of_a = static_cast<const acc_t*>(run.of_activations) + n * numbers;
  const acc_t* const of_b = static_cast<const acc_t*>(run.of_grads) + n * numbers;
  GramSums mine{};
#pragma unroll
  for (int j = 0; j < kEach; ++j) {
    const int at = (block * kEach + j) * kBlock + int(threadIdx.x);
    int row = at;
    const int column = pitch.take_remainder(row);
    if (at >= numbers) break;
    const double a = of_a[at], b = of_b[at], term = a * b;
    mine.sum += term, mine.magnitude += fabs(term);
    if (row != column) continue;
    mine.trace += term;
    mine.faint += fmin(a, b) < kFaint<acc_t> ? kFaint<acc_t> * fmax(a, b) : 0;
  }
  mine = {warp_sum(mine.sum), warp_sum(mine.magnitude), warp_sum(mine.trace), warp_sum(mine.faint)};
  const int warp = block * kBlockWarps + int(threadIdx.x) / warp_threads;
  if (threadIdx.x % warp_threads == 0) run.sums[n * run.parts + warp] = mine;
}

template <class scalar_t, int kWide>
__global__ void __launch_bounds__(kBlock) scale_samples_kernel(const SamplesToScale samples, FastDivisor pieces) {
  using acc_t = accumulator<scalar_t>;
  const int64_t at = int64_t(blockIdx.x) * kBlock + threadIdx.x;
  if (at >= samples.N * int64_t(pieces.divisor)) return;
  const int n = pieces.divide(int(at));
  const acc_t scale = static_cast<const acc_t*>(samples.scale)[n];
  Vector<scalar_t, kWide> piece = static_cast<const Vector<scalar_t, kWide>*>(samples.from)[at];
#pragma unroll
  for (int j = 0; j < kWide; ++j) {
    const scalar_t scaled = samples.masks ? piece.at[j] : narrow<scalar_t>(scale * widen(piece.at[j]));
    piece.at[j] = scale != acc_t(0) ? scaled : narrow<scalar_t>(acc_t(0));  // 0 times nan is nan
  }
  static_cast<Vector<scalar_t, kWide>*>(samples.to)[at] = piece;
}

}  // namespace

int64_t square_parts(int64_t size) {
  return ceil_div<int64_t>(size, kBlock * kEach);
}
int64_t gram_parts(int64_t T) {
  return square_parts(gram_pitch(T) * gram_pitch(T)) * kBlockWarps;
}

cudaError_t launch_gradients(DType dtype, const GradientsOfRun& run, cudaStream_t stream) {
  const int64_t blocks = square_parts(run.size);
  if (blocks > kMostIndex) return cudaErrorInvalidConfiguration;
  if (blocks == 0 || run.n == 0) return cudaSuccess;
  return dispatch(dtype, [&](auto zero) {
    return launch(gradients_kernel<decltype(zero)>, dim3(unsigned(blocks)), dim3(kBlock), 0, stream, run);
  });
}

cudaError_t launch_scale_samples(DType dtype, const SamplesToScale& samples, cudaStream_t stream) {
  if (samples.N == 0 || samples.size == 0) return cudaSuccess;
  return dispatch(dtype, [&](auto zero) {
    using scalar_t = decltype(zero);
    constexpr int kWide = 16 / sizeof(scalar_t);
    const auto run = [&](auto kernel, int64_t pieces) {
      const int64_t all = samples.N * pieces;
      if (all > kMostIndex) return cudaErrorInvalidConfiguration;
      return launch(kernel, dim3(unsigned(ceil_div<int64_t>(all, kBlock))), dim3(kBlock), 0, stream, samples,
                    FastDivisor(pieces));
    };
    const bool aligned = samples.size % kWide == 0 && reinterpret_cast<uintptr_t>(samples.from) % 16 == 0;
    return aligned ? run(scale_samples_kernel<scalar_t, kWide>, samples.size / kWide)
                   : run(scale_samples_kernel<scalar_t, 1>, samples.size);
  });
}

cudaError_t launch_grams(DType dtype, const GramsOfRun& run, cudaStream_t stream) {
  const int64_t each = gram_parts(run.T) / kBlockWarps, blocks = run.n * each;
  if (run.T > kMostGram || blocks > kMostIndex) return cudaErrorInvalidConfiguration;
  if (blocks == 0) return cudaSuccess;
  const auto start = [&](auto kernel) {
    return launch(kernel, dim3(unsigned(blocks)), dim3(kBlock), 0, stream, run, FastDivisor(each),
                  FastDivisor(gram_pitch(run.T)));
  };
  return dtype == DType::kDouble ? start(grams_kernel<double>) : start(grams_kernel<float>);
}

}  // namespace torchgradx::cuda
