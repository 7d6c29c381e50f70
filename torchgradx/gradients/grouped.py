"""Per-sample gradients of a parameter [E, A, B] that holds E matrices, as rows of each matrix.

A pair is a sample n and a matrix e, with the number n*E + e.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from ..extension import NATIVE
from ..graph.nodes import Edge, Node, dtype_of, shape_of
from ..graph.segments import segments_from
from ..graph.sizes import row_dims
from ..plan.cost import CODES, plan, rounded
from ..plan.gpu import Problem, gpu_of
from ..reference.chunks import accumulation_dtype, add_rows
from . import products
from .by_sample import Factored, Gradients, along, in_full, size, sq_norms, total, weighted
from .elementwise import CAST, MV, elementwise_product, is_elementwise, is_transpose, sum_broadcast
from .outer import Outer, lookup_product

GROUPED = "GroupedMmBackward0"
MAX_PADDING = 2  # times as many rows, where samples have unequal numbers of them


class Pairs:
    """The pair of each row, and the number of rows of each pair.
    known: equal to `lengths`; a copy of them on the CPU avoids a wait for the device."""

    def __init__(self, count: int, matrices: int, of_rows: Tensor, lengths: Tensor) -> None:
        """count, matrices: N and E. of_rows: the pair of each row [R]; N*E for rows of no pair.
        lengths: the number of rows of each pair [N*E]."""
        self.count, self.matrices = count, matrices
        self.of_rows, self.lengths = of_rows, lengths
        self.known = lengths

    @staticmethod
    def of(owners: Tensor, matrix: Tensor, count: int, matrices: int) -> Pairs:
        """Return the pairs of rows. owners: the sample of each row [R], N for none. matrix: its
        matrix [R], E for none."""
        pairs = count * matrices
        has_none = (owners == count) | (matrix == matrices)
        of_rows = (owners * matrices + matrix).masked_fill(has_none, pairs)
        lengths = of_rows.new_zeros(pairs + 1)
        lengths = lengths.index_add_(0, of_rows, torch.ones_like(of_rows))[:pairs]
        return Pairs(count, matrices, of_rows, lengths)

    def joined(self, other: Pairs) -> Pairs:
        """Return the pairs of the rows of both, one after the other."""
        of_rows = torch.cat([self.of_rows, other.of_rows])
        return Pairs(self.count, self.matrices, of_rows, self.lengths + other.lengths)

    @cached_property
    def segments(self) -> tuple[Any, list[tuple[int, int]]]:
        """Return the rows of each pair as segments, and (length, pairs) of their runs."""
        counts = self.known.tolist()
        runs = sorted(Counter(length for length in counts if length).items())
        return segments_from(self.of_rows, len(counts), counts), runs

    def by_matrix(self, *operands: Tensor) -> list[tuple[Tensor, ...]]:
        """Return the rows of each matrix, in any of its pairs, for each operand."""
        matrix = self.of_rows % self.matrices + self.matrices * (self.of_rows == len(self.lengths))
        counts = self.known.view(self.count, self.matrices).sum(0)
        return split(matrix, counts.tolist(), *operands)


def split(groups: Tensor, counts: list[int], *operands: Tensor) -> list[tuple[Tensor, ...]]:
    """Return the rows of each group, for each operand. groups: of each row; counts: of the rows of
    each group, after which those of no group come."""
    order = groups.argsort(stable=True)
    rest = len(order) - sum(counts)
    return list(zip(*(t[order].split([*counts, rest]) for t in operands), strict=True))[:-1]


@dataclass(frozen=True)
class Grouped(Factored):
    """Gradients [N, E, A, B]; that of a pair is left^T right over the rows of the pair."""

    left: Tensor  # [R, A]
    right: Tensor  # [R, B]
    pairs: Pairs
    is_single: bool = False  # one matrix, with gradients [N, A, B]

    def __len__(self) -> int:
        return self.pairs.count

    def added(self, other: Gradients) -> Gradients:
        if not isinstance(other, Grouped) or other.pairs.matrices != self.pairs.matrices:
            return super().added(other)
        pairs = zip(self.operands, other.operands, strict=True)
        left, right = (torch.cat(pair) for pair in pairs)
        return replace(self, left=left, right=right, pairs=self.pairs.joined(other.pairs))

    def to(self, dtype: torch.dtype) -> Grouped:
        return replace(self, left=self.left.to(dtype), right=self.right.to(dtype))

    def transposed(self) -> Grouped:
        return replace(self, left=self.right, right=self.left)

    def of_biases(self) -> Tensor:
        """Return [N, E, B]: the sums of `right`, where `left` is ones."""
        wide = self.right.to(accumulation_dtype(self.dtype))
        full = wide.new_zeros(len(self.pairs.lengths) + 1, wide.shape[1])
        full = add_rows(full, self.pairs.of_rows, wide)[:-1].to(self.dtype)
        return full.view(self.pairs.count, self.pairs.matrices, -1)

    def in_full(self) -> Tensor:
        parts = split(self.pairs.of_rows, self.pairs.known.tolist(), *self.operands)
        full = torch.stack([left.mT @ right for left, right in parts])
        return full if self.is_single else full.unflatten(0, (len(self), self.pairs.matrices))

    def total(self) -> Tensor:
        return self._sum(*self.operands)

    def _sum(self, left: Tensor, right: Tensor) -> Tensor:
        """Return for each matrix left^T right over all its rows."""
        sums = [a.mT @ b for a, b in self.pairs.by_matrix(left, right)]
        return sums[0] if self.is_single else torch.stack(sums)

    def size(self) -> float:
        return float((self.left.norm(dim=1) * self.right.norm(dim=1)).sum())

    def sq_norms(self) -> Tensor:
        if not NATIVE:
            return sq_norms(self.in_full())
        norms = self.left.new_zeros(len(self.pairs.lengths), dtype=accumulation_dtype(self.dtype))
        segments, runs = self.pairs.segments
        device = gpu_of(self.left.device) if self.left.is_cuda else None
        algorithms = []
        for length, pairs in runs:
            sizes = rounded(pairs), rounded(length), self.right.shape[1], self.left.shape[1]
            problem = Problem("linear", *sizes, itemsize=self.left.itemsize, device=device)
            algorithms.append(CODES[plan(problem).algorithm])
        if runs:
            by_pair = segments.sq_norms(self.right, self.left, algorithms)
            norms.index_copy_(0, segments.samples, by_pair.to(norms.dtype))
        return norms.view(len(self), self.pairs.matrices).sum(1)

    def along(self, direction: Tensor) -> Tensor:
        dots = direction.new_zeros(len(self))
        samples = self.pairs.of_rows // self.pairs.matrices
        parts = self.pairs.by_matrix(*self.operands, samples)
        matrices = direction.view(self.pairs.matrices, *direction.shape[-2:])
        for matrix, (left, right, of_rows) in zip(matrices, parts, strict=True):
            products = (left.to(dots.dtype) @ matrix) * right.to(dots.dtype)
            add_rows(dots, of_rows, products.sum(1))
        return dots

    def weighted(self, factors: Tensor) -> Tensor:
        wide = accumulation_dtype(self.dtype)
        by_pair = factors.to(wide).repeat_interleave(self.pairs.matrices)
        by_row = torch.cat([by_pair, by_pair.new_zeros(1)])[self.pairs.of_rows, None]
        left, right = (torch.where(by_row != 0, t, 0).to(wide) for t in self.operands)
        return self._sum(left, right * by_row)


def operand_of_owners(node: Node, has_rows: Callable[[Edge], bool]) -> int | None:
    """Return the operand that product_by_owner() has the product for, -1 for any; None if it has
    none. has_rows: whether what comes from an edge may have rows: data, or what a layer made."""
    name, edges = node.name(), node.next_functions
    if name in {*products.ROWS, GROUPED, MV} - {"BmmBackward0"}:
        rows, weight = (1, 2) if name == "AddmmBackward0" else (0, 1)
        is_bias = name == "AddmmBackward0" and not has_rows(edges[0])
        return (-1 if is_bias else weight) if has_rows(edges[rows]) else None
    if name == products.EMBEDDING or products.takes_rows(node):
        return 0
    if name == "RepeatBackward0":  # of one row
        own = [size for size in shape_of(*edges[0]) if size > 1]
        return 0 if [*shape_of(node, 0)][-len(own) or None :] == own else None
    if name == "ExpandBackward0":
        return 0
    return -1 if is_elementwise(node) and any(map(has_rows, edges)) else None


@dataclass(frozen=True)
class Selected(Factored):
    """Gradients [N, E, *] of which only some rows along E are not zero."""

    of: Any  # the gradients [N, *] of one row, or of these rows [N, K, *]
    rows: range
    shape: Sequence[int]  # [E, *]
    is_slice: bool  # else one row

    @property
    def operands(self) -> list[Tensor]:
        return [self.of] if isinstance(self.of, Tensor) else self.of.operands

    def to(self, dtype: torch.dtype) -> Selected:
        return replace(self, of=self.of.to(dtype))

    def _among_others(self, some: Tensor) -> Tensor:
        """Return [*, *shape] for these rows, [*, elements]."""
        some = some.unflatten(-1, (len(self.rows), -1))
        full = some.new_zeros(*some.shape[:-2], self.shape[0], some.shape[-1])
        full[..., self.rows.start : self.rows.stop, :] = some
        return full.view(*some.shape[:-2], *self.shape)

    def in_full(self) -> Tensor:
        one = in_full(self.of)  # [N] of an element
        return self._among_others(one.reshape(len(one), -1))

    def total(self) -> Tensor:
        return self._among_others(total(self.of).flatten())

    def size(self) -> float:
        return size(self.of)

    def sq_norms(self) -> Tensor:
        return sq_norms(self.of)

    def along(self, direction: Tensor) -> Tensor:
        some = direction[self.rows.start : self.rows.stop]
        return along(self.of, some if self.is_slice else some[0])

    def weighted(self, factors: Tensor) -> Tensor:
        return self._among_others(weighted(self.of, factors).flatten())


def pass_matrices(node: Node, g: Gradients | None) -> Sequence[Gradients] | None:
    """Return what pass_factors() does, also for gradients of several matrices, and of some rows."""
    edge, rows = node.next_functions[0], products.selected_rows(node)
    if rows and g is not None:
        return [Selected(g, rows, shape_of(*edge), node.name() == "SliceBackward0")]
    if not isinstance(g, (Grouped, Selected)):
        return products.pass_factors(node, g)
    if node.name() == CAST:
        return [g.to(dtype_of(*edge))]
    is_single = isinstance(g, Grouped) and g.is_single
    if not is_transpose(node) or len(shape_of(*edge)) != (2 if is_single else 3):
        return None
    if isinstance(g, Grouped):
        return [g.transposed()]
    of = g.of.mT if isinstance(g.of, Tensor) else g.of.transposed()
    return [replace(g, of=of, shape=shape_of(*edge))]


def product_by_owner(
    node: Node, operand: int, g: Tensor, owners: Tensor, n: int
) -> Gradients | None:
    """Return the product of a node whose rows have these owners, for an operand without rows: a
    matrix or a table, or one that is broadcast to the rows. None: of another. g: [rows, *]."""
    if node.name() == GROUPED and operand == 1:
        rows, ends = torch.arange(len(g), device=g.device), node._saved_offs
        matrix, count = torch.bucketize(rows, ends, right=True), len(ends)
        return Grouped(node._saved_self, g, Pairs.of(owners, matrix, n, count))
    if (summed := summed_by_owner(node, operand, g, owners, n)) is not None:
        return summed
    is_index = products.takes_rows(node)
    is_lookup = is_index or node.name() == products.EMBEDDING
    saved, place = products.ROWS.get(node.name(), ("", 0 if is_lookup else -1))
    if operand != place or g.is_complex() or products.scales_by_count(node):
        return None
    if saved:
        rows, g = (t.flatten(0, -2) for t in (getattr(node, saved), g))
    else:
        rows = (products.row_numbers(node) if is_index else node._saved_indices).flatten()
        g = g.reshape(len(rows), -1)
    each = len(g) // max(1, len(owners))
    if len(g) != each * len(owners):
        return None  # the owners are of other rows
    owners, g = owners.repeat_interleave(each), g * getattr(node, "_saved_alpha", 1)
    counts = torch.bincount(owners, minlength=n + 1)[:n].tolist()
    if saved and n * max(counts) > MAX_PADDING * len(g):
        return Grouped(rows, g, Pairs.of(owners, torch.zeros_like(owners), n, 1), is_single=True)
    parts = split(owners, counts, rows, g)
    rows, g = (pad_sequence([*part], True) for part in zip(*parts, strict=True))  # [N, T, *]
    if not saved:
        return (products.rows_product if is_index else lookup_product)(node, rows, g)
    outer = Outer(rows, g)
    return outer.in_full() if prod(outer.shape) < sum(outer.shape) * g.shape[1] else outer


def summed_by_owner(node: Node, operand: int, g: Tensor, owners: Tensor, n: int) -> Tensor | None:
    """Return the product of an elementwise node for an operand, added up by sample: [N, *shape of
    the operand]. g: of its output, whose rows have these owners. None: it has no such rows."""
    product, shape = elementwise_product(node, operand, g), shape_of(*node.next_functions[operand])
    dims = 0 if product is None else row_dims(product, len(owners))
    if product is None or not dims:
        return None
    rows = product.flatten(0, dims - 1).to(accumulation_dtype(product.dtype))
    whole, own = product.shape[:dims], [1] * (product.dim() - len(shape)) + [*shape]
    kept = [size if one > 1 else 1 for size, one in zip(whole, own, strict=False)]
    places = torch.arange(prod(kept), device=rows.device).view(kept).expand(whole).flatten()
    sums = rows.new_zeros((n + 1) * prod(kept), *rows.shape[1:])
    sums = add_rows(sums, owners * prod(kept) + places, rows).view(n + 1, *kept, *rows.shape[1:])
    return sum_broadcast(sums[:n], shape)
