"""Lifted uses: uses whose per-sample gradients are taken from above, where the samples enter.

These are the uses of modules whose input has no samples (frontier.py), and the parameters that a
module reads beside its children, since to run such a module again would run all of them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import cache, partial
from math import prod
from typing import Any, NamedTuple

from torch import Tensor

from ..extension import _C, NATIVE, Pass
from ..gradients import products
from ..gradients.by_sample import GRADIENT_ELEMENTS
from ..gradients.elementwise import is_passthrough
from ..graph.functions import is_users
from ..graph.layout import Finding
from ..graph.nodes import Graph, Node, reach, shape_of
from ..graph.owners import Owned
from ..graph.segments import Ownership
from ..graph.unpacking import are_offloaded, can_ask, is_copy_slices
from ..refusals import cause
from ..sites.site import ProbeParts
from .descent import Descent
from .entries import Entries
from .frontier import Climb, IsConstant, LiftPlan, Region, plan_lift
from .stations import Leaf, Match, Path, Trail, find_path
from .uses import Uses

MAX_TRAILS = 8  # of one plan: its sizes may never repeat
LiftEnd = tuple[int, int, Node, Owned]  # use, its site, a node where it enters rows with owners
IN_FULL = "; of what is computed from parameters alone, in full by vmap, some samples at a time"
EACH = "; a Function is asked for them once for each sample"


class Start(NamedTuple):
    """Uses that may have to be lifted, before a proof."""

    uses: Uses
    graph: Graph  # without the edges of modules' own calls to their parameters
    tables: set[int]  # uses whose input is the same for any batch
    beside: list[int]  # uses of modules that would run again, see Uses.find_beside
    read: list[int]  # parameters that are read beside the calls of their modules
    region: Region


class Lift:
    """The lifted uses of one probe."""

    def __init__(self, shared: ProbeParts, hears: Callable[[int], bool]) -> None:
        """hears: whether the gradient of the parameter at a place will be compared."""
        self.recorder, self._parameters, self._layers, options, self._sites, _ = shared
        self._hears_place, self.norms_only = hears, not options["weight_grad"]
        # By backward: places of parameters whose every edge was counted. Hooks hold this table.
        self.delivered: dict[int, set[int]] = {}
        self._noted: Sequence[int] = ()  # sites of the latest match

    def start(self, forward: Any, tables: set[int], is_constant: IsConstant | None) -> Start:
        """Find the uses that may have to be lifted. tables: see Start. is_constant: see Region."""
        its = self._uses(forward)
        beside = its.find_beside()
        graph, called = its.prune_graph(tables, beside)
        read = its.find_reads(graph, called, beside)
        starts = [its.nodes[k] for k in sorted(tables) if its.nodes[k] in graph.parents]
        starts += [node for k in (*beside, *read) for node in its.own(k, graph)]
        region = Region(forward.n, graph, starts, is_constant)
        return Start(its, graph, tables, beside, read, region)

    def _uses(self, forward: Any) -> Uses:
        return Uses(self._layers, self._parameters, self._sites, forward.uses, forward.outputs)

    def plan(
        self, forward: Any, start: Start, found: list[Finding], region: list[Finding], proven: bool
    ) -> LiftPlan | None:
        """Return the plan of the lifted uses of a new structure; None if there are none.
        found, region: findings of the uses and of the region. proven: backwards could run."""
        n, uses, graph, read, beside = forward.n, start.uses, start.graph, start.read, start.beside
        kinds = (str,) if proven else (str, type(None))  # layouts of rows that may mix samples
        tables = (k for k in start.tables if uses.nodes[k] is not None)
        mixing = {k for k in tables if isinstance(found[k].layout, kinds)}
        if mixing != start.tables:
            graph, called = uses.prune_graph(mixing, beside)
            read = uses.find_reads(graph, called, beside)
        if not mixing and not beside and not read:
            return None
        groups = self._climbs(Asking(n, graph), uses, mixing, beside, read)
        layouts = start.region.layouts(region, proven)
        taken = {node for one in forward.taken if one for node in one.nodes}
        layouts.update(dict.fromkeys(taken & layouts.keys()))  # their rows differ in each pass
        layouts.update(dict.fromkeys(start.region.below_samples(layouts)))
        plan = plan_lift(n, graph, groups, layouts, start.region.is_shared)
        return plan if plan.starts else None

    def _climbs(
        self,
        asking: Asking,
        uses: Uses,
        tables: Collection[int],
        beside: Sequence[int],
        read: Sequence[int],
    ) -> list[Climb]:
        """Return the climbs from these uses, see Start."""
        # Sharded parameters, and modules inside a reentrant checkpoint, cannot run again.
        runs_once = self._parameters.gathered() or None in uses.nodes
        groups = [Climb(k, (uses.nodes[k],), lambda node, is_end: True) for k in sorted(tables)]
        for k in beside:
            if own := uses.own(k, asking.graph):
                is_cheap = partial(asking.is_cheap, self._large_weight(asking.n, own))
                only = runs_once or getattr(self._sites[uses.site(k)], "overwrites", False)
                groups.append(Climb(k, own, asking.is_able if only else is_cheap))
        return groups + [Climb(k, uses.own(k, asking.graph), asking.is_able) for k in read]

    def find_by_owner(
        self,
        forward: Any,
        tables: Sequence[int],
        sites: Collection[int] | None,
        shown: Ownership,
        has_rows: Callable[[Node], bool],
    ) -> tuple[list[LiftEnd], Callable[[Mapping[Node, Any]], LiftPlan]]:
        """Return where tables, and parameters that are read beside kernels, enter rows with owners;
        and what makes the plan of these uses of the layouts of the rows. sites: which may be
        lifted; None: all. shown, has_rows: see Entries."""
        uses = self._uses(forward)
        beside = uses.find_beside()
        graph, called = uses.prune_graph(tables, beside)
        reads = uses.find_reads(graph, called, beside)
        asking = Asking(forward.n, graph, lambda _: True)
        groups = [group for group in self._climbs(asking, uses, tables, beside, reads)
                  if sites is None or uses.site(group.use) in sites]  # fmt: skip
        entries = Entries(graph, shown, has_rows, {uses.nodes[k] for k in tables})

        def plan(layouts: Mapping[Node, Any]) -> LiftPlan:
            starts = (node for group in groups for node in group.starts)
            nodes = graph.climb(starts, lambda _, node: node not in layouts)
            known = {node: layouts.get(node) for node in nodes}
            return plan_lift(forward.n, graph, groups, known, entries.is_shared)

        return [(group.use, uses.site(group.use), node, owned) for group in groups
                for node, owned in entries.above(group.starts)], plan  # fmt: skip

    def _large_weight(self, n: int, leaves: Sequence[Node]) -> int:
        """Return the size of the largest kernel if its per-sample gradients are too large to make,
        or are kept for clipping; else 0."""
        kernels = [p for p in (leaf.variable for leaf in leaves) if p.dim() > 2]
        most = max((p.numel() for p in kernels if p.numel() > max(p.shape)), default=0)
        return most if self.recorder.keeps_tape or n * most > GRADIENT_ELEMENTS else 0

    def own(self, forward: Any, k: int) -> tuple[Node, ...]:
        """Return the nodes of a use's parameters, as far as they are in the graph."""
        return self._uses(forward).own(k, forward.graph)

    def match(self, forward: Any, plan: LiftPlan) -> Match:
        """Find a plan's nodes in the graph of a forward.
        If a graph that looks the same was matched before, they have the same numbers; else the
        graph is climbed."""
        run, outputs = forward.run, forward.outputs
        has_outline = NATIVE and not self._parameters.gathered()
        outline: Any = _C.Outline(run, outputs) if has_outline else None
        known = _recall(plan, outline) if has_outline else None
        if known is not None:
            return _place(run.n, known, outline)
        match, path = _climb(run.n, plan, self._uses(forward))
        if path is None:
            return match
        if not has_outline:
            match = match._replace(stations=path.stations)
            return _note_saved(match, lambda: Graph(outputs).parents)
        match = match._replace(trail=Trail.of(path, outline.numbers()))
        placed = _place(run.n, match, outline)
        if match.same and not placed.mute:
            if len(plan.trails) >= MAX_TRAILS:
                plan.trails.clear()
            plan.trails[outline.key] = match._replace(ends=())
        return placed

    def recall(self, run: Pass, plan: Any, outputs: Sequence[Tensor]) -> Match | None:
        """Return a plan's nodes if a graph that looks the same was matched before, else None."""
        known = _recall(plan, outline := _C.Outline(run, outputs))
        match = known and _place(run.n, known, outline)
        return None if match is None or match.mute else match

    def begin(self, run: Pass, match: Match, first: int) -> None:
        """Put hooks on the frontier and below it.
        first: the sequence number of the first node that the forward made."""
        refuse = partial(_refuse, match.lifted)  # not `match`, whose outline owns the graph
        run.enclose(match.uncounted, first)
        if match.counted:
            run.disclose(match.counted, first)
        if match.stations is None or match.mute:
            refuse(run, cause("node_twice", node=match.mute[0]) if match.mute else "otherwise")
            return
        if match.lifted is not self._noted:
            self._noted = match.lifted
            for layer in map(self._layers.__getitem__, match.lifted):
                costs = map(match.costs.get, layer.parameters)
                layer.notes["lifted"] = next(filter(None, costs), None)
        descent = Descent(run, match, self, self._parameters, partial(refuse, self.recorder))
        if match.trail is not None:
            match.outline.guard(run, match.trail.native, match.lifted)
            if run.n:
                descent.serve(match.outline, match.trail)

    def hears(self, leaf: Leaf) -> bool:
        """Return True if the leaf's gradient will be compared with what is recorded.
        If its edges are counted, that is so only while its structure is new."""
        return self.recorder.auditing or (not leaf.edges and self._hears_place(leaf.place))


