"""Products with the matrices of one parameter [E, *, *]: a mixture of experts.

x[rows] @ weight[e] + bias[e], once for each expert with rows; one grouped product of all; or one
with weight[ids]. A bias [E, *] is a product of its expert's rows with ones. The owners (samples) of
a product's rows follow from those of the module's output by the indices between them
(graph/owners.py). The first pass of a structure proves them like those of any output.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ..extension import Pass, Recorder
from ..gradients.by_sample import deliver, total
from ..gradients.grouped import Grouped, Pairs
from ..gradients.products import CAST, LINKS, POINTWISE, is_transpose
from ..graph.layout import Watched, owners
from ..graph.nodes import Node, is_leaf, shape_of, to_signed
from ..graph.owners import MAPPING, ROWS_OPERAND, Owned, owners_within
from ..graph.unpacking import can_run_twice, is_hooked, keep_handles, saved_value
from ..hooks.copies import untraced
from .several import End

# By node and by the operand that is the parameter: the operand with the rows, and the name under
# which the node saved them; empty: the node adds the parameter to its rows.
OPERANDS: dict[str, dict[int, tuple[int, str]]] = {
    "AddBackward0": {0: (1, ""), 1: (0, "")},
    "AddmmBackward0": {0: (1, ""), 2: (1, "mat1")},
    "BmmBackward0": {0: (1, "mat2"), 1: (0, "self")},
    "GroupedMmBackward0": {1: (0, "self")},
    "MmBackward0": {1: (0, "self")},
}
GROUPED, SINGLE = "GroupedMmBackward0", ("AddmmBackward0", "MmBackward0")
# Nodes that keep each row where it is.
KEEPS_ROWS = LINKS | POINTWISE | {f"{name}Backward0" for name in (
    "Add", "ClampMax", "ClampMin", "Div", "Expand", "Gelu", "Mul", "Sub",
)} | {"ClampBackward1", "SqueezeBackward1"}  # fmt: skip
# Nodes that work along one dimension.
ALONG = {"CatBackward0", "SelectBackward0", "SliceBackward0", "SoftmaxBackward0", "SplitBackward0",
         "SplitWithSizesBackward0", "SumBackward1"}  # fmt: skip
RANKS = {"SortBackward0", "SortBackward1", "TopkBackward0"}
Owners = Mapping[tuple[Node, int], Owned]  # of the rows of nodes' outputs


class UnknownRowsError(Exception):
    """Raised where a graph does not show which samples the rows of products are of."""


@dataclass(eq=False)
class ExpertProduct:
    """One product of a call."""

    node: Node
    place: int  # of the parameter
    operand: int  # of the node, computed from the parameter
    edge: tuple[Node, int]  # into the parameter: the last node before it, and that node's operand
    matrix: int | Tensor  # the index of one matrix; of each row's; or where each one's rows end
    transposed: bool  # the parameter holds each matrix transposed
    rows_operand: int
    saved_name: str  # of the rows, see OPERANDS

    def fits(self, parameter: Tensor) -> bool:
        """Return True if the operand consists of such a parameter's whole matrices."""
        name, sizes, out = self.node.name(), tuple(parameter.shape[1:]), shape_of(self.node, 0)
        shape = shape_of(*self.node.next_functions[self.operand])
        is_one = isinstance(self.matrix, int)
        if any(getattr(self.node, f"_saved_{factor}", 1) != 1 for factor in ("alpha", "beta")):
            return False
        if not self.saved_name:  # a bias [O], or one for each row
            fits = out[1:] == sizes and shape == (sizes if is_one else out)
            return fits and len(sizes) == 1 and not self.transposed
        if is_hooked(getattr(self.node, f"_raw_saved_{self.saved_name}")):
            is_saved = can_run_twice(self.node)
        else:
            is_saved = saved_value(self.node, self.saved_name) is not None
        if not is_saved or is_one != (name in SINGLE):
            return False
        if self.transposed != (self.saved_name == "mat2"):
            sizes = sizes[::-1]
        count = () if is_one else (len(parameter) if name == GROUPED else out[0],)
        # In a batched product, each matrix must have one row, or column.
        has_one_row = name != "BmmBackward0" or out[2 - self.operand] == 1
        return len(sizes) == 2 and shape == (*count, *sizes) and has_one_row

    def matrices(self, count: int, device: torch.device) -> Tensor:
        """Return the matrix of each row [R]; `count`, the number of matrices, for a row of none."""
        rows = shape_of(self.node, 0)[0]
        if isinstance(self.matrix, int):
            return torch.full((rows,), self.matrix, device=device)
        if self.node.name() == GROUPED:
            return torch.bucketize(torch.arange(rows, device=device), self.matrix, right=True)
        return self.matrix % count

    def operands(self, g: Tensor | None, parameter: Tensor) -> tuple[Tensor, Tensor]:
        """Return (left, right), by row, whose outer products are the parameter's gradient. g: what
        the node receives; None: zeros."""
        if g is None:
            g = parameter.new_zeros(shape_of(self.node, 0))
        saved = self.saved_name
        with keep_handles(self.node):
            rows = getattr(self.node, f"_saved_{saved}") if saved else g.new_ones(len(g), 1)
        if saved == "mat2":  # a matrix @ columns
            g, rows = g.mT, rows.mT
        left, right = (t.detach().flatten(0, -2).to(parameter.dtype) for t in (rows, g))
        return (right, left) if self.transposed else (left, right)


