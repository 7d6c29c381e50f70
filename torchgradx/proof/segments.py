"""Passes whose rows are of samples as the user's `sample_ids` says, or as rows were routed.

Owners of every use's rows are read off the graph in every pass (owners.py). What that takes on
trust is proven by weighted backwards, where a use is reached in a way that no pass has shown yet:
verdicts are by use, since a loop over the experts that were hit makes another graph in each step.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import groupby, pairwise
from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .. import ops
from ..refusals import cause, key_of
from .audit import Audit
from .forwards import Forward
from .layout import NOWHERE, SEGMENTS, SHARED, Seeding, Watched
from .owners import MAPPING, Owned, fitted, mask_joins, owners_below
from .verdict import Attached, Verdict

if ops.NATIVE:
    from .. import _C

# Rows of a sequence's or an image's neighbours are not the model's rows.
SERVED = ("linear", "transposed linear", "geometric linear", "embedding", "layernorm", "rmsnorm",
          "prelu", "vmap")  # fmt: skip
FEW = 16  # runs of samples whose rows stay where they are: more of them are sorted by length
ROUTED = ("mixes", "not_found", "unproven")
NONE = Verdict([], [])


class Segments(NamedTuple):
    """The sample of each row of some uses: [rows], N where it is of none."""

    owners: Tensor


def rows_of(options: Mapping[str, Any], args: Any, kwargs: Any) -> tuple[Tensor, int] | None:
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
    held = [sample for sample, count in enumerate(counts) if count]
    in_order = bool((owners[1:] >= owners[:-1]).all())
    changes = sum(counts[a] != counts[b] for a, b in pairwise(held))
    order = None
    if not in_order or changes >= max(FEW, 2 * len(set(counts))):
        held.sort(key=lambda sample: counts[sample])
        rank = torch.full((n + 1,), n)
        rank[held] = torch.arange(len(held))
        order = rank.to(owners.device)[owners].argsort(stable=True)
    samples = torch.tensor(held, dtype=torch.long, device=owners.device)
    alike = groupby(counts[sample] for sample in held)
    return _C.Segments(owners, order, samples, [(len(list(same)), rows) for rows, same in alike])


class SegmentExaminer:
    """Finds the owners of every use of a pass."""

    def __init__(self, shared: Attached, audit: Audit) -> None:
        _, self._parameters, self._layers, self._options, self._sites, known = shared
        self._audit = audit
        # Regimes whose rows go where a batch's values send them.
        self._routed: dict[Any, bool] = known.setdefault("routed", {})
        self._by_sample: dict[tuple[int, int], bool] = {}  # outputs by place and dimensions

    @property
    def notes(self) -> list[str]:
        """Lines for explain()."""
        said = ["rows by sample_ids"] * (self._options["sample_ids"] is not None)
        return said + ["routed rows: by the indices that they were taken by"] * bool(self._routed)

    def applies(self, ids: Tensor | None) -> bool:
        return ids is not None or bool(self._routed and self._parameters.regime() in self._routed)

    def examine(self, forward: Forward, ids: Tensor | None) -> bool:
        """Give a pass the owners of its uses' rows, or refuse it; False: it is of another kind.

        Never fails the forward.
        """
        if not self.applies(ids):
            return False
        run = forward.run
        before = run.refusals, run.layouts
        try:
            self._examine(forward, ids)
        except Exception as error:
            run.refuse(-1, cause("not_examined", error=f"{type(error).__name__}: {error}"))
        if ids is None and run.refusals != before[0]:  # it has tables, perhaps
            run.refusals, run.layouts = before
            return False
        return True

    def rescue(self, forward: Forward) -> None:
        """Look for the owners of rows that have no layout: experts get rows by their values."""
        run, uses = forward.run, forward.uses
        refused = {site for site, why in run.refusals if key_of(why) in ROUTED}
        here = {site for site, *_ in uses}  # none of a structure that is known as it is
        said = self._options["batch_dim"] or self._options["layout"]
        joint = len(run.layouts) != len(uses)
        if said or joint or run.n < 2 or not refused or not refused <= here:
            return
        causes, layouts = run.refusals, run.layouts
        run.refusals, run.layouts = [], []
        try:
            self._examine(forward, None)
        except Exception:  # the first causes stand
            run.refusals = [(-1, "segments_outputs")]
        failed = {site for site, _ in run.refusals}
        found, tables = run.layouts, any(layout == SHARED for layout in layouts)
        if not failed and not tables and {site for site, _ in causes} == refused:
            run.refusals = []
            self._routed[self._parameters.regime()] = True
            return
        lost = {site for site in refused if site in failed or -1 in failed}
        run.refusals = [(site, why) for site, why in causes if site not in refused - lost]
        run.layouts = [new if site in refused - lost else old
                       for (site, *_), old, new in zip(uses, layouts, found or layouts, strict=True)
                      ]  # fmt: skip

    def _examine(self, forward: Forward, told: Tensor | None) -> None:
        run, n, uses = forward.run, forward.n, forward.uses
        ids = torch.arange(n) if told is None else told
        grid = list(ids.shape)
        flat = ids.flatten()
        flat = torch.where(flat < 0, n, flat)
        live = [t for t in forward.outputs if t.grad_fn is not None and t.is_floating_point()]
        heads = [(t, rows) for k, t in enumerate(live)
                 if (rows := self._head(k, t, flat, grid, n)) is not None]  # fmt: skip
        if uses and not heads:
            run.refuse(-1, "segments_outputs")
            return
        given = {
            (t.grad_fn, t.output_nr): Owned(owned, hash(len(owned) == n)) for t, owned in heads
        }
        found, names, masks = owners_below(live, given, n, grid)
        rows = flat.view(grid)
        joins = [mask_joins(mask, rows, n) for mask in masks if len(grid) == 2]
        if any(_read([joined for joined in joins if joined is not None])):
            run.refuse(-1, cause("segments_mixed", shape=grid))
        owned: list[Owned | None] = []
        for site, sizes, node, number in uses:
            leads = sizes[: self._sites[site].leads(len(sizes))]
            of_use = self._owned(found, node, number, leads, flat, grid, names, n)
            if told is None and of_use is not None:  # by indices alone: both ends are shown
                single = (site, node) not in forward.looked.ends and not self._layers[site].inside
                if not single or not (_batch_first(of_use, n) or _from_inputs(found, node, n)):
                    of_use = None
            owned.append(of_use)
        self._settle(forward, owned, heads, names, flat, grid)

    def _head(self, k: int, t: Tensor, flat: Tensor, grid: list[int], n: int) -> Tensor | None:
        """Return owners of an output's leading rows, if they are the model's or one per sample."""
        shape, first = list(t.shape), t.shape[0] if t.dim() else 0
        by_row = first == len(flat) or (t.dim() >= len(grid) and shape[: len(grid)] == grid)
        by_sample = first == n and shape[: len(grid)] != grid
        each, rows = torch.arange(n, device=t.device), flat.to(t.device)
        if by_row and first == n == len(flat) and not torch.equal(each, rows):
            known = self._by_sample.get((k, t.dim()))  # as it was where sizes told
            return None if known is None else each if known else rows
        if by_row or by_sample:
            self._by_sample[k, t.dim()] = not by_row
        return rows if by_row else each if by_sample else None

    def _owned(
        self,
        found: Mapping[Any, Owned],
        node: Any,
        number: int,
        leads: Sequence[int],
        flat: Tensor,
        grid: list[int],
        names: set[str],
        n: int,
    ) -> Owned | None:
        """Return owners of a use's rows; None: nothing shows them."""
        if node is None:
            return None
        at = found.get((node, number))
        if at is not None:
            shape = tuple(node._input_metadata[number].shape)
            rows = fitted(at, shape, leads)
            if rows is not None and rows is not flat and len(grid) == 2 and list(leads) == grid:
                ids = flat.to(rows.device)  # what the user says of them holds
                other = ((rows != ids) & (rows != n) & (ids != n)).any()
                return Owned(rows, at.way, (*at.flags, other))
            if rows is not None:
                return Owned(rows, at.way, at.flags)
            if prod(leads) and len(at.owners) % prod(leads) == 0:  # features taken by index
                each = at.owners.view(prod(leads), -1)
                rows = each.amin(1)
                flag = ((each != rows[:, None]) & (each != n)).any()
                return Owned(rows, at.way, (*at.flags, flag))
        # What goes into attention: rows of the model's inputs, in a shape that nothing else has.
        told = self._options["sample_ids"] is not None
        alone = len(grid) > 1 or not names & MAPPING or (len(leads) > 1 and not told)
        turned = len(grid) == 2 and list(leads) == grid[::-1] != grid  # sequences first
        if not alone or (list(leads[: len(grid)]) != grid and not turned):
            return None
        flat = flat.view(grid).T.flatten() if turned else flat
        rows = flat.to(node._input_metadata[number].device).repeat_interleave(
            prod(leads[len(grid) :])
        )
        return Owned(rows, hash(("as given", turned)))

    def _settle(
        self,
        forward: Forward,
        owned: Sequence[Owned | None],
        heads: Sequence[tuple[Tensor, Tensor]],
        names: set[str],
        flat: Tensor,
        grid: list[int],
    ) -> None:
        run, n, uses = forward.run, forward.n, forward.uses
        flags = list({id(f): f for o in owned if o for f in o.flags}.values())
        mixed = dict(zip(map(id, flags), _read(flags), strict=True))
        rows = flat.view(grid) if len(grid) == 2 else flat[:, None]
        # a row of one document, and padding, shows nothing of rows of several
        within = bool(((rows != rows.amin(1, True)) & (rows != n)).any()) if rows.numel() else False
        padded = bool((flat == n).any())
        whole = (self._parameters.regime(), frozenset(names), within, padded, len(grid))
        keys = [None if o is None else ("segments", whole, site, o.way)
                for (site, *_), o in zip(uses, owned, strict=True)]  # fmt: skip
        new = [key for key in keys if key is not None and not self._audit.knows(key)]
        layouts: list[int | str] = [NOWHERE] * len(uses)
        made: dict[int, int] = {}
        segments = list(run.segments)  # and those of earlier forwards of the same samples
        for k, ((site, sizes, node, _), o) in enumerate(zip(uses, owned, strict=True)):
            shape = list(sizes)
            if node is None:
                layouts[k] = cause("segments_unknown", shape=shape)
            elif self._layers[site].kind not in SERVED:
                layouts[k] = cause("segments_kind", kind=self._layers[site].type_name)
            elif o is None:
                layouts[k] = cause("segments_unknown", shape=shape)
            elif any(mixed[id(f)] for f in o.flags):
                layouts[k] = cause("segments_mixed", shape=shape)
            else:
                key = id(o.owners)
                if key not in made:  # layers of one graph have the same, made anew by each
                    same = (j for j, s in enumerate(segments) if _equal(s.owners, o.owners))
                    made[key] = SEGMENTS + next(same, len(segments))
                    if made[key] == SEGMENTS + len(segments):
                        segments.append(segments_from(o.owners, n))
                layouts[k] = made[key]
        shown = [True] * len(uses)
        if new and (n > 1 or padded) and self._options["check"] != "off":
            shown = self._prove(run, uses, owned, heads, layouts)
        for k, (site, *_) in enumerate(uses):
            layout = layouts[k]
            if isinstance(layout, str):
                run.refuse(site, layout)
                layouts[k] = NOWHERE
        run.segments = segments
        run.layouts = run.layouts + layouts
        if n > 1 and new and not self._audit.examiner.has_zeros(n):
            pending = {key for key, proven in zip(keys, shown, strict=True) if key and proven}
            self._audit.expect(list(pending), NONE, run)

    def _prove(
        self,
        run: Any,
        uses: Sequence[Any],
        owned: Sequence[Owned | None],
        heads: Sequence[tuple[Tensor, Tensor]],
        layouts: list[int | str],
    ) -> list[bool]:
        """Hold owners against weighted backwards; return which of them these show."""
        watched = [
            Watched(None if o is None else node, number, [len(o.owners)] if o else [1],
                    samples=None if o is None else o.owners)
            for (_, _, node, number), o in zip(uses, owned, strict=True)
        ]  # fmt: skip
        unspent = self._audit.forwards.unspent
        findings = Seeding(heads, watched, run.n + 1, unspent, not run.in_graph).prove()
        shown = []
        for k, (_, sizes, _, _) in enumerate(uses):
            layout = None if findings is None else findings[k].layout
            served = isinstance(layouts[k], int) and owned[k] is not None
            if served and findings is None:
                layouts[k] = "segments_unproven"
            elif served and isinstance(layout, str):
                layouts[k] = cause("segments_mixed", shape=list(sizes))
            elif served and layout == NOWHERE:
                layouts[k] = NOWHERE
            shown.append(served and layout not in (None, NOWHERE) and not isinstance(layout, str))
        return shown


def _batch_first(owned: Owned, n: int) -> bool:
    """Return whether rows are n*T+t."""
    each, rest = divmod(len(owned.owners), n)
    rows = torch.arange(n, device=owned.owners.device).repeat_interleave(each)
    return not rest and torch.equal(owned.owners, rows)


def _from_inputs(found: Mapping[Any, Owned], node: Any, n: int) -> bool:
    """Return whether the rows that a use was given were taken from rows n*T+t, each sample's from
    its own: else it may be given one sample's data for the loss of another."""
    todo, seen = [*node.next_functions], {node}
    for edge in todo:  # grows as it goes
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
    """Read all at once from their device."""
    return [bool(one) for one in torch.stack(list(flags)).tolist()] if flags else []
