"""Packed sequences: the rows of samples of several lengths, step by step."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence
from torch.utils._pytree import tree_leaves

from ..refusals import cause


class Packed:
    """A PackedSequence: where its rows are in [T, N, *]."""

    def __init__(self, sequence: PackedSequence) -> None:
        self.data, sizes, self._sorted, unsorted = sequence
        self.rows = int(sizes[0])
        inside = torch.arange(self.rows) < sizes[:, None]  # [T, N], rows sorted by length
        steps, row = (t.to(self.data.device) for t in inside.nonzero(as_tuple=True))
        self.fields = [sizes, steps * self.rows + row, self._sorted, unsorted]
        self.samples = row if self._sorted is None else self._sorted[row]  # of each row
        self._places = steps * self.rows + self.samples

    def sort(self, state: Tensor) -> Tensor:
        return state if self._sorted is None else state.index_select(1, self._sorted)

    def pack(self, y: Tensor) -> Tensor:  # [N, T, *]
        return y.transpose(0, 1).flatten(0, 1).index_select(0, self._places)


def samples_of(out: Any, n: int) -> Tensor | None:
    """Return each row's sample, where the first output is a packed sequence of n samples."""
    first = out[0] if isinstance(out, tuple) and out else None
    if not isinstance(first, PackedSequence) or first.data.dim() != 2:
        return None
    packed = Packed(first)
    return packed.samples.to(packed.data.device) if packed.rows == n else None


def counts_rows(t: Tensor, rows: int) -> int:
    """Return how many leading dimensions of a tensor count so many rows; 0: none do."""
    return next((k for k in range(1, t.dim() + 1) if t.shape[:k].numel() == rows), 0)


def as_rows(samples: Tensor, t: Tensor) -> Tensor:
    """[rows] beside a tensor whose leading dimensions count them; beside any other -1."""
    dims = counts_rows(t, len(samples))
    rows = samples.view(t.shape[:dims]) if dims else samples.new_full((), -1)
    return rows.view(*rows.shape, *[1] * (t.dim() - rows.dim()))


def why_not_rerun(parameters: Iterable[Tensor], arguments: Any, packs: bool, n: int) -> str | None:
    """Return the cause for which a module cannot run again by sample, as far as its call shows."""
    if any(p.is_complex() for p in parameters):
        return "complex"
    leaves = tree_leaves(arguments, is_leaf=lambda leaf: isinstance(leaf, PackedSequence))
    packed = any(isinstance(leaf, PackedSequence) for leaf in leaves)
    return cause("packed", n=n) if packed and not packs else None
