"""What is known of a structure, from a forward that was looked at."""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from .modules import build_of
from .routes import alike, routes
from .rules import Layer
from .shared import Plan

__all__ = ["OTHERWISE", "OUTSIDE", "Verdict", "barriers", "from_outside", "known"]

OUTSIDE = (
    "what it computes before samples enter, as from a position table, is followed outside of "
    "graphs: compile it without fullgraph=True"
)


OTHERWISE = "its compiled graph calls other layers than the model does without the compiler"


CHOICES = ("layout", "batch_dim", "backend", "fused", "weight_grad")
_known: weakref.WeakKeyDictionary[nn.Module, tuple[Any, dict[Any, dict[str, dict[Any, Any]]]]] = (
    weakref.WeakKeyDictionary()
)


def known(model: nn.Module, options: Mapping[str, Any]) -> dict[str, dict[Any, Any]]:
    """What was found of a model's structures under such options. It outlives a probe, as scoring
    attaches anew for each batch, for as long as the model is built as it was."""
    build, choices = build_of(model), tuple(repr(options[choice]) for choice in CHOICES)
    if model not in _known or _known[model][0] != build:
        _known[model] = build, {}
    return _known[model][1].setdefault(choices, {})


@dataclass(frozen=True)
class Verdict:
    """What holds for a structure."""

    layouts: list[int]  # of each use
    refusals: list[tuple[int, str]]  # (site, why)
    plan: Plan | None  # for the uses of layout SHARED
    complete: bool  # False: another forward must be looked at
    sites: list[int]  # of each use
    routes: list[Any]  # what its batch chose, see routes.py
    barriers: list[int]  # parameters that let no gradient pass, by place

    @property
    def lasting(self) -> bool:
        """Whether passes of this structure need not be looked at."""
        return self.plan is None and not self.routes and not self.barriers

    def holds(self, tensors: Sequence[Tensor], outputs: Sequence[Tensor], n: int) -> bool:
        """Whether another pass would be shown no more than this was proven by."""
        if any(bool(tensors[place].any()) for place in self.barriers):
            return False
        return not self.routes or alike(self.routes, routes(outputs, n))


def barriers(layers: Sequence[Layer], tensors: Sequence[Tensor]) -> list[int]:
    """The factors of nothing but zeros, as of adapters and gates that are yet to be trained. A bias
    is one beside a weight of zeros: a gate may be all that comes of both."""
    zeros = {place for layer in layers for place in layer.parameters
             if place != layer.bias and not bool(tensors[place].any())}  # fmt: skip
    biases = {layer.bias for layer in layers if layer.weight in zeros and layer.bias >= 0}
    return sorted(zeros | {place for place in biases if not bool(tensors[place].any())})


def from_outside(run: Any) -> Verdict:
    """On a pass of compiled graphs: its forwards are done once more, without the compiler."""
    seen: list[tuple[Verdict, list[Any]]] = []
    try:
        for forward in run.outside:
            first = forward()
            seen.append(first if first[0].complete else forward())  # watched in the first
    except Exception as error:  # no reason to end a training step
        return _nothing(f"a call of the model without the compiler failed: {error}")
    sizes = [(site, list(sizes)) for site, sizes, *_ in run.uses()]
    if [use for _, uses in seen for use in uses] != sizes:
        return _nothing(OTHERWISE)
    return Verdict(
        [how for verdict, _ in seen for how in verdict.layouts],
        [refusal for verdict, _ in seen for refusal in verdict.refusals],
        next((verdict.plan for verdict, _ in seen if verdict.plan), None),
        all(verdict.complete for verdict, _ in seen),
        [site for verdict, _ in seen for site in verdict.sites],
        [part for verdict, _ in seen for part in verdict.routes],
        [place for verdict, _ in seen for place in verdict.barriers],
    )


def _nothing(why: str) -> Verdict:
    return Verdict([], [(-1, why)], None, True, [], [], [])
