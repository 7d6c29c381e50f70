"""The frontier: the nodes of a graph where samples enter above something that all samples share.

wpe(torch.arange(T)[None]) receives one gradient, summed over the samples where its output is added
to activations. The node of that sum still gets rows by sample: it belongs to the frontier. The
frontier is found by climbing the graph. descent.py takes its gradients down, per sample.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any

from ..gradients.elementwise import is_elementwise
from ..graph.functions import is_users
from ..graph.layout import BATCH, LAST, MINOR, NOWHERE, SECOND, SEQUENCE, Finding, Watched
from ..graph.nodes import VIEWS, Graph, Node, Shape, edges_among, is_leaf, name_of, shape_of
from ..graph.sizes import layout_of_node, layout_of_shape, leading_sizes, look_of
from ..sharding import is_fsdp_node

IsConstant = Callable[[Node, int], bool]  # of an output of a node
MATRIX_PRODUCTS = {"BmmBackward0", "MmBackward0"}
# Where no forward was observed, any node may be shared: only so many are examined, and among the
# first of them the matrix products.
MAX_NODES, MAX_PRODUCTS = 1024, 64


@dataclass(frozen=True)
class LiftPlan:
    """The nodes from shared outputs up to the frontier, in climbing order, for a structure."""

    starts: tuple[tuple[int, bool], ...]  # (use, True if from its own parameters), see lift.py
    names: tuple[str, ...]
    edges: tuple[tuple[int, int, int], ...]  # among them: consumer, operand, consumed node
    layouts: tuple[int | None, ...]  # of the outputs; None: below the frontier
    n: int  # in the pass that was proven
    shapes: tuple[Shape | None, ...]  # of the frontier's outputs in that pass
    # Where the nodes were found, by the look of the graph: see Lift.match.
    trails: dict[bytes, Any] = field(default_factory=dict, compare=False, repr=False)

    def climb(self, graph: Graph, starts: Iterable[Node]) -> list[Node] | None:
        """Return the nodes of the plan in another pass; None if its graph differs."""

        def goes_on(k: int, node: Node) -> bool:
            is_known = k < len(self.names) and self.names[k] == name_of(node)
            return is_known and self.layouts[k] is None

        found = graph.climb(starts, goes_on)
        is_same = tuple(map(name_of, found)) == self.names and edges_among(found) == self.edges
        return found if is_same else None

    def fits(
        self, graph: Graph, climbed: Sequence[Node], n: int
    ) -> tuple[bool, tuple[Shape | None, ...], list[tuple[Watched, int]]]:
        """Return whether the layouts hold for these nodes in another pass, the shapes of the
        frontier's outputs, and these outputs with their layouts.
        A layout holds if the output looks as in the proof, or if its sizes leave no doubt."""
        shapes = _shapes(graph, climbed, self.layouts)
        ends: list[tuple[Watched, int]] = []
        holds = True
        facts = zip(climbed, self.layouts, shapes, self.shapes, strict=True)
        for node, layout, shape, before in facts:
            if layout is None or shape is None or before is None:
                continue
            use = Watched(node, graph.last(node), leading_sizes(shape, n))
            ends.append((use, layout))
            alike = look_of(shape, n, layout) == look_of(before, self.n, layout)
            if not alike and n != self.n and len(shape) == len(before):
                # A dimension that kept its size while N changed does not hold the samples.
                rest = tuple(0 if a == b == n else b for a, b in zip(before, shape, strict=True))
                alike = rest.count(n) == 1 and layout_of_shape(rest, n) == layout
            holds = holds and (alike or layout_of_node(graph, use, n) == layout)
        return holds, shapes, ends


@dataclass(frozen=True)
class Climb:
    """The starts of one use: the node of its output, or the nodes of its own parameters."""

    use: int
    starts: tuple[Node, ...]
    accepts: Callable[[Node, bool], bool]  # a node above; True: it is on the frontier


class Region:
    """The nodes from some starts up to where samples enter, for weighted backwards to examine."""

    def __init__(
        self, n: int, graph: Graph, starts: Iterable[Node], is_constant: IsConstant | None
    ) -> None:
        """is_constant: None if operators were not observed, so that any node may be constant."""
        self._n, self._graph, self._is_constant = n, graph, is_constant
        most = MAX_NODES if is_constant is None else None

        def goes_on(k: int, node: Node) -> bool:
            return self.is_shared(node) and (most is None or k < most)

        self._nodes = graph.climb(starts, goes_on)
        rows = [(node, Watched(node, k, leading_sizes(shape_of(node, k), n)))
                for node in self._nodes if not is_leaf(node)
                for k in graph.numbers(node) or [0]]  # fmt: skip
        few = self._nodes if most is None else self._nodes[:MAX_PRODUCTS]
        shapes = [(node, shape_of(node, 0)) for node in few if node.name() in MATRIX_PRODUCTS]
        # The samples may be in the last dimension (einsum), or in the middle one of three.
        columns = [(node, Watched(node, 0, (prod(shape[:-1]), shape[-1]), second=True))
                   for node, shape in shapes]  # fmt: skip
        middles = [(node, Watched(node, 0, shape[:2], second=True, minor=True))
                   for node, shape in shapes if len(shape) > 2 and shape[1] % n == 0]  # fmt: skip
        self._parts = rows, columns, middles
        self.watched = [use for part in self._parts for _, use in part]

    def is_shared(self, node: Node) -> bool:
        """Return True if all consumed outputs of a node may be the same for any batch."""
        numbers = self._graph.numbers(node)
        if not numbers or is_leaf(node) or self._is_constant is None:
            return bool(numbers)
        if is_fsdp_node(node):  # its outputs were not observed; they are its inputs
            return all(self.is_shared(child) for child, _ in node.next_functions if child)
        return all(self._is_constant(node, k) for k in numbers)

    def layouts(self, found: Sequence[Finding], proven: bool) -> dict[Node, int | None]:
        """Return the layout of each node's output, from a finding for each of `watched`.
        None: below the frontier. proven: weighted backwards could run."""
        rows, columns, middles = self._parts
        of_rows, rest = found[: len(rows)], found[len(rows) :]
        layouts: dict[Node, int | None] = dict.fromkeys(self._nodes)
        for (node, use), finding in zip(rows, of_rows, strict=True):
            layout = finding.layout
            is_shared = self.is_shared(node)
            if not proven:  # sizes do not distinguish tables
                sized = None if is_shared else layout_of_node(self._graph, use, self._n)
                layout = None if self._is_given(node, sized) else sized
            elif layout == NOWHERE and not (self._is_constant and is_shared):
                sized = layout_of_node(self._graph, use, self._n)
                layout = NOWHERE if sized is None else sized
            is_first = use.output_nr in (self._graph.numbers(node) or [0])[:1]
            agrees = is_first or (is_users(node) and layouts[node] == layout)
            layouts[node] = layout if agrees and isinstance(layout, int) else None
        for (node, use), finding in zip(columns, rest[: len(columns)], strict=True):
            is_exact = use.leads[1] == self._n  # one column per sample
            is_last = finding.layout == SECOND or (finding.layout == SEQUENCE and is_exact)
            if is_last and layouts[node] is None:
                layouts[node] = LAST
        for (node, _), finding in zip(middles, rest[len(columns) :], strict=True):
            if layouts[node] in (None, LAST) and finding.layout in (SECOND, MINOR):
                layouts[node] = finding.layout
        return layouts

    def below_samples(self, layouts: Mapping[Node, int | None]) -> list[Node]:
        """Return the nodes, among those that are the same for any batch, where no sample enters: of
        zeros, and those as large as an operand, whose gradients may look like rows by chance. None
        where an output is such a node, as of a model that draws what it starts from."""
        if self._is_constant is None or any(map(self.is_shared, self._graph.roots)):
            return []
        shared = (v for v, layout in layouts.items() if layout is not None and self.is_shared(v))
        return [node for node in shared if layouts[node] == NOWHERE or _keeps_size(node)]

    def contradicts(self, found: Sequence[Finding]) -> bool:
        """Return True if samples would be in a dimension that something shared gives its size: the
        rows of v @ x.T, where a parameter v has N rows."""
        layouts = self.layouts(found, True) if self._is_constant else {}
        return any(self._is_given(node, layout) for node, layout in layouts.items())

    def _is_given(self, node: Node, layout: int | None) -> bool:
        """Return True if something shared gives the dimension of the samples its size. Of a user's
        Function any may: it may work on the weight alone."""
        shape, edges = shape_of(node, 0), node.next_functions
        if is_users(node):
            given = [shape_of(*edge) for edge in edges if edge[0] and self.is_shared(edge[0])]
            return any(self._n in one or one == shape for one in given)
        dims: dict[int | None, int] = {BATCH: -len(shape), SEQUENCE: 1 - len(shape), LAST: -1}
        dim = dims.get(layout, 0)
        if dim >= 0 or shape[dim] != self._n:
            return False
        shared = (k for k, (v, _) in enumerate(edges) if v and self.is_shared(v))
        return any(_gives(node, k, dim) for k in shared)


def _keeps_size(node: Node) -> bool:
    """Return True if an operand has as many elements as the output, or the rows of a product."""
    shape, edges = shape_of(node, 0), [edge for edge in node.next_functions if edge[0]]
    has_rows = node.name() in MATRIX_PRODUCTS and any(shape_of(*e)[:1] == shape[:1] for e in edges)
    return has_rows or any(prod(shape_of(*edge)) == prod(shape) for edge in edges)


def _gives(node: Node, operand: int, dim: int) -> bool:
    """Return True if a parameter gives a dimension (-1: the last) of a node's output its size."""
    child, number = node.next_functions[operand]
    while child and child.name() == "ExpandBackward0":
        child, number = child.next_functions[0]
    shape = shape_of(child, number) if child else ()
    if len(shape) < -dim or shape[dim] != shape_of(node, 0)[dim]:
        return False
    is_product = node.name() in MATRIX_PRODUCTS
    if is_product and dim == (-1, -2)[operand]:  # that of the other operand
        return False
    while child and not is_leaf(child) and child.name() in VIEWS - {"ExpandBackward0"}:
        child = child.next_functions[0][0]
    is_parameter = child is not None and is_leaf(child)
    return is_parameter and (is_product or is_elementwise(node))


