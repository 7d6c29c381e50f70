"""Per-sample gradients of a matrix that multiplies rows, of a table, and of a computed weight."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import prod

import torch
from torch import Tensor

from .. import ops
from ..graph.nodes import Node
from ..reference import chunks
from ..reference.chunks import accumulation_dtype, precise_dtype
from .by_sample import Factored, Gradients, OfWeight, sq_norms

MIN_SQUARE = 1e-20  # of a sum of squares in float32; in less, squares may have become 0
MIN_REMAINDER = 0.05  # if less of a squared norm is left after subtraction, two digits are lost


@dataclass(frozen=True)
class Outer(OfWeight):
    """Gradients [N, *, A, B]; that of a sample is left^T right, for each of its matrices *."""

    left: Tensor  # [N, *, T, A]
    right: Tensor  # [N, *, T, B]

    @property
    def shape(self) -> Sequence[int]:  # type: ignore[override]
        return *self.left.shape[1:-2], self.left.shape[-1], self.right.shape[-1]

    def transposed(self) -> Outer:
        """Return the gradients [N, *, B, A] of the transposed matrices."""
        return Outer(self.right, self.left)

    def times(self, rows: Tensor) -> Outer:
        return Outer(self.left * rows, self.right)

    def along_rows(self, matrix: Tensor) -> Tensor:
        return (self.left * (self.right @ matrix.mT)).sum(1)

    def to_add(self) -> Sequence[Tensor]:
        return self.operands if self.left.dim() == 3 else super().to_add()

    def added(self, other: Gradients) -> Gradients:
        if not isinstance(other, Outer):
            return super().added(other)
        pairs = zip(self.operands, other.operands, strict=True)
        return Outer(*(torch.cat(pair, -2) for pair in pairs))

    def in_full(self) -> Tensor:
        return self.left.mT @ self.right

    def total(self) -> Tensor:
        return torch.einsum("n...ta,n...tb->...ab", self.left, self.right)

    def size(self) -> float:
        left, right = (chunks.norms(t.flatten(0, -3)) for t in self.operands)
        return float((left * right).norm())

    def sq_norms(self) -> Tensor:
        found = ops.linear_sq_norms(self.right.flatten(0, -3), self.left.flatten(0, -3))
        return found if self.left.dim() == 3 else found.view(len(self), -1).sum(1)

    def along(self, direction: Tensor) -> Tensor:
        left, right = (t.to(direction.dtype) for t in self.operands)
        return torch.einsum("n...tb,...ab,n...ta->n", right, direction.reshape(self.shape), left)

    def weighted(self, factors: Tensor) -> Tensor:
        wide = self.to(accumulation_dtype(self.dtype))
        if self.left.dim() == 3:
            grad: Tensor = ops.linear_scaled(wide.right, wide.left, factors, False)[0]
            return grad
        by = factors.to(wide.dtype).view(-1, *[1] * (self.left.dim() - 1))
        return Outer(*(torch.where(by != 0, t, 0) for t in (wide.left, wide.right * by))).total()


@dataclass(frozen=True)
class LookedUp(Factored):
    """Gradients [N, V, D] of a table [V, *]; that of a sample has its rows added at their ids."""

    ids: Tensor  # [N, T]
    rows: Tensor  # [N, T, D]
    count: int  # V

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
        return (direction.flatten(1)[self.ids] * self.rows.to(direction.dtype)).sum((1, 2))

    def weighted(self, factors: Tensor) -> Tensor:
        wide, factors = accumulation_dtype(self.dtype), factors.view(-1, 1, 1)
        rows = torch.where(factors != 0, self.rows, 0)
        return self._scatter(rows.to(wide) * factors.to(wide))

    def _scatter(self, rows: Tensor) -> Tensor:
        zeros = rows.new_zeros(self.count, rows.shape[2])
        return chunks.add_rows(zeros, self.ids.flatten(), rows.flatten(0, 1))


def lookup_product(node: Node, ids: Tensor, g: Tensor) -> LookedUp:
    """Return the product of an embedding from each sample's ids [N, *] and gradient [N, *, D]."""
    n, count, padding = len(g), node._saved_weight_sym_argsize_0, node._saved_padding_idx
    ids, rows = ids.reshape(n, -1), g.reshape(n, -1, g.shape[-1])
    if padding < count:  # without padding_idx the node saved the largest integer
        rows = rows.masked_fill((ids == padding).unsqueeze(2), 0)
    elif node._saved_sparse:  # a sparse .grad has the same memory, into which GradScaler writes
        rows = rows.clone()
    return LookedUp(ids, rows, count)