class Asking:
    """Decides which nodes are asked for their products, instead of running a module again."""

    def __init__(
        self, n: int, graph: Graph, has_form: Callable[[Node], bool] = products.in_closed_form
    ) -> None:
        """has_form: whether the product of a node on the frontier has a closed form."""
        self.n, self.graph, self._has_form = n, graph, has_form
        self._are_offloaded = cache(partial(are_offloaded, graph.parents))

    def is_able(self, node: Node, is_end: bool) -> bool:
        """Return True if a node can be asked. is_end: it is on the frontier."""
        can_answer = can_ask(node)[0] and not products.scales_by_count(node)
        return can_answer and (not is_copy_slices(node) or self._are_offloaded())

    def is_cheap(self, large: int, node: Node, is_end: bool) -> bool:
        """Return True if asking a node costs less than running its module again.
        large: from Lift._large_weight."""
        if is_end:
            is_cheap = self._has_form(node) or (self.n == 1 and not is_users(node))
            return is_cheap and self.is_able(node, is_end)
        edges = [(node, 0), *(edge for edge in node.next_functions if edge[0])]
        is_small = not large or max(prod(shape_of(*edge)) for edge in edges) < large
        return (is_small or products.keeps_rows(node)) and self.is_able(node, is_end)


def _climb(n: int, plan: LiftPlan, uses: Uses) -> tuple[Match, Path | None]:
    """Find a plan's nodes by climbing the graph of this pass; no path if the graph differs."""
    read = {-1 - k for k, _ in plan.starts if k < 0}
    beside = {k for k, own in plan.starts if own and k >= 0}
    mixing = {k for k, own in plan.starts if not own}
    shared = {place for k in beside for place in uses.places(k)}
    graph, called = uses.prune_graph(mixing, beside, {*read, *shared})
    lifted = sorted({uses.site(k) for k, _ in plan.starts})
    starts: list[Node] = []
    for k, own in plan.starts:
        starts += uses.own(k, graph) if own else [uses.nodes[k]]
    climbed = plan.climb(graph, starts)
    if climbed is None:
        return Match(lifted, sorted(read - called), None), None
    path = find_path(graph, plan, climbed, uses.leaves(plan, called).get)
    same, shapes, ends = plan.fits(graph, climbed, n)
    leaves = [leaf for station in path.stations.values() for leaf in station.leaves.values()]
    counted = {leaf.place for leaf in leaves if leaf.edges}
    uncounted = sorted(read - called - counted)
    made = [s for v, s in path.stations.items() if s.layout is None and products.makes_in_full(v)]
    costs = {leaf.place: IN_FULL for s in made for leaf in s.leaves.values()}
    below = reach(filter(is_users, path.stations), lambda _, v: [e for k in path.stations[v].inward
                  if (e := v.next_functions[k])[0] in path.stations])  # fmt: skip
    costs |= {leaf.place: EACH for v in below for leaf in path.stations[v].leaves.values()}
    met: Counter[int] = Counter()
    expected = []
    for leaf in leaves:
        if not leaf.is_alone:
            met[leaf.place] += 1
            expected += [leaf.place] * (met[leaf.place] > leaf.calls)
    facts = same, ends, shapes, leaves, sorted(counted), expected, costs
    return Match(lifted, uncounted, {}, *facts), path


