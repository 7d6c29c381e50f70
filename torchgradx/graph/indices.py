"""Rows of a tensor that indices select, as flat positions: tensor[indices], index_select, gather.

owners.py maps owners by them. The indices are those that a node saved.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .nodes import Node, to_signed
from .unpacking import saved_value

READING = {"GatherBackward0", "IndexBackward0", "IndexSelectBackward0"}  # rows, by index
LOOKUP = "EmbeddingBackward0"  # reads rows too, mostly those of a table


class Selection(NamedTuple):
    """The rows of a tensor that a node reads or writes by index."""

    rows: Tensor  # flat, of int64
    size: int  # the number of rows of the tensor
    dims: int  # leading dimensions of what is read or written; -1: the indices select features
    flags: tuple[Tensor, ...] = ()  # bool []: if one is True, the features of a row differ


def select_by_indices(indices: Any, shape: Sequence[int]) -> Selection | None:
    """Return the rows of a tensor [*shape] in tensor[indices]; None if they are not leading."""
    leading = list(indices or ())
    while leading and leading[-1] is None:
        leading.pop()
    ones = 0
    while leading and leading[0] is None and shape[ones] == 1:  # as of tensor[None, rows]
        leading.pop(0)
        ones += 1
    shape = shape[ones:]
    if not leading:
        return None
    if leading[0] is None:
        return Selection(torch.zeros(0, device="cpu"), 0, -1)
    if any(index is None for index in leading):
        return None
    parts: list[Tensor] = []
    covered = 0
    for index in leading:
        if index.dtype in (torch.bool, torch.uint8):
            parts += index.nonzero(as_tuple=True)
            covered += index.dim()
        else:
            parts.append(index)
            covered += 1
    first, *others = torch.broadcast_tensors(*parts) if len(parts) > 1 else parts
    rows = first % max(1, shape[0])
    for part, size in zip(others, shape[1:], strict=False):
        rows = rows * size + part % max(1, size)
    return Selection(rows.flatten(), prod(shape[:covered]), ones + rows.dim())


def select_along(
    dim: int, index: Tensor | None, shape: Sequence[int], grid: Sequence[int]
) -> Selection | None:
    """Return the rows of a tensor [*shape] that an index selects along a dimension, where torch
    takes no negative ones. grid: the sizes of the rows of the model's inputs; dimensions beyond it
    have features."""
    if index is None:
        return None
    if dim >= max(1, len(grid)) or (dim == 1 and tuple(shape[:2]) != grid):
        return Selection(index, 0, -1)
    flags: tuple[Tensor, ...] = ()
    if index.dim() > dim + 1:  # gather and scatter have an index for each feature
        wide = index.flatten(dim + 1)
        if wide.stride(-1) and wide.shape[-1] > 1:
            flags = ((wide != wide[..., :1]).any(),)
        index = wide[..., 0]
    if dim == 0:
        return Selection(index.flatten(), shape[0], 1, flags)
    lines = torch.arange(shape[0], device=index.device)[:, None] * shape[1]
    return Selection((lines + index).flatten(), shape[0] * shape[1], 2, flags)


def selected_by(
    node: Node, shape: Sequence[int], grid: Sequence[int]
) -> tuple[int, Selection | None]:
    """Return the dimension from which a node indexes a tensor [*shape], and the rows it selects."""
    if hasattr(node, "_raw_saved_indices"):
        indices = saved_value(node, "indices")
        indices = (indices,) if isinstance(indices, Tensor) else indices
        dim = next((k for k, index in enumerate(indices or ()) if index is not None), 0)
        found = select_by_indices(indices, shape)  # which may be on the CPU, for a GPU's rows
        return dim, found and found._replace(rows=found.rows.to(node._input_metadata[0].device))
    if hasattr(node, "_raw_saved_mask"):  # [*rows, features]
        mask = saved_value(node, "mask")
        found = None if mask is None else select_by_indices((mask[..., 0],), shape)
        flags = ((mask != mask[..., :1]).any(),) if found and mask.stride(-1) else ()
        return 0, found and found._replace(flags=flags)
    dim = saved_dim(node, shape)
    return dim, select_along(dim, saved_value(node, "index"), shape, grid)


def positions_of(node: Node, start: int, size: int, whole: int) -> Tensor:
    """Return the positions in an operand of the rows of one output of a select, slice or split.
    start: where this output of a split begins. size, whole: of the output, of the operand."""
    step = 1
    if node.name() == "SelectBackward0":
        start = to_signed(node._saved_index) % whole
    elif node.name() == "SliceBackward0":
        start, step = to_signed(node._saved_start), node._saved_step
        start = max(0, start + whole if start < 0 else start)
    return torch.arange(start, start + size * step, step, device="cpu")


def saved_dim(node: Node, shape: Sequence[int], key: str = "dim") -> int:
    return to_signed(getattr(node, f"_saved_{key}")) % max(1, len(shape))
