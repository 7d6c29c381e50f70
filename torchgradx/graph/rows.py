"""Seeds of the backwards that prove where the samples are (layout.py), and summaries of gradients.

A seed is a random gradient of an output, the same in every backward. That of sample n is multiplied
by a power of two. Backwards are compared by random projections of the rows, since a copy of each
gradient would take memory.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import combinations, islice
from math import comb, inf, sqrt
from typing import Any

import torch
from torch import Tensor

SILENT = -10000  # an exponent that makes the seed zero


def seeded_root(t: Tensor, exponents: Tensor, dim: int | Tensor) -> Tensor:
    """Return a number whose gradient with respect to `t` is random, times 2^exponents[n].
    dim: the dimension of the samples, or the sample of each leading row as a Tensor [rows], -1 for
    rows of no sample, whose gradient is zero."""
    generator = torch.Generator(t.device).manual_seed(t.numel())
    gradient = torch.randn(t.shape, generator=generator, device=t.device).to(t.dtype)
    exponents = exponents.to(t.device, torch.int32)
    if isinstance(dim, Tensor):
        rows = gradient.view(len(dim), -1)
        rows.ldexp_(exponents[dim][:, None]).masked_fill_(dim[:, None] < 0, 0)
    else:
        gradient.ldexp_(exponents.view([-1 if k == dim else 1 for k in range(t.dim())]))
    with torch.enable_grad():
        root = t.sum()  # autograd.grad with a gradient as argument imports sympy: 35 MiB
    assert root.grad_fn
    root.grad_fn.register_hook(lambda *_: (gradient,))
    return root


def digits_of(n: int, base: int) -> list[Tensor]:
    """Return exponents [N] below `base`, one tensor per backward: the digits of each sample's n."""
    samples = torch.arange(n, device="cpu")
    digits: list[Tensor] = []
    while not digits or base ** len(digits) < n:
        digits.append(samples // base ** len(digits) % base)
    return digits


def halves(n: int) -> list[Tensor]:
    """Return masks [N] that are False for each sample equally often, for no two in the same masks.
    So for any two samples there is a mask that contains one and not the other."""
    count = next(k for k in range(2, n + 2) if comb(k, k // 2) >= n)
    subsets = list(islice(combinations(range(count), count // 2), n))
    return [torch.tensor([k not in s for s in subsets], device="cpu") for k in range(count)]


@dataclass(frozen=True)
class RowSummary:
    """Projections and norms of the rows of an output gradient, which scale as the rows do.
    If another sample contributed to a row, each projection contains a random number as large as
    that contribution. Four of them miss only what is as small as rounding."""

    elements: int  # of the gradient
    projections: Tensor  # [rows, up to 4]
    norms: Tensor  # [rows, 1]
    tolerance: float  # error of a projection, relative to the norm of its row
    floor: float  # below this norm, subnormal numbers may have caused the error

    @property
    def key(self) -> Any:
        """Return a key that is equal for summaries that can be stacked and compared at once."""
        return self.projections.shape, self.projections.dtype, self.projections.device, self.floor

    @staticmethod
    def of(g: Tensor, count: int, half: bool) -> RowSummary:
        """Summarise a gradient of `count` rows. half: some gradient above it is float16."""
        # Scaling by powers of two rounds nothing, except numbers that become subnormal: many do
        # in float16.
        tolerance = 1e-2 if half else 1e-5
        elements = g.numel()
        count = count if count and elements % count == 0 else 1
        g = torch.view_as_real(g.detach().resolve_conj()) if g.is_complex() else g
        wide = torch.float64 if g.dtype == torch.float64 else torch.float32
        rows = g.detach().reshape(count, -1 if g.numel() else 0).to(wide)
        if not elements:
            return RowSummary(0, rows, rows, tolerance, 0.0)
        columns = rows.shape[1]
        norms, largest = (torch.linalg.vector_norm(rows, p, 1, True) for p in (2, inf))
        norms = norms.minimum(largest * sqrt(columns))  # where squares overflow
        if columns <= 4:  # projections would not be smaller
            projections = rows.clone()
        else:
            generator = torch.Generator(rows.device).manual_seed(columns)  # the same each time
            onto = torch.randn(columns, 4, generator=generator, dtype=wide, device=rows.device)
            with torch.autocast(g.device.type, enabled=False):
                projections = rows @ onto
        tiny = torch.finfo(torch.float16 if half else torch.float32).tiny
        floor = tiny * sqrt(columns) if half else tiny / tolerance
        return RowSummary(elements, projections, norms, tolerance, floor)
