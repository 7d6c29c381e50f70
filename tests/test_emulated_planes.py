"""Depthwise convolutions (csrc/cuda/planes.cu) under the emulation, against float64: each window
and the loop over taps, ragged tiles, each memory order and alignment."""

import pytest
import test_emulated as emulated
import torch
from oracle import Conv2d

pytestmark = emulated.pytestmark


def depthwise(n, channels, size, side, stride=1, padding=0, multiplier=1):
    pairs = (side, side), (stride, stride), (padding, padding)
    return Conv2d(n, channels, channels * multiplier, size, *pairs, groups=channels)


PROBLEMS = (
    depthwise(3, 40, (9, 12), 7, padding=3),  # two slabs of planes, ragged rows
    depthwise(2, 8, (19, 37), 7, padding=3),  # several tiles
    depthwise(2, 9, (7, 7), 7),  # one output
    depthwise(2, 8, (13, 9), 7, 2, 3),  # by taps, in two passes
    depthwise(2, 11, (4, 3), 5, padding=2),  # an image smaller than the kernel
    depthwise(2, 33, (18, 15), 5, 2, 2),
    depthwise(2, 8, (21, 18), 3, padding=1),
    depthwise(2, 9, (17, 35), 3, 2, 1, multiplier=2),
    depthwise(2, 8, (2, 3), 3, padding=19),  # tiles of padding alone
    Conv2d(2, 8, 8, (6, 9), (3, 3), padding=(0, 2), groups=8),
    Conv2d(2, 8, 8, (6, 9), (3, 3), (2, 1), (1, 1), groups=8),  # by taps
    Conv2d(2, 8, 8, (9, 7), (3, 3), (1, 1), (2, 2), (2, 2), 8),  # by taps
    Conv2d(1, 8, 8, (16, 13), (3, 3), (1, 1), (2, 2), (2, 2), 8),  # static memory makes it 48 KB
)


def cut_from(x, channels, first):
    """Return x as some channels of a wider channels_last tensor."""
    wide = x.new_full((len(x), channels, *x.shape[2:]), float("nan"))
    wide = wide.contiguous(memory_format=torch.channels_last)
    return wide[:, first : first + x.shape[1]].copy_(x)


LAYOUTS = {
    "contiguous": torch.Tensor.contiguous,
    "channels_last": emulated._turned,
    "misaligned": lambda x: cut_from(x, x.shape[1] + 2, 1),
    "aligned": lambda x: cut_from(x, -(-x.shape[1] // 8) * 8, 0),
}
PAIRS = [*((name, name) for name in LAYOUTS), ("channels_last", "misaligned")]


def assert_right(problem, dtype, image, gradient):
    x, b = problem.operands(dtype, "gaussians")
    x, b = LAYOUTS[image](x), LAYOUTS[gradient](b)
    emulated.assert_right(problem, x, b, "gaussians", ways=("direct", "fused"))


@pytest.mark.grid("dtype", "image")
@pytest.mark.parametrize("dtype", emulated.DTYPES, ids=str)
@pytest.mark.parametrize(("image", "gradient"), PAIRS)
@pytest.mark.parametrize("problem", PROBLEMS, ids=str)
def test_every_kernel_is_right_in_every_layout(problem, image, gradient, dtype):
    assert_right(problem, dtype, image, gradient)


def test_blocks_of_several_samples_are_right():
    """Sixteen pairs of channels a group and 65 samples: 64 blocks of four warps for each pair."""
    assert_right(Conv2d(65, 32, 32, (3, 2), (3, 3), padding=(1, 1), groups=8),
                 torch.bfloat16, "contiguous", "contiguous")  # fmt: skip
