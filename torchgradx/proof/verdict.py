"""What is known of a structure, from a forward that was looked at."""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from ..rules import Layer
from ..shared.frontier import Plan
from ..sites.modules import build_of
from .routes import alike, routes

__all__ = ["OTHERWISE", "OUTSIDE", "Verdict", "barriers", "from_outside", "known"]

OUTSIDE = (
    "what it computes before samples enter, as from a position table, is followed outside of "
    "graphs: compile it without fullgraph=True"
)


OTHERWISE = "its compiled graph calls other layers than the model does without the compiler"


CHOICES = ("layout", "batch_dim", "backend", "fused", "weight_grad", "check")
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


Barrier = tuple[int, int, Tensor]  # a parameter's place, a dimension, and which along it are zeros


@dataclass(frozen=True)
class Verdict:
    """What holds for a structure."""

    layouts: list[int]  # of each use
    refusals: list[tuple[int, str]]  # (site, why)
    plan: Plan | None  # for the uses of layout SHARED
    complete: bool  # False: another forward must be looked at
    sites: list[int]  # of each use
    routes: list[Any]  # what its batch chose, see routes.py
    barriers: list[Barrier]
    watched: bool = False  # its forward was
    reach: tuple[bool, ...] = ()  # which outputs of parts with several it saw; of all, nothing

    @property
    def lasting(self) -> bool:
        """Whether passes of this structure need not be looked at."""
        return not (self.plan or self.routes or self.barriers or self.reach)

    def holds(self, tensors: Sequence[Tensor], outputs: Sequence[Tensor], n: int) -> bool:
        """Whether another pass would be shown no more than this was proven by."""
        for place, dim, zeros in self.barriers:
            if bool((_live(tensors[place], dim) & zeros).any()):
                return False
        return not self.routes or alike(self.routes, routes(outputs, n))


def barriers(layers: Sequence[Layer], tensors: Sequence[Tensor]) -> list[Barrier]:
    """Rows and columns of nothing but zeros, as of adapters, gates and new features that are yet to
    be trained. Of a bias those count beside rows of zeros: a gate may be all that comes of both."""
    places = sorted({place for layer in layers for place in layer.parameters})
    zeros = {(p, d): ~_live(tensors[p], d) for p in places for d in (0, 1)}
    for layer in layers:
        if layer.type_name.startswith("Embedding"):  # a row of padding is no factor
            for place in layer.parameters:
                zeros[place, 0] &= zeros[place, 0].all()
        if layer.bias >= 0:
            own = zeros[layer.bias, 0]
            beside = zeros.get((layer.weight, 0), own.new_zeros(1))
            own &= beside if len(beside) == len(own) else beside.all()
            zeros[layer.bias, 1] &= own.all()
    return [(*key, found) for key, found in zeros.items() if found.any()]


def _live(t: Tensor, dim: int) -> Tensor:
    """[of this dimension]: where it is not all zeros; a dimension that is not there has size 1."""
    others = tuple(d for d in range(t.dim()) if d != dim)
    if dim >= t.dim():
        return t.detach().any().reshape(1)
    return t.detach().any(others) if others else t.detach() != 0


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
