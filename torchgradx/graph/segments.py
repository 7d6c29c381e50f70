"""Segments: the rows of each sample, in runs of equal lengths, for the kernels; rows of inputs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property, reduce
from itertools import groupby, pairwise
from math import prod
from operator import or_
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..extension import _C, NATIVE
from .indices import positions_of, saved_dim
from .layout import read_flags
from .nodes import Edge, is_leaf, shape_of
from .owners import Owned, owners_by, set_flags

MAX_RUNS = 16  # runs of samples with equal lengths; with more of them, rows are sorted by length
FAINT = -1e4  # an additive attention mask excludes a pair with a number below this
OWN, UNORDERED, MIXED = 1, 2, 4  # see own_rows()


class Segments(NamedTuple):
    """The twin of C++'s Segments, without the extension."""

    owners: Tensor


def segments_from(owners: Tensor, n: int, counts: Sequence[int] | None = None) -> Any:
    """Return the segments of rows with these owners. To kernels, a run of samples with as many rows
    each is one batch. counts: the rows of each sample, if known; the rows are in no order then."""
    if not NATIVE:
        return Segments(owners)
    in_order = counts is None and bool((owners[1:] >= owners[:-1]).all())
    counts = torch.bincount(owners, minlength=n + 1)[:n].tolist() if counts is None else counts
    present = [sample for sample, count in enumerate(counts) if count]
    changes = sum(counts[a] != counts[b] for a, b in pairwise(present))
    order = None
    if not in_order or changes >= max(MAX_RUNS, 2 * len(set(counts))):
        present.sort(key=lambda sample: counts[sample])
        rank = torch.full((n + 1,), n, device="cpu")
        rank[present] = torch.arange(len(present), device="cpu")
        order = rank.to(owners.device, non_blocking=True)[owners].argsort(stable=True)
    samples = torch.LongTensor(present).to(owners.device, non_blocking=True)  # made on the CPU
    alike = groupby(counts[sample] for sample in present)
    return _C.Segments(owners, order, samples, [(len(list(same)), rows) for rows, same in alike])


def own_rows(found: dict[Edge, Owned], n: int) -> dict[Edge, bool]:
    """Return for each edge True if its rows were taken from rows n*T+t of their own samples: else
    they may be of one sample's data for another's loss. Rows of data, below which the graph ends,
    must be in the order of the samples, each with some: as images of unequal sizes are."""
    mixed = set_flags(found.values())
    owners = {id(owned.owners): owned.owners for owned in found.values()}  # many edges share them
    answers = read_flags([_order_of(rows, n) for rows in owners.values()])
    each = zip(owners, answers[::2], answers[1::2], strict=True)
    orders = {key: OWN if own else 0 if ordered else UNORDERED for key, own, ordered in each}
    bits: dict[Edge, int] = {}
    for edge, owned in reversed(found.items()):  # operands first
        order = orders[id(owned.owners)]
        below = [bits[e] for e in edge[0].next_functions if e in bits and order != OWN]
        bits[edge] = reduce(or_, below, 0) if below else order
        bits[edge] |= MIXED * any(id(flag) in mixed for flag in owned.flags)
    return {e: not b & MIXED and bool(b & OWN or not b & UNORDERED) for e, b in bits.items()}