def plan_lift(
    n: int,
    graph: Graph,
    groups: Sequence[Climb],
    layouts: dict[Node, int | None],
    may_share: Callable[[Node], bool],
) -> LiftPlan:
    """Return the plan of the uses from which a climb ends at nodes with proven layouts only."""

    def is_shared(node: Node) -> bool:
        return node in layouts and may_share(node)

    def climb(starts: Iterable[Node]) -> list[Node]:
        return graph.climb(starts, lambda k, node: is_shared(node) and layouts[node] is None)

    def can_serve(group: Climb) -> bool:
        if not group.starts or not all(map(is_shared, group.starts)):
            return False
        for node in climb(group.starts):
            if layouts.get(node) == NOWHERE:
                continue  # it is asked for nothing
            is_end = layouts.get(node) is not None
            goes_on = is_end or (is_shared(node) and node not in graph.roots)
            if not (goes_on and group.accepts(node, is_end)):
                return False
        return True

    served = [group for group in groups if can_serve(group)]
    while True:  # what runs again brings all of its parameters' gradients
        others = {
            v for group in groups if group not in served for v in group.starts if group.use >= 0
        }
        rest = [group for group in served if others.isdisjoint(group.starts)]
        if len(rest) == len(served):
            break
        served = rest
    groups = served
    starts = tuple((group.use, all(map(is_leaf, group.starts))) for group in groups)
    found = climb(node for group in groups for node in group.starts)
    names, ends = tuple(map(name_of, found)), tuple(map(layouts.get, found))
    return LiftPlan(starts, names, edges_among(found), ends, n, _shapes(graph, found, ends))


def _shapes(
    graph: Graph, nodes: Iterable[Node], layouts: Iterable[int | None]
) -> tuple[Shape | None, ...]:
    ends = zip(nodes, layouts, strict=True)
    return tuple(None if end is None else shape_of(v, graph.last(v)) for v, end in ends)
