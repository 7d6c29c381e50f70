"""Norms of a parameter used several times by rows that are not n*T+t.

Samples that have as many rows in each of the uses are a batch by themselves: norms.py's.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ..reference.chunks import accumulation_dtype
from .norms import Term, combine

__all__ = ["combine_segments"]


def combine_segments(n: int, terms: Sequence[Term], owners: Sequence[Tensor | None]) -> Tensor:
    """[N] squared norms of the sum of all terms of one parameter.

    owners: for each term the sample of each of its rows [rows, *], N where it is of none; None: it
    holds the samples in front.
    """
    wide = accumulation_dtype(terms[0][2].dtype)
    sq_norms = torch.zeros(n, dtype=wide, device=terms[0][2].device)
    # those of one sample one after another; of how many rows, and from where
    orders = [None if rows is None else rows.argsort(stable=True) for rows in owners]
    counts = [None if rows is None else torch.bincount(rows, minlength=n + 1)[:n]
              for rows in owners]  # fmt: skip
    firsts = [None if c is None else c.cumsum(0) - c for c in counts]
    lengths = torch.stack([c for c in counts if c is not None]).T.tolist()
    alike: dict[tuple[int, ...], list[int]] = {}
    for sample, each in enumerate(lengths):
        alike.setdefault(tuple(each), []).append(sample)
    for each, members in alike.items():
        samples = torch.tensor(members, device=sq_norms.device)
        length, parts = iter(each), []
        for (layer, a, g), order, first in zip(terms, orders, firsts, strict=True):
            if order is None or first is None:
                parts.append((layer, a if a is None else a[samples], g[samples]))
                continue
            t = next(length)
            if not t:
                continue
            rows = order[first[samples][:, None] + torch.arange(t, device=order.device)]
            parts.append((layer, None if a is None else a[rows], g[rows]))
        if parts:
            sq_norms[samples] = combine(len(members), parts).to(wide)
    return sq_norms
