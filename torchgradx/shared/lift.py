"""Uses whose gradient by sample is taken from above them, where the samples come in.

Of modules called on something without samples (frontier.py says what that is), and of parameters
that a module uses beside its children: running such a module again would run all of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import cached_property, partial
from math import prod
from typing import Any, NamedTuple

from torch import Tensor

from ..gradients.by_sample import GRADIENT_ELEMENTS
from ..gradients.products import (
    in_closed_form,
    is_passthrough,
    keeps_rows,
    makes_in_full,
    scales_by_count,
)
from ..graph.layout import Finding
from ..graph.nodes import Graph, Node, shape_of
from ..graph.unpacking import are_offloaded, can_ask, is_copy_slices
from ..layers.rules import Layer
from ..ops import NATIVE
from ..refusals import cause
from ..sites.site import Site
from .descent import Descent
from .frontier import Climb, LiftPlan, Region, survey
from .stations import Leaf, Match, Path, Trail, stations
from .uses import Use, Uses

if NATIVE:
    from .._C import Outline

TRAILS = 8  # of one plan: its sizes may never repeat
IN_FULL = (
    "; where this is computed with parameters alone they are made in full, some samples at a time, "
    "by vmap"
)


class Start(NamedTuple):
    """Uses that may have to be lifted, before a proof."""

    uses: Uses
    graph: Graph  # without the edges by which modules use their own parameters
    tables: set[int]  # uses that are given the same for any batch
    beside: list[int]
    read: list[int]
    region: Region


class Lift:
    """The lifted uses of one probe."""

    def __init__(
        self,
        recorder: Any,
        parameters: Any,
        layers: Sequence[Layer],
        hears: Callable[[int], bool],
        norms_only: bool,
    ) -> None:
        self.recorder, self._parameters, self._layers = recorder, parameters, layers
        self._hears_always, self.norms_only = hears, norms_only
        # Backwards, and parameters whose every edge was counted there. Hooks hold this set.
        self.delivered: set[tuple[int, int]] = set()

    def start(
        self,
        n: int,
        uses: Sequence[Use],
        sites: Sequence[Site],
        outputs: Sequence[Tensor],
        tables: set[int],
        constant: Callable[[Node, int], bool] | None,
    ) -> Start:
        """tables: uses that are given the same for any batch. constant: see Region."""
        its = Uses(self._layers, self._parameters, uses, sites, outputs)
        beside = its.beside()
        graph, called = its.graph(tables, beside)
        read = its.read(graph, called, beside)
        starts = [its.node(k) for k in sorted(tables) if its.node(k) in graph.parents]
        starts += [node for k in (*beside, *read) for node in its.own(k, graph)]
        return Start(its, graph, tables, beside, read, Region(n, graph, starts, constant))

    def plan(
        self,
        n: int,
        start: Start,
        found: Sequence[Finding],
        of_region: Sequence[Finding],
        proven: bool,
    ) -> LiftPlan | None:
        """Plan the lifted uses of a new structure. proven: weighted backwards could run."""
        uses, graph, read = start.uses, start.graph, start.read
        mixing = {
            k
            for k in start.tables
            if uses.node(k) is not None
            and (isinstance(found[k].layout, str) or (not proven and found[k].layout is None))
        }
        beside = start.beside
        if mixing != start.tables:
            graph, called = uses.graph(mixing, beside)
            read = uses.read(graph, called, beside)
        if not mixing and not beside and not read:
            return None
        asking = Asking(n, graph)
        # What is sharded by itself, or checkpointed reentrantly inside, cannot be run again.
        once = self._parameters.gathered() or not uses.have_nodes()
        groups = [Climb(k, (uses.node(k),), lambda node, ends: True) for k in sorted(mixing)]
        for k in beside:
            if own := uses.own(k, graph):
                large = self._large_weight(n, own)
                is_cheap = partial(asking.is_cheap, large)
                groups.append(Climb(k, own, asking.is_able if once else is_cheap))
        groups += [Climb(k, uses.own(k, graph), asking.is_able) for k in read]
        layouts = start.region.layouts(of_region, proven)
        plan = survey(n, graph, groups, start.region, layouts)
        return plan if plan.starts else None

    def _large_weight(self, n: int, leaves: Sequence[Node]) -> int:
        """Return the size of the largest weight, if there is no room for a gradient a sample of it,
        or that is kept for clipping; else 0."""
        kernels = [p for p in (leaf.variable for leaf in leaves) if p.dim() > 2]
        most = max((p.numel() for p in kernels if p.numel() > max(p.shape)), default=0)
        return most if self.recorder.books or n * most > GRADIENT_ELEMENTS else 0

    def own(self, k: int, uses: Sequence[Use], graph: Graph) -> tuple[Node, ...]:
        """Return the ends of the graph that are parameters of a use."""
        return Uses(self._layers, self._parameters, uses, (), ()).own(k, graph)

    def match(
        self,
        run: Any,
        plan: LiftPlan,
        uses: Sequence[Use],
        sites: Sequence[Site],
        outputs: Sequence[Tensor],
    ) -> Match:
        """Find a plan's nodes in the graph of this pass: where those of another were that looks the
        same, or by a walk."""
        its = Uses(self._layers, self._parameters, uses, sites, outputs)
        if not NATIVE or self._parameters.gathered():
            match, path = _walk(run.n, plan, its)
            if path is None:
                return match
            return _asked(match._replace(stations=path.stations), lambda: Graph(outputs).parents)
        outline = Outline(run, outputs)
        known = _known(plan, outline)
        if known is not None:
            return _placed(run.n, known, outline)
        match, path = _walk(run.n, plan, its)
        if path is None:
            return match
        match = match._replace(trail=Trail.of(path, outline.numbers()))
        placed = _placed(run.n, match, outline)
        if match.same and not placed.mute:
            if len(plan.trails) >= TRAILS:
                plan.trails.clear()
            plan.trails[outline.key] = match._replace(ends=())
        return placed

    def recall(self, run: Any, plan: Any, outputs: Sequence[Tensor]) -> Match | None:
        """Return a plan's nodes in a graph that looks as one in which it held; else None."""
        known = _known(plan, outline := Outline(run, outputs))
        match = known and _placed(run.n, known, outline)
        return None if match is None or match.mute else match

    def begin(self, run: Any, match: Match, first: int) -> None:
        """Listen at the frontier, and below it. first: of the nodes that the forward made."""
        lifted = match.lifted  # what listens must not own the graph, which the outline does

        def refuse(where: Any, why: str) -> None:
            for site in lifted:
                where.refuse(site, why)

        run.enclose(match.enclosed, first)
        if match.counted:
            run.disclose(match.counted)
        if match.stations is None:
            refuse(run, "otherwise")
            return
        if match.mute:
            refuse(run, cause("node_twice", node=match.mute[0]))
            return
        for site in lifted:
            layer = self._layers[site]
            in_full = not match.in_full.isdisjoint(layer.parameters)
            layer.notes["lifted"] = IN_FULL if in_full else None
        descent = Descent(run, match, self, self._parameters, partial(refuse, self.recorder))
        if match.trail is not None:
            match.outline.guard(run, match.trail.guarded, match.trail.inside, lifted)
            if run.n:
                descent.serve(match.outline, match.trail)

    def hears(self, leaf: Leaf) -> bool:
        """Return whether its gradient will be compared. What is counted edge by edge need not be,
        once its structure is known."""
        return self.recorder.auditing or (not leaf.counted and self._hears_always(leaf.place))


