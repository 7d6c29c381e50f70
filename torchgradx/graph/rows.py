"""Seeds of the backwards that prove where samples are (layout.py), and what is kept of their rows.

Seeds are random numbers, the same each time, those of sample n times a power of two. Projections of
the rows are compared between backwards.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import combinations, islice
from math import comb, inf, sqrt
from typing import Any

import torch
from torch import Tensor

SILENT = -10000  # an exponent: the seed is zero


def seeded_root(t: Tensor, exponents: Tensor, dim: int | Tensor) -> Tensor:
    """Return a number whose gradient by `t` is random, that of sample n times 2^exponents[n]; a
    Tensor says of which sample each leading row is, the last one being of none, and zero."""
    generator = torch.Generator(t.device).manual_seed(t.numel())
    gradient = torch.randn(t.shape, generator=generator, device=t.device).to(t.dtype)
    exponents = exponents.to(t.device, torch.int32)
    if isinstance(dim, Tensor):
        rows = gradient.view(len(dim), -1)
        rows.ldexp_(exponents[dim][:, None]).masked_fill_(dim[:, None] == len(exponents) - 1, 0)
    else:
        gradient.ldexp_(exponents.view([-1 if k == dim else 1 for k in range(t.dim())]))
    with torch.enable_grad():
        root = t.sum()  # autograd.grad given a gradient imports sympy, 35 MiB
    assert root.grad_fn
    root.grad_fn.register_hook(lambda *_: (gradient,))
    return root


def digits_of(n: int, base: int) -> list[Tensor]:
    """Return exponents [N] below `base`, whose combination is another for each sample."""
    samples = torch.arange(n)
    digits: list[Tensor] = []
    while not digits or base ** len(digits) < n:
        digits.append(samples // base ** len(digits) % base)
    return digits


def halves(n: int) -> list[Tensor]:
    """Return masks [N]: each sample is False in as many, and no two samples in the same ones."""
    count = next(k for k in range(2, n + 2) if comb(k, k // 2) >= n)
    chosen = list(islice(combinations(range(count), count // 2), n))
    return [torch.tensor([k not in mine for mine in chosen]) for k in range(count)]


@dataclass(frozen=True)
class Rows:
    """An output gradient, as far as it is kept: projections of its rows, which are scaled as they
    are.

    Each projection of what another sample added is a random number of that one's size, so that four
    of them miss nothing that is not as small as rounding.
    """

    elements: int
    projections: Tensor  # [rows, up to 4]
    sizes: Tensor  # [rows, 1]
    close: float  # how near a projection comes, over its row's size
    floor: float  # of sizes: below it subnormal numbers may have made the difference
    half: bool  # some tensor above had float16

    @property
    def key(self) -> Any:
        kept = self.projections
        return kept.shape, kept.dtype, kept.device, self.close, self.floor, self.half

    @staticmethod
    def of(g: Tensor, count: int, half: bool) -> Rows:
        # Scaling by powers of two rounds nothing, but for numbers that became subnormal: many do
        # in float16.
        close = 1e-2 if half else 1e-5
        count = count if count and g.numel() % count == 0 else 1
        elements = g.numel()
        g = torch.view_as_real(g.detach().resolve_conj()) if g.is_complex() else g
        wide = torch.float64 if g.dtype == torch.float64 else torch.float32
        rows = g.detach().reshape(count, -1 if g.numel() else 0).to(wide)
        if not elements:
            return Rows(0, rows, rows, close, 0.0, half)
        columns = rows.shape[1]
        sizes, most = (torch.linalg.vector_norm(rows, p, 1, True) for p in (2, inf))
        sizes = sizes.minimum(most * sqrt(columns))  # where squares overflow
        if columns <= 4:  # no larger for being projected
            kept = rows.clone()
        else:
            generator = torch.Generator(rows.device).manual_seed(columns)  # the same each time
            onto = torch.randn(columns, 4, generator=generator, dtype=wide, device=rows.device)
            with torch.autocast(g.device.type, enabled=False):
                kept = rows @ onto
        tiny = torch.finfo(torch.float16 if half else torch.float32).tiny
        floor = tiny * sqrt(columns) if half else tiny / close
        return Rows(elements, kept, sizes, close, floor, half)
