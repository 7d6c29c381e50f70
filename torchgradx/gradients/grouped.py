"""Gradients by sample of several matrices that are one parameter [E, A, B], as rows of each."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from ..reference.chunks import accumulation_dtype
from .by_sample import Factored
from .outer import Outer


class Pairs:
    """Rows of a sample and a matrix each, ordered by these and by how many a pair has.

    lengths: of each pair, on the device. known: the same; a copy on the CPU waits for nothing.
    """

    def __init__(self, owners: Tensor, matrix: Tensor, count: int, matrices: int) -> None:
        """owners: [R], N: of none. matrix: [R], E: of none."""
        self.count, self.matrices = count, matrices
        pairs = count * matrices
        none = (owners == count) | (matrix == matrices)
        self.of_rows = (owners * matrices + matrix).masked_fill(none, pairs)
        lengths = self.of_rows.new_zeros(pairs + 1)
        self.lengths = lengths.index_add_(0, self.of_rows, torch.ones_like(self.of_rows))[:pairs]
        self.known = self.lengths

    @cached_property
    def by_length(self) -> tuple[Tensor, Tensor, list[list[int]]]:
        """Pairs by their lengths, the order of the rows, and each length with its count."""
        by_length = self.lengths.argsort(stable=True)
        rank = torch.full((len(by_length) + 1,), len(by_length), device=by_length.device)
        rank[by_length] = torch.arange(len(by_length), device=by_length.device)
        sizes = torch.stack(self.known.unique(return_counts=True), 1)
        return by_length, rank[self.of_rows].argsort(stable=True), sizes.tolist()

    def summed(self, left: Tensor, right: Tensor) -> Tensor:
        """[E, A, B]: the sum of left^T right over all rows of each matrix."""
        matrix = self.of_rows % self.matrices + self.matrices * (self.of_rows == len(self.lengths))
        order = matrix.argsort(stable=True)
        counts = self.known.view(self.count, self.matrices).sum(0).tolist()
        rest = len(order) - sum(counts)
        parts = zip(*(t[order].split([*counts, rest]) for t in (left, right)), strict=True)
        return torch.stack([a.mT @ b for a, b in parts][: self.matrices])


@dataclass(frozen=True)
class Grouped(Factored):
    """[N, E, A, B], of which a sample's e-th matrix is left^T right over the rows of both."""

    left: Tensor  # [R, A]
    right: Tensor  # [R, B]
    pairs: Pairs

    def __len__(self) -> int:
        return self.pairs.count

    @property
    def dtype(self) -> torch.dtype:
        return self.left.dtype

    @property
    def operands(self) -> list[Tensor]:
        return [self.left, self.right]

    def by_length(self) -> Iterator[tuple[Outer, Tensor, Tensor]]:
        """Yield pairs of a sample and a matrix that have as many rows: their [P, A, B], the samples
        and the matrices."""
        by_length, order, sizes = self.pairs.by_length
        left, right = self.left[order], self.right[order]
        first = row = 0
        for length, count in sizes:
            those, rows = by_length[first : first + count], length * count
            first += count
            if length:
                part = (t[row : row + rows].view(count, length, -1) for t in (left, right))
                yield Outer(*part), those // self.pairs.matrices, those % self.pairs.matrices
            row += rows

    def of_biases(self) -> Tensor:
        """[N, E, B]: where `left` is ones."""
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
        return self.pairs.summed(self.left, self.right)

    def size(self) -> float:
        return float((self.left.norm(dim=1) * self.right.norm(dim=1)).sum())

    def sq_norms(self) -> Tensor:
        found = self.left.new_zeros(len(self), dtype=accumulation_dtype(self.dtype))
        for outer, samples, _ in self.by_length():
            found.index_add_(0, samples, outer.sq_norms().to(found.dtype))
        return found

    def along(self, direction: Tensor) -> Tensor:
        dots = direction.new_zeros(len(self))
        for outer, samples, matrices in self.by_length():
            products = outer.left.to(dots.dtype) @ direction[matrices]
            dots.index_add_(0, samples, (products * outer.right.to(dots.dtype)).sum((1, 2)))
        return dots

    def weighted(self, factors: Tensor) -> Tensor:
        wide = accumulation_dtype(self.dtype)
        by_pair = factors.to(wide).repeat_interleave(self.pairs.matrices)
        of_rows = torch.cat([by_pair, by_pair.new_zeros(1)])[self.pairs.of_rows, None]
        left, right = (torch.where(of_rows != 0, t, 0).to(wide)  # whatever its numbers
                       for t in (self.left, self.right))  # fmt: skip
        return self.pairs.summed(left, right * of_rows)
