"""Products with matrices that are parts of one parameter [E, *, *]: a mixture's experts.

x[rows] @ weight[e], one product for each expert that was hit, or a grouped product of all. The
samples of a product's rows follow from those of the module's output, by the indices between
(proof/owners.py), and the first pass of a structure proves them like any other output.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import NamedTuple

import torch
from torch import Tensor

from ..proof.layout import Watched, owners
from ..proof.owners import MAPPING, Owned, fitted, owners_within
from ..proof.several import End
from ..shared.frontier import Node, is_leaf, shape_of, signed
from ..shared.outer import Grouped
from ..shared.products import CAST

TURNS = {"TBackward0", "TransposeBackward0"}
RANKS = {"SortBackward0", "SortBackward1", "TopkBackward0"}
OPERANDS = {"GroupedMmBackward0": 1, "MmBackward0": 1}  # which one is the weight


@dataclass
class Product:
    """One product of a call."""

    place: int  # of the parameter
    matrix: int | None  # of the parameter; None: a grouped product, of all
    turned: bool  # the parameter holds each matrix transposed
    owners: Tensor  # the sample of each row

    def gradients(self, node: Node, g: Tensor | None, count: int, parameter: Tensor) -> Grouped:
        """Return those by sample, of the product's node and what it receives."""
        rows = node._saved_self
        if g is None:
            g = rows.new_zeros(len(rows), *shape_of(node, 0)[1:])
        if self.matrix is None:
            places = torch.arange(len(g), device=g.device)
            matrix = torch.bucketize(places, node._saved_offs, right=True)
        else:
            matrix = torch.full((len(g),), self.matrix, device=g.device)
        pair = (g, rows) if self.turned else (rows, g)
        left, right = (t.detach().to(parameter.dtype) for t in pair)
        return Grouped(left, right, matrix, self.owners, count, len(parameter))


class Products(NamedTuple):
    """All that a call's output has of its module's parameters. Empty: something else, or the
    samples of their rows do not show."""

    of: Mapping[Node, Product]
    ends: list[End]  # what a proof holds their rows against
    by_row: frozenset[Node]  # nodes that move rows by their values, each sample's to its own


NONE = Products({}, [], frozenset())


def products_of(
    end: tuple[Node, int],
    leads: Sequence[int],
    given: Sequence[Tensor],
    held: Mapping[int, Tensor],
    n: int,
    layout: int,
) -> Products:
    """end: where the output is, which has rows [*leads] of this layout, as given[0] has."""
    rows = owners(leads, n).get(layout)
    first = given[0].grad_fn if given else None
    if rows is None or first is None:
        return NONE
    rows = rows.to(given[0].device)
    nodes = _between(end[0], first)
    leaves = {id(p): place for place, p in held.items()}
    found: dict[Node, Product] = {}
    edges = 0
    for node in nodes:
        edges += sum(_place(child, leaves) is not None for child, _ in node.next_functions)
        operand = OPERANDS.get(node.name())
        product = None if operand is None else _product(node, operand, leaves, held)
        if product is not None:
            found[node] = product
    if not found or edges != len(found):
        return NONE
    owned = owners_within(end, rows, nodes, n, leads)
    source = owned.get((first, given[0].output_nr))
    if source is None:
        return NONE
    whole = fitted(source, given[0].shape, given[0].shape[: len(leads)])
    if whole is None or whole.shape != rows.shape:
        return NONE
    flags = [((whole != rows) & (whole != n)).any(), *source.flags]
    for node, product in found.items():
        of_rows = owned.get((node, 0))
        if of_rows is None or len(of_rows.owners) != shape_of(node, 0)[0]:
            return NONE
        product.owners = of_rows.owners
        flags += of_rows.flags
    by_row = [node for node in nodes if node.name() in MAPPING and (node, 0) in owned]
    for node in nodes:
        apart = _ranks(node, owned.get((node, 0)))
        if apart is not None:
            by_row.append(node)
            flags.append(apart)
    if bool(torch.stack(flags).any()):
        return NONE
    ends = [End(Watched(node, 0, [len(p.owners)], samples=p.owners), (p.owners, p.owners))
            for node, p in found.items()]  # fmt: skip
    return Products(found, ends, frozenset(by_row))


def _between(end: Node, first: Node) -> list[Node]:
    """Return the nodes made after `first` that lead to an end."""
    found, seen = [end], {end}
    for node in found:  # grows as it goes
        for child, _ in node.next_functions:
            if child is None or child in seen or is_leaf(child):
                continue
            if child._sequence_nr() > first._sequence_nr():
                seen.add(child)
                found.append(child)
    return found


def _ranks(node: Node, made: Owned | None) -> Tensor | None:
    """Return whether a choice of the largest is among several samples; None: it is no such node, or
    of owners that are not known."""
    if node.name() not in RANKS or made is None:
        return None
    shape = shape_of(node, 0)
    rows = prod(shape[: signed(node._saved_dim) % max(1, len(shape))])
    each = (
        made.owners
        if rows % len(made.owners)
        else made.owners.repeat_interleave(rows // len(made.owners))
    )
    each = each.view(rows, -1)
    return (each != each[:, :1]).any()


def _place(child: Node, leaves: Mapping[int, int]) -> int | None:
    return leaves.get(id(child.variable)) if child is not None and is_leaf(child) else None


def _product(
    node: Node, operand: int, leaves: Mapping[int, int], held: Mapping[int, Tensor]
) -> Product | None:
    child, matrix, turned = node.next_functions[operand][0], None, False
    while child is not None and not is_leaf(child):
        if child.name() == "SelectBackward0" and signed(child._saved_dim) == 0 and matrix is None:
            matrix = signed(child._saved_index)
        elif child.name() in TURNS:
            turned = not turned
        elif child.name() != CAST:
            return None
        child = child.next_functions[0][0]
    place = _place(child, leaves)
    if place is None or (matrix is None) == (node.name() == "MmBackward0"):
        return None
    rows, columns = held[place].shape[1:][::-1] if turned else held[place].shape[1:]
    saved = getattr(node, "_raw_saved_self", None)
    plain = saved is not None and getattr(saved, "unpack_hook", None) is None
    if not plain or node._saved_self.shape[1:] != (rows,) or shape_of(node, 0)[1:] != (columns,):
        return None
    return Product(place, matrix, turned, torch.empty(0))
