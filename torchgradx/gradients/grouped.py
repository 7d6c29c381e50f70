"""Per-sample gradients of a parameter [E, A, B] that holds E matrices, as rows of each matrix.

A pair is a sample n and a matrix e, with the number n*E + e.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from ..graph.owners import segments_from
from ..plan.cost import CODES, plan, rounded
from ..plan.gpu import Problem, gpu_of
from ..reference.chunks import accumulation_dtype
from .by_sample import Factored
from .outer import Outer


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

    @cached_property
    def by_length(self) -> tuple[Tensor, Tensor, list[list[int]]]:
        """Return the pairs sorted by length, the rows in this order, and (length, pairs) counts."""
        by_length = self.lengths.argsort(stable=True)
        rank = torch.full((len(by_length) + 1,), len(by_length), device=by_length.device)
        rank[by_length] = torch.arange(len(by_length), device=by_length.device)
        counts = torch.stack(self.known.unique(return_counts=True), 1)
        return by_length, rank[self.of_rows].argsort(stable=True), counts.tolist()

    @cached_property
    def segments(self) -> tuple[Any, list[tuple[int, int]]]:
        """Return the rows of each pair as segments, and (length, pairs) of their runs."""
        counts = self.known.tolist()
        runs = sorted(Counter(length for length in counts if length).items())
        return segments_from(self.of_rows, len(counts), counts), runs

    def sum_products(self, left: Tensor, right: Tensor) -> Tensor:
        """Return [E, A, B]: for each matrix, left^T right over all its rows."""
        matrix = self.of_rows % self.matrices + self.matrices * (self.of_rows == len(self.lengths))
        order = matrix.argsort(stable=True)
        counts = self.known.view(self.count, self.matrices).sum(0).tolist()
        rest = len(order) - sum(counts)
        parts = zip(*(t[order].split([*counts, rest]) for t in (left, right)), strict=True)
        return torch.stack([a.mT @ b for a, b in parts][: self.matrices])


@dataclass(frozen=True)
class Grouped(Factored):
    """Gradients [N, E, A, B]; that of a pair is left^T right over the rows of the pair."""

    left: Tensor  # [R, A]
    right: Tensor  # [R, B]
    pairs: Pairs

    def __len__(self) -> int:
        return self.pairs.count

    @property
    def operands(self) -> list[Tensor]:
        return [self.left, self.right]

    def by_length(self) -> Iterator[tuple[Outer, Tensor, Tensor]]:
        """Yield the gradients [P, A, B] of the pairs of one length, their samples and matrices."""
        by_length, order, counts = self.pairs.by_length
        left, right = self.left[order], self.right[order]
        first = row = 0
        for length, count in counts:
            pairs, rows = by_length[first : first + count], length * count
            first += count
            if length:
                part = (t[row : row + rows].view(count, length, -1) for t in (left, right))
                yield Outer(*part), pairs // self.pairs.matrices, pairs % self.pairs.matrices
            row += rows

    def of_biases(self) -> Tensor:
        """Return [N, E, B]: the sums of `right`, where `left` is ones."""
        wide = self.right.to(accumulation_dtype(self.dtype))
        full = wide.new_zeros(len(self.pairs.lengths) + 1, wide.shape[1])
        full = full.index_add_(0, self.pairs.of_rows, wide)[:-1].to(self.dtype)
        return full.view(self.pairs.count, self.pairs.matrices, -1)

    def in_full(self) -> Tensor:
        sizes = self.pairs.count, self.pairs.matrices, self.left.shape[1], self.right.shape[1]
        full = self.left.new_zeros(sizes)
        for outer, samples, matrices in self.by_length():
            full[samples, matrices] = outer.in_full()
        return full

    def total(self) -> Tensor:
        return self.pairs.sum_products(self.left, self.right)

    def size(self) -> float:
        return float((self.left.norm(dim=1) * self.right.norm(dim=1)).sum())

    def sq_norms(self) -> Tensor:
        norms = self.left.new_zeros(len(self), dtype=accumulation_dtype(self.dtype))
        segments, runs = self.pairs.segments
        if not runs:
            return norms
        device = gpu_of(self.left.device) if self.left.is_cuda else None
        algorithms = []
        for length, pairs in runs:
            sizes = rounded(pairs), rounded(length), self.right.shape[1], self.left.shape[1]
            problem = Problem("linear", *sizes, itemsize=self.left.itemsize, device=device)
            algorithms.append(CODES[plan(problem).algorithm])
        by_pair = segments.sq_norms(self.right, self.left, algorithms)
        samples = segments.samples // self.pairs.matrices
        return norms.index_add_(0, samples, by_pair.to(norms.dtype))

    def along(self, direction: Tensor) -> Tensor:
        dots = direction.new_zeros(len(self))
        for outer, samples, matrices in self.by_length():
            products = outer.left.to(dots.dtype) @ direction[matrices]
            dots.index_add_(0, samples, (products * outer.right.to(dots.dtype)).sum((1, 2)))
        return dots

    def weighted(self, factors: Tensor) -> Tensor:
        wide = accumulation_dtype(self.dtype)
        by_pair = factors.to(wide).repeat_interleave(self.pairs.matrices)
        by_row = torch.cat([by_pair, by_pair.new_zeros(1)])[self.pairs.of_rows, None]
        left, right = (torch.where(by_row != 0, t, 0).to(wide) for t in self.operands)
        return self.pairs.sum_products(left, right * by_row)
