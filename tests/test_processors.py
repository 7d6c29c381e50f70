"""The CPU kernels as they are built for other processors, of which ATen's own switch chooses one.

In a process for each build that this processor can run and would not choose: products of rows and
patches, normalisations, and the gates of recurrent layers, at sizes off every vector.
"""

import os
import subprocess
import sys

import pytest
import torch
from attach_oracle import Model, check
from recurrent_models import CELLS, KINDS, net
from torch import nn

from torchgradx import ops

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


@pytest.mark.skipif(not ops.NATIVE, reason="there are no kernels without the extension")
@pytest.mark.parametrize("build", BUILDS)
def test_kernels_built_for_each_processor(build):
    mine = torch.backends.cpu.get_cpu_capability()
    if mine not in BUILDS or BUILDS.index(build) > BUILDS.index(mine):
        pytest.skip(f"this processor takes {mine}")
    run = subprocess.run(  # as a script, so that the sources lie on no path: they are not built
        [sys.executable, __file__], env={**os.environ, "ATEN_CPU_CAPABILITY": build.lower()},
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert run.returncode == 0, run.stderr[-4000:]
    assert run.stdout.split()[0].lower() == build.lower()


if __name__ == "__main__":
    every_kernel()
