"""Gradients by sample of a matrix, as the rows that they are made of: x @ w, looked at from w, of
several such matrices, of a convolution's weight, and those of a table that ids look up.

[N, A, B] would be as large as N weights. On their way to a parameter, gradients are such products,
such rows, or a Tensor [N, *]; what is asked of all of them is below.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from math import prod

import torch
from torch import Tensor

from .. import ops
from ..record.versions import Versions
from ..reference import chunks
from ..reference.chunks import accumulation_dtype
from .convolved import Convolved

CANCELLED = 0.05  # of rows' squares: what is left has lost two digits
_sum = torch.ops.torchgradx.affine_sum.default if ops.NATIVE else None


@dataclass(frozen=True)
class Outer:
    """[N, A, B], of which a sample's is left^T right."""

    left: Tensor  # [N, T, A]
    right: Tensor  # [N, T, B]

    def __len__(self) -> int:
        return len(self.left)

    @property
    def dtype(self) -> torch.dtype:
        return self.left.dtype

    def turned(self) -> Outer:
        """[N, B, A]"""
        return Outer(self.right, self.left)

    def to(self, dtype: torch.dtype) -> Outer:
        return Outer(self.left.to(dtype), self.right.to(dtype))

    @property
    def shape(self) -> Sequence[int]:
        return self.left.shape[2], self.right.shape[2]

    def part(self, samples: slice) -> Outer:
        return Outer(self.left[samples], self.right[samples])

    def times(self, rows: Tensor) -> Outer:
        """Multiply each row of the matrices [A, B] by its number [A]."""
        return Outer(self.left * rows, self.right)

    def along_rows(self, matrix: Tensor) -> Tensor:
        """[N, A]: the product of each row with that of a matrix [A, B]."""
        return (self.left * (self.right @ matrix.mT)).sum(1)


@dataclass(frozen=True)
class LookedUp:
    """[N, V, D], of which a sample's has its rows added up where its ids say."""

    ids: Tensor  # [N, T]
    rows: Tensor  # [N, T, D]; where there are bags, each row's weight [N, T, 1]
    count: int  # V
    bags: Tensor | None = None  # [N, D]

    def __len__(self) -> int:
        return len(self.rows)

    @property
    def dtype(self) -> torch.dtype:
        return self.rows.dtype if self.bags is None else self.bags.dtype

    @property
    def each(self) -> Tensor:
        """[N, T, D]"""
        rows = self.rows if self.bags is None else self.rows * self.bags.unsqueeze(1)
        return rows.to(self.dtype)


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
class Grouped:
    """[N, E, A, B], of which a sample's e-th matrix is left^T right over the rows of both."""

    left: Tensor  # [R, A]
    right: Tensor  # [R, B]
    pairs: Pairs

    def __len__(self) -> int:
        return self.pairs.count

    @property
    def dtype(self) -> torch.dtype:
        return self.left.dtype

    def alike(self) -> Iterator[tuple[Outer, Tensor, Tensor]]:
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

    @property
    def rows(self) -> Tensor:
        """[N, E, B]: where `left` is ones, as of biases."""
        wide = self.right.to(accumulation_dtype(self.dtype))
        full = wide.new_zeros(len(self.pairs.lengths) + 1, wide.shape[1])
        full = full.index_add_(0, self.pairs.of_rows, wide)[:-1].to(self.dtype)
        return full.view(self.pairs.count, self.pairs.matrices, -1)


@dataclass(frozen=True)
class Rowwise:
    """[N, *shape]: gradients of a computed weight, as those of what it was computed from: row by
    row, without what lies along units, times a scale."""

    of: Outer | Convolved
    shape: Sequence[int]  # of what it was computed from
    scale: Tensor | None = None  # [rows]; None: it is the weight, in another shape
    units: Sequence[Tensor] = ()  # [rows or 1, *], orthogonal, of norm 1 or less by row
    along: Sequence[Tensor] = ()  # [N, rows]: products with each unit
    dim: int = 0  # of the rows in `shape`, where they are not those of the matrices

    def __len__(self) -> int:
        return len(self.of)

    @property
    def dtype(self) -> torch.dtype:
        return self.of.dtype

    def back(self, g: Tensor) -> Tensor:
        """Take gradients [n, *] of the weight to [n, *shape]."""
        if self.scale is not None:
            g = rest = g.reshape(len(g), *self.units[-1].shape)
            for unit in self.units:
                rest = rest - unit * by_row(g * unit, self.dim)
            g = rest * self.scale.view([-1 if d == self.dim else 1 for d in range(g.dim() - 1)])
        return g.reshape(len(g), *self.shape)

    def parts(self) -> Iterator[Tensor]:
        """Yield [n, *] of the weight, so many samples at a time."""
        step = chunks.chunks(len(self), prod(self.shape))
        return (in_full(self.of.part(samples)) for samples in step)

    def along_rows(self, unit: Tensor, dim: int) -> Tensor:
        """[N, rows]: products of the weight's rows with a unit's."""
        if not dim:
            return self.of.along_rows(unit.flatten(1))
        each = (by_row(g.reshape(-1, *unit.shape) * unit, dim) for g in self.parts())
        return torch.cat([*each]).flatten(1)

    def sq_norms(self) -> Tensor:
        """[N]"""
        if self.dim or self.scale is None:
            return torch.cat([sq_norms(self.back(g)) for g in self.parts()])
        found = whole = sq_norms(self.of.times(self.scale))
        for unit, along in zip(self.units, self.along, strict=True):
            share = self.scale.square() * (2 - unit.flatten(1).square().sum(1))
            found = found - (along.square() @ share).to(found.dtype)
        for k in (found < CANCELLED * whole).nonzero().flatten().tolist():
            found[k] = sq_norms(self.back(in_full(self.of.part(slice(k, k + 1)))))[0]
        return found


