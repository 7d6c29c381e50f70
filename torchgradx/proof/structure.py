"""The verdict on a structure: where the samples are in each use of a layer, and what is refused.

The first forward of a structure is examined by weighted backwards (layout.py). Where these cannot
run (reentrant checkpoints, fully_shard, Functions of the user's, models that return only their
loss), sizes must leave no doubt. A batch of another size is held to what was proven of the same
calls: for nothing where its sizes leave no doubt, else by one backward.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from ..rules import Layer
from ..shared.frontier import Graph, Plan, from_views
from ..shared.lift import Lift
from ..sites.modules import build_of
from ..sites.native import NativeSite
from ..sites.rerun import FallbackSite
from .forwards import Forwards, Looked
from .layout import (
    BATCH,
    NOWHERE,
    SEQUENCE,
    SHARED,
    Finding,
    Seeding,
    Watched,
    from_sizes,
    is_python,
)
from .routes import alike, routes
from .several import End, ends_of_node

if TYPE_CHECKING:
    from ..sites.recurrent import Site
    from ..table import Parameters

__all__ = ["BROADCAST", "OTHERWISE", "OUTSIDE", "Examiner", "Verdict", "from_outside", "known"]

EITHER = (
    "the model's outputs have {n}, the number of samples, in two dimensions or more, and each may "
    'hold them: say batch_dim= or layout={{"*": "batch"}}'
)
BROADCAST = "the first tensor has one row, others more: say batch_size=, or give the samples first"
ELSEWHERE = "the {n} samples are not where its batch_first says: set that, or transpose its input"
UNPROVEN = (
    "no proof could be had of where the {n} samples are in it; say "
    'layout={{"{name}": "batch"}} or "sequence"'
)
REENTRANT = "; use_reentrant=False lets it be proven"
ALONE = "; return the model's outputs beside its loss, and it is proven"
OUTSIDE = (
    "what it computes before samples enter, as from a position table, is followed outside of "
    "graphs: compile it without fullgraph=True"
)
OTHERWISE = "its compiled graph calls other layers than the model does without the compiler"
CHOICES = ("layout", "batch_dim", "backend", "fused", "weight_grad", "check")
_known: weakref.WeakKeyDictionary[nn.Module, tuple[Any, dict[Any, dict[str, dict[Any, Any]]]]] = (
    weakref.WeakKeyDictionary()
)


def known(model: nn.Module, options: Mapping[str, Any]) -> dict[str, dict[Any, Any]]:
    """What was found of a model's structures under such options. It outlives a probe, as scoring
    attaches anew for each batch, for as long as the model is built as it was."""
    build, choices = build_of(model), tuple(repr(options[choice]) for choice in CHOICES)
    if model not in _known or _known[model][0] != build:
        _known[model] = build, {}
    return _known[model][1].setdefault(choices, {})


@dataclass
class Verdict:
    """What holds for a structure."""

    layouts: list[int]  # of each use
    refusals: list[tuple[int, str]]  # (site, why)
    plan: Plan | None  # for the uses of layout SHARED
    complete: bool  # False: another forward must be looked at
    sites: list[int]  # of each use
    routes: list[Any]  # what its batch chose, see routes.py
    reach: tuple[bool, ...] = ()  # which outputs of parts with several it saw; empty: all
    sure: Sequence[bool] = ()  # of each use: no other layout has the same rows
    # Versions of the parameters, where weights are all zeros, as of adapters that are yet to be
    # trained: what is behind them does not show.
    zeros: int | None = None
    blind: bool = False  # some uses received zeros only, as of a branch that was dropped
    looks: int = 1  # at either
    patience: int = 1  # so many passes until the next one

    @property
    def lasting(self) -> bool:
        """Whether passes of this structure need not be looked at."""
        return not (self.plan or self.routes or self.reach or self.zeros is not None)

    def holds(self, tensors: Sequence[Tensor], outputs: Sequence[Tensor], n: int) -> bool:
        """Whether another pass would be shown no more than this was proven by."""
        if self.zeros is not None:
            versions = _versions(tensors)
            self.patience -= self.blind or versions != self.zeros
            if self.patience <= 0:
                return False
            self.zeros = versions
        return not self.routes or alike(self.routes, routes(outputs, n))


def _versions(tensors: Sequence[Tensor]) -> int:
    return sum(p._version for p in tensors)


class Examiner:
    """Of one probe."""

    def __init__(
        self,
        parameters: Parameters,
        layers: Sequence[Layer],
        options: Mapping[str, Any],
        forwards: Forwards,
        lift: Lift,
    ) -> None:
        self._parameters, self._layers, self._options = parameters, layers, options
        self._forwards, self._lift = forwards, lift
        self._proves = options["check"] != "off"

    def verdict(
        self,
        run: Any,
        uses: Sequence[Any],
        outputs: Sequence[Tensor],
        sites: Sequence[Site],
        looked: Looked,
    ) -> Verdict:
        """What a forward shows."""
        n, graph, memory = run.n, Graph(outputs), self._forwards.memory
        watched, ends = self._watched(n, uses, outputs, sites, looked, graph)
        tables = memory.tables(uses) if n > 1 else set()
        constant = None if looked.watch is None else looked.watch.is_constant
        start = self._lift.start(n, uses, sites, outputs, tables, constant)
        region = start.region.watched
        every = [*watched, *(end.watched for _, end in ends), *region]
        findings, doubt = self._findings(n, outputs, every, uses, sites, memory.dims)
        proven = findings is not None
        findings = findings or [Finding(None)] * len(every)
        of_region = findings[len(findings) - len(region) :]
        of_ends = findings[len(uses) : len(uses) + len(ends)]
        found = list(findings[: len(uses)])
        zeros = {k for k, f in enumerate(found) if f.layout == NOWHERE}
        zeros.update(k for (k, _), f in zip(ends, of_ends, strict=True) if f.layout == NOWHERE)
        found = [replace(f, layout=None) if f.layout == NOWHERE else f for f in found]
        for (k, end), f in zip(ends, of_ends, strict=True):
            layout = None if f.layout == NOWHERE else f.layout
            joined = end.joined(found[k].layout, layout, sites[uses[k][0]].presumed, n)
            found[k] = replace(found[k], layout=joined)
        plan = self._lift.plan(n, uses, sites, outputs, start, found, of_region, proven)
        for k, _ in plan.starts if plan else ():
            if k >= 0:
                found[k] = Finding(SHARED)
        layouts, refusals, sure = [], [], []
        complete = True
        again = any(map(is_python, graph.parents))  # may run what has left no node
        seeded = any(n in t.shape for t in outputs)
        for k, ((site, sizes, node, _), use, finding) in enumerate(
            zip(uses, watched, found, strict=True)
        ):
            presumed, layout = sites[site].presumed, finding.layout
            trusted = sites[site].declared >= 0 or not self._proves
            says = sites[site].fixed and use.samples is None and n > 1 and node is not None
            if says and layout in {BATCH, SEQUENCE} - {presumed}:
                refusals.append((site, f"of shape {list(sizes)}, {ELSEWHERE.format(n=n)}"))
            if isinstance(layout, int) and (node is not None or n == 1) and not trusted:
                layouts.append(layout)
                sure.append(finding.sure)
                continue
            apart = bool(outputs) and node is not None and node not in graph.parents
            if trusted or not self._doubts(
                k, uses, use, layout, sites[site], again, k in tables, graph, ends, watched, n
            ):
                asked = not trusted and use.samples is None
                sized = self._from_sizes(use, uses[k], sites[site], graph, n) if asked else None
                said = presumed if sized is None else sized
                layouts.append(SHARED if layout == SHARED else said)
            elif apart or (k in zeros and not isinstance(layout, str)):
                likely = k in zeros and from_sizes(use.leads, n) == presumed
                # NOWHERE, as where it was detached: if a gradient comes, it is refused.
                layouts.append(presumed if likely else NOWHERE)
            else:
                layouts.append(presumed)
                complete = complete and (isinstance(layout, str) or not seeded)
                name = self._layers[site].name
                why = layout if isinstance(layout, str) else UNPROVEN.format(n=n, name=name)
                if not isinstance(layout, str) and n > 1 and not self._parameters.gathered():
                    why += REENTRANT if again else "" if seeded else ALONE
                refusals.append((site, f"of shape {list(sizes)}, {why}"))
                if constant is None and k not in tables:
                    memory.watches = max(memory.watches, 1)  # it may be a table's
            sure.append(True)
        if doubt and (plan or any(v in (BATCH, SEQUENCE) for v in layouts)):
            refusals.append((-1, EITHER.format(n=n)))
        chosen = self._chosen(n, outputs, watched, looked)
        called = [site for site, *_ in uses]
        reach = self.reach(uses, outputs, looked)
        blind = n > 1 and bool(zeros)
        now = _versions(self._parameters.tensors()) if blind or self._has_zeros(n) else None
        return Verdict(layouts, refusals, plan, complete, called, chosen, reach, sure, now, blind)

    def _chosen(
        self, n: int, outputs: Sequence[Tensor], watched: Sequence[Watched], looked: Looked
    ) -> list[Any]:
        """Return what the batch's own values chose; None in it: of rows to come nothing shows."""
        chosen = routes(outputs, n)
        cut = self._forwards.memory.picks and any(from_sizes(u.leads, n) is None for u in watched)
        if n > 1 and (looked.flat or cut or any(0 in use.leads for use in watched)):
            chosen.append(None)
        return chosen

    def _has_zeros(self, n: int) -> bool:
        """Whether weights are all zeros; biases often are, and hide nothing. Nor do they where no
        backward runs, and to look at parts of what fully_shard split would communicate."""
        if n == 1 or not self._proves or self._parameters.gathered():
            return False
        biases = {layer.bias for layer in self._layers}
        weights = {place for layer in self._layers for place in layer.parameters} - biases
        tensors = self._parameters.tensors()
        live = [tensors[place].detach().any() for place in weights if tensors[place].numel()]
        by_device: dict[Any, list[Tensor]] = {}
        for flag in live:
            by_device.setdefault(flag.device, []).append(flag)
        return not all(bool(torch.stack(flags).all()) for flags in by_device.values())

    def _doubts(
        self,
        k: int,
        uses: Sequence[Any],
        use: Watched,
        layout: int | str | None,
        site: Site,
        again: bool,
        table: bool,
        graph: Graph,
        ends: Sequence[tuple[int, End]],
        watched: Sequence[Watched],
        n: int,
    ) -> bool:
        """Of a use of which nothing was proven: whether sizes leave a doubt."""
        index, _, node, _ = uses[k]
        if layout == SHARED or n == 1:
            return False
        runs = node is not None and self._layers[index].kind == "vmap"
        if runs and not self._lift.own(k, uses, graph):
            return False  # of its own parameters it used none: what comes to them is compared
        if isinstance(layout, str) or (table and (again or node is not None)):
            return True
        if node is None and not again:
            return False  # it has left no graph, and nothing runs it again
        if use.samples is not None:
            return False
        beside = [end for j, end in ends if j == k]
        sized = self._from_sizes(use, uses[k], site, graph, n)
        if sized is None or (site.fixed and sized != site.presumed):
            return True
        return not site.fixed and not all(end.clear(use, sized, n) for end in beside)

    def _from_sizes(
        self, watched: Watched, use: Any, site: Site, graph: Graph, n: int
    ) -> int | None:
        """Where sizes leave no doubt. Those of [1, N] may be positions [1, T]; and of a module of
        the user's the last dimensions may be any."""
        own = isinstance(site, FallbackSite) and site.by_nodes and not site.fixed
        if n > 1 and (watched.leads[:1] in ([1], (1,)) or (own and [*use[1]].count(n) > 1)):
            return None
        return from_views(graph, watched.node, watched.output_nr, watched.leads, n)

    def _findings(
        self,
        n: int,
        outputs: Sequence[Tensor],
        watched: Sequence[Watched],
        uses: Sequence[Any],
        sites: Sequence[Site],
        dims: dict[tuple[int, int], int],
    ) -> tuple[list[Finding] | None, bool]:
        """Of each output of a node, None where no backward can run; and whether the samples may as
        well be in other dimensions of the model's outputs."""
        if n == 1:
            return [Finding(BATCH)] * len(watched), False
        if not self._proves or self._parameters.gathered():
            return None, False
        heads, others = self._heads(outputs, n, dims)
        anchors, tables = self._forwards.memory.anchors(uses), self._forwards.memory.tables(uses)

        def wanted(k: int, site: int) -> set[int]:
            """Where a use must have the samples: as its argument does, as its layer says."""
            fixed = sites[site].fixed
            given = k in anchors and (fixed or self._in_order(sites[site], site))
            said = {sites[site].presumed} if fixed else set()
            return {*said, self._expected} if given else said

        wants = [wanted(k, site) for k, (site, *_) in enumerate(uses)]

        def agrees(found: Sequence[Finding]) -> bool | None:
            """Whether these uses have the samples there; None: there is none that shows it. False
            where rows mix, too."""
            mixes = any(isinstance(f.layout, str) and k not in tables
                        for k, f in enumerate(found[: len(uses)]))  # fmt: skip
            shown = [want == {f.layout} for f, want in zip(found, wants, strict=False)
                     if want and f.sure and f.layout in (BATCH, SEQUENCE)]  # fmt: skip
            if mixes or not all(shown):
                return False
            return True if shown else None

        seeding = Seeding(heads, watched, n, self._forwards.unspent)
        found = seeding.prove()
        if found is None:
            return None, False
        doubt = False
        if others:
            fits = agrees(found)
            if fits is None:
                doubt = any(seeding.differs(other, found) for other in others)
            for other in others if fits is False else ():
                instead = Seeding(other, watched, n, self._forwards.unspent).prove()
                if instead is not None and agrees(instead) is not False:
                    heads, found, fits = other, instead, True
                    break
            mixes = any(isinstance(f.layout, str) for f in found)
            doubt = doubt or (fits is False and not mixes)
        if not doubt:
            for t, dim in heads:
                place = next(k for k, other in enumerate(outputs) if other is t)
                dims[place, t.dim()] = dim
        return found, doubt

    @property
    def _expected(self) -> int:
        """Where the model's arguments have the samples."""
        return SEQUENCE if self._options["batch_dim"] else BATCH

    def _in_order(self, site: Site, index: int) -> bool:
        """Whether a layer has the samples where its input has them, as nobody knows of others."""
        return isinstance(site, NativeSite) or self._layers[index].ruled

    def _heads(
        self, outputs: Sequence[Tensor], n: int, dims: dict[tuple[int, int], int]
    ) -> tuple[list[tuple[Tensor, int]], list[list[tuple[Tensor, int]]]]:
        """Outputs with the dimension that holds the samples; and, if nothing tells it from others
        of the same size, the same with those."""
        heads, rests = [], []
        batch_dim = self._options["batch_dim"]
        for k, t in enumerate(outputs):
            fits = [d for d, size in enumerate(t.shape) if size == n]
            if not fits or not t.requires_grad or not t.is_floating_point():
                continue
            remembered = dims.get((k, t.dim()))
            first = batch_dim if batch_dim in fits else fits[0]
            if remembered in fits:
                first, fits = remembered, [remembered]
            heads.append((t, first))
            rests.append([d for d in fits if d != first])
        others = [
            [(t, rest[min(j, len(rest) - 1)] if rest else first)
             for (t, first), rest in zip(heads, rests, strict=True)]
            for j in range(max(map(len, rests), default=0))
        ]  # fmt: skip
        return heads, others

    def transferred(
        self,
        verdict: Verdict,
        run: Any,
        uses: Sequence[Any],
        outputs: Sequence[Tensor],
        sites: Sequence[Site],
        looked: Looked,
    ) -> Verdict | None:
        """For a batch of another size: what was proven of the same calls, if it holds."""
        n, graph = run.n, Graph(outputs)
        if verdict.refusals or verdict.routes or verdict.zeros is not None or n == 1:
            return None
        watched, ends = self._watched(n, uses, outputs, sites, looked, graph)
        if ends or not verdict.complete or self._chosen(n, outputs, watched, looked):
            return None
        doubtful = False
        for k, (use, layout) in enumerate(zip(watched, verdict.layouts, strict=True)):
            if layout in (SHARED, NOWHERE) or use.node is None or use.samples is not None:
                continue
            fits = from_views(graph, use.node, use.output_nr, use.leads, n)
            if fits is not None and fits != layout:
                return None
            if fits is None:
                doubtful = True
                if not verdict.sure[k]:
                    return None
        moved, held = replace(verdict), list(verdict.layouts)
        if verdict.plan is not None:
            met = self._lift.meet(n, verdict.plan, uses, sites, outputs)
            if met.way is None:
                return None
            if not met.same:
                if any(layout not in (BATCH, SEQUENCE) for _, layout in met.ends):
                    return None
                doubtful, moved.plan = True, replace(verdict.plan, looks=met.looks)
                watched += [use for use, _ in met.ends]
                held += [layout for _, layout in met.ends]
        if not doubtful:
            return moved
        heads, others = self._heads(outputs, n, self._forwards.memory.dims)
        if others or self._parameters.gathered() or not self._proves:
            return None
        seeding = Seeding(heads, watched, n, self._forwards.unspent)
        expected = [None if v in (SHARED, NOWHERE) else v for v in held]
        return moved if seeding.confirms(expected) else None

    def reach(
        self, uses: Sequence[Any], outputs: Sequence[Tensor], looked: Looked
    ) -> tuple[bool, ...]:
        """Which outputs, of parts with several, come into the model's; empty: all."""
        if not looked.ends:
            return ()
        graph, whole = Graph(outputs), {(t.grad_fn, t.output_nr) for t in outputs}
        ends = [end.watched for site, _, node, _ in uses
                for end in looked.ends.get((site, node), ())]  # fmt: skip
        found = tuple(
            (end.node, end.output_nr) in whole or end.output_nr in graph.numbers(end.node)
            for end in ends
        )
        return () if all(found) else found

    def _watched(
        self,
        n: int,
        uses: Sequence[Any],
        outputs: Sequence[Tensor],
        sites: Sequence[Site],
        looked: Looked,
        graph: Graph,
    ) -> tuple[list[Watched], list[tuple[int, End]]]:
        """The first output of each use, and the others, by use."""
        watched: list[Watched] = []
        ends: list[tuple[int, End]] = []
        for k, (site, sizes, node, number) in enumerate(uses):
            trusted = sites[site].declared >= 0
            leads = sizes[: sites[site].leads(len(sizes))]
            second = isinstance(sites[site], NativeSite)
            others = looked.ends.get((site, node), ()) if node is not None else ()
            packed = next((end.watched.samples for end in others), None)
            watched.append(Watched(None if trusted else node, number, leads, second, packed))
            if self._layers[site].inside and node is not None and not trusted and n > 1:
                ends += [(k, end) for end in ends_of_node(node, graph, outputs, leads, n)]
            elif not trusted:
                ends += [(k, end) for end in others]
        return watched, ends


def from_outside(run: Any) -> Verdict:
    """On a pass of compiled graphs: its forwards are done once more, without the compiler."""
    seen: list[tuple[Verdict, list[Any]]] = []
    try:
        for forward in run.outside:
            first = forward()
            seen.append(first if first[0].complete else forward())  # watched in the first
    except Exception as error:  # no reason to end a training step
        return _nothing(f"a call of the model without the compiler failed: {error}")
    sizes = [(site, list(sizes)) for site, sizes, *_ in run.uses()]
    if [use for _, uses in seen for use in uses] != sizes:
        return _nothing(OTHERWISE)
    verdicts = [verdict for verdict, _ in seen]
    return Verdict(
        [how for verdict in verdicts for how in verdict.layouts],
        [refusal for verdict in verdicts for refusal in verdict.refusals],
        next((verdict.plan for verdict in verdicts if verdict.plan), None),
        all(verdict.complete for verdict in verdicts),
        [site for verdict in verdicts for site in verdict.sites],
        [part for verdict in verdicts for part in verdict.routes],
    )


def _nothing(why: str) -> Verdict:
    return Verdict([], [(-1, why)], None, True, [], [])
