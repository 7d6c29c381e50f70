"""Gradients by sample of one parameter, and the sums and norms that are asked of them.

They are a Tensor [N, *shape], or the factors that it is the product of: [N, A, B] would be as large
as N weights. Each kind of factors answers by its methods; the functions here take both.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import prod
from typing import Any, Protocol

import torch
from torch import Tensor

from .. import ops
from ..hooks.versions import Versions
from ..reference import chunks
from ..reference.chunks import accumulation_dtype

GRADIENT_ELEMENTS = 1 << 23  # of per-sample gradients at a time: 32 MiB of float32
_sum = torch.ops.torchgradx.affine_sum.default if ops.NATIVE else None


class Factored(Protocol):
    """Gradients [N, *shape] of one parameter, as the factors that they are made of."""

    def __len__(self) -> int:
        """N"""

    @property
    def dtype(self) -> torch.dtype:
        """Return the dtype of the gradients."""

    @property
    def operands(self) -> list[Tensor]:
        """Return the factors that others may write into."""

    def in_full(self) -> Tensor:
        """[N, *shape]"""

    def total(self) -> Tensor:
        """[*shape]: the sum over the samples."""

    def size(self) -> float:
        """Return a bound of the norm of all gradients together."""

    def sq_norms(self) -> Tensor:
        """[N]"""

    def along(self, direction: Tensor) -> Tensor:
        """[N]: products with a direction [*shape]."""

    def weighted(self, factors: Tensor) -> Tensor:
        """[*shape]: the sum over the samples, each times its factor [N]; those of 0 left out."""

    def to_add(self) -> Sequence[Tensor]:
        """Return it as Pass.add takes it: gradients, or gradients and activations, or rows and
        ids."""
        return (self.in_full(),)

    def added(self, other: Gradients) -> Gradients:
        """Return the sum of two, sample by sample."""
        return self.in_full() + in_full(other)


class OfWeight(Factored, Protocol):
    """Gradients of a weight [A, *] from its product with rows or images, row by row."""

    shape: Sequence[int]  # of the weight

    def part(self, samples: slice) -> OfWeight:
        """Return those of some samples."""

    def to(self, dtype: torch.dtype) -> OfWeight:
        """Convert the factors."""

    def times(self, rows: Tensor) -> OfWeight:
        """Multiply each row of the weight's gradients by its number [A]."""

    def along_rows(self, matrix: Tensor) -> Tensor:
        """[N, A]: the product of each row with that of a matrix [A, B]; one may be all rows'."""

    def parts(self) -> Iterator[Tensor]:
        """Yield [n, *shape], so many samples at a time."""
        step = chunks.chunks(len(self), prod(self.shape))
        return (self.part(samples).in_full() for samples in step)


Gradients = Tensor | Factored


def in_full(g: Gradients) -> Tensor:
    return g if isinstance(g, Tensor) else g.in_full()


def total(g: Gradients) -> Tensor:
    return g.sum(0) if isinstance(g, Tensor) else g.total()


def size(g: Gradients) -> float:
    if not isinstance(g, Tensor):
        return g.size()
    g = torch.view_as_real(g.resolve_conj()) if g.is_complex() else g
    return float(torch.linalg.vector_norm(g, dtype=accumulation_dtype(g.dtype)))


def sq_norms(g: Gradients) -> Tensor:
    if not isinstance(g, Tensor):
        return g.sq_norms()
    rows = g[:, None].flatten(1)  # of a single number: [N]
    return torch.linalg.vector_norm(rows, dim=1, dtype=accumulation_dtype(g.dtype)).square()


def along(g: Gradients, direction: Tensor) -> Tensor:
    return chunks.dots_along(g, direction) if isinstance(g, Tensor) else g.along(direction)


def weighted(g: Gradients, factors: Tensor) -> Tensor:
    if not isinstance(g, Tensor):
        return g.weighted(factors)
    wide = accumulation_dtype(g.dtype)
    rows = g.reshape(len(factors), 1, -1).to(wide)
    return chunks.scaled_sum(factors.to(wide), rows) if _sum is None else _sum(rows, factors, wide)


def to_add(g: Gradients) -> Sequence[Tensor]:
    return (g,) if isinstance(g, Tensor) else g.to_add()


def added(g: Gradients, other: Gradients | None) -> Gradients:
    if other is None:
        return g
    return g + in_full(other) if isinstance(g, Tensor) else g.added(other)


class BySample:
    """Gradients of one parameter, kept as they are for clipping."""

    runs_again = False

    def __init__(self, place: int, grads: Gradients) -> None:
        self.parameters, self._grads = [place], grads
        self._versions = Versions([grads] if isinstance(grads, Tensor) else grads.operands)

    @property
    def intact(self) -> bool:
        return self._versions.stand()

    def weighted(self, factors: Tensor, places: Sequence[int]) -> list[Tensor]:
        return [weighted(self._grads, factors)]


def deliver(run: Any, recorder: Any, place: int, g: Gradients) -> None:
    """Give a pass the gradients by sample of one parameter."""
    if run.waits(place):
        run.add(place, *to_add(g))
    else:
        run.finish(place, sq_norms(g))
    keep(run, recorder, place, g)


def keep(run: Any, recorder: Any, place: int, g: Gradients) -> None:
    """Keep what clipping needs of them, and make their products with a direction."""
    if recorder.books:
        # of one sample it becomes .grad, into which another backward adds
        run.book(BySample(place, g.clone() if run.n == 1 and isinstance(g, Tensor) else g))
    direction = run.directions[place] if run.directions else None
    if direction is not None:
        run.add_dots(along(g, direction))
