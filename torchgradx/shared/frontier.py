"""What all samples share, and where in a graph the samples come in.

wpe(torch.arange(T)[None]) receives one gradient, summed over the samples where its output is added.
Each node of the graph where that happens still gets rows by sample. These nodes are the frontier,
found by climbing the graph; descent.py takes their gradients down by sample.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any

from ..graph.layout import (
    LAST,
    MINOR,
    NOWHERE,
    SECOND,
    SEQUENCE,
    Finding,
    Watched,
    layout_from_sizes,
)
from ..graph.nodes import Graph, Node, Shape, edges_among, is_leaf, name_of, shape_of
from ..graph.sizes import layout_of_node, leading_sizes, look_of
from ..sharding import is_fsdp_node

MATRIX_PRODUCTS = {"BmmBackward0", "MmBackward0"}
MAX_NODES, MAX_PRODUCTS = (
    1024,
    64,
)  # nodes that are looked at where no forward was watched; products among them


@dataclass(frozen=True)
class LiftPlan:
    """The nodes above the shared ones, in the order of the climb; holds for a structure."""

    starts: tuple[tuple[int, bool], ...]  # (use, whether from its own parameters), see lift.py
    names: tuple[str, ...]
    edges: tuple[tuple[int, int, int], ...]  # among them: consumer, operand, what is consumed
    layouts: tuple[int | None, ...]  # of the frontier's outputs; None: no rows by sample yet
    n: int  # in the pass that showed it
    shapes: tuple[Shape | None, ...]  # of these outputs, in that pass
    # By the look of a graph, where its nodes were found: see Lift.match.
    trails: dict[bytes, Any] = field(default_factory=dict, compare=False, repr=False)

    def climb(self, graph: Graph, starts: Iterable[Node]) -> list[Node] | None:
        """Return the same nodes in another pass, if they are there."""

        def on(k: int, node: Node) -> bool:
            known = k < len(self.names) and self.names[k] == name_of(node)
            return known and self.layouts[k] is None

        found = graph.climb(starts, on)
        same = tuple(map(name_of, found)) == self.names and edges_among(found) == self.edges
        return found if same else None

    def fits(
        self, graph: Graph, climbed: Sequence[Node], n: int
    ) -> tuple[bool, tuple[Shape | None, ...], list[tuple[Watched, int]]]:
        """Return whether the layouts hold for the same nodes in another pass: they look as they
        did, or their sizes leave no doubt. Their shapes now; and the frontier's, with their
        layouts."""
        shapes = _shapes(graph, zip(climbed, self.layouts, strict=True))
        ends: list[tuple[Watched, int]] = []
        same = True
        for node, layout, shape, before in zip(
            climbed, self.layouts, shapes, self.shapes, strict=True
        ):
            if layout is None or shape is None or before is None:
                continue
            use = Watched(node, graph.last(node), leading_sizes(shape, n))
            ends.append((use, layout))
            alike = look_of(shape, n) == look_of(before, self.n)
            if not alike and n != self.n and len(shape) == len(before):
                # What kept its size while N changed is of no samples.
                rest = tuple(0 if a == b == n else b for a, b in zip(before, shape, strict=True))
                alike = (
                    rest.count(n) == 1 and layout_from_sizes(leading_sizes(rest, n), n) == layout
                )
            same = same and (alike or layout_of_node(graph, use, n) == layout)
        return same, shapes, ends


@dataclass(frozen=True)
class Climb:
    """The starts of one use: the node of its output, or its own parameters' nodes."""

    use: int
    starts: tuple[Node, ...]
    accepts: Callable[[Node, bool], bool]  # a node above, and whether it is of the frontier


