"""Whether samples are put into another order where the proof would miss it.

Layers' rows are proven by the outputs' (layout.py). Rows that are put into another order in the
graph, after a layer, come back out of order there and are refused. No graph shows what is done to
data: as x[lengths.argsort()] enters a layer, its rows and the outputs stand in one order, and it is
not the batch's. So what was put into an order is followed from there, and missed once it meets
anything that has a gradient, a weight or what came of one, unless that was put into the very same
order, in the graph: as a loss inside of the model has it, of logits[i] and labels[i]. By that no
layer is given rows in another order, and a loss has none. While there is such an order, what nobody
knows (it may be a copy, as NumPy's) and samples that are not in it are missed where they are met.
Keys that are shuffled without a graph, by numbers that no sample chose, may well be put back.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from ..passes.frames import Reentrant
from .memory import ByMemory, storage_of

__all__ = ["Put", "Reordered", "Rows", "order_by", "shows"]


class Rows(tuple[int, ...]):
    """An order that no batch chose: the sample of each row."""


class Put(NamedTuple):
    """Into an order."""

    order: Any
    shown: bool  # by a graph in which a layer is
    quiet: bool = False  # copies that torch does not see are harmless, as lists of lengths

    def then(self, put: Put) -> Put | None:
        """Of what is in this order already; None: that put it back."""
        if isinstance(self.order, Rows) and isinstance(put.order, Rows):
            order = Rows(self.order[k] for k in put.order)
            return None if order == Rows(range(len(order))) else self._replace(order=order)
        return self._replace(order=object())


class Reordered:
    """Of one forward: by storage, which order its samples were put into."""

    def __init__(self) -> None:
        self.missed = self._hides = False  # hides: an order that no graph shows was made
        self._known: ByMemory[Put | None] = ByMemory()

    def __bool__(self) -> bool:
        return self._hides or bool(self._known)

    def mark(self, t: Tensor, put: Put | None) -> None:
        number = not t.dim() and not t.is_floating_point()  # the largest one is in no order
        if put is not None and not (number and put.quiet):
            self._known.keep(t, put)
            hides = storage_of(t) is not None and not (put.shown or put.quiet)
            self._hides = self._hides or hides
        else:
            self._known.forget(t)

    def joined(
        self, operands: Sequence[Tensor], clean: Sequence[bool | None], counts: bool = True
    ) -> Put | None:
        """Of what is made of these, which are all that an operation is given. Among those of which
        nobody knows may be a copy, as NumPy's, of data that was put into an order. `counts`:
        gradients will be had of it."""
        found = [self._of(t) for t in operands]
        hidden = {put.order for put in found if put and not put.shown}
        live = {put and put.order for t, put in zip(operands, found, strict=True)
                if t.requires_grad}  # fmt: skip
        self.missed = self.missed or bool(counts and hidden and live and live != hidden)
        data = {
            put and put.order for put, same in zip(found, clean, strict=True) if same is not True
        }
        apart = None in clean or (any(found) and len(data) > 1)
        self.missed = self.missed or (self._hides and apart)
        puts = [put for put in found if put]
        if not puts:
            return None
        shown, quiet = any(put.shown for put in puts), all(put.quiet for put in puts)
        return Put(data.pop() if len(data) == 1 else object(), shown, quiet)

    def enter(self, given: Iterable[Tensor], clean: Sequence[bool | None] = ()) -> None:
        """A layer is given these, or the model returns them."""
        self.missed = self.missed or (self._hides and None in clean)
        for t in given:
            put = self._of(t)
            self.missed = self.missed or (t.dim() > 0 and put is not None and not put.shown)

    def _of(self, t: Tensor) -> Put | None:
        put = self._known.get(t, None)
        # Inside of a Function nothing has a graph; elsewhere it was detached.
        cut = torch.is_grad_enabled() and not t.requires_grad
        return put._replace(shown=put.shown and not cut) if put else None


def order_by(index: Tensor, dim: int, size: int) -> Any:
    """The order that an index puts rows into: that of another one only if both are the same memory,
    for equal numbers are another batch's no more. Of another number of rows it is none."""
    others = [d for d in range(index.dim()) if d != dim and index.shape[d] > 1]
    if index.shape[dim] != size or any(index.stride(d) for d in others) or index.is_inference():
        return object()
    storage, start = StorageWeakRef(index.untyped_storage()), index.storage_offset()
    return storage, start, index.stride(dim), index._version


def shows(t: Tensor, arguments: Sequence[Tensor]) -> bool:
    """Whether a layer is in its graph, which holds an order that rows are put into now. A model's
    inputs may need gradients too, and come of other models."""
    if not torch.is_grad_enabled():
        return False
    rest, seen = [t.grad_fn], {None, *(x.grad_fn for x in arguments)}
    while rest:
        node: Any = rest.pop()
        if node in seen:
            continue
        seen.add(node)
        if isinstance(node, Reentrant):  # it holds none before its backward
            return True
        leaf = getattr(node, "variable", None)
        if isinstance(leaf, nn.Parameter) and all(leaf is not x for x in arguments):
            return True
        rest += [child for child, _ in node.next_functions]
    return False
