"""The path of one pass: the nodes between a frontier (frontier.py) and the parameters below it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any, NamedTuple

import torch

from ..extension import _C, NATIVE
from ..gradients.elementwise import ADD, CAST, is_elementwise, is_passthrough
from ..gradients.products import selected_rows
from ..graph.layout import BATCH, SEQUENCE, Watched
from ..graph.nodes import Graph, Node, Shape, coarsest_eps, dtype_of, is_leaf, nodes_below
from .frontier import LiftPlan


@dataclass(frozen=True)
class Leaf:
    """A parameter at the end of a path."""

    place: int  # in the table of parameters
    is_alone: bool  # no other edge or use brings it a gradient
    calls: int = 0  # of its modules, for which the pass waits already
    edges: int = 0  # to the parameter, which the recorder counts; 0: it does not count them
    parts: int = 1  # nodes that each take other rows of it, if nothing else uses it


@dataclass
class Station:
    """One node of a path, and where the gradients of its operands go."""

    key: int
    layout: int | None  # of the samples in the output; None: below the frontier
    output: int  # its number
    inward: dict[int, tuple[int, int]] = field(default_factory=dict)  # key and output of a node
    leaves: dict[int, Leaf] = field(default_factory=dict)

    @property
    def operands(self) -> tuple[int, ...]:
        return *self.inward, *self.leaves


class Path(NamedTuple):
    """The nodes from the frontier to the parameters to serve."""

    stations: dict[Node, Station]
    guarded: dict[Node, bool]  # every node; True: only nodes of the path send it a gradient
    links: list[Node]  # sums that a shortened path leaves out, since they pass on their gradient


class Trail(NamedTuple):
    """A path by the numbers of its nodes in graphs that look the same: csrc/nodes/outline.cpp."""

    nodes: list[int]
    stations: list[Station]
    links: list[int]
    native: Any  # what is guarded, and what the extension may serve (csrc/nodes/at_node.cpp)

    @staticmethod
    def of(path: Path, numbers: dict[Node, int]) -> Trail:
        """Return the trail of a path. numbers: of the nodes of the graph."""
        stops = []
        for k, (node, s) in enumerate(path.stations.items()):
            leaves = {j: (leaf.place, leaf.edges) for j, leaf in s.leaves.items()
                      if leaf.is_alone and leaf.parts == 1}  # fmt: skip
            is_plain = s.layout in (BATCH, SEQUENCE) and not s.inward
            if is_plain and len(leaves) == len(s.leaves) and all(n for _, n in leaves.values()):
                stops.append((numbers[node], k, s.layout == SEQUENCE, leaves))
        guarded = [(numbers[node], is_inside) for node, is_inside in path.guarded.items()]
        return Trail(
            [numbers[node] for node in path.stations],
            [*path.stations.values()],
            [numbers[node] for node in path.links],
            _C.Trail(guarded, stops),
        )


class Match(NamedTuple):
    """The nodes of a plan in the graph of one pass."""

    lifted: list[int]  # sites
    uncounted: list[int]  # parameters read beside calls of their modules, whose edges do not count
    # Without those that the extension serves. None: the graph differs from the proven one.
    stations: dict[Node, Station] | None
    same: bool = False  # the frontier looks as in the proof, or its sizes leave no doubt
    ends: Sequence[tuple[Watched, int]] = ()  # outputs of the frontier, with their proven layouts
    shapes: tuple[Shape | None, ...] = ()  # of these outputs in this pass
    leaves: Sequence[Leaf] = ()  # all that are served
    counted: Sequence[int] = ()  # the parameters of leaves whose edges count
    expected: Sequence[int] = ()  # parameters of which more uses come than their modules' calls
    costs: Mapping[int, str] = {}  # by place: why its gradients by sample take long
    mute: tuple[str, ...] = ()  # names of nodes that cannot be asked, because of saved hooks
    hooked_keys: frozenset[int] = frozenset()  # of stations that saved through hooks
    trail: Trail | None = None
    outline: Any = None  # of this graph; None: the extension does not guard the path


def find_path(
    graph: Graph, plan: LiftPlan, climbed: Sequence[Node], leaf_of: Callable[[int], Leaf | None]
) -> Path:
    """Return the path from the frontier to the parameters to serve.
    climbed: the nodes of the plan. leaf_of: the leaf for the id of a parameter's tensor."""
    layouts = dict(zip(climbed, plan.layouts, strict=True))
    inside = dict.fromkeys(nodes_below(node for node in climbed if layouts[node] is None))
    keys = {node: k for k, node in enumerate({**dict.fromkeys(climbed), **inside})}
    by_node = {node: Station(key, layouts.get(node), graph.last(node))
               for node, key in keys.items()}  # fmt: skip
    for node, station in by_node.items():
        for operand, (child, _) in enumerate(node.next_functions):
            if child and is_leaf(child) and (node in inside or child in inside):
                leaf = leaf_of(id(child.variable))
                if leaf and leaf.edges:  # `graph` lacks the edges of modules' own calls
                    if node not in {parent for parent, _ in graph.parents[child]}:
                        continue
                    if node.name() == CAST:  # one cast serves all uses
                        leaf = replace(leaf, edges=len(graph.parents[node]))
                if leaf:
                    station.leaves[operand] = leaf
    uses: dict[int, list[range | None]] = {}  # by place: the rows that nodes take; None: others
    for node, station in by_node.items():
        for leaf in station.leaves.values():
            uses.setdefault(leaf.place, []).append(selected_rows(node))
    for station in by_node.values():
        for operand, leaf in station.leaves.items():
            rows, count = uses[leaf.place], len(uses[leaf.place])
            if NATIVE and leaf.is_alone and _are_apart(rows):
                station.leaves[operand] = replace(leaf, parts=count)
            elif count > 1:
                station.leaves[operand] = replace(leaf, is_alone=False)
    ends = [node for node, station in by_node.items() if station.leaves]
    useful = by_node.keys() & graph.climb(ends, lambda _, node: node in inside)
    for node in useful:
        for operand, (child, output) in enumerate(node.next_functions):
            if child in inside and child in useful:
                by_node[node].inward[operand] = keys[child], output
    casts = {node for node in ends if node.name() == CAST}  # each of their edges is counted instead
    guarded = {n: n in inside for n in by_node if n in useful - casts and not is_leaf(n)}
    links: list[Node] = []
    for node, station in by_node.items():
        if station.layout is not None and is_elementwise(node):
            for operand in list(station.inward):
                links += _shorten(graph, by_node, node, operand)
    return Path({node: s for node, s in by_node.items() if s.inward or s.leaves}, guarded, links)


