"""The verdict on a structure: where the samples are in each use of a layer, and what is refused.

The first forward of a structure is examined by weighted backwards (layout.py). Where these cannot
run (reentrant checkpoints, fully_shard, Functions of the user's, models that return only their
loss), sizes must leave no doubt. A batch of another size is held to what was proven of the same
calls: for nothing where its sizes leave no doubt, else by one backward.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from ..refusals import cause
from ..shared.frontier import from_views
from ..shared.lift import Lift
from ..sites.native import NativeSite
from .forwards import Forward, Forwards
from .layout import (
    BATCH,
    NOWHERE,
    SEQUENCE,
    SHARED,
    Finding,
    Seeding,
    Watched,
    from_sizes,
    heads_of,
    is_python,
)
from .routes import routes
from .several import End, ends_of_node
from .verdict import Attached, Verdict, versions


class Examiner:
    """Examines the structures that one probe meets."""

    def __init__(self, shared: Attached, forwards: Forwards, lift: Lift) -> None:
        _, self._parameters, self._layers, self._options, self._sites, _ = shared
        self._forwards, self._lift = forwards, lift
        self._proves = shared.options["check"] != "off"

    def verdict(self, forward: Forward) -> Verdict:
        """Return what a forward shows of its structure."""
        n, uses, outputs, graph = forward.n, forward.uses, forward.outputs, forward.graph
        sites, memory, watch = self._sites, self._forwards.memory, forward.looked.watch
        watched, ends = self._watched(forward)
        constant = None if watch is None else watch.seen.is_constant
        if constant is not None:
            memory.see(uses, constant)
        tables = memory.tables(uses) if n > 1 else set()
        tables = {k for k in tables if sites[uses[k][0]].declared < 0}
        start = self._lift.start(n, uses, sites, outputs, tables, constant)
        region = start.region.watched
        every = [*watched, *(end.watched for _, end in ends), *region]
        findings, doubt = self._findings(forward, every, ends)
        proven = findings is not None
        findings = findings or [Finding(None)] * len(every)
        of_region = findings[len(findings) - len(region) :]
        found, zeros = self._joined(forward, findings, ends)
        plan, complete = None, True
        if proven or constant is not None:
            plan = self._lift.plan(n, start, found, of_region, proven)
        elif start.tables or start.beside or start.read:  # sizes tell no table from activations
            memory.watches, complete = max(memory.watches, 1), False
        for k, _ in plan.starts if plan else ():
            if k >= 0:
                found[k] = Finding(SHARED)
        layouts, refusals, sure = [], [], []
        again = any(map(is_python, graph.parents))  # may run what has left no node
        seeded = any(n in t.shape for t in outputs)
        for k, ((site, sizes, node, _), use, finding) in enumerate(
            zip(uses, watched, found, strict=True)
        ):
            presumed, layout = sites[site].presumed, finding.layout
            trusted = sites[site].declared >= 0 or not self._proves
            says = sites[site].fixed and use.samples is None and n > 1 and node is not None
            if says and layout in {BATCH, SEQUENCE} - {presumed}:
                refusals.append((site, cause("batch_first", n=n, shape=list(sizes))))
            if isinstance(layout, int) and (node is not None or n == 1) and not trusted:
                layouts.append(layout)
                sure.append(finding.sure)
                continue
            apart = bool(outputs) and node is not None and node not in graph.parents
            asked = not trusted and use.samples is None and layout != SHARED
            sized = self._from_sizes(forward, k, use) if asked else None
            beside = [end for j, end in ends if j == k]
            if trusted or not self._doubts(
                forward, k, use, layout, again, k in tables, beside, sized
            ):
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
                why = layout if isinstance(layout, str) else cause("unproven", n=n, name=name)
                helps = not isinstance(layout, str) and n > 1 and not self._parameters.gathered()
                if helps and (again or not seeded):
                    why = cause(why, more="reentrant" if again else "loss")
                refusals.append((site, cause(why, shape=list(sizes))))
                if constant is None and k not in tables:
                    memory.watches = max(memory.watches, 1)  # it may be a table's
            sure.append(True)
        if doubt and (plan or any(v in (BATCH, SEQUENCE) for v in layouts)):
            refusals.append((-1, cause("either", n=n)))
        chosen = self._chosen(forward, watched)
        called = [site for site, *_ in uses]
        reach = self.reach(forward)
        # Zeros come of weights that are zeros, or of a branch that this batch dropped.
        blind, has_zeros = n > 1 and bool(zeros), self.has_zeros(n)
        now = versions(self._parameters.tensors()) if blind or has_zeros else None
        blind = blind and not has_zeros
        return Verdict(layouts, refusals, plan, complete, called, chosen, reach, sure, now, blind)

    def _chosen(self, forward: Forward, watched: Sequence[Watched]) -> list[Any]:
        """Return what the batch's own values chose; None in it: of rows to come nothing shows."""
        n = forward.n
        chosen = routes(forward.outputs, n, forward.looked.by_row)
        cut = self._forwards.memory.picks and any(from_sizes(u.leads, n) is None for u in watched)
        if n > 1 and (forward.looked.flat or cut or any(0 in use.leads for use in watched)):
            chosen.append(None)
        return chosen

    def has_zeros(self, n: int) -> bool:
        """Return True if weights (not biases) are all zeros. Asks nothing of sharded ones."""
        if n == 1 or not self._proves or self._parameters.gathered():
            return False
        biases = {layer.bias for layer in self._layers}
        weights = {place for layer in self._layers for place in layer.parameters} - biases
        tensors = self._parameters.tensors()
        live = [tensors[place].detach().any() for place in weights if tensors[place].numel()]
        flags = [flag.to(live[0].device) for flag in live]
        return bool(flags) and not bool(torch.stack(flags).all())

    def _doubts(
        self,
        forward: Forward,
        k: int,
        use: Watched,
        layout: int | str | None,
        again: bool,
        table: bool,
        beside: Sequence[End],
        sized: int | None,
    ) -> bool:
        """Return whether sizes, which say `sized`, leave a doubt of a use that is not proven."""
        n, (index, _, node, _) = forward.n, forward.uses[k]
        site = self._sites[index]
        if layout == SHARED or n == 1:
            return False
        runs = node is not None and self._layers[index].kind == "vmap"
        if runs and not self._lift.own(k, forward.uses, forward.graph):
            return False  # of its own parameters it used none: what comes to them is compared
        if isinstance(layout, str) or (table and (again or node is not None)):
            return True
        if node is None and not again:
            return False  # it has left no graph, and nothing runs it again
        if use.samples is not None:
            return False
        if sized is None or (site.fixed and sized != site.presumed):
            return True
        return not site.fixed and not all(end.clear(use, sized, n) for end in beside)

    def _from_sizes(self, forward: Forward, k: int, watched: Watched) -> int | None:
        """Return the layout if sizes leave no doubt: those of [1, N] may be positions [1, T]."""
        n, (site, sizes, *_) = forward.n, forward.uses[k]
        known = self._sites[site].fixed or self._in_order(site) or self._layers[site].inside
        if n > 1 and (watched.leads[:1] in ([1], (1,)) or (not known and list(sizes).count(n) > 1)):
            return None
        return from_views(forward.graph, watched.node, watched.output_nr, watched.leads, n)

    def _findings(
        self, forward: Forward, watched: Sequence[Watched], ends: Sequence[tuple[int, End]]
    ) -> tuple[list[Finding] | None, bool]:
        """Return a finding for each output of a node, None where no backward can run; and whether
        the samples may as well be in other dimensions of the model's outputs."""
        n, uses, outputs = forward.n, forward.uses, forward.outputs
        if n < 2:  # of no samples, no rows
            first = (n == 1 or 0 in use.leads[:1] for use in watched)
            return [Finding(BATCH if is_first else SEQUENCE) for is_first in first], False
        if not self._proves or self._parameters.gathered():
            return None, False
        memory = self._forwards.memory
        heads, others = heads_of(outputs, n, memory.dims, self._options["batch_dim"])
        anchors, tables = memory.anchors(uses), memory.tables(uses)

        def wanted(k: int, site: int) -> set[int]:
            """Return where a use must have the samples: as its argument does, as its layer says."""
            fixed = self._sites[site].fixed or self._layers[site].inside
            given = k in anchors and (fixed or self._in_order(site))
            said = {self._sites[site].presumed} if fixed else set()
            return {*said, anchors[k]} if given else said

        wants = [wanted(k, site) for k, (site, *_) in enumerate(uses)]

        def agrees(found: Sequence[Finding]) -> bool | None:
            """Return False where samples are elsewhere or mix, None if nothing shows it."""
            joined, _ = self._joined(forward, found, ends)
            mixes = any(isinstance(f.layout, str) and k not in tables for k, f in enumerate(joined))
            shown = [want == {f.layout} for f, want in zip(joined, wants, strict=True)
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
                memory.dims[place, t.dim()] = dim
        return found, doubt

    def _in_order(self, site: int) -> bool:
        """Return True if a layer is known to have the samples where its input has them."""
        return isinstance(self._sites[site], NativeSite) or self._layers[site].ruled

    def transferred(self, verdict: Verdict, forward: Forward) -> Verdict | None:
        """Return what was proven of the same calls, if it holds for a batch of another size."""
        n, uses, outputs = forward.n, forward.uses, forward.outputs
        if verdict.refusals or verdict.zeros is not None or n == 1 or not verdict.complete:
            return None
        watched, ends = self._watched(forward)
        chosen = self._chosen(forward, watched)
        by_row = all(isinstance(choice, str) for choice in (*chosen, *verdict.routes))
        if not by_row or chosen != verdict.routes:
            return None
        if any(end.watched.samples is None for _, end in ends):  # else this graph shows its rows'
            return None
        doubtful = False
        for k, (use, layout) in enumerate(zip(watched, verdict.layouts, strict=True)):
            if layout in (SHARED, NOWHERE) or use.node is None or use.samples is not None:
                continue
            fits = from_views(forward.graph, use.node, use.output_nr, use.leads, n)
            if fits is not None and fits != layout:
                return None
            if fits is None:
                doubtful = True
                if not verdict.sure[k]:
                    return None
        moved, held = replace(verdict), list(verdict.layouts)
        if verdict.plan is not None:
            met = self._lift.match(forward.run, verdict.plan, uses, self._sites, outputs)
            if met.stations is None:
                return None
            if not met.same:
                if any(layout not in (BATCH, SEQUENCE) for _, layout in met.ends):
                    return None
                doubtful = True
                moved.plan = replace(verdict.plan, n=n, shapes=met.shapes, trails={})
                watched += [use for use, _ in met.ends]
                held += [layout for _, layout in met.ends]
        if not doubtful:
            return moved
        heads, others = heads_of(outputs, n, self._forwards.memory.dims, self._options["batch_dim"])
        if others or self._parameters.gathered() or not self._proves:
            return None
        seeding = Seeding(heads, watched, n, self._forwards.unspent)
        expected = [None if v in (SHARED, NOWHERE) else v for v in held]
        return moved if seeding.confirms(expected) else None

    def reach(self, forward: Forward) -> tuple[bool, ...]:
        """Tell which outputs, of parts with several, come into the model's; empty: all."""
        several = forward.looked.ends
        if not several:
            return ()
        whole = {(t.grad_fn, t.output_nr) for t in forward.outputs}
        ends = [end.watched for site, _, node, _ in forward.uses
                for end in several.get((site, node), ())]  # fmt: skip
        found = tuple(
            (end.node, end.output_nr) in whole or end.output_nr in forward.graph.numbers(end.node)
            for end in ends
        )
        return () if all(found) else found

    def _watched(self, forward: Forward) -> tuple[list[Watched], list[tuple[int, End]]]:
        """Return the first output of each use, and the others, by use."""
        n, graph, several = forward.n, forward.graph, forward.looked.ends
        watched: list[Watched] = []
        ends: list[tuple[int, End]] = []
        for k, (site, sizes, node, number) in enumerate(forward.uses):
            trusted = self._sites[site].declared >= 0
            leads = sizes[: self._sites[site].leads(len(sizes))]
            second = isinstance(self._sites[site], NativeSite)
            others = several.get((site, node), ()) if node is not None else ()
            own = (end.watched for end in others if end.watched.output_nr == number)
            packed = next((end.samples for end in own if end.node is node), None)
            watched.append(Watched(None if trusted else node, number, leads, second, packed))
            if self._layers[site].inside and node is not None and not trusted and n > 1:
                ends += [(k, end) for end in ends_of_node(node, graph, forward.outputs, leads, n)]
            elif not trusted:
                ends += [(k, end) for end in others]
        return watched, ends

    def _joined(
        self, forward: Forward, findings: Sequence[Finding], ends: Sequence[tuple[int, End]]
    ) -> tuple[list[Finding], set[int]]:
        """Return a finding for each use, by all its outputs; and which received zeros only."""
        uses = forward.uses
        found = list(findings[: len(uses)])
        of_ends = findings[len(uses) : len(uses) + len(ends)]
        zeros = {k for k, f in enumerate(found) if f.layout == NOWHERE}
        zeros.update(k for (k, _), f in zip(ends, of_ends, strict=True) if f.layout == NOWHERE)
        found = [replace(f, layout=None) if f.layout == NOWHERE else f for f in found]
        for (k, end), f in zip(ends, of_ends, strict=True):
            layout = None if f.layout == NOWHERE else f.layout
            presumed = self._sites[uses[k][0]].presumed
            joined = end.joined(found[k].layout, layout, presumed, forward.n)
            sure = f.sure if found[k].layout is None else found[k].sure
            found[k] = replace(found[k], layout=joined, sure=sure)
        return found, zeros
