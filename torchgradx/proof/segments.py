"""Passes whose rows are of samples as the user's `sample_ids` says, or as rows were routed.

Owners of every use's rows are read off the graph in every pass (owners.py). What that takes on
trust is proven by weighted backwards, where no pass has shown the path to a use yet:
verdicts are by use, since a loop over the experts that were hit makes another graph in each step.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby, pairwise
from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .. import ops
from ..graph.layout import NOWHERE, SEGMENTS, SHARED, Seeding, Watched
from ..graph.owners import MAPPING, Owned, mask_joins, owners_below, owners_by
from ..refusals import cause, key_of
from ..sites.site import ProbeParts
from .audit import Audit
from .forwards import Forward
from .verdict import Verdict

if ops.NATIVE:
    from .. import _C

# Rows of a sequence's or an image's neighbours are not the model's rows.
SERVED = ("linear", "transposed linear", "geometric linear", "embedding", "layernorm", "rmsnorm",
          "prelu", "vmap")  # fmt: skip
MAX_RUNS = 16  # runs of samples whose rows stay where they are: more of them are sorted by length
ROUTED = ("mixes", "not_found", "unproven")
NO_VERDICT = Verdict([], [])


class Segments(NamedTuple):
    """The sample of each row of some uses: [rows], N where it is of none."""

    owners: Tensor


@dataclass(frozen=True)
class Inputs:
    """The sample of each row of the model's inputs."""

    owners: Tensor  # [rows], N where it is padding
    grid: list[int]  # sizes of the rows
    n: int

    @staticmethod
    def of(ids: Tensor | None, n: int) -> Inputs:
        """Return inputs by the user's ids, negative for padding; None: one row for each sample."""
        ids = torch.arange(n) if ids is None else ids
        owners = ids.flatten()
        return Inputs(torch.where(owners < 0, n, owners), list(ids.shape), n)

    def joined_by(self, masks: Sequence[Tensor]) -> bool:
        """Return whether attention's mask joins rows [B, T] of two samples."""
        if len(self.grid) != 2:
            return False
        joins = (mask_joins(mask, self.owners.view(self.grid), self.n) for mask in masks)
        return any(_read([joined for joined in joins if joined is not None]))

    @cached_property
    def within(self) -> bool:
        """Return whether a line has several samples: one document and padding shows nothing."""
        lines = self.owners.view(self.grid) if len(self.grid) == 2 else self.owners[:, None]
        several = (lines != lines.amin(1, True)) & (lines != self.n) if lines.numel() else lines
        return bool(several.any())

    @cached_property
    def padded(self) -> bool:
        return bool((self.owners == self.n).any())


class _Owners(NamedTuple):
    """The owners that one forward's graph shows."""

    inputs: Inputs
    below: Mapping[Any, Owned]  # by node and output
    names: set[str]  # of its nodes

    def at(self, node: Any, number: int, leads: list[int]) -> Owned | None:
        """Return owners of the rows [*leads] of a node's output, as far as they are known there."""
        found, n = self.below.get((node, number)), self.inputs.n
        if found is None:
            return None
        rows = owners_by(found, tuple(node._input_metadata[number].shape), leads)
        flags = found.flags
        if rows is not None:
            known = self.inputs.owners
            if rows is not known and len(self.inputs.grid) == 2 and leads == self.inputs.grid:
                ids = known.to(rows.device)  # what the user says of them holds
                flags = (*flags, ((rows != ids) & (rows != n) & (ids != n)).any())
        elif prod(leads) and len(found.owners) % prod(leads) == 0:  # features taken by index
            each = found.owners.view(prod(leads), -1)
            rows = each.amin(1)
            flags = (*flags, ((each != rows[:, None]) & (each != n)).any())
        return None if rows is None else Owned(rows, found.path, flags)


def sample_rows(options: Mapping[str, Any], args: Any, kwargs: Any) -> tuple[Tensor, int] | None:
    """Return the sample of each row of the model's inputs, as the user says; and N."""
    if options["sample_ids"] is None:
        return None
    ids = options["sample_ids"](args, kwargs)
    whole = isinstance(ids, Tensor) and not (ids.is_floating_point() or ids.is_complex())
    if not whole or ids.dtype is torch.bool:
        got = ids.dtype if isinstance(ids, Tensor) else type(ids).__name__
        raise TypeError(f"sample_ids(args, kwargs) must return a LongTensor; got {got}")
    if ids.dim() not in (1, 2):
        raise ValueError(
            f"sample_ids(args, kwargs) must return ids [rows] or [B, T]; got shape "
            f"{list(ids.shape)}"
        )
    highest, size = int(ids.max()) if ids.numel() else -1, options["batch_size"]
    n = highest + 1 if size is None else size(args, kwargs) if callable(size) else size
    if highest >= n:
        raise ValueError(f"sample_ids(args, kwargs) has the id {highest}, and batch_size= is {n}")
    return ids.detach().long().clone(), n


