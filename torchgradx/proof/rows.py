"""Rows of an output's gradient, as far as a proof compares them between backwards (layout.py)."""

from __future__ import annotations

from dataclasses import dataclass
from math import inf, sqrt
from typing import Any

import torch
from torch import Tensor

__all__ = ["Rows"]


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
    half: bool  # something on the way here had float16

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
