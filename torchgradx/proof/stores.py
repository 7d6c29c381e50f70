"""Buffers that samples were written into a part of, as a queue of keys: what is made of all their
rows is made of other samples too. Parts of them, as a cache's rows of this batch, are its own."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from .memory import ByMemory, view_of
from .operation import Step, name_of
from .sample_dims import GONE, VIEWS, Place

__all__ = ["Stores"]

TURNS = {*VIEWS, "alias", "detach", "expand", "permute", "squeeze", "t", "transpose", "unsqueeze"}
PARTS = {"gather", "index", "index_select", "select", "slice", "split", "unbind"}


class Stores:
    """Of one forward."""

    def __init__(self) -> None:
        self._views: set[Any] = set()
        self._made: ByMemory[bool] = ByMemory()  # in this forward: of this batch alone

    def make(self, t: Tensor) -> None:
        self._made.keep(t, True)

    def wrote(self, t: Tensor, at: Place | None) -> None:
        """Into a view of what has more rows than there are samples."""
        base = t._base
        if base is None or at is None or at == GONE or self._made.get(base, False):
            return
        step, many = t.stride(at.dim), t.shape[at.dim]
        sizes = zip(base.stride(), base.shape, strict=True)
        if any(stride == step and size > many for stride, size in sizes):
            self._views.add(view_of(base))

    def follow(self, step: Step, t: Tensor) -> None:
        """A result."""
        if all(out.alias_info is None for out in step.func._schema.returns):
            self.make(t)
        if name_of(step.func) in TURNS and any(map(self._holds, step.operands)):
            self._views.add(view_of(t))

    def read(self, step: Step) -> bool:
        """Whether an operation makes something of all rows of one."""
        looks = name_of(step.func) in {*TURNS, *PARTS} or step.func._schema.is_mutable
        return not looks and any(map(self._holds, step.operands))

    def _holds(self, t: Tensor) -> bool:
        return not t.requires_grad and view_of(t) in self._views  # else its graph shows it
