"""The oracle for tables looked up by id: the framework's embedding in float64, sample by sample."""

from functools import cache
from typing import NamedTuple

import torch
from oracle import Kind, _sq_norm, accumulation_epsilon, assert_within, draw, sum_of_squares
from torch import Tensor
from torch.nn import functional as F


class Gather(NamedTuple):
    n: int
    t: int
    v: int  # ids are drawn from [0, v)
    d: int

    def operands(self, dtype: torch.dtype, kind: Kind) -> tuple[Tensor, Tensor]:
        n, t, v, d = self
        indices = torch.randint(0, max(1, v), (n, t), generator=torch.Generator().manual_seed(2))
        return indices, draw((n, t, d), dtype, kind, 0)

    def linear(self, s: int, dtype: torch.dtype, kind: Kind) -> tuple[Tensor, Tensor]:
        """Operands of a Linear with the same weight: [N, S, D], [N, S, V]"""
        n, _, v, d = self
        return draw((n, s, d), dtype, kind, 3), draw((n, s, v), dtype, kind, 4)


GATHER = [
    Gather(0, 5, 3, 7), Gather(3, 0, 3, 7), Gather(3, 5, 3, 0),  # no samples, no positions
    Gather(1, 1, 1, 1), Gather(4, 1, 50, 33), Gather(3, 17, 1, 5),  # one id, all the time
    Gather(3, 33, 7, 31), Gather(3, 40, 100_000, 17),  # ids of three bytes, hardly one twice
    Gather(2, 300, 257, 64), Gather(33, 5, 4, 16),  # more samples than threads
]  # fmt: skip


def gradients(indices: Tensor, grads: Tensor, v: int, padding_idx: int | None) -> Tensor:
    """[N, V, D]"""
    each = [torch.zeros(0, v, grads.shape[2], dtype=torch.float64)]
    for ids, g in zip(indices, grads.detach().cpu().double(), strict=True):
        table = torch.zeros(v, grads.shape[2], dtype=torch.float64, requires_grad=True)
        rows = F.embedding(ids, table, padding_idx=padding_idx)
        each.append(torch.autograd.grad(rows, table, g)[0][None])
    return torch.cat(each)


def assert_sq_norms(actual, indices, grads, v, padding_idx, kind):
    """actual: [N]"""
    dtype = grads.dtype
    g = gradients(indices, grads, v, padding_idx)
    magnitude = gradients(indices, grads.abs(), v, padding_idx)
    expected = _sq_norm(g)
    allowance = 2 * accumulation_epsilon(dtype) * expected
    if kind == "gaussians":
        occupied = max(1, grads.shape[1] * grads.shape[2])
        allowance = sum_of_squares(g, magnitude, grads.shape[1], occupied, dtype)
    assert_within(actual, expected, allowance, dtype)


@cache
def dots(
    problem: Gather, s: int, dtype: torch.dtype, kind: Kind, padding_idx: int | None
) -> tuple[Tensor, Tensor]:
    """<E_n, H_n> and the same of absolute values [N]"""
    indices, grads = problem.operands(dtype, kind)
    a, b = (t.double() for t in problem.linear(s, dtype, kind))
    e = gradients(indices, grads, problem.v, padding_idx)
    magnitude = gradients(indices, grads.abs(), problem.v, padding_idx)
    h, size = b.mT @ a, b.abs().mT @ a.abs()
    return (e * h).sum((1, 2)), (magnitude * size).sum((1, 2))
