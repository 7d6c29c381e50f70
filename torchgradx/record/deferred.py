"""DeferredTape clipping, attach(clip=True, weight_grad=False): backward makes norms alone, and the
clipped sums are added to .grad. One weight gradient for each use in place of two."""

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
    """What the passes of a record keep. Nothing of .grad needs watching: backward leaves it."""

    disturbed = False

    def begin(self, first: bool) -> None:
        if self._recorder.books and first:
            self.clear()
            self._versions = [p._version for p in self._parameters.tensors()]

    def _unsure(self, kept: set[int]) -> set[int]:
        again = (places for _, use, places in self._kept if use.runs_again)
        return {place for places in again for place in places}

    def _check_grads(self, kept: set[int], unscaled: float) -> None:
        pass

    def clip(self, runs: Sequence[Any], groups: Sequence[ClipGroup], unscaled: float) -> None:
        """Add the weighted sums to .grad, under DistributedDataParallel their mean."""
        tensors, ddp = self._tensors, self._ddp()
        sums: Iterable[Sum] = self._sums(runs, groups, unscaled)
        if ddp is not None:
            sums = _averaged(ddp, tensors, sums)
        summed, waiting = set(), dict[int, Tensor]()  # to be copied, many at a time
        try:
            for found in sums:
                if found.place in waiting or len(waiting) == MAX_WAITING:
                    _copy(tensors, waiting)
                made = _add(tensors[found.place], found)
                if made is not None:
                    waiting[found.place] = made
                summed.add(found.place)
        finally:
            _copy(tensors, waiting)
        self.closed = True
        if isinstance(self._loss_scale, torch.amp.GradScaler):
            grads = (tensors[place].grad for place in summed)
            report_overflow(self._loss_scale, [g for g in grads if g is not None])


def _copy(tensors: Sequence[Tensor], waiting: dict[int, Tensor]) -> None:
    """Copy into new .grad: on a GPU a launch for each would take longer than the copies."""
    grads = [g for place in waiting if (g := tensors[place].grad) is not None]
    if grads:
        torch._foreach_copy_(grads, list(waiting.values()))
    waiting.clear()


def _add(p: Tensor, found: Sum) -> Tensor | None:
    """Return what has yet to be copied into a new .grad, which lies otherwise."""
    grad, made, scale = p.grad, found.made, found.scale
    if grad is None and made.is_sparse:
        p.grad = made * scale
    elif grad is None:
        made = made.detach() if made.requires_grad else made
        made = made if made.shape == p.shape else made.reshape(p.shape)
        made = made if scale == 1 else made * scale
        alike = made.dtype == p.dtype and made.stride() == p.stride()
        p.grad = made if alike else torch.empty_like(p)
        return None if alike else made
    elif grad.is_sparse:
        made = made if made.is_sparse else made.reshape(p.shape).to_sparse(1)
        p.grad = grad + made * scale
    else:
        grad.add_(detached_dense(made).reshape(p.shape), alpha=scale)
    return None


def _averaged(ddp: Any, tensors: Sequence[Tensor], sums: Iterable[Sum]) -> list[Sum]:
    """Return the means over the processes, of what any of them has: all communicate alike."""
    live = [place for place, p in enumerate(tensors) if p.requires_grad]
    parts = {place: torch.zeros_like(tensors[place]) for place in live}
    has = parts[live[0]].new_zeros(len(tensors))
    for place, made, scale in sums:
        parts[place].add_(detached_dense(made).reshape(parts[place].shape), alpha=scale)
        has[place] = 1
    mean_over(ddp, [has, *parts.values()])
    present = has.tolist()
    return [Sum(place, part, 1.0) for place, part in parts.items() if present[place]]
