"""Bugs planted in affine_sweep.cu and turn.cu: see mutants.py."""

from __future__ import annotations

from emulation.mutant import Mutant

BARRIER, DROPPED = "__syncthreads();", ";"
MUTANTS = [
    Mutant("sweep: barrier dropped", "affine_sweep.cu", "affine_sweep", "float32",
           f"{BARRIER}\n  double squares[2] = {{}};\n  for (int i",
           "double squares[2] = {};\n  for (int i", "affine"),
    Mutant("sweep: columns past the last are read", "affine_sweep.cu", "affine_sweep", "float32",
           "if (at.column < p.C) {", "{", "affine"),
    Mutant("sweep: a part runs into the next", "affine_sweep.cu", "affine_sweep", "float32",
           "p.T * (part + 1) / parts;", "p.T * (part + 1) / parts + (part + 1 < parts);", "affine"),
    Mutant("sweep: positions of a warp are not joined", "affine_sweep.cu", "affine_sweep",
           "bfloat16", "distance < warp_threads; distance", "distance < 1; distance", "affine"),
    Mutant("sweep: statistics of the first group for all", "affine_sweep.cu", "affine_sweep",
           "float32", "sum *= read<acc_t>(p.rstd, at.n, 0, g, 1)",
           "sum *= read<acc_t>(p.rstd, at.n, 0, 0, 1)", "affine"),
    Mutant("sweep: of a piece the first element", "affine_sweep.cu", "affine_sweep", "bfloat16",
           "acc_t(widen(b.at[j]))", "acc_t(widen(b.at[0]))", "affine"),
    Mutant("sweep: squares of the weight for the bias too", "affine_sweep.cu", "affine_sweep",
           "float32", "squares[1] += kind == 1", "squares[1] += kind == 0", "affine"),
    Mutant("sweep: pieces that are not aligned", "affine_sweep.cu", "affine_sweep", "float32",
           "x.t % V == 0 && ", "", "affine"),
    Mutant("join: barrier dropped", "affine_sweep.cu", "affine_sweep", "float32",
           f"{BARRIER}  // sums", DROPPED, "affine"),
    Mutant("join: the first part is left out", "affine_sweep.cu", "affine_sweep", "float32",
           "int part = 0; part < parts", "int part = 1; part < parts", "affine"),
    Mutant("join: the mean over features alone", "affine_sweep.cu", "affine_sweep", "float32",
           "acc_t(p.T) * acc_t(K)", "acc_t(K)", "affine"),
    Mutant("join: variance within columns alone", "affine_sweep.cu", "affine_sweep", "float32",
           "+ T * off * off", "", "affine"),
    Mutant("sweep input: slope forgets a factor", "affine_sweep.cu", "affine_sweep", "bfloat16",
           "rstd * rstd * of_group[1]", "rstd * of_group[1]", "affine"),
    Mutant("turn: barrier dropped", "turn.cu", "turn", "float32", BARRIER, DROPPED, "turned"),
    Mutant("turn: past the last row is read", "turn.cu", "turn", "float32",
           "if (row < tiles.R && column", "if (column", "turned"),
    Mutant("turn: past the last column is written", "turn.cu", "turn", "float32",
           "mine < tiles.R && column < tiles.C", "mine < tiles.R", "turned"),
    Mutant("turn: within a piece nothing is turned", "turn.cu", "turn", "bfloat16",
           "read[i][j].at[k]", "read[i][k].at[j]", "turned"),
    Mutant("turn: rows of a piece mixed up", "turn.cu", "turn", "bfloat16",
           "tile[i % kV][i / kV][lane]", "tile[i / kSide][i % kSide][lane]", "turned"),
    Mutant("turn: pieces that are not aligned", "turn.cu", "turn", "bfloat16",
           "divides(p.R) && divides(p.C) &&", "", "turned"),
]  # fmt: skip