def segments_from(owners: Tensor, n: int) -> Any:
    """Return what C++ serves rows by: which samples have as many rows, one after another."""
    if not ops.NATIVE:
        return Segments(owners)
    counts = torch.bincount(owners, minlength=n + 1)[:n].tolist()
    present = [sample for sample, count in enumerate(counts) if count]
    in_order = bool((owners[1:] >= owners[:-1]).all())
    changes = sum(counts[a] != counts[b] for a, b in pairwise(present))
    order = None
    if not in_order or changes >= max(MAX_RUNS, 2 * len(set(counts))):
        present.sort(key=lambda sample: counts[sample])
        rank = torch.full((n + 1,), n)
        rank[present] = torch.arange(len(present))
        order = rank.to(owners.device)[owners].argsort(stable=True)
    samples = torch.tensor(present, dtype=torch.long, device=owners.device)
    alike = groupby(counts[sample] for sample in present)
    return _C.Segments(owners, order, samples, [(len(list(same)), rows) for rows, same in alike])


class SegmentExaminer:
    """Finds the owners of every use of a pass."""

    def __init__(self, shared: ProbeParts, audit: Audit) -> None:
        _, self._parameters, self._layers, self._options, self._sites, known = shared
        self._audit = audit
        # Regimes whose rows go where a batch's values send them.
        self._routed: dict[Any, bool] = known.setdefault("routed", {})
        self._by_sample: dict[tuple[int, int], bool] = {}  # outputs by place and dimensions

    @property
    def notes(self) -> list[str]:
        """Return lines for explain()."""
        said = ["rows by sample_ids"] * (self._options["sample_ids"] is not None)
        return said + ["routed rows: by the indices that they were taken by"] * bool(self._routed)

    def applies(self, ids: Tensor | None) -> bool:
        return ids is not None or bool(self._routed and self._parameters.regime() in self._routed)

    def examine(self, forward: Forward, ids: Tensor | None) -> bool:
        """Give a pass the owners of its uses' rows, or refuse it; False: it is of another kind."""
        if not self.applies(ids):
            return False
        refusals, layouts = self._attempt(forward, ids)
        if ids is None and refusals:  # it has tables, perhaps
            return False
        forward.run.refusals += refusals
        forward.run.layouts += layouts
        return True

    def rescue(self, forward: Forward) -> None:
        """Look for the owners of rows that have no layout: experts get rows by their values."""
        run, uses, causes = forward.run, forward.uses, forward.run.refusals
        refused = {site for site, why in causes if key_of(why) in ROUTED}
        here = {site for site, *_ in uses}  # none of a structure that is known as it is
        said = self._options["batch_dim"] or self._options["layout"]
        joint = len(run.layouts) != len(uses)
        if said or joint or run.n < 2 or not refused or not refused <= here:
            return
        refusals, layouts = self._attempt(forward, None)
        failed = {site for site, _ in refusals}
        if -1 in failed:
            return
        served = refused - failed
        if not failed and SHARED not in run.layouts and {site for site, _ in causes} == refused:
            self._routed[self._parameters.regime()] = True
            served = here
        run.refusals = [(site, why) for site, why in causes if site not in served]
        run.layouts = [new if site in served else old
                       for (site, *_), old, new in zip(uses, run.layouts, layouts, strict=True)
                      ]  # fmt: skip

    def _attempt(
        self, forward: Forward, ids: Tensor | None
    ) -> tuple[list[tuple[int, str]], list[int]]:
        """Return what is refused, and each use's layout. Never fails the forward."""
        try:
            return self._examine(forward, ids)
        except Exception as error:
            return [(-1, cause("not_examined", error=f"{type(error).__name__}: {error}"))], []

    def _examine(
        self, forward: Forward, ids: Tensor | None
    ) -> tuple[list[tuple[int, str]], list[int]]:
        run, n, uses = forward.run, forward.n, forward.uses
        refusals: list[tuple[int, str]] = []
        inputs = Inputs.of(ids, n)
        live = [t for t in forward.outputs if t.grad_fn is not None and t.is_floating_point()]
        heads = [(t, rows) for k, t in enumerate(live)
                 if (rows := self._head(k, t, inputs)) is not None]  # fmt: skip
        if uses and not heads:
            return [(-1, "segments_outputs")], []
        of_heads = {
            (t.grad_fn, t.output_nr): Owned(rows, hash(len(rows) == n)) for t, rows in heads
        }
        below, names, masks = owners_below(live, of_heads, n, inputs.grid)
        if inputs.joined_by(masks):
            refusals.append((-1, cause("segments_mixed", shape=inputs.grid)))
        graph = _Owners(inputs, below, names)
        owned = [self._owners_of(graph, use) for use in uses]
        if ids is None:
            owned = [one if self._both_ends_show(forward, graph, use, one) else None
                     for use, one in zip(uses, owned, strict=True)]  # fmt: skip
        keys = self._keys(forward, graph, owned)
        segments, layouts = self._layouts(forward, owned)
        new = any(key is not None and not self._audit.knows(key) for key in keys)
        proven = [True] * len(uses)
        if new and (n > 1 or inputs.padded) and self._options["check"] != "off":
            proven = self._prove(forward, owned, heads, layouts)
        refusals += [(site, layout) for (site, *_), layout in zip(uses, layouts, strict=True)
                     if isinstance(layout, str)]  # fmt: skip
        run.segments = segments
        if n > 1 and new and not self._audit.examiner.has_zeros(n):
            pending = {key for key, shown in zip(keys, proven, strict=True) if key and shown}
            self._audit.expect(list(pending), None, NO_VERDICT, run)
        return refusals, [NOWHERE if isinstance(layout, str) else layout for layout in layouts]

    def _head(self, k: int, t: Tensor, inputs: Inputs) -> Tensor | None:
        """Return owners of an output's leading rows, if they are the model's or one per sample."""
        grid, n, count = inputs.grid, inputs.n, len(inputs.owners)
        shape, first = list(t.shape), t.shape[0] if t.dim() else 0
        by_row = first == count or (t.dim() >= len(grid) and shape[: len(grid)] == grid)
        if not by_row and first != n:
            return None
        each, rows = torch.arange(n, device=t.device), inputs.owners.to(t.device)
        if by_row and first == n == count and not torch.equal(each, rows):
            known = self._by_sample.get((k, t.dim()))  # as it was where sizes showed it
            return None if known is None else each if known else rows
        self._by_sample[k, t.dim()] = not by_row
        return rows if by_row else each

    def _leads(self, use: Any) -> list[int]:
        """Return the dimensions that count a use's rows."""
        site, sizes, *_ = use
        return list(sizes[: self._sites[site].leads(len(sizes))])

    def _owners_of(self, graph: _Owners, use: Any) -> Owned | None:
        """Return owners of a use's rows; None: nothing shows them."""
        _, _, node, number = use
        leads = self._leads(use)
        if node is None:
            return None
        shown = graph.at(node, number, leads)
        if shown is not None:
            return shown
        return self._as_inputs(graph, leads, node._input_metadata[number].device)

    def _as_inputs(self, graph: _Owners, leads: list[int], device: torch.device) -> Owned | None:
        """Return owners of the inputs of attention: rows of the model's inputs, in a shape that
        nothing else has."""
        grid, rows = graph.inputs.grid, graph.inputs.owners
        by_ids = self._options["sample_ids"] is not None
        alone = len(grid) > 1 or not graph.names & MAPPING or (len(leads) > 1 and not by_ids)
        turned = len(grid) == 2 and leads == grid[::-1] != grid  # sequences first
        if not alone or (leads[: len(grid)] != grid and not turned):
            return None
        rows = rows.view(grid).T.flatten() if turned else rows
        rows = rows.to(device).repeat_interleave(prod(leads[len(grid) :]))
        return Owned(rows, hash(("as given", turned)))

    def _both_ends_show(
        self, forward: Forward, graph: _Owners, use: Any, owned: Owned | None
    ) -> bool:
        """Return whether indices alone show whose rows a use has, above it and below it."""
        site, _, node, _ = use
        if owned is None or (site, node) in forward.trace.ends or self._layers[site].inside:
            return False
        return _batch_first(owned, forward.n) or _from_inputs(graph.below, node, forward.n)

    def _keys(self, forward: Forward, graph: _Owners, owned: Sequence[Owned | None]) -> list[Any]:
        """Return what the verdict on each use is cached under; None: it has no owners."""
        inputs = graph.inputs
        facts = frozenset(graph.names), inputs.within, inputs.padded, len(inputs.grid)
        whole = self._parameters.regime(), *facts
        return [None if one is None else ("segments", whole, site, one.path)
                for (site, *_), one in zip(forward.uses, owned, strict=True)]  # fmt: skip

    def _layouts(
        self, forward: Forward, owned: Sequence[Owned | None]
    ) -> tuple[list[Any], list[int | str]]:
        """Return the pass's segments, and for each use which of these are its own, or a cause."""
        flags = list({id(flag): flag for one in owned if one for flag in one.flags}.values())
        mixed = dict(zip(map(id, flags), _read(flags), strict=True))
        segments = list(forward.run.segments)  # and those of earlier forwards of the same samples
        places: dict[int, int] = {}

        def place_of(owners: Tensor) -> int:
            """Return the place of these owners' segments: layers of one graph have the same."""
            if id(owners) not in places:
                same = (j for j, one in enumerate(segments) if _equal(one.owners, owners))
                places[id(owners)] = next(same, len(segments))
                if places[id(owners)] == len(segments):
                    segments.append(segments_from(owners, forward.n))
            return SEGMENTS + places[id(owners)]

        layouts: list[int | str] = []
        for (site, sizes, node, _), one in zip(forward.uses, owned, strict=True):
            layer, shape = self._layers[site], list(sizes)
            if node is not None and layer.kind not in SERVED:
                layouts.append(cause("segments_kind", kind=layer.type_name))
            elif one is None:
                layouts.append(cause("segments_unknown", shape=shape))
            elif any(mixed[id(flag)] for flag in one.flags):
                layouts.append(cause("segments_mixed", shape=shape))
            else:
                layouts.append(place_of(one.owners))
        return segments, layouts

    def _prove(
        self,
        forward: Forward,
        owned: Sequence[Owned | None],
        heads: Sequence[tuple[Tensor, Tensor]],
        layouts: list[int | str],
    ) -> list[bool]:
        """Compare owners with weighted backwards, and have `layouts` say what these show; return
        which uses are proven."""
        run, uses = forward.run, forward.uses
        watched = [
            Watched(None if one is None else node, number, [len(one.owners)] if one else [1],
                    samples=None if one is None else one.owners)
            for (_, _, node, number), one in zip(uses, owned, strict=True)
        ]  # fmt: skip
        unspent = self._audit.forwards.unspent
        findings = Seeding(heads, watched, run.n + 1, unspent, not run.in_graph).prove()
        proven = []
        for k, (_, sizes, _, _) in enumerate(uses):
            layout = None if findings is None else findings[k].layout
            served = isinstance(layouts[k], int)
            if served and findings is None:
                layouts[k] = "segments_unproven"
            elif served and isinstance(layout, str):
                layouts[k] = cause("segments_mixed", shape=list(sizes))
            elif served and layout == NOWHERE:
                layouts[k] = NOWHERE
            proven.append(served and layout not in (None, NOWHERE) and not isinstance(layout, str))
        return proven


def _batch_first(owned: Owned, n: int) -> bool:
    """Return whether rows are n*T+t."""
    each, rest = divmod(len(owned.owners), n)
    rows = torch.arange(n, device=owned.owners.device).repeat_interleave(each)
    return not rest and torch.equal(owned.owners, rows)


def _from_inputs(found: Mapping[Any, Owned], node: Any, n: int) -> bool:
    """Return True if the rows of a use's input were taken from rows n*T+t, each sample's from its
    own: else its input may be one sample's data for the loss of another."""
    todo, seen = [*node.next_functions], {node}
    for edge in todo:  # it grows
        at = found.get(edge)
        if edge[0] in seen or at is None:
            continue
        seen.add(edge[0])
        if any(_read(at.flags)):
            return False
        if _batch_first(at, n):
            return True
        todo += edge[0].next_functions
    return False


def _equal(one: Tensor, other: Tensor) -> bool:
    return one.shape == other.shape and torch.equal(one, other)


def _read(flags: Sequence[Tensor]) -> list[bool]:
    """Return flags, read from their device at once."""
    return [bool(one) for one in torch.stack(list(flags)).tolist()] if flags else []
