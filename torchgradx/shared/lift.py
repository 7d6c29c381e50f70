"""Uses whose gradient by sample is taken from above them, where the samples come in.

Of modules called on something without samples (frontier.py says what that is), and of parameters
that a module uses beside its children: running such a module again would run all of them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Sequence
from functools import cache, partial
from math import prod
from typing import Any, NamedTuple

from torch import Tensor
from torch.autograd.graph import get_gradient_edge

from ..layers.rules import Layer
from ..ops import NATIVE
from ..proof.layout import Finding, Watched
from ..record.unpacking import are_offloaded, asked, hides
from ..refusals import cause
from ..sites.native import NativeSite
from ..sites.recurrent import Site
from ..sites.rerun import FallbackSite
from .descent import CHUNK, Descent
from .frontier import Graph, Group, Node, Plan, Region, Shape, shape_of, survey
from .products import counts_ids, gives_on, in_closed_form, keeps_rows, makes_in_full
from .stations import Leaf, Station, Trail, Way, stations

if NATIVE:
    from .._C import Outline

TRAILS = 8  # of one plan: its sizes may never repeat
Use = tuple[int, Sequence[int], Node, int]  # (site, sizes, node of its output, output of the node)


IN_FULL = (
    "; where this is computed with parameters alone they are made in full, some samples at a time, "
    "by vmap"
)


class Met(NamedTuple):
    """A plan's nodes, in a pass."""

    lifted: list[int]  # sites
    enclosed: list[int]  # parameters read beside the calls of their modules, of edges not counted
    # But for stations that the extension serves. None: consumed otherwise than when it was proven.
    way: dict[Node, Station] | None
    same: bool = False  # its nodes look as they did, or their sizes leave no doubt
    ends: Sequence[tuple[Watched, int]] = ()  # of the frontier, with the layouts that were proven
    shapes: tuple[Shape | None, ...] = ()  # of the nodes now
    leaves: Sequence[Leaf] = ()  # all that are served
    counted: Sequence[int] = ()  # the parameters of those whose edges are
    in_full: frozenset[int] = frozenset()  # parameters that a node computed with, not row by row
    mute: tuple[str, ...] = ()  # nodes that saved in a way in which they cannot be asked, by name
    packed: frozenset[int] = frozenset()  # keys of stations that saved through hooks
    trail: Trail | None = None
    outline: Any = None  # of this graph; None: nothing guards the way


class Start(NamedTuple):
    """Uses that may have to be lifted, before a proof."""

    graph: Graph  # without the edges by which modules use their own parameters
    tables: set[int]  # uses that are given the same for any batch
    beside: list[int]
    read: list[int]
    region: Region


