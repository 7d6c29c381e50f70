"""Samples that an operation sums over, or chooses among, and that are apart all the same: what they
meet there, as a matrix of zeros and ones, has it so. Another batch's may not.

From each layer of which the samples' place is proven they are followed through the graph, by what
operations do to sizes, to where the dimension that holds them is gone.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import prod

from torch import Tensor

from ..shared.frontier import Graph, Node, shape_of
from .layout import BATCH, MINOR, SECOND, SEQUENCE, Watched
from .operation import numbers, signed
from .order import FACTORS
from .sample_dims import GONE, Place, viewed

__all__ = ["contracts"]

# The operand that is the first factor, by what nodes are called; a dot leaves no dimension.
PRODUCTS = {
    f"{name.replace('_', '')}backward0": first for name, first in FACTORS.items() if name != "dot"
}
VIEWS = {"ReshapeAliasBackward0", "UnsafeViewBackward0", "ViewBackward0"}


def contracts(
    outputs: Sequence[Tensor],
    uses: Sequence[Watched],
    layouts: Sequence[int | str | None],
    n: int,
    flat: bool,
) -> bool:
    """Whether a use's rows come to these outputs, of N samples, by an operation that leaves them
    apart by its values alone. `flat`: or by one that may, as the model was given rows alone."""
    graph = Graph(outputs)
    todo = [
        (use.node, use.output_nr, place)
        for use, layout in zip(uses, layouts, strict=True)
        if use.node in graph.parents and (place := _place(use, layout, n)) is not None
    ]
    seen = {*todo}
    for node, number, place in todo:  # grows as it goes
        for parent, k, at in _above(graph, node, number, place, n):
            if at == GONE or (flat and at is None):
                return True
            if at is not None and (parent, k, at) not in seen:
                seen.add((parent, k, at))
                todo.append((parent, k, at))
    return False


def _place(use: Watched, layout: int | str | None, n: int) -> Place | None:
    """Of the samples in an output, where it is proven."""
    leads, shape = use.leads or [1], shape_of(use.node, use.output_nr)
    if 0 in leads:
        return None
    if layout == BATCH and leads[0] % n == 0:
        place = Place(0, leads[0] // n)
    elif layout == SEQUENCE:
        place = Place(int(len(leads) > 1 and leads[1] == n))
    elif layout in (SECOND, MINOR) and len(leads) > 1:
        place = Place(1, 1 if layout == MINOR else leads[1] // n)
    else:
        return None
    return viewed(shape, [*leads, prod(shape) // prod(leads)], place, n)


def _above(
    graph: Graph, node: Node, number: int, place: Place, n: int
) -> Iterator[tuple[Node, int, Place | None]]:
    shape = shape_of(node, number)
    for parent in dict.fromkeys(p for p, k in graph.parents[node] if k == number):
        for operand, edge in enumerate(parent.next_functions):
            if edge == (node, number):
                for k in graph.numbers(parent) or [0]:
                    out = shape_of(parent, k)
                    yield parent, k, _through(parent, operand, shape, out, place, n)


def _through(
    node: Node, operand: int, shape: Sequence[int], out: Sequence[int], place: Place, n: int
) -> Place | None:
    """Where a node leaves the samples of one operand: GONE where it sums over them, or picks one;
    None: not known."""
    name, dims, dim = node.name(), len(shape), place.dim
    if name in VIEWS:
        return viewed(out, shape, place, n)
    first = PRODUCTS.get(name.lower())
    if first is not None and operand >= first:
        left = operand == first
        if dim == (dims - 1 if left else max(0, dims - 2)):
            return GONE
        dim = dim if left or dim < dims - 2 else len(out) - 1
    elif name.startswith("ScaledDotProduct"):
        if dim == dims - 2 and operand:
            return GONE  # of keys and values
    elif name == "CdistBackward0":
        dim += operand == 1 and dim == dims - 2
    elif hasattr(node, "_saved_keepdim"):
        axes = _axes(node, dims) or {*range(dims)}
        if dim in axes:
            return GONE
        dim -= 0 if node._saved_keepdim else sum(axis < dim for axis in axes)
    elif name == "TBackward0":
        dim = dims - 1 - dim
    elif name == "TransposeBackward0":
        one, other = (signed(k) % dims for k in (node._saved_dim0, node._saved_dim1))
        dim = {one: other, other: one}.get(dim, dim)
    elif name == "PermuteBackward0":
        dim = [signed(k) % dims for k in node._saved_dims].index(dim)
    elif name in ("StackBackward0", "UnsqueezeBackward0"):
        dim += signed(node._saved_dim) % len(out) <= dim
    elif name in ("SelectBackward0", "UnbindBackward0") or name.startswith("SqueezeBackward"):
        axes = _axes(node, dims) if hasattr(node, "_saved_dim") else {*range(dims)}
        taken = {axis for axis in axes if shape[axis] == 1 or "Squeeze" not in name}
        if dim in taken:
            return None
        dim -= sum(axis < dim for axis in taken)
    else:
        dim += len(out) - dims  # broadcast
    stands = 0 <= dim < len(out) and out[dim] == shape[place.dim]
    return place.at(dim) if stands else None


def _axes(node: Node, dims: int) -> set[int]:
    return {signed(k) % max(1, dims) for k in numbers([node._saved_dim])}
