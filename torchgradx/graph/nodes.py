"""A graph's nodes: which consume what, what each makes and what it was made of."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

Node = Any
Shape = tuple[int, ...]
VIEWS = {f"{name}Backward0" for name in (
    "Alias", "Clone", "Expand", "Permute", "ReshapeAlias", "Select", "Slice", "T", "ToCopy",
    "Transpose", "UnsafeView", "Unsqueeze", "View",
)}  # fmt: skip
OUTPUTS = {*VIEWS, "AddBackward0"}
SAME = {"ReshapeAliasBackward0": "ViewBackward0", "AliasBackward0": "SliceBackward0"}


class Graph:
    """A forward's graph, walked from its outputs: who consumes what."""

    def __init__(self, outputs: Iterable[Tensor]) -> None:
        # in the outputs' order: a plan's names are of nodes that every pass lists in the same one
        self.roots = dict.fromkeys(t.grad_fn for t in outputs if t.grad_fn is not None)
        self.parents: dict[Node, list[tuple[Node, int]]] = {node: [] for node in self.roots}
        todo = list(self.parents)
        while todo:
            node = todo.pop()
            for child, number in node.next_functions:
                if child is not None:
                    if child not in self.parents:
                        self.parents[child] = []
                        todo.append(child)
                    self.parents[child].append((node, number))

    def numbers(self, node: Node) -> list[int]:
        """Return the outputs of a node that others consume."""
        return sorted({number for _, number in self.parents.get(node, ())})

    def last(self, node: Node) -> int:
        """Return the one output of a frontier's node."""
        return max(self.numbers(node), default=0)

    def climb(self, starts: Iterable[Node], on: Callable[[int, Node], bool]) -> list[Node]:
        """Nodes above, nearest first; beyond the k-th only if `on` says so."""
        found = list(dict.fromkeys(starts))
        visited = set(found)
        for k, node in enumerate(found):  # grows as it goes
            if on(k, node):
                fresh = dict.fromkeys(p for p, _ in self.parents.get(node, ()) if p not in visited)
                found += fresh
                visited.update(fresh)
        return found

    def without(self, leaf: Node, uses: set[Node]) -> bool:
        """Take away a parameter's edges into what made the outputs `uses` of its modules.

        False, and nothing is changed, where they are not found.
        """
        left: dict[Node, list[tuple[Node, int]]] = {}
        hits: set[Node] = set()
        gone = leaf in self.parents and self._prune(leaf, uses, left, hits)
        if hits != uses:
            return False
        self.parents.update(left)
        if gone:
            del self.parents[leaf]
        return True

    def _prune(
        self, node: Node, uses: set[Node], left: dict[Node, list[tuple[Node, int]]], hits: set[Node]
    ) -> bool:
        """Fill `left` with the parents that remain; return True if none does. No closure calls
        itself here: it would keep the graph until garbage is collected."""
        kept = left[node] = []
        for parent, number in self.parents[node]:
            made = self._made(parent) & uses
            hits |= made
            if not made and not (parent.name() in VIEWS and self._prune(parent, uses, left, hits)):
                kept.append((parent, number))
        return not kept and node not in self.roots

    def _made(self, node: Node) -> set[Node]:
        """It, and what it makes in another shape and with a bias added."""
        todo, visited = [node], {node}
        for node in todo:  # grows as it goes
            parents = {p for p, _ in self.parents.get(node, ()) if p.name() in OUTPUTS}
            todo += parents - visited
            visited |= parents
        return visited


def nodes_below(starts: Iterable[Node], until: Collection[Node | None] = ()) -> list[Node]:
    """Return these nodes and all that they lead to, less the parameters and what is `until`."""
    found = [node for node in dict.fromkeys(starts) if node not in until]
    visited = {*found, *until}
    for node in found:  # grows as it goes
        children = (child for child, _ in node.next_functions if child and not is_leaf(child))
        fresh = dict.fromkeys(child for child in children if child not in visited)
        found += fresh
        visited.update(fresh)
    return found


def coarsest_eps(ends: Iterable[Node], operands: Iterable[Tensor]) -> float:
    """Return the largest rounding unit of gradients between ends and what they are made from."""
    visited = {t.grad_fn for t in operands}
    found = [node for node in ends if node not in visited]
    dtypes: set[torch.dtype] = set()
    for node in filter(None, found):  # grows as it goes
        dtypes.update(kind.dtype for kind in getattr(node, "_input_metadata", ()))
        fresh = {child for child, _ in node.next_functions} - visited
        found += fresh
        visited.update(fresh)
    return max((torch.finfo(kind).eps for kind in dtypes if kind.is_floating_point), default=0.0)


def is_leaf(node: Node) -> bool:
    return hasattr(node, "variable")


def name_of(node: Node) -> str:
    """Return a name that does not depend on how reshapes and slices were recorded."""
    name: str = node.name()
    return SAME.get(name, name)


def edges_among(nodes: Sequence[Node]) -> tuple[tuple[int, int, int], ...]:
    places = {node: k for k, node in enumerate(nodes)}
    return tuple(
        (k, operand, places[child])
        for node, k in places.items()
        for operand, (child, _) in enumerate(node.next_functions)
        if child in places
    )


def shape_of(node: Node, number: int) -> tuple[int, ...]:
    if is_leaf(node):
        return tuple(node.variable.shape)
    return tuple(node._input_metadata[number].shape)


def dtype_of(node: Node, number: int) -> torch.dtype:
    found = node.variable if is_leaf(node) else node._input_metadata[number]
    dtype: torch.dtype = found.dtype
    return dtype


def to_signed(value: int) -> int:
    """Return a number that a node saved: it shows negative ones as unsigned."""
    return (value + (1 << 63)) % (1 << 64) - (1 << 63)