def _order_of(rows: Tensor, n: int) -> Tensor:
    """Return bool [2]: True for rows n*T+t; for rows in the order of the samples, each with any."""
    samples, each = torch.arange(n, device=rows.device), len(rows) // n
    is_own = (rows[: n * each] == samples.repeat_interleave(each)).all() & (len(rows) == n * each)
    is_stepwise = (rows.diff() // 2 == 0).all()  # by 0 or 1
    in_order = (rows[:1] == 0).all() & (rows[-1:] == n - 1).all() & is_stepwise
    return torch.stack([is_own, in_order])


def place_among(segments: list[Any], owners: Tensor, n: int) -> int:
    """Return the place of the segments with these owners; they are added if there are none."""
    for place, one in enumerate(segments):
        if one.owners.device == owners.device and torch.equal(one.owners, owners):
            return place
    segments.append(segments_from(owners, n))
    return len(segments) - 1


@dataclass(frozen=True)
class Inputs:
    """The owners of the rows of the model's inputs."""

    owners: Tensor
    grid: list[int]  # sizes of the rows: [rows], or [B, T]
    n: int
    sliced: dict[Edge, Owned] = field(default_factory=dict)  # of what outputs are slices of
    filled: dict[int, Tensor] = field(default_factory=dict)  # by id, see Ownership.at

    @staticmethod
    def of(ids: Tensor | None, n: int) -> Inputs:
        """ids: the user's, negative for padding. None: one row for each sample."""
        ids = torch.arange(n, device="cpu") if ids is None else ids
        return Inputs(torch.where(ids < 0, n, ids).flatten(), list(ids.shape), n)

    def are_joined_by(self, mask: Tensor | None) -> bool:
        """Return True if an attention mask lets rows [B, T] see those of another sample."""
        if mask is None or len(self.grid) < 2 or mask.shape[-2:] != (self.grid[1],) * 2:
            return False
        if mask.dim() > 2 and mask.shape[0] not in (1, self.grid[0]):
            return False
        allowed = mask if mask.dtype is torch.bool else mask > FAINT
        allowed = allowed.view(*[1] * (4 - mask.dim()), *mask.shape)
        owners = self.owners.view(self.grid).to(mask.device)
        query, key = owners[:, None, :, None], owners[:, None, None, :]
        return bool((allowed & (query != key) & (query != self.n)).any())

    @cached_property
    def has_shared_lines(self) -> bool:
        """Return True if one line of [B, T] holds several samples, beside padding."""
        if len(self.grid) < 2 or not self.owners.numel():
            return False
        lines = self.owners.view(self.grid)
        return bool(((lines != lines.amin(1, True)) & (lines != self.n)).any())

    def are_rows_of(self, use: Any) -> bool:
        """Return True if a use has these rows in front, and no other dimension may have them."""
        shape, grids = list(use.shape), (self.grid, [len(self.owners)])
        fits = any(shape[: len(g)] == g and {*map(shape.count, g)} == {1} for g in grids)
        return fits and torch.equal(use.samples, self.owners.to(use.samples.device))

    def owners_of_part(self, t: Tensor) -> Tensor | None:
        """Return the owners of the rows of an output [B, S, *] that is a slice of rows [B, T], or
        has one row for each line. None if the graph or the sizes leave a doubt."""
        if len(self.grid) < 2 or not t.dim() or len(t) != self.grid[0]:
            return None
        lines = self.owners.to(t.device).view(self.grid)
        slices = _slices_of_lines(t, self.grid) if t.dim() > 1 else {}
        if len(positions := {*slices.values()}) == 1:
            self.sliced.update(dict.fromkeys(slices, Owned(lines.flatten(), 0)))
            return lines[:, positions.pop()].flatten()
        is_doubtful = self.has_shared_lines or self.grid[1] - len(t) in (0, 1)
        return None if is_doubtful else lines.amin(1)


class Ownership(NamedTuple):
    """The owners that one forward's graph shows."""

    inputs: Inputs
    below: dict[Any, Owned]  # by node and output
    consumers: Counter[Any]  # by the same: of how many consumers the owners are known
    names: set[str]  # of its nodes

    def at(self, node: Any, number: int, leads: list[int]) -> Owned | None:
        """Return the owners of the rows [*leads] of a node's output, or None."""
        found, n = self.below.get((node, number)), self.inputs.n
        if found is None:
            return None
        rows = owners_by(found, tuple(node._input_metadata[number].shape), leads)
        flags = found.flags
        if rows is not None:
            ids = self.inputs.owners.to(rows.device)
            if rows is not ids and len(self.inputs.grid) == 2 and leads == self.inputs.grid:
                flags = (*flags, ((rows != ids) & (rows != n) & (ids != n)).any())  # must agree
                rows = self.inputs.filled.setdefault(id(found.owners), rows.where(rows != n, ids))
        elif (
            prod(leads) and len(found.owners) and len(found.owners) % prod(leads) == 0
        ):  # features taken by index
            each = found.owners.view(prod(leads), -1)
            rows = each.amin(1)
            flags = (*flags, ((each != rows[:, None]) & (each != n)).any())
        return None if rows is None else Owned(rows, found.path, flags)


def _slices_of_lines(t: Tensor, grid: Sequence[int]) -> dict[Edge, tuple[int, ...]]:
    """Return the positions in each line [T] of the rows of an output [B, S, *], by the edges that
    it is a slice of; empty, if rows [B, S] come from elsewhere too."""
    rows, found = (grid[0], t.shape[1]), dict[Edge, tuple[int, ...]]()
    todo: list[Any] = [t.grad_fn]
    for node in todo:  # grows
        shapes = {edge: shape_of(*edge)[:2] for edge in node.next_functions if edge[0] is not None}
        whole = [edge for edge, shape in shapes.items() if [*shape] == grid]
        rest = [edge[0] for edge, shape in shapes.items() if shape == rows and not is_leaf(edge[0])]
        if whole and node.name() == "SliceBackward0" and saved_dim(node, shape_of(node, 0)) == 1:
            found[whole[0]] = tuple(positions_of(node, 0, rows[1], grid[1]).tolist())
        elif whole or not rest:
            return {}
        todo += [child for child in rest if child not in todo]
    return found
