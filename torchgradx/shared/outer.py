"""Gradients by sample of a matrix, as the rows that they are products of: x @ w, looked at from w.

[N, A, B] would be as large as N weights. On their way to a parameter, gradients are either such a
product or a Tensor [N, *]; what is asked of both is below.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from .. import ops
from ..passes.versions import Versions
from ..reference import chunks
from ..reference.chunks import accumulation_dtype

__all__ = [
    "BySample",
    "Gradients",
    "Outer",
    "added",
    "along",
    "in_full",
    "operands",
    "size",
    "sq_norms",
    "total",
    "weighted",
]


@dataclass(frozen=True)
class Outer:
    """[N, A, B], of which a sample's is left^T right."""

    left: Tensor  # [N, T, A]
    right: Tensor  # [N, T, B]

    @property
    def dtype(self) -> torch.dtype:
        return self.left.dtype

    def turned(self) -> Outer:
        """[N, B, A]"""
        return Outer(self.right, self.left)

    def to(self, dtype: torch.dtype) -> Outer:
        return Outer(self.left.to(dtype), self.right.to(dtype))


Gradients = Tensor | Outer


def operands(g: Gradients) -> list[Tensor]:
    """Return what it holds, some of which others may write into."""
    return [g.left, g.right] if isinstance(g, Outer) else [g]


def in_full(g: Gradients) -> Tensor:
    """[N, *]"""
    return g.left.mT @ g.right if isinstance(g, Outer) else g


def total(g: Gradients) -> Tensor:
    """[*]: the sum over the samples."""
    if isinstance(g, Tensor):
        return g.sum(0)
    return g.left.flatten(0, 1).mT @ g.right.flatten(0, 1)


def size(g: Gradients) -> float:
    """No less than the norm of all together."""
    if isinstance(g, Tensor):
        g = torch.view_as_real(g.resolve_conj()) if g.is_complex() else g
        return float(torch.linalg.vector_norm(g, dtype=accumulation_dtype(g.dtype)))
    return float((chunks.norms(g.left) * chunks.norms(g.right)).norm())


def sq_norms(g: Gradients) -> Tensor:
    """[N]"""
    if isinstance(g, Outer):
        return ops.linear_sq_norms(g.right, g.left)
    rows = g[:, None].flatten(1)  # of a single number: [N]
    return torch.linalg.vector_norm(rows, dim=1, dtype=accumulation_dtype(g.dtype)).square()


def added(g: Gradients, other: Gradients | None) -> Gradients:
    if other is None:
        return g
    if isinstance(g, Outer) and isinstance(other, Outer):
        pairs = (g.left, other.left), (g.right, other.right)
        return Outer(*(torch.cat(pair, 1) for pair in pairs))
    return in_full(g) + in_full(other)


def along(g: Gradients, direction: Tensor) -> Tensor:
    """[N]: products with a direction [*]."""
    if isinstance(g, Tensor):
        return chunks.along(g, direction)
    products = g.right.to(direction.dtype) @ direction.mT
    return (products * g.left.to(direction.dtype)).sum((1, 2))


def weighted(g: Gradients, factors: Tensor) -> Tensor:
    """[*]: the sum over the samples, each times its factor [N]; those of factor 0 left out."""
    wide = accumulation_dtype(g.dtype)
    if isinstance(g, Outer):
        g = g.to(wide)
        grad: Tensor = ops.linear_scaled(g.right, g.left, factors, False)[0]
        return grad
    return chunks.scaled_sum(factors.to(wide), g.reshape(len(factors), -1).to(wide))


class BySample:
    """Gradients of one parameter, kept as they are for clipping."""

    def __init__(self, place: int, grads: Gradients) -> None:
        self.parameters, self._grads = [place], grads
        self._versions = Versions(operands(grads))

    @property
    def intact(self) -> bool:
        return self._versions.stand()

    def weighted(self, factors: Tensor, places: Sequence[int]) -> list[Tensor]:
        return [weighted(self._grads, factors)]
