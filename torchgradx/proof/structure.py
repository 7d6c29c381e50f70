"""The verdict on a structure: where the samples are in each use of a layer, and what is refused.

The first forward of a structure is examined by weighted backwards (layout.py). Where these cannot
run (reentrant checkpoints, fully_shard, Functions of the user's, models that return only their
loss), sizes must leave no doubt. A batch of another size is compared with what was proven of the
same calls: for nothing where its sizes leave no doubt, else by one backward.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch

from ..graph.layout import (
    BATCH,
    NOWHERE,
    SEQUENCE,
    SHARED,
    Finding,
    Heads,
    Seeding,
    Watched,
    heads_of,
    is_python,
    layout_from_sizes,
)
from ..graph.routes import routes_of
from ..graph.sizes import layout_from_views
from ..refusals import cause
from ..shared.frontier import LiftPlan
from ..shared.lift import Lift
from ..sites.native import NativeSite
from ..sites.several import End, ends_of_node
from ..sites.site import ProbeParts
from .forwards import Forward, Forwards
from .verdict import Verdict, total_version


@dataclass
class _Exam:
    """One forward while it is examined."""

    forward: Forward
    watched: list[Watched]  # the first output of each use
    ends: list[tuple[int, End]]  # the other outputs, by use
    tables: set[int]  # uses that are given constants alone
    constant: Callable[[Any, int], bool] | None  # of a node's output, where operators were observed
    region: Sequence[Watched] = ()  # where samples enter above tables
    zeros: set[int] = field(default_factory=set)  # uses that received zeros only

    @property
    def every(self) -> list[Watched]:
        return [*self.watched, *(end.watched for _, end in self.ends), *self.region]

    @cached_property
    def reruns(self) -> bool:
        """Return True if a backward in Python may run what has left no node."""
        return any(map(is_python, self.forward.graph.parents))


@dataclass(frozen=True)
class _Judged:
    """The verdict on one use."""

    layout: int
    sure: bool = True  # no other layout has the same rows
    refusal: str | None = None
    complete: bool = True  # False: another forward may show more


class Examiner:
    """Examines the structures of one probe."""

    def __init__(self, shared: ProbeParts, forwards: Forwards, lift: Lift) -> None:
        _, self._parameters, self._layers, self._options, self._sites, _ = shared
        self._forwards, self._lift = forwards, lift
        self._proves = shared.options["check"] != "off"

    def verdict(self, forward: Forward) -> Verdict:
        """Return what a forward shows of its structure."""
        n, uses = forward.n, forward.uses
        exam = self._exam(forward)
        found, plan, complete, ambiguous = self._locate(exam)
        judged = [self._judge(exam, k, finding) for k, finding in enumerate(found)]
        layouts = [one.layout for one in judged]
        refusals = [(site, one.refusal) for (site, *_), one in zip(uses, judged, strict=True)
                    if one.refusal is not None]  # fmt: skip
        if ambiguous and (plan or any(layout in (BATCH, SEQUENCE) for layout in layouts)):
            refusals.append((-1, cause("either", n=n)))
        # Zeros come of weights that are zeros, or of a branch that this batch dropped.
        has_zeros, dropped = self.has_zeros(n), n > 1 and bool(exam.zeros)
        return Verdict(
            layouts,
            refusals,
            plan,
            complete and all(one.complete for one in judged),
            sites=[site for site, *_ in uses],
            routes=self._choices(forward, exam.watched),
            sure=[one.sure for one in judged],
            zeros=total_version(self._parameters.tensors()) if has_zeros or dropped else None,
            blind=dropped and not has_zeros,
        )

    def _exam(self, forward: Forward) -> _Exam:
        uses, memory, watch = forward.uses, self._forwards.memory, forward.trace.watch
        constant = None if watch is None else watch.observer.is_constant
        if constant is not None:
            memory.see(uses, constant)
        tables = memory.tables(uses) if forward.n > 1 else set()
        tables = {k for k in tables if self._sites[uses[k][0]].declared < 0}
        return _Exam(forward, *self._watched(forward), tables, constant)

    def _locate(self, exam: _Exam) -> tuple[list[Finding], LiftPlan | None, bool, bool]:
        """Return a finding for each use, SHARED below tables; the plan of these; whether all of it
        was shown; whether the samples may as well be in other dimensions of the outputs."""
        n, uses, outputs = exam.forward.n, exam.forward.uses, exam.forward.outputs
        start = self._lift.start(n, uses, self._sites, outputs, exam.tables, exam.constant)
        exam.region = start.region.watched
        findings, ambiguous = self._findings(exam)
        proven = findings is not None
        findings = findings or [Finding(None)] * len(exam.every)
        of_region = findings[len(findings) - len(exam.region) :]
        found, exam.zeros = self._join(exam, findings)
        plan, complete = None, True
        if proven or exam.constant is not None:
            plan = self._lift.plan(n, start, found, of_region, proven)
        elif start.tables or start.beside or start.read:  # sizes tell no table from activations
            self._forwards.watch_again()
            complete = False
        for k, _ in plan.starts if plan else ():
            if k >= 0:
                found[k] = Finding(SHARED)
        return found, plan, complete, ambiguous

    def _judge(self, exam: _Exam, k: int, finding: Finding) -> _Judged:
        """Return the verdict on a use: what was said of it, what was proven, or what sizes show."""
        n, (index, sizes, node, _) = exam.forward.n, exam.forward.uses[k]
        site, layout = self._sites[index], finding.layout
        if site.declared >= 0 or not self._proves:
            return _Judged(SHARED if layout == SHARED else site.presumed)
        if isinstance(layout, str) or layout is None or (node is None and n != 1):
            return self._judge_unproven(exam, k, layout)
        says = site.fixed and exam.watched[k].samples is None and n > 1
        if says and layout in {BATCH, SEQUENCE} - {site.presumed}:
            why = cause("batch_first", n=n, shape=list(sizes))
            return _Judged(layout, finding.sure, why)
        return _Judged(layout, finding.sure)

    def _judge_unproven(self, exam: _Exam, k: int, layout: int | str | None) -> _Judged:
        """Return the verdict on a use that no backward has shown."""
        (site, _, node, _), use = exam.forward.uses[k], exam.watched[k]
        presumed, graph = self._sites[site].presumed, exam.forward.graph
        if layout == SHARED:
            return _Judged(SHARED)
        sized = self._from_sizes(exam.forward, k, use) if use.samples is None else None
        if not self._doubts(exam, k, layout, sized):
            return _Judged(presumed if sized is None else sized)
        detached = bool(exam.forward.outputs) and node is not None and node not in graph.parents
        zeros = k in exam.zeros
        if detached or (zeros and not isinstance(layout, str)):
            likely = zeros and layout_from_sizes(use.leads, exam.forward.n) == presumed
            return _Judged(presumed if likely else NOWHERE)  # if a gradient comes, it is refused
        return self._refuse(exam, k, layout)

    def _refuse(self, exam: _Exam, k: int, mixes: int | str | None) -> _Judged:
        """Refuse a use, because its rows mix samples (a cause) or because nothing shows them."""
        n, (site, sizes, _, _) = exam.forward.n, exam.forward.uses[k]
        if exam.constant is None and k not in exam.tables:
            self._forwards.watch_again()  # it may be a table's
        if isinstance(mixes, str):
            why, complete = mixes, True
        else:
            seedable = any(n in t.shape for t in exam.forward.outputs)
            why, complete = cause("unproven", n=n, name=self._layers[site].name), not seedable
            if (exam.reruns or not seedable) and n > 1 and not self._parameters.gathered():
                why = cause(why, more="reentrant" if exam.reruns else "loss")
        why = cause(why, shape=list(sizes))
        return _Judged(self._sites[site].presumed, True, why, complete)

    def _choices(self, forward: Forward, watched: Sequence[Watched]) -> list[Any]:
        """Return what the batch's own values chose; None in it: of rows to come nothing shows."""
        n = forward.n
        chosen = routes_of(forward.outputs, n, forward.trace.by_row)
        cut = self._forwards.memory.picks and any(
            layout_from_sizes(u.leads, n) is None for u in watched
        )
        if n > 1 and (forward.trace.flat or cut or any(0 in use.leads for use in watched)):
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

    def _doubts(self, exam: _Exam, k: int, layout: int | str | None, sized: int | None) -> bool:
        """Return whether sizes, which say `sized`, leave a doubt of a use that is not proven."""
        n, (index, _, node, _) = exam.forward.n, exam.forward.uses[k]
        site, use = self._sites[index], exam.watched[k]
        runs = node is not None and self._layers[index].kind == "vmap"
        if n == 1 or (runs and not self._lift.own(k, exam.forward.uses, exam.forward.graph)):
            return False  # of its own parameters it used none: what comes to them is compared
        if isinstance(layout, str):
            return True
        if node is None and not exam.reruns:
            return False  # it has left no graph, and nothing runs it again
        if k in exam.tables:
            return True
        if use.samples is not None:
            return False
        if sized is None or (site.fixed and sized != site.presumed):
            return True
        beside = (end for j, end in exam.ends if j == k)
        return not site.fixed and not all(end.clear(use, sized, n) for end in beside)

    def _from_sizes(self, forward: Forward, k: int, watched: Watched) -> int | None:
        """Return the layout if sizes leave no doubt: those of [1, N] may be positions [1, T]."""
        n, (site, sizes, *_) = forward.n, forward.uses[k]
        known = self._sites[site].fixed or self._in_order(site) or self._layers[site].inside
        if n > 1 and (watched.leads[:1] in ([1], (1,)) or (not known and list(sizes).count(n) > 1)):
            return None
        return layout_from_views(forward.graph, watched.node, watched.output_nr, watched.leads, n)

    def _findings(self, exam: _Exam) -> tuple[list[Finding] | None, bool]:
        """Return a finding for each output of a node, None where no backward can run; and whether
        the samples may as well be in other dimensions of the model's outputs."""
        n, outputs, memory = exam.forward.n, exam.forward.outputs, self._forwards.memory
        if n < 2:  # of no samples, no rows
            first = (n == 1 or 0 in use.leads[:1] for use in exam.every)
            return [Finding(BATCH if is_first else SEQUENCE) for is_first in first], False
        if not self._proves or self._parameters.gathered():
            return None, False
        heads, others = heads_of(outputs, n, memory.dims, self._options["batch_dim"])
        seeding = self._seeding(exam, heads)
        findings, ambiguous = seeding.prove(), False
        if findings is not None and others:
            agrees = self._agrees(exam, findings)
            if agrees is None:
                ambiguous = any(seeding.differs(other, findings) for other in others)
            elif not agrees:
                heads, findings, ambiguous = self._instead(exam, heads, others, findings)
        if findings is not None and not ambiguous:
            for t, dim in heads:
                place = next(k for k, other in enumerate(outputs) if other is t)
                memory.dims[place, t.dim()] = dim
        return findings, ambiguous

    def _seeding(self, exam: _Exam, heads: Heads) -> Seeding:
        return Seeding(heads, exam.every, exam.forward.n, self._forwards.unspent)

    def _instead(
        self, exam: _Exam, heads: Heads, others: Sequence[Heads], findings: list[Finding]
    ) -> tuple[Heads, list[Finding], bool]:
        """Return the first of other dimensions whose findings agree with the model's arguments."""
        for other in others:
            instead = self._seeding(exam, other).prove()
            if instead is not None and self._agrees(exam, instead) is not False:
                return other, instead, False
        return heads, findings, not any(isinstance(one.layout, str) for one in findings)

    def _agrees(self, exam: _Exam, findings: Sequence[Finding]) -> bool | None:
        """Return False where samples are elsewhere than in the model's arguments, or mix; None if
        nothing shows it."""
        uses, memory = exam.forward.uses, self._forwards.memory
        anchors, tables = memory.anchors(uses), memory.tables(uses)
        shown = []
        for k, one in enumerate(self._join(exam, findings)[0]):
            if isinstance(one.layout, str) and k not in tables:
                return False
            site = uses[k][0]
            fixed = self._sites[site].fixed or self._layers[site].inside
            anchored = k in anchors and (fixed or self._in_order(site))
            if anchored and one.sure and one.layout in (BATCH, SEQUENCE):
                wanted = {anchors[k], self._sites[site].presumed} if fixed else {anchors[k]}
                shown.append(wanted == {one.layout})
        return all(shown) if shown else None

    def _in_order(self, site: int) -> bool:
        """Return True if a layer is known to have the samples where its input has them."""
        return isinstance(self._sites[site], NativeSite) or self._layers[site].ruled

    def transfer(self, verdict: Verdict, forward: Forward) -> Verdict | None:
        """Return what was proven of the same calls, if it holds for a batch of another size."""
        n, uses, outputs = forward.n, forward.uses, forward.outputs
        if verdict.refusals or verdict.zeros is not None or n == 1 or not verdict.complete:
            return None
        watched, ends = self._watched(forward)
        if any(end.watched.samples is None for _, end in ends):  # else this graph shows its rows'
            return None
        fits, chosen = self._sizes_fit(verdict, watched, forward), self._choices(forward, watched)
        by_row = all(isinstance(choice, str) for choice in chosen)
        if fits is False or not by_row or chosen != verdict.routes:
            return None
        moved, layouts = replace(verdict), list(verdict.layouts)
        if verdict.plan is not None:
            met = self._lift.match(forward.run, verdict.plan, uses, self._sites, outputs)
            if met.stations is None:
                return None
            if not met.same:
                if any(layout not in (BATCH, SEQUENCE) for _, layout in met.ends):
                    return None
                fits = None
                moved.plan = replace(verdict.plan, n=n, shapes=met.shapes, trails={})
                watched += [use for use, _ in met.ends]
                layouts += [layout for _, layout in met.ends]
        return moved if fits or self._confirms(forward, watched, layouts) else None

    def _sizes_fit(
        self, verdict: Verdict, watched: Sequence[Watched], forward: Forward
    ) -> bool | None:
        """Return whether sizes alone show the layouts of a verdict; None: they leave a doubt, where
        the verdict has none."""
        doubtful = False
        for use, layout, sure in zip(watched, verdict.layouts, verdict.sure, strict=True):
            if layout in (SHARED, NOWHERE) or use.node is None or use.samples is not None:
                continue
            sized = layout_from_views(forward.graph, use.node, use.output_nr, use.leads, forward.n)
            if sized != layout and (sized is not None or not sure):
                return False
            doubtful = doubtful or sized is None
        return None if doubtful else True

    def _confirms(
        self, forward: Forward, watched: Sequence[Watched], layouts: Sequence[int]
    ) -> bool:
        """Run one backward, which must show these layouts."""
        n, dims = forward.n, self._forwards.memory.dims
        heads, others = heads_of(forward.outputs, n, dims, self._options["batch_dim"])
        if others or self._parameters.gathered() or not self._proves:
            return False
        expected = [None if layout in (SHARED, NOWHERE) else layout for layout in layouts]
        return Seeding(heads, watched, n, self._forwards.unspent).confirms(expected)

    def _watched(self, forward: Forward) -> tuple[list[Watched], list[tuple[int, End]]]:
        """Return the first output of each use, and the others, by use."""
        n, graph, several = forward.n, forward.graph, forward.trace.ends
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

    def _join(self, exam: _Exam, findings: Sequence[Finding]) -> tuple[list[Finding], set[int]]:
        """Return a finding for each use, by all its outputs; and which received zeros only."""
        uses, ends = exam.forward.uses, exam.ends
        found = list(findings[: len(uses)])
        of_ends = findings[len(uses) : len(uses) + len(ends)]
        zeros = {k for k, one in enumerate(found) if one.layout == NOWHERE}
        zeros.update(k for (k, _), one in zip(ends, of_ends, strict=True) if one.layout == NOWHERE)
        found = [replace(one, layout=None) if one.layout == NOWHERE else one for one in found]
        for (k, end), one in zip(ends, of_ends, strict=True):
            layout = None if one.layout == NOWHERE else one.layout
            presumed = self._sites[uses[k][0]].presumed
            joined = end.joined(found[k].layout, layout, presumed, exam.forward.n)
            sure = one.sure if found[k].layout is None else found[k].sure
            found[k] = replace(found[k], layout=joined, sure=sure)
        return found, zeros
