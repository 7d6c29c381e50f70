"""The CPU kernels as they are built for other processors, of which ATen's own switch chooses one.

In a process for each build that this processor can run and would not choose: products of rows and
patches, normalisations, and the gates of recurrent layers, at sizes off every vector.
"""

from pathlib import Path

import pytest
import torch
from attach_oracle import Model, check
from backends import each_dtype
from oracle import Linear, assert_sq_norms, case, linear_truth
from processes import python
from recurrent_models import CELLS, KINDS, net
from torch import nn

from torchgradx import ops

pytestmark = pytest.mark.skipif(not ops.NATIVE, reason="the kernels are the extension's")

BUILDS = ["default", "AVX2", "AVX512"]  # as torch names them, in order

LAYERS = {
    "linear": (nn.Linear(19, 37), (3, 21, 19)),
    "linear at one position": (nn.Linear(35, 37), (3, 35)),
    "conv2d": (nn.Conv2d(6, 22, 3, padding=1, groups=2), (2, 6, 7, 9)),
    "transposed": (nn.ConvTranspose2d(5, 7, 3, stride=2), (2, 5, 5, 4)),
    "layernorm": (nn.LayerNorm(37), (3, 5, 37)),
    "rmsnorm": (nn.RMSNorm(37), (3, 5, 37)),
    "groupnorm": (nn.GroupNorm(3, 9), (3, 9, 5, 7)),
    "instancenorm": (nn.InstanceNorm2d(9, affine=True), (3, 9, 5, 7)),
    "prelu": (nn.PReLU(9), (3, 9, 5, 7)),
}
ALGORITHMS = {"linear": ("gram", "direct"), "conv2d": ("gram", "direct")}


def loss(model, x):
    """No sum of squares, whose gradient vanishes behind a normalisation."""
    return torch.sigmoid(2 * model(x)).flatten(1).sum(1).mean()


def every_kernel():
    """In a process of its own, whose environment says which build it takes."""
    torch.manual_seed(0)
    torch.set_num_threads(1)
    print(torch.backends.cpu.get_cpu_capability())
    for dtype in (torch.float64, torch.float32):
        for name, (layer, shape) in LAYERS.items():
            for algorithm in (None, *ALGORITHMS.get(name, ())):
                for options in ({}, {"weight_grad": False}):
                    x = torch.randn(shape)
                    check(layer, loss, x, dtype=dtype, input_grad=True,
                          algorithm=algorithm, backend="native", **options)  # fmt: skip
        for kind in KINDS:
            rnn = KINDS[kind](3, 37, batch_first=True)
            check(net(rnn), loss, torch.randn(3, 5, 3), dtype=dtype, backend="native")
        for kind in CELLS:
            cell = Model(steps, cell=CELLS[kind](19, 37))
            check(cell, loss, torch.randn(3, 4, 19), dtype=dtype)


def steps(m, x):
    h, states = None, []
    for step in x.unbind(1):
        h = m.cell(step, h)
        states.append(h[0] if isinstance(h, tuple) else h)
    return torch.stack(states, 1)


@pytest.mark.parametrize("build", BUILDS)
def test_kernels_built_for_each_processor(build):
    mine = torch.backends.cpu.get_cpu_capability()
    if mine not in BUILDS or BUILDS.index(build) > BUILDS.index(mine):
        pytest.skip(f"this processor takes {mine}")
    # As a script, so that the sources lie on no path: they are not built.
    run = python(__file__, ATEN_CPU_CAPABILITY=build.lower())
    assert run.returncode == 0, run.stderr[-4000:]
    assert run.stdout.split()[0].lower() == build.lower()


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
        actual = ops.gram_sq_norms(a, b, True)
        assert_sq_norms(actual, truth, "gram", dtype, kind)


def test_what_an_earlier_gram_left_behind_adds_nothing():
    large = torch.full((1, 128, 300), float("nan"))
    ops.gram_sq_norms(large, large, False)
    a, b = torch.randn(3, 5, 7), torch.randn(3, 5, 9)
    sq_norms = ops.gram_sq_norms(a, b, True)
    assert_sq_norms(sq_norms, linear_truth(a, b), "gram", torch.float32)


@pytest.mark.parametrize("processor", LESSER.get(CAPABILITY, ()))
def test_the_builds_for_lesser_processors_agree_too(processor):
    here = Path(__file__).parent
    chosen = [f"{here}/test_processors.py", f"{here}/test_ops.py"]
    which = "(gram_of_rows or (norms_agree and linear) or behind) and not (emulated or reference)"
    command = ["-m", "pytest", "-q", "-p", "no:cacheprovider", *chosen, "-k", which]
    run = python(*command, ATEN_CPU_CAPABILITY=processor, OMP_NUM_THREADS="1")
    assert run.returncode == 0, run.stdout[-3000:] + run.stderr[-1000:]


if __name__ == "__main__":
    every_kernel()
