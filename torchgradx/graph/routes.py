"""Routes: the rows that a batch's own values select, as in x[mask], packed sequences and pieces.

Another batch of the same sizes may select rows of other samples. So a proof of a structure with
such operators holds only for batches with the same routes.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ..extension import _C, NATIVE
from .nodes import COPY_SLICES, Node, is_leaf, nodes_below, shape_of, to_signed
from .unpacking import is_hooked

# Nodes that read rows of their operand by index, or write rows of their output by index.
READS = {f"{name}Backward0" for name in (
    "Embedding", "EmbeddingBag", "Gather", "Index", "IndexSelect", "MaskedSelect",
    "PackPaddedSequence", "Sort", "Take", "Topk",
)} | {"SortBackward1"}  # fmt: skip
WRITES = {f"{name}Backward0" for name in (
    "IndexAdd", "IndexCopy", "IndexPut", "IndexPutImpl", "IndexReduce", "MaskedScatter", "Put",
    "Scatter", "ScatterAdd", "ScatterReduce",
)}  # fmt: skip
INDEX_NAMES = ("index", "indices", "mask", "result1")  # the names under which they save indices
OFFSETS = {"EmbeddingBagBackward0": ("offsets",), "SegmentReduceBackward0": ("lengths", "offsets")}
TRANSPOSES = {"CloneBackward0", "PermuteBackward0", "TBackward0", "ToCopyBackward0",
              "TransposeBackward0"}  # fmt: skip
CONCATENATIONS = {"CatBackward0", "SelectScatterBackward0", "SliceScatterBackward0",
                  "SplitWithSizesBackward0", "StackBackward0"}  # fmt: skip
POSITION_NAMES = {
    "SelectBackward0": ("dim", "index"),
    "SelectScatterBackward0": ("dim", "index"),
    "SliceBackward0": ("dim", "start", "end"),
    "SliceScatterBackward0": ("dim", "start", "end"),
    "SplitWithSizesBackward0": ("split_sizes",),
}
ANY_DIM = {"MaskedScatterBackward0", "MaskedSelectBackward0", "PackPaddedSequenceBackward0",
           "PutBackward0", "TakeBackward0"}  # whatever the dimension  # fmt: skip


def routes_of(outputs: Iterable[Tensor], n: int, by_row: Mapping[Node, Any]) -> list[Any]:
    """Return the routes of the batch that a graph is of; empty if its values select nothing.
    A None in the list was not visible, and equals no other route. by_row: nodes that keep each
    sample's rows apart, whatever they select, with a description that depends on no values."""
    routes: list[Any] = []
    has_choice, notes = False, set()
    for node in nodes_below(t.grad_fn for t in outputs if t.grad_fn is not None) if n > 1 else ():
        name = node.name()
        if node in by_row:
            notes.add(f"by row in {by_row[node]}")
            continue
        if name == COPY_SLICES or (name in CONCATENATIONS and _joins_samples(node, n)):
            has_choice = True
            routes.append(tuple(shape_of(*edge) for edge in node.next_functions if edge[0]))
        numbers = tuple(number for _, number in node.next_functions)
        if any(numbers):  # outputs of unbind and split
            routes.append(numbers)
        if name == COPY_SLICES:
            node = _C.into_slice(node) if NATIVE else None
            name = node.name() if node is not None else ""
            routes += [] if name else [None]
        if name in READS or name in WRITES:
            indices = [*_indices(node, name, n)]
            has_choice = has_choice or bool(indices)
            routes += indices
        if name in OFFSETS and not _is_table(node.next_functions[0][0]):
            has_choice = True
            routes += [_saved(node, key) for key in OFFSETS[name]]
        if name in POSITION_NAMES:
            routes.append(tuple(getattr(node, f"_saved_{key}") for key in POSITION_NAMES[name]))
    return [*sorted(notes), *(routes if has_choice else ())]


