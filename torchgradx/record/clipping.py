"""Clipping by sample without a second backward.

The tape keeps the operands that each use's norms were computed from, which give the clipped
gradients: the sum over the samples, each times its factor. They replace what the record's backwards
left in .grad, and nothing else of it. With weight_grad=False, they are added to .grad.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from ..extension import Pass, Recorder
from ..hooks.copies import untraced
from ..hooks.listening import drop_empty_tables, has_user_hooks
from ..layers.table import Parameters
from ..refusals import RefusedError, refused_all
from ..sharding import data_parallel, is_sharded, mean_over, skip_reduction
from .factors import ClipGroup, report_overflow

MAX_WAITING = 64  # sums that wait for a copy: their memory must not add up

# A parameter's place, and its clipped gradient from one use: a tensor, to be multiplied by a number
Sum: TypeAlias = tuple[int, Tensor, float]
# Address and version of a .grad, and whether it is sparse
Mark: TypeAlias = tuple[int, int, bool]


class ClipTape:
    """The uses of a record's passes, and what .grad holds besides their gradients."""

    def __init__(self, recorder: Recorder, parameters: Parameters, loss_scale: Any) -> None:
        self._recorder, self._parameters, self.loss_scale = recorder, parameters, loss_scale
        self._uses: deque[tuple[Any, Any, list[int]]] = deque()  # (pass, use, its parameters)
        self._tensors: list[Tensor] = []  # by place, while clipping
        self._others: dict[int, Tensor] = {}  # by place: .grad without the record's part
        self._versions: list[int] = []  # of the parameters when the record began
        self._hooks: dict[int, tuple[Tensor, Any]] = {}  # by place: the parameter, and a handle
        self._marks: dict[int, Mark] = {}  # by place: _mark of .grad after a backward
        self._elements: dict[int, Tensor] = {}  # by place: some of .grad's then, under a GradScaler
        self._idle: set[int] = set()  # places that received no gradient
        self._is_torn = False  # .grad changed between the passes of a record
        self._is_stale = False  # the weights did, and what earlier passes kept is dropped
        self.closed = False  # the record is clipped already
        self._ddp: Callable[[], Any] = lambda: None
        self._learns = False  # the next backward is the first of a static graph: it has to reduce

    def note_model(self, module: nn.Module) -> None:
        """Note the DistributedDataParallel around the model whose forward begins."""
        ddp = data_parallel(module)
        if ddp is not None:
            self._ddp = weakref.ref(ddp)
            self._learns = ddp.static_graph and not ddp._static_graph_delay_allreduce_enqueued

    def close(self, runs: Iterable[Any]) -> None:
        """Remove all hooks, and drop what the tape and these passes keep."""
        self._recorder.keeps_tape = False
        for run in runs:
            run.take_tape()
        for _, hook in self._hooks.values():
            hook.remove()
        drop_empty_tables([p for p, _ in self._hooks.values()])
        self._hooks = {}
        self.clear()

    def clear(self) -> None:
        """Drop what is kept: the record ends."""
        self._uses.clear()
        self._others, self._versions, self._marks, self._elements = {}, [], {}, {}
        self._is_torn = self._is_stale = self.closed = False

    def begin(self, earlier: Sequence[Pass]) -> None:
        """Begin a pass before its gradients reach .grad. earlier: passes of the record."""
        if not self._recorder.keeps_tape:
            return
        tensors = self._parameters.tensors()
        if earlier:
            self._is_torn = self.disturbed
            self._drop_stale(earlier, tensors)
            return
        self.clear()
        for place, p in enumerate(tensors):
            if p.requires_grad and p.is_leaf and self._hooks.get(place, (None,))[0] is not p:
                if place in self._hooks:  # on another tensor
                    self._hooks[place][1].remove()
                hook = p.register_post_accumulate_grad_hook(partial(self._accumulated, place))
                self._hooks[place] = p, hook
        self._versions = [p._version for p in tensors]
        self._others = {k: p.grad.clone() for k, p in enumerate(tensors) if p.grad is not None}

    def _drop_stale(self, earlier: Sequence[Pass], tensors: Sequence[Tensor]) -> None:
        """Drop what earlier passes keep, if weights or .grad have changed: they cannot be clipped
        now. A fused optimizer changes no version of the weights."""
        self._is_stale = self._is_stale or [p._version for p in tensors] != self._versions
        for run in reversed(earlier if self._is_stale or self._is_torn else ()):
            if not run.take_tape():
                return  # the rest is dropped already

    @untraced
    def _accumulated(self, place: int, p: Tensor) -> None:
        """Mark .grad as a backward of the record leaves it."""
        grad = p.grad
        if grad is not None and self._versions:
            before, mark = self._marks.get(place), _mark(grad)
            if before is not None and self._ddp() is None and not _is_sum(before, mark, grad):
                self._is_torn = True
            self._marks[place] = mark
            if isinstance(self.loss_scale, torch.amp.GradScaler):
                self._elements[place] = _some_elements(grad)

    def _changed(self, places: Iterable[int], tensors: Sequence[Tensor]) -> Iterator[int]:
        """Yield the places whose .grad is gone or changed since backward. DDP averages .grad: then
        a change does not show."""
        averages = self._ddp() is not None
        for place in places:
            grad = tensors[place].grad
            if grad is None or (not averages and _mark(grad) != self._marks.get(place)):
                yield place

    @property
    def disturbed(self) -> bool:
        """Return True if anything but this record's backwards has changed .grad."""
        changed = self._changed(self._marks, self._parameters.tensors())
        return self._is_torn or next(changed, None) is not None

    def _is_scaled(self, place: int) -> bool:
        """Return True if .grad has the values that backward left: unscale_ changes no version."""
        before, grad = self._elements.get(place), self._tensors[place].grad
        if before is None or grad is None:
            return False
        finite = before.isfinite()  # inf and nan stay as they are
        before, now = before[finite], _some_elements(grad)[finite]
        return bool(before.any()) and torch.equal(now, before)

    def undo(self, alone: bool) -> None:
        """Note that a backward failed. alone: the record holds nothing else."""
        if alone:
            self.clear()
        elif self._recorder.keeps_tape:
            self._is_torn = True  # a part of its gradients is in .grad

    def add_other(self, place: int, gradient: Tensor) -> None:
        """Add a gradient of a backward that reached no pass to what .grad holds besides."""
        if self._versions and not self.closed:
            before = self._others.get(place)
            gradient = gradient.detach()
            self._others[place] = gradient.clone() if before is None else before + gradient

    def check(self, unscaled: float, runs: Sequence[Pass]) -> None:
        """Raise where the record cannot be clipped, before any .grad is changed."""
        if not self._recorder.keeps_tape:
            raise RuntimeError(
                "clip_grad_norm_ needs what the backward had in its hands: attach(..., clip=True)"
            )
        if self.closed:
            raise RuntimeError("the record is clipped already: clip between backward and step")
        tensors = self._tensors = self._parameters.tensors()
        if is_sharded(tensors):
            self._refuse("clip_sharded", (k for k, p in enumerate(tensors) if is_sharded([p])))
        self._uses.extend((run, use, use.parameters) for run in runs for use in run.take_tape())
        used = {place for _, _, places in self._uses for place in places}
        self._idle = {place for place in self._maybe_idle(used) if _is_idle(place, runs)}
        used -= self._idle
        changed = (k for k in used if tensors[k]._version != self._versions[k])
        self._refuse("clip_weights", range(len(tensors)) if self._is_stale else changed)
        hooked = (k for k in used if has_user_hooks(tensors[k]._backward_hooks)
                  or has_user_hooks(tensors[k]._post_accumulate_grad_hooks))  # fmt: skip
        self._refuse("clip_hooks", hooked)
        overwritten = (k for _, use, places in self._uses if not use.intact for k in places)
        self._refuse("clip_inputs", overwritten)
        self._check_grads(used, unscaled)

    def _maybe_idle(self, used: set[int]) -> set[int]:
        """Return places that may have received no gradient, though a use of them is kept."""
        return used - self._marks.keys()

    def _check_grads(self, used: set[int], unscaled: float) -> None:
        tensors = self._tensors
        self._refuse("clip_between", used if self._is_torn else ())
        missing = (k for k in used if tensors[k].grad is None or k not in self._marks)
        self._refuse("clip_missing", missing)
        self._refuse("clip_scaled", (k for k in used if unscaled != 1 and self._is_scaled(k)))
        self._refuse("clip_changed", self._changed(used, tensors))

    def _refuse(self, why: str, places: Iterable[int]) -> None:
        """Raise CoverageError for these places, if there are any."""
        names = [self._parameters.names[place] for place in sorted(set(places))]
        if names:
            raise refused_all(why, names)

    def clip(self, groups: list[ClipGroup], unscaled: float) -> None:
        """Put the clipped gradients into .grad. unscaled: what a GradScaler has multiplied .grad by
        since the backward."""
        ddp = self._ddp() if groups else None
        # Processes that share their gradients do the same, whatever their samples are.
        clipped = [group for group in groups if ddp is not None or group.clips]
        written: set[int] = set()
        for place, value, scale in self._sums(clipped, unscaled):
            p = self._tensors[place]
            before = p.grad if place in written else self._other(place, unscaled)
            _put(p, value, scale, before, may_swap=ddp is None)
            written.add(place)
        self.closed = True
        if ddp is not None:
            self._average(ddp, written, unscaled)

    def _sums(self, groups: list[ClipGroup], unscaled: float) -> Iterator[Sum]:
        """Yield the clipped gradients of each use, and drop the use."""
        group_of = {place: g for g in groups for place in g.places if place not in self._idle}

        def sums_of(run: Pass, use: Any, parameters: Sequence[int]) -> Iterator[Sum]:
            live = [place for place in parameters if place in group_of]
            for group in dict.fromkeys(group_of[place] for place in live):
                places = [place for place in live if group_of[place] is group]
                factors, scale = group.factors(run, self._tensors[places[0]], unscaled)
                try:
                    weighted = use.weighted(factors, places)
                except RefusedError as error:
                    self._refuse(error.cause, places)
                for place, value in zip(places, weighted, strict=True):
                    yield place, value, scale

        rerun = [entry for entry in self._uses if entry[1].runs_again]
        yield from [found for entry in rerun for found in sums_of(*entry)]  # first: one may fail
        for entry in rerun:
            self._uses.remove(entry)
        while self._uses:
            yield from sums_of(*self._uses.popleft())

    def _other(self, place: int, unscaled: float) -> Tensor | None:
        other = self._others.get(place)
        return None if other is None else other * unscaled

    def _average(self, ddp: Any, written: set[int], unscaled: float) -> None:
        """Average .grad over the processes, each with its own samples."""
        grads = {k: p.grad for k, p in enumerate(self._tensors) if p.grad is not None}
        for place in grads.keys() - written:  # only other processes' samples reached it
            other = self._other(place, unscaled)
            grads[place].copy_(torch.zeros((), device="cpu") if other is None else other)
        mean_over(ddp, list(grads.values()))


