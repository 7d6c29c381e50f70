"""Products with matrices that are parts of one parameter [E, *, *]: a mixture's experts.

x[rows] @ weight[e] + bias[e], one product for each expert that was hit, a grouped product of all,
or one with weight[ids]. A bias [E, *] is added to its expert's rows: their product with ones. The
samples of a product's rows follow from those of the module's output, by the indices between
(graph/owners.py), and the first pass of a structure proves them like any other output.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ..gradients.by_sample import deliver, total
from ..gradients.grouped import Grouped, Pairs
from ..gradients.products import CAST, LINKS, POINTWISE, is_transpose
from ..graph.layout import Watched, owners
from ..graph.nodes import Node, is_leaf, shape_of, to_signed
from ..graph.owners import MAPPING, ROWS_OPERAND, Owned, owners_within, saved_value
from ..hooks.copies import untraced
from .several import End

# By the operand that the parameter is: the one with the rows, and the name of it as the node saved
# it; none where it is added to them.
OPERANDS: dict[str, dict[int, tuple[int, str]]] = {
    "AddBackward0": {0: (1, ""), 1: (0, "")},
    "AddmmBackward0": {0: (1, ""), 2: (1, "mat1")},
    "BmmBackward0": {0: (1, "mat2"), 1: (0, "self")},
    "GroupedMmBackward0": {1: (0, "self")},
    "MmBackward0": {1: (0, "self")},
}
GROUPED, SINGLE = "GroupedMmBackward0", ("AddmmBackward0", "MmBackward0")
# Nodes of which it is known what they do with rows: none; among others along a dimension; by index.
KEEPS = LINKS | POINTWISE | {f"{name}Backward0" for name in (
    "Add", "ClampMax", "ClampMin", "Div", "Expand", "Gelu", "Mul", "Sub",
)} | {"ClampBackward1", "SqueezeBackward1"}  # fmt: skip
ALONG = {"CatBackward0", "SelectBackward0", "SliceBackward0", "SoftmaxBackward0", "SplitBackward0",
         "SplitWithSizesBackward0", "SumBackward1"}  # fmt: skip
RANKS = {"SortBackward0", "SortBackward1", "TopkBackward0"}


@dataclass(eq=False)
class ExpertProduct:
    """One product of a call."""

    node: Node
    place: int  # of the parameter
    operand: int  # of the node: the parameter
    edge: tuple[Node, int]  # of the parameter: a node that leads to it, and the operand there
    matrix: int | Tensor  # of the parameter; each row's; where the rows of each end, if grouped
    turned: bool  # the parameter holds each matrix transposed
    rows: int  # the operand that has them
    saved: str  # their name

    def fits(self, parameter: Tensor) -> bool:
        """Return whether the node's operand is made of such a parameter's matrices alone."""
        name, sizes, out = self.node.name(), tuple(parameter.shape[1:]), shape_of(self.node, 0)
        made = shape_of(*self.node.next_functions[self.operand])
        one, turned = isinstance(self.matrix, int), self.turned
        if any(getattr(self.node, f"_saved_{factor}", 1) != 1 for factor in ("alpha", "beta")):
            return False
        if not self.saved:  # [O], or a row each
            fits = out[1:] == sizes and made == (sizes if one else out)
            return fits and len(sizes) == 1 and not turned
        if saved_value(self.node, self.saved) is None or one != (name in SINGLE):
            return False
        if turned != (self.saved == "mat2"):
            sizes = sizes[::-1]
        before = () if one else (len(parameter) if name == GROUPED else out[0],)
        single = name != "BmmBackward0" or out[2 - self.operand] == 1  # a row, or column, each
        return len(sizes) == 2 and made == (*before, *sizes) and single

    def matrices(self, matrices: int, device: torch.device) -> Tensor:
        """[R]: the matrix of each row; of none: `matrices`, as many as there are."""
        count = shape_of(self.node, 0)[0]
        if isinstance(self.matrix, int):
            return torch.full((count,), self.matrix, device=device)
        if self.node.name() == GROUPED:
            return torch.bucketize(torch.arange(count, device=device), self.matrix, right=True)
        return self.matrix % matrices

    def operands(self, g: Tensor | None, parameter: Tensor) -> tuple[Tensor, Tensor]:
        """Return the two, by row, that its gradient is made of, from what its node receives."""
        if g is None:
            g = parameter.new_zeros(shape_of(self.node, 0))
        rows = getattr(self.node, f"_saved_{self.saved}") if self.saved else g.new_ones(len(g), 1)
        if self.saved == "mat2":  # a matrix @ columns
            g, rows = g.mT, rows.mT
        left, right = (t.detach().flatten(0, -2).to(parameter.dtype) for t in (rows, g))
        return (right, left) if self.turned else (left, right)


class ExpertGroup(NamedTuple):
    """All products with one parameter's matrices."""

    products: list[ExpertProduct]
    pairs: Pairs  # of their rows, in this order


