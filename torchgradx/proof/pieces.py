"""Samples that are taken apart, and whether pieces are joined in another order than the batch's, as
cat([x[2:], x[:2]]) does. Which samples a piece has is followed through whatever is done to it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from .memory import view_of
from .operation import argument_of, indices_of, name_of, real
from .order import PARTS, SOURCES
from .sample_dims import Place

__all__ = ["JOINS", "Chosen", "Pieces", "Samples", "Taken"]

Samples = tuple[int, ...]  # of each row of a piece
PADDING = -1  # a row of none
JOINS = {"_nested_tensor_from_tensor_list", "cat", "stack"}


class Chosen(tuple[int, ...]):
    """The batch chose these rows; of no number where nobody knows which."""


Taken = Callable[[int], Samples | None]  # of an operation's k-th result; None: of all, in order


class Pieces:
    """Of one forward."""

    def __init__(self, n: int, batch_dim: int) -> None:
        self._all, self._batch_dim = tuple(range(n)), batch_dim
        self._samples: dict[Any, Samples] = {}

    def of(self, t: Tensor) -> Samples | None:
        return self._samples.get(view_of(t))

    def keep(self, t: Tensor, samples: Samples | None) -> None:
        if samples is None or (samples == self._all and not isinstance(samples, Chosen)):
            self._samples.pop(view_of(t), None)
        else:
            self._samples[view_of(t)] = samples

    def made(
        self,
        func: Any,
        args: Sequence[Any],
        kwargs: Any,
        fed: Sequence[Tensor],
        dim: int | None,
        placed: Sequence[bool],
    ) -> tuple[Taken, bool]:
        """Of an operation that is yet to run, and whether it joins pieces in another order, or has
        samples meet others'. `fed`: the operands that samples entered; `dim`: where they are in the
        first of these; `placed`: whether that is known of each."""
        name, first, held = name_of(func), fed[0], [self.of(t) for t in fed]
        rows = self._all if held[0] is None else held[0]
        dim = dim if held[0] is None else self._batch_dim
        known = first is args[0] and dim is not None
        known = known and (not isinstance(rows, Chosen) or name in {*PARTS, "slice"})
        if known and dim is not None and first.shape[dim : dim + 1] == (len(rows),):
            taken = list(self._taken(name, func, args, kwargs, fed, dim, rows))
            taken = list(map(_of_one, taken)) if isinstance(rows, Chosen) else taken
            if taken:
                moved = held[0] is not None and any(self._astray(samples) for samples in taken)
                return lambda k: taken[k], moved
        one = held[0] if len(set(held)) == 1 else None
        if any(samples is not None for samples in held) and name in JOINS:
            joined, moved = self._joined(name, func, args, kwargs, fed)
            return lambda k: one if joined is None else joined, moved
        if held[-1] is not None and (name == "copy" or name in SOURCES):
            into = self._part(args[0]) if name == "copy" else self._into(func, args)
            return lambda k: one, () not in (into, held[-1]) and into not in (None, held[-1])
        if name in SOURCES or name.startswith(("index", "gather", "embedding", "scatter")):
            by = [s for t, s in zip(fed, held, strict=True) if t is not args[0] and not real(t)]
            others = any(s and s != held[0] and not isinstance(s, Chosen) for s in by)
            return lambda k: one, others and first is args[0] and name not in SOURCES
        met = {samples for samples, at in zip(held, placed, strict=True) if samples or at}
        return lambda k: one, len(met) > 1

    def fills(self, func: Any, args: Sequence[Any]) -> Place | None:
        """Where samples are in what is written into a row at a time, each into its own."""
        base = args[0]._base if name_of(func) == "copy" else None
        own = base is not None and self.of(args[1])
        return Place(self._batch_dim) if own and own == self._part(args[0]) else None

    def joined(self, func: Any, args: Sequence[Any], kwargs: Any, dims: int) -> Place | None:
        """Where the samples are in what joins pieces, if that is all of them, in order."""
        name = name_of(func)
        if name not in ("cat", "stack"):
            return None
        along = (argument_of(func, args, kwargs, "dim") or 0) % max(1, dims)
        held = [self.of(t) for t in args[0]]
        if None in held or any(isinstance(samples, Chosen) for samples in held):
            return None
        rows = tuple(row for samples in held for row in samples or ())
        sizes = {1 if name == "stack" else t.shape[along] for t in args[0]}
        one = len(rows) == len(held) and len(sizes) == 1
        if rows != self._all * (len(rows) // len(self._all)) or not rows:
            return None
        whole = name == "cat" and along == self._batch_dim
        return Place(along, sizes.pop()) if one else Place(along) if whole else None

    def _astray(self, samples: Samples) -> bool:
        """As many rows as there are samples, which are not theirs."""
        alike = zip(samples, self._all, strict=False)
        return len(samples) == len(self._all) and any(a not in (PADDING, b) for a, b in alike)

    def _joined(
        self, name: str, func: Any, args: Sequence[Any], kwargs: Any, fed: Sequence[Tensor]
    ) -> tuple[Samples | None, bool]:
        """`None`: along another dimension, or of one."""
        along, given = argument_of(func, args, kwargs, "dim") or 0, args[0]
        sizes = [t.shape[along] if name == "cat" else 1 for t in given]
        held = [self.of(t) for t in given]
        known = [samples for samples in held if samples is not None]
        if len(given) < 2:
            return None, False
        if any(isinstance(samples, Chosen) for samples in known):
            if along != self._batch_dim or name != "cat":
                return None, len(set(known)) > 1
            return None, len(known) > 1 or sum(sizes) == len(self._all)
        rows: Samples = ()
        for t, size, samples in zip(given, sizes, held, strict=True):
            whole = samples is None and size == len(self._all) and any(t is x for x in fed)
            rows += samples if samples is not None else self._all if whole else (PADDING,) * size
        if len(rows) == sum(sizes):
            return rows, self._astray(rows)
        return None, len(set(known)) > 1 and any(b <= a for a, b in pairwise(known))

    def _taken(
        self,
        name: str,
        func: Any,
        args: Sequence[Any],
        kwargs: Any,
        fed: Sequence[Tensor],
        dim: int,
        rows: Samples,
    ) -> Iterator[Samples]:
        """By result; nothing: it takes no samples apart."""
        if name == "masked_select":
            yield Chosen()
        elif name in ("index", "index_select"):
            _, index = next(indices_of(func, args))
            chosen = index[dim] if dim < len(index) else None
            if chosen is not None and (chosen.dim() == 1 or chosen.dtype is torch.bool):
                some = chosen.dtype is torch.bool or any(chosen is t for t in fed)
                taken = tuple(rows[k] for k in _numbers(chosen))
                if some and (chosen.dtype is torch.bool or len(taken) != len(rows)):
                    yield Chosen(taken)
                elif not some and (len(taken) < len(rows) or rows != self._all):
                    yield taken
        elif name in {*PARTS, "slice"}:
            along = argument_of(func, args, kwargs, "dim") or 0
            if along % args[0].dim() == dim:
                yield from _cut(name, func, args, kwargs, rows)

    def _into(self, func: Any, args: Sequence[Any]) -> Samples | None:
        """Into which samples' rows it writes."""
        dim, name = self._batch_dim, name_of(func)
        if args[0].shape[dim : dim + 1] != (len(self._all),):
            return None
        if name.startswith("scatter"):
            one = args[1] % args[0].dim() == dim and args[2].dim() == args[0].dim()
            index = args[2].movedim(dim, 0).flatten(1) if one else None
            if index is None or not bool((index == index[:, :1]).all()):
                return None
            index = index[:, 0]
        else:
            _, given = next(indices_of(func, args))
            index = given[dim] if dim < len(given) else None
        if index is None or (index.dim() != 1 and index.dtype is not torch.bool):
            return None
        return tuple(k % len(self._all) for k in _numbers(index))

    def _part(self, t: Tensor) -> Samples | None:
        """Which rows it is of a tensor that has as many as there are samples."""
        base, dim, n = t._base, self._batch_dim, len(self._all)
        if base is None or base.dim() <= dim or base.shape[dim] != n or t.numel() == base.numel():
            return None
        row = max(1, base.stride(dim))
        start = (t.storage_offset() - base.storage_offset()) // row % n
        if t.dim() < base.dim():
            return (start,)
        step = max(1, t.stride(dim) // row)
        return tuple(range(start, start + step * t.shape[dim], step))


def _of_one(rows: Samples) -> Samples:
    """Of what the batch chose: it may be all of one sample's, as tokens by lengths."""
    return tuple(set(rows)) if len(set(rows)) == 1 else Chosen(rows)


def _cut(
    name: str, func: Any, args: Sequence[Any], kwargs: Any, rows: Samples
) -> Iterator[Samples]:
    if name == "slice":
        part = slice(*(argument_of(func, args, kwargs, key) for key in ("start", "end", "step")))
        if part.indices(len(rows)) != (0, len(rows), 1):
            yield rows[part]
    elif name == "select":
        yield (rows[args[2]],)
    else:
        many = [1] * len(rows) if name == "unbind" else args[1]
        if isinstance(many, int):
            many = [many] * len(range(0, len(rows), many))
        for size in many:
            yield rows[:size]
            rows = rows[size:]


def _numbers(index: Tensor) -> list[int]:
    """Of the rows that it chooses."""
    found: list[int] = (index.nonzero()[:, 0] if index.dtype is torch.bool else index).tolist()
    return found
