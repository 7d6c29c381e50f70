"""Nodes where parameters, and tables that all samples share, enter rows with owners."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator
from functools import cached_property
from math import prod

from ..gradients import products
from ..gradients.grouped import operand_of_owners
from ..graph.nodes import Graph, Node, is_leaf, shape_of
from ..graph.owners import ROWS_OPERAND, Owned, set_flags
from ..graph.segments import Ownership
from ..graph.sizes import leading

LOOKUPS = {products.EMBEDDING, products.INDEX, products.INDEX_SELECT}


class Entries:
    """The nodes of one graph at which something enters rows with owners."""

    def __init__(
        self,
        graph: Graph,
        shown: Ownership,
        has_rows: Callable[[Node], bool],
        tables: Collection[Node],
    ) -> None:
        """has_rows: whether a node is above a layer that was given rows. tables: the nodes of
        layers that were given the same for any batch."""
        self._graph, self._shown, self._has_rows, self._tables = graph, shown, has_rows, tables
        self._found: dict[Node, Owned] = {}

    @cached_property
    def _mixed(self) -> set[int]:
        return set_flags(self._shown.below.values())

    def _is_known(self, one: Owned) -> bool:
        return self._mixed.isdisjoint(map(id, one.flags))

    @cached_property
    def _above_data(self) -> set[Node]:
        """The nodes above those that read data, as far as it is known whose."""
        of_data = (node for (node, _), one in self._shown.below.items()
                   if self._is_known(one) and (node.name() in LOOKUPS or _has_data(node))
                  )  # fmt: skip
        return {*self._graph.climb(of_data, lambda *_: True)}

    def _brings_rows(self, node: Node | None) -> bool:
        return node is None or self._has_rows(node) or node in self._above_data

    def is_shared(self, node: Node | None) -> bool:
        """Return True if a node's output may be the same for all samples: it reads no data, unless
        this is no larger than what it computes of parameters."""
        if node is None or self._brings_rows(node):
            return False
        if is_leaf(node) or node in self._tables or not _has_data(node):
            return True
        sizes = (prod(shape_of(*edge)) for edge in node.next_functions if edge[0] is not None)
        is_product = node.name() in ROWS_OPERAND
        return not is_product and prod(shape_of(node, 0)) <= max(sizes, default=0)

    def _is_entry(self, node: Node) -> bool:
        """Return True if a node has rows, of a layer or of data, and an operand without; and if all
        that reads its output shows whose it is, or what it is made of does."""
        operand = operand_of_owners(node, lambda edge: self._brings_rows(edge[0]))
        if operand is None:
            return False
        if operand >= 0 and not self.is_shared(node.next_functions[operand][0]):
            return False
        is_seen = self._shown.consumers[node, 0] == len(self._graph.parents[node])
        return is_seen or self._has_rows(node)

    def _goes_on(self, _: int, node: Node) -> bool:
        one, shape = self._shown.below.get((node, 0)), shape_of(node, 0)
        if shape and one and self._is_known(one) and self._is_entry(node):
            leads = shape[: max(1, min(leading(shape, len(one.owners)), len(shape) - 1))]
            if (owned := self._shown.at(node, 0, [*leads])) is not None:
                self._found[node] = owned
        return node not in self._found and self.is_shared(node)

    def above(self, starts: Iterable[Node]) -> Iterator[tuple[Node, Owned]]:
        """Yield the entries above some nodes, with the owners of their rows."""
        for node in self._graph.climb(starts, self._goes_on):
            if node in self._found:
                yield node, self._found[node]


def _has_data(node: Node) -> bool:
    return any(child is None for child, _ in node.next_functions)