def _refuse(sites: Sequence[int], where: Any, why: str) -> None:
    for site in sites:
        where.refuse(site, why)


def _recall(plan: LiftPlan, outline: Any) -> Match | None:
    """Return the match of a plan in an earlier graph that looks the same."""
    trails = list(plan.trails.items())  # other threads may add some meanwhile
    match = next((match for look, match in trails if outline.looks(look)), None)
    if match is None or not all(map(is_passthrough, outline.nodes(match.trail.links))):
        return None
    return match


def _place(n: int, match: Match, outline: Any) -> Match:
    """Find the nodes of a trail in this graph, of stations that the extension does not serve."""
    trail: Any = match.trail
    served = outline.served(trail.native) if n else []
    match = match._replace(outline=outline)
    if len(served) == len(trail.nodes):
        return match
    rest = [k for k in range(len(trail.nodes)) if k not in served]
    nodes = outline.nodes([trail.nodes[k] for k in rest])
    by_node = dict(zip(nodes, (trail.stations[k] for k in rest), strict=True))
    return _note_saved(match._replace(stations=by_node), outline.numbers)


def _note_saved(match: Match, all_nodes: Callable[[], Iterable[Node]]) -> Match:
    """Note which nodes cannot be asked, and which saved through hooks."""
    by_node = match.stations or {}
    can_open = not any(map(is_copy_slices, by_node)) or are_offloaded(all_nodes())
    asked = {node: can_ask(node) for node in by_node}
    mute = tuple(node.name() for node, (answers, _) in asked.items()
                 if not answers or (is_copy_slices(node) and not can_open))  # fmt: skip
    hooked = frozenset(by_node[node].key for node, (_, is_hooked) in asked.items() if is_hooked)
    return match._replace(mute=mute, hooked_keys=hooked)
