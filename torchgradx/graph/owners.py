"""The sample of each row of a graph's tensors, read off the graph from the outputs down.

Gradients flow down: a row's gradient is its sample's if all that was made from it is that sample's.
Nodes that keep rows pass the owners on; indexing, gathering and scattering map them by the indices
that their nodes saved, so that an edge between two samples shows in every pass. What a node of
another kind does with rows (attention, a product over them) is taken on trust here, and proven by
weighted backwards (segments.py). Owners are [rows], of the leading dimensions; N: of no sample.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch import Tensor

from .layout import nodes_in_order
from .nodes import Node, is_leaf, shape_of, to_signed

Sizes = Sequence[int]
Outs = dict[int, "Owned"]  # by output of a node
BROADCASTING = ("Add", "Sub", "Mul", "Div", "Where", "Max", "Min", "Pow", "Lerp", "Rsub")
FAINT = -1e4  # what is added to the scores of a pair that attention leaves out is less
# the operand that has the rows of what a product makes
ROWS_OPERAND = {"AddmmBackward0": 1, "BaddbmmBackward0": 1, "BmmBackward0": 0, "LinearBackward0": 0,
            "GroupedMmBackward0": 0, "MmBackward0": 0, "torchgradx::LayerBackward": 0}  # fmt: skip


@dataclass(frozen=True)
class Owned:
    """Owners of an output's rows, and how they were found."""

    owners: Tensor  # [L], the product of some leading dimensions
    path: int  # hash of the nodes from the model's outputs to here
    flags: tuple[Tensor, ...] = ()  # bool [] each: rows here are of several samples


def owners_below(
    outputs: Iterable[Tensor], heads: dict[tuple[Node, int], Owned], n: int, grid: Sizes
) -> tuple[dict[tuple[Node, int], Owned], set[str], list[Tensor]]:
    """Return owners by node and output, the names of the graph's nodes, the first attention's mask.

    heads: what is known of the outputs. grid: the sizes of the rows of the model's inputs.
    """
    walk = _Walk(n, tuple(grid))
    walk.found.update(heads)
    names: set[str] = set()
    masks: list[Tensor] = []
    for node in nodes_in_order(outputs):
        name = node.name()
        if name.startswith("ScaledDotProduct"):
            mask = mask_of(node)
            name = f"{name} {mask is not None}"
            masks = masks or ([] if mask is None else [mask])
        names.add(name)
        if not is_leaf(node):
            walk.descend(node)
    return walk.found, names, masks


def owners_within(
    end: tuple[Node, int],
    rows: Tensor,
    nodes: Iterable[Node],
    n: int,
    grid: Sizes,
    only: Mapping[Node, int],
) -> dict[tuple[Node, int], Owned]:
    """Return owners by node and output among the nodes below an output of these rows [*grid].

    only: the operand with the rows, of nodes that have a parameter in another.
    """
    walk = _Walk(n, tuple(grid), only)
    walk.found[end] = Owned(rows, 0)
    for node in sorted(nodes, key=lambda node: -node._sequence_nr()):
        walk.descend(node)
    return walk.found