class Products(NamedTuple):
    """All that a call's output has of its module's parameters. Empty: something else, or the
    samples of their rows do not show."""

    of: Mapping[int, ExpertGroup]  # by the parameters' places
    ends: list[End]  # what a proof holds their rows against
    # nodes that move rows by their values, each sample's to its own, and how many others there are
    by_row: Mapping[Node, int]


NO_PRODUCTS = Products({}, [], {})


class Served:
    """A call's products, in one backward at a time."""

    def __init__(
        self,
        run: Any,
        recorder: Any,
        groups: Mapping[int, ExpertGroup],
        parameters: Mapping[int, Tensor],
        eps: float,
        failed: Callable[[Exception], None],
    ) -> None:
        """parameters: by their places. eps: of the coarsest gradient inside."""
        self._run, self._recorder, self._groups, self._parameters = (
            run,
            recorder,
            groups,
            parameters,
        )
        self._eps, self._failed, self._task = eps, failed, -1
        self._parts: dict[int, dict[int, tuple[Tensor, Tensor]]] = {}
        for place, group in groups.items():
            for k, product in enumerate(group.products):
                product.node.register_prehook(partial(self._arrive, place, k))

    def begin(self) -> None:
        """Serve this backward: else the module runs again, and edges are counted only."""
        self._task, self._parts = torch._C._current_graph_task_id(), {}

    @untraced
    def _arrive(self, place: int, k: int, incoming: Sequence[Tensor | None]) -> None:
        if not self._run.arrive([place]) or self._task != torch._C._current_graph_task_id():
            return
        try:
            group, parts = self._groups[place], self._parts.setdefault(place, {})
            parts[k] = group.products[k].operands(incoming[0], self._parameters[place])
            if len(parts) == len(group.products):
                pairs = [parts[k] for k in range(len(parts))]
                left, right = (torch.cat(column) for column in zip(*pairs, strict=True))
                del self._parts[place]
                self._deliver(place, Grouped(left, right, group.pairs))
        except Exception as error:  # never from inside backward()
            self._failed(error)

    def _deliver(self, place: int, grouped: Grouped) -> None:
        whole = grouped.of_biases() if self._parameters[place].dim() == 2 else grouped
        if self._recorder.auditing:
            rounding = grouped.size() * max(self._eps, torch.finfo(whole.dtype).eps)
            self._recorder.add_recorded(place, total(whole), rounding)
        deliver(self._run, self._recorder, place, whole)


def is_experts(module: nn.Module) -> bool:
    """Return whether all parameters of a module are its own, [E, *, *] or, its biases, [E, *]."""
    parameters = [*module.parameters()]
    own = len(parameters) == len([*module.parameters(recurse=False)])
    dims = {p.dim() for p in parameters}
    return own and 3 in dims <= {2, 3} and len({len(p) for p in parameters}) == 1


def products_of(
    out: Tensor,
    leads: Sequence[int],
    operands: Sequence[Tensor],
    parameters: Mapping[int, Tensor],
    n: int,
    layout: int,
    start: int,
) -> Products:
    """out: which has rows [*leads] of this layout, as what it is made of. start: of the nodes that
    the call made. Reads from the device once."""
    rows, end = owners(leads, n).get(layout), (out.grad_fn, out.output_nr)
    first = operands[0].grad_fn if operands else None
    if rows is None or first is None:
        return NO_PRODUCTS
    nodes = _between(end[0], first)
    products = _all_uses(nodes, parameters)
    if not products:
        return NO_PRODUCTS
    rows = rows.to(operands[0].device)
    owned = owners_within(end, rows, nodes, n, leads, {p.node: p.rows for p in products})
    of_inputs, of_products = _input_flags(nodes, owned, n, layout), _product_flags(products, owned)
    moves = _moves(nodes, owned, n, start)
    if of_inputs is None or of_products is None or moves is None:
        return NO_PRODUCTS
    groups = _groups(products, owned, parameters, n)
    pairs = list(dict.fromkeys(group.pairs for group in groups.values()))
    is_doubtful, loses = _read([*of_inputs, *of_products, *moves.flags], moves.lost, pairs)
    if is_doubtful:
        return NO_PRODUCTS
    by_row = {node for node in nodes if node.name() in RANKS}
    by_row |= {node for node, lossy in zip(moves.nodes, loses, strict=True) if not lossy}
    return Products(groups, _ends(products, owned, n), dict.fromkeys(by_row, sum(loses)))


