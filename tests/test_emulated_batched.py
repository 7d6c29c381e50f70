"""The ways that a GPU's batched products serve, emulated but for the products themselves; runs of a
few kilobytes, so that small problems have several."""

import pytest
import test_dropped_samples as dropped
import test_emulated as emulated
import test_properties
import torch
from backends import EMULATED, needs_emulation
from emulation.operators import operators
from oracle import DTYPES, LINEAR, Conv2d, Linear
from test_emulated import assert_right

pytestmark = needs_emulation
POINTWISE = [
    Conv2d(3, 4, 6, (8, 8), (1, 1)),
    Conv2d(2, 5, 6, (24, 23), (1, 1), (2, 2)),
    Conv2d(2, 6, 8, (12, 12), (1, 1)),
]


@pytest.fixture(autouse=True)
def batched():
    with operators().batched():
        yield


@pytest.mark.grid(pairs=False)
@pytest.mark.parametrize("kind", ["integers", "gaussians"])
@pytest.mark.parametrize("problem", [*LINEAR, *POINTWISE])
def test_batched_ways_are_right(problem, kind):
    for dtype in DTYPES if kind == "gaussians" else (torch.float32,):
        a, b = problem.operands(dtype, kind)
        assert_right(problem, a, b, kind)


def test_operands_of_two_orders_are_put_into_one():
    """A half's patches are copied along channels, and neither operand's come first here."""
    for problem in (Conv2d(3, 8, 16, (6, 5), (3, 3), padding=(1, 1)), POINTWISE[0]):
        a, b = problem.operands(torch.bfloat16, "gaussians")
        first, second = (x.contiguous(memory_format=torch.channels_last) for x in (a, b))
        for x, g in ((a, b), (first, b), (a, second), (first, second)):
            assert_right(problem, x, g, "gaussians")


def test_thread_orders_do_not_matter():
    problem = Linear(9, 136, 17, 23)
    emulated.test_the_order_of_threads_does_not_matter(problem, torch.float32, False, bool)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("rows", ["activations", "grad_output"])
def test_a_batched_gram_that_cancels_is_noticed(rows, dtype):
    test_properties.test_a_gram_that_cancels_is_noticed(EMULATED, rows, dtype)


@pytest.mark.grid(pairs=False)
@pytest.mark.parametrize("sizes", [*dropped.LINEAR, (3, 16, 8), (40, 24, 40)])
def test_one_sum_leaves_samples_out(sizes):
    """Nan and inf of a sample of factor 0 must not reach the product of a scaled copy."""
    for dtype in (torch.float64, torch.float32, torch.bfloat16):
        dropped.test_linear(EMULATED, dtype, "linear_scaled", *sizes)


@pytest.mark.parametrize("kind", dropped.CONV)
def test_one_convolution_leaves_samples_out(kind):
    for dtype in (torch.float64, torch.float32, torch.bfloat16):
        dropped.test_convolutions(EMULATED, dtype, "conv2d_scaled", kind)


def test_one_sum_takes_operands_as_they_lie():
    """Sequence first, expanded, channels last, unaligned: as the same values in row-major order."""
    scale = torch.tensor([0.5, 0.0, -2.0])
    rows = torch.randn(7, 3, 24), torch.randn(3, 1, 24).expand(3, 7, 24), torch.randn(3, 7, 25)
    for x in (rows[0].transpose(0, 1), rows[1], rows[2][..., 1:]):
        scaled = EMULATED.operator("linear_scaled")
        lying, plain = (scaled(t, t, scale, True) for t in (x, x.contiguous()))
        torch.testing.assert_close(lying, plain)
    x, b = torch.randn(3, 16, 5, 5), torch.randn(3, 8, 5, 5)
    turned = [t.contiguous(memory_format=torch.channels_last) for t in (x, b)]
    geometry = (3, 3), (1, 1), (1, 1), (1, 1), 1
    plain = EMULATED.operator("conv2d_scaled")(x, b, *geometry, scale, True)
    for first, second in ((turned[0], turned[1]), (x, turned[1]), (turned[0], b)):
        found = EMULATED.operator("conv2d_scaled")(first, second, *geometry, scale, True)
        torch.testing.assert_close(found, plain, rtol=1e-5, atol=1e-5)


def test_halves_beyond_their_range_are_summed_in_float32():
    test_properties.test_large_half_operands_do_not_overflow(EMULATED, 16)
