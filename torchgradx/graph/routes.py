"""Which rows go where, as far as a batch's own values choose it: x[mask], packed sequences, pieces.

With the sizes the same, another batch may send other samples' rows there. What was proven of a
structure with such operations holds for the batches that choose as the proven one did.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from .. import ops
from .nodes import Node, is_leaf, nodes_below, shape_of, to_signed

if ops.NATIVE:
    from .. import _C

# Nodes that take rows from their operand, or put rows into what they make; what they save of these.
TAKES = {f"{name}Backward0" for name in (
    "Embedding", "EmbeddingBag", "Gather", "Index", "IndexSelect", "MaskedSelect",
    "PackPaddedSequence", "Sort", "Take", "Topk",
)} | {"SortBackward1"}  # fmt: skip
PUTS = {f"{name}Backward0" for name in (
    "IndexAdd", "IndexCopy", "IndexPut", "IndexPutImpl", "IndexReduce", "MaskedScatter", "Put",
    "Scatter", "ScatterAdd", "ScatterReduce",
)}  # fmt: skip
INDEX_NAMES = ("index", "indices", "mask", "result1")
ENDS = {"EmbeddingBagBackward0": ("offsets",), "SegmentReduceBackward0": ("lengths", "offsets")}
TURNS = {"CloneBackward0", "PermuteBackward0", "TBackward0", "ToCopyBackward0",
         "TransposeBackward0"}  # fmt: skip
JOINS = {"CatBackward0", "SelectScatterBackward0", "SliceScatterBackward0",
         "SplitWithSizesBackward0", "StackBackward0"}  # fmt: skip
INTO_SLICES = "torch::autograd::CopySlices"
PLACES = {
    "SelectBackward0": ("dim", "index"),
    "SelectScatterBackward0": ("dim", "index"),
    "SliceBackward0": ("dim", "start", "end"),
    "SliceScatterBackward0": ("dim", "start", "end"),
    "SplitWithSizesBackward0": ("split_sizes",),
}
ALL = {"MaskedScatterBackward0", "MaskedSelectBackward0", "PackPaddedSequenceBackward0",
       "PutBackward0", "TakeBackward0"}  # whatever the dimension  # fmt: skip


def routes_of(outputs: Iterable[Tensor], n: int, by_row: Mapping[Node, Any]) -> list[Any]:
    """Return what this graph's batch chose; empty: nothing. None in it: it was not seen.

    by_row: nodes by which each sample's rows stay its own, whatever was chosen, and what they are
    of: a string each, that says nothing of the choice.
    """
    found: list[Any] = []
    chosen, kept = False, set()
    for node in nodes_below(t.grad_fn for t in outputs if t.grad_fn is not None) if n > 1 else ():
        name = node.name()
        if node in by_row:
            kept.add(f"by row in {by_row[node]}")
            continue
        if name == INTO_SLICES or (name in JOINS and _joins_samples(node, n)):
            chosen = True
            found.append(tuple(shape_of(*edge) for edge in node.next_functions if edge[0]))
        if any(number for _, number in node.next_functions):  # rows of what was unbound, or split
            found.append(tuple(number for _, number in node.next_functions))
        if name == INTO_SLICES:
            node = _C.into_slice(node) if ops.NATIVE else None
            name = node.name() if node is not None else ""
            found += [] if name else [None]
        if name in TAKES or name in PUTS:
            parts = [*_chosen(node, name, n)]
            chosen = chosen or bool(parts)
            found += parts
        if name in ENDS and not _is_table(node.next_functions[0][0]):
            chosen = True
            found += [_saved(node, key) for key in ENDS[name]]
        if name in PLACES:
            found.append(tuple(getattr(node, f"_saved_{key}") for key in PLACES[name]))
    return [*sorted(kept), *(found if chosen else ())]


def same_routes(one: Sequence[Any], other: Sequence[Any]) -> bool:
    return len(one) == len(other) and all(map(_same, one, other))


def _same(a: Any, b: Any) -> bool:
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        return a.shape == b.shape and torch.equal(a, b)
    return a is not None and type(a) is type(b) and bool(a == b)


def _joins_samples(node: Node, n: int) -> bool:
    """Return True if pieces may be samples: of any length along the first dimension, as graphs."""
    whole = shape_of(node, 0)
    if node.name() == "CatBackward0" and any(
        child and shape_of(child, number) == whole for child, number in node.next_functions
    ):
        return False  # one piece is all of it, as of a cache that is empty
    return _dim(node) == 0 or _may_hold(shape_of(node, 0), _dim(node), n)


def _dim(node: Node) -> int:
    """Return the dimension that a node works along."""
    return to_signed(getattr(node, "_saved_dim", 0))


def _chosen(node: Node, name: str, n: int) -> Iterator[Tensor | None]:
    """Return a node's saved indices that may hold samples; None where hooks keep them."""
    operand = node.next_functions[0]
    if name in TAKES and operand[0] is not None:
        if _is_table(operand[0]):
            return
        shape = shape_of(*operand)
    else:
        shape = shape_of(node, 0)
    key = next(key for key in INDEX_NAMES if hasattr(type(node), f"_raw_saved_{key}"))
    raw = getattr(node, f"_raw_saved_{key}")
    raw = [*raw] if isinstance(raw, (list, tuple)) else [raw]
    dim = _dim(node) % max(1, len(shape))
    hooked = any(getattr(t, "unpack_hook", t) is not None for t in raw)
    if hooked:
        if name in ALL or any(_may_hold(shape, d, n) for d in range(dim, dim + len(raw))):
            yield None
        return
    value = getattr(node, f"_saved_{key}")
    for index in value if isinstance(value, (list, tuple)) else [value]:
        if index is None:
            dim += 1
            continue
        covered = index.dim() if index.dtype in (torch.bool, torch.uint8) else 1
        if name in ALL or any(_may_hold(shape, d, n) for d in range(dim, dim + covered)):
            yield _by_sample(index, n)
        dim += covered


def _saved(node: Node, key: str) -> Tensor | bool | None:
    """Return a copy of what a node saved; None: hooks keep it, as above; False: there is none."""
    if getattr(getattr(node, f"_raw_saved_{key}"), "unpack_hook", None) is not None:
        return None
    value = getattr(node, f"_saved_{key}")
    return False if value is None else value.detach().clone()


def _may_hold(shape: Sequence[int], dim: int, n: int) -> bool:
    """Return True if a dimension may hold samples: the first, with their rows and perhaps a row of
    padding; the second, if the first has another size than N; or one of size N."""
    dim %= max(1, len(shape))
    first = dim == 0 and bool(shape) and min(shape[0] % n, -shape[0] % n) <= 1
    second = dim == 1 and shape[0] != n and shape[1] % n == 0
    return first or second or (bool(shape) and shape[dim] == n)


def _is_table(node: Node) -> bool:
    """Return one of the model's own, as it is or turned, as an adapter's of an embedding."""
    while node.name() in TURNS and node.next_functions[0][0] is not None:
        node = node.next_functions[0][0]
    return is_leaf(node)


def _by_sample(index: Tensor, n: int) -> Tensor:
    """Return a mask's count for each sample, where samples come first in order."""
    if index.dtype is torch.bool and index.dim() > 1 and index.shape[0] == n:
        return index.flatten(1).sum(1)
    return index.detach().clone()
