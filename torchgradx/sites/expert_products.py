"""Finds the products of a call with the matrices of its module's parameters, see experts.py.

The owners (samples) of a product's rows follow from those of the module's output by the indices
between them (graph/owners.py). The first pass of a structure proves them like those of any output.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..gradients.elementwise import CAST, LINKS, POINTWISE, is_transpose
from ..gradients.grouped import GROUPED, Pairs
from ..gradients.products import selected_rows
from ..graph.layout import Watched, owners
from ..graph.nodes import Node, is_leaf, shape_of, to_signed
from ..graph.owners import MAPPING, ROWS_OPERAND, Owned, owners_within
from ..graph.unpacking import saved_value
from .experts import (
    NO_PRODUCTS,
    OPERANDS,
    ExpertGroup,
    ExpertProduct,
    Products,
    UnknownRowsError,
)
from .several import End

MAX_KEPT = 16  # of one site
# Nodes that keep each row where it is.
KEEPS_ROWS = LINKS | POINTWISE | {f"{name}Backward0" for name in (
    "Add", "ClampMax", "ClampMin", "Div", "Gelu", "Mul", "Sub",
)} | {"ClampBackward1", "SqueezeBackward1"}  # fmt: skip
# Nodes that work along one dimension.
ALONG = {"CatBackward0", "SelectBackward0", "SliceBackward0", "SoftmaxBackward0", "SplitBackward0",
         "SplitWithSizesBackward0", "SumBackward1"}  # fmt: skip
RANKS = {"SortBackward0", "SortBackward1", "TopkBackward0"}
Owners = Mapping[tuple[Node, int], Owned]  # of the rows of nodes' outputs


class Rows(NamedTuple):
    """Sizes and layout of the rows of a call's output, or of an operand."""

    leads: tuple[int, ...]  # sizes
    n: int
    layout: int


def find_products(
    out: Tensor,
    rows: Rows,
    operands: Sequence[Tensor],
    parameters: Mapping[int, Tensor],
    start: int,
) -> Products:
    """Return the products of a call, or raise UnknownRowsError. rows: of `out`; those of operands
    have the same layout. start: sequence number of the first node that the call made."""
    first = operands[0].grad_fn if operands else None
    if first is None:
        return NO_PRODUCTS
    nodes = _nodes_between(out.grad_fn, first)
    samples = _samples_of(rows, operands[0].device)
    products = all_products(nodes, {id(p): k for k, p in parameters.items()}, parameters)
    if samples is None or not products:
        return NO_PRODUCTS
    n, only = rows.n, {p.node: p.rows_operand for p in products}
    owned = owners_within((out.grad_fn, out.output_nr), samples, nodes, n, rows.leads, only)
    flags = _input_flags(nodes, owned, rows) + _product_flags(products, owned)
    moves: dict[Node, Tensor] = {}  # nodes that move rows by values; whether one drops rows
    for node in nodes:
        outputs = range(len(node._input_metadata))
        made = next((owned[node, i] for i in outputs if (node, i) in owned), None)
        if made is None:
            continue
        flags += _mixing_flags(node, made)
        if node.name() in MAPPING and node._sequence_nr() >= start:  # only this call has its rows
            moves[node] = (made.owners == n).any()
    groups = group(products, owned, parameters, n)
    drops = _read(flags, moves, [*dict.fromkeys(group.pairs for group in groups.values())])
    by_row = {node for node in nodes if node.name() in RANKS}
    by_row |= {node for node, dropping in zip(moves, drops, strict=True) if not dropping}
    ends = []
    for node in dict.fromkeys(product.node for product in products):
        owners_of = owned[node, 0].owners
        owners_of = owners_of.masked_fill(owners_of == n, 0)  # rows of no sample receive zeros
        watched = Watched(node, 0, [len(owners_of)], samples=owners_of)
        ends.append(End(watched, (owners_of, owners_of)))
    return Products(groups, ends, dict.fromkeys(by_row, sum(drops)))


def _read(
    flags: Sequence[Tensor], moves: Mapping[Node, Tensor], pairs: Sequence[Pairs]
) -> list[bool]:
    """Read from the device once: the lengths of pairs, the flags (raise UnknownRowsError if one is
    set), and return whether each of `moves` drops a row."""
    answers = torch.stack([*flags, *moves.values()]).long()
    read = torch.cat([answers, *(p.lengths for p in pairs)]).cpu()
    answers, *lengths = read.split([len(answers), *(len(p.lengths) for p in pairs)])
    for p, known in zip(pairs, lengths, strict=True):
        p.known = known
    is_set: list[bool] = answers.bool().tolist()
    if any(is_set[: len(flags)]):
        raise UnknownRowsError
    return is_set[len(flags) :]


_samples: dict[Any, Tensor] = {}  # see _samples_of


def _samples_of(rows: Rows, device: torch.device) -> Tensor | None:
    """Return the sample of each row; None: the sizes do not allow the layout."""
    if (rows, device) not in _samples:
        found = owners(rows.leads, rows.n).get(rows.layout)
        if found is None:
            return None
        if len(_samples) > MAX_KEPT:
            _samples.clear()
        _samples[rows, device] = found.to(device)
    return _samples[rows, device]


def all_products(
    nodes: Iterable[Node], places: Mapping[int, int], parameters: Mapping[int, Tensor]
) -> list[ExpertProduct]:
    """Return the products with parameters; empty, if nodes use the parameters in other ways too.
    places: by the ids of their leaves. parameters: [E, *, *] or [E, *], by place."""
    products = [product for node in nodes for product in _products_at(node, places, parameters)]
    edges = (child for node in nodes for child, _ in node.next_functions)
    uses = sum(_place_of(child, places) is not None for child in edges)
    return products if uses == len(products) == len({p.edge for p in products}) else []


