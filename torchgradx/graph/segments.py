"""Segments: the rows of each sample, as runs of samples with as many rows each, for the kernels."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby, pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..extension import _C, NATIVE

MAX_RUNS = 16  # runs of samples with equal lengths; with more of them, rows are sorted by length


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


def place_among(segments: list[Any], owners: Tensor, n: int) -> int:
    """Return the place of the segments with these owners; they are added if there are none."""
    for place, one in enumerate(segments):
        if one.owners.device == owners.device and torch.equal(one.owners, owners):
            return place
    segments.append(segments_from(owners, n))
    return len(segments) - 1
