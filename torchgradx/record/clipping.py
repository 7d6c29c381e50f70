"""Clipping by sample, without a second backward: what a pass computed its norms from is kept, and
the parameters' gradients are made from it, each sample's share times its factor.

With weight gradients they take the place of those that backward left: whatever else .grad holds,
from before the record or from backwards of other losses, stays. DeferredTape (weight_grad=False),
backward left none: the sums are added to .grad, and nothing in it needs watching.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ..hooks.copies import untraced
from ..hooks.listening import drop_empty_tables, has_user_hooks
from ..layers.table import Parameters
from ..refusals import RefusedError, refused_all
from ..sharding import data_parallel, is_sharded, mean_over
from .factors import ClipGroup


class Sum(NamedTuple):
    """A parameter's weighted gradients, of one use."""

    place: int
    made: Tensor
    scale: float  # to be multiplied by


class ClipTape:
    """What the passes of a record keep, and what .grad holds besides."""

    def __init__(self, recorder: Any, parameters: Parameters, loss_scale: Any) -> None:
        self._recorder, self._parameters, self._loss_scale = recorder, parameters, loss_scale
        self._kept: deque[tuple[Any, Any, list[int]]] = deque()  # (pass, use, its parameters)
        self._tensors: list[Tensor] = []  # the table, while it is clipped
        self._others: dict[int, Tensor] = {}  # by place
        self._versions: list[int] = []  # of the parameters, when the record began
        self._hooks: dict[int, tuple[Tensor, Any]] = {}  # by place, and our hook
        self._marks: dict[int, tuple[int, int]] = {}  # .grad as backwards left it, by place
        self._samples: dict[int, Tensor] = {}  # of .grad then, where a scaler is to unscale it
        self._idle: set[int] = set()  # places that no gradient came to
        self._torn = False  # .grad changed between passes of a record
        self.closed = False  # clipped already
        self._ddp: Callable[[], Any] = lambda: None

    def within(self, module: nn.Module) -> None:
        """Note the model whose forward begins."""
        ddp = data_parallel(module)
        if ddp is not None:
            self._ddp = weakref.ref(ddp)

    def close(self, runs: Iterable[Any]) -> None:
        self._recorder.books = False
        for run in runs:
            run.take_booked()
        where = [p for p, _ in self._hooks.values()]
        for place in list(self._hooks):
            self._stop_listening(place)
        drop_empty_tables(where)
        self.clear()

    def clear(self) -> None:
        """Drop what is kept: the record ends."""
        self._kept.clear()
        self._others, self._versions, self._marks, self._samples = {}, [], {}, {}
        self._torn = self.closed = False

    def begin(self, first: bool) -> None:
        """Begin a pass, none of whose gradients has been added to .grad yet."""
        if not self._recorder.books:
            return
        tensors = self._parameters.tensors()
        if not first:
            self._torn = self.disturbed
            return
        self.clear()
        for place, p in enumerate(tensors):
            if p.requires_grad and p.is_leaf and self._hooks.get(place, (None,))[0] is not p:
                self._listen(place, p)
        self._versions = [p._version for p in tensors]
        self._others = {k: p.grad.clone() for k, p in enumerate(tensors) if p.grad is not None}

    def _listen(self, place: int, p: Tensor) -> None:
        """Listen at a parameter, also where another one was before."""
        self._stop_listening(place)
        after = partial(self._accumulated, place)
        self._hooks[place] = p, p.register_post_accumulate_grad_hook(after)

    def _stop_listening(self, place: int) -> None:
        if place in self._hooks:
            self._hooks.pop(place)[1].remove()

    @untraced
    def _accumulated(self, place: int, p: Tensor) -> None:
        if self._versions and p.grad is not None:
            self._marks[place] = _mark(p.grad)
            if isinstance(self._loss_scale, torch.amp.GradScaler):
                self._samples[place] = _sample(p.grad)

    def _changed(self, places: Iterable[int], tensors: Sequence[Tensor]) -> Iterator[int]:
        """Yield those whose .grad is not as a backward left it (DDP averages it: it is gone)."""
        averaged = self._ddp() is not None
        for place in places:
            grad = tensors[place].grad
            if grad is None or (not averaged and _mark(grad) != self._marks.get(place)):
                yield place

    @property
    def disturbed(self) -> bool:
        """Return True if anything but this record's backwards has changed .grad."""
        changed = self._changed(self._marks, self._parameters.tensors())
        return self._torn or next(changed, None) is not None

    def _is_scaled(self, place: int) -> bool:
        """Return True if .grad has the values that backward left: unscale_ shows in no version."""
        before, grad = self._samples.get(place), self._tensors[place].grad
        if before is None or grad is None:
            return False
        return bool(before.any()) and torch.equal(_sample(grad), before)

    def undo(self, alone: bool) -> None:
        """Note that backwards failed; alone: the record holds nothing else."""
        if alone:
            self.clear()
        elif self._recorder.books:
            self._torn = True  # of their gradients a part is there

    def add_other(self, place: int, gradient: Tensor) -> None:
        """Keep a gradient of a backward that reached no pass."""
        if self._versions and not self.closed:
            before = self._others.get(place)
            gradient = gradient.detach()
            self._others[place] = gradient.clone() if before is None else before + gradient

    def check(self, unscaled: float, runs: Sequence[Any]) -> None:
        """Raise where nothing can be clipped, before anything is touched."""
        if not self._recorder.books:
            raise RuntimeError(
                "clip_grad_norm_ needs what the backward had in its hands: attach(..., clip=True)"
            )
        if self.closed:
            raise RuntimeError(
                "this record is clipped already: clip once, between backward and step"
            )
        tensors = self._tensors = self._parameters.tensors()
        if is_sharded(tensors):
            self._refuse("clip_sharded", (k for k, p in enumerate(tensors) if is_sharded([p])))
        self._kept.extend((run, use, use.parameters) for run in runs for use in run.take_booked())
        kept = {place for _, _, places in self._kept for place in places}
        self._idle = {place for place in self._unsure(kept) if _nothing_came(place, runs)}
        kept -= self._idle
        stale = (k for k in kept if tensors[k]._version != self._versions[k])
        self._refuse("clip_weights", stale)
        self._refuse("clip_hooks", (k for k in kept if _hooked(tensors[k])))
        torn = (k for _, use, places in self._kept if not use.intact for k in places)
        self._refuse("clip_inputs", torn)
        self._check_grads(kept, unscaled)

    def _unsure(self, kept: set[int]) -> set[int]:
        """Return places of uses that may have got no gradient."""
        return kept - self._marks.keys()

    def _check_grads(self, kept: set[int], unscaled: float) -> None:
        tensors = self._tensors
        self._refuse("clip_between", kept if self._torn else ())
        missing = (k for k in kept if tensors[k].grad is None or k not in self._marks)
        self._refuse("clip_missing", missing)
        scaled = (k for k in kept if unscaled != 1 and self._is_scaled(k))
        self._refuse("clip_scaled", scaled)
        self._refuse("clip_changed", self._changed(kept, tensors))

    def _refuse(self, why: str, places: Iterable[int]) -> None:
        names = [self._parameters.names[place] for place in sorted(set(places))]
        if names:
            raise refused_all(why, names)

    def clip(self, runs: Sequence[Any], groups: Sequence[ClipGroup], unscaled: float) -> None:
        """Put the weighted sums into .grad.

        runs: the passes, in the order of the groups' factors. unscaled: what .grad was multiplied
        by since the backward.
        """
        ddp = self._ddp() if groups else None
        # Processes that share their gradients do the same, whatever their samples are.
        clipped = [group for group in groups if ddp is not None or group.clips]
        summed: set[int] = set()
        for found in self._sums(runs, clipped, unscaled):
            place = found.place
            before = self._besides(place, unscaled) if place in self._others else None
            _put(self._tensors[place], found, before, place in summed, ddp is None)
            summed.add(place)
        self.closed = True
        if ddp is not None:
            self._average(ddp, summed, unscaled)

    def _sums(
        self, runs: Sequence[Any], groups: Sequence[ClipGroup], unscaled: float
    ) -> Iterator[Sum]:
        """Yield the sums of each kept use, and drop it."""
        numbers, tensors = {id(run): k for k, run in enumerate(runs)}, self._tensors
        live = ((g, place) for g in groups for place in g.places if place not in self._idle)
        group_of = {place: group for group, place in live}

        def of(run: Any, use: Any, parameters: Sequence[int]) -> Iterator[Sum]:
            shares: dict[ClipGroup, list[int]] = {}
            for place in parameters:
                if place in group_of:
                    shares.setdefault(group_of[place], []).append(place)
            for group, places in shares.items():
                factors, scale = group.factors(numbers[id(run)], tensors[places[0]], unscaled)
                try:
                    weighted = use.weighted(factors, places)
                except RefusedError as error:
                    self._refuse(error.cause, places)
                for place, made in zip(places, weighted, strict=True):
                    yield Sum(place, made, scale)

        again = [entry for entry in self._kept if entry[1].runs_again]
        yield from [found for entry in again for found in of(*entry)]  # one may fail
        for entry in again:
            self._kept.remove(entry)
        while self._kept:
            yield from of(*self._kept.popleft())

    def _besides(self, place: int, unscaled: float) -> Tensor | None:
        has_user_hooks = self._others.get(place)
        return None if has_user_hooks is None else has_user_hooks * unscaled

    def _average(self, ddp: Any, summed: set[int], unscaled: float) -> None:
        grads = {k: p.grad for k, p in enumerate(self._tensors) if p.grad is not None}
        for place in grads.keys() - summed:  # others' samples came to it
            before = self._besides(place, unscaled)
            grads[place].copy_(torch.zeros(()) if before is None else before)
        mean_over(ddp, list(grads.values()))


