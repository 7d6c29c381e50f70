// LayerNorm and RMSNorm fused: statistics of each position, [N, T, 1, D]. With f = (x - mean) rstd,
// grad_input = rstd (w b - m(w b) - f m(w b f)), m the mean over D, and the column sums sum_t b f and sum_t b.
// Bound by memory: one sweep that reads both operands once, the next row while it works on this one. A row is a team's
// of warps, in registers (D of 4096 at most, doubles 2048); so are the column sums of the positions that a team walks,
// which it leaves in the workspace.
// T = 1: samples are rows, and squares are the rows' own; then a team's sums are the gradient's already.
// Sums run in an order that depends on sizes alone. Workspace: 2 D accumulators a team, of 16 positions or more if a
// sample has several, and what launch_bias takes.
#include "affine.cuh"

namespace torchgradx::cuda {
namespace {

constexpr int kMostWarps = 16;               // of a block
constexpr int64_t kWarps = 2048;             // wanted; not read off the device, so that all devices add up alike
constexpr int64_t kRows = 16, kSamples = 4;  // of a team, at least

// A thread's: more would spill, as all else of them that is in registers comes to five numbers a column.
constexpr int columns_of(size_t accumulator) {
  return int(32 / accumulator);
}

struct Teams {
  int warps;            // of a team
  int64_t parts, rows;  // of a sample; T = 1: of all samples. Most rows of a part
  const void* scale;    // [N] acc, or null: T = 1 alone weights its sums by it
  void* sums;           // [2, N or 1, parts, D] acc
  void* sq_norms;       // [2, N] acc, T = 1 alone
  bool bias;            // whether sq_norms has its second row
};

// A thread's columns of a row; kWide: next to one another, 16 bytes a load.
template <class scalar_t, bool kWide>
struct Piece {
  static constexpr int kEach = int(16 / sizeof(scalar_t)), kColumns = columns_of(sizeof(accumulator<scalar_t>));

  using Part = Vector<scalar_t, kEach>;
  Part parts[kColumns / kEach];

  __device__ __forceinline__ scalar_t& operator[](int j) {
    return parts[j / kEach].at[j % kEach];
  }
  static __device__ __forceinline__ int column(int thread, int j, int step) {
    return kWide ? thread * kColumns + j : thread + j * step;
  }
  __device__ __forceinline__ void load(const scalar_t* row, int64_t stride, int thread, int step, int D) {
#pragma unroll
    for (int j = 0; j < kColumns; j += kWide ? kEach : 1) {
      const int at = column(thread, j, step);
      if (at >= D) break;
      if constexpr (kWide)
        parts[j / kEach] = *reinterpret_cast<const Part*>(row + at);
      else
        (*this)[j] = row[at * stride];
    }
  }
  __device__ __forceinline__ void store(scalar_t* row, int64_t stride, int thread, int step, int D) {
#pragma unroll
    for (int j = 0; j < kColumns; j += kWide ? kEach : 1) {
      const int at = column(thread, j, step);
      if (at >= D) break;
      if constexpr (kWide)
        *reinterpret_cast<Part*>(row + at) = parts[j / kEach];
      else
        row[at * stride] = (*this)[j];
    }
  }
};

// Of `count` numbers each, over a team of warps; in every one of its threads. Between two calls with one `place`
// there is another call with its barrier, so that one barrier a call does.
template <int kCount, class acc_t>
__device__ __forceinline__ void team_sums(acc_t (&values)[kCount], acc_t (*place)[kMostWarps], int warps) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) values[i] = warp_sum(values[i]);
  if (warps == 1) return;
  const int warp = threadIdx.x / warp_threads, first = warp / warps * warps;
  if (threadIdx.x % warp_threads == 0)
#pragma unroll
    for (int i = 0; i < kCount; ++i) place[i][warp] = values[i];
  __syncthreads();
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
    values[i] = 0;
    for (int other = 0; other < warps; ++other) values[i] += place[i][first + other];
  }
}