def _all_uses(nodes: Sequence[Node], parameters: Mapping[int, Tensor]) -> list[ExpertProduct]:
    """Return the products, if these are all that nodes do with the parameters; else none."""
    leaves = {id(p): place for place, p in parameters.items()}
    products = [product for node in nodes for product in _products(node, leaves, parameters)]
    edges = (child for node in nodes for child, _ in node.next_functions)
    uses = sum(_place(child, leaves) is not None for child in edges)
    return products if uses == len(products) == len({p.edge for p in products}) else []


Owners = Mapping[tuple[Node, int], Owned]  # of the rows of nodes' outputs


def _input_flags(nodes: Sequence[Node], owned: Owners, n: int, layout: int) -> list[Tensor] | None:
    """Return flags, of which none may be set if rows of the inputs come to their own samples."""
    inside, flags = set(nodes), list[Tensor]()
    for edge in dict.fromkeys(edge for node in nodes for edge in node.next_functions):
        if edge[0] is None or edge[0] in inside or is_leaf(edge[0]):
            continue
        source = owned.get(edge)
        own = None if source is None else owners([len(source.owners)], n).get(layout)
        if source is None or own is None:
            return None
        own = own.to(source.owners.device)
        flags += [((source.owners != own) & (source.owners != n)).any(), *source.flags]
    return flags


def _product_flags(products: Sequence[ExpertProduct], owned: Owners) -> list[Tensor] | None:
    """Return flags, of which none may be set if the products' rows have owners."""
    flags: list[Tensor] = []
    for product in products:
        of_rows = owned.get((product.node, 0))
        if of_rows is None or len(of_rows.owners) != shape_of(product.node, 0)[0]:
            return None
        if product.node.next_functions[product.rows][0] is None:
            return None  # rows that are data: whose, nothing shows
        flags += of_rows.flags
    return flags


class Moves(NamedTuple):
    """Nodes of a call that move rows by their values."""

    flags: list[Tensor]  # none may be set if the owners below all nodes follow from those above
    nodes: list[Node]
    lost: list[Tensor]  # by node: whether rows of it come to nothing


def _moves(nodes: Sequence[Node], owned: Owners, n: int, start: int) -> Moves | None:
    moves = Moves([], [], [])
    for node in nodes:
        outputs = range(len(node._input_metadata))
        made = next((owned[node, k] for k in outputs if (node, k) in owned), None)
        if made is None:
            continue
        doubts = _doubts(node, made)
        if doubts is None:
            return None
        moves.flags.extend(doubts)
        if node.name() in MAPPING and node._sequence_nr() >= start:
            moves.nodes.append(node)  # nothing else has its rows, and if all come back:
            moves.lost.append((made.owners == n).any())
    return moves


def _read(
    flags: Sequence[Tensor], lost: Sequence[Tensor], pairs: Sequence[Pairs]
) -> tuple[bool, list[bool]]:
    """Return whether any flag is set, and what is lost; the pairs then know their lengths."""
    answers = torch.stack([*flags, *lost]).long()
    read = torch.cat([answers, *(p.lengths for p in pairs)]).cpu()  # all that is read, at once
    answers, *lengths = read.split([len(answers), *(len(p.lengths) for p in pairs)])
    for p, known in zip(pairs, lengths, strict=True):
        p.known = known
    is_set: list[bool] = answers.bool().tolist()
    return any(is_set[: len(flags)]), is_set[len(flags) :]


def _ends(products: Sequence[ExpertProduct], owned: Owners, n: int) -> list[End]:
    ends = []
    for node in dict.fromkeys(product.node for product in products):
        own = owned[node, 0].owners
        own = own.masked_fill(own == n, 0)  # of none: they receive zeros
        ends.append(End(Watched(node, 0, [len(own)], samples=own), (own, own)))
    return ends