class Asking:
    """Choice of the nodes to ask for their products, in place of running modules again."""

    def __init__(self, n: int, graph: Graph) -> None:
        self._n, self._nodes = n, graph.parents

    @cached_property
    def _is_offloaded(self) -> bool:
        return are_offloaded(self._nodes)

    def is_able(self, node: Node, ends: bool) -> bool:
        """ends: of the frontier."""
        asked_twice = can_ask(node)[0] and not scales_by_count(node)
        return asked_twice and (not is_copy_slices(node) or self._is_offloaded)

    def is_cheap(self, large: int, node: Node, ends: bool) -> bool:
        """Return True if asking a node costs less than running its module again. large: see
        Lift._large_weight."""
        if large and not ends and prod(shape_of(node, 0)) >= large and not keeps_rows(node):
            return False
        return self.is_able(node, ends) and (not ends or self._n == 1 or in_closed_form(node))


def _walk(n: int, plan: LiftPlan, uses: Uses) -> tuple[Match, Path | None]:
    """Find a plan's nodes by climbing the graph of this pass."""
    read = {-1 - k for k, _ in plan.starts if k < 0}
    beside = {k for k, own in plan.starts if own and k >= 0}
    mixing = {k for k, own in plan.starts if not own}
    shared = {place for k in beside for place in uses.places(k)}
    graph, called = uses.graph(mixing, beside, {*read, *shared})
    lifted = sorted({uses.site(k) for k, _ in plan.starts})
    starts: list[Node] = []
    for k, own in plan.starts:
        starts += uses.own(k, graph) if own else [uses.node(k)]
    climbed = plan.climb(graph, starts)
    if climbed is None:
        return Match(lifted, sorted(read - called), None), None
    path = stations(graph, plan, climbed, uses.leaves(plan, called).get)
    same, shapes, ends = plan.fits(graph, climbed, n)
    leaves = [leaf for station in path.stations.values() for leaf in station.leaves.values()]
    counted = {leaf.place for leaf in leaves if leaf.counted}
    enclosed = sorted(read - called - counted)
    made = [s for node, s in path.stations.items() if s.layout is None and makes_in_full(node)]
    in_full = frozenset(leaf.place for s in made for leaf in s.leaves.values())
    return Match(lifted, enclosed, {}, same, ends, shapes, leaves, sorted(counted), in_full), path


def _known(plan: LiftPlan, outline: Any) -> Match | None:
    """Return what was found of a plan's nodes in a graph that looks the same."""
    trails = list(plan.trails.items())  # other threads add to it
    match = next((match for look, match in trails if outline.looks(look)), None)
    return match if match and all(map(is_passthrough, outline.nodes(match.trail.links))) else None


def _placed(n: int, match: Match, outline: Any) -> Match:
    """Find the nodes of a trail in this graph, of stations that the extension does not serve."""
    trail: Any = match.trail
    served = set(outline.served(trail.stops)) if n else set()
    match = match._replace(outline=outline)
    if len(served) == len(trail.nodes):
        return match
    rest = [k for k in range(len(trail.nodes)) if k not in served]
    nodes = outline.nodes([trail.nodes[k] for k in rest])
    by_node = dict(zip(nodes, (trail.stations[k] for k in rest), strict=True))
    return _asked(match._replace(stations=by_node), outline.numbers)


def _asked(match: Match, every: Callable[[], Iterable[Node]]) -> Match:
    """Add which nodes cannot be asked, and which saved through hooks. every: the graph's nodes."""
    by_node = match.stations or {}
    opens = not any(map(is_copy_slices, by_node)) or are_offloaded(every())
    mute, packed = [], set()
    for node, station in by_node.items():
        answers, packs = can_ask(node)
        if not answers or (is_copy_slices(node) and not opens):
            mute.append(node.name())
        if packs:
            packed.add(station.key)
    return match._replace(mute=tuple(mute), packed=frozenset(packed))