class Lift:
    """Of one probe."""

    def __init__(
        self,
        recorder: Any,
        parameters: Any,
        layers: Sequence[Layer],
        hears: Callable[[int], bool],
        norms_only: bool,
    ) -> None:
        self._recorder, self._parameters, self._layers = recorder, parameters, layers
        self._hears_always, self._norms_only = hears, norms_only
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
        beside = self._beside(uses, sites)
        every = {place for layer in self._layers for place in layer.parameters}
        graph, called = self._graph(every, uses, tables, beside, sites, outputs)
        read = self._read(every, uses, graph, called, beside)
        starts = [uses[k][2] for k in sorted(tables) if uses[k][2] in graph.parents]
        starts += [node for k in (*beside, *read) for node in self.own(k, uses, graph)]
        return Start(graph, tables, beside, read, Region(n, graph, starts, constant))

    def plan(
        self,
        n: int,
        uses: Sequence[Use],
        sites: Sequence[Site],
        outputs: Sequence[Tensor],
        start: Start,
        found: Sequence[Finding],
        of_region: Sequence[Finding],
        proven: bool,
    ) -> Plan | None:
        """Plan the lifted uses of a new structure. proven: weighted backwards could run."""
        mixing = {
            k
            for k in start.tables
            if uses[k][2] is not None
            and (isinstance(found[k].layout, str) or (not proven and found[k].layout is None))
        }
        beside = list(start.beside)
        graph, read = start.graph, start.read
        if mixing != start.tables or beside != start.beside:
            every = {place for layer in self._layers for place in layer.parameters}
            graph, called = self._graph(every, uses, mixing, beside, sites, outputs)
            read = self._read(every, uses, graph, called, beside)
        if not mixing and not beside and not read:
            return None

        @cache
        def shown() -> bool:
            return are_offloaded(graph.parents)

        def able(node: Node, ends: bool) -> bool:
            return asked(node)[0] and not counts_ids(node) and (not hides(node) or shown())

        def cheap(large: int, node: Node, ends: bool) -> bool:
            """Return True if asking a node costs less than running its module again. large: the
            size of a weight of which there is no room for a gradient a sample; 0: none is."""
            if large and not ends and prod(shape_of(node, 0)) >= large and not keeps_rows(node):
                return False
            return able(node, ends) and (not ends or n == 1 or in_closed_form(node))

        def way(leaves: Sequence[Node]) -> Callable[[Node, bool], bool]:
            kernels = [p for p in (leaf.variable for leaf in leaves) if p.dim() > 2]
            most = max((p.numel() for p in kernels if p.numel() > max(p.shape)), default=0)
            large = most if self._recorder.books or n * most > CHUNK else 0
            return able if once else partial(cheap, large)

        groups = [Group(k, (uses[k][2],), lambda node, ends: True) for k in sorted(mixing)]
        # What is sharded apart, or checkpointed reentrantly inside, cannot be run again.
        once = self._parameters.gathered() or any(node is None for _, _, node, _ in uses)
        groups += [Group(k, own, way(own)) for k in beside if (own := self.own(k, uses, graph))]
        groups += [Group(k, self.own(k, uses, graph), able) for k in read]
        layouts = start.region.layouts(of_region, proven)
        plan = survey(n, graph, groups, start.region, layouts)
        return plan if plan.starts else None

    def _beside(self, uses: Sequence[Use], sites: Sequence[Site]) -> list[int]:
        """Uses of modules that would run again, and share their parameters with none that would be
        run again all the same."""
        able = {k: isinstance(s, FallbackSite) and s.by_nodes for k, s in enumerate(sites)}
        others = {place for site, *_ in uses if not able[site] and not self._plain(site, sites)
                  for place in self._layers[site].parameters}  # fmt: skip
        return [k for k, (site, _, node, _) in enumerate(uses)
                if able[site] and node is not None
                and others.isdisjoint(self._layers[site].parameters)]  # fmt: skip

    def _plain(self, site: int, sites: Sequence[Site]) -> bool:
        return isinstance(sites[site], NativeSite) and not self._layers[site].role

    def _graph(
        self,
        places: set[int],
        uses: Sequence[Use],
        mixing: Collection[int],
        beside: Collection[int],
        sites: Sequence[Site],
        outputs: Sequence[Tensor],
    ) -> tuple[Graph, set[int]]:
        """Return the graph without modules' own edges to the parameters at `places`, and theirs."""
        graph, seen, others = Graph(outputs), dict[int, set[Node]](), set[int]()
        if not places:
            return graph, set()
        for k, (site, _, node, _) in enumerate(uses):
            those = places.intersection(self._layers[site].parameters)
            if not those:
                continue
            plain = self._plain(site, sites) and node in graph.parents and k not in mixing
            for place in those:
                if plain:
                    seen.setdefault(place, set()).add(node)
                elif k not in beside:
                    others.add(place)
        tensors = self._parameters.wholes()
        called = {
            place
            for place in places & seen.keys() - others
            if tensors[place].requires_grad
            and graph.without(get_gradient_edge(tensors[place]).node, seen[place])
        }
        return graph, called

    def _read(
        self,
        every: set[int],
        uses: Sequence[Use],
        graph: Graph,
        called: set[int],
        beside: Sequence[int],
    ) -> list[int]:
        """Parameters that the forward reads beside the calls of their modules, as -1 - place."""
        used = {place for site, *_ in uses for place in self._layers[site].parameters}
        found = {place for k in beside for place in self._layers[uses[k][0]].parameters}
        read = [-1 - place for place in sorted((every - used | called) - found)]
        return [k for k in read if self.own(k, uses, graph)]

    def _served(self, k: int, uses: Sequence[Use]) -> tuple[int, tuple[int, ...]]:
        """The site of a start of a plan, and the parameters."""
        if k >= 0:
            return uses[k][0], self._layers[uses[k][0]].parameters
        owns = (-1 - k in layer.parameters for layer in self._layers)
        return list(owns).index(True), (-1 - k,)

    def own(self, k: int, uses: Sequence[Use], graph: Graph) -> tuple[Node, ...]:
        """The ends of the graph that are parameters of a use, or of what -1 - place stands for."""
        every = self._parameters.wholes()
        tensors = (every[place] for place in self._served(k, uses)[1])
        nodes = [get_gradient_edge(p).node for p in tensors if p.requires_grad]
        return tuple(node for node in nodes if node in graph.parents)

    def meet(
        self,
        run: Any,
        plan: Plan,
        uses: Sequence[Use],
        sites: Sequence[Site],
        outputs: Sequence[Tensor],
    ) -> Met:
        """Find a plan's nodes in the graph of this pass: where those of another were that looks the
        same, or by a walk."""
        if not NATIVE or self._parameters.gathered():
            met, way = self._walk(run.n, plan, uses, sites, outputs)
            if way is None:
                return met
            return _asked(met._replace(way=way.stations), lambda: Graph(outputs).parents)
        outline = Outline(run, outputs)
        known = _known(plan, outline)
        if known is not None:
            return _placed(run.n, known, outline)
        met, way = self._walk(run.n, plan, uses, sites, outputs)
        if way is None:
            return met
        met = met._replace(trail=Trail.of(way, outline.numbers()))
        placed = _placed(run.n, met, outline)
        if met.same and not placed.mute:
            if len(plan.trails) >= TRAILS:
                plan.trails.clear()
            plan.trails[outline.key] = met._replace(ends=())
        return placed

    def recall(self, run: Any, plan: Any, outputs: Sequence[Tensor]) -> Met | None:
        """Return a plan's nodes in a graph that looks as one in which it held; else None."""
        known = _known(plan, outline := Outline(run, outputs))
        met = known and _placed(run.n, known, outline)
        return None if met is None or met.mute else met

    def _walk(
        self,
        n: int,
        plan: Plan,
        uses: Sequence[Use],
        sites: Sequence[Site],
        outputs: Sequence[Tensor],
    ) -> tuple[Met, Way | None]:
        read = {-1 - k for k, _ in plan.starts if k < 0}
        beside = {k for k, own in plan.starts if own and k >= 0}
        mixing = {k for k, own in plan.starts if not own}
        shared = {place for k in beside for place in self._layers[uses[k][0]].parameters}
        graph, called = self._graph({*read, *shared}, uses, mixing, beside, sites, outputs)
        lifted = sorted({self._served(k, uses)[0] for k, _ in plan.starts})
        starts: list[Node] = []
        for k, own in plan.starts:
            starts += self.own(k, uses, graph) if own else [uses[k][2]]
        climbed = plan.climb(graph, starts)
        if climbed is None:
            return Met(lifted, sorted(read - called), None), None
        way = stations(graph, plan, climbed, self._leaves(plan, uses, called).get)
        same, shapes, ends = plan.fits(graph, climbed, n)
        leaves = [leaf for station in way.stations.values() for leaf in station.leaves.values()]
        counted = {leaf.place for leaf in leaves if leaf.counted}
        enclosed = sorted(read - called - counted)
        made = [s for node, s in way.stations.items() if s.layout is None and makes_in_full(node)]
        in_full = frozenset(leaf.place for s in made for leaf in s.leaves.values())
        return Met(lifted, enclosed, {}, same, ends, shapes, leaves, sorted(counted), in_full), way

    def begin(self, run: Any, met: Met, first: int) -> None:
        """Listen at the frontier, and below it. first: of the nodes that the forward made."""
        lifted = met.lifted  # what listens must not own the graph, which the outline does

        def refuse(where: Any, why: str) -> None:
            for site in lifted:
                where.refuse(site, why)

        run.enclose(met.enclosed, first)
        if met.counted:
            run.disclose(met.counted)
        if met.way is None:
            refuse(run, "otherwise")
            return
        if met.mute:
            refuse(run, cause("node_twice", node=met.mute[0]))
            return
        for site in lifted:
            layer = self._layers[site]
            in_full = not met.in_full.isdisjoint(layer.parameters)
            layer.notes["lifted"] = IN_FULL if in_full else None
        descent = Descent(
            run,
            self._recorder,
            met.way,
            met.leaves,
            met.packed,
            self._parameters.wholes(),
            hears=self._hears,
            delivered=self.delivered,
            refuse=partial(refuse, self._recorder),
            norms_only=self._norms_only,
            guarded=met.trail is not None,
        )
        if met.trail is not None:
            met.outline.guard(run, met.trail.guarded, met.trail.inside, lifted)
            if run.n:
                descent.serve(met.outline, met.trail)

    def _hears(self, leaf: Leaf) -> bool:
        """Return whether its gradient will be compared. What is counted edge by edge need not be,
        once its structure is known."""
        return self._recorder.auditing or (not leaf.counted and self._hears_always(leaf.place))

    def _leaves(self, plan: Plan, uses: Sequence[Use], called: set[int]) -> dict[int, Leaf]:
        """The parameters to serve, by their tensors' ids."""
        lifted = dict(plan.starts)
        places = [set(self._layers[site].parameters) for site, *_ in uses]
        others = set().union(*(p for k, p in enumerate(places) if k not in lifted))
        tensors = self._parameters.wholes()
        calls = Counter(place for k, own in lifted.items() if own and k >= 0 for place in places[k])
        leaves = {}
        for k, own in lifted.items():
            for place in self._served(k, uses)[1]:
                alone = place not in others
                counted = place in called or (own and alone and NATIVE)
                leaf = Leaf(place, alone, calls[place], int(counted))
                leaves[id(tensors[place])] = leaf
        return leaves