def by_row(products: Tensor, dim: int) -> Tensor:
    """Sum [N, *] over all but the samples and the rows, which are dimension `dim` of *."""
    return products.sum([d for d in range(1, products.dim()) if d != 1 + dim], True)


Gradients = Tensor | Outer | LookedUp | Grouped | Convolved | Rowwise


def operands(g: Gradients) -> list[Tensor]:
    """Return what it holds, some of which others may write into."""
    if isinstance(g, LookedUp):
        return [g.ids, g.rows, *([] if g.bags is None else [g.bags])]
    if isinstance(g, Convolved):
        return [g.images, g.grads]
    if isinstance(g, Rowwise):  # the others are its own
        return operands(g.of)
    return [g] if isinstance(g, Tensor) else [g.left, g.right]


def to_add(g: Gradients) -> Sequence[Tensor]:
    """Return it as Pass.add takes it: gradients, or gradients and activations, or rows and ids."""
    if isinstance(g, LookedUp):
        return g.each, g.ids
    return (g.left, g.right) if isinstance(g, Outer) else (in_full(g),)


def in_full(g: Gradients) -> Tensor:
    """[N, *]"""
    if isinstance(g, LookedUp):
        rows = g.each
        zeros = rows.new_zeros(len(g.ids), g.count, rows.shape[2])
        return zeros.scatter_add_(1, g.ids.unsqueeze(2).expand_as(rows), rows)
    if isinstance(g, Grouped):
        sizes = g.pairs.count, g.pairs.matrices, g.left.shape[1], g.right.shape[1]
        full = g.left.new_zeros(sizes)
        for outer, samples, matrices in g.alike():
            full[samples, matrices] = outer.left.mT @ outer.right
        return full
    if isinstance(g, Convolved):
        return g.in_full()
    if isinstance(g, Rowwise):
        return torch.cat(list(map(g.back, g.parts())))
    return g.left.mT @ g.right if isinstance(g, Outer) else g


def total(g: Gradients) -> Tensor:
    """[*]: the sum over the samples."""
    if isinstance(g, Tensor):
        return g.sum(0)
    if isinstance(g, LookedUp):
        return _added_up(g, g.each)
    if isinstance(g, Grouped):
        return g.pairs.summed(g.left, g.right)
    if isinstance(g, Convolved):
        return g.total()
    if isinstance(g, Rowwise):
        return g.back(total(g.of)[None])[0]
    return g.left.flatten(0, 1).mT @ g.right.flatten(0, 1)


def size(g: Gradients) -> float:
    """No less than the norm of all together."""
    if isinstance(g, Tensor):
        g = torch.view_as_real(g.resolve_conj()) if g.is_complex() else g
        return float(torch.linalg.vector_norm(g, dtype=accumulation_dtype(g.dtype)))
    if isinstance(g, LookedUp):
        return float(g.each.norm(dim=2, dtype=accumulation_dtype(g.dtype)).sum())
    if isinstance(g, Grouped):
        return float((g.left.norm(dim=1) * g.right.norm(dim=1)).sum())
    if isinstance(g, Rowwise):
        return size(g.of) * (1.0 if g.scale is None else float(g.scale.abs().max()))
    if isinstance(g, Convolved):
        images, grads = (chunks.norms(t.flatten(1)[:, None]) for t in (g.images, g.grads))
        return float((images * grads).norm()) * prod(g.shape[2:]) ** 0.5
    return float((chunks.norms(g.left) * chunks.norms(g.right)).norm())


