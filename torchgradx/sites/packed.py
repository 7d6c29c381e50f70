"""Packed sequences, whose rows lie step by step, and which sample each row is of.

Each batch has other lengths, and so takes other rows. The nodes that packed a sequence, and those
that padded what a layer made of it, keep each row in its sample if their indices are the
sequence's own.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence

from ..graph.nodes import COPY_SLICES, Edge, Graph, Node, shape_of
from ..graph.owners import owners_within, set_flags
from ..graph.unpacking import saved_value


class Packed:
    """A PackedSequence, with the place of each row in the padded tensor [T, N, *]. rows: N. fields:
    those of Packing in csrc/layers/recurrence.h. samples: of each row."""

    def __init__(self, sequence: PackedSequence) -> None:
        self.data, sizes, self._sorted, self._unsorted = sequence
        self.rows = int(sizes[0])
        is_row = torch.arange(self.rows, device="cpu") < sizes[:, None]  # [T, N], sorted by length
        steps, samples = (t.to(self.data.device) for t in is_row.nonzero(as_tuple=True))
        self.fields: list[Any] = [sizes, steps * self.rows + samples, self._sorted, self._unsorted]
        self.samples = samples if self._sorted is None else self._sorted[samples]
        self._places = steps * self.rows + self.samples
        self._own: list[Node] = []  # that took rows of it

    def sort(self, state: Tensor) -> Tensor:
        """Return a state [layers, N, H] with the samples sorted by length."""
        return state if self._sorted is None else self._note(state.index_select(1, self._sorted))

    def pack(self, y: Tensor) -> Tensor:
        """Return the rows of a padded tensor [N, T, *] in this sequence's order."""
        return self._note(y.transpose(0, 1).flatten(0, 1).index_select(0, self._places))

    def _note(self, taken: Tensor) -> Tensor:
        self._own += [taken.grad_fn] if taken.grad_fn else []
        return taken

    def nodes(self, graph: Graph, end: Edge, others: Sequence[tuple[Edge, Packed]]) -> list[Node]:
        """Return the nodes that are known to keep each row in its sample, whatever the lengths: of
        the packing below, and of the padding above the rows of an edge `end`, packed alike.
        others: such edges of earlier calls. None where a layer made the rows that were given."""
        given = (self.data.grad_fn, self.data.output_nr)
        same = (one for edge, one in others if edge == given)
        is_same = any(torch.equal(self.samples, one.samples) for one in same)
        packing = self._packing()
        if given[0] is not None and not is_same and not packing:
            return []
        return [*self._own, *packing, *self._padding(graph, end)]

    def _packing(self) -> list[Node]:
        """Return the nodes of pack_padded_sequence(), if it made the sequence."""
        pack: Node | None = self.data.grad_fn
        if pack is None or pack.name() != "PackPaddedSequenceBackward0":
            return []
        sizes, dim = saved_value(pack, "result1"), 1 - pack._saved_batch_first
        if sizes is None or not torch.equal(sizes, self.fields[0]):
            return []
        order, sort = self._sorted, pack.next_functions[0][0]
        sorts = [] if order is None else _selects(sort, order, dim)
        return [pack, *sorts] if sorts or order is None else []

    def _padding(self, graph: Graph, end: Edge) -> list[Node]:
        """Return the nodes of pad_packed_sequence(), if it put each row into its sample."""

        def above(node: Node) -> Node | None:
            return graph.parents[node][0][0] if len(graph.parents[node]) == 1 else None

        of_slices = {COPY_SLICES, "SliceBackward0", "ViewBackward0"}
        found = graph.climb([end[0]], lambda _, v: v is end[0] or v.name() in of_slices)
        inside = {v for v in found if v.name() in of_slices}
        tops = [v for v in inside if inside.isdisjoint(p for p, _ in graph.parents[v])]
        grid = shape_of(tops[0], 0)[:2] if len(tops) == 1 else ()
        read = {child for v in inside for child, _ in v.next_functions if child is not None}
        if grid[1:] != (self.rows,) or not read <= inside | {end[0]}:
            return []  # other rows are written there too
        top, dim = above(tops[0]), 1
        if top is not None and top.name() == "TransposeBackward0":
            inside.add(top)
            top, dim = above(top), 0
        columns, last = self._sorted, list[Node]()
        if columns is None or self._unsorted is None:
            columns = torch.arange(self.rows, device=self.samples.device)
        elif not (last := _selects(top, self._unsorted, dim)):
            return []
        rows = columns.repeat(grid[0])
        owned = owners_within((tops[0], 0), rows, inside, self.rows, grid, {}).get(end)
        if owned is None or set_flags([owned]) or not torch.equal(owned.owners, self.samples):
            return []
        return [*inside, *last]


def _selects(node: Node | None, index: Tensor, dim: int) -> list[Node]:
    """Return a node if it selected by this index along a dimension; else nothing."""
    if node is None or node.name() != "IndexSelectBackward0" or node._saved_dim != dim:
        return []
    saved = saved_value(node, "index")
    return [node] if saved is not None and torch.equal(saved, index) else []


def is_consistent(sequence: PackedSequence) -> bool:
    """Return True if one of a sequence's two orders undoes the other."""
    _, _, order, back = sequence
    if order is None or back is None:
        return order is back
    return bool((order[back].diff() == 1).all()) and len(order) == len(back)


def samples_of(out: Any, n: int) -> Tensor | None:
    """Return the sample of each row of a first output that packs N samples; None: it does not."""
    first = out[0] if isinstance(out, tuple) and out else None
    if not isinstance(first, PackedSequence) or first.data.dim() != 2:
        return None
    packed = Packed(first)
    return packed.samples.to(packed.data.device) if packed.rows == n else None
