"""Products with matrices that are parts of one parameter [E, *, *]: a mixture's experts.

x[rows] @ weight[e], one product for each expert that was hit, or a grouped product of all. The
samples of a product's rows follow from those of the module's output, by the indices between
(proof/owners.py), and the first pass of a structure proves them like any other output.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ..proof.layout import Watched, owners
from ..proof.owners import MAPPING, PRODUCTS, Owned, owners_within, saved
from ..proof.several import End
from ..shared.frontier import Node, is_leaf, shape_of, signed
from ..shared.outer import BySample, Grouped, along, size, sq_norms, to_add, total
from ..shared.products import CAST, LINKS, POINTWISE, transposes
from .copies import untraced

OPERANDS = {"GroupedMmBackward0": 1, "MmBackward0": 1}  # which one is the weight
# Nodes of which it is known what they do with rows: none; among others along a dimension; by index.
KEEPS = LINKS | POINTWISE | {f"{name}Backward0" for name in ("Add", "Div", "Gelu", "Mul", "Sub")}
ALONG = {"CatBackward0", "SelectBackward0", "SliceBackward0", "SoftmaxBackward0", "SplitBackward0",
         "SplitWithSizesBackward0", "SumBackward1"}  # fmt: skip
RANKS = {"SortBackward0", "SortBackward1", "TopkBackward0"}


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


class Served:
    """A call's products, in one backward at a time."""

    def __init__(
        self,
        run: Any,
        recorder: Any,
        products: Mapping[Node, Product],
        held: Mapping[int, Tensor],
        eps: float,
        failed: Callable[[Exception], None],
    ) -> None:
        """held: parameters by their places. eps: of the coarsest gradient inside."""
        self._run, self._recorder, self._held = run, recorder, held
        self._eps, self._failed, self._task = eps, failed, -1
        self._count = Counter(product.place for product in products.values())
        self._parts: dict[int, list[Grouped]] = {}
        for node, product in products.items():
            node.register_prehook(partial(self._arrive, product))

    def begin(self) -> None:
        """Serve this backward: else the module runs again, and edges are counted only."""
        self._task, self._parts = torch._C._current_graph_task_id(), {}

    @untraced
    def _arrive(self, product: Product, incoming: Sequence[Tensor | None]) -> None:
        place = product.place
        if not self._run.arrive([place]) or self._task != torch._C._current_graph_task_id():
            return
        try:
            node, parameter = torch._C._current_autograd_node(), self._held[place]
            parts = self._parts.setdefault(place, [])
            parts.append(product.gradients(node, incoming[0], self._run.n, parameter))
            if len(parts) == self._count[place]:
                self._take(place, Grouped.joined(self._parts.pop(place)))
        except Exception as error:  # never from inside backward()
            self._failed(error)

    def _take(self, place: int, whole: Grouped) -> None:
        run = self._run
        if self._recorder.auditing:
            rounding = size(whole) * max(self._eps, torch.finfo(whole.dtype).eps)
            self._recorder.add_recorded(place, total(whole), rounding)
        if run.waits(place):
            run.add(place, *to_add(whole))
        else:
            run.finish(place, sq_norms(whole))
        if self._recorder.books:
            run.book(BySample(place, whole))
        if run.directions and run.directions[place] is not None:
            run.add_dots(along(whole, run.directions[place]))


def is_experts(module: nn.Module) -> bool:
    """Return whether all parameters of a module are its own, and [E, *, *] each."""
    parameters = [*module.parameters()]
    own = len(parameters) == len([*module.parameters(recurse=False)])
    return own and all(p.dim() == 3 for p in parameters)