def owners_by(owned: Owned, shape: Sizes, rows: Sizes) -> Tensor | None:
    """Return owners of an output [*shape] by rows [*rows], which are not fewer; or None."""
    length, count = len(owned.owners), prod(rows)
    if length == count:
        return owned.owners
    finer = count % length == 0 and length in _products(shape) and length in _products(rows)
    return owned.owners.repeat_interleave(count // length) if finer else None


def _products(shape: Sizes) -> list[int]:
    found = [1]
    for size in shape:
        found.append(found[-1] * size)
    return found


def _dims(shape: Sizes, length: int) -> int:
    """Return how many leading dimensions have so many rows; -1: none."""
    return next((k for k, rows in enumerate(_products(shape)) if rows == length), -1)


def saved_value(node: Node, key: str) -> Any:
    """Return what a node saved; None where hooks keep it, or where it is not there."""
    raw = getattr(node, f"_raw_saved_{key}", None)
    several = raw if isinstance(raw, (list, tuple)) else [raw]
    if any(getattr(one, "unpack_hook", None) is not None for one in several):
        return None
    return getattr(node, f"_saved_{key}", None)


def mask_of(node: Node) -> Tensor | None:
    """Return the mask of a node of scaled dot-product attention."""
    masks = (saved_value(node, key) for key in ("attn_mask", "attn_bias"))
    return next((mask for mask in masks if mask is not None), None)


def mask_joins(mask: Tensor, owners: Tensor, n: int) -> Tensor | None:
    """Return whether a mask lets rows [B, T] see those of another sample; None: it has no pairs."""
    if mask.dim() < 2 or mask.shape[-2:] != (owners.shape[1],) * 2:
        return None
    if mask.dim() > 2 and mask.shape[0] not in (1, len(owners)):
        return None
    allowed = mask if mask.dtype is torch.bool else mask > FAINT
    allowed = allowed.view(*[1] * (4 - mask.dim()), *mask.shape) if mask.dim() < 4 else allowed
    by, of = owners[:, None, :, None], owners[:, None, None, :]
    return (allowed & (by != of) & (by != n)).any()


class _Walk:
    def __init__(
        self, n: int, grid: tuple[int, ...], only: Mapping[Node, int] | None = None
    ) -> None:
        self.n, self._grid, self._only = n, grid, only or {}
        self.found: dict[tuple[Node, int], Owned] = {}

    def descend(self, node: Node) -> None:
        outs = {k: self.found[node, k] for k in range(len(node._input_metadata))
                if (node, k) in self.found}  # fmt: skip
        if not outs:
            return
        name = node.name()
        rule = OWNER_RULES.get(name, _Walk.kept)
        for operand, (child, number) in enumerate(node.next_functions):
            if child is None or is_leaf(child) or not self._goes_on(node, name, operand):
                continue
            shape = shape_of(child, number)
            for owned in rule(self, node, outs, operand, shape):
                path = hash((name, operand, owned.path))
                self._merge((child, number), shape, Owned(owned.owners, path, owned.flags))

    def _goes_on(self, node: Node, name: str, operand: int) -> bool:
        only = self._only.get(node, ROWS_OPERAND.get(name))
        if only is None or operand == only:
            return True
        return name == "MmBackward0" and node.next_functions[0][0] is None  # by a matrix of data

    def _merge(self, key: tuple[Node, int], shape: Sizes, new: Owned) -> None:
        old = self.found.get(key)
        if old is None or old.owners is new.owners:
            flags = new.flags if old is None else tuple(dict.fromkeys((*old.flags, *new.flags)))
            self.found[key] = Owned(new.owners, new.path if old is None else old.path, flags)
            return
        longest = max(len(old.owners), len(new.owners))
        rows = shape[: max(0, _dims(shape, longest))]
        a, b = owners_by(old, shape, rows), owners_by(new, shape, rows)
        if a is None or b is None:
            return
        flag = ((a != b) & (a != self.n) & (b != self.n)).any()
        self.found[key] = Owned(torch.minimum(a, b), old.path, (*old.flags, *new.flags, flag))

    # Rules: owners of an operand [*shape], from those of a node's outputs

    def kept(self, node: Node, outs: Outs, operand: int, shape: Sizes) -> Iterator[Owned]:
        """Yield the owners of what the node makes, some of them broadcast perhaps."""
        elementwise = node.name().startswith(BROADCASTING) or node.name() == "ExpandBackward0"
        for number, out in outs.items():
            made, length = shape_of(node, number), len(out.owners)
            padded = list(shape)
            if elementwise:
                padded = [1] * (len(made) - len(shape)) + padded
            dims = _dims(made, length)
            if length == 1 or (length in _products(padded) and padded[:dims] == list(made[:dims])):
                yield out
            elif elementwise and dims >= 0 and len(padded) == len(made):
                yield self._narrowed(out, made[:dims], padded)
            elif not elementwise and dims >= 0:
                finer = [p for p in _products(shape) if p % length == 0 and p in _products(made)]
                rows = owners_by(out, made, made[: _dims(made, finer[0])]) if finer else None
                if rows is not None:
                    yield Owned(rows, out.path, out.flags)
                elif dims > 1 and length // made[dims - 1] in _products(shape):
                    yield self._narrowed(out, made[:dims], [*made[: dims - 1], 1])

    def _narrowed(self, out: Owned, rows: Sizes, padded: Sizes) -> Owned:
        """Return owners of what was broadcast: of the one sample that all rows are of."""
        owners, flags = out.owners.view(list(rows)), out.flags
        for dim, size in enumerate(rows):
            if padded[dim] == 1 and size > 1:
                least = owners.amin(dim, True)
                flags = (*flags, ((owners != least) & (owners != self.n)).any())
                owners = least
        return Owned(owners.flatten(), out.path, flags)

    def _on_rows(self, out: Owned, made: Sizes, dim: int) -> Tensor | None:
        """Return owners [*made[:k]], dim < k, where a dimension counts rows; None: it is one
        of features, along which nothing moves between samples."""
        dims = _dims(made, len(out.owners))
        if dims > dim:
            return out.owners.view(list(made[:dims]))
        rows = dim + 1 if dim == 0 or tuple(made[: len(self._grid)]) == self._grid else 0
        if rows <= dim or dim >= max(1, len(self._grid)):
            return None
        owners = owners_by(out, made, made[:rows])
        return None if owners is None else owners.view(list(made[:rows]))

    def _dim(self, node: Node, shape: Sizes, key: str = "dim") -> int:
        return to_signed(getattr(node, f"_saved_{key}")) % max(1, len(shape))

    def turned(self, node: Node, outs: Outs, operand: int, shape: Sizes) -> Iterator[Owned]:
        for out in outs.values():
            if node.name() == "PermuteBackward0":
                order = [to_signed(d) % len(shape) for d in node._saved_dims]
            else:
                order = list(range(len(shape)))
                a, b = (self._dim(node, shape, key) for key in ("dim0", "dim1"))
                order[a], order[b] = b, a
            made = [shape[d] for d in order]
            dims = _dims(made, len(out.owners))
            if dims < 0 or sorted(order[:dims]) != list(range(dims)):
                continue
            back = [order[:dims].index(d) for d in range(dims)]
            if back == list(range(dims)):
                yield out
            else:
                owners = out.owners.view(made[:dims]).permute(back).flatten()
                yield Owned(owners, out.path, out.flags)

    def viewed(self, node: Node, outs: Outs, operand: int, shape: Sizes) -> Iterator[Owned]:
        """Yield owners of an operand whose parts are outputs; what is left out is of no sample."""
        dim, start = self._dim(node, shape), 0
        rows: Tensor | None = None
        flags: tuple[Tensor, ...] = ()
        for number in range(len(node._input_metadata)):
            made = list(shape_of(node, number))
            if node.name() in ("SelectBackward0", "UnbindBackward0"):
                made.insert(dim, 1)
            out = outs.get(number)
            if out is not None:
                owners = self._on_rows(out, made, dim)
                if owners is None:
                    yield out
                    return
                if rows is None:
                    sizes = [*owners.shape[:dim], shape[dim], *owners.shape[dim + 1 :]]
                    rows = owners.new_full(sizes, self.n)
                if owners.shape[dim + 1 :] != rows.shape[dim + 1 :]:
                    return
                places = _along(node, start, made[dim], shape[dim])
                rows.index_copy_(dim, places.to(rows.device), owners)
                flags += out.flags
            start += made[dim]
        if rows is not None:
            yield Owned(rows.flatten(), next(iter(outs.values())).path, flags)

    def joined(self, node: Node, outs: Outs, operand: int, shape: Sizes) -> Iterator[Owned]:
        out, made = outs[0], shape_of(node, 0)
        dim, dims = self._dim(node, made), _dims(made, len(out.owners))
        if dims <= dim:
            yield out
            return
        owners = out.owners.view(list(made[:dims]))
        if node.name() == "StackBackward0":
            part = owners.select(dim, operand)
        else:
            sizes = [shape_of(*edge)[dim] if edge[0] else None for edge in node.next_functions]
            before, after = sizes[:operand], sizes[operand + 1 :]
            if None in before and None in after:
                return  # pieces that need no gradient have no sizes here
            start = sum(filter(None, before))
            if None in before:
                start = made[dim] - sum(filter(None, after)) - shape[dim]
            part = owners.narrow(dim, start, shape[dim])
        yield Owned(part.flatten(), out.path, out.flags)

    def taken(self, node: Node, outs: Outs, operand: int, shape: Sizes) -> Iterator[Owned]:
        """Yield owners of rows that are taken by index: each is of the sample it was taken for."""
        out, made = outs[0], shape_of(node, 0)
        places = self._places(node, shape)
        if places is None:
            return
        index, count, dims, flags = places
        if dims < 0:
            yield out  # along features
            return
        owners = owners_by(out, made, made[:dims])
        if owners is None or len(owners) != len(index):
            return
        rows = owners.new_full([count], self.n).scatter_reduce_(0, index, owners, "amin")
        mixed = ((rows[index] != owners) & (owners != self.n)).any()
        yield Owned(rows, out.path, (*out.flags, *flags, mixed))

    def put(self, node: Node, outs: Outs, operand: int, shape: Sizes) -> Iterator[Owned]:
        """Yield owners of rows that are put by index: each is of the sample of its new place."""
        out, made = outs[0], shape_of(node, 0)
        if operand == 0:
            yield out
            return
        places = self._places(node, made)
        if places is None:
            return
        index, count, dims, flags = places
        if dims < 0:
            yield out
            return
        owners = owners_by(out, made, made[: _dims(made, count)])
        if owners is not None and len(owners) == count and len(index) in _products(shape):
            yield Owned(owners[index], out.path, (*out.flags, *flags))

    def _places(
        self, node: Node, shape: Sizes
    ) -> tuple[Tensor, int, int, tuple[Tensor, ...]] | None:
        """Return rows of a tensor [*shape] that a node's indices name; the tensor's rows; as how
        many leading dimensions these are taken (or put), -1 where none is of rows; flags."""
        if hasattr(node, "_saved_indices"):
            return self._by_indices(saved_value(node, "indices"), shape)
        dim, index = self._dim(node, shape), saved_value(node, "index")
        if index is None:
            return None
        if dim >= max(1, len(self._grid)) or (dim == 1 and tuple(shape[:2]) != self._grid):
            return index, 0, -1, ()
        flags: tuple[Tensor, ...] = ()
        if index.dim() > dim + 1:  # gather and scatter: an index for each feature
            wide = index.flatten(dim + 1)
            if wide.stride(-1) and wide.shape[-1] > 1:
                flags = ((wide != wide[..., :1]).any(),)
            index = wide[..., 0]
        if dim == 0:
            return index.flatten() % max(1, shape[0]), shape[0], 1, flags
        lines = torch.arange(shape[0], device=index.device)[:, None] * shape[1]
        return (lines + index % max(1, shape[1])).flatten(), shape[0] * shape[1], 2, flags

    def _by_indices(
        self, indices: Any, shape: Sizes
    ) -> tuple[Tensor, int, int, tuple[Tensor, ...]] | None:
        if indices is None:
            return None
        leading = list(indices)
        while leading and leading[-1] is None:
            leading.pop()
        if not leading or leading[0] is None:
            return (torch.zeros(0), 0, -1, ()) if leading else None
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
        parts = list(torch.broadcast_tensors(*parts))
        rows = torch.zeros_like(parts[0])
        for part, size in zip(parts, shape, strict=False):
            rows = rows * size + part % max(1, size)
        return rows.flatten(), prod(shape[:covered]), rows.dim(), ()


def _along(node: Node, start: int, size: int, whole: int) -> Tensor:
    """Return the places of an output of a view along the dimension that it takes a part of.

    start: of what is split, where this output begins. whole: the operand's size.
    """
    step = 1
    if node.name() == "SelectBackward0":
        start = to_signed(node._saved_index) % whole
    elif node.name() == "SliceBackward0":
        start, step = to_signed(node._saved_start), node._saved_step
        start = max(0, start + whole if start < 0 else start)
    return torch.arange(start, start + size * step, step)


OwnerRule = Callable[[_Walk, Node, Outs, int, Sizes], Iterator[Owned]]
OWNER_RULES: dict[str, OwnerRule] = {
    f"{name}Backward0": rule
    for rule, names in {
        _Walk.turned: ("Transpose", "Permute"),
        _Walk.viewed: ("Select", "Slice", "Split", "SplitWithSizes", "Unbind", "UnsafeSplit"),
        _Walk.joined: ("Cat", "Stack"),
        _Walk.taken: ("Index", "IndexSelect", "Gather"),
        _Walk.put: ("IndexAdd", "IndexCopy", "IndexPut", "IndexPutImpl", "IndexReduce", "Scatter",
                    "ScatterAdd", "ScatterReduce"),
    }.items()
    for name in names
}  # fmt: skip
# Nodes that move rows by index
MAPPING = {name for name, rule in OWNER_RULES.items() if rule in (_Walk.taken, _Walk.put)}