def _nothing_came(place: int, runs: Sequence[Any]) -> bool:
    """Return True if no gradient came to a parameter: its module did not use it."""
    waiting = [g for run in runs for _, _, g, _ in run.terms(place)]
    return not any(bool(t.any()) for t in (*(run.total([place]) for run in runs), *waiting))


def _values(grad: Tensor) -> Tensor:
    return grad._values() if grad.is_sparse else grad


def _mark(grad: Tensor) -> tuple[int, int]:
    return _values(grad).data_ptr(), grad._version


def _sample(grad: Tensor) -> Tensor:
    values = _values(grad).flatten()
    return values[:: max(1, len(values) // 64)].clone()


def _hooked(p: Tensor) -> bool:
    """Return True if it has hooks of the user's."""
    return has_user_hooks(p._backward_hooks) or has_user_hooks(p._post_accumulate_grad_hooks)


def detached_dense(made: Tensor) -> Tensor:
    """Return a sum as a strided tensor without a graph."""
    made = made.to_dense() if made.is_sparse else made
    return made.detach() if made.requires_grad else made


def _put(p: Tensor, found: Sum, before: Tensor | None, add: bool, alone: bool) -> None:
    """Add to .grad, or write it; `alone`: its memory may be exchanged."""
    grad, made, scale = p.grad, detached_dense(found.made), found.scale
    made = made if made.shape == p.shape else made.reshape(p.shape)
    assert grad is not None
    if grad.is_sparse:
        total = made.mul(scale) if before is None else before.to_dense() + made.mul(scale)
        p.grad = (grad.to_dense() + made.mul(scale) if add else total).to_sparse(1)
    elif add:
        grad.add_(made, alpha=scale)
    elif before is not None:
        grad.copy_(before.to_dense()).add_(made, alpha=scale)
    elif alone and scale == 1 and _takes(grad, made):
        grad.data = made
    else:
        grad.copy_(made if scale == 1 else made * scale)


def _takes(grad: Tensor, made: Tensor) -> bool:
    """Return True if .grad can take another's memory: its own is no part of a larger one."""
    whole = grad.untyped_storage().nbytes() == grad.nbytes
    return whole and (grad.dtype, grad.stride()) == (made.dtype, made.stride())