def sq_norms(g: Gradients) -> Tensor:
    """[N]"""
    if isinstance(g, Outer):
        return ops.linear_sq_norms(g.right, g.left)
    if isinstance(g, LookedUp):
        found = ops.embedding_sq_norms(g.ids, g.rows)
        if g.bags is not None:  # a row is a number times its bag
            found = found * torch.linalg.vector_norm(g.bags, dim=1, dtype=found.dtype).square()
        return found
    if isinstance(g, Grouped):
        found = g.left.new_zeros(len(g), dtype=accumulation_dtype(g.dtype))
        for outer, samples, _ in g.alike():
            found.index_add_(0, samples, sq_norms(outer).to(found.dtype))
        return found
    if isinstance(g, Rowwise):
        return g.sq_norms()
    if isinstance(g, Convolved):
        known = g.sq_norms()
        return Rowwise(g, g.shape).sq_norms() if known is None else known
    rows = g[:, None].flatten(1)  # of a single number: [N]
    return torch.linalg.vector_norm(rows, dim=1, dtype=accumulation_dtype(g.dtype)).square()


def added(g: Gradients, other: Gradients | None) -> Gradients:
    if other is None:
        return g
    if isinstance(g, Outer) and isinstance(other, Outer):
        pairs = (g.left, other.left), (g.right, other.right)
        return Outer(*(torch.cat(pair, 1) for pair in pairs))
    if isinstance(g, LookedUp) and isinstance(other, LookedUp):
        return LookedUp(
            torch.cat([g.ids, other.ids], 1), torch.cat([g.each, other.each], 1), g.count
        )
    return in_full(g) + in_full(other)


def along(g: Gradients, direction: Tensor) -> Tensor:
    """[N]: products with a direction [*]."""
    if isinstance(g, Tensor):
        return chunks.along(g, direction)
    if isinstance(g, LookedUp):
        return (direction[g.ids] * g.each.to(direction.dtype)).sum((1, 2))
    if isinstance(g, Grouped):
        dots = direction.new_zeros(len(g))
        for outer, samples, matrices in g.alike():
            products = outer.left.to(dots.dtype) @ direction[matrices]
            dots.index_add_(0, samples, (products * outer.right.to(dots.dtype)).sum((1, 2)))
        return dots
    if isinstance(g, Convolved):
        return g.along(direction)
    if isinstance(g, Rowwise):  # the way back is symmetric
        rows = g.back(direction[None]).flatten()
        return along(g.of, rows.view(g.of.shape))
    products = g.right.to(direction.dtype) @ direction.flatten(1).mT
    return (products * g.left.to(direction.dtype)).sum((1, 2))


def weighted(g: Gradients, factors: Tensor) -> Tensor:
    """[*]: the sum over the samples, each times its factor [N]; those of factor 0 left out."""
    wide = accumulation_dtype(g.dtype)
    if isinstance(g, Rowwise):
        return g.back(weighted(g.of, factors)[None])[0]
    if isinstance(g, Convolved):
        of_images = factors.to(wide).view(-1, *[1] * (g.grads.dim() - 1))
        images, grads = (torch.where(of_images != 0, t, 0).to(wide)  # whatever its numbers
                         for t in (g.images, g.grads * of_images))  # fmt: skip
        return replace(g, images=images, grads=grads).total()
    if isinstance(g, Outer):
        g = g.to(wide)
        grad: Tensor = ops.linear_scaled(g.right, g.left, factors, False)[0]
        return grad
    if isinstance(g, LookedUp):
        kept = torch.where(factors.view(-1, 1, 1) != 0, g.each, 0)  # whatever its numbers
        return _added_up(g, kept.to(wide) * factors.to(wide).view(-1, 1, 1))
    if isinstance(g, Grouped):
        by_pair = factors.to(wide).repeat_interleave(g.pairs.matrices)
        of_rows = torch.cat([by_pair, by_pair.new_zeros(1)])[g.pairs.of_rows, None]
        wide_left = torch.where(of_rows != 0, g.left, 0).to(wide)  # whatever its numbers
        kept = torch.where(of_rows != 0, g.right, 0).to(wide) * of_rows
        return g.pairs.summed(wide_left, kept)
    rows = g.reshape(len(factors), 1, -1).to(wide)
    return chunks.scaled_sum(factors.to(wide), rows) if _sum is None else _sum(rows, factors, wide)


def _added_up(g: LookedUp, rows: Tensor) -> Tensor:
    zeros = rows.new_zeros(g.count, rows.shape[2])
    return zeros.index_add_(0, g.ids.flatten(), rows.flatten(0, 1))


class BySample:
    """Gradients of one parameter, kept as they are for clipping."""

    runs_again = False

    def __init__(self, place: int, grads: Gradients) -> None:
        self.parameters, self._grads = [place], grads
        self._versions = Versions(operands(grads))

    @property
    def intact(self) -> bool:
        return self._versions.stand()

    def weighted(self, factors: Tensor, places: Sequence[int]) -> list[Tensor]:
        return [weighted(self._grads, factors)]