template <class scalar_t, bool kSingle, bool kWide>
__global__ void __launch_bounds__(kMostWarps* warp_threads) affine_rows_kernel(const Affine p, const Teams cut) {
  using acc_t = accumulator<scalar_t>;
  using Part = Piece<scalar_t, kWide>;
  constexpr int kColumns = Part::kColumns;
  STATIC_SHARED(acc_t, means, [2][2][kMostWarps]);
  STATIC_SHARED(double, squares, [2][kMostWarps]);
  const int lane = threadIdx.x % warp_threads, warp = threadIdx.x / warp_threads;
  const int teams = int(blockDim.x) / warp_threads / cut.warps;
  const int64_t unit = int64_t(blockIdx.x) * teams + warp / cut.warps, n = unit / cut.parts, part = unit % cut.parts;
  const int64_t R = kSingle ? p.N : p.T;
  const bool idle = n >= (kSingle ? 1 : p.N);
  const int64_t begin = idle ? 0 : R * part / cut.parts, end = idle ? 0 : R * (part + 1) / cut.parts;
  const int thread = warp % cut.warps * warp_threads + lane, step = cut.warps * warp_threads, D = int(p.C);

  acc_t weight[kColumns], sums[kColumns] = {}, products[kColumns] = {};
#pragma unroll
  for (int j = 0; j < kColumns; ++j) {
    const int column = Part::column(thread, j, step);
    weight[j] = column < D ? weight_at<acc_t>(p.to, column) : acc_t(0);
  }
  Part x, b;
  acc_t mean = 0, rstd = 0;
  const auto load = [&](int64_t row) {
    const int64_t sample = kSingle ? row : n, t = kSingle ? 0 : row;
    mean = read<acc_t>(p.mean, sample, t, 0, 0), rstd = read<acc_t>(p.rstd, sample, t, 0, 1);
    x.load(place<scalar_t>(p.input, sample, t, 0, 0), p.input.k, thread, step, D);
    b.load(place<scalar_t>(p.grad_output, sample, t, 0, 0), p.grad_output.k, thread, step, D);
  };
  if (begin < end) load(begin);
#pragma unroll 1
  for (int64_t i = 0; i < cut.rows; ++i) {  // as many for all teams of a block, since they share its barriers
    const bool active = begin + i < end;
    const int64_t row = active ? begin + i : begin, sample = kSingle ? row : n, t = kSingle ? 0 : row;
    const acc_t spread = rstd;  // of this row: load() has the next one's
    acc_t features[kColumns], grads[kColumns], inner[2] = {};
    double square[2] = {};
#pragma unroll
    for (int j = 0; j < kColumns; ++j) {
      const bool inside = active && Part::column(thread, j, step) < D;
      features[j] = inside ? (acc_t(widen(x[j])) - mean) * rstd : acc_t(0);
      grads[j] = inside ? acc_t(widen(b[j])) : acc_t(0);
      const acc_t grad = weight[j] * grads[j];
      inner[0] += grad, inner[1] += grad * features[j];
      if (kSingle) {
        const double of_weight = grads[j] * features[j], of_bias = grads[j];
        square[0] += of_weight * of_weight, square[1] += of_bias * of_bias;
      }
    }
    if (row + 1 < end) load(row + 1);
    team_sums(inner, means[i % 2], cut.warps);
    if (kSingle) {
      team_sums(square, squares, cut.warps);
      acc_t* const sq_norms = static_cast<acc_t*>(cut.sq_norms);
      if (active && thread == 0) {
        sq_norms[row] = acc_t(square[0]);
        if (cut.bias) sq_norms[p.N + row] = acc_t(square[1]);
      }
    }
    const acc_t shift = p.mean.data ? inner[0] / acc_t(D) : acc_t(0), slope = inner[1] / acc_t(D);
    const acc_t scale = kSingle && active && cut.scale ? static_cast<const acc_t*>(cut.scale)[row] : acc_t(1);
    Part out;
#pragma unroll
    for (int j = 0; j < kColumns; ++j) {
      out[j] = narrow<scalar_t>(spread * (weight[j] * grads[j] - shift - features[j] * slope));
      if (scale == acc_t(0)) continue;  // 0 times nan is nan
      sums[j] += scale * grads[j];
      products[j] += scale * (grads[j] * features[j]);
    }
    if (active) out.store(place<scalar_t>(p.to, sample, t, 0, 0), p.to.k, thread, step, D);
  }
  if (idle) return;
  acc_t* const to = static_cast<acc_t*>(cut.sums) + unit * D;
  const int64_t kind = (kSingle ? 1 : p.N) * cut.parts * D;
#pragma unroll
  for (int j = 0; j < kColumns; ++j) {
    const int column = Part::column(thread, j, step);
    if (column < D) to[column] = products[j], to[kind + column] = sums[j];
  }
}

// Host

int64_t warp_columns(const AffineProblem& p) {
  return columns_of(accumulator_bytes(p.dtype)) * warp_threads;
}

struct Cut {
  bool single;  // T = 1, and no sample's sums are wanted
  int warps, threads;
  int64_t sets, parts, rows, blocks;

