"""Autograd nodes: which nodes consume which, and the shapes and dtypes of their outputs.

A node knows only what it consumes: next_functions are edges (node, number), where `number` is the
consumed output of that node. Graph.parents has the consumers of a node, with the same number.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

Node = Any
Edge = tuple[Node, int]
Shape = tuple[int, ...]
VIEWS = {f"{name}Backward0" for name in (
    "Alias", "Clone", "Expand", "Permute", "ReshapeAlias", "Select", "Slice", "T", "ToCopy",
    "Transpose", "UnsafeView", "Unsqueeze", "View",
)}  # fmt: skip
OUTPUTS = {*VIEWS, "AddBackward0"}
COPY_SLICES = "torch::autograd::CopySlices"  # of an operation that wrote into a view
SAME = {"ReshapeAliasBackward0": "ViewBackward0", "AliasBackward0": "SliceBackward0"}


class Graph:
    """The graph of a forward, below its outputs, with the consumers of each node."""

    def __init__(self, outputs: Iterable[Tensor | Node], first: int = 0) -> None:
        """outputs: tensors, or their nodes. first: the sequence number from which on nodes count,
        and what they consume."""
        # In the order of the outputs, so that every pass lists the nodes in the same order.
        nodes = (t.grad_fn if isinstance(t, Tensor) else t for t in outputs)
        self.roots = dict.fromkeys(node for node in nodes if node is not None)
        self.parents: dict[Node, list[Edge]] = {node: [] for node in self.roots}
        todo = list(self.parents)
        while todo:
            node = todo.pop()
            for child, number in node.next_functions:
                if child is not None:
                    if child not in self.parents:
                        self.parents[child] = []
                        todo += [child] if child._sequence_nr() >= first else []
                    self.parents[child].append((node, number))

    def numbers(self, node: Node) -> list[int]:
        """Return the outputs of a node that other nodes consume."""
        return sorted({number for _, number in self.parents.get(node, ())})

    def last(self, node: Node) -> int:
        """Return the last output of a node that is consumed: the only one, on a frontier."""
        return max(self.numbers(node), default=0)

    def climb(self, starts: Iterable[Node], goes_on: Callable[[int, Node], bool]) -> list[Node]:
        """Return the starts and the nodes above them, nearest first.
        The consumers of the k-th node are visited only if goes_on(k, node)."""
        parents = self.parents
        return reach(starts, lambda k, v: parents.get(v, ()) if goes_on(k, v) else ())

    def without(self, leaf: Node, uses: set[Node]) -> bool:
        """Remove the edges from a parameter to its modules, whose outputs are by the nodes `uses`.
        Return False, and change nothing, if one of these nodes is not found above the parameter."""
        remaining: dict[Node, list[Edge]] = {}
        hits: set[Node] = set()
        is_unused = leaf in self.parents and self._prune(leaf, uses, remaining, hits)
        if hits != uses:
            return False
        self.parents.update(remaining)
        if is_unused:
            del self.parents[leaf]
        return True

    def _prune(
        self, node: Node, uses: set[Node], remaining: dict[Node, list[Edge]], hits: set[Node]
    ) -> bool:
        """Add the parents that remain to `remaining`; return True if no parent does.
        This is a method because a closure that calls itself would keep the graph alive until
        garbage collection."""
        parents = remaining[node] = []
        for parent, number in self.parents[node]:
            found = self._outputs_of(parent) & uses
            hits |= found
            is_view = parent.name() in VIEWS
            if not found and not (is_view and self._prune(parent, uses, remaining, hits)):
                parents.append((parent, number))
        return not parents and node not in self.roots

    def _outputs_of(self, node: Node) -> set[Node]:
        """Return the nodes that may be a module's output node: views of this one, a bias added."""

        def edges(_: int, node: Node) -> list[Edge]:
            return [e for e in self.parents.get(node, ()) if e[0].name() in OUTPUTS]

        return set(reach([node], edges))


def reach(starts: Iterable[Node], edges: Callable[[int, Node], Iterable[Edge]]) -> list[Node]:
    """Return the starts and the nodes that edges(k, node) lead to from the k-th, nearest first."""
    found = list(dict.fromkeys(starts))
    visited = set(found)
    for k, node in enumerate(found):  # found grows
        fresh = dict.fromkeys(other for other, _ in edges(k, node) if other not in visited)
        found += fresh
        visited.update(fresh)
    return found


def nodes_below(starts: Iterable[Node], until: Collection[Node | None] = ()) -> list[Node]:
    """Return the starts and all nodes below them, except parameters and those in `until`."""

    def edges(_: int, node: Node) -> list[Edge]:
        return [e for e in node.next_functions if e[0] and not is_leaf(e[0]) and e[0] not in until]

    return reach((node for node in starts if node not in until), edges)


def coarsest_eps(ends: Iterable[Node], operands: Iterable[Tensor]) -> float:
    """Return the largest machine epsilon of the gradients from `ends` down to the operands."""
    until = {None, *(t.grad_fn for t in operands)}
    starts = (node for node in ends if node not in until)
    nodes = reach(starts, lambda _, v: [e for e in v.next_functions if e[0] not in until])
    dtypes = {kind.dtype for node in nodes for kind in getattr(node, "_input_metadata", ())}
    return max((torch.finfo(kind).eps for kind in dtypes if kind.is_floating_point), default=0.0)


def is_leaf(node: Node) -> bool:
    return hasattr(node, "variable")


def name_of(node: Node) -> str:
    """Return a name that does not depend on how autograd recorded reshapes and slices."""
    name: str = node.name()
    return SAME.get(name, name)


def edges_among(nodes: Sequence[Node]) -> tuple[tuple[int, int, int], ...]:
    """Return (consumer, its operand, consumed node) for each edge, by positions in `nodes`."""
    positions = {node: k for k, node in enumerate(nodes)}
    return tuple(
        (k, operand, positions[child])
        for node, k in positions.items()
        for operand, (child, _) in enumerate(node.next_functions)
        if child in positions
    )


def shape_of(node: Node, number: int) -> Shape:
    return tuple((node.variable if is_leaf(node) else node._input_metadata[number]).shape)


def dtype_of(node: Node, number: int) -> torch.dtype:
    dtype: torch.dtype = (node.variable if is_leaf(node) else node._input_metadata[number]).dtype
    return dtype


def to_signed(value: int) -> int:
    """Return an int64 that a node saved; nodes show negative ones as unsigned."""
    return (value + (1 << 63)) % (1 << 64) - (1 << 63)
