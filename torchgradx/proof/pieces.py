"""Samples that are taken apart, and whether pieces are joined in another order than the batch's, as
cat([x[2:], x[:2]]) does. Of a piece its first sample is followed through whatever is done to it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import Tensor

from .order import PARTS, argument_of, indices_of
from .sample_dims import view_of

__all__ = ["Firsts", "Pieces"]

CHOSEN = -1  # by the batch, or not in a row: where it belongs nobody knows
Firsts = Callable[[int], int | None]  # of an operation's k-th result the first sample; None: of all


class Pieces:
    """Of one forward."""

    def __init__(self, n: int, batch_dim: int) -> None:
        self._n, self._batch_dim = n, batch_dim
        self._first: dict[Any, int] = {}

    def keep(self, t: Tensor, first: int | None) -> None:
        if first is None:
            self._first.pop(view_of(t), None)
        else:
            self._first[view_of(t)] = first

    def made(
        self, func: Any, args: Sequence[Any], kwargs: Any, fed: Sequence[Tensor], dim: int | None
    ) -> tuple[Firsts, bool]:
        """Of an operation that is yet to run, and whether it joins pieces in another order.
        `fed`: the operands that samples entered; `dim`: where they are in the first of these."""
        name: str = func._schema.name.partition("::")[2].rstrip("_")
        if dim is not None and fed[0] is args[0] and fed[0].shape[dim] == self._n:
            firsts = self._taken(name, func, args, kwargs, dim)
            if firsts is not None:
                return firsts, False
        held = [self._first.get(view_of(t)) for t in fed]
        known = [first for first in held if first is not None]
        one = held[0] if len(set(held)) == 1 else None
        joins = name in ("cat", "stack") and bool(known) and len(args[0]) > 1
        if name == "copy" and held[-1] is not None:
            moved = self._row(args[0]) not in (None, held[-1])
        elif joins and name == "cat" and self._whole(func, args, kwargs):
            along = argument_of(func, args, kwargs, "dim") or 0
            starts = [0, *accumulate(t.shape[along] for t in args[0])]
            found = [self._first.get(view_of(t)) for t in args[0]]
            moved = any(a not in (None, b) for a, b in zip(found, starts, strict=False))
        else:
            moved = joins and one is None and any(b <= a for a, b in pairwise(known))
        return lambda k: one, moved

    def _whole(self, func: Any, args: Sequence[Any], kwargs: Any) -> bool:
        """Whether pieces become as many rows as there are samples."""
        along = argument_of(func, args, kwargs, "dim") or 0
        return sum(t.shape[along] for t in args[0]) == self._n

    def _taken(
        self, name: str, func: Any, args: Sequence[Any], kwargs: Any, dim: int
    ) -> Firsts | None:
        """None: it takes no samples apart."""
        if name in ("index", "index_select"):
            _, index = next(indices_of(func, args))
            chosen = index[dim] if dim < len(index) else None
            if chosen is None or chosen.dim() != 1:
                return None
            some = chosen.dtype is torch.bool or len(chosen) < self._n
            return (lambda k: CHOSEN) if some else None
        along = argument_of(func, args, kwargs, "dim") or 0
        if name not in {*PARTS, "slice"} or along % args[0].dim() != dim:
            return None
        if name == "slice":
            limits = (argument_of(func, args, kwargs, key) for key in ("start", "end", "step"))
            start, end, step = slice(*limits).indices(self._n)
            whole = (start, end, step) == (0, self._n, 1)
            return None if whole else lambda k: start if step == 1 else CHOSEN
        if name in ("select", "unbind"):
            return lambda k: args[2] % self._n if name == "select" else k
        sizes = args[1] if name == "split_with_sizes" else [args[1]] * self._n
        starts = [0, *accumulate(sizes)]
        return lambda k: starts[k]

    def _row(self, t: Tensor) -> int | None:
        """Where a part of a tensor begins that has as many rows as there are samples."""
        base, dim = t._base, self._batch_dim
        if base is None or base.dim() <= dim or base.shape[dim] != self._n:
            return None
        offset = t.storage_offset() - base.storage_offset()
        whole = t.numel() == base.numel()
        return None if whole else offset // max(1, base.stride(dim)) % self._n