def products_of(
    out: Tensor,
    leads: Sequence[int],
    given: Sequence[Tensor],
    held: Mapping[int, Tensor],
    n: int,
    layout: int,
    start: int,
) -> Products:
    """out: which has rows [*leads] of this layout, as what it is made of. start: of the nodes that
    the call made."""
    rows, end = owners(leads, n).get(layout), (out.grad_fn, out.output_nr)
    first = given[0].grad_fn if given else None
    if rows is None or first is None:
        return NONE
    rows = rows.to(given[0].device)
    nodes = _between(end[0], first)
    leaves = {id(p): place for place, p in held.items()}
    found: dict[Node, Product] = {}
    edges = 0
    their: set[tuple[Node, int]] = set()  # edges of parameters, of each product
    for node in nodes:
        edges += sum(_place(child, leaves) is not None for child, _ in node.next_functions)
        made_of = _product(node, leaves, held)
        if made_of is not None:
            found[node], edge = made_of
            their.add(edge)
    if not found or not edges == len(found) == len(their):
        return NONE
    owned = owners_within(end, rows, nodes, n, leads)
    flags: list[Tensor] = []
    inside = set(nodes)
    for edge in {edge for node in nodes for edge in node.next_functions}:
        if edge[0] is None or edge[0] in inside or is_leaf(edge[0]):
            continue
        source = owned.get(edge)  # what rows of an input come to, they must be of
        its = None if source is None else owners([len(source.owners)], n).get(layout)
        if source is None or its is None:
            return NONE
        its = its.to(rows.device)
        flags += [((source.owners != its) & (source.owners != n)).any(), *source.flags]
    for node, product in found.items():
        of_rows = owned.get((node, 0))
        if of_rows is None or len(of_rows.owners) != shape_of(node, 0)[0]:
            return NONE
        if node.next_functions[0][0] is None:  # rows that are data: whose, nothing shows
            return NONE
        product.owners = of_rows.owners
        flags += of_rows.flags
    by_row: set[Node] = set()
    for node in nodes:
        outputs = range(len(node._input_metadata))
        made = next((owned[node, k] for k in outputs if (node, k) in owned), None)
        if made is None:
            continue
        if not _is_known(node, made):
            return NONE
        own = node.name() in MAPPING and node._sequence_nr() >= start  # nothing else has its rows,
        if node.name() in RANKS or (
            own and not bool((made.owners == n).any())
        ):  # and all come back
            by_row.add(node)
    if bool(torch.stack(flags).any()):
        return NONE
    ends = []
    for node, product in found.items():
        its = product.owners.masked_fill(product.owners == n, 0)  # of none: they receive zeros
        ends.append(End(Watched(node, 0, [len(its)], samples=its), (its, its)))
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


def _is_known(node: Node, made: Owned) -> bool:
    """Return whether the owners below a node follow from what it made, whatever the batch."""
    name, shape, owned = node.name(), shape_of(node, 0), made.owners
    if name in KEEPS:
        return True
    if name in MAPPING:
        indices = getattr(node, "_saved_indices", None)
        return signed(node._saved_dim) == 0 if indices is None else indices[0] is not None
    if name in ALONG or name in RANKS:
        operand = node.next_functions[0]
        whole = len(shape if operand[0] is None else shape_of(*operand))
        dims = node._saved_dim if name == "SumBackward1" else (node._saved_dim,)
        rows = prod(shape[: min(signed(dim) % max(1, whole) for dim in dims)])
        if rows % len(owned) == 0:
            return True
        each = owned.view(rows, -1)  # what it works along may be of one sample
        return not bool((each != each[:, :1]).any())
    return name in PRODUCTS and node.next_functions[PRODUCTS[name]][0] is not None


def _place(child: Node, leaves: Mapping[int, int]) -> int | None:
    return leaves.get(id(child.variable)) if child is not None and is_leaf(child) else None


def _product(
    node: Node, leaves: Mapping[int, int], held: Mapping[int, Tensor]
) -> tuple[Product, tuple[Node, int]] | None:
    """Return a node's product with a matrix of a parameter, and the parameter's edge: a node above
    it, and its operand there."""
    edge = node, OPERANDS.get(node.name(), -1)
    if edge[1] < 0:
        return None
    child, matrix, turned = node.next_functions[edge[1]][0], None, False
    while child is not None and not is_leaf(child):
        if child.name() == "SelectBackward0" and signed(child._saved_dim) == 0 and matrix is None:
            matrix = signed(child._saved_index) % shape_of(*child.next_functions[0])[0]
        elif transposes(child):
            turned = not turned
        elif child.name() != CAST:
            return None
        edge, child = (child, 0), child.next_functions[0][0]
    place = _place(child, leaves)
    if place is None or (matrix is None) == (node.name() == "MmBackward0"):
        return None
    sizes, rows = held[place].shape[1:], saved(node, "self")
    fits = rows is not None and (*rows.shape[1:], *shape_of(node, 0)[1:])
    if fits != tuple(sizes[::-1] if turned else sizes):
        return None
    return Product(place, matrix, turned, torch.empty(0)), edge
