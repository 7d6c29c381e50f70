"""Sizes of a node's outputs, as far as they show which dimension may hold the samples."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from math import prod
from operator import mul
from typing import Any

from torch import Tensor

from .layout import BATCH, LAST, MINOR, SECOND, SEQUENCE, Watched, layout_from_sizes
from .nodes import Graph, Node, Shape, shape_of

RESHAPES = {"ReshapeAliasBackward0", "UnsafeViewBackward0", "ViewBackward0"}


def leading_sizes(shape: Shape, n: int) -> Shape:
    """Return the sizes of the dimensions that may hold samples: two at most, without leading 1s."""
    while len(shape) > 1 and shape[0] == 1:
        shape = shape[1:]
    is_second = len(shape) > 2 or shape[1:] == (n,)  # else the second dimension has features
    return shape[: 1 + is_second] or (1,)


def look_of(shape: Sequence[int], n: int, layout: int = BATCH) -> tuple[Any, ...]:
    """Return a key: a layout proven in one shape holds in another shape with the same key.
    It has the number of leading 1s, since at T = 1 rows t*N+n and n*T+t are the same; and the rows
    of each sample: rows [T N S] have the order of a layout at T = 1 or S = 1."""
    ones = next((d for d, size in enumerate(shape) if size != 1), len(shape))
    dim = {SECOND: 1, MINOR: 1, LAST: len(shape) - 1}.get(layout, ones)
    size = shape[dim] if n > 1 and dim < len(shape) else n
    return ones, size // n if n and size % n == 0 else -1, *(size == n for size in shape)


def layout_of_shape(shape: Shape, n: int) -> int | None:
    """Return the layout of an output of this shape if its leading sizes leave no doubt."""
    return layout_from_sizes(leading_sizes(shape, n), n)


def layout_from_views(
    graph: Graph, node: Node, number: int, leads: Sequence[int], n: int
) -> int | None:
    """Return the layout of an output's rows if its sizes and those of its views leave no doubt."""
    return _only_layout(leads, _views(graph, node, number) if n > 1 else [], n)


def layout_of_node(graph: Graph, use: Watched, n: int) -> int | None:
    """Return the layout of any node's output if its sizes leave no doubt.
    It is stricter than layout_from_views(): the last dimensions may have size N by chance."""
    views, shape = _views(graph, use.node, use.output_nr), shape_of(use.node, use.output_nr)
    if shape.count(n) > (layout_from_sizes(use.leads, n) is not None):
        return None
    return None if any(view.count(n) > 1 for view in views) else _only_layout(use.leads, views, n)


def _only_layout(leads: Sequence[int], views: Sequence[Shape], n: int) -> int | None:
    """Return the layout if the leading sizes of an output and of its views show only one."""
    rows = [tuple(leads)]
    for shape in views:
        cuts = (shape[:k] for k in range(1, 1 + len(shape)) if shape[0] > 1)
        rows.append(next((cut for cut in cuts if prod(cut) == prod(leads)), ()))
    if n > 1 and any(sizes.count(n) > 1 for sizes in rows):
        return None
    layouts = {_layout_as(sizes, rows[0], n) for sizes in rows} - {None}
    return layouts.pop() if len(layouts) == 1 else None


def _layout_as(sizes: Shape, leads: Shape, n: int) -> int | None:
    """Return the layout that sizes show, if the rows of `leads` have the same samples under it:
    [T, N, S] shows samples inside the rows [T N S], which have no layout. See layout.owners()."""
    layout = layout_from_sizes(sizes, n)
    if n > 1 and layout == BATCH and leads[0] % n:
        return None
    if n > 1 and layout == SEQUENCE and prod(sizes[2:]) != prod(leads[1 + (leads[1:2] == (n,)) :]):
        return None
    return layout


def _views(graph: Graph, node: Node, number: int) -> list[Shape]:
    """Return the shapes that an output is reshaped to without moving memory."""
    found = [(node, number)]
    for view, output in found:  # found grows
        found += [(parent, 0) for parent, consumed in graph.parents.get(view, ())
                  if consumed == output and parent.name() in RESHAPES]  # fmt: skip
    return [shape_of(view, 0) for view, _ in found[1:]]


def counts_of(shape: Sequence[int]) -> list[int]:
    """Return the number of rows for 0, 1, 2, ... leading dimensions."""
    return list(accumulate(shape, mul, initial=1))


def leading(shape: Sequence[int], length: int) -> int:
    """Return the number of leading dimensions that have so many rows; -1: none."""
    return next((k for k, rows in enumerate(counts_of(shape)) if rows == length), -1)


def row_dims(t: Tensor, rows: int) -> int:
    """Return how many leading dimensions of a tensor have so many rows together; 0: none do."""
    return next((k for k in range(1, t.dim() + 1) if t.shape[:k].numel() == rows), 0)


def as_rows(samples: Tensor, t: Tensor) -> Tensor:
    """Return samples [rows] in a shape that broadcasts to `t`; -1 if `t` has no such rows."""
    dims = row_dims(t, len(samples))
    rows = samples.view(t.shape[:dims]) if dims else samples.new_full((), -1)
    return rows.view(*rows.shape, *[1] * (t.dim() - rows.dim()))
