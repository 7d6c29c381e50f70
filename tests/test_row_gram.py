"""The Gram of up to 128 rows: every remainder of a tile and of a vector, nothing beyond the rows.

On a processor of the build machine's kind; then in processes that are told of a lesser one.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from oracle import DTYPES, Linear, assert_sq_norms, case, linear_truth

from torchgradx import ops

pytestmark = pytest.mark.skipif(not ops.NATIVE, reason="the kernels are the extension's")

POSITIONS = [2, 3, 4, 5, 7, 8, 9, 12, 15, 16, 17, 31, 32, 33, 63, 64, 65, 127, 128, 129]
WIDTHS = [(1, 3), (4, 2), (5, 8), (7, 15), (16, 17), (31, 32), (33, 64), (255, 256), (257, 600)]
PROBLEMS = [Linear(2, t, *WIDTHS[k % len(WIDTHS)]) for k, t in enumerate(POSITIONS)] + [
    Linear(2, 6, i, o) for i, o in WIDTHS
]
KINDS = ("integers", "gaussians")
LESSER = {"AVX512": ("avx2", "default"), "AVX2": ("default",)}
CAPABILITY = torch.backends.cpu.get_cpu_capability()

each_problem = pytest.mark.parametrize("problem", PROBLEMS, ids=lambda p: "x".join(map(str, p)))
each_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: str(d)[6:])


@each_dtype
@each_problem
def test_it_agrees_with_the_oracle(problem, dtype):
    _, t, i, o = problem
    for kind in KINDS if t * t * i * o < 2**24 else KINDS[1:]:  # of integers exact
        a, b, truth = case(problem, dtype, kind)
        actual = ops.gram_sq_norms(a, b, True)
        assert_sq_norms(actual, truth, "gram", dtype, kind)


def test_what_an_earlier_problem_left_behind_adds_nothing():
    large = torch.full((1, 128, 300), float("nan"))
    ops.gram_sq_norms(large, large, False)
    a, b = torch.randn(3, 5, 7), torch.randn(3, 5, 9)
    sq_norms = ops.gram_sq_norms(a, b, True)
    assert_sq_norms(sq_norms, linear_truth(a, b), "gram", torch.float32)


@pytest.mark.parametrize("processor", LESSER.get(CAPABILITY, ()))
def test_the_builds_for_lesser_processors_agree_too(processor):
    here = Path(__file__).parent
    chosen = [f"{here}/test_row_gram.py", f"{here}/test_ops.py"]
    which = "(it_agrees or linear_agrees or behind) and not emulated and not reference"
    run = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *chosen, "-k", which],
        env={**os.environ, "ATEN_CPU_CAPABILITY": processor, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
    )
    assert run.returncode == 0, run.stdout[-3000:] + run.stderr[-1000:]
