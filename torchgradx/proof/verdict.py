"""The verdict on a structure, kept by model and options for as long as the model lives."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from ..graph.routes import same_routes
from ..layers.modules import build_of
from ..refusals import cause
from ..shared.frontier import LiftPlan

KEY_OPTIONS = ("layout", "batch_dim", "backend", "fused", "weight_grad", "check")
_known: weakref.WeakKeyDictionary[nn.Module, tuple[Any, dict[Any, dict[str, dict[Any, Any]]]]] = (
    weakref.WeakKeyDictionary()
)


def cache_of(model: nn.Module, options: Mapping[str, Any]) -> dict[str, dict[Any, Any]]:
    """Return what was found of a model's structures under such options, while it is built so."""
    build, choices = build_of(model), tuple(repr(options[choice]) for choice in KEY_OPTIONS)
    if model not in _known or _known[model][0] != build:
        _known[model] = build, {}
    return _known[model][1].setdefault(choices, {})


@dataclass
class Verdict:
    """The layouts that hold for a structure, and what is refused."""

    layouts: list[int]  # of each use
    refusals: list[tuple[int, str]]  # (site, cause)
    plan: LiftPlan | None = None  # for the uses of layout SHARED
    complete: bool = True  # False: another forward must be looked at
    sites: Sequence[int] = ()  # of each use
    routes: Sequence[Any] = ()  # what its batch chose, see routes.py
    sure: Sequence[bool] = ()  # of each use: no other layout has the same rows
    # Versions of the parameters, where weights are all zeros, as of adapters that are yet to be
    # trained: what is behind them does not show.
    zeros: int | None = None
    blind: bool = False  # some uses received zeros only, and no weights are: a dropped branch
    looks: int = 1  # at either
    patience: int = 1  # so many passes until the next one

    @property
    def lasting(self) -> bool:
        """Return whether passes of this structure need not be looked at."""
        return not (self.plan or self.routes or self.zeros is not None)

    def holds(self, tensors: Callable[[], list[Tensor]], chosen: Callable[[], list[Any]]) -> bool:
        """Return whether another pass, whose batch chose so, would be shown no more than this."""
        if self.zeros is not None:
            now = total_version(tensors())
            self.patience -= self.blind or now != self.zeros
            if self.patience <= 0:
                return False
            self.zeros = now
        return not self.routes or same_routes(self.routes, chosen())


def total_version(tensors: Sequence[Tensor]) -> int:
    return sum(p._version for p in tensors)


def from_outside(run: Any) -> Verdict:
    """Do the forwards of a pass of compiled graphs once more, without the compiler."""
    shown: list[tuple[Verdict, list[Any]]] = []
    try:
        for forward in run.outside:
            first = forward()
            shown.append(first if first[0].complete else forward())  # watched in the first
    except Exception as error:  # no reason to end a training step
        return Verdict([], [(-1, cause("eager_failed", error=error))])
    sizes = [(site, list(sizes)) for site, sizes, *_ in run.uses()]
    if [use for _, uses in shown for use in uses] != sizes:
        return Verdict([], [(-1, "other_layers")])
    verdicts = [verdict for verdict, _ in shown]
    return Verdict(
        [how for verdict in verdicts for how in verdict.layouts],
        [refusal for verdict in verdicts for refusal in verdict.refusals],
        next((verdict.plan for verdict in verdicts if verdict.plan), None),
        all(verdict.complete for verdict in verdicts),
        [site for verdict in verdicts for site in verdict.sites],
        [part for verdict in verdicts for part in verdict.routes],
    )


def is_finite(run: Any) -> bool:
    """Return False where a pass shows nothing: inf and nan agree with whatever was received."""
    waiting = [g for place in run.waiting() for _, _, g, _ in run.terms(place)]
    return all(bool(t.isfinite().all()) for t in (run.total(None), *waiting))