def same_routes(one: Sequence[Any], other: Sequence[Any]) -> bool:
    return len(one) == len(other) and all(map(_is_same, one, other))


def _is_same(a: Any, b: Any) -> bool:
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        return a.shape == b.shape and torch.equal(a, b)
    return a is not None and type(a) is type(b) and bool(a == b)


def _joins_samples(node: Node, n: int) -> bool:
    """Return True if the pieces may be samples: along the first dimension pieces of any size may be
    (graphs), along others only if the size of the whole allows it."""
    whole = shape_of(node, 0)
    if node.name() == "CatBackward0" and any(
        child and shape_of(child, number) == whole for child, number in node.next_functions
    ):
        return False  # one piece is the whole: the others are empty, as a cache at its start
    return _dim(node) == 0 or _may_hold(whole, _dim(node), n)


def _dim(node: Node) -> int:
    """Return the dimension that a node works along."""
    return to_signed(getattr(node, "_saved_dim", 0))


def _indices(node: Node, name: str, n: int) -> Iterator[Tensor | None]:
    """Yield the saved indices that may select samples; None where they are saved through hooks."""
    operand = node.next_functions[0]
    if name in READS and operand[0] is not None:
        if _is_table(operand[0]):
            return
        shape = shape_of(*operand)
    else:
        shape = shape_of(node, 0)
    key = next(key for key in INDEX_NAMES if hasattr(type(node), f"_raw_saved_{key}"))
    raw = getattr(node, f"_raw_saved_{key}")
    raw = [*raw] if isinstance(raw, (list, tuple)) else [raw]
    dim = _dim(node) % max(1, len(shape))
    if hooked := [dim + k for k, t in enumerate(raw) if is_hooked(t)]:
        end = dim + 1 if key != "indices" else len(shape)  # a mask is for several dimensions
        if name in ANY_DIM or any(_may_hold(shape, d, n) for d in range(hooked[0], end)):
            yield None
        return
    value = getattr(node, f"_saved_{key}")
    for index in value if isinstance(value, (list, tuple)) else [value]:
        if index is None:
            dim += 1
            continue
        covered = index.dim() if index.dtype in (torch.bool, torch.uint8) else 1
        if name in ANY_DIM or any(_may_hold(shape, d, n) for d in range(dim, dim + covered)):
            yield _by_sample(index, n)
        dim += covered


def _saved(node: Node, key: str) -> Tensor | bool | None:
    """Return a copy of a saved tensor; None if it is saved through hooks, False if it is absent."""
    if getattr(getattr(node, f"_raw_saved_{key}"), "unpack_hook", None) is not None:
        return None
    value = getattr(node, f"_saved_{key}")
    return False if value is None else value.detach().clone()


def _may_hold(shape: Sequence[int], dim: int, n: int) -> bool:
    """Return True if a dimension may hold samples.
    That is the first one if its size is a multiple of N, or off by one row (padding); the second
    one if its size is a multiple of N and that of the first is not N; and any one of size N."""
    dim %= max(1, len(shape))
    first = dim == 0 and bool(shape) and min(shape[0] % n, -shape[0] % n) <= 1
    second = dim == 1 and shape[0] != n and shape[1] % n == 0
    return first or second or (bool(shape) and shape[dim] == n)


def _is_table(node: Node) -> bool:
    """Return True for a parameter, also if it is transposed or cast, as in an embedding adapter."""
    while node.name() in TRANSPOSES and node.next_functions[0][0] is not None:
        node = node.next_functions[0][0]
    return is_leaf(node)


def _by_sample(index: Tensor, n: int) -> Tensor:
    """Return a copy of an index, or the count per sample [N] of a mask whose first dimension is N:
    only the counts decide which rows a sample gets."""
    if index.dtype is torch.bool and index.dim() > 1 and index.shape[0] == n:
        return index.flatten(1).sum(1)
    return index.detach().clone()
