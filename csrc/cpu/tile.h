// The processor-dependent kernels behind one table: a register tile of a product, and the loops that feed it.
// Written once (tile_body.h) on the compiler's vectors, compiled for plain, AVX2 and AVX-512 processors, chosen at run
// time. acc_t is float for float32, bfloat16 and float16 operands, double for float64.
#pragma once

#include "affine.h"
#include "gates.h"

#include <c10/core/ScalarType.h>

#include <cstdint>
#include <utility>

namespace torchgradx::cpu {

constexpr int kMaxRows = 14;  // of any processor's tile
constexpr int kMaxTaps = 9;   // of a correlation at a time
constexpr int kMaxSeriesRows = 6;
constexpr int64_t kMaxSeries = 16;  // samples of one
constexpr int kSide = 4;            // of a square tile of a Gram matrix of rows

// One tile: sum over positions (y, x) of g[0 .. rows) x[0 .. columns)^T, for one sample; then what becomes of it.
template <class acc_t>
struct Tile {
  const acc_t* x;  // [height, width, columns], strides (x_down, x_along, 1); read in whole vectors past `columns`
  int64_t x_down, x_along, height, width;
  const acc_t* g;  // [height * width, rows], strides (g_along, 1)
  int64_t g_along;
  acc_t* carry;          // [rows, 2 vectors]: partial sums of a sample that spans several chunks
  bool resume, suspend;  // begin from `carry`; end there
  acc_t* total;          // [rows, columns] in whole vectors, or null: the sum over samples, scaled
  int64_t total_along;
  acc_t scale;
  bool fresh;  // the first to be added: `total` is not yet initialised
  bool wide;   // squares in double, for samples whose squares leave float's range
  int columns;
  double* sq_sum;  // the tile's squares are added to it; null if unwanted
};

// The same tile of several whole samples, one after another. The total stays in registers meanwhile, which leaves half
// the rows, and the end of a sample costs as much as two or three positions instead of eight.
template <class acc_t>
struct Series {
  Tile<acc_t> tile;           // of the first; its total and squares are wanted
  int64_t samples, x_sample;  // at most kMaxSeries
  const acc_t* scale;         // [samples], or null
};

// Loops over an operand of one dtype. Strides count elements.
template <class acc_t>
struct RowKernels {
  // out[r * ld + c] = source[r * row_stride + c * column_stride]; writes nothing else
  void (*pack)(acc_t* out, int64_t ld, const void* source, int64_t rows, int64_t columns, int64_t row_stride,
               int64_t column_stride);
  // sum[c] += sum over r of source[r, c]
  void (*add_rows)(acc_t* sum, const void* source, int64_t rows, int64_t columns, int64_t row_stride,
                   int64_t column_stride);
  double (*sq_sum)(const void* source, int64_t count, int64_t stride);
  LineKernels<acc_t> lines;
};

template <class acc_t>
struct Kernels {
  int lanes, max_rows, series_rows;                   // 0 where there are too few registers
  void (*tile[2][kMaxRows + 1])(const Tile<acc_t>&);  // [vectors - 1][rows]
  void (*series[2][kMaxSeriesRows + 1])(const Series<acc_t>&);
  RowKernels<acc_t> native, bfloat16, float16;
  // The products of [count, depth] rows, whole sides and whole vectors of them, with one another: tiles [kSide, kSide]
  // of the upper triangle, those on the diagonal first, then column by column.
  void (*row_gram)(const acc_t* rows, int64_t ld, int64_t count, int64_t depth, bool resume, acc_t* tiles);

  // sum += sum of a b, magnitude += sum of |a b|, in double
  void (*products)(const acc_t* a, const acc_t* b, int64_t count, double* sum, double* magnitude);

  // out[k] += sum of g[i] x[offsets[k] + i] over i below count, a multiple of lanes; [taps]
  void (*correlate[kMaxTaps + 1])(const acc_t* g, const acc_t* x, const int64_t* offsets, int64_t count, acc_t* out);

  // returns |values|^2, and total += scale values if there is a total
  acc_t (*settle)(const acc_t* values, int64_t count, acc_t scale, acc_t* total);

  GateKernels<acc_t> gates;

  const RowKernels<acc_t>& of(at::ScalarType dtype) const {
    return dtype == at::kBFloat16 ? bfloat16 : dtype == at::kHalf ? float16 : native;
  }
};

template <class acc_t>
const Kernels<acc_t>& kernels();  // for this processor, one of:
template <class acc_t>
Kernels<acc_t> avx2_kernels();
template <class acc_t>
Kernels<acc_t> avx512_kernels();

}  // namespace torchgradx::cpu