  explicit Cut(const AffineProblem& p, bool by_sample = false)
      : single(p.T == 1 && !by_sample), sets(single ? 1 : p.N) {
    const int64_t R = single ? p.N : p.T;
    warps = int(ceil_div<int64_t>(p.K, warp_columns(p)));
    const int64_t most = ceil_div<int64_t>(R, single ? kSamples : kRows);
    parts = std::clamp<int64_t>(ceil_div(kWarps / warps, std::max<int64_t>(sets, 1)), 1, std::max<int64_t>(most, 1));
    rows = ceil_div(R, parts);
    threads = (warps > 1 ? warps : 4) * warp_threads;  // teams of a block wait for one another
    blocks = ceil_div<int64_t>(sets * parts, threads / warp_threads / warps);
  }
};

// True if rows can be read 16 bytes at a time.
template <class scalar_t>
bool in_pieces(const AffineProblem& p, const InputGradient& to) {
  using Part = Piece<scalar_t, true>;
  const auto whole = [](const ElementOperand& x) {
    return x.k == 1 && x.n % Part::kEach == 0 && x.t % Part::kEach == 0 &&
           reinterpret_cast<uintptr_t>(x.data) % 16 == 0;
  };
  return p.K % Part::kColumns == 0 && whole(p.input) && whole(p.grad_output) && whole(to);
}

// The column sums as rows, of which those of one sample and kind add up to its gradient: [2 N, parts, D].
LinearProblem rows_of_sums(const AffineProblem& p, const Cut& cut, bool bias, const void* sums) {
  const DType wide = p.dtype == DType::kDouble ? DType::kDouble : DType::kFloat;
  return {wide, p.N * (1 + int64_t(bias)), cut.parts, 0, p.K, {}, {sums, cut.parts * p.K, p.K, 1}, {}};
}

cudaError_t launch_sweep(const AffineProblem& p, const InputGradient& to, const Cut& cut, const Teams& teams,
                         cudaStream_t stream) {
  return dispatch(p.dtype, [&](auto zero) {
    using scalar_t = decltype(zero);
    const auto run = [&](auto kernel) {
      return launch(kernel, dim3(unsigned(cut.blocks)), dim3(cut.threads), 0, stream, Affine(p, to), teams);
    };
    if (in_pieces<scalar_t>(p, to))
      return cut.single ? run(affine_rows_kernel<scalar_t, true, true>)
                        : run(affine_rows_kernel<scalar_t, false, true>);
    return cut.single ? run(affine_rows_kernel<scalar_t, true, false>)
                      : run(affine_rows_kernel<scalar_t, false, false>);
  });
}

}  // namespace

bool affine_rows_suit(const AffineProblem& p, const InputGradient& to) {
  return to.data && to.by_row && !to.frozen && !p.negative && p.G == 1 && p.N > 0 && p.T > 0 && p.K > 0 &&
         p.K <= warp_columns(p) * kMostWarps;
}

int64_t affine_parts(const AffineProblem& p, const InputGradient& to) {
  return affine_rows_suit(p, to) ? Cut(p, /*by_sample=*/true).parts : 1;
}

cudaError_t launch_affine_rows(const AffineProblem& p, const InputGradient& to, const AffineResults& results,
                               Workspace& workspace, cudaStream_t stream) {
  const Gradients& gradients = results.gradients;
  const Cut cut(p, results.by_sample);
  if (!fits(p) || cut.sets > kMostIndex / cut.parts) return cudaErrorInvalidConfiguration;
  void* sums = results.by_sample;
  if (!sums) sums = workspace.take<void>(2 * cut.sets * cut.parts * p.K * accumulator_bytes(p.dtype));
  cudaError_t error = cudaSuccess;
  if (!workspace.counts())
    error = launch_sweep(
        p, to, cut, {cut.warps, cut.parts, cut.rows, gradients.scale, sums, results.sq_norms, results.bias}, stream);
  if (error == cudaSuccess && !cut.single)
    error = launch_bias(rows_of_sums(p, cut, results.bias, sums), {}, results.sq_norms, workspace, stream);
  if (error != cudaSuccess || workspace.counts() || !gradients.weight) return error;
  return launch_sum_rows(to.weight_dtype, sums, cut.single ? nullptr : gradients.scale, cut.sets * cut.parts, p.K,
                         gradients.weight, stream, cut.single ? 1 : cut.parts, gradients.bias);
}

}  // namespace torchgradx::cuda
