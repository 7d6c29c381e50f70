"""Depthwise convolutions (csrc/cuda/planes.cu) under the emulation, against float64: each window
and the loop over taps, ragged tiles, each memory order and alignment."""

from __future__ import annotations

import pytest
import torch
from backends import BACKENDS
from emulation import build
from emulation.operators import operators
from oracle import Conv2d, assert_gradient, assert_sq_norms, case, conv2d_truth

pytestmark = pytest.mark.skipif(bool(build.why_not()), reason=build.why_not())
EMULATED = BACKENDS["emulated"]
DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)


def depthwise(n, channels, size, side, stride=1, padding=0, multiplier=1):
    pairs = (side, side), (stride, stride), (padding, padding)
    return Conv2d(n, channels, channels * multiplier, size, *pairs, groups=channels)


PROBLEMS = {
    "7x7, two slabs, ragged": depthwise(3, 40, (9, 12), 7, padding=3),
    "7x7, several tiles": depthwise(2, 8, (19, 37), 7, padding=3),
    "7x7, one output": depthwise(2, 9, (7, 7), 7),
    "7x7, stride 2: by taps, in two passes": depthwise(2, 8, (13, 9), 7, 2, 3),
    "5x5, odd channels, image below the kernel": depthwise(2, 11, (4, 3), 5, padding=2),
    "5x5, stride 2": depthwise(2, 33, (18, 15), 5, 2, 2),
    "3x3, several tiles": depthwise(2, 8, (21, 18), 3, padding=1),
    "3x3, stride 2, two a channel": depthwise(2, 9, (17, 35), 3, 2, 1, multiplier=2),
    "3x3, tiles of nothing but padding": depthwise(2, 8, (2, 3), 3, padding=19),
    "3x3, sides of its own": Conv2d(2, 8, 8, (6, 9), (3, 3), padding=(0, 2), groups=8),
    "3x3, strides of its own": Conv2d(2, 8, 8, (6, 9), (3, 3), (2, 1), (1, 1), groups=8),
    "3x3, dilation: by taps": Conv2d(2, 8, 8, (9, 7), (3, 3), (1, 1), (2, 2), (2, 2), 8),
}


def in_order(x):
    return x


def channels_last(x):
    return x.contiguous(memory_format=torch.channels_last)


def cut_from(x, channels, first):
    """Return x as some channels of a wider channels_last tensor."""
    wide = channels_last(x.new_full((len(x), channels, *x.shape[2:]), float("nan")))
    return wide[:, first : first + x.shape[1]].copy_(x)


def misaligned(x):
    return cut_from(x, x.shape[1] + 2, 1)


def in_aligned_rows(x):
    return cut_from(x, -(-x.shape[1] // 8) * 8, 0)


LAYOUTS = {  # of the image, and of grad_output
    "NCHW": (in_order, in_order),
    "channels_last": (channels_last, channels_last),
    "misaligned": (misaligned, misaligned),
    "one aligned": (channels_last, misaligned),
    "aligned rows of any length": (in_aligned_rows, in_aligned_rows),
}


def laid_out(layout, *operands):
    return [lay(x) for lay, x in zip(LAYOUTS[layout], operands, strict=True)]


def assert_right(problem, x, b, truth):
    """Norms of each way, and gradients scaled by a factor for each sample, zero among them."""
    scale = torch.arange(problem.n, dtype=torch.float32) - 1
    for way in ("direct", "fused"):
        assert_sq_norms(EMULATED.conv2d(way, x, b, problem), truth, way, x.dtype)
    weight, bias, _ = EMULATED.conv2d_fused(x, b, problem, scale)
    factors, terms = scale.double(), truth.terms[0] * problem.n
    for actual, each, magnitude in (
        (weight, truth.weight, truth.weight_magnitude),
        (bias, truth.bias, truth.bias_magnitude),
    ):
        expected = torch.tensordot(factors, each, dims=1)
        assert_gradient(actual, expected, torch.tensordot(factors.abs(), magnitude, dims=1), terms)


@pytest.mark.grid("dtype", "layout")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", PROBLEMS)
def test_every_kernel_is_right_in_every_layout(name, layout, dtype):
    x, b, truth = case(PROBLEMS[name], dtype, "gaussians")
    assert_right(PROBLEMS[name], *laid_out(layout, x, b), truth)


@pytest.mark.grid(pairs=False)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", ["7x7, two slabs, ragged", "5x5, stride 2"])
def test_the_order_of_threads_does_not_matter(name, dtype):
    problem = PROBLEMS[name]
    x, b = map(channels_last, problem.operands(dtype, "gaussians"))
    forward = EMULATED.conv2d_fused(x, b, problem)
    for order in ("reverse", "shuffled"):
        with operators().order(order):
            assert all(map(torch.equal, forward, EMULATED.conv2d_fused(x, b, problem)))


@pytest.mark.parametrize("layout", ["NCHW", "channels_last"])
@pytest.mark.parametrize("side", [3, 5])
def test_pixels_beyond_the_last_outputs_reach_may_be_infinite(side, layout):
    """19 outputs along each side: two tiles, the second cut in the middle of two rows."""
    reach = 18 * 2 + side
    problem = depthwise(1, 8, (reach + 1, reach + 1), side, 2)
    x, b = problem.operands(torch.float32, "gaussians")
    x[..., reach, :] = x[..., reach] = float("inf")
    truth = conv2d_truth(x, b, problem)
    assert truth.weight.isfinite().all()
    x, b = laid_out(layout, x, b)
    assert_sq_norms(EMULATED.conv2d("direct", x, b, problem), truth, "direct", x.dtype)


def test_a_sample_of_factor_zero_is_left_out_whatever_it_holds():
    problem = PROBLEMS["7x7, two slabs, ragged"]
    x, b = problem.operands(torch.bfloat16, "gaussians")
    without = EMULATED.conv2d_fused(x[::2], b[::2], problem)
    x[1], b[1] = float("nan"), float("inf")
    scale = torch.tensor([1.0, 0.0, 1.0])
    weight, bias, _ = EMULATED.conv2d_fused(*map(channels_last, (x, b)), problem, scale)
    torch.testing.assert_close((weight, bias), without[:2])


def test_blocks_of_several_samples_are_right():
    """Sixteen pairs of channels a group and 65 samples: 64 blocks of four warps for each pair."""
    problem = Conv2d(65, 32, 32, (3, 2), (3, 3), padding=(1, 1), groups=8)
    assert_right(problem, *case(problem, torch.bfloat16, "gaussians"))


def battery(dtype):
    """Raise what the tests above would; for planted bugs."""
    for problem in PROBLEMS.values():
        x, b, truth = case(problem, dtype, "gaussians")
        for layout in LAYOUTS:
            assert_right(problem, *laid_out(layout, x, b), truth)
    if dtype is torch.float32:
        test_pixels_beyond_the_last_outputs_reach_may_be_infinite(3, "channels_last")
    if dtype is torch.bfloat16:
        test_blocks_of_several_samples_are_right()
