"""Copies between planes and channels last against the framework's own."""

import pytest
import torch
from backends import each_dtype, to
from layouts import offset

# N, R, C: whole pieces and tiles, several tiles, tails of either side, pieces of one element alone
SIZES = [
    (2, 8, 8), (3, 128, 128), (2, 196, 64), (1, 260, 132), (2, 49, 96), (2, 33, 31), (3, 6, 3),
    (1, 2, 300), (2, 300, 2), (2, 1, 5), (2, 5, 1), (0, 4, 4), (2, 0, 4),
]  # fmt: skip
LAYOUTS = {
    "turned": lambda x: x.mT.contiguous().mT,
    "contiguous": lambda x: x,
    "of larger": lambda x: torch.cat([x, x], 2).mT.contiguous().mT[:, :, : x.shape[2]],
    "rows cut": lambda x: torch.cat([x, x], 1).mT.contiguous().mT[:, 1 : 1 + x.shape[1]],
    "offset": lambda x: offset(x.mT.contiguous()).mT,
    "one sample expanded": lambda x: x[:1].mT.contiguous().mT.expand_as(x),
    "one number expanded": lambda x: x[:1, :1, :1].expand_as(x),
    "every other": lambda x: x.repeat_interleave(2, 1)[:, ::2],
}


@pytest.mark.grid("backend")
@each_dtype
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("size", SIZES, ids=lambda s: "-".join(map(str, s)))
def test_a_turned_copy_is_contiguous_and_the_same(backend, size, layout, dtype):
    x = LAYOUTS[layout](torch.randn(size).to(dtype))
    (given,) = to(backend, x)
    made = backend.operator("turned")(given).cpu()
    assert made.is_contiguous()
    assert torch.equal(made, x)
