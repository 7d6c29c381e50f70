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
    barriers: list[tuple[int, Tensor]]  # rows that let no gradient pass, of parameters by place

    @property
    def lasting(self) -> bool:
        """Whether passes of this structure need not be looked at."""
        return self.plan is None and not self.routes and not self.barriers

    def holds(self, tensors: Sequence[Tensor], outputs: Sequence[Tensor], n: int) -> bool:
        """Whether another pass would be shown no more than this was proven by."""
        for place, rows in self.barriers:
            if bool(_rows(tensors[place])[rows].any()):
                return False
        return not self.routes or alike(self.routes, routes(outputs, n))


def barriers(layers: Sequence[Layer], tensors: Sequence[Tensor]) -> list[tuple[int, Tensor]]:
    """Rows of nothing but zeros, as of adapters and gates that are yet to be trained. Those of a
    bias count beside zeros of its weight: a gate may be all that comes of both."""
    zeros = {p: ~_rows(tensors[p]).any(1) for layer in layers for p in layer.parameters}
    for layer in layers:
        if layer.type_name.startswith("Embedding"):  # a row of padding is no factor
            for place in layer.parameters:
                zeros[place] &= zeros[place].all()
        if layer.bias in zeros:
            own, beside = (
                zeros[layer.bias],
                zeros.get(layer.weight, zeros[layer.bias].new_zeros(1)),
            )
            own &= beside if len(beside) == len(own) else beside.all()
    return [(place, rows) for place, rows in sorted(zeros.items()) if rows.any()]


def _rows(t: Tensor) -> Tensor:
    rows = t.shape[0] if t.dim() else 1
    return t.detach().reshape(rows, t.numel() // max(1, rows))


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
