"""The nodes of one pass between a frontier (frontier.py) and the parameters below it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from ..gradients.products import ADD, CAST, is_elementwise, is_passthrough
from ..graph.layout import BATCH, SEQUENCE, Watched
from ..graph.nodes import Graph, Node, Shape, is_leaf, nodes_below
from ..ops import NATIVE
from .frontier import LiftPlan

if NATIVE:
    from .._C import Stop


@dataclass(frozen=True)
class Leaf:
    place: int  # in the table of parameters
    alone: bool  # nothing else brings it a gradient
    calls: int = 0  # of its modules: a pass waits for these already
    counted: int = 0  # edges that end here, where the recorder counts them; 0: it does not


@dataclass
class Station:
    """One node, and by operand where the gradients go on."""

    key: int
    layout: int | None  # of the output of a frontier node
    output: int
    inward: dict[int, tuple[int, int]] = field(default_factory=dict)  # to a node's key and output
    leaves: dict[int, Leaf] = field(default_factory=dict)

    @property
    def operands(self) -> tuple[int, ...]:
        return *self.inward, *self.leaves


class Path(NamedTuple):
    """Between the frontier and the parameters to serve."""

    stations: dict[Node, Station]
    guarded: dict[Node, bool]  # all its nodes; True: only these give it a gradient
    links: list[Node]  # sums that a shortened path leaves out, for they give on their gradient


class Trail(NamedTuple):
    """Numbers of a path's nodes, in graphs that look the same (csrc/record/outline.cpp)."""

    nodes: list[int]
    stations: list[Station]
    guarded: list[int]
    inside: list[bool]
    links: list[int]
    stops: list[Any]  # of stations that the extension may serve: at_node.cpp

    @staticmethod
    def of(path: Path, numbers: dict[Node, int]) -> Trail:
        stops = []
        for k, (node, s) in enumerate(path.stations.items()):
            counted = {operand: (x.place, x.counted) for operand, x in s.leaves.items() if x.alone}
            plain = s.layout in (BATCH, SEQUENCE) and not s.inward and len(counted) == len(s.leaves)
            if plain and all(count for _, count in counted.values()):
                stops.append(Stop(numbers[node], k, s.layout == SEQUENCE, counted))
        return Trail(
            [numbers[node] for node in path.stations],
            [*path.stations.values()],
            [numbers[node] for node in path.guarded],
            [*path.guarded.values()],
            [numbers[node] for node in path.links],
            stops,
        )


class Match(NamedTuple):
    """A plan's nodes, in a pass."""

    lifted: list[int]  # sites
    enclosed: list[int]  # parameters read beside the calls of their modules, of edges not counted
    # But for stations that the extension serves. None: consumed otherwise than when it was proven.
    stations: dict[Node, Station] | None
    same: bool = False  # its nodes look as they did, or their sizes leave no doubt
    ends: Sequence[tuple[Watched, int]] = ()  # of the frontier, with the layouts that were proven
    shapes: tuple[Shape | None, ...] = ()  # of the nodes now
    leaves: Sequence[Leaf] = ()  # all that are served
    counted: Sequence[int] = ()  # the parameters of those whose edges are
    in_full: frozenset[int] = frozenset()  # parameters that a node computed with, not row by row
    mute: tuple[str, ...] = ()  # names of nodes that cannot be asked, for how they saved
    packed: frozenset[int] = frozenset()  # keys of stations that saved through hooks
    trail: Trail | None = None
    outline: Any = None  # of this graph; None: nothing guards the path


def stations(
    graph: Graph, plan: LiftPlan, climbed: Sequence[Node], leaf_of: Callable[[int], Leaf | None]
) -> Path:
    """Return the nodes between the frontier and the parameters to serve."""
    layouts = dict(zip(climbed, plan.layouts, strict=True))
    inside = dict.fromkeys(nodes_below(node for node in climbed if layouts[node] is None))
    numbers = {node: k for k, node in enumerate({**dict.fromkeys(climbed), **inside})}
    by_node = {node: Station(key, layouts.get(node), graph.last(node))
           for node, key in numbers.items()}  # fmt: skip
    for node, station in by_node.items():
        for operand, (child, _) in enumerate(node.next_functions):
            if child and is_leaf(child) and (node in inside or child in inside):
                leaf = leaf_of(id(child.variable))
                if leaf and leaf.counted:  # a called module's own edges are no matter here
                    if node not in {parent for parent, _ in graph.parents[child]}:
                        continue
                    if node.name() == CAST:  # one for all uses
                        leaf = replace(leaf, counted=len(graph.parents[node]))
                if leaf:
                    station.leaves[operand] = leaf
    edges = Counter(leaf.place for s in by_node.values() for leaf in s.leaves.values())
    for station in by_node.values():
        for operand, leaf in station.leaves.items():
            if leaf.alone and edges[leaf.place] > 1:
                station.leaves[operand] = replace(leaf, alone=False)
    ends = [node for node, station in by_node.items() if station.leaves]
    useful = by_node.keys() & graph.climb(ends, lambda _, node: node in inside)
    for node in useful:
        for operand, (child, output) in enumerate(node.next_functions):
            if child in inside and child in useful:
                by_node[node].inward[operand] = numbers[child], output
    casts = {node for node in ends if node.name() == CAST}  # of which each edge is counted
    guarded = {n: n in inside for n in by_node if n in useful - casts and not is_leaf(n)}
    links: list[Node] = []
    for node, station in by_node.items():
        if station.layout is not None and is_elementwise(node):
            for operand in list(station.inward):
                links += _shorten(graph, by_node, node, operand)
    return Path({node: s for node, s in by_node.items() if s.inward or s.leaves}, guarded, links)


def _shorten(graph: Graph, by_node: dict[Node, Station], node: Node, operand: int) -> list[Node]:
    """Serve a parameter at a frontier's node where what lies between, as in 1 + weight, gives on
    the gradient that it receives. Return the sums there."""
    links: list[Node] = []
    child = node.next_functions[operand][0]
    while by_node[child].inward and not by_node[child].leaves and is_passthrough(child):
        links.append(child)
        child = child.next_functions[next(iter(by_node[child].inward))][0]
    links.append(child)
    leaves = by_node[child].leaves
    if (
        len(leaves) != 1
        or not is_passthrough(child)
        or any(len(graph.parents[c]) > 1 for c in links)
    ):
        return []
    by_node[node].leaves[operand] = next(iter(leaves.values()))
    del by_node[node].inward[operand]
    for link in links:
        by_node[link].inward.clear()
        by_node[link].leaves.clear()
    return [link for link in links if link.name() == ADD]