@dataclass(frozen=True)
class Rowwise(Factored):
    """Gradients [N, *shape] of v, from which a weight was computed row by row, or by constants.
    A row is the one of the weight's gradient, less what lies along unit vectors, times a scale."""

    of: OfWeight  # the gradients of the weight
    shape: Sequence[int]  # of v
    scale: Tensor | None = None  # [rows]; None: the weight is v, in another shape
    units: Sequence[Tensor] = ()  # [rows or 1, *]: orthogonal, with rows of norm 1 or less
    along_units: Sequence[Tensor] = ()  # [N, rows]: dot products of the weight's rows with a unit
    dim: int = 0  # of v, along which its rows are
    by: Tensor | None = None  # [*shape of the weight]: constants times v are the weight

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
        if self.by is not None:
            g = g.reshape(len(g), *self.by.shape) * self.by
        return g.reshape(len(g), *self.shape)

    def simplest(self) -> Gradients:
        """Return the gradients of the weight if v is the weight."""
        is_weight = self.scale is self.by is None and tuple(self.shape) == tuple(self.of.shape)
        return self.of if is_weight else self

    def scaled(self, factor: Tensor, shape: Sequence[int]) -> Gradients | None:
        """Return the gradients of an operand [*shape], if v is the operand times `factor`."""
        of, is_same = self.of.to(accumulation_dtype(self.dtype)), shape == tuple(self.shape)
        factor = factor.to(of.dtype)
        if is_same and factor.numel() == 1:
            number = factor.flatten()
            along = [t * number for t in self.along_units]
            return replace(self, of=of.times(number), along_units=along).simplest()
        if self.scale is not None or (not is_same and prod(shape) != 1):
            return None
        by = self.back(factor.expand(1, *self.shape)).reshape(tuple(of.shape))
        return replace(self, of=of, by=by) if is_same else of.along(by).view(-1, *shape)

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
        scales = [float(t.abs().max()) for t in (self.scale, self.by) if t is not None]
        return self.of.size() * prod(scales)

    def sq_norms(self) -> Tensor:
        if self.scale is None and self.by is None:
            return self.of.sq_norms()
        if self.by is not None and isinstance(self.of, Outer) and self.of.left.shape[1:-1] == (1,):
            return _sq_norms_of_masked(self.of.left[:, 0], self.of.right[:, 0], self.by)
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


def _sq_norms_of_masked(left: Tensor, right: Tensor, by: Tensor) -> Tensor:
    """Return [N] sums of (left_a by_ab right_b)^2. left: [N, A]. right: [N, B].
    The largest of a sample is 1 when they are squared; if squares may still be lost, in float64."""
    units = [t.abs().amax(1, True) for t in (left, right)]
    a, b = (t / (unit + (unit == 0)) for t, unit in zip((left, right), units, strict=True))
    squares, scale = by.square(), (units[0].to(precise_dtype(by)) * units[1])[:, 0].square()
    found, most = (a.square() @ squares * b.square()).sum(1), squares.amax()
    is_exact = (found > MIN_SQUARE * most) & (most > MIN_SQUARE) & (most < 1 / MIN_SQUARE)
    lost = (~is_exact & (scale != 0)).nonzero().flatten()
    found = found.to(scale.dtype) * scale
    if len(lost):
        a, squares, b = (t.to(scale.dtype).square() for t in (left[lost], by, right[lost]))
        found[lost] = (a @ squares * b).sum(1)
    return found.to(by.dtype)
