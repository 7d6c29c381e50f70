"""Layouts where no proof can be had: where the samples of a watched forward were followed to, as
far as sizes leave no doubt."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod
from typing import Any

from ..shared.frontier import Graph, Node, rows_of, shape_of
from .layout import BATCH, SEQUENCE, Watched
from .sample_dims import GONE, Place
from .taint import Given, Taint

__all__ = ["Known", "Use", "followed", "presumed", "rows_at", "shown", "stands"]

Use = tuple[int, Sequence[int], Node, int]  # (site, sizes, node of its output, output of the node)
# Layouts by site and number of dimensions; a str says why there is none, None: nobody knows.
Known = dict[tuple[int, int], int | str | None]
ASTRAY = "its samples were followed to rows that are neither n*T+t nor t*N+n"
BROADCASTS = {"AddBackward0", "MulBackward0", "SubBackward0"}


def _beyond_doubt(leads: Sequence[int], n: int, presumed: int) -> bool:
    """Without a proof: the samples' dimension is the only one of its size."""
    dim = 1 if presumed == SEQUENCE and len(leads) > 1 else 0
    return list(leads).count(n) == 1 and leads[dim] == n


def stands(given: Given, sizes: Sequence[int], leads: Sequence[int], n: int, presumed: int) -> bool:
    """Whether rows are as they are presumed, by what their layer was seen to be given."""
    flat = presumed == BATCH and n not in leads and given.in_turn
    places = [place for shape, place in given.rows if list(shape) == list(sizes)]
    alike = {BATCH, SEQUENCE} if prod(leads) == n else {presumed}
    there = 0 in sizes or all(_layout(sizes, place, leads, n) in alike for place in places)
    return given.fed and there and (flat or _beyond_doubt(leads, n, presumed))


def rows_at(taint: Taint, n: int, node: Node, number: int) -> int | None:
    """The layout of an output of a graph node, as it was followed."""
    shape = shape_of(node, number)
    return _layout(shape, taint.where(node, number), rows_of(shape, n), n)


def presumed(
    prove: Callable[[Sequence[Watched]], Sequence[Any]],
    n: int,
    rows: Callable[[Node, int], int | None],
    watched: Sequence[Watched],
) -> list[Any]:
    """The verdicts of `prove`, and where there is none what was followed."""

    def layout_of(use: Watched) -> int | None:
        layout = None if use.second else rows(use.node, use.output_nr)
        return layout if layout in {BATCH, SEQUENCE} and _fits(layout, use.leads, n) else None

    verdicts = zip(watched, prove(watched), strict=True)
    return [layout_of(use) if verdict is None else verdict for use, verdict in verdicts]


def shown(
    taint: Taint, graph: Graph, uses: Sequence[Use], watched: Sequence[Watched], n: int
) -> Known:
    """What a forward that was watched showed."""
    known: Known = {}
    for (site, sizes, node, number), use in zip(uses, watched, strict=True):
        if node is not None:
            layout = _of_use(taint, graph, node, number, use.leads, n)
            key = site, len(sizes)
            known[key] = layout if known.get(key, layout) == layout else None
    return known


def followed(
    known: Known, graph: Graph, uses: Sequence[Use], watched: Sequence[Watched], n: int
) -> list[int | str | None]:
    """For each use of another forward that took the same way; None: nobody knows."""
    found: list[int | str | None] = []
    for (site, sizes, node, _), use in zip(uses, watched, strict=True):
        layout = known.get((site, len(sizes))) if node in graph.parents else None
        doubt = isinstance(layout, int) and not _fits(layout, use.leads, n)
        found.append(None if doubt else layout)
    return found


def _of_use(
    taint: Taint, graph: Graph, node: Node, number: int, leads: Sequence[int], n: int
) -> int | str | None:
    shape, place = shape_of(node, number), taint.where(node, number)
    if place is None and taint.clean(node, number):
        # Of no sample, and as large as what it meets: there each row is of one.
        above = [parent for parent, _ in graph.parents.get(node, ())]
        if all(p.name() in BROADCASTS and shape_of(p, 0) == shape for p in above):
            places = {taint.where(parent, 0) for parent in above}
            place = places.pop() if len(places) == 1 else None
    layout = _layout(shape, place, leads, n)
    if layout is None and place is not None and place != GONE and 0 not in shape:
        return ASTRAY
    return layout if layout is None or _fits(layout, leads, n) else None


def _layout(shape: Sequence[int], place: Place | None, leads: Sequence[int], n: int) -> int | None:
    """Of rows counted by `leads`, from the same elements in another shape."""
    total, count = prod(shape), prod(leads)
    if place is None or place == GONE or not total or total % count:
        return None
    step, rest = divmod(place.inner * prod(shape[place.dim + 1 :]) * count, total)
    others = list(leads[1:])
    if rest or not step:  # a sample ends within a row
        return None
    if step * n == count:
        layout = BATCH
    elif step == prod(others[1:] if others[:1] == [n] else others):
        layout = SEQUENCE
    else:
        return None
    return layout


def _fits(layout: int, leads: Sequence[int], n: int) -> bool:
    """Whether rows of these sizes may be so, and no equal sizes hide that they are otherwise."""
    first, *rest = leads or [1]
    if layout == SEQUENCE and rest[:1] == [n]:
        return first != n and n not in rest[1:]
    return first % n == 0 and first != n * n and n not in rest
