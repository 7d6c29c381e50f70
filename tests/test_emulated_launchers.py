"""Sizes at both ends: no channels, more than an int holds; the bytes of workspaces."""

import pytest
import torch
from backends import needs_emulation
from emulation.operators import operator, operators

pytestmark = needs_emulation


def test_an_image_of_no_channels_has_no_norm():
    """A slice of one with channels last: none of them, side by side."""
    x = torch.ones(2, 4, 5, 5).contiguous(memory_format=torch.channels_last)[:, :0]
    b = torch.ones(2, 3, 5, 5)
    geometry = ([3, 3], [1, 1], [1, 1], [1, 1], 1)
    for name in ("conv2d_direct_sq_norms", "conv2d_gram_sq_norms"):
        sq_norms = operator(name)(x, b, *geometry, True)
        assert torch.equal(sq_norms, torch.tensor([[0.0, 0.0], [1875.0, 1875.0]])), name
    weight, bias, sq_norms = operator("conv2d_fused")(x, b, *geometry, None, True)
    assert weight.shape == (3, 0, 3, 3)
    assert torch.equal(bias, torch.full((3,), 50.0))
    assert torch.equal(sq_norms, torch.tensor([[0.0, 0.0], [1875.0, 1875.0]]))


# More than an int holds
def _wide(*shape, dtype=torch.float32):
    """Of any size, in the memory of one number."""
    return torch.ones(1, dtype=dtype).expand(shape)


@pytest.mark.parametrize("sizes", [(1, 2**31 - 9, 1, 1), (1, 2, 2**31 - 9, 1)])
def test_what_a_tile_would_carry_past_an_int_is_refused(sizes):
    """2**31 and more is refused before, by name."""
    n, t, i, o = sizes
    a, b = _wide(n, t, i), _wide(n, t, o)
    for algorithm in ("gram", "direct"):
        with operators().dry(), pytest.raises(RuntimeError, match=f"not launch {algorithm}"):
            operator(f"{algorithm}_sq_norms")(a, b, False)


HUGE = {  # input, grad_output, padding
    "pixels": ((1 << 16, 1 << 16), (1 << 16, 1 << 16), 0),  # 2**32, which cut to an int is none
    "padding": ((1, 2**31 - 9), (3, 2**11), 1),
}


@pytest.mark.parametrize("name", HUGE)
def test_an_image_beyond_an_int_is_refused_not_cut(name):
    size, out, padding = HUGE[name]
    x, b = _wide(1, 1, *size), _wide(1, 1, *out)
    geometry = [1, 1], [1, 1 << 20 if padding else 1], [padding] * 2, [1, 1], 1
    for algorithm in ("gram", "direct"):
        with operators().dry(), pytest.raises(RuntimeError, match=f"not launch {algorithm}"):
            operator(f"conv2d_{algorithm}_sq_norms")(x, b, *geometry, False)


def test_a_bias_of_millions_is_summed():
    """More blocks of columns than a grid has along y."""
    with operators().dry():
        operator("bias_sq_norms")(_wide(2, 3, 32 * 65535 + 5))
    few = torch.arange(2 * 3 * 70.0).view(2, 3, 70)
    assert torch.equal(operator("bias_sq_norms")(few), few.sum(1).square().sum(1))


# Workspaces. N, T, I, O: gradients of all samples, or T x T of one, would be gigabytes.
LARGE = {
    "many samples": (4096, 2, 1024, 768),
    "long": (2, 1 << 16, 96, 130),
    "both": (64, 2048, 1024, 4096),
}
TILE, MULTIPROCESSORS = 128 * 192, 132


def _taken(name, *arguments, multiprocessors=MULTIPROCESSORS):
    with operators().dry(), operators().multiprocessors(multiprocessors):
        operator(name)(*arguments)
    return operators().allocated()


def test_no_rows_are_copied_for_segments_that_no_kernel_serves():
    a, g = (torch.zeros(8, size, dtype=torch.bfloat16) for size in (72, 57))
    assert _taken("segments_fused", a, g, torch.tensor([0, 3, 8]).int(), 5, True, True) == 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("shape", LARGE.values(), ids=LARGE)
def test_workspaces_are_a_small_part_of_what_they_spare(shape, dtype):
    n, t, i, o = shape
    a, b = _wide(n, t, i, dtype=dtype), _wide(n, t, o, dtype=dtype)
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    norms, gradient = 2 * n * wide.itemsize, o * (i + 1) * dtype.itemsize
    direct = max(n * gradient // 100, 1024)
    gram = direct + max(n * t * t * dtype.itemsize, n << 12) // 10
    assert _taken("rank1_sq_norms", a[:, :1], b[:, :1], True) == norms
    assert _taken("direct_sq_norms", a, b, True) <= norms + direct
    assert _taken("gram_sq_norms", a, b, True) <= norms + gram
    fused = "linear_fused", a, b, torch.ones(n, dtype=wide), True
    assert _taken(*fused, multiprocessors=1) <= norms + gradient + direct, "one part, no copies"
    copies = 2 * MULTIPROCESSORS * TILE * wide.itemsize + o * (i + 1) * wide.itemsize
    assert _taken(*fused) <= norms + gradient + direct + copies
