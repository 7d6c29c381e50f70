"""Packed sequences, whose rows lie step by step, and which sample each row is of."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence
from torch.utils._pytree import tree_leaves

from ..refusals import cause


class Packed:
    """A PackedSequence, with the place of each row in the padded tensor [T, N, *]. rows: N. fields:
    those of Packing in csrc/layers/recurrence.h. samples: of each row."""

    def __init__(self, sequence: PackedSequence) -> None:
        self.data, sizes, self._sorted, unsorted = sequence
        self.rows = int(sizes[0])
        is_row = torch.arange(self.rows, device="cpu") < sizes[:, None]  # [T, N], sorted by length
        steps, samples = (t.to(self.data.device) for t in is_row.nonzero(as_tuple=True))
        self.fields = [sizes, steps * self.rows + samples, self._sorted, unsorted]
        self.samples = samples if self._sorted is None else self._sorted[samples]
        self._places = steps * self.rows + self.samples

    def sort(self, state: Tensor) -> Tensor:
        """Return a state [layers, N, H] with the samples sorted by length."""
        return state if self._sorted is None else state.index_select(1, self._sorted)

    def pack(self, y: Tensor) -> Tensor:
        """Return the rows of a padded tensor [N, T, *] in this sequence's order."""
        return y.transpose(0, 1).flatten(0, 1).index_select(0, self._places)


def samples_of(out: Any, n: int) -> Tensor | None:
    """Return the sample of each row of a first output that packs N samples; None: it does not."""
    first = out[0] if isinstance(out, tuple) and out else None
    if not isinstance(first, PackedSequence) or first.data.dim() != 2:
        return None
    packed = Packed(first)
    return packed.samples.to(packed.data.device) if packed.rows == n else None


def why_not_rerun(parameters: Iterable[Tensor], arguments: Any, packs: bool, n: int) -> str | None:
    """Return the cause for which a module cannot run again by sample, as far as its call shows.
    packs: its first output is a packed sequence."""
    if any(p.is_complex() for p in parameters):
        return "complex"
    leaves = tree_leaves(arguments, is_leaf=lambda leaf: isinstance(leaf, PackedSequence))
    is_packed = any(isinstance(leaf, PackedSequence) for leaf in leaves)
    return cause("packed", n=n) if is_packed and not packs else None
