"""What a forward would make of other samples: each operation runs a few times more, on what became
of arguments that have others in the place of some (asked.py). What comes out otherwise in the rows
of a sample that is the same was made of those too, wherever that happened.

So is data asked that is given as rows alone, one sample after the other. Of these nobody knows
which other rows are a sample's own, as its neighbours in a graph, and no operation by itself tells.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._pytree import tree_leaves, tree_map

from .arguments import plain
from .asked import answer_of, codes_of, differing, with_others
from .memory import storage_of, view_of
from .operation import Step, of_processes, real, tensors_of, written
from .sample_dims import Place

__all__ = ["Shadows"]

APART = 6  # samples, which four runs tell apart
OFTEN = 64  # operations after which what is no more is let go


class Shadows:
    """Of one forward: of arguments with so many `rows`, one sample after the other."""

    def __init__(self, n: int, arguments: Iterable[Tensor], rows: int) -> None:
        self._rows, self._codes, self._steps = rows, _codes(n), 0
        self._known: dict[Any, tuple[StorageWeakRef, list[Tensor]]] = {}
        place = Place(0, rows // n)
        for t in filter(plain, arguments):
            if list(t.shape).count(rows) == 1 and len(t) == rows and not _counts_rows(t, n):
                changed = [code.to(t.device) for code in self._codes.unbind(1)]
                self._keep(t, [_like(t, with_others(t, place, code)) for code in changed])

    def run(self, step: Step) -> list[Any] | None:
        """An operation that is yet to run: what it makes of them."""
        func, args, kwargs, operands, _ = step
        if not any(map(self._of, operands)) or of_processes(func):
            return None
        try:
            for t in written(func, args, kwargs):
                self._stand_beside(t)
            return [self._run(k, func, args, kwargs) for k in range(self._codes.shape[1])]
        except Exception:  # it makes as many rows as values say, or is none of torch's
            return None

    def keep(self, out: Any, made: list[Any] | None) -> None:
        """What the operation made, and made of them."""
        leaves = [] if made is None else [tree_leaves(one) for one in made]
        for k, t in tensors_of(out):
            others = [of_run[k] for of_run in leaves]
            if others and all(isinstance(x, Tensor) and x.shape == t.shape for x in others):
                self._keep(t, others)
            else:
                self._known.pop(view_of(t), None)
        self._steps += 1
        if self._steps % OFTEN == 0:
            gone = [view for view, (memory, _) in self._known.items() if memory.expired()]
            for view in gone:
                del self._known[view]

    def mixed(self, outputs: Iterable[Tensor], n: int) -> bool:
        """Whether samples in the model's outputs are made of others too."""
        return any(self._mixes(t) for t in outputs if n in t.shape or self._rows in t.shape[:1])

    def _mixes(self, t: Tensor) -> bool:
        found = [differing(t.detach(), other) for other in self._of(t) or ()]
        comparable = [by_dim for by_dim in found if by_dim is not None]
        return answer_of(comparable, self._codes).astray

    def _run(self, k: int, func: Any, args: Any, kwargs: Any) -> Any:
        stats = "batch_norm" in func._schema.name  # which it writes, and its schema does not say

        def other(t: Any) -> Any:
            if isinstance(t, torch.Generator):
                return t.clone_state()
            found = self._of(t) if isinstance(t, Tensor) else None
            if found is None:
                return t.clone() if stats and isinstance(t, Tensor) else t
            return found[k]

        draws = torch.Tag.nondeterministic_seeded in func.tags
        devices = [
            t.device for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor) and t.is_cuda
        ]
        with torch.random.fork_rng(devices, enabled=draws):
            return func(*tree_map(other, args), **tree_map(other, kwargs))

    def _of(self, t: Tensor) -> list[Tensor] | None:
        return self._known.get(view_of(t), (None, None))[1]

    def _keep(self, t: Tensor, others: list[Tensor]) -> None:
        storage = storage_of(t)
        if storage is not None:
            self._known[view_of(t)] = StorageWeakRef(storage), others

    def _stand_beside(self, t: Tensor) -> None:
        """What has none, and is written into."""
        if self._of(t) is not None:
            return
        base = t if t._base is None else t._base
        wholes = self._of(base) or [_like(base, base) for _ in self._codes.unbind(1)]
        self._keep(base, wholes)
        start = t.storage_offset() - base.storage_offset()
        if t is not base:
            self._keep(t, [x.as_strided(t.shape, t.stride(), start) for x in wholes])


def _counts_rows(t: Tensor, n: int) -> bool:
    """Whether whole numbers say which sample a row is of, or which rows belong to it."""
    if real(t):
        return False
    of_each = t.reshape(n, -1)
    first, rows = torch.arange(n, device=t.device)[:, None] * (len(t) // n), len(t) // n
    inside = (of_each >= first) & (of_each < first + rows)
    return bool(inside.all() or (of_each == of_each[:, :1]).all())


def _codes(n: int) -> Tensor:
    """bool [N, runs]: in which runs a sample is another. Of many, some share a code."""
    if n <= APART:
        return codes_of(n)
    order = torch.randperm(n, generator=torch.Generator().manual_seed(n))
    return codes_of(APART)[order % APART]


def _like(t: Tensor, values: Tensor) -> Tensor:
    """With these, in memory of the same strides, unless its numbers share some (`expand`)."""
    twin = torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device=t.device)
    try:
        return twin.copy_(values)
    except RuntimeError:
        return values.clone()