def _known(plan: Plan, outline: Any) -> Met | None:
    """Return what was found of a plan's nodes in a graph that looks the same."""
    seen = list(plan.trails.items())  # other threads add to it
    met = next((met for look, met in seen if outline.looks(look)), None)
    return met if met and all(map(gives_on, outline.nodes(met.trail.links))) else None


def _placed(n: int, met: Met, outline: Any) -> Met:
    """Find the nodes of a trail in this graph, of stations that the extension does not serve."""
    trail: Any = met.trail
    served = set(outline.served(trail.stops)) if n else set()
    met = met._replace(outline=outline)
    if len(served) == len(trail.nodes):
        return met
    rest = [k for k in range(len(trail.nodes)) if k not in served]
    nodes = outline.nodes([trail.nodes[k] for k in rest])
    way = dict(zip(nodes, (trail.stations[k] for k in rest), strict=True))
    return _asked(met._replace(way=way), outline.numbers)


def _asked(met: Met, every: Callable[[], Iterable[Node]]) -> Met:
    """Add which nodes cannot be asked, and which saved through hooks. every: the graph's nodes."""
    way = met.way or {}
    shown = not any(map(hides, way)) or are_offloaded(every())
    mute, packed = [], set()
    for node, station in way.items():
        answers, packs = asked(node)
        if not answers or (hides(node) and not shown):
            mute.append(node.name())
        if packs:
            packed.add(station.key)
    return met._replace(mute=tuple(mute), packed=frozenset(packed))