def _is_idle(place: int, runs: Sequence[Pass]) -> bool:
    """Return True if no gradient reached a parameter: its module did not use it."""
    waiting = [g for run in runs for _, _, g, _ in run.terms(place)]
    return not any(bool(t.any()) for t in (*(run.total([place]) for run in runs), *waiting))


def _values(grad: Tensor) -> Tensor:
    return grad._values() if grad.is_sparse else grad


def _mark(grad: Tensor) -> Mark:
    """Return what differs once a gradient was exchanged or written into."""
    version = -1 if grad.is_inference() else grad._version
    return _values(grad).data_ptr(), version, grad.is_sparse


def _is_sum(before: Mark, after: Mark, grad: Tensor) -> bool:
    """Return True if autograd alone may have turned one .grad into another: it adds in place, but
    for sparse gradients and under create_graph."""
    return before[2] or grad.requires_grad or after[:2] == (before[0], before[1] + 1)


def _some_elements(grad: Tensor) -> Tensor:
    """Return a copy of at least 64 elements, spread over a gradient, or of all of a smaller one."""
    values = _values(grad).flatten()
    return values[:: max(1, len(values) // 64)].clone()


def _put(p: Tensor, value: Tensor, scale: float, before: Tensor | None, may_swap: bool) -> None:
    """Set .grad to a sum and what it holds `before`. may_swap: .grad may take the sum's memory in
    place of a copy."""
    grad, value = p.grad, value.to_dense().detach()
    value = value if value.shape == p.shape else value.reshape(p.shape)
    assert grad is not None
    if grad.is_sparse:
        total = _scaled(value, scale, p)
        total = total if before is None else before.to_dense() + total
        p.grad = total.to(p.dtype).to_sparse(1)
    elif before is not None:
        grad.copy_(before.to_dense()).add_(value, alpha=scale)
    elif may_swap and _can_swap(grad, value):
        grad.data = _scaled(value, scale, p)
    else:
        grad.copy_(_scaled(value, scale, p))


def _scaled(value: Tensor, scale: float, p: Tensor) -> Tensor:
    """Return scale * value, in no narrower dtype than p's: float16 has few small numbers."""
    return value if scale == 1 else value.to(torch.promote_types(value.dtype, p.dtype)) * scale


def _can_swap(grad: Tensor, value: Tensor) -> bool:
    """Return True if .grad can take another's memory: its own is no part of a larger one."""
    is_whole = grad.untyped_storage().nbytes() == grad.nbytes
    return is_whole and (grad.dtype, grad.stride()) == (value.dtype, value.stride())


class DeferredTape(ClipTape):
    """The tape of deferred clipping, attach(clip=True, weight_grad=False): backward changes no
    .grad, so nothing is watched. Each use takes one weight-gradient product, not two."""

    disturbed = False

    def begin(self, earlier: Sequence[Pass]) -> None:
        tensors, ddp = self._parameters.tensors(), self._ddp()
        if ddp is not None and not self._learns:
            skip_reduction(ddp, tensors)
        if self._recorder.keeps_tape and earlier:
            self._drop_stale(earlier, tensors)
        elif self._recorder.keeps_tape:
            self.clear()
            self._versions = [p._version for p in tensors]

    def _maybe_idle(self, used: set[int]) -> set[int]:
        return {place for _, use, places in self._uses if use.runs_again for place in places}

    def _check_grads(self, used: set[int], unscaled: float) -> None:
        pass

    def clip(self, groups: list[ClipGroup], unscaled: float) -> None:
        """Add the clipped gradients to .grad; under DistributedDataParallel, their mean."""
        tensors, ddp = self._tensors, self._ddp()
        sums: Iterable[Sum] = self._sums(groups, unscaled)
        if ddp is not None:
            sums = _averaged(ddp, tensors, sums)
        written, waiting = set(), dict[int, Tensor]()
        try:
            for place, value, scale in sums:
                if place in waiting or len(waiting) == MAX_WAITING:
                    _copy(tensors, waiting)
                left = _add(tensors[place], value, scale)
                if left is not None:
                    waiting[place] = left
                written.add(place)
        finally:
            _copy(tensors, waiting)
        self.closed = True
        if isinstance(self.loss_scale, torch.amp.GradScaler):
            grads = (tensors[place].grad for place in written)
            report_overflow(self.loss_scale, [g for g in grads if g is not None])


def _copy(tensors: Sequence[Tensor], waiting: dict[int, Tensor]) -> None:
    """Copy the waiting sums into .grad, on a GPU in one launch."""
    grads = [g for place in waiting if (g := tensors[place].grad) is not None]
    if grads:
        torch._foreach_copy_(grads, list(waiting.values()))
    waiting.clear()


def _add(p: Tensor, value: Tensor, scale: float) -> Tensor | None:
    """Add a sum to .grad. Return it if it must be copied into a new .grad of other strides."""
    grad = p.grad
    if grad is None and value.is_sparse:
        p.grad = _scaled(value, scale, p)
    elif grad is None:
        value = value.detach()
        value = value if value.shape == p.shape else value.reshape(p.shape)
        value = _scaled(value, scale, p).to(p.grad_dtype or p.dtype)
        is_alike = value.stride() == p.stride()
        p.grad = value if is_alike else torch.empty_like(p, dtype=value.dtype)
        return None if is_alike else value
    elif grad.is_sparse:
        value = value if value.is_sparse else value.reshape(p.shape).to_sparse(1)
        p.grad = grad + _scaled(value, scale, p)
    else:
        grad.add_(value.to_dense().detach().reshape(p.shape), alpha=scale)
    return None


def _averaged(ddp: Any, tensors: Sequence[Tensor], sums: Iterable[Sum]) -> list[Sum]:
    """Return the means over the processes for each parameter that any of them has a sum of."""
    live = [place for place, p in enumerate(tensors) if p.requires_grad]
    parts = {place: torch.zeros_like(tensors[place]) for place in live}
    has = parts[live[0]].new_zeros(len(tensors))
    for place, value, scale in sums:
        parts[place].add_(value.to_dense().detach().reshape(parts[place].shape), alpha=scale)
        has[place] = 1
    mean_over(ddp, [has, *parts.values()])  # of all parameters: each process must send the same
    present = has.tolist()
    return [(place, part, 1.0) for place, part in parts.items() if present[place]]
