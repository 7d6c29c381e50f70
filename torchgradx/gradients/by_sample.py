"""Per-sample gradients of one parameter, and the sums, norms and dot products of them.

They are a Tensor [N, *shape] or `Factored`: the factors whose product they are, since [N, A, B]
would be as large as N weights. Each kind of factors answers by its methods. The functions here take
both. Squared norms and weighted sums are accumulated in float32, or float64 for float64.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import fields, replace
from math import prod
from typing import Any, Protocol, TypeVar, cast

import torch
from torch import Tensor

from ..extension import NATIVE, Pass, Recorder
from ..kept import Versions
from ..reference import chunks
from ..reference.chunks import accumulation_dtype

GRADIENT_ELEMENTS = 1 << 23  # of per-sample gradients at a time: 32 MiB of float32
W = TypeVar("W", bound="OfWeight")
_sum = torch.ops.torchgradx.affine_sum.default if NATIVE else None


class Factored(Protocol):
    """Gradients [N, *shape] of one parameter as factors, which are the first two fields."""

    @property
    def operands(self) -> list[Tensor]:
        """Return the factors, which others may write into."""
        return [getattr(self, field.name) for field in fields(cast(Any, self))[:2]]

    def __len__(self) -> int:
        return len(self.operands[0])

    @property
    def dtype(self) -> torch.dtype:
        return self.operands[-1].dtype

    def in_full(self) -> Tensor:
        """Return the gradients [N, *shape]."""

    def total(self) -> Tensor:
        """Return the sum over the samples [*shape]."""

    def size(self) -> float:
        """Return an upper bound of the norm of all gradients together."""

    def sq_norms(self) -> Tensor:
        """Return the squared norms [N]."""

    def along(self, direction: Tensor) -> Tensor:
        """Return the dot products [N] with a direction [*shape]."""

    def weighted(self, factors: Tensor) -> Tensor:
        """Return the sum over the samples [*shape], each times its factor [N].
        A sample with factor 0 is left out, even if its gradient is not finite."""

    def to_add(self) -> Sequence[Tensor]:
        """Return the arguments of Pass.add: gradients; gradients and activations; rows and ids."""
        return (self.in_full(),)

    def added(self, other: Gradients) -> Gradients:
        """Return the sum of two, sample by sample."""
        return self.in_full() + in_full(other)


class OfWeight(Factored, Protocol):
    """Gradients of a weight [A, *] that multiplies rows or images; its rows are independent."""

    shape: Sequence[int]  # of the weight

    def replaced(self: W, *operands: Tensor) -> W:
        """Return the same with other factors."""
        names = (field.name for field in fields(cast(Any, self)))
        return replace(cast(Any, self), **dict(zip(names, operands, strict=False)))

    def part(self: W, samples: slice) -> W:
        return self.replaced(*(t[samples] for t in self.operands))

    def to(self: W, dtype: torch.dtype) -> W:
        return self.replaced(*(t.to(dtype) for t in self.operands))

    def times(self: W, rows: Tensor) -> W:
        """Multiply each row of the weight's gradients by its number in `rows` [A]."""

    def along_rows(self, matrix: Tensor) -> Tensor:
        """Return the dot products [N, A] of the rows with those of `matrix` [A or 1, B]."""

    def parts(self) -> Iterator[Tensor]:
        """Yield gradients [n, *shape] of a few samples at a time."""
        step = chunks.chunks(len(self), prod(self.shape))
        return (self.part(samples).in_full() for samples in step)


Gradients = Tensor | Factored


def in_full(g: Gradients) -> Tensor:
    return g if isinstance(g, Tensor) else g.in_full()


def total(g: Gradients) -> Tensor:
    return g.sum(0) if isinstance(g, Tensor) else g.total()


def size(g: Gradients) -> float:
    """Return the norm of all gradients together, or an upper bound of it."""
    if not isinstance(g, Tensor):
        return g.size()
    g = torch.view_as_real(g.resolve_conj()) if g.is_complex() else g
    return float(torch.linalg.vector_norm(g, dtype=accumulation_dtype(g.dtype)))


def sq_norms(g: Gradients) -> Tensor:
    if not isinstance(g, Tensor):
        return g.sq_norms()
    rows = g[:, None].flatten(1)  # also where a gradient is a scalar: g is [N]
    return torch.linalg.vector_norm(rows, dim=1, dtype=accumulation_dtype(g.dtype)).square()


def along(g: Gradients, direction: Tensor) -> Tensor:
    if not isinstance(g, Tensor):
        return g.along(direction)
    with torch.autocast(g.device.type, enabled=False):
        return g.reshape(len(g), -1).to(direction.dtype) @ direction.flatten()


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


class BySample(Versions):
    """Gradients of one parameter, kept for clipping."""

    runs_again = False

    def __init__(self, place: int, grads: Gradients) -> None:
        super().__init__([grads] if isinstance(grads, Tensor) else grads.operands)
        self.parameters, self._grads = [place], grads

    def weighted(self, factors: Tensor, places: Sequence[int]) -> list[Tensor]:
        return [weighted(self._grads, factors)]


def deliver(run: Pass, recorder: Recorder, place: int, g: Gradients) -> None:
    """Record the gradients of the parameter at `place` in a pass.
    If other uses of the parameter are still to come, the pass waits for them; else it takes the
    squared norms."""
    if run.waits(place):
        run.add(place, *to_add(g))
    else:
        run.finish(place, sq_norms(g))
    keep(run, recorder, place, g)


def keep(run: Pass, recorder: Recorder, place: int, g: Gradients) -> None:
    """Keep the gradients for clipping, and record their dot products with the direction, if any."""
    if recorder.keeps_tape:
        # A single sample's tensor becomes .grad, into which later backwards add.
        run.keep_on_tape(BySample(place, g.clone() if run.n == 1 and isinstance(g, Tensor) else g))
    direction = run.directions[place] if run.directions else None
    if direction is not None:
        run.add_dots(along(g, direction))
