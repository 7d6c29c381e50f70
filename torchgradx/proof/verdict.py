"""The verdict on a structure, its cache, and the comparisons that confirm it.

A cache of one model and its options lives as long as the model: a second probe proves nothing
again. A layout is a constant of graph/layout.py; a refusal is (site, cause), site -1 for all.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import hypot
from typing import Any

import torch
from torch import Tensor, nn

from ..extension import Pass
from ..graph.layout import read_flags
from ..graph.routes import same_routes
from ..layers.modules import build_of
from ..refusals import cause
from ..shared.frontier import LiftPlan

MAX_STRUCTURES = 4096  # keys of a cache: sizes that never repeat must not add up
MAX_VERDICTS = 8  # of one key: paths through one structure
MAX_ROUTED = 4  # keys of verdicts that hold a batch's indices
COMPARED_ELEMENTS = 1 << 18  # of a gradient, cast to float64 at a time
KEY_OPTIONS = ("layout", "batch_dim", "backend", "fused", "weight_grad", "check")
_Cache = dict[str, dict[Any, Any]]  # by the part of a probe that fills it
# By model: its build, and a cache for each choice of options.
_caches: weakref.WeakKeyDictionary[nn.Module, Any] = weakref.WeakKeyDictionary()


def cache_of(model: nn.Module, options: Mapping[str, Any]) -> _Cache:
    """Return the model's cache for these options; empty again once the model is built otherwise."""
    build, choices = build_of(model), tuple(repr(options[choice]) for choice in KEY_OPTIONS)
    if model not in _caches or _caches[model][0] != build:
        _caches[model] = build, {}
    return _caches[model][1].setdefault(choices, {})


@dataclass
class Verdict:
    """The layout of each use of a structure, and the refusals.

    A gradient of zeros shows no layout. A verdict that saw one expires after `patience` passes:
    then weights that were zeros (an adapter's, say) may have been trained.
    """

    layouts: list[int]  # by use
    refusals: list[tuple[int, str]]
    plan: LiftPlan | None = None  # for the uses whose layout is SHARED
    complete: bool = True  # False: not to be cached, another forward may show more
    routes: Sequence[Any] = ()  # the row indices that the batch's values chose: graph/routes.py
    sure: Sequence[bool] = ()  # by use: True if no other layout has the same rows
    zeros_version: int | None = None  # total_version() when zeros were seen; None: none were
    zero_weights: Sequence[int] = ()  # the places of trained weights that were zeros
    has_dropped_branch: bool = False  # zeros came from a branch left out, not from zero weights
    examinations: int = 1  # of this structure, while it had zeros
    patience: int = 1  # passes left until the next examination

    @property
    def has_indices(self) -> bool:
        """Return True if it holds indices of a batch, which another batch seldom has."""
        return any(isinstance(route, Tensor) for route in self.routes)

    @property
    def is_final(self) -> bool:
        """Return True if other passes of this structure need no check at all."""
        return not (self.plan or self.routes or self.zeros_version is not None)

    def _count(self, tensors: Sequence[Tensor]) -> int:
        """Return 1 if gradients that were zero may not be zero now, else 0."""
        changed = self.has_dropped_branch or total_version(tensors) != self.zeros_version
        # A fused optimizer moves no version.
        return int(changed or len(zeros_of(tensors, self.zero_weights)) < len(self.zero_weights))

    def has_expired(self, tensors: Sequence[Tensor]) -> bool:
        """Return True if another pass needs a new verdict."""
        return self.zeros_version is not None and self.patience <= self._count(tensors)

    def holds(self, tensors: Sequence[Tensor], routes: Callable[[], list[Any]]) -> bool:
        """Return True if this verdict holds for another pass, whose batch chose `routes`. Count
        `patience` down, for zero weights only where weights have changed."""
        if self.zeros_version is not None:
            count = self._count(tensors)
            if self.patience <= count:
                return False
            self.patience -= count
            self.zeros_version = total_version(tensors)
        return not self.routes or same_routes(self.routes, routes())

    def apply(self, run: Pass) -> None:
        """Give a pass these layouts and refusals."""
        run.layouts = run.layouts + self.layouts
        for site, reason in self.refusals:
            run.refuse(site, reason)


def store(cached: dict[Any, list[Verdict]], key: Any, verdict: Verdict) -> None:
    """Cache a verdict, and drop the oldest beyond the limits."""
    verdicts = cached.setdefault(key, [])
    verdicts.append(verdict)
    del verdicts[:-MAX_VERDICTS]
    if len(cached) > MAX_STRUCTURES:
        cached.pop(next(iter(cached)), None)
    if verdict.has_indices:
        keys = [key for key, many in list(cached.items()) if any(v.has_indices for v in many)]
        for old in keys[:-MAX_ROUTED]:
            cached.pop(old, None)


def total_version(tensors: Sequence[Tensor]) -> int:
    """Return a number that grows whenever one of the tensors is written into."""
    return sum(p._version for p in tensors)


def zeros_of(tensors: Sequence[Tensor], places: Iterable[int]) -> list[int]:
    """Return the places whose tensors are all zeros, with one read from the device."""
    live = [place for place in places if tensors[place].numel()]
    found = read_flags([tensors[place].detach().any() for place in live])
    return [place for place, has_some in zip(live, found, strict=True) if not has_some]


def verdict_of_compiled(run: Pass) -> Verdict:
    """Return the verdict on a pass of compiled graphs, by running its forwards uncompiled."""
    examined: list[tuple[Verdict, list[Any]]] = []
    try:
        for forward in run.outside:
            first = forward()
            examined.append(first if first[0].complete else forward())  # the first was traced
    except Exception as error:  # no reason to end a training step
        return Verdict([], [(-1, cause("eager_failed", error=error))])
    sizes = [(site, list(sizes)) for site, sizes, *_ in run.uses()]
    if [use for _, uses in examined for use in uses] != sizes:
        return Verdict([], [(-1, "other_layers")])
    verdicts = [verdict for verdict, _ in examined]
    return Verdict(
        [layout for verdict in verdicts for layout in verdict.layouts],
        [refusal for verdict in verdicts for refusal in verdict.refusals],
        next((verdict.plan for verdict in verdicts if verdict.plan), None),
        all(verdict.complete for verdict in verdicts),
        [route for verdict in verdicts for route in verdict.routes],
    )


def is_finite(run: Pass) -> bool:
    """Return True if all that a pass recorded is finite: inf and nan agree with any gradient."""
    waiting = [g for place in run.waiting() for _, _, g, _ in run.terms(place)]
    return all(bool(t.isfinite().all()) for t in (run.total(None), *waiting))


def is_same_sum(gradient: Tensor, recorded: Tensor | None, rounding: float) -> bool:
    """Return True if a gradient is the recorded sum [elements], within the rounding of its terms.
    Where nothing was recorded (None), it must be zero."""
    gradient = gradient.to_dense().reshape(-1)
    if recorded is None:
        return not bool(gradient.any())
    if recorded.dtype == gradient.dtype and torch.equal(gradient, recorded):
        return True
    difference = norm = 0.0
    both = (t.split(COMPARED_ELEMENTS) for t in (gradient, recorded))
    for part, other in zip(*both, strict=True):
        part = part.double()
        difference = hypot(difference, float((part - other.double()).norm()))
        norm = hypot(norm, float(part.norm()))
    # Not relative to the norm alone: a sum whose terms cancel is all rounding.
    allowed = 64 * (rounding + torch.finfo(recorded.dtype).eps * norm)
    return not difference > allowed  # inf and nan agree: a GradScaler reports them
