// Normalisations whose features lie side by side (channels last, a LayerNorm's rows), at the speed of memory: a thread
// has 16 bytes of columns and walks positions, a warp reads 512 bytes side by side where there are so many. One sweep
// makes the column sums, one more a GroupNorm's input gradient; its statistics are one before these.
// Sums are acc, joined in an order that depends on sizes and alignment alone; squares, and moments from a thread's few
// sums on, are double. Workspace: 2 C accumulators for each part of a sample, of which all samples together have
// 1024 + N at most, or, of one part without gradients, 16 bytes a block.
#include "affine_sweep.cuh"

namespace torchgradx::cuda {
namespace {

enum Kind { kGroups, kMoving, kMoments };  // statistics of (n, g), or of (n, t), or to be found

struct Sweep {
  FastDivisor chunks, parts;
  int lanes;
  void* sums;        // [N, parts, 2, C] acc: products first, or null, and then
  double* partials;  // [2, N, chunks]
};

// A block's positions and a thread's columns.
struct Walk {
  int64_t n, t, end, step, part, chunk;
  int column;

  __device__ __forceinline__ Walk(const Affine& p, const Sweep& cut, int V) {
    int block = int(blockIdx.x);
    chunk = cut.chunks.take_remainder(block), part = cut.parts.take_remainder(block), n = block;
    const int parts = int(cut.parts.divisor), lane = threadIdx.x & (cut.lanes - 1);
    t = p.T * part / parts + threadIdx.x / cut.lanes, end = p.T * (part + 1) / parts;
    step = kSweepThreads / cut.lanes;
    column = int(chunk * cut.lanes + lane) * V;
  }
};

template <class scalar_t, int kV, Kind kKind>
__global__ void __launch_bounds__(kSweepThreads, 1) affine_sweep_kernel(const Affine p, const Sweep cut) {
  using acc_t = accumulator<scalar_t>;
  STATIC_SHARED(acc_t, tile, [2 * kV][kSweepWarps][warp_threads]);
  const Walk at(p, cut, kV);
  const int lane = threadIdx.x % warp_threads, warp = threadIdx.x / warp_threads;
  acc_t mean[kV], sums[2][kV] = {};
  if (at.column < p.C) {
    const auto first = vector_at<scalar_t, kV>(p.input, at.n, 0, at.column);
#pragma unroll
    for (int j = 0; j < kV; ++j) {
      int g = at.column + j;
      p.features.take_remainder(g);
      mean[j] = kKind == kMoments  ? acc_t(widen(first.at[j]))
                : kKind == kGroups ? read<acc_t>(p.mean, at.n, 0, g, 0)
                                   : 0;
    }
#pragma unroll 4
    for (int64_t t = at.t; t < at.end; t += at.step) {
      const auto x = vector_at<scalar_t, kV>(p.input, at.n, t, at.column);
      const auto b = kKind == kMoments ? x : vector_at<scalar_t, kV>(p.grad_output, at.n, t, at.column);
      const acc_t row_mean = kKind == kMoving ? read<acc_t>(p.mean, at.n, t, 0, 0) : acc_t(0);
      const acc_t row_rstd = kKind == kMoving ? read<acc_t>(p.rstd, at.n, t, 0, 1) : acc_t(0);
#pragma unroll
      for (int j = 0; j < kV; ++j) {
        const acc_t value = widen(x.at[j]) - (kKind == kMoving ? row_mean : mean[j]);
        const acc_t grad = kKind == kMoments ? value : acc_t(widen(b.at[j]));
        sums[0][j] += grad * (kKind == kMoving ? value * row_rstd : value);
        sums[1][j] += grad;
      }
    }
  }
#pragma unroll
  for (int kind = 0; kind < 2; ++kind)
#pragma unroll
    for (int j = 0; j < kV; ++j) {
      acc_t sum = sums[kind][j];
      for (int distance = cut.lanes; distance < warp_threads; distance *= 2)
        sum += __shfl_xor_sync(full_warp, sum, distance);
      if (lane < cut.lanes) tile[kind * kV + j][warp][lane] = sum;
    }
  __syncthreads();
  double squares[2] = {};
  for (int i = threadIdx.x; i < 2 * kV * cut.lanes; i += kSweepThreads) {
    const int mine = i & (cut.lanes - 1), value = i / cut.lanes, kind = value / kV;
    const int64_t column = (at.chunk * cut.lanes + mine) * kV + value % kV;
    if (column >= p.C) continue;
    acc_t sum = 0;
#pragma unroll
    for (int other = 0; other < kSweepWarps; ++other) sum += tile[value][other][mine];
    int g = int(column);
    p.features.take_remainder(g);
    if (kKind == kGroups && kind == 0) sum *= read<acc_t>(p.rstd, at.n, 0, g, 1);
    if (cut.sums) static_cast<acc_t*>(cut.sums)[((at.n * cut.parts.divisor + at.part) * 2 + kind) * p.C + column] = sum;
    squares[0] += kind == 0 ? double(sum) * double(sum) : 0.0;
    squares[1] += kind == 1 ? double(sum) * double(sum) : 0.0;
  }
  if (cut.sums) return;
#pragma unroll
  for (int kind = 0; kind < 2; ++kind) {
    const double square = block_sum(squares[kind]);
    if (threadIdx.x == 0) cut.partials[(kind * p.N + at.n) * cut.chunks.divisor + at.chunk] = square;
  }
}

// The sum of a sample's parts [parts, 2, C]: the i-th of [2, C].
template <class acc_t>
__device__ __forceinline__ acc_t joined(const acc_t* sums, int parts, int64_t C, int64_t i) {
  acc_t sum = 0;
#pragma unroll 8
  for (int part = 0; part < parts; ++part) sum += sums[part * 2 * C + i];
  return sum;
}

// Groups of C / G columns, each dealt to so many threads side by side; over(g, lane, inside) for all of them, with the
// whole warp.
template <class F>
__device__ __forceinline__ void for_groups(int64_t G, int share, const F& over) {
  const int together = kJoinThreads / share, lane = threadIdx.x & (share - 1);
#pragma unroll 1
  for (int64_t first = 0; first < G; first += together) {
    const int64_t g = first + threadIdx.x / share;
    over(g, lane, g < G);
  }
}

template <class acc_t>
__device__ __forceinline__ acc_t shared_sum(acc_t value, int share) {
  for (int distance = 1; distance < share; distance *= 2) value += __shfl_xor_sync(full_warp, value, distance);
  return value;
}

struct Joined {
  void* parts_of;  // [N, parts, 2, C] acc
  int parts, share;
  void* sums;      // [2, N, C] acc, or null
  void* means;     // [N, G, 2] acc, or null
  void* sq_norms;  // [1 + bias, N] acc, or null
  bool bias;
};

// Column sums of a sample, their squares, and the means of w b and w b f over each group.
template <class acc_t>
__global__ void __launch_bounds__(kJoinThreads, 1) affine_join_kernel(const Affine p, const Joined to) {
  const int64_t n = blockIdx.x;
  const acc_t* const parts = static_cast<const acc_t*>(to.parts_of) + n * to.parts * 2 * p.C;
  acc_t* const sums = static_cast<acc_t*>(to.sums);
  double squares[2] = {};
  for (int64_t i = threadIdx.x; i < 2 * p.C; i += kJoinThreads) {
    const acc_t sum = joined(parts, to.parts, p.C, i);
    const bool second = i >= p.C;
    if (sums) sums[second ? (p.N + n - 1) * p.C + i : n * p.C + i] = sum;
    const double square = double(sum) * double(sum);
    squares[0] += second ? 0.0 : square, squares[1] += second ? square : 0.0;
  }
#pragma unroll
  for (int kind = 0; kind < 2; ++kind) {
    const double square = block_sum(squares[kind]);
    if (threadIdx.x == 0 && to.sq_norms && (kind == 0 || to.bias))
      static_cast<acc_t*>(to.sq_norms)[kind * p.N + n] = acc_t(square);
  }
  if (!to.means) return;  // block_sum's barriers stand between the sums written and those read
  const int64_t K = p.features.divisor, G = p.C / K;
  for_groups(G, to.share, [&](int64_t g, int lane, bool inside) {
    acc_t slope = 0, shift = 0;
    for (int64_t k = lane; inside && k < K; k += to.share) {
      const int64_t column = g * K + k;
      const acc_t weight = weight_at<acc_t>(p.to, column);
      slope += weight * sums[n * p.C + column], shift += weight * sums[(p.N + n) * p.C + column];
    }
    slope = shared_sum(slope, to.share), shift = shared_sum(shift, to.share);
    const acc_t count = acc_t(p.T) * acc_t(K);
    acc_t* const means = static_cast<acc_t*>(to.means) + (n * G + g) * 2;
    if (inside && lane == 0) means[0] = p.mean.data ? shift / count : acc_t(0), means[1] = slope / count;
  });
}

// Mean and 1 / sqrt(variance + eps) of a sample's groups, from each column's sums about its first number.
template <class scalar_t>
__global__ void __launch_bounds__(kJoinThreads, 1)
    moments_join_kernel(const Affine p, const Joined to, double eps, accumulator<scalar_t>* mean,
                        accumulator<scalar_t>* rstd) {
  using acc_t = accumulator<scalar_t>;
  const int64_t n = blockIdx.x, K = p.features.divisor, G = p.C / K;
  acc_t* const sums = static_cast<acc_t*>(to.parts_of) + n * to.parts * 2 * p.C;
  for (int64_t i = threadIdx.x; i < 2 * p.C; i += kJoinThreads) sums[i] = joined(sums, to.parts, p.C, i);
  __syncthreads();  // sums
  const scalar_t* const first = place<scalar_t>(p.input, n, 0, 0, 0);
  const double T = double(p.T);
  for_groups(G, to.share, [&](int64_t g, int lane, bool inside) {
    double middle = 0, square = 0;
    for (int64_t k = lane; inside && k < K; k += to.share) {
      const int64_t column = g * K + k;
      middle += double(widen(first[column])) + double(sums[p.C + column]) / T;
    }
    middle = shared_sum(middle, to.share) / double(K);
    for (int64_t k = lane; inside && k < K; k += to.share) {
      const int64_t column = g * K + k;
      const double sum = sums[p.C + column], off = double(widen(first[column])) + sum / T - middle;
      square += double(sums[column]) - sum * sum / T + T * off * off;
    }
    square = shared_sum(square, to.share);
    if (inside && lane == 0) {
      mean[n * G + g] = acc_t(middle);
      rstd[n * G + g] = acc_t(1 / sqrt(square / (T * double(K)) + eps));
    }
  });
}

// grad_input = rstd (w b - shift - f slope)
template <class scalar_t, int kV>
__global__ void __launch_bounds__(kSweepThreads)
    affine_sweep_input_kernel(const Affine p, const Sweep cut, const accumulator<scalar_t>* means) {
  using acc_t = accumulator<scalar_t>;
  const Walk at(p, cut, kV);
  if (at.column >= p.C) return;
  acc_t scale[kV], mean[kV], shift[kV], slope[kV];
#pragma unroll
  for (int j = 0; j < kV; ++j) {
    int g = at.column + j;
    p.features.take_remainder(g);
    const acc_t rstd = read<acc_t>(p.rstd, at.n, 0, g, 1);
    const acc_t* const of_group = means + (at.n * (p.C / p.features.divisor) + g) * 2;
    scale[j] = rstd * weight_at<acc_t>(p.to, at.column + j);
    mean[j] = read<acc_t>(p.mean, at.n, 0, g, 0);
    shift[j] = rstd * of_group[0], slope[j] = rstd * rstd * of_group[1];
  }
  scalar_t* const out = place<scalar_t>(p.to, at.n, 0, 0, at.column);
#pragma unroll 2
  for (int64_t t = at.t; t < at.end; t += at.step) {
    const auto x = vector_at<scalar_t, kV>(p.input, at.n, t, at.column);
    const auto b = vector_at<scalar_t, kV>(p.grad_output, at.n, t, at.column);
    Vector<scalar_t, kV> made;
#pragma unroll
    for (int j = 0; j < kV; ++j)
      made.at[j] = narrow<scalar_t>(scale[j] * widen(b.at[j]) - shift[j] - (widen(x.at[j]) - mean[j]) * slope[j]);
    *reinterpret_cast<Vector<scalar_t, kV>*>(out + t * p.to.t) = made;
  }
}

// Host

// Elements of 16 bytes, if all rows begin at multiples of them; else 1.
template <class... Operands>
int vector_of(const AffineProblem& p, const Operands&... operands) {
  const int64_t V = 16 / bytes_of(p.dtype);
  const auto whole = [&](const auto& x) {
    return reinterpret_cast<uintptr_t>(x.data) % 16 == 0 && x.t % V == 0 && (p.N == 1 || x.n % V == 0);
  };
  return p.G * p.K % V == 0 && (whole(operands) && ...) ? int(V) : 1;
}

// run(zero, vector) with the vector's length as a type.
template <class F>
cudaError_t with_vector(DType dtype, int V, const F& f) {
  return dispatch(dtype, [&](auto zero) {
    constexpr int kV = 16 / sizeof(zero);
    return V == kV ? f(zero, std::integral_constant<int, kV>{}) : f(zero, std::integral_constant<int, 1>{});
  });
}

template <class Kernel, class... Arguments>
cudaError_t start(Kernel kernel, const Affine& p, const SweepCut& cut, void* sums, double* partials,
                  cudaStream_t stream, const Arguments&... arguments) {
  if (!fits(p) || p.N > kMostIndex / cut.chunks / cut.parts) return cudaErrorInvalidConfiguration;
  const Sweep sweep{FastDivisor(cut.chunks), FastDivisor(cut.parts), cut.lanes, sums, partials};
  return launch(kernel, dim3(unsigned(p.N * cut.chunks * cut.parts)), dim3(kSweepThreads), 0, stream, p, sweep,
                arguments...);
}

void* take_parts(const AffineProblem& p, const SweepCut& cut, Workspace& workspace) {
  return workspace.take<void>(2 * p.N * cut.parts * p.G * p.K * accumulator_bytes(p.dtype));
}

}  // namespace

cudaError_t launch_sweep(const AffineProblem& p, const InputGradient& to, bool bias, void* sums, void* means,
                         void* sq_norms, Workspace& workspace, cudaStream_t stream) {
  const SweepCut cut(p, vector_of(p, p.input, p.grad_output));
  const bool joins = sums || cut.parts > 1, moving = p.mean.t != 0 || p.rstd.t != 0;
  void* const parts = joins ? take_parts(p, cut, workspace) : nullptr;
  double* const partials = joins ? nullptr : workspace.take<double>(2 * p.N * cut.chunks * sizeof(double));
  if (workspace.counts()) return cudaSuccess;
  const cudaError_t error = with_vector(p.dtype, cut.V, [&](auto zero, auto vector) {
    using scalar_t = decltype(zero);
    constexpr int kV = decltype(vector)::value;
    return moving ? start(affine_sweep_kernel<scalar_t, kV, kMoving>, Affine(p), cut, parts, partials, stream)
                  : start(affine_sweep_kernel<scalar_t, kV, kGroups>, Affine(p), cut, parts, partials, stream);
  });
  if (error != cudaSuccess) return error;
  if (!joins)
    return launch_sum_partials(p.dtype, partials, p.N * (1 + int64_t(bias)), cut.chunks, nullptr, sq_norms, stream);
  const Joined joined{parts, int(cut.parts), lanes_for(p.K), sums, means, sq_norms, bias};
  const auto join = [&](auto kernel) {
    return launch(kernel, dim3(unsigned(p.N)), dim3(kJoinThreads), 0, stream, Affine(p, to), joined);
  };
  return p.dtype == DType::kDouble ? join(affine_join_kernel<double>) : join(affine_join_kernel<float>);
}

cudaError_t launch_sweep_moments(const AffineProblem& p, double eps, void* mean, void* rstd, Workspace& workspace,
                                 cudaStream_t stream) {
  const SweepCut cut(p, vector_of(p, p.input));
  void* const parts = take_parts(p, cut, workspace);
  if (workspace.counts()) return cudaSuccess;
  const cudaError_t error = with_vector(p.dtype, cut.V, [&](auto zero, auto vector) {
    constexpr int kV = decltype(vector)::value;
    return start(affine_sweep_kernel<decltype(zero), kV, kMoments>, Affine(p), cut, parts, nullptr, stream);
  });
  if (error != cudaSuccess) return error;
  const Joined joined{parts, int(cut.parts), lanes_for(p.K), nullptr, nullptr, nullptr, false};
  return dispatch(p.dtype, [&](auto zero) {
    using acc_t = accumulator<decltype(zero)>;
    return launch(moments_join_kernel<decltype(zero)>, dim3(unsigned(p.N)), dim3(kJoinThreads), 0, stream, Affine(p),
                  joined, eps, static_cast<acc_t*>(mean), static_cast<acc_t*>(rstd));
  });
}

bool sweep_input_suits(const AffineProblem& p, const InputGradient& to) {
  return to.data && sweep_suits(p) && !to.frozen && !to.by_row && side_by_side(p, to.g, to.k);
}

cudaError_t launch_sweep_input(const AffineProblem& p, const InputGradient& to, const void* means,
                               cudaStream_t stream) {
  const SweepCut cut(p, vector_of(p, p.input, p.grad_output, to));
  return with_vector(p.dtype, cut.V, [&](auto zero, auto vector) {
    using scalar_t = decltype(zero);
    constexpr int kV = decltype(vector)::value;
    return start(affine_sweep_input_kernel<scalar_t, kV>, Affine(p, to), cut, nullptr, nullptr, stream,
                 static_cast<const accumulator<scalar_t>*>(means));
  });
}

}  // namespace torchgradx::cuda
