// Loops over lines for layers whose parameters act element by element, compiled for each processor as the tiles are.
// What was multiplied by the weight is the feature f: xhat = (x - mean) rstd of a normalisation, or min(x, 0) of a
// PReLU. What stands by row is one number a line; what stands by column, one a place in the line.
#pragma once

#include <cstdint>

namespace torchgradx::cpu {

enum class Feature { kByRow, kByColumn, kNegative };  // where xhat's statistics stand; kNegative: min(x, 0)
constexpr int kFeatures = 3;

template <class acc_t>
struct Lines {  // [rows, columns] of both operands, of one dtype, unit stride along the columns
  const void *x, *g;
  int64_t x_along, g_along, rows, columns;
  const acc_t *mean, *rstd;  // [rows] or [columns]
};

template <class acc_t>
struct RowSums {                 // each [rows], added to
  acc_t *sums, *products;        // of w g, of w g f
  acc_t *squares, *sq_products;  // of g^2, of (g f)^2; both null if unwanted
};

// grad_input = rstd (w g - shift - xhat slope); frozen, with constant statistics, rstd w g; of a PReLU, x > 0 ? g : w g
template <class acc_t>
struct Gradient {
  void* out;
  int64_t along;
  const acc_t *weight, *shift, *slope;  // by row or by column
};

template <class acc_t>
struct ColumnSums {        // each [columns], added to
  acc_t *sums, *products;  // of g, of g f
  const acc_t* factor;     // [rows]
};

template <class acc_t>
struct LineKernels {
  // statistics by row; w by column, or null: all 1; [min(x, 0)?]
  void (*dots[2])(const Lines<acc_t>& lines, const acc_t* w, const RowSums<acc_t>& out);
  // sums[c] += sum over rows of g, products[c] += of g f
  void (*columns[kFeatures])(const Lines<acc_t>& lines, acc_t* sums, acc_t* products);
  // [all by column?]
  void (*normalised[2])(const Lines<acc_t>& lines, const Gradient<acc_t>& to);
  void (*frozen[2])(const Lines<acc_t>& lines, const Gradient<acc_t>& to);
  void (*prelu[2])(const Lines<acc_t>& lines, const Gradient<acc_t>& to);
  // all but the weight by row, and the sums by column on the way
  void (*layer_norm)(const Lines<acc_t>& lines, const Gradient<acc_t>& to, const ColumnSums<acc_t>& sums);
  // sums[r] += sum of x - mean, squares[r] += of its square
  void (*moments)(const Lines<acc_t>& lines, acc_t* sums, acc_t* squares);
  // the same by column
  void (*column_moments)(const Lines<acc_t>& lines, acc_t* sums, acc_t* squares);
  void (*narrow)(void* out, const acc_t* in, int64_t count);  // to the operands' dtype
};

}  // namespace torchgradx::cpu
