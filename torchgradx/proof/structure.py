"""Examines the first forward of a structure: where the samples are in each use, what is refused.

Weighted backwards (graph/layout.py) show the layouts. Where these cannot run (reentrant
checkpoints, fully_shard, autograd Functions, models that return only their loss), a layout is
accepted only if it is the only one that the sizes allow. A batch of another size takes over the
verdict on the same calls, if its sizes leave no doubt or one backward confirms it.

A `use` is an index into Forward.uses; a `finding` is the answer of the backwards on one output.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, NamedTuple

from ..graph.heads import heads_of
from ..graph.layout import (
    BATCH,
    NOWHERE,
    SEQUENCE,
    SHARED,
    TAKEN,
    Finding,
    Heads,
    Seeding,
    Watched,
    is_python,
    layout_from_sizes,
)
from ..graph.sizes import layout_from_views
from ..refusals import cause
from ..shared.frontier import LiftPlan
from ..shared.lift import Lift
from ..sites.native import NativeSite
from ..sites.several import End, ends_of_node
from ..sites.site import ProbeParts
from .forwards import Forward, Forwards
from .verdict import Verdict, total_version, zeros_of

# Kinds of layers that are not served where samples have any rows. A convolution's rows are images.
UNSERVED = ("batchnorm", "instancenorm", "multiheadattention", "recurrent")


@dataclass
class _Exam:
    """One forward, and what its examination has found so far."""

    forward: Forward
    watched: list[Watched]  # the first output of each use
    ends: list[tuple[int, End]]  # the other outputs, by use
    tables: set[int]  # uses whose inputs are constant
    is_constant: Callable[[Any, int], bool] | None  # of a node's output; None: nothing was watched
    region: Sequence[Watched] = ()  # outputs of nodes at which samples may enter above tables
    contradicts: Callable[[Sequence[Finding]], bool] | None = None  # findings of these
    zeros: set[int] = field(default_factory=set)  # uses that received zeros only
    reached: set[Any] | None = None  # nodes that the proof's backwards run through, if they ran

    @property
    def all_watched(self) -> list[Watched]:
        return [*self.watched, *(end.watched for _, end in self.ends), *self.region]

    @cached_property
    def has_python_nodes(self) -> bool:
        """Return True if a backward in Python may run layers again, whose uses left no node."""
        return any(map(is_python, self.forward.graph.parents))


class _UseVerdict(NamedTuple):
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
        """Examine a forward, and return the verdict on its structure."""
        n, uses, watch = forward.n, forward.uses, forward.trace.watch
        is_constant = None if watch is None else watch.observer.is_constant
        if is_constant is not None:
            forward.trace.memory.note_constants(uses, is_constant)
        known = forward.trace.memory.tables(uses) if n > 1 else ()
        tables = {k for k in known if self._sites[uses[k][0]].declared < 0}
        exam = _Exam(forward, *self._watched(forward), tables, is_constant)
        findings, plan, complete, ambiguous = self._find_layouts(exam)
        judged = [self._judge(exam, k, finding) for k, finding in enumerate(findings)]
        layouts = [one.layout for one in judged]
        refusals = [(site, one.refusal) for (site, *_), one in zip(uses, judged, strict=True)
                    if one.refusal is not None]  # fmt: skip
        if ambiguous and (plan or not {BATCH, SEQUENCE}.isdisjoint(layouts)):
            refusals.append((-1, cause("either", n=n)))
        tensors, zero_weights = self._parameters.tensors(), self.zero_weights(n)
        silent = bool(exam.zeros) or (plan is not None and NOWHERE in plan.layouts)
        dropped = n > 1 and silent and not zero_weights
        return Verdict(
            layouts,
            refusals,
            plan,
            complete and all(one.complete for one in judged),
            routes=self._routes(forward, exam.watched, layouts),
            sure=[one.sure for one in judged],
            zeros_version=total_version(tensors) if zero_weights or dropped else None,
            zero_weights=[place for place in zero_weights if tensors[place].requires_grad],
            has_dropped_branch=dropped,
        )

    def _find_layouts(self, exam: _Exam) -> tuple[list[Finding], LiftPlan | None, bool, bool]:
        """Return (finding of each use, plan to lift tables, complete, ambiguous).

        complete: False if another forward may show more. ambiguous: the samples may be in another
        dimension of the model's outputs as well.
        """
        start = self._lift.start(exam.forward, exam.tables, exam.is_constant)
        exam.region, exam.contradicts = start.region.watched, start.region.contradicts
        proof, ambiguous = self._run_proof(exam)
        findings = proof or [Finding(None)] * len(exam.all_watched)
        found, exam.zeros = self._by_use(exam, findings)
        plan, complete, proven = None, True, proof is not None and not exam.forward.inner
        if proven or exam.is_constant is not None:
            of_region = findings[len(findings) - len(exam.region) :]
            plan = self._lift.plan(exam.forward, start, found, of_region, proven)
        elif start.tables or start.beside or start.read:  # sizes tell no table from activations
            self._forwards.watch_again()
            complete = False
        for k, _ in plan.starts if plan else ():
            if k >= 0:
                found[k] = Finding(SHARED)
        return found, plan, complete, ambiguous

    def _judge(self, exam: _Exam, k: int, finding: Finding) -> _UseVerdict:
        """Return the verdict on a use: as the user declared it, as proven, or as sizes show."""
        n, (index, sizes, node, _) = exam.forward.n, exam.forward.uses[k]
        site, layout = self._sites[index], finding.layout
        if site.declared >= 0 or not self._proves:
            return _UseVerdict(SHARED if layout == SHARED else site.presumed)
        if isinstance(layout, str) or layout is None or (node is None and n != 1):
            return self._judge_unproven(exam, k, layout)
        if layout == BATCH and exam.forward.samples_of(k) is not None:
            layer = self._layers[index]
            if layer.kind.startswith(UNSERVED):
                return _UseVerdict(NOWHERE, True, cause("segments_kind", kind=layer.type_name))
            return _UseVerdict(TAKEN)
        is_fixed = site.fixed and exam.watched[k].samples is None and n > 1
        if is_fixed and layout in {BATCH, SEQUENCE} - {site.presumed}:
            why = cause("batch_first", n=n, shape=list(sizes))
            return _UseVerdict(layout, finding.sure, why)
        return _UseVerdict(layout, finding.sure)

    def _judge_unproven(self, exam: _Exam, k: int, layout: int | str | None) -> _UseVerdict:
        """Return the verdict on a use of which no backward has shown the layout."""
        (site, _, node, _), use = exam.forward.uses[k], exam.watched[k]
        presumed, graph = self._sites[site].presumed, exam.forward.graph
        sized = self._layout_from_sizes(exam.forward, k, use) if use.samples is None else None
        if not self._is_unsure(exam, k, layout, sized):
            return _UseVerdict(presumed if sized is None else sized)
        nodes = graph.parents if exam.reached is None else exam.reached
        detached = bool(exam.forward.outputs) and node is not None and node not in nodes
        zeros = k in exam.zeros
        if detached or (zeros and not isinstance(layout, str)):
            likely = zeros and layout_from_sizes(use.leads, exam.forward.n) == presumed
            return _UseVerdict(presumed if likely else NOWHERE)  # which refuses any gradient
        return self._refuse(exam, k, layout)

    def _refuse(self, exam: _Exam, k: int, layout: int | str | None) -> _UseVerdict:
        """Refuse a use, because its rows mix samples (layout is a cause) or nothing shows them."""
        n, site = exam.forward.n, exam.forward.uses[k][0]
        if exam.is_constant is None and k not in exam.tables:
            self._forwards.watch_again()  # it may be a table
        if isinstance(layout, str):
            why, complete = layout, True
        else:
            seedable = any(n in t.shape for t in exam.forward.heads)
            why, complete = cause("unproven", n=n, name=self._layers[site].name), not seedable
            reruns = exam.has_python_nodes
            if (reruns or not seedable) and n > 1 and not self._parameters.gathered():
                why = cause(why, more="reentrant" if reruns else "loss")
        why = cause(why, shape=list(exam.watched[k].shape))
        return _UseVerdict(self._sites[site].presumed, True, why, complete)

    def _routes(self, forward: Forward, uses: list[Watched], layouts: list[int]) -> list[Any]:
        """Return the row indices that the batch's values chose. With a None in it, no other pass
        has the same routes: some choices cannot be seen."""
        n = forward.n
        routes, memory = list(forward.routes), forward.trace.memory
        cut = any(
            layout not in (SHARED, TAKEN)
            and memory.is_picked(site)
            and layout_from_sizes(use.leads, n) is None
            for (site, *_), use, layout in zip(forward.uses, uses, layouts, strict=True)
        )
        if n > 1 and (forward.trace.flat or cut or any(0 in use.leads for use in uses)):
            routes.append(None)
        return routes

    def zero_weights(self, n: int) -> list[int]:
        """Return the places of weights (not biases) that are all zeros, which may hide a part of
        the graph. None of sharded parameters."""
        if n == 1 or not self._proves or self._parameters.gathered():
            return []
        biases = {layer.bias for layer in self._layers}
        weights = {place for layer in self._layers for place in layer.parameters} - biases
        return zeros_of(self._parameters.tensors(), sorted(weights))

    def _is_unsure(self, exam: _Exam, k: int, layout: int | str | None, sized: int | None) -> bool:
        """Return True if an unproven use needs a proof. sized: the layout by sizes, or None."""
        n, (index, _, node, _) = exam.forward.n, exam.forward.uses[k]
        site, use = self._sites[index], exam.watched[k]
        reruns = node is not None and self._layers[index].kind == "vmap"
        if n == 1 or (reruns and not self._lift.own(exam.forward, k)):
            return False  # it used none of its parameters: what they receive is compared
        if isinstance(layout, str):
            return True
        if node is None and not exam.has_python_nodes:
            return False  # it left no graph, and nothing runs it again
        if k in exam.tables:
            return True
        if use.samples is not None:
            return exam.forward.samples_of(k) is not None
        if sized is None or (site.fixed and sized != site.presumed):
            return True
        others = (end for j, end in exam.ends if j == k)
        return not site.fixed and not all(end.clear(use, sized, n) for end in others)

    def _layout_from_sizes(self, forward: Forward, k: int, watched: Watched) -> int | None:
        """Return the only layout that sizes allow; None if there are several, or none."""
        n, (site, sizes, *_) = forward.n, forward.uses[k]
        known = self._sites[site].fixed or self._keeps_order(site) or self._layers[site].inside
        # Rows [1, N] may be positions [1, T] with T = N.
        if n > 1 and (watched.leads[:1] in ([1], (1,)) or (not known and list(sizes).count(n) > 1)):
            return None
        return layout_from_views(forward.graph, watched.node, watched.output_nr, watched.leads, n)

    def _run_proof(self, exam: _Exam) -> tuple[list[Finding] | None, bool]:
        """Return (findings of all watched outputs, ambiguous: see above). The findings are None
        where no backward can run."""
        n, memory = exam.forward.n, exam.forward.trace.memory
        if n < 2:
            first = (n == 1 or 0 in use.leads[:1] for use in exam.all_watched)
            return [Finding(BATCH if is_first else SEQUENCE) for is_first in first], False
        if not self._proves or self._parameters.gathered():
            return None, False
        heads, others = self._heads(exam.forward)
        seeding = self._seeding(exam, heads)
        findings, ambiguous = seeding.prove(), False
        unsure = any(one and not one.sure for one in exam.forward.taken)
        if findings is not None and (others or unsure):
            agrees = self._agrees(exam, findings)
            if agrees is None:
                differ = (seeding.differs(other, findings) for other in others)
                ambiguous = unsure or (not self._options["batch_dim"] and any(differ))
            elif not agrees:
                ambiguous = not any(isinstance(one.layout, str) for one in findings)
                # Rows that mix may have a layout that we lack: another dimension needs evidence.
                enough = (True, None) if ambiguous else (True,)
                for other in others:
                    found = self._seeding(exam, other).prove()
                    if found is not None and self._agrees(exam, found) in enough:
                        heads, findings, ambiguous = other, found, False
                        break
        if findings is None:
            return None, ambiguous
        if exam.forward.inner:  # these show what mixes, and rows whose samples are known
            both = zip(findings, exam.all_watched, strict=True)
            return [f if isinstance(f.layout, str) or (use.samples is not None and not unsure) else
                    Finding(None) for f, use in both], False  # fmt: skip
        exam.reached = set(seeding.nodes)
        if not ambiguous:
            for t, dim in heads:
                place = next(k for k, other in enumerate(exam.forward.outputs) if other is t)
                if isinstance(dim, int):
                    memory.dims[place, t.dim()] = dim
        return findings, ambiguous

    def _seeding(self, exam: _Exam, heads: Heads) -> Seeding:
        forward = exam.forward
        return Seeding(heads, exam.all_watched, forward.n, forward.trace.keep_caches)

    def _agrees(self, exam: _Exam, findings: Sequence[Finding]) -> bool | None:
        """Return False if findings mix samples, or put them elsewhere than the model's arguments or
        where parameters have rows; None if no use shows where the arguments have them."""
        uses, memory = exam.forward.uses, exam.forward.trace.memory
        anchors, tables = memory.anchors(uses), memory.tables(uses)
        agreements = []
        if exam.contradicts and exam.contradicts(findings[len(findings) - len(exam.region) :]):
            return False
        for k, one in enumerate(self._by_use(exam, findings)[0]):
            site = uses[k][0]
            mixes = isinstance(one.layout, str) and k not in tables
            if mixes and (self._keeps_order(site) or not exam.watched[k].hides(exam.forward.n)):
                return False
            fixed = self._sites[site].fixed or self._layers[site].inside
            is_anchor = k in anchors and (fixed or self._keeps_order(site))
            if is_anchor and one.sure and one.layout in (BATCH, SEQUENCE):
                expected = {anchors[k], self._sites[site].presumed} if fixed else {anchors[k]}
                agreements.append(expected == {one.layout})
        return all(agreements) if agreements else None

    def _keeps_order(self, site: int) -> bool:
        """Return True if a layer's output has the samples where its input has them."""
        return isinstance(self._sites[site], NativeSite) or self._layers[site].ruled

    def transfer(self, verdict: Verdict, forward: Forward) -> Verdict | None:
        """Return a verdict on the same calls for a batch of another size; None if in doubt."""
        n = forward.n
        if verdict.refusals or verdict.zeros_version is not None or n == 1:
            return None
        watched, ends = self._watched(forward)
        # Packed rows are no matter: each graph shows whose they are.
        if any(e.watched.samples is None for _, e in ends) or not forward.takes(verdict.layouts):
            return None
        fits = self._sizes_fit(verdict, watched, forward)
        routes = self._routes(forward, watched, verdict.layouts)
        by_row = all(isinstance(route, str) for route in routes)
        if fits is False or not by_row or routes != verdict.routes:
            return None
        moved, layouts = replace(verdict), list(verdict.layouts)
        if verdict.plan is not None:
            match = self._lift.match(forward, verdict.plan)
            if match.stations is None:
                return None
            if not match.same:
                if any(layout not in (BATCH, SEQUENCE) for _, layout in match.ends):
                    return None
                fits = None
                moved.plan = replace(verdict.plan, n=n, shapes=match.shapes, trails={})
                watched += [use for use, _ in match.ends]
                layouts += [layout for _, layout in match.ends]
        return moved if fits or self._confirms(forward, watched, layouts) else None

    def _sizes_fit(self, verdict: Verdict, watched: list[Watched], forward: Forward) -> bool | None:
        """Return True if sizes alone show a verdict's layouts, False if they contradict them; None
        if they leave a doubt that the verdict did not have."""
        doubtful = False
        for use, layout, sure in zip(watched, verdict.layouts, verdict.sure, strict=True):
            if layout in (SHARED, NOWHERE) or use.node is None or use.samples is not None:
                continue
            sized = layout_from_views(forward.graph, use.node, use.output_nr, use.leads, forward.n)
            if sized != layout and (sized is not None or not sure):
                return False
            doubtful = doubtful or sized is None
        return None if doubtful else True

    def _confirms(self, forward: Forward, watched: list[Watched], layouts: list[int]) -> bool:
        """Return True if one backward shows these layouts."""
        heads, others = self._heads(forward)
        if others or self._parameters.gathered() or not self._proves:
            return False
        by_owners = {SHARED: None, NOWHERE: None, TAKEN: BATCH}  # see Seeding: samples are BATCH
        expected = [by_owners.get(layout, layout) for layout in layouts]
        return Seeding(heads, watched, forward.n, forward.trace.keep_caches).confirms(expected)

    def _heads(self, forward: Forward) -> tuple[Heads, Sequence[Heads]]:
        dims = {} if forward.inner else forward.trace.memory.dims
        return heads_of(forward.heads, forward.taken, forward.n, dims, self._options["batch_dim"])

    def _watched(self, forward: Forward) -> tuple[list[Watched], list[tuple[int, End]]]:
        """Return the first output of each use, and the other outputs as (use, end)."""
        n, graph, several = forward.n, forward.graph, forward.trace.ends
        watched: list[Watched] = []
        ends: list[tuple[int, End]] = []
        for k, (index, sizes, node, number) in enumerate(forward.uses):
            site = self._sites[index]
            leads, is_native = sizes[: site.leads(len(sizes))], isinstance(site, NativeSite)
            declared = site.declared >= 0
            others = several.get((index, node), ()) if node is not None else ()
            first = (e for e in others if e.watched.node is node and e.watched.output_nr == number)
            packed = next((end.watched.samples for end in first), forward.samples_of(k))
            watched.append(Watched(None if declared else node, number, leads, is_native, packed))
            if self._layers[index].inside and node is not None and not declared and n > 1:
                ends += [(k, end) for end in ends_of_node(node, graph, forward.outputs, leads, n)]
            elif not declared:
                ends += [(k, end) for end in others]
        return watched, ends

    def _by_use(self, exam: _Exam, findings: Sequence[Finding]) -> tuple[list[Finding], set[int]]:
        """Return one finding for each use, from all its outputs; and uses that received zeros."""
        uses, n = exam.forward.uses, exam.forward.n
        of_use = [*range(len(uses)), *(k for k, _ in exam.ends)]
        shown = findings[: len(of_use)]
        zeros = {k for k, one in zip(of_use, shown, strict=True) if one.layout == NOWHERE}
        shown = [replace(one, layout=None) if one.layout == NOWHERE else one for one in shown]
        found = shown[: len(uses)]
        for (k, end), one in zip(exam.ends, shown[len(uses) :], strict=True):
            before, presumed = found[k], self._sites[uses[k][0]].presumed
            layout = end.joined(before.layout, one.layout, presumed, n)
            sure = one.sure if before.layout is None else before.sure
            found[k] = Finding(layout, sure)
        return found, zeros