# Flags are bool tensors [] on the device. If any is set, rows of products have no owners.


def _input_flags(nodes: Sequence[Node], owned: Owners, rows: Rows) -> list[Tensor]:
    """Return flags that are set where rows of the inputs get gradients of other samples."""
    inside, flags = set(nodes), list[Tensor]()
    for edge in dict.fromkeys(edge for node in nodes for edge in node.next_functions):
        if edge[0] is None or edge[0] in inside or is_leaf(edge[0]):
            continue
        found = owned.get(edge)
        if found is None:
            raise UnknownRowsError
        here = rows._replace(leads=(len(found.owners),))
        expected = _samples_of(here, found.owners.device)
        if expected is None:
            raise UnknownRowsError
        flags += [((found.owners != expected) & (found.owners != rows.n)).any(), *found.flags]
    return flags


def _product_flags(products: Sequence[ExpertProduct], owned: Owners) -> list[Tensor]:
    """Return flags that are set where a product's rows are of several samples."""
    flags: list[Tensor] = []
    for product in products:
        found = owned.get((product.node, 0))
        if found is None or len(found.owners) != shape_of(product.node, 0)[0]:
            raise UnknownRowsError
        if product.node.next_functions[product.rows_operand][0] is None:
            raise UnknownRowsError  # the rows are data, of samples that no graph shows
        flags += found.flags
    return flags


def _mixing_flags(node: Node, made: Owned) -> list[Tensor]:
    """Return flags that are set where a node's output does not show the owners of its operand."""
    name, shape, owned = node.name(), shape_of(node, 0), made.owners
    if name in KEEPS_ROWS:
        return []
    along = name in ALONG or name in RANKS
    if name in MAPPING:
        indices = saved_value(node, "indices")
        along = indices is None and to_signed(node._saved_dim) != 0
        if not along and (indices is None or indices[0] is not None):
            return []
    if along:
        operand = node.next_functions[0]
        dims = len(shape if operand[0] is None else shape_of(*operand))
        saved = node._saved_dim if name == "SumBackward1" else (node._saved_dim,)
        rows = prod(shape[: min(to_signed(dim) % max(1, dims) for dim in saved)])
        if not len(owned) or rows % len(owned) == 0:
            return []
        each = owned.view(rows, -1)  # along the dimension, all rows must be of one sample
        return [(each != each[:, :1]).any()]
    if name not in ROWS_OPERAND or node.next_functions[ROWS_OPERAND[name]][0] is None:
        raise UnknownRowsError
    return []


def group(
    products: Sequence[ExpertProduct], owned: Owners, parameters: Mapping[int, Tensor], n: int
) -> dict[int, ExpertGroup]:
    """Return the products by their parameters' places; products of the same rows share pairs."""
    groups: dict[int, ExpertGroup] = {}
    pairs: dict[Any, Pairs] = {}
    for place in dict.fromkeys(product.place for product in products):
        group, count = [p for p in products if p.place == place], len(parameters[place])
        owners = [owned[p.node, 0].owners for p in group]
        matrices = (p.matrix if isinstance(p.matrix, int) else id(p.matrix) for p in group)
        key = *map(id, owners), *matrices
        if key not in pairs:
            matrix = torch.cat([p.matrices(count, owners[0].device) for p in group])
            pairs[key] = Pairs.of(torch.cat(owners), matrix, n, count)
        groups[place] = ExpertGroup(group, pairs[key])
    return groups


def _nodes_between(end: Node, first: Node) -> list[Node]:
    """Return an end and the nodes below it that were made after `first`."""
    found, visited = [end], {end}
    for node in found:  # grows as it goes
        for child, _ in node.next_functions:
            if child is None or child in visited or is_leaf(child):
                continue
            if child._sequence_nr() > first._sequence_nr():
                visited.add(child)
                found.append(child)
    return found


def _place_of(node: Node, places: Mapping[int, int]) -> int | None:
    """Return the place of a parameter's node; None: of any other. places: by the tensor's id."""
    return places.get(id(node.variable)) if node is not None and is_leaf(node) else None


def _products_at(
    node: Node, places: Mapping[int, int], parameters: Mapping[int, Tensor]
) -> Iterator[ExpertProduct]:
    """Yield a node's products with parameters' matrices."""
    for operand, (rows_operand, saved_name) in OPERANDS.get(node.name(), {}).items():
        edge, transposed = (node, operand), saved_name == "mat2"
        matrix = saved_value(node, "offs") if node.name() == GROUPED else None
        child = node.next_functions[operand][0]
        while child is not None and not is_leaf(child):
            selected = _selected(child) if matrix is None else None
            if selected is not None:
                matrix = selected
            elif is_transpose(child):
                transposed = not transposed
            elif child.name() != CAST:
                break
            edge, child = (child, 0), child.next_functions[0][0]
        place = _place_of(child, places)
        if place is not None and matrix is None and len(parameters[place]) == 1:
            matrix = 0
        if place is not None and matrix is not None:
            found = edge, matrix, transposed, rows_operand, saved_name
            product = ExpertProduct(node, place, operand, *found)
            if product.fits(parameters[place]):
                yield product


def _selected(node: Node) -> int | Tensor | None:
    """Return the index of the matrix that a node selects from a parameter; [R], if it has one for
    each row; None: it selects none."""
    if node.name() == "SelectBackward0" and (rows := selected_rows(node)):
        return rows.start
    ids = saved_value(node, "indices") if node.name() == "IndexBackward0" else None
    if not ids or len(ids) > 1 or ids[0].dtype != torch.long or ids[0].dim() != 1:
        return None
    selected: Tensor = ids[0]
    return selected
