"""Uses whose gradient by sample is taken from above them, where the samples come in.

Of modules called on something without samples (shared.py says what that is), and of parameters
that a module uses beside its children: running such a module again would run all of them.
"""

from __future__ import annotations

import contextlib
import copy
import threading
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from .descent import Descent, Leaf, stations
from .layout import Watched, tensors_in
from .products import in_closed_form
from .recurrent import Site
from .rerun import FallbackSite
from .rules import Layer
from .sample_dims import Place
from .several import End
from .shared import Graph, Group, Node, Plan, survey
from .sites import NativeSite
from .taint import Given, Taint, watching
from .unpacking import answers_twice, saves_through_hooks
from .unproven import followed, presumed, rows_at, shown

__all__ = ["Lift", "Looked"]

Use = tuple[int, Sequence[int], Node, int]  # (site, sizes, node of its output, output of the node)


class _OfThread(threading.local):
    def __init__(self) -> None:
        self.taint: Taint | None = None
        self.caches: list[dict[Any, Any]] = []  # of selective checkpoints
        self.first = 0  # of the graph's nodes that this forward made
        self.shapes: Any = None  # of its arguments, where layouts are followed
        self.ends: dict[Node, list[End]] = {}


class Looked(NamedTuple):
    """What a forward showed while it ran."""

    taint: Taint | None
    ends: dict[Node, list[End]]  # of modules with several outputs, by the first's node
    way: Any = None  # how many nodes of the graph it made, and the shapes of its arguments