def _are_apart(rows: Sequence[range | None]) -> bool:
    """Return True if all of these are known, and no two of them overlap."""
    known = sorted((r.start, r.stop) for r in rows if r is not None)
    return len(known) == len(rows) and all(a[1] <= b[0] for a, b in pairwise(known))


def _shorten(graph: Graph, by_node: dict[Node, Station], node: Node, operand: int) -> list[Node]:
    """Serve a parameter at a frontier node if all nodes between pass on their gradient unchanged.
    An example is the weight in x * (1 + weight). Return the sums between."""
    links = [node.next_functions[operand][0]]
    while (station := by_node[links[-1]]).inward and not station.leaves:
        if not is_passthrough(links[-1]):
            return []
        links.append(links[-1].next_functions[next(iter(station.inward))][0])
    has_other_parents = any(len(graph.parents[link]) > 1 for link in links)
    rounds = coarsest_eps(links, ()) > torch.finfo(dtype_of(node, 0)).eps  # a cast to bfloat16
    if len(station.leaves) != 1 or not is_passthrough(links[-1]) or has_other_parents or rounds:
        return []
    by_node[node].leaves[operand] = next(iter(station.leaves.values()))
    del by_node[node].inward[operand]
    for link in links:
        by_node[link].inward.clear()
        by_node[link].leaves.clear()
    return [link for link in links if link.name() == ADD]
