"""Passes whose rows hold the samples in no fixed order: `sample_ids`, or rows routed by values.

The owners of some rows are the sample of each row, [rows], N for padding. Each pass reads them off
its graph (graph/owners.py). What that takes on trust is proven by weighted backwards, once for each
path from the model's outputs to a use. Verdicts are by use, not by structure: a loop over the
experts that were hit makes another graph in each step. A segment is the rows of one sample.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from functools import cache
from math import prod
from typing import Any

import torch
from torch import Tensor

from ..graph.functions import COMPILED
from ..graph.layout import BATCH, NOWHERE, SEGMENTS, SHARED, Seeding, Watched, is_python
from ..graph.nodes import Graph, Node, shape_of
from ..graph.owners import MAPPING, Owned, owners_below, set_flags
from ..graph.segments import Inputs, Ownership, own_rows, place_among
from ..refusals import cause, key_of
from ..shared.frontier import LiftPlan
from ..shared.lift import LiftEnd
from ..sites.expert_products import KEEPS_ROWS
from ..sites.site import ProbeParts
from .audit import Audit
from .forwards import Forward
from .structure import UNSERVED
from .verdict import Verdict

ROUTED = ("mixes", "not_found", "unproven")  # refusals that owners may make unnecessary
# Nodes that keep rows where they are and mix none, unless the owners show it (graph/owners.py).
PLAIN = KEEPS_ROWS | {"MeanBackward1", "SumBackward1", "torchgradx::LayerBackward",
                      "torch::autograd::AccumulateGrad"}  # fmt: skip
Refusals = list[tuple[int, str]]  # (site, cause)
Layouts = list[int | str]  # of the uses; a str is a cause
OwnedUses = Sequence[tuple[Any, Owned | None]]  # uses, and the owners of their rows
OwnedHeads = Sequence[tuple[Tensor, Tensor]]  # outputs, and the owners of their rows


class SegmentExaminer:
    """Finds and proves the owners of each use's rows, for one probe."""

    def __init__(self, shared: ProbeParts, audit: Audit) -> None:
        _, self._parameters, self._layers, self._options, self._sites, caches = shared
        self._audit = audit
        # Regimes whose rows go where a batch's values send them.
        self._routed: dict[Any, bool] = caches.setdefault("routed", {})
        self._without_lifts: Any = None  # the structure of the latest pass, if it had none
        # By an output's place and number of dimensions: True if it has one row for each sample.
        self._by_sample: dict[tuple[int, int], bool] = {}

    @property
    def notes(self) -> list[str]:
        """Return lines for explain()."""
        lines = ["rows by sample_ids"] * (self._options["sample_ids"] is not None)
        return lines + ["routed rows: by the indices that they were taken by"] * bool(self._routed)

    def applies(self, ids: Tensor | None) -> bool:
        """Return True if passes have owners: by the user's ids, or as an earlier pass showed."""
        return ids is not None or bool(self._routed and self._parameters.regime() in self._routed)

    def examine(self, forward: Forward, ids: Tensor | None) -> bool:
        """Give a pass the owners of its uses' rows, or refuse it. Return False, and do nothing, if
        it must be examined by structure."""
        if not self.applies(ids):
            return False
        refusals, layouts = self._attempt(forward, ids)
        if ids is None and refusals:
            return False
        forward.run.refusals += refusals
        forward.run.layouts += layouts
        return True

    def rescue(self, forward: Forward) -> None:
        """Find owners for uses that were refused: experts get rows by their values."""
        run, uses, causes = forward.run, forward.uses, forward.run.refusals
        refused = {site for site, why in causes if key_of(why) in ROUTED}
        used = {site for site, *_ in uses}
        declared = self._options["batch_dim"] or self._options["layout"]
        is_joint = len(run.layouts) != len(uses)
        may_route = not (declared or is_joint) and run.n > 1 and bool(refused) and refused <= used
        if not (may_route and self._places_samples(forward)):
            return
        refusals, layouts = self._attempt(forward, None, refused)
        failed = {site for site, _ in refusals}
        if -1 in failed:
            return
        served = refused - failed
        if not failed and {site for site, _ in causes} == refused:
            self._routed[forward.trace.regime] = True
        run.refusals = [(site, why) for site, why in causes if site not in served]
        run.layouts = [new if site in served else old
                       for (site, *_), old, new in zip(uses, run.layouts, layouts, strict=True)
                      ]  # fmt: skip

    def _places_samples(self, forward: Forward) -> bool:
        """Return False if an output has N in several dimensions, and no argument shows which one
        has the samples, or another one than proven: the backwards of all seem to mix."""
        run, anchors = forward.run, forward.trace.memory.anchors(forward.uses)
        if all(list(t.shape).count(run.n) < 2 for t in forward.outputs if t.grad_fn is not None):
            return True
        return bool(anchors) and all(run.layouts[k] == one for k, one in anchors.items())

    def _attempt(
        self, forward: Forward, ids: Tensor | None, sites: Collection[int] | None = None
    ) -> tuple[Refusals, list[int]]:
        """Return the refusals, and each use's layout. sites: of what may be lifted; None: all. An
        error is a refusal of the whole pass."""
        try:
            return self._examine(forward, ids, sites)
        except Exception as error:
            return [(-1, cause("not_examined", error=f"{type(error).__name__}: {error}"))], []

    def _examine(
        self, forward: Forward, ids: Tensor | None, sites: Collection[int] | None
    ) -> tuple[Refusals, list[int]]:
        run, n, uses = forward.run, forward.n, list(forward.uses)
        inputs = Inputs.of(ids, n)
        taken = forward.taken_outputs if ids is None else [None] * len(forward.outputs)
        both = [(t, one) for t, one in zip(forward.outputs, taken, strict=True)
                if t.grad_fn is not None and t.is_floating_point()]  # fmt: skip
        heads = [(t, rows) for k, (t, one) in enumerate(both)
                 if (rows := one.samples if one else self._owners_of_output(k, t, inputs))
                 is not None]  # fmt: skip
        if uses and not heads:
            return [(-1, "segments_outputs")], []
        if (watch := forward.trace.watch) is not None:
            forward.trace.memory.note_constants(uses, watch.observer.is_constant)
        constant, outputs = forward.trace.memory.tables(uses), [t for t, _ in both]
        given = [node for k, (*_, node, _) in enumerate(uses) if k not in constant and node]
        above = cache(lambda: {*Graph(outputs).climb(given, lambda *_: True)})

        def has_rows(node: Node) -> bool:
            return node in above()

        graph, mask, heads = self._walk(inputs, outputs, heads, has_rows)
        joined = (-1, cause("segments_mixed", shape=inputs.grid))
        refusals: Refusals = [joined] * inputs.are_joined_by(mask)
        owned = [self._owners_of(graph, use) for use in uses]
        if ids is None:
            own = own_rows(graph.below, n)
            owned = [one if self._is_shown(forward, own, use, one) else None
                     for use, one in zip(uses, owned, strict=True)]  # fmt: skip
            shown = {edge: one for edge, one in graph.below.items() if own.get(edge, True)}
            graph = graph._replace(below=shown)
        mixed = set_flags(owned)

        def is_mixed(one: Owned | None) -> bool:
            return one is not None and any(id(flag) in mixed for flag in one.flags)

        tables = [k for k in constant if is_mixed(owned[k])]
        lifts, plan_of = self._find_lifts(forward, tables, sites, graph, has_rows)
        mixed |= set_flags(one for *_, one in lifts)
        uses += [(site, shape_of(node, 0), node, 0) for _, site, node, _ in lifts]
        pairs = list(zip(uses, [*owned, *(one for *_, one in lifts)], strict=True))
        pads, names = bool((inputs.owners == n).any()), frozenset(graph.names)
        facts = forward.trace.regime, names, inputs.has_shared_lines, pads, len(inputs.grid)
        keys = [None if one is None or is_mixed(one) else ("segments", facts, site, one.path)
                for (site, *_), one in pairs]  # fmt: skip
        segments, layouts = self._layouts(forward, heads, pairs, is_mixed)
        is_new = any(key is not None and not self._audit.knows(key) for key in keys)
        proven = [True] * len(uses)
        if is_new and (n > 1 or pads) and self._options["check"] != "off":
            proven = self._prove(forward, graph, heads, pairs, layouts)
        run.segments = segments
        plan: LiftPlan | None = None
        if lifts:
            ends = zip(lifts, layouts[len(forward.uses) :], strict=True)
            plan = plan_of({node: one for (_, _, node, _), one in ends if isinstance(one, int)})
            served = {k for k, _ in plan.starts if k >= 0}
            layouts = [SHARED if k in served else one for k, one in enumerate(layouts)]
        # A module that is not lifted runs again, and a table is refused as a use.
        is_needed = [True] * len(forward.uses) + [k < 0 for k, *_ in lifts]
        refusals += [(site, layout)
                     for (site, *_), layout, needed in zip(uses, layouts, is_needed, strict=True)
                     if needed and isinstance(layout, str)]  # fmt: skip
        in_vain = ids is None and any(sites is None or site < 0 for site, _ in refusals)
        if plan and plan.starts and not in_vain:
            self._audit.begin(forward, self._audit.lift.match(forward, plan))
        if n > 1 and is_new and not self._audit.examiner.zero_weights(n):
            pending = {key for key, sure in zip(keys, proven, strict=True) if key and sure}
            self._audit.cache_later(list(pending), None, Verdict([], []), run)
        layouts = layouts[: len(forward.uses)]
        return refusals, [NOWHERE if isinstance(layout, str) else layout for layout in layouts]

    def _find_lifts(
        self, forward: Forward, tables: Sequence[int], sites: Collection[int] | None, *found: Any
    ) -> tuple[list[LiftEnd], Any]:
        """Return what Lift.find_by_owner() returns."""
        key = forward.run.structure, forward.trace.nodes, forward.trace.regime
        if not tables and key == self._without_lifts:
            return [], None
        ends, plan = self._audit.lift.find_by_owner(forward, tables, sites, *found)
        self._without_lifts = None if ends or sites else key
        return ends, plan

    def _walk(
        self,
        inputs: Inputs,
        outputs: Sequence[Tensor],
        heads: list[tuple[Tensor, Tensor]],
        has_rows: Callable[[Node], bool],
    ) -> tuple[Ownership, Tensor | None, list[tuple[Tensor, Tensor]]]:
        """Return the owners below the outputs, the first attention mask, and the heads that count.
        heads: outputs with owners. With a line [T] for each sample, an output [N] that words are
        made of is not one: it may be of N images."""

        def below(heads: list[tuple[Tensor, Tensor]]) -> tuple[Ownership, Tensor | None]:
            ends = {(t.grad_fn, t.output_nr): Owned(rows, hash(len(rows) == inputs.n))
                    for t, rows in heads}  # fmt: skip
            ends.update(inputs.sliced)
            found: Any
            *found, mask = owners_below(outputs, ends, inputs.n, inputs.grid, has_rows)
            return Ownership(inputs, *found), mask

        words = [head for head in heads if len(head[1]) != inputs.n]
        if len(inputs.grid) == 2 and 0 < len(words) < len(heads) and not inputs.has_shared_lines:
            known = below(words)[0].below
            heads = words + [(t, rows) for t, rows in heads if len(rows) == inputs.n
                             and (t.grad_fn, t.output_nr) not in known]  # fmt: skip
        return *below(heads), heads

    def _owners_of_output(self, k: int, t: Tensor, inputs: Inputs) -> Tensor | None:
        """Return the owners of an output's leading rows: the model's input rows or a part of each
        line of them, one row for each line, or for each sample. None if they are neither."""
        grid, n, count = inputs.grid, inputs.n, len(inputs.owners)
        shape, first = list(t.shape), t.shape[0] if t.dim() else 0
        by_row = first == count or (t.dim() >= len(grid) and shape[: len(grid)] == grid)
        is_whole = by_row or (first == n and not inputs.has_shared_lines)
        part = None if is_whole else inputs.owners_of_part(t)
        if part is not None or (first != n and not by_row):
            return part
        each, rows = torch.arange(n, device=t.device), inputs.owners.to(t.device)
        if by_row and first == n == count:  # sizes do not tell
            by_sample = False if torch.equal(each, rows) else self._by_sample.get((k, t.dim()))
            return None if by_sample is None else each if by_sample else rows
        self._by_sample[k, t.dim()] = not by_row
        return rows if by_row else each

    def _owners_of(self, graph: Ownership, use: Any) -> Owned | None:
        """Return the owners of a use's rows; None if nothing shows them."""
        site, sizes, node, number = use
        if node is None:
            return None
        leads = list(sizes[: self._sites[site].leads(len(sizes))])
        found = graph.at(node, number, leads)
        if found is None and (found := self._input_owners(graph, leads, node, number)):
            graph.below[node, number] = found
        return found

    def _input_owners(
        self, graph: Ownership, leads: list[int], node: Node, number: int
    ) -> Owned | None:
        """Return the owners of rows below attention: those of the model's inputs, if the sizes
        cannot be those of other rows. Rows may be heads: [B, H, T]."""
        grid, shape = graph.inputs.grid, shape_of(node, number)
        rows = graph.inputs.owners.to(node._input_metadata[number].device)
        if len(grid) == 2 and leads[:2] != grid == [*shape[:1], *shape[2:3]] and len(shape) > 3:
            heads = rows.view(grid[0], 1, grid[1]).expand(shape[:3])
            return Owned(heads.flatten(), hash("as given, by head"))
        by_ids = self._options["sample_ids"] is not None
        alone = len(grid) > 1 or not graph.names & MAPPING or (len(leads) > 1 and not by_ids)
        sequence_first = len(grid) == 2 and leads == grid[::-1] != grid
        if not alone or (leads[: len(grid)] != grid and not sequence_first):
            return None
        rows = rows.view(grid).T.flatten() if sequence_first else rows
        rows = rows.repeat_interleave(prod(leads[len(grid) :]))
        return Owned(rows, hash(("as given", sequence_first)))

    def _is_shown(self, forward: Forward, own: Any, use: Any, owned: Owned | None) -> bool:
        """Return True if indices alone show the owners of a use's rows. own: from own_rows()."""
        site, _, node, number = use
        is_part = (site, node) in forward.trace.ends or self._layers[site].inside
        return bool(owned and not is_part and own.get((node, number), True))  # else the inputs'

    def _layouts(
        self, forward: Forward, heads: OwnedHeads, uses: OwnedUses, is_mixed: Callable[..., bool]
    ) -> tuple[list[Any], Layouts]:
        """Return the pass's segments, and for each use SEGMENTS + their place, or a cause."""
        is_unknown = any(one is None for _, one in uses)
        above = Graph([t for t, _ in heads]).parents if is_unknown else {}
        segments = list(forward.run.segments)  # and those of earlier forwards of the same samples
        places: dict[int, int] = {}  # by the id of the owners, which many layers share
        layouts: Layouts = []
        for (site, sizes, node, number), one in uses:
            layer, shape = self._layers[site], list(Watched(node, number, sizes).shape)
            if node is not None and layer.kind.startswith(UNSERVED):
                layouts.append(cause("segments_kind", kind=layer.type_name))
            elif one is None and node is not None and node not in above:
                layouts.append(NOWHERE)  # it comes to no output with owners
            elif one is None or is_mixed(one):
                why = "segments_unknown" if one is None else "segments_mixed"
                why = "segments_kind" if layer.kernel_size else why
                layouts.append(cause(why, kind=layer.type_name, shape=shape))
            else:
                if (key := id(one.owners)) not in places:
                    places[key] = place_among(segments, one.owners, forward.n)
                layouts.append(SEGMENTS + places[key])
        return segments, layouts

    def _prove(
        self, forward: Forward, shown: Ownership, heads: OwnedHeads, uses: OwnedUses,
        layouts: Layouts,
    ) -> list[bool]:  # fmt: skip
        """Return for each use True if weighted backwards confirm its owners, or if only Functions
        of rows keep them from it, and sizes leave no doubt; else write the cause into `layouts`.
        Of nodes to lift, which follow the forward's uses, zeros raise no doubt."""
        n = shown.inputs.n
        watched = [
            Watched(None if one is None else node, number, [len(one.owners)] if one else [1],
                    samples=None if one is None else one.owners)
            for (_, _, node, number), one in uses
        ]  # fmt: skip
        seeded = [(t, rows.where(rows < n, -1)) for t, rows in heads]
        seeding = Seeding(seeded, watched, n + 1, forward.trace.keep_caches)
        findings, proven = seeding.prove(), []
        functions = {node: node.name() for node in seeding.nodes if is_python(node)}
        is_plain = shown.names <= PLAIN.union(functions.values()) and COMPILED not in shown.names
        trusts = is_plain and functions and all(len(f.next_functions) == 1 for f in functions)
        for k, use in enumerate(watched):
            clear = BATCH if trusts and shown.inputs.are_rows_of(use) else None
            layout = findings[k].layout if findings else clear
            is_served = isinstance(layouts[k], int)
            if is_served and findings is None and clear is None:
                layouts[k] = "segments_unproven"
            elif is_served and isinstance(layout, str):
                layouts[k] = cause("segments_mixed", shape=list(use.shape))
            elif is_served and layout == NOWHERE and k < len(forward.uses):
                layouts[k] = NOWHERE
            proven.append(is_served and isinstance(layout, int) and layout != NOWHERE)
        return proven
