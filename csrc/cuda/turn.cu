// Copies of [N, R, C] whose rows lie side by side, as rows: channels last of planes, and planes of channels last. Each
// element is read and written once, in pieces of 8 bytes where sizes and addresses allow, side by side for the lanes of
// a warp on either side; tiles are turned in registers and shared memory. Workspace: none.
#include "dispatch.cuh"
#include "operand.cuh"

namespace torchgradx::cuda {
namespace {

constexpr int kTurnWarps = 8;

struct Tiles {
  FastDivisor rows, columns;  // of tiles
  int R, C;
  int64_t n, c;  // strides of what is read; that of R is 1
};

// A block has a tile of 32 kV rows by 32 kV columns, a thread kV pieces of it at a time.
template <class element, int kV>
__global__ void __launch_bounds__(kTurnWarps* warp_threads)
    turn_kernel(const element* __restrict__ from, element* __restrict__ to, const Tiles tiles) {
  using Pieces = Vector<element, kV>;
  constexpr int kSide = warp_threads, kEach = kSide / kTurnWarps;
  STATIC_SHARED(Pieces, tile, [kV][kSide][kSide + 1]);
  const int lane = threadIdx.x % warp_threads, warp = threadIdx.x / warp_threads;
  int block = int(blockIdx.x);
  const int first_c = tiles.columns.take_remainder(block) * kSide, first_r = tiles.rows.take_remainder(block) * kSide;
  const int64_t n = block;
  const int row = (first_r + lane) * kV;
  Pieces read[kEach][kV];
#pragma unroll
  for (int i = 0; i < kEach; ++i)
#pragma unroll
    for (int j = 0; j < kV; ++j) {
      const int column = (first_c + i * kTurnWarps + warp) * kV + j;
      if (row < tiles.R && column < tiles.C)
        read[i][j] = *reinterpret_cast<const Pieces*>(from + n * tiles.n + column * tiles.c + row);
      else
        read[i][j] = Pieces{};
    }
#pragma unroll
  for (int i = 0; i < kEach; ++i)
#pragma unroll
    for (int k = 0; k < kV; ++k) {
      Pieces turned;
#pragma unroll
      for (int j = 0; j < kV; ++j) turned.at[j] = read[i][j].at[k];
      tile[k][lane][i * kTurnWarps + warp] = turned;
    }
  __syncthreads();
  const int column = (first_c + lane) * kV;
#pragma unroll 4
  for (int i = warp; i < kSide * kV; i += kTurnWarps) {
    const int mine = first_r * kV + i;
    if (mine < tiles.R && column < tiles.C)
      *reinterpret_cast<Pieces*>(to + (n * tiles.R + mine) * tiles.C + column) = tile[i % kV][i / kV][lane];
  }
}

template <class element, int kV>
cudaError_t run_turn(const TurnProblem& p, cudaStream_t stream) {
  const int64_t side = kV * warp_threads, rows = ceil_div(p.R, side), columns = ceil_div(p.C, side);
  if (p.R > kMostIndex || p.C > kMostIndex || p.N > kMostIndex / rows / columns) return cudaErrorInvalidConfiguration;
  const Tiles tiles{FastDivisor(rows), FastDivisor(columns), int(p.R), int(p.C), p.n, p.c};
  return launch(turn_kernel<element, kV>, dim3(unsigned(p.N * rows * columns)), dim3(kTurnWarps * warp_threads), 0,
                stream, static_cast<const element*>(p.from), static_cast<element*>(p.to), tiles);
}

// Pieces of 8 bytes if everything is a multiple of that.
template <class element>
cudaError_t turn(const TurnProblem& p, cudaStream_t stream) {
  constexpr int kV = 8 / sizeof(element);
  const auto divides = [&](int64_t size) { return size % kV == 0; };
  const auto aligned = [](const void* data) { return reinterpret_cast<uintptr_t>(data) % 8 == 0; };
  const bool whole = divides(p.R) && divides(p.C) && divides(p.c) && (p.N == 1 || divides(p.n));
  return whole && aligned(p.from) && aligned(p.to) ? run_turn<element, kV>(p, stream) : run_turn<element, 1>(p, stream);
}

}  // namespace

cudaError_t launch_turn(const TurnProblem& p, cudaStream_t stream) {
  if (p.N == 0 || p.R == 0 || p.C == 0) return cudaSuccess;
  switch (p.bytes) {
    case 2:
      return turn<uint16_t>(p, stream);
    case 4:
      return turn<uint32_t>(p, stream);
    case 8:
      return turn<uint64_t>(p, stream);
  }
  return cudaErrorInvalidValue;
}

}  // namespace torchgradx::cuda
