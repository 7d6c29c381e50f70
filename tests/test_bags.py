"""An EmbeddingBag's norms against the framework's own gradient, a bag at a time."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from torchgradx.sites.bags import embedding_bag_sq_norms


def _expected(
    ids: list[Tensor], g: Tensor, mode: str, weights: list[Tensor] | None, padding_idx: int | None
) -> Tensor:
    norms = []
    for n, bag in enumerate(ids):
        table = torch.randn(9, g.shape[1], dtype=torch.float64, requires_grad=True)
        of_bag = None if weights is None else weights[n].double()
        out = F.embedding_bag(
            bag,
            table,
            torch.tensor([0]),
            mode=mode,
            per_sample_weights=of_bag,
            padding_idx=padding_idx,
        )
        norms.append(torch.autograd.grad(out, table, g[n : n + 1].double())[0].square().sum())
    return torch.stack(norms)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("padding_idx", [None, 2])
@pytest.mark.parametrize("last", [False, True])
@pytest.mark.parametrize("mode", ["sum", "mean", "max", "weighted"])
def test_bags_of_any_size(
    mode: str, last: bool, padding_idx: int | None, dtype: torch.dtype
) -> None:
    torch.manual_seed(0)
    sizes = [3, 0, 1, 7, 2, 0]
    ids = [torch.randint(0, 9 if n != 4 else 3, (size,)) for n, size in enumerate(sizes)]
    ids[4][:] = 2  # nothing but padding, where that is 2
    weights = [torch.randn(size) for size in sizes] if mode == "weighted" else None
    mode = "sum" if mode == "weighted" else mode
    g = torch.randn(len(sizes), 5).to(dtype)
    offsets = torch.tensor([0, *sizes]).cumsum(0)[: None if last else -1]
    flat = None if weights is None else torch.cat(weights)
    actual = embedding_bag_sq_norms(torch.cat(ids), g, offsets, mode, flat, padding_idx)
    assert actual.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    expected = _expected(ids, g, mode, weights, padding_idx)
    torch.testing.assert_close(actual.double(), expected, rtol=1e-6, atol=0)


@pytest.mark.parametrize("mode", ["sum", "mean", "max"])
def test_bags_of_one_size(mode: str) -> None:
    ids, g = torch.randint(0, 9, (4, 6)), torch.randn(4, 5)
    actual = embedding_bag_sq_norms(ids, g, None, mode, None, None)
    expected = _expected(list(ids), g, mode, None, None)
    torch.testing.assert_close(actual.double(), expected, rtol=1e-6, atol=0)


def test_no_bags() -> None:
    none = torch.zeros(0, dtype=torch.int64)
    assert embedding_bag_sq_norms(none, torch.zeros(0, 5), none, "sum", None, None).shape == (0,)
