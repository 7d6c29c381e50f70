"""The CPU kernels as they are built for other processors, of which ATen's own switch chooses one.

A process runs each build that this processor can run and would not choose, at sizes off vectors.
"""

import os
from pathlib import Path

import pytest
import torch
from attach_models import Model
from attach_oracle import check
from backends import each_dtype
from oracle import Linear, assert_sq_norms, case, linear_truth
from processes import python
from recurrent_models import CELLS, KINDS, net
from torch import nn

from torchgradx import ops

pytestmark = pytest.mark.skipif(not ops.NATIVE, reason="the kernels are the extension's")


def loss(model, x):
    return torch.sigmoid(2 * model(x)).flatten(1).sum(1).mean()


def steps(m, x):
    h, states = None, []
    for step in x.unbind(1):
        h = m.cell(step, h)
        states.append(h[0] if isinstance(h, tuple) else h)
    return torch.stack(states, 1)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_gates_at_sizes_off_every_vector(kind, dtype):
    rnn = KINDS[kind](3, 37, batch_first=True)
    check(net(rnn), loss, torch.randn(3, 5, 3), dtype=dtype, backend="native")
    check(Model(steps, cell=CELLS[kind](19, 37)), loss, torch.randn(3, 4, 19), dtype=dtype)


@pytest.mark.parametrize("algorithm", ["gram", "direct"])
def test_layers_whose_algorithm_is_forced_run_the_kernels_too(algorithm):
    options = {"algorithm": algorithm, "backend": "native"}
    check(nn.Linear(19, 37), loss, torch.randn(3, 21, 19), input_grad=True, **options)
    layer = nn.Conv2d(6, 22, 3, padding=1, groups=2)
    check(layer, loss, torch.randn(2, 6, 7, 9), input_grad=True, **options)


# The Gram of up to 128 rows: every remainder of a tile and of a vector, nothing beyond the rows
POSITIONS = [2, 3, 4, 5, 7, 8, 9, 12, 15, 16, 17, 31, 32, 33, 63, 64, 65, 127, 128, 129]
WIDTHS = [(1, 3), (4, 2), (5, 8), (7, 15), (16, 17), (31, 32), (33, 64), (255, 256), (257, 600)]
PROBLEMS = [Linear(2, t, *WIDTHS[k % len(WIDTHS)]) for k, t in enumerate(POSITIONS)] + [
    Linear(2, 6, i, o) for i, o in WIDTHS
]
OPERANDS = ("integers", "gaussians")
LESSER = {"AVX512": ("avx2", "default"), "AVX2": ("default",)}
CAPABILITY = torch.backends.cpu.get_cpu_capability()
each_problem = pytest.mark.parametrize("problem", PROBLEMS, ids=lambda p: "x".join(map(str, p)))


@each_dtype
@each_problem
def test_a_gram_of_rows_agrees_with_the_oracle(problem, dtype):
    _, t, i, o = problem
    for kind in OPERANDS if t * t * i * o < 2**24 else OPERANDS[1:]:  # of integers exact
        a, b, truth = case(problem, dtype, kind)
        assert_sq_norms(ops.gram_sq_norms(a, b, True), truth, "gram", dtype, kind)


def test_what_an_earlier_gram_left_behind_adds_nothing():
    large = torch.full((1, 128, 300), float("nan"))
    ops.gram_sq_norms(large, large, False)
    a, b = torch.randn(3, 5, 7), torch.randn(3, 5, 9)
    assert_sq_norms(ops.gram_sq_norms(a, b, True), linear_truth(a, b), "gram", torch.float32)


def test_the_build_is_the_one_asked_for():
    assert os.environ.get("ATEN_CPU_CAPABILITY", CAPABILITY.lower()) == CAPABILITY.lower()


CHOSEN = ["gram_of_rows", "agree_with", "behind", "gates", "forced", "asked_for", "fused"]
CHOSEN += ["weights_the_gradients"]


@pytest.mark.parametrize("processor", LESSER.get(CAPABILITY, ()))
def test_the_builds_for_lesser_processors_agree_too(processor):
    chosen = [Path(__file__).with_name(f"test_{n}.py") for n in ("processors", "ops", "affine")]
    which = " or ".join(CHOSEN)
    command = ["-m", "pytest", "-q", "-p", "no:cacheprovider", *chosen]
    command += ["-k", f"({which}) and not (emulated or reference)"]
    run = python(*command, ATEN_CPU_CAPABILITY=processor, OMP_NUM_THREADS="1")
    assert run.returncode == 0, run.stdout[-3000:] + run.stderr[-1000:]
