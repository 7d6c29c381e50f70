"""Bugs planted in affine_sweep.cu, affine_rows.cu and turn.cu: see mutants.py."""

from emulation.mutant import planted_in

BARRIER, DROPPED = "__syncthreads();", ";"
MUTANTS = [
    *planted_in("affine_sweep.cu", "affine_sweep", "float32", "affine", [
        ("sweep: barrier dropped", f"{BARRIER}\n  double squares[2] = {{}};\n  for (int i",
         "double squares[2] = {};\n  for (int i"),
        ("sweep: columns past the last are read", "if (at.column < p.C) {", "{"),
        ("sweep: a part runs into the next", "p.T * (part + 1) / parts;",
         "p.T * (part + 1) / parts + (part + 1 < parts);"),
        ("sweep: statistics of the first group for all",
         "sum *= read<acc_t>(p.rstd, at.n, 0, g, 1)", "sum *= read<acc_t>(p.rstd, at.n, 0, 0, 1)"),
        ("sweep: the weight's squares twice", "squares[1] += kind == 1", "squares[1] += kind == 0"),
        ("moments join: barrier dropped", f"{BARRIER}  // sums", DROPPED),
        ("join: a group's threads reach into the next", "distance < share; distance",
         "distance < warp_threads; distance"),
        ("join: no first part", "int part = 0; part < parts", "int part = 1; part < parts"),
        ("join: the mean over features alone", "acc_t(p.T) * acc_t(K)", "acc_t(K)"),
        ("join: variance within columns alone", "+ T * off * off", "")]),
    *planted_in("affine_sweep.cu", "affine_sweep", "bfloat16", "affine", [
        ("sweep: positions of a warp are not joined", "distance < warp_threads; distance",
         "distance < 1; distance"),
        ("sweep: pieces that are not aligned", "x.t % V == 0 && ", ""),
        ("sweep: of a piece the first element", "acc_t(widen(b.at[j]))", "acc_t(widen(b.at[0]))"),
        ("sweep input: slope lacks a factor", "rstd * rstd * of_group[1]", "rstd * of_group[1]")]),
    *planted_in("turn.cu", "turn", "float32", "turned", [
        ("turn: barrier dropped", BARRIER, DROPPED),
        ("turn: past the last row is read", "if (row < tiles.R && column", "if (column"),
        ("turn: writes past the last", "mine < tiles.R && column < tiles.C", "mine < tiles.R")]),
    *planted_in("turn.cu", "turn", "bfloat16", "turned", [
        ("turn: within a piece nothing is turned", "read[i][j].at[k]", "read[i][k].at[j]"),
        ("turn: a piece's rows", "tile[i % kV][i / kV][lane]", "tile[i / kSide][i % kSide][lane]"),
        ("turn: pieces that are not aligned", "divides(p.R) && divides(p.C) &&", "")]),
    *planted_in("products.cu", "products", "float32", "batched", [
        ("samples: 0 times x", "scale != acc_t(0) ? scaled : narrow<scalar_t>(acc_t(0))", "scaled"),
        ("samples: scaled in both operands", "samples.masks ? piece.at[j] : ", "")]),
    *planted_in("affine_rows.cu", "affine_rows", "float32", "affine", [
        ("rows: barrier dropped", BARRIER, DROPPED),
        ("rows: one place for every row's means", "means[i % 2]", "means[0]"),
        ("rows: a part runs into the next", "begin + i < end;", "begin + i < end + 1;"),
        ("rows: idle teams write", "if (idle) return;", ";"),
        ("rows: columns past the last are read",
         "if (at >= D) break;\n      if constexpr (kWide)\n        parts[",
         "if constexpr (kWide)\n        parts["),
        ("rows: the next row is read too late", "if (row + 1 < end) load(row + 1);",
         "if (row + 2 < end) load(row + 1);"),
        ("rows: scale forgotten", "products[j] += scale * (", "products[j] += ("),
        ("rows: scale of a part for a sample's", "cut.single ? 1 : cut.parts, ", "1, "),
        ("rows: the bias's squares for the weight's", "acc_t(square[0])", "acc_t(square[1])")]),
    *planted_in("affine_rows.cu", "affine_rows", "bfloat16", "affine", [
        ("rows: a piece of each row for its neighbour's", "thread * kColumns + j",
         "thread * kColumns + (j ^ 1)"),
        ("rows: pieces from rows that are not aligned",
         "x.k == 1 && x.n % Part::kEach == 0 && x.t % Part::kEach == 0", "x.k == 1"),
        ("rows: shift forgotten", "weight[j] * grads[j] - shift -", "weight[j] * grads[j] -")]),
]  # fmt: skip