class Lift:
    """What one probe knows of them; `plans` outlives it."""

    def __init__(
        self,
        recorder: Any,
        parameters: Any,
        layers: Sequence[Layer],
        plans: dict[Any, Any],
        hears: Callable[[int], bool],
        norms_only: bool,
    ) -> None:
        self._recorder, self._parameters, self._layers = recorder, parameters, layers
        # By the modules' regime and the sites concerned. What no sample's value enters is a matter
        # of the model's code: seen once, it holds for batches of other sizes.
        self._plans, self._hears, self._norms_only = plans, hears, norms_only
        self._local = _OfThread()

    def watch(self, n: int, model: nn.Module, arguments: Any, batch_dim: int) -> None:
        """Before a forward: see what its samples enter, unless that is known."""
        self._local.caches = []
        self._local.first = torch.autograd._get_sequence_nr()
        regime, self._local.shapes = self._parameters.regime(), None
        watches, seen = (regime, ()) not in self._plans, self._plans.get((regime, "shapes"))
        if watches or seen is not None:
            self._local.shapes = tuple(t.shape for t in tensors_in(arguments))
        if n > 1 and (watches or (seen is not None and self._local.shapes not in seen)):
            held = [*model.parameters(), *model.buffers()]
            now = self._parameters.tensors
            self._local.taint = watching(n, held, tensors_in(arguments), batch_dim, now)

    def unwatch(self, whole: bool = True, outputs: Any = None) -> Looked:
        """At the end of a forward (whole), or of a call of the model by itself."""
        local = self._local
        way = torch.autograd._get_sequence_nr() - local.first, local.shapes
        if not whole:
            return Looked(None, local.ends, way)
        found = Looked(local.taint, local.ends, way)
        local.taint, local.ends = None, {}
        if found.taint is not None:
            found.taint.stop(tensors_in(outputs))
        return found

    def watched(self, taint: Taint, uses: Sequence[Use], way: Any) -> None:
        """Once is enough, for as long as its modules are in this regime, and are given as much: a
        layer may be called on all rows, and on those that a mask picks where there is any."""
        regime = self._parameters.regime()
        self._plans[regime, ()] = taint.ends
        self._plans[regime, "orderly"] = taint.orderly
        self._plans.get((regime, "shapes"), set()).add(self._local.shapes)
        given = self._plans.setdefault((regime, "given"), {})
        for site, sizes, *_ in uses:
            if site in taint.given:
                seen = taint.given[site]._replace(orderly=taint.orderly)
                given[site, len(sizes), None] = given[site, len(sizes), way] = seen

    def several(self, first: Tensor, ends: list[End]) -> None:
        """A use has outputs beside its first."""
        if first.grad_fn is not None:
            self._local.ends.setdefault(first.grad_fn, []).extend(ends)

    def met(self, site: int, given: Sequence[Tensor]) -> None:
        """A use of a site, where operations are watched or taken down."""
        if self._local.taint is not None:
            self._local.taint.met(site, given)
        for mode in _get_current_dispatch_mode_stack():
            cache = getattr(mode, "storage", None)
            if isinstance(cache, dict) and all(cache is not known for known in self._local.caches):
                self._local.caches.append(cache)

    @contextlib.contextmanager
    def unspent(self) -> Iterator[None]:
        """A backward inside leaves selective checkpoints theirs: they serve one, and no second."""
        caches = self._local.caches
        before = [{key: copy.copy(kept) for key, kept in cache.items()} for cache in caches]
        try:
            yield
        finally:
            for cache, kept in zip(caches, before, strict=True):
                cache.update(kept)

    def given(self, site: int, sizes: Sequence[int], way: Any) -> Given | None:
        """What such uses of a site were given, in forwards that went one way or any (None); None:
        they were not watched, and the next forward will be."""
        regime = self._parameters.regime()
        given: dict[Any, Given] = self._plans.get((regime, "given"), {})
        known = given.get((site, len(sizes), way))
        if known is None:
            self._plans.pop((regime, ()), None)
        elif way is not None:
            self._trusts()
        return known

    def followed(
        self,
        found: list[int | str | None],
        n: int,
        way: Any,
        uses: Sequence[Use],
        watched: Sequence[Watched],
        graph: Graph,
        taint: Taint | None,
    ) -> list[int | str | None]:
        """The layouts of uses, where no proof could be had as a forward that was watched, and went
        the same way, has shown them."""
        ways = self._plans.setdefault((self._parameters.regime(), "ways"), {})
        if taint is not None:
            orderly = taint.orderly and n > 1
            ways[way] = shown(taint, graph, uses, watched, n) if orderly else {}
        seen = followed(ways.get(way, {}), graph, uses, watched, n)
        if any(s is not None for f, s in zip(found, seen, strict=True) if f is None):
            self._trusts()
        return [s if f is None else f for f, s in zip(found, seen, strict=True)]

    def counts(self, way: Any) -> Any:
        """What of a forward's way a verdict holds for."""
        nodes, shapes = way
        return nodes, shapes if (self._parameters.regime(), "shapes") in self._plans else None

    def _trusts(self) -> None:
        """Layouts were followed: forwards with arguments of other shapes are watched each."""
        shapes = self._plans.setdefault((self._parameters.regime(), "shapes"), set())
        shapes.add(self._local.shapes)

    def places(self, outputs: Sequence[Tensor]) -> list[Place | None]:
        """Where the samples are in the model's outputs, as far as that was seen."""
        ends: list[Place | None] = self._plans.get((self._parameters.regime(), ()), [])
        return ends if len(ends) == len(outputs) else [None] * len(outputs)

    def plan(
        self,
        n: int,
        uses: Sequence[Use],
        sites: Sequence[Site],
        verdicts: Sequence[Any],
        outputs: Sequence[Tensor],
        taint: Taint | None,
        prove: Callable[[Sequence[Watched]], Sequence[Any]],
    ) -> Plan | None:
        """Which uses are lifted, and how; the first time that a structure is met."""
        regime = self._parameters.regime()
        mixing = [k for k, verdict in enumerate(verdicts) if isinstance(verdict, str)]
        orderly = n > 1 and self._plans.get((regime, "orderly"), False)
        given = self._plans.get((regime, "given"), {})
        for k, (site, sizes, node, _) in enumerate(uses):
            known = given.get((site, len(sizes), None)) if verdicts[k] is None else None
            if known and not known.fed and node and orderly:
                mixing.append(k)
        proven = [isinstance(v, int) or (orderly and v is None) for v in verdicts]
        beside = [k for k in self._beside(uses, sites) if proven[k]]
        every = {place for layer in self._layers for place in layer.parameters}
        graph, called = self._graph(every, uses, {*mixing, *beside}, sites, outputs)
        read = self._read(every, uses, graph, called)
        if not mixing and not beside and not read:
            return None

        def able(node: Node, ends: bool) -> bool:
            return answers_twice(node)

        def cheap(node: Node, ends: bool) -> bool:
            """Whether asking a node costs less than to run its module again."""
            return able(node, ends) and (not ends or n == 1 or in_closed_form(node))

        groups = [Group(k, (uses[k][2],), lambda node, ends: True) for k in mixing]
        # What is sharded apart, or checkpointed reentrantly inside, cannot be run again.
        once = self._parameters.gathered() or any(node is None for _, _, node, _ in uses)
        way = able if once else cheap
        groups += [Group(k, self._own(k, uses, graph), way) for k in beside]
        groups += [Group(k, self._own(k, uses, graph), able) for k in read]
        key = regime, tuple(self._served(group.use, uses) for group in groups)
        before = self._plans.get(key)
        clean: Callable[[Node, int], bool]
        rows: Callable[[Node, int], int | None]
        if taint is not None:
            clean, rows = taint.clean, partial(rows_at, taint, n)
        elif before is not None:
            known, served = before  # by place among the groups: uses have other numbers now
            starts = [node for k in served for node in groups[k].starts]
            clean, rows = known.clean(graph, starts), known.frontier(graph, starts)
        else:
            clean, rows = lambda node, number: False, lambda node, number: None
        if orderly:
            prove = partial(presumed, prove, n, rows)
        plan = survey(n, graph, groups, clean, prove)
        lifted = {use for use, _ in plan.starts}
        served = [k for k, group in enumerate(groups) if group.use in lifted]
        if n > 1 and plan.starts:
            self._plans[key] = plan, served
        if n > 1 and taint is None and not lifted.issuperset((*mixing, *read)):
            self._plans.pop((regime, ()), None)  # watch the next forward
        return plan if plan.starts else None

    def _beside(self, uses: Sequence[Use], sites: Sequence[Site]) -> list[int]:
        """Uses of modules that have parameters and children, and share those with no other."""
        able = {k: isinstance(s, FallbackSite) and s.calls_others for k, s in enumerate(sites)}
        others = {place for site, *_ in uses if not able[site]
                  for place in self._layers[site].parameters}  # fmt: skip
        return [k for k, (site, _, node, _) in enumerate(uses)
                if able[site] and node is not None
                and others.isdisjoint(self._layers[site].parameters)]  # fmt: skip

    def _graph(
        self,
        places: set[int],
        uses: Sequence[Use],
        lifted: set[int],
        sites: Sequence[Site],
        outputs: Sequence[Tensor],
    ) -> tuple[Graph, set[int]]:
        """Without the edges by which modules use their own parameters, of those at `places` that
        kernels see; and the places of these."""
        graph, seen, others = Graph(outputs), dict[int, set[Node]](), set[int]()
        if not places:
            return graph, set()
        for k, (site, _, node, _) in enumerate(uses):
            layer = self._layers[site]
            plain = isinstance(sites[site], NativeSite) and not layer.role
            plain = plain and node in graph.parents and k not in lifted
            for place in layer.parameters:
                if plain:
                    seen.setdefault(place, set()).add(node)
                else:
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
        self, every: set[int], uses: Sequence[Use], graph: Graph, called: set[int]
    ) -> list[int]:
        """Parameters that the forward reads beside the calls of their modules, as -1 - place."""
        used = {place for site, *_ in uses for place in self._layers[site].parameters}
        read = [-1 - place for place in sorted(every - used | called)]
        return [k for k in read if self._own(k, uses, graph)]

    def _served(self, k: int, uses: Sequence[Use]) -> tuple[int, tuple[int, ...]]:
        """The site of a start of a plan, and the parameters."""
        if k >= 0:
            return uses[k][0], self._layers[uses[k][0]].parameters
        owns = (-1 - k in layer.parameters for layer in self._layers)
        return list(owns).index(True), (-1 - k,)

    def _own(self, k: int, uses: Sequence[Use], graph: Graph) -> tuple[Node, ...]:
        every = self._parameters.wholes()
        tensors = [every[place] for place in self._served(k, uses)[1]]
        nodes = [get_gradient_edge(p).node for p in tensors if p.requires_grad]
        return tuple(node for node in nodes if node in graph.parents)

    def begin(
        self,
        run: Any,
        plan: Plan,
        uses: Sequence[Use],
        sites: Sequence[Site],
        outputs: Sequence[Tensor],
    ) -> None:
        """Listen at the frontier, and below it, in the graph of this pass."""
        lifted = {self._served(k, uses)[0] for k, _ in plan.starts}

        def refuse(where: Any, reason: str) -> None:
            for site in lifted:
                where.refuse(site, reason)

        served = {k for k, _ in plan.starts}
        read = {-1 - k for k in served if k < 0}
        graph, called = self._graph(read, uses, served, sites, outputs)
        starts: list[Node] = []
        for k, own in plan.starts:
            starts += self._own(k, uses, graph) if own else [uses[k][2]]
        run.enclose(sorted(read - called), self._local.first)
        climbed = plan.climb(graph, starts)
        if climbed is None:
            refuse(run, "what no sample enters is consumed otherwise than when it was proven")
            return
        way = stations(graph, plan, climbed, self._leaves(plan, uses, called).get)
        for node, station in way.items():
            if not answers_twice(node):
                refuse(run, f"by sample it needs {node.name()} twice, which saves through hooks")
                return
            station.packed = saves_through_hooks(node)
        for site in lifted:
            self._layers[site].notes["lifted"] = None
        refuse_now = partial(refuse, self._recorder)
        Descent(run, self._recorder, way, self._hears, refuse_now, self._norms_only)

    def _leaves(self, plan: Plan, uses: Sequence[Use], called: set[int]) -> dict[int, Leaf]:
        """The parameters to serve, by their tensors' ids."""
        lifted = {k for k, _ in plan.starts}
        places = [set(self._layers[site].parameters) for site, *_ in uses]
        others = set().union(*(p for k, p in enumerate(places) if k not in lifted))
        tensors = self._parameters.wholes()
        leaves = {}
        for k in lifted:
            for place in self._served(k, uses)[1]:
                leaf = Leaf(place, tensors[place], place not in others, int(place in called))
                leaves[id(tensors[place])] = leaf
        return leaves
