"""Per-sample gradients of a parameter [E, A, B] that holds E matrices, as rows of each matrix.

A pair is a sample n and a matrix e, with the number n*E + e.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from ..extension import NATIVE
from ..graph.nodes import Node, dtype_of, shape_of
from ..graph.segments import segments_from
from ..graph.sizes import row_dims
from ..plan.cost import CODES, plan, rounded
from ..plan.gpu import Problem, gpu_of
from ..reference.chunks import accumulation_dtype, add_rows
from . import products
from .by_sample import Factored, Gradients, sq_norms
from .elementwise import CAST, elementwise_product, is_elementwise, is_transpose, sum_broadcast
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

    @staticmethod
    def of_single(owners: Tensor, count: int) -> Pairs:
        """Return the pairs of rows that one matrix multiplies."""
        return Pairs.of(owners, torch.zeros_like(owners), count, 1)

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


def has_rows_of_owners(node: Node) -> bool:
    """Return True if product_by_owner() has the product of a node."""
    names = {*products.ROWS, products.EMBEDDING, GROUPED} - {"BmmBackward0"}
    return node.name() in names or is_elementwise(node)


def pass_matrices(node: Node, g: Gradients | None) -> Sequence[Gradients] | None:
    """Return what pass_factors() does; also of a node that selects one of several matrices."""
    index = products.selected_matrix(node)
    if index is not None and isinstance(g, Outer) and g.left.dim() == 3:
        left, right = (t.flatten(0, 1) for t in g.operands)
        owners = torch.arange(len(g), device=left.device).repeat_interleave(g.left.shape[1])
        g = Grouped(left, right, Pairs.of_single(owners, len(g)), is_single=True)
    if not isinstance(g, Grouped):
        return products.pass_factors(node, g)
    if index is not None and g.is_single:
        matrices = shape_of(*node.next_functions[0])[0]
        matrix = torch.full_like(g.pairs.of_rows, index)
        pairs = Pairs.of(g.pairs.of_rows, matrix, len(g), matrices)
        return [replace(g, pairs=pairs, is_single=False)]
    if node.name() == CAST:
        dtype = dtype_of(*node.next_functions[0])
        return [replace(g, left=g.left.to(dtype), right=g.right.to(dtype))]
    return [replace(g, left=g.right, right=g.left)] if is_transpose(node) else None


def product_by_owner(
    node: Node, operand: int, g: Tensor, owners: Tensor, n: int
) -> Gradients | None:
    """Return the product of a node whose rows have these owners, for an operand without rows: a
    matrix or a table, or one that is broadcast to the rows. None: of another. g: [rows, *]."""
    if node.name() == GROUPED and operand == 1:
        rows, ends = torch.arange(len(g), device=g.device), node._saved_offs
        matrix, count = torch.bucketize(rows, ends, right=True), len(ends)
        return Grouped(node._saved_self, g, Pairs.of(owners, matrix, n, count))
    summed = summed_by_owner(node, operand, g, owners, n)
    is_lookup = node.name() == products.EMBEDDING
    saved, place = ("_saved_indices", 0) if is_lookup else products.ROWS.get(node.name(), ("", -1))
    if summed is not None or operand != place or g.is_complex() or products.scales_by_count(node):
        return summed
    rows, g = getattr(node, saved), g.flatten(0, -2)
    rows, each = rows.flatten(0, -1 if is_lookup else -2), len(g) // max(1, len(owners))
    if len(g) != each * len(owners):
        return None  # the owners are of other rows
    owners, g = owners.repeat_interleave(each), g * getattr(node, "_saved_alpha", 1)
    counts = torch.bincount(owners, minlength=n + 1)[:n].tolist()
    if not is_lookup and n * max(counts) > MAX_PADDING * len(g):
        return Grouped(rows, g, Pairs.of_single(owners, n), is_single=True)
    parts = split(owners, counts, rows, g)
    rows, g = (pad_sequence([*part], True) for part in zip(*parts, strict=True))  # [N, T, *]
    if is_lookup:
        return lookup_product(node, rows, g)
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
