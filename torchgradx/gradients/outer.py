"""Per-sample gradients of a matrix that multiplies rows, of a table, and of a computed weight."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from .. import ops
from ..reference import chunks
from ..reference.chunks import accumulation_dtype
from .by_sample import Factored, Gradients, OfWeight, sq_norms

MIN_REMAINDER = 0.05  # if less of a squared norm is left after subtraction, two digits are lost


@dataclass(frozen=True)
class Outer(OfWeight):
    """Gradients [N, A, B]; that of a sample is left^T right."""

    left: Tensor  # [N, T, A]
    right: Tensor  # [N, T, B]

    @property
    def shape(self) -> Sequence[int]:  # type: ignore[override]
        return self.left.shape[2], self.right.shape[2]

    @property
    def operands(self) -> list[Tensor]:
        return [self.left, self.right]

    def replaced(self, *operands: Tensor) -> Outer:
        return Outer(*operands)

    def transposed(self) -> Outer:
        """Return the gradients [N, B, A] of the transposed matrix."""
        return Outer(self.right, self.left)

    def times(self, rows: Tensor) -> Outer:
        return Outer(self.left * rows, self.right)

    def along_rows(self, matrix: Tensor) -> Tensor:
        return (self.left * (self.right @ matrix.mT)).sum(1)

    def to_add(self) -> Sequence[Tensor]:
        return self.left, self.right

    def added(self, other: Gradients) -> Gradients:
        if not isinstance(other, Outer):
            return super().added(other)
        pairs = (self.left, other.left), (self.right, other.right)
        return Outer(*(torch.cat(pair, 1) for pair in pairs))

    def in_full(self) -> Tensor:
        return self.left.mT @ self.right

    def total(self) -> Tensor:
        return self.left.flatten(0, 1).mT @ self.right.flatten(0, 1)

    def size(self) -> float:
        return float((chunks.norms(self.left) * chunks.norms(self.right)).norm())

    def sq_norms(self) -> Tensor:
        return ops.linear_sq_norms(self.right, self.left)

    def along(self, direction: Tensor) -> Tensor:
        products = self.right.to(direction.dtype) @ direction.flatten(1).mT
        return (products * self.left.to(direction.dtype)).sum((1, 2))

    def weighted(self, factors: Tensor) -> Tensor:
        wide = self.to(accumulation_dtype(self.dtype))
        grad: Tensor = ops.linear_scaled(wide.right, wide.left, factors, False)[0]
        return grad


@dataclass(frozen=True)
class LookedUp(Factored):
    """Gradients [N, V, D] of a table; that of a sample has its rows added at their ids."""

    ids: Tensor  # [N, T]
    rows: Tensor  # [N, T, D]
    count: int  # V

    @property
    def operands(self) -> list[Tensor]:
        return [self.ids, self.rows]

    def to_add(self) -> Sequence[Tensor]:
        return self.rows, self.ids

    def added(self, other: Gradients) -> Gradients:
        if not isinstance(other, LookedUp):
            return super().added(other)
        ids, rows = (self.ids, other.ids), (self.rows, other.rows)
        return LookedUp(torch.cat(ids, 1), torch.cat(rows, 1), self.count)

    def in_full(self) -> Tensor:
        zeros = self.rows.new_zeros(len(self), self.count, self.rows.shape[2])
        return zeros.scatter_add_(1, self.ids.unsqueeze(2).expand_as(self.rows), self.rows)

    def total(self) -> Tensor:
        return self._scatter(self.rows)

    def size(self) -> float:
        return float(self.rows.norm(dim=2, dtype=accumulation_dtype(self.dtype)).sum())

    def sq_norms(self) -> Tensor:
        return ops.embedding_sq_norms(self.ids, self.rows)

    def along(self, direction: Tensor) -> Tensor:
        return (direction[self.ids] * self.rows.to(direction.dtype)).sum((1, 2))

    def weighted(self, factors: Tensor) -> Tensor:
        wide, factors = accumulation_dtype(self.dtype), factors.view(-1, 1, 1)
        rows = torch.where(factors != 0, self.rows, 0)
        return self._scatter(rows.to(wide) * factors.to(wide))

    def _scatter(self, rows: Tensor) -> Tensor:
        zeros = rows.new_zeros(self.count, rows.shape[2])
        return chunks.add_rows(zeros, self.ids.flatten(), rows.flatten(0, 1))


@dataclass(frozen=True)
class Rowwise(Factored):
    """Gradients [N, *shape] of v, from which a weight was computed row by row.
    A row of v's gradient is that of the weight's, less its components along unit vectors, times a
    scale. So normalisations of a weight are served from the factors of the weight's gradient."""

    of: OfWeight  # the gradients of the weight
    shape: Sequence[int]  # of v
    scale: Tensor | None = None  # [rows]; None: the weight is v, in another shape
    units: Sequence[Tensor] = ()  # [rows or 1, *]: orthogonal, with rows of norm 1 or less
    along_units: Sequence[Tensor] = ()  # [N, rows]: dot products of the weight's rows with a unit
    dim: int = 0  # of v, along which its rows are

    @property
    def operands(self) -> list[Tensor]:
        return self.of.operands  # the other tensors are ours alone

    def back(self, g: Tensor) -> Tensor:
        """Map gradients [n, *] of the weight to those of v [n, *shape]; the map is symmetric."""
        if self.scale is not None:
            g = rest = g.reshape(len(g), *self.units[-1].shape)
            for unit in self.units:
                rest = rest - unit * sum_by_row(g * unit, self.dim)
            g = rest * self.scale.view([-1 if d == self.dim else 1 for d in range(g.dim() - 1)])
        return g.reshape(len(g), *self.shape)

    def along_rows(self, unit: Tensor, dim: int) -> Tensor:
        """Return the dot products [N, rows] of the weight's rows with the rows of a unit."""
        if not dim:
            return self.of.along_rows(unit.flatten(1))
        each = (sum_by_row(g.reshape(-1, *unit.shape) * unit, dim) for g in self.of.parts())
        return torch.cat([*each]).flatten(1)

    def in_full(self) -> Tensor:
        return torch.cat(list(map(self.back, self.of.parts())))

    def total(self) -> Tensor:
        return self.back(self.of.total()[None])[0]

    def size(self) -> float:
        return self.of.size() * (1.0 if self.scale is None else float(self.scale.abs().max()))

    def sq_norms(self) -> Tensor:
        if self.dim or self.scale is None:
            return torch.cat([sq_norms(self.back(g)) for g in self.of.parts()])
        found = whole = self.of.times(self.scale).sq_norms()
        for unit, along in zip(self.units, self.along_units, strict=True):
            share = self.scale.square() * (2 - unit.flatten(1).square().sum(1))
            found = found - (along.square() @ share).to(found.dtype)
        for k in (found < MIN_REMAINDER * whole).nonzero().flatten().tolist():
            found[k] = sq_norms(self.back(self.of.part(slice(k, k + 1)).in_full()))[0]
        return found

    def along(self, direction: Tensor) -> Tensor:
        return self.of.along(self.back(direction[None]).reshape(tuple(self.of.shape)))

    def weighted(self, factors: Tensor) -> Tensor:
        return self.back(self.of.weighted(factors)[None])[0]


def sum_by_row(products: Tensor, dim: int) -> Tensor:
    """Sum [N, *] over all dimensions but N and the rows, which are dimension `dim` of *."""
    return products.sum([d for d in range(1, products.dim()) if d != 1 + dim], True)
