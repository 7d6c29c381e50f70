"""Owners: the sample of each row of a graph's tensors, read off the graph from the outputs down.

Gradients flow down: a row's gradient belongs to a sample if all that consumed the row belongs to
it. Nodes that keep rows pass the owners on. Indexing, gathering and scattering map them by the
saved indices, so that a connection between two samples shows in every pass. Other nodes (attention,
products over rows) are trusted here, and weighted backwards prove them (proof/segments.py).

Owners are a Tensor [rows] of samples; N means "no sample". The rows are the leading dimensions of a
tensor, as many of them as multiply to len(owners).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any

import torch
from torch import Tensor

from ..extension import _C, NATIVE
from .indices import LOOKUP, READING, positions_of, saved_dim, selected_by
from .layout import nodes_in_order, read_flags
from .nodes import COPY_SLICES, Edge, Node, is_leaf, shape_of, to_signed
from .sizes import counts_of, leading
from .unpacking import saved_value

Sizes = Sequence[int]
Outs = dict[int, "Owned"]  # by the outputs of a node
BROADCASTING = ("AddB", "Addc", "Sub", "Mul", "Div", "Where", "Max", "Min", "Pow", "Lerp", "Rsub")
MAX_FLAGS = 8  # of one output
ATTENTION = "ScaledDotProduct"  # how the names of its nodes begin
BMM = "BmmBackward0"
# The operand of a product that has the rows of the output.
ROWS_OPERAND = {"AddmmBackward0": 1, "BaddbmmBackward0": 1, BMM: 0,
                "GroupedMmBackward0": 0, "LinearBackward0": 0, "MmBackward0": 0, "MvBackward0": 0,
                "torchgradx::LayerBackward": 0}  # fmt: skip


@dataclass(frozen=True)
class Owned:
    """Owners of the rows of one output of a node, and how they were found."""

    owners: Tensor  # [rows]
    path: int  # hash of the nodes from the model's outputs to here
    flags: tuple[Tensor, ...] = ()  # bool []: if one is True, a row here belongs to several samples


def owners_below(
    outputs: Iterable[Tensor],
    heads: dict[Edge, Owned],
    n: int,
    grid: Sizes,
    has_rows: Callable[[Node], bool],
) -> tuple[dict[Edge, Owned], Counter[Edge], set[str], Tensor | None]:
    """Return the owners by edge, from how many of its consumers they came, the names of the graph's
    nodes, and the first attention mask. heads: the owners of the outputs. grid: the sizes of the
    rows of the model's inputs. has_rows: whether what a node made has rows of a layer's."""
    walk = _Walk(n, tuple(grid), {}, has_rows)
    walk.found.update(heads)
    names: set[str] = set()
    first_mask: Tensor | None = None
    for node in nodes_in_order(outputs):
        name = node.name()
        if name.startswith(ATTENTION):
            saved = (saved_value(node, key) for key in ("attn_mask", "attn_bias"))
            mask = next((mask for mask in saved if mask is not None), None)
            name = f"{name} {mask is not None}"
            first_mask = mask if first_mask is None else first_mask
        names.add(name)
        if not is_leaf(node):
            walk.descend(node)
    return walk.found, walk.consumers, names, first_mask


def owners_within(
    end: Edge, rows: Tensor, nodes: Iterable[Node], n: int, grid: Sizes, only: Mapping[Node, int]
) -> dict[Edge, Owned]:
    """Return the owners by edge among `nodes`, which lie below the edge `end`.
    rows: the owners of `end`, whose rows have the sizes `grid`. only: for nodes with a parameter as
    an operand, the operand that has the rows."""
    walk = _Walk(n, tuple(grid), only)
    walk.found[end] = Owned(rows, 0)
    for node in sorted(nodes, key=lambda node: -node._sequence_nr()):
        walk.descend(node)
    return walk.found


def set_flags(owned: Iterable[Owned | None]) -> set[int]:
    """Return the ids of the flags that are True, with one read for all."""
    flags = list({id(flag): flag for one in owned if one for flag in one.flags}.values())
    return {id(flag) for flag, on in zip(flags, read_flags(flags), strict=True) if on}


def owners_by(owned: Owned, shape: Sizes, rows: Sizes) -> Tensor | None:
    """Return owners of an output [*shape] for rows of the sizes `rows`, which may be finer than the
    known ones; None if they do not fit."""
    length, count = len(owned.owners), prod(rows)
    if length == count:
        return owned.owners
    is_finer = (
        length and count % length == 0 and length in counts_of(shape) and length in counts_of(rows)
    )
    return owned.owners.repeat_interleave(count // length) if is_finer else None


class _Walk:
    """Owners found so far, on the way down."""

    def __init__(self, n: int, grid: Any, only: Mapping[Node, int], has_rows: Any = bool) -> None:
        self._n, self._grid, self._only, self._of_layers = n, grid, only, has_rows
        self.found: dict[Edge, Owned] = {}
        self.consumers = Counter[Edge]()  # of which the owners of an edge are known

    def descend(self, node: Node) -> None:
        """Find the owners of a node's operands from those of its outputs."""
        outs = {k: self.found.pop((node, k)) for k in range(len(node._input_metadata))
                if (node, k) in self.found}  # fmt: skip
        if not outs:
            return
        self.found.update(((node, k), out) for k, out in outs.items())  # before its operands
        name = node.name()
        usual = _Walk.cross_attention if name.startswith(ATTENTION) else _Walk.cross_rowwise
        rule = OWNER_RULES.get(name, usual)
        for operand, (child, number) in enumerate(node.next_functions):
            if child is None or is_leaf(child) or not self._has_rows(node, name, operand):
                continue
            shape = shape_of(child, number)
            found = list(rule(self, node, outs, operand, shape))
            self.consumers[child, number] += bool(found)
            for owned in found:
                path = hash((name, operand, owned.path))
                self._merge((child, number), shape, Owned(owned.owners, path, owned.flags))

    def _has_rows(self, node: Node, name: str, operand: int) -> bool:
        """Return False for an operand without the rows of the output, or times the number 0."""
        is_mul = name == "MulBackward0" and node.next_functions[1][0] is None
        by = saved_value(node, "other") if is_mul else None
        if by is not None and by.is_cpu and not by.dim() and not by:
            return False
        only = self._only.get(node, ROWS_OPERAND.get(name))
        if only is None or operand == only or (name == BMM and node not in self._only):
            return True
        is_data = name == "MmBackward0" and node.next_functions[0][0] is None  # a matrix @ rows
        return is_data and self._of_layers(node.next_functions[operand][0])

    def _merge(self, edge: Edge, shape: Sizes, new: Owned) -> None:
        """Note an edge's owners, on its device. Those that another path found must agree."""
        (node, number), old = edge, self.found.get(edge)
        new = replace(new, owners=new.owners.to(node._input_metadata[number].device))
        flags = tuple(dict.fromkeys((*(old.flags if old else ()), *new.flags)))
        if len(flags) > MAX_FLAGS:
            flags = (torch.stack([flag.to(flags[0].device) for flag in flags]).any(),)
        if old is None or old.owners is new.owners:
            self.found[edge] = Owned(new.owners, new.path if old is None else old.path, flags)
            return
        longest = max(len(old.owners), len(new.owners))
        rows = shape[: max(0, leading(shape, longest))]
        a, b = owners_by(old, shape, rows), owners_by(new, shape, rows)
        if a is None or b is None:
            return
        flag = ((a != b) & (a != self._n) & (b != self._n)).any()
        self.found[edge] = Owned(torch.minimum(a, b), old.path, (*flags, flag))

    # Rules. Each yields the owners of an operand [*shape] from those of the node's outputs.

    def cross_rowwise(self, node: Node, outs: Outs, operand: int, shape: Sizes) -> Iterator[Owned]:
        """Cross a node that keeps rows, or broadcasts some of them."""
        elementwise = node.name().startswith(BROADCASTING) or node.name() == "ExpandBackward0"
        for number, out in outs.items():
            made, length = shape_of(node, number), len(out.owners)
            padded = list(shape)
            if elementwise:
                padded = [1] * (len(made) - len(shape)) + padded
            dims = leading(made, length)
            if length < 2 or (length in counts_of(padded) and padded[:dims] == list(made[:dims])):
                yield out
            elif elementwise and dims >= 0 and len(padded) == len(made):
                yield self._reduce(out, made[:dims], padded)
            elif not elementwise and dims >= 0:
                finer = [c for c in counts_of(shape) if c % length == 0 and c in counts_of(made)]
                if finer:
                    yield replace(out, owners=out.owners.repeat_interleave(finer[0] // length))
                elif dims > 1 and length // made[dims - 1] in counts_of(shape):
                    yield self._coarsen(out, made, dims - 1)

    def _reduce(self, out: Owned, rows: Sizes, padded: Sizes) -> Owned:
        """Return the owners of a broadcast operand [*padded]: all rows that it is broadcast to must
        belong to one sample."""
        owners, flags = out.owners.view(list(rows)), out.flags
        for dim, size in enumerate(rows):
            if padded[dim] == 1 and size > 1:
                least = owners.amin(dim, True)
                flags = (*flags, ((owners != least) & (owners != self._n)).any())
                owners = least
        return Owned(owners.flatten(), out.path, flags)

    def _coarsen(self, out: Owned, made: Sizes, kept: int) -> Owned:
        """Return the owners of the rows made[:kept], where they are known of finer ones."""
        rows = made[: max(0, leading(made, len(out.owners)))]
        padded = [*rows[:kept], *[1] * len(rows[kept:])]
        return self._reduce(out, rows, padded) if 0 <= kept < len(rows) else out

    def _on_rows(self, out: Owned, made: Sizes, dim: int) -> Tensor | None:
        """Return owners [*made[:k]] with dim < k; None if `dim` has features, not rows, so that
        nothing moves between samples along it."""
        dims = leading(made, len(out.owners))
        if dims == dim < len(self._grid) and made[dim] == 1:  # one row of each line
            dims += 1
        if dims > dim:
            return out.owners.view(list(made[:dims]))
        rows = dim + 1 if dim == 0 or tuple(made[: len(self._grid)]) == self._grid else 0
        if rows <= dim or dim >= max(1, len(self._grid)):
            return None
        owners = owners_by(out, made, made[:rows])
        return None if owners is None else owners.view(list(made[:rows]))

    def cross_permute(self, node: Node, outs: Outs, operand: int, shape: Sizes) -> Iterator[Owned]:
        for out in outs.values():
            if node.name() == "PermuteBackward0":
                order = [to_signed(d) % len(shape) for d in node._saved_dims]
            else:
                order = list(range(len(shape)))
                a, b = (saved_dim(node, shape, key) for key in ("dim0", "dim1"))
                order[a], order[b] = b, a
            made = [shape[d] for d in order]
            known = leading(made, len(out.owners))
            may_pack = len(self._grid) > 1 and tuple(made[:2]) == self._grid  # a line [T]
            least = max(0, known - 1) if may_pack else 0
            closed = (k for k in range(known, least, -1) if max(order[:k]) < k)
            dims = next(closed, 0 if known == 0 else -1)
            out, inverse = self._coarsen(out, made, dims), [order.index(d) for d in range(dims)]
            if dims >= 0 and inverse == list(range(dims)):
                yield out
            elif dims > 0:
                owners = out.owners.view(made[:dims]).permute(inverse).flatten()
                yield Owned(owners, out.path, out.flags)

    def cross_product(self, node: Node, outs: Outs, operand: int, shape: Sizes) -> Iterator[Owned]:
        """Cross a matrix product. Of a square matrix of data with rows, each entry joins two."""
        for out in self.cross_rowwise(node, outs, operand, shape):
            joins, own = saved_value(node, "self") if operand else None, out.owners
            if joins is not None and [*joins.shape] == [len(own)] * 2:
                mixes = (joins != 0) & (own[:, None] != own) & (own[:, None] != self._n)
                out = Owned(own, out.path, (*out.flags, mixes.any()))
            yield out

    def cross_turned(self, node: Node, outs: Outs, operand: int, shape: Sizes) -> Iterator[Owned]:
        """Cross a node that rolls or flips dimensions, not a roll of all elements in one."""
        out, dims = outs[0], [to_signed(d) % max(1, len(shape)) for d in node._saved_dims]
        owners = out.owners.view(list(shape[: max(0, leading(shape, len(out.owners)))]))
        for k, dim in enumerate(dims):
            if dim < owners.dim() and node.name() == "FlipBackward0":
                owners = owners.flip(dim)
            elif dim < owners.dim():
                owners = owners.roll(-to_signed(node._saved_shifts[k]), dim)
        if dims:
            yield Owned(owners.flatten(), out.path, out.flags)

    def cross_batched(self, node: Node, outs: Outs, operand: int, shape: Sizes) -> Iterator[Owned]:
        """Cross a product of matrices [B, *]: the second ones have the owners of whole products."""
        if operand == 0:
            yield from self.cross_rowwise(node, outs, operand, shape)
        elif len(outs[0].owners) == shape[0]:
            yield outs[0]

    def cross_attention(
        self, node: Node, outs: Outs, operand: int, shape: Sizes
    ) -> Iterator[Owned]:
        """Cross attention [B, *]. A row that no output was made of, as that of a class token, is
        seen by the others of its line: it is of their sample; they must be of one then."""
        for out in self.cross_rowwise(node, outs, operand, shape):
            if len(out.owners) % shape[0] == 0:
                lines = out.owners.view(shape[0], -1)
                least = lines.amin(1, True)
                others = ((lines != least) & (lines != self._n)).any(1, True)
                mixes = (others & (lines == self._n)).any()
                owners = torch.where(lines == self._n, least, lines).flatten()
                out = Owned(owners, out.path, (*out.flags, mixes))
            yield out

    def cross_part(self, node: Node, outs: Outs, operand: int, shape: Sizes) -> Iterator[Owned]:
        """Cross a node whose outputs are parts of its operand; other rows are of no sample."""
        dim, start = saved_dim(node, shape), 0
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
                    yield from outs.values()
                    return
                if rows is None:
                    sizes = [*owners.shape[:dim], shape[dim], *owners.shape[dim + 1 :]]
                    rows = owners.new_full(sizes, self._n)
                if owners.shape[dim + 1 :] != rows.shape[dim + 1 :]:
                    return
                positions = positions_of(node, start, made[dim], shape[dim])
                rows.index_copy_(dim, positions.to(rows.device), owners)
                flags += out.flags
            start += made[dim]
        if rows is not None:
            yield Owned(rows.flatten(), next(iter(outs.values())).path, flags)

    def cross_concat(self, node: Node, outs: Outs, operand: int, shape: Sizes) -> Iterator[Owned]:
        out, made = outs[0], shape_of(node, 0)
        dim, dims = saved_dim(node, made), leading(made, len(out.owners))
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
                return  # the graph has no sizes of pieces that need no gradient
            start = sum(filter(None, before))
            if None in before:
                start = made[dim] - sum(filter(None, after)) - shape[dim]
            part = owners.narrow(dim, start, shape[dim])
        yield Owned(part.flatten(), out.path, out.flags)

    def cross_indexed(self, node: Node, outs: Outs, operand: int, shape: Sizes) -> Iterator[Owned]:
        """Cross a node that reads or writes rows by index.
        A row belongs to the sample that reads it, or to that of the place it is written to."""
        out, made, writes = outs[0], shape_of(node, 0), node.name() not in {*READING, LOOKUP}
        if writes and operand == 0:
            yield out
            return
        sizes = made if writes else shape
        dim, selection = selected_by(node, sizes, self._grid)
        if selection is None:
            return
        index, size, dims, flags = selection
        kept = dim if dims < 0 else leading(made, size) if writes else dims
        out = self._coarsen(out, made, kept)
        owners = None if dims < 0 else owners_by(out, made, made[:kept])
        if dims < 0:
            yield out
        elif owners is None or len(owners) != (size if writes else len(index)):
            return
        elif not writes:
            if node.name() == LOOKUP:  # its padding receives no gradient
                padding = to_signed(node._saved_padding_idx)
                owners = owners.masked_fill(index == padding, self._n)
            least = owners.new_full([size], self._n).scatter_reduce_(0, index, owners, "amin")
            mixes = ((least[index] != owners) & (owners != self._n)).any()
            yield Owned(least, out.path, (*out.flags, *flags, mixes))
        elif len(index) in counts_of(shape):
            yield Owned(owners[index], out.path, (*out.flags, *flags))

    def cross_written(self, node: Node, outs: Outs, operand: int, shape: Sizes) -> Iterator[Owned]:
        """Cross a node that wrote into a slice as the operation that wrote, if it has whole rows:
        its output has the owners of these."""
        out, made = outs[0], shape_of(node, 0)
        row = made[max(0, leading(made, len(out.owners))) :]
        inner = _C.into_slice(node) if NATIVE and operand and prod(row) else None
        if inner is not None and (found := _C.slice_of(node)) is not None:
            sizes, strides, start = found
            dims, whole = len(sizes) - len(row), torch.empty(row, device="meta")
            is_whole = [*row] == sizes[dims:] and [*whole.stride()] == strides[dims:]
            each = [step // prod(row) for step in (*strides[:dims], start)]
            if dims > 0 and is_whole and [e * prod(row) for e in each] == [*strides[:dims], start]:
                owners = out.owners.clone().as_strided(sizes[:dims], each[:-1], each[-1])
                rule = OWNER_RULES.get(inner.name(), _Walk.cross_rowwise)
                of_slice = Owned(owners.flatten(), out.path, out.flags)
                yield from rule(self, inner, {0: of_slice}, operand, shape)
                return
        yield from self.cross_rowwise(node, outs, operand, shape)


OwnerRule = Callable[[_Walk, Node, Outs, int, Sizes], Iterator[Owned]]
OWNER_RULES: dict[str, OwnerRule] = {
    f"{name}Backward0": rule
    for rule, names in {
        _Walk.cross_permute: ("Transpose", "Permute"),
        _Walk.cross_batched: ("Bmm",), _Walk.cross_product: ("Mm",),
        _Walk.cross_turned: ("Flip", "Roll"),
        _Walk.cross_part: ("Select", "Slice", "Split", "SplitWithSizes", "Unbind", "UnsafeSplit"),
        _Walk.cross_concat: ("Cat", "Stack"),
        _Walk.cross_indexed: ("Gather", "Index", "IndexSelect", "IndexAdd", "IndexCopy", "IndexPut",
                              "IndexPutImpl", "IndexReduce", "MaskedScatter", "Scatter",
                              "ScatterAdd", "ScatterReduce"),
    }.items()
    for name in names
}  # fmt: skip
# Nodes that move rows by index.
MAPPING = {name for name, rule in OWNER_RULES.items() if rule is _Walk.cross_indexed}
OWNER_RULES |= {LOOKUP: _Walk.cross_indexed, COPY_SLICES: _Walk.cross_written}