class ExpertGroup(NamedTuple):
    """All products with one parameter's matrices."""

    products: list[ExpertProduct]
    pairs: Pairs  # of their rows, in this order


class Products(NamedTuple):
    """All uses of a module's parameters in one call; empty: they are not products alone."""

    groups: Mapping[int, ExpertGroup]  # by the parameter's place
    ends: list[End]  # of which a proof must confirm the rows
    # Nodes that move rows by values, within each sample; with the number of nodes that drop rows.
    by_row: Mapping[Node, int]


NO_PRODUCTS = Products({}, [], {})


@dataclass(eq=False)
class ExpertUse:
    """Products of one call, served at their nodes in one backward at a time."""

    run: Pass
    recorder: Recorder
    groups: Mapping[int, ExpertGroup]
    parameters: Mapping[int, Tensor]  # by place
    eps: float  # the coarsest rounding unit of gradients inside
    refuse: Callable[[Exception], None]

    def __post_init__(self) -> None:
        self._task = -1  # the backward that is served
        self._arrived: dict[int, dict[int, tuple[Tensor, Tensor]]] = {}  # operands by product
        for place, group in self.groups.items():
            for k, product in enumerate(group.products):
                product.node.register_prehook(partial(self._arrive, place, k))

    def begin(self) -> None:
        """Serve the current backward. In others the module runs again, and edges are counted."""
        self._task, self._arrived = torch._C._current_graph_task_id(), {}

    @untraced
    def _arrive(self, place: int, k: int, incoming: Sequence[Tensor | None]) -> None:
        if not self.run.arrive([place]) or self._task != torch._C._current_graph_task_id():
            return
        try:
            group, arrived = self.groups[place], self._arrived.setdefault(place, {})
            arrived[k] = group.products[k].operands(incoming[0], self.parameters[place])
            if len(arrived) == len(group.products):
                operands = [arrived[k] for k in range(len(arrived))]
                left, right = (torch.cat(column) for column in zip(*operands, strict=True))
                del self._arrived[place]
                self._deliver(place, Grouped(left, right, group.pairs))
        except Exception as error:  # must not fail the user's backward
            self.refuse(error)

    def _deliver(self, place: int, grouped: Grouped) -> None:
        whole = grouped.of_biases() if self.parameters[place].dim() == 2 else grouped
        if self.recorder.auditing:
            rounding = grouped.size() * max(self.eps, torch.finfo(whole.dtype).eps)
            self.recorder.add_recorded(place, total(whole), rounding)
        deliver(self.run, self.recorder, place, whole)


def is_experts(module: nn.Module) -> bool:
    """Return True if a module's parameters are its own, [E, *, *] or, as biases, [E, *]."""
    own = [*module.parameters(recurse=False)]
    has_matrices = 3 in {p.dim() for p in own} <= {2, 3} and len({len(p) for p in own}) == 1
    return has_matrices and len(own) == len([*module.parameters()])


def may_route(module: nn.Module) -> bool:
    """Return True if a module may choose rows, for itself or its children: it may have experts."""
    children = [c for c in module.children() if type(c) is not nn.ModuleDict]
    has_list = any(isinstance(c, (nn.ModuleList, nn.ModuleDict)) for c in children)
    return has_list or any(map(is_experts, (module, *children)))


