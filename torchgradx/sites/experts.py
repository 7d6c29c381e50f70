"""Products with matrices that are parts of one parameter [E, *, *]: a mixture's experts.

x[rows] @ weight[e], one product for each expert that was hit, or a grouped product of all. The
samples of a product's rows follow from those of the module's output, by the indices between
(proof/owners.py), and the first pass of a structure proves them like any other output.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..proof.layout import Watched, owners
from ..proof.owners import owners_within
from ..proof.several import End
from ..shared.frontier import Node, below, is_leaf, shape_of, signed
from ..shared.outer import Grouped
from ..shared.products import CAST

TURNS = {"TBackward0", "TransposeBackward0"}
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


def products_of(
    end: tuple[Node, int],
    leads: Sequence[int],
    given: Iterable[Tensor],
    held: Mapping[int, Tensor],
    n: int,
    layout: int,
) -> dict[Node, Product]:
    """Return the products that are all that a call's output has of its module's parameters.

    Empty: it has something else of them, or of which samples their rows are does not show.
    """
    rows = owners(leads, n).get(layout)
    if rows is None:
        return {}
    nodes = below([end[0]], {t.grad_fn for t in given})
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
        return {}
    device = next(iter(held.values())).device
    owned = owners_within(end, rows.to(device), nodes, n, leads)
    for node, product in found.items():
        of_rows = owned.get((node, 0))
        if of_rows is None or len(of_rows.owners) != shape_of(node, 0)[0]:
            return {}
        if of_rows.flags and bool(torch.stack(of_rows.flags).any()):
            return {}
        product.owners = of_rows.owners
    return found


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


def ends_of_products(products: Mapping[Node, Product]) -> list[End]:
    """Return what a proof holds the products' rows against."""
    return [
        End(Watched(node, 0, [len(p.owners)], samples=p.owners), (p.owners, p.owners))
        for node, p in products.items()
    ]
