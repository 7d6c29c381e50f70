"""Sizes of what a node makes, as far as they say where samples may be."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

from .layout import Watched, layout_from_sizes
from .nodes import Graph, Node, Shape, shape_of

RESHAPES = {"ReshapeAliasBackward0", "UnsafeViewBackward0", "ViewBackward0"}


def leading_sizes(shape: tuple[int, ...], n: int) -> tuple[int, ...]:
    """Return the dimensions that may hold samples: the first two that are not a leading 1."""
    while len(shape) > 1 and shape[0] == 1:
        shape = shape[1:]
    several = len(shape) > 2 or shape[1:] == (n,)  # else the second is of features
    return shape[: 1 + several] or (1,)


def look_of(shape: Sequence[int], n: int) -> tuple[Any, ...]:
    """Return what sizes say of where samples may be: a layout proven in one shape holds in another
    that looks the same. At T = 1 rows t*N+n and n*T+t are the same, and a leading 1 may be T."""
    ones = next((d for d, size in enumerate(shape) if size != 1), len(shape))
    whole = n > 0 and ones < len(shape) and shape[ones] % n == 0
    return ones, whole, *(size == n for size in shape)


def layout_from_views(
    graph: Graph, node: Node, number: int, leads: Sequence[int], n: int
) -> int | None:
    """Return the layout of an output's rows, from its sizes and its views', if in no doubt."""
    return _in_no_doubt(leads, _views(graph, node, number) if n > 1 else [], n)


def layout_of_node(graph: Graph, use: Watched, n: int) -> int | None:
    """Return that of any node's output, whose last dimensions may be as many by themselves."""
    views, shape = _views(graph, use.node, use.output_nr), shape_of(use.node, use.output_nr)
    if shape.count(n) > (layout_from_sizes(use.leads, n) is not None):
        return None
    return None if any(view.count(n) > 1 for view in views) else _in_no_doubt(use.leads, views, n)


def _in_no_doubt(leads: Sequence[int], views: Sequence[Shape], n: int) -> int | None:
    rows = [tuple(leads)]
    for shape in views:
        cuts = (shape[:k] for k in range(1, len(shape)) if shape[0] > 1)
        rows.append(next((cut for cut in cuts if prod(cut) == prod(leads)), ()))
    if n > 1 and any(sizes.count(n) > 1 for sizes in rows):
        return None
    found = {layout_from_sizes(sizes, n) for sizes in rows} - {None}
    return found.pop() if len(found) == 1 else None


def _views(graph: Graph, node: Node, number: int) -> list[tuple[int, ...]]:
    """Return the sizes of what an output is reshaped to, as it lies in memory."""
    found = [(node, number)]
    for view, output in found:  # grows as it goes
        found += [(parent, 0) for parent, of in graph.parents.get(view, ())
                  if of == output and parent.name() in RESHAPES]  # fmt: skip
    return [shape_of(view, 0) for view, _ in found[1:]]