def find_products(
    out: Tensor,
    leads: Sequence[int],
    operands: Sequence[Tensor],
    parameters: Mapping[int, Tensor],
    n: int,
    layout: int,
    start: int,
) -> Products:
    """Return the products of a call, or raise UnknownRowsError; read from the device once. layout:
    of the rows [*leads] of `out`, and of the operands'. start: sequence number of the first node
    that the call made."""
    rows, end = owners(leads, n).get(layout), (out.grad_fn, out.output_nr)
    first = operands[0].grad_fn if operands else None
    if rows is None or first is None:
        return NO_PRODUCTS
    nodes = _nodes_between(end[0], first)
    products = _all_products(nodes, parameters)
    if not products:
        return NO_PRODUCTS
    rows = rows.to(operands[0].device)
    owned = owners_within(end, rows, nodes, n, leads, {p.node: p.rows_operand for p in products})
    flags = _input_flags(nodes, owned, n, layout) + _product_flags(products, owned)
    moves: dict[Node, Tensor] = {}  # nodes that move rows by values; whether one drops rows
    for node in nodes:
        outputs = range(len(node._input_metadata))
        made = next((owned[node, k] for k in outputs if (node, k) in owned), None)
        if made is None:
            continue
        flags += _mixing_flags(node, made)
        if node.name() in MAPPING and node._sequence_nr() >= start:  # only this call has its rows
            moves[node] = (made.owners == n).any()
    groups = _group(products, owned, parameters, n)
    pairs = list(dict.fromkeys(group.pairs for group in groups.values()))
    is_doubtful, drops = _read(flags, [*moves.values()], pairs)
    if is_doubtful:
        raise UnknownRowsError
    by_row = {node for node in nodes if node.name() in RANKS}
    by_row |= {node for node, dropping in zip(moves, drops, strict=True) if not dropping}
    return Products(groups, _ends(products, owned, n), dict.fromkeys(by_row, sum(drops)))


def _all_products(nodes: Sequence[Node], parameters: Mapping[int, Tensor]) -> list[ExpertProduct]:
    """Return the products with parameters; empty, if nodes use the parameters in other ways too."""
    places = {id(p): place for place, p in parameters.items()}
    products = [product for node in nodes for product in _products_at(node, places, parameters)]
    edges = (child for node in nodes for child, _ in node.next_functions)
    uses = sum(_place_of(child, places) is not None for child in edges)
    return products if uses == len(products) == len({p.edge for p in products}) else []


# Flags are bool tensors [] on the device. If any is set, rows of products have no owners.


def _input_flags(nodes: Sequence[Node], owned: Owners, n: int, layout: int) -> list[Tensor]:
    """Return flags that are set where rows of the inputs get gradients of other samples."""
    inside, flags = set(nodes), list[Tensor]()
    for edge in dict.fromkeys(edge for node in nodes for edge in node.next_functions):
        if edge[0] is None or edge[0] in inside or is_leaf(edge[0]):
            continue
        found = owned.get(edge)
        expected = None if found is None else owners([len(found.owners)], n).get(layout)
        if found is None or expected is None:
            raise UnknownRowsError
        expected = expected.to(found.owners.device)
        flags += [((found.owners != expected) & (found.owners != n)).any(), *found.flags]
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


def _read(
    flags: Sequence[Tensor], drops: Sequence[Tensor], pairs: Sequence[Pairs]
) -> tuple[bool, list[bool]]:
    """Read flags, drops and the lengths of pairs from the device, all at once. Return whether any
    flag is set, and the drops; the pairs keep their lengths."""
    answers = torch.stack([*flags, *drops]).long()
    read = torch.cat([answers, *(p.lengths for p in pairs)]).cpu()
    answers, *lengths = read.split([len(answers), *(len(p.lengths) for p in pairs)])
    for p, known in zip(pairs, lengths, strict=True):
        p.known = known
    is_set: list[bool] = answers.bool().tolist()
    return any(is_set[: len(flags)]), is_set[len(flags) :]


def _ends(products: Sequence[ExpertProduct], owned: Owners, n: int) -> list[End]:
    ends = []
    for node in dict.fromkeys(product.node for product in products):
        samples = owned[node, 0].owners
        samples = samples.masked_fill(samples == n, 0)  # rows of no sample receive zeros
        watched = Watched(node, 0, [len(samples)], samples=samples)
        ends.append(End(watched, (samples, samples)))
    return ends


def _group(
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
            pairs[key] = Pairs(torch.cat(owners), matrix, n, count)
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
        if place is not None and matrix is not None:
            found = edge, matrix, transposed, rows_operand, saved_name
            product = ExpertProduct(node, place, operand, *found)
            if product.fits(parameters[place]):
                yield product


def _selected(node: Node) -> int | Tensor | None:
    """Return the index of the matrix that a node selects from a parameter; [R], if it has one for
    each row; None: it selects none."""
    if node.name() == "SelectBackward0" and to_signed(node._saved_dim) == 0:
        return to_signed(node._saved_index) % shape_of(*node.next_functions[0])[0]
    ids = saved_value(node, "indices") if node.name() == "IndexBackward0" else None
    if not ids or len(ids) > 1 or ids[0].dtype != torch.long or ids[0].dim() != 1:
        return None
    selected: Tensor = ids[0]
    return selected
