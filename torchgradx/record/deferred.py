"""Deferred clipping: attach(clip=True, weight_grad=False).

Backward computes norms only, and leaves .grad as it was. clip_grad_norm_ adds the clipped gradients
to .grad. This takes one weight-gradient product for each use, where ClipTape takes two.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from ..sharding import mean_over
from .clipping import ClipTape, Sum, detached_dense
from .factors import ClipGroup, report_overflow

MAX_WAITING = 64  # sums that wait for a copy: their memory must not add up


class DeferredTape(ClipTape):
    """The uses of a record's passes. It watches no .grad, as backward changes none."""

    disturbed = False

    def begin(self, first: bool) -> None:
        if self._recorder.books and first:
            self.clear()
            self._versions = [p._version for p in self._parameters.tensors()]

    def _maybe_idle(self, used: set[int]) -> set[int]:
        return {place for _, use, places in self._uses if use.runs_again for place in places}

    def _check_grads(self, used: set[int], unscaled: float) -> None:
        pass

    def clip(self, runs: Sequence[Any], groups: list[ClipGroup], unscaled: float) -> None:
        """Add the clipped gradients to .grad; under DistributedDataParallel, their mean."""
        tensors, ddp = self._tensors, self._ddp()
        sums: Iterable[Sum] = self._sums(runs, groups, unscaled)
        if ddp is not None:
            sums = _averaged(ddp, tensors, sums)
        written, waiting = set(), dict[int, Tensor]()
        try:
            for found in sums:
                if found.place in waiting or len(waiting) == MAX_WAITING:
                    _copy(tensors, waiting)
                value = _add(tensors[found.place], found)
                if value is not None:
                    waiting[found.place] = value
                written.add(found.place)
        finally:
            _copy(tensors, waiting)
        self.closed = True
        if isinstance(self._loss_scale, torch.amp.GradScaler):
            grads = (tensors[place].grad for place in written)
            report_overflow(self._loss_scale, [g for g in grads if g is not None])


def _copy(tensors: Sequence[Tensor], waiting: dict[int, Tensor]) -> None:
    """Copy the waiting sums into .grad, on a GPU in one launch."""
    grads = [g for place in waiting if (g := tensors[place].grad) is not None]
    if grads:
        torch._foreach_copy_(grads, list(waiting.values()))
    waiting.clear()


def _add(p: Tensor, found: Sum) -> Tensor | None:
    """Add a sum to .grad. Return it if it must be copied into a new .grad of other strides."""
    grad, value, scale = p.grad, found.value, found.scale
    if grad is None and value.is_sparse:
        p.grad = value * scale
    elif grad is None:
        value = value.detach() if value.requires_grad else value
        value = value if value.shape == p.shape else value.reshape(p.shape)
        value = value if scale == 1 else value * scale
        is_alike = value.dtype == p.dtype and value.stride() == p.stride()
        p.grad = value if is_alike else torch.empty_like(p)
        return None if is_alike else value
    elif grad.is_sparse:
        value = value if value.is_sparse else value.reshape(p.shape).to_sparse(1)
        p.grad = grad + value * scale
    else:
        grad.add_(detached_dense(value).reshape(p.shape), alpha=scale)
    return None


def _averaged(ddp: Any, tensors: Sequence[Tensor], sums: Iterable[Sum]) -> list[Sum]:
    """Return the means over the processes for each parameter that any of them has a sum of."""
    live = [place for place, p in enumerate(tensors) if p.requires_grad]
    parts = {place: torch.zeros_like(tensors[place]) for place in live}
    has = parts[live[0]].new_zeros(len(tensors))
    for place, value, scale in sums:
        parts[place].add_(detached_dense(value).reshape(parts[place].shape), alpha=scale)
        has[place] = 1
    mean_over(ddp, [has, *parts.values()])  # of all parameters: each process must send the same
    present = has.tolist()
    return [Sum(place, part, 1.0) for place, part in parts.items() if present[place]]