class Region:
    """The nodes above some starts, up to where the samples come in: what weighted backwards have to
    look at, beside the uses, for a plan to be made."""

    def __init__(
        self,
        n: int,
        graph: Graph,
        starts: Iterable[Node],
        constant: Callable[[Node, int], bool] | None,
    ) -> None:
        """constant: of an output of a node; None: nobody watched, and any node may be."""
        self._n, self._graph, self._constant = n, graph, constant
        starts = list(starts)
        most = None if constant is not None else MAX_NODES

        def on(k: int, node: Node) -> bool:
            return self.shared(node) and (most is None or k < most)

        self._nodes = graph.climb(starts, on)
        rows = [(node, Watched(node, k, leading_sizes(shape_of(node, k), n)))
                for node in self._nodes if not is_leaf(node)
                for k in graph.numbers(node) or [0]]  # fmt: skip
        few = self._nodes if most is None else self._nodes[:MAX_PRODUCTS]
        products = [(node, shape_of(node, 0)) for node in few if node.name() in MATRIX_PRODUCTS]
        # the last dimension may hold samples (einsum)
        columns = [(node, Watched(node, 0, (prod(shape[:-1]), shape[-1]), second=True))
                   for node, shape in products]  # fmt: skip
        middles = [(node, Watched(node, 0, shape[:2], second=True, minor=True))
                   for node, shape in products if len(shape) > 2 and shape[1] % n == 0]  # fmt: skip
        self._parts = rows, columns, middles

    @property
    def watched(self) -> list[Watched]:
        return [use for part in self._parts for _, use in part]

    def shared(self, node: Node) -> bool:
        """Return whether what it makes may be the same for any batch."""
        numbers = self._graph.numbers(node)
        if not numbers or is_leaf(node) or self._constant is None:
            return bool(numbers)
        if is_fsdp_node(
            node
        ):  # a Function, of which the bit is not known; it gives what it is given
            return all(self.shared(child) for child, _ in node.next_functions if child)
        return all(self._constant(node, k) for k in numbers)

    def layouts(self, found: Sequence[Finding], proven: bool) -> dict[Node, int | None]:
        """Return layouts by node, from findings. proven: weighted backwards could run."""
        rows, columns, middles = self._parts
        of_rows, rest = found[: len(rows)], found[len(rows) :]
        layouts: dict[Node, int | None] = dict.fromkeys(self._nodes)
        for (node, use), finding in zip(rows, of_rows, strict=True):
            single = len(self._graph.numbers(node)) < 2
            layout = finding.layout
            if not proven:  # sizes say nothing of tables, nor of what may be one
                layout = None if self.shared(node) else layout_of_node(self._graph, use, self._n)
            elif layout == NOWHERE and not (self._constant and self.shared(node)):
                layout = layout_of_node(self._graph, use, self._n)
                layout = NOWHERE if layout is None else layout
            layouts[node] = layout if single and isinstance(layout, int) else None
        for (node, use), finding in zip(columns, rest[: len(columns)], strict=True):
            one = finding.layout == SEQUENCE and use.leads[1] == self._n  # a column each
            if layouts[node] is None:
                layouts[node] = LAST if one or finding.layout == SECOND else None
        for (node, _), finding in zip(middles, rest[len(columns) :], strict=True):
            if layouts[node] in (None, LAST) and finding.layout in (SECOND, MINOR):
                layouts[node] = finding.layout
        return layouts


def survey(
    n: int, graph: Graph, groups: Sequence[Climb], region: Region, layouts: dict[Node, int | None]
) -> LiftPlan:
    """Survey groups all of whose consumers are shared, up to nodes with rows proven by sample."""

    def shared(node: Node) -> bool:
        return node in layouts and region.shared(node)

    groups = [group for group in groups if group.starts and all(map(shared, group.starts))]

    def climb(starts: Iterable[Node]) -> list[Node]:
        return graph.climb(starts, lambda k, node: shared(node) and layouts[node] is None)

    def served(group: Climb) -> bool:
        for node in climb(group.starts):
            if layouts.get(node) == NOWHERE:
                continue  # and asked for nothing
            ends = layouts.get(node) is not None
            if not group.accepts(node, ends):
                return False
            if not ends and (not shared(node) or node in graph.roots):
                return False
        return True

    groups = [group for group in groups if served(group)]
    found = climb(node for group in groups for node in group.starts)
    return LiftPlan(
        tuple((group.use, all(map(is_leaf, group.starts))) for group in groups),
        tuple(map(name_of, found)),
        edges_among(found),
        tuple(layouts.get(node) for node in found),
        n,
        _shapes(graph, ((node, layouts.get(node)) for node in found)),
    )


def _shapes(graph: Graph, ends: Iterable[tuple[Node, int | None]]) -> tuple[Shape | None, ...]:
    return tuple(
        None if layout is None else shape_of(node, graph.last(node)) for node, layout in ends
    )
