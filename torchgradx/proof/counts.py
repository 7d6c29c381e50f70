"""Numbers of the batch that no single sample has: its longest length, how many are of a class, a
rank among all. As sizes, offsets and indices they are harmless, and rows that they choose are
followed (pieces.py); samples whose own numbers are made with one are mixed, as x / lengths.max().
How many tokens there are scales a loss, which `loss_scale` undoes, and is harmless where no layer
meets it.
"""

from __future__ import annotations

from collections.abc import Collection

import torch
from torch import Tensor

from .memory import ByMemory
from .operation import Step, name_of, real
from .order import SOURCES
from .sample_dims import GONE, VIEWS, Place

__all__ = ["Counts"]

NO, TOKENS, BATCH = range(3)  # the more it is, the more what is made with it
COUNTS = {"_unique2", "bincount", "unique_consecutive", "unique_dim"}
INDICES = {"sort": 1, "topk": 1}  # their other results are samples, in an order of theirs
# Through which a number stays one, beside what works by element.
KEEP = {"_reshape_alias", "_to_copy", "alias", "amax", "amin", "argmax", "argmin", "cat", "clone",
        "cummax", "cumsum", "detach", "embedding", "expand", "floor_divide", "index_fill", "isin",
        "max", "mean", "min", "nonzero", "permute", "prod", "select", "slice", "squeeze", "stack",
        "sum", "t", "transpose", "unsqueeze", "view", *INDICES}  # fmt: skip
CHOOSE = {"gather", "index", "index_select", "take", *SOURCES}  # by numbers, which are not in them


class Counts:
    """Of one forward."""

    def __init__(self) -> None:
        self._known: ByMemory[int] = ByMemory()

    def meet(
        self,
        step: Step,
        before: Collection[Place | None],
        k: int,
        t: Tensor,
        at: Place | None,
        *,
        strays: bool,
        tokens: bool,
    ) -> bool:
        """After an operation that samples entered, which were `before`: whether its k-th result is
        of samples, and made with a number of the batch. `strays`: it is of several samples;
        `tokens`: it counts them."""
        name, view = name_of(step.func), name_of(step.func) in VIEWS
        known = set(before) - {None, GONE}
        made = strays or (bool(known) and (name in COUNTS or at == GONE))
        flags, own = t.dtype is torch.bool, at not in (None, GONE)
        whole = t.dim() > 0 if flags else not real(t)  # whether any is inf is asked of all of them
        made = made and whole and name != "nonzero" and k >= INDICES.get(name, 0) and not view
        kinds = [TOKENS if tokens else BATCH if made else NO]
        if name in {*KEEP, *CHOOSE} or torch.Tag.pointwise in step.func.tags:
            # What it chooses of samples is followed (pieces.py); of all else, numbers choose.
            alone = name in CHOOSE and any(real(x) or x is step.args[0] for x in step.fed)
            alone = alone or (name == "clamp" and _unchanged(t, step.args[0]))
            given = [x for x in step.args[:1] if isinstance(x, Tensor)] if alone else step.operands
            # Positions below the longest are none of a sample's; its own that are as long are.
            own_too = own or not flags or name == "isin"
            kinds += [self._known.get(x, NO) for x in given if own_too or x.numel() > 1]
            rounded = GONE in before and whole and not flags and any(map(real, step.operands))
            kinds += [BATCH] if rounded and max(kinds) == NO else []
        if max(kinds):
            self._known.keep(t, max(kinds))
        elif not view:
            self._known.forget(t)
        return own and t.is_floating_point() and max(kinds) == BATCH

    def enter(self, t: Tensor) -> bool:
        """Whether a layer that is given it meets one."""
        return self._known.get(t, NO) != NO


def _unchanged(t: Tensor, before: Tensor) -> bool:
    return t is not before and torch.equal(t, before)