def _groups(
    products: Sequence[ExpertProduct], owned: Owners, parameters: Mapping[int, Tensor], n: int
) -> dict[int, ExpertGroup]:
    """Return the products by their parameters' places. Those whose rows are seen to be the same
    share their pairs."""
    groups: dict[int, ExpertGroup] = {}
    pairs: dict[Any, Pairs] = {}
    for place in dict.fromkeys(product.place for product in products):
        its, count = [p for p in products if p.place == place], len(parameters[place])
        owners = [owned[p.node, 0].owners for p in its]
        chosen = (p.matrix if isinstance(p.matrix, int) else id(p.matrix) for p in its)
        key = *map(id, owners), *chosen
        if key not in pairs:
            matrix = torch.cat([p.matrices(count, owners[0].device) for p in its])
            pairs[key] = Pairs(torch.cat(owners), matrix, n, count)
        groups[place] = ExpertGroup(its, pairs[key])
    return groups


def _between(end: Node, first: Node) -> list[Node]:
    """Return the nodes made after `first` that lead to an end."""
    found, visited = [end], {end}
    for node in found:  # grows as it goes
        for child, _ in node.next_functions:
            if child is None or child in visited or is_leaf(child):
                continue
            if child._sequence_nr() > first._sequence_nr():
                visited.add(child)
                found.append(child)
    return found


def _doubts(node: Node, made: Owned) -> list[Tensor] | None:
    """Return flags, of which none may be set if the owners below a node follow from what it made,
    whatever the batch; None: they do not."""
    name, shape, owned = node.name(), shape_of(node, 0), made.owners
    if name in KEEPS:
        return []
    along = name in ALONG or name in RANKS
    if name in MAPPING:
        indices = getattr(node, "_saved_indices", None)
        if indices is None and to_signed(node._saved_dim) != 0:
            along = True
        else:
            return [] if indices is None or indices[0] is not None else None
    if along:
        operand = node.next_functions[0]
        whole = len(shape if operand[0] is None else shape_of(*operand))
        dims = node._saved_dim if name == "SumBackward1" else (node._saved_dim,)
        rows = prod(shape[: min(to_signed(dim) % max(1, whole) for dim in dims)])
        if not len(owned) or rows % len(owned) == 0:
            return []
        each = owned.view(rows, -1)  # what it works along may be of one sample
        return [(each != each[:, :1]).any()]
    return (
        []
        if name in ROWS_OPERAND and node.next_functions[ROWS_OPERAND[name]][0] is not None
        else None
    )


def _place(child: Node, leaves: Mapping[int, int]) -> int | None:
    return leaves.get(id(child.variable)) if child is not None and is_leaf(child) else None


def _products(
    node: Node, leaves: Mapping[int, int], parameters: Mapping[int, Tensor]
) -> Iterator[ExpertProduct]:
    """Yield a node's products with matrices of parameters."""
    for operand, which in OPERANDS.get(node.name(), {}).items():
        edge, turned = (node, operand), which[1] == "mat2"
        matrix = saved_value(node, "offs") if node.name() == GROUPED else None
        child = node.next_functions[operand][0]
        while child is not None and not is_leaf(child):
            chosen = _chosen(child) if matrix is None else None
            if chosen is not None:
                matrix = chosen
            elif is_transpose(child):
                turned = not turned
            elif child.name() != CAST:
                break
            edge, child = (child, 0), child.next_functions[0][0]
        place = _place(child, leaves)
        if place is not None and matrix is not None:
            product = ExpertProduct(node, place, operand, edge, matrix, turned, *which)
            if product.fits(parameters[place]):
                yield product


def _chosen(node: Node) -> int | Tensor | None:
    """Return the matrix that a node takes from a parameter, or those that it takes by ids."""
    if node.name() == "SelectBackward0" and to_signed(node._saved_dim) == 0:
        return to_signed(node._saved_index) % shape_of(*node.next_functions[0])[0]
    ids = saved_value(node, "indices") if node.name() == "IndexBackward0" else None
    if not ids or len(ids) > 1 or ids[0].dtype != torch.long or ids[0].dim() != 1:
        return None
    chosen: Tensor = ids[0]
    return chosen
