"""What is known of a structure, from a forward that was looked at."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from .shared import Plan

__all__ = ["OTHERWISE", "OUTSIDE", "Verdict", "from_outside"]

OUTSIDE = (
    "what it computes before samples enter, as from a position table, is followed outside of "
    "graphs: compile it without fullgraph=True"
)


OTHERWISE = "its compiled graph calls other layers than the model does without the compiler"


@dataclass(frozen=True)
class Verdict:
    """What holds for a structure."""

    layouts: list[int]  # of each use
    refusals: list[tuple[int, str]]  # (site, why)
    plan: Plan | None  # for the uses of layout SHARED
    complete: bool  # False: another forward must be looked at
    sites: list[int]  # of each use
    routes: list[Any]  # what its batch chose, see routes.py


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
    )


def _nothing(why: str) -> Verdict:
    return Verdict([], [(-1, why)], None, True, [], [])
