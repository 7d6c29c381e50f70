"""What a module's forward gave, of which what runs again in backward has to give the same.

The sums of gradients would show that it went another way, by another switch, state or mask: but the
less the more samples they are of and the fewer digits they have.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

__all__ = ["OtherOutputsError", "Outcome", "same"]

KEPT = 1 << 14  # elements of an output
HALF = 1e-4  # rounding units above it are of halves
ROUNDINGS = 1024.0  # that may differ between a batch and its samples, as in a cosine times 64
ROUNDINGS_OF_HALVES = 4.0  # their sums are made in float32


class OtherOutputsError(RuntimeError):
    """What ran again gave something else."""

    def __init__(self, halves: bool) -> None:
        super().__init__(
            "run again in backward, it gives other outputs than its forward: keep its switches and "
            "states as they were until then, and draw its random numbers from torch's own generator"
        )
        self.halves = halves


@dataclass(frozen=True)
class Outcome:
    """Elements from all over an output, and the rounding unit that it was computed in."""

    elements: Tensor
    shape: torch.Size
    eps: float

    @staticmethod
    def of(output: Tensor, eps: float) -> Outcome | None:
        """None: it is of whole numbers, or none that could be looked into."""
        plain = type(output) in (Tensor, nn.Parameter) and output.layout is torch.strided
        if not plain or not (output.is_floating_point() or output.is_complex()):
            return None
        with torch.no_grad(), torch._C._DisableTorchDispatch():  # no mode is to hear of it
            elements = _elements(output).clone()
        return Outcome(elements, output.shape, max(eps, torch.finfo(output.dtype).eps))

    def like(self, again: Tensor) -> bool:
        """What is inf or nan, as by a scaler, is not compared."""
        if again.shape != self.shape:
            return False
        before, now = (t.to(torch.promote_types(t.dtype, torch.float64))
                       for t in (self.elements, _elements(again.detach())))  # fmt: skip
        finite = before.isfinite() & now.isfinite()
        difference, size = (t[finite].norm() for t in (now - before, before))
        roundings = ROUNDINGS_OF_HALVES if self.eps > HALF else ROUNDINGS
        return float(difference) <= roundings * self.eps * float(size)


def same(gave: Sequence[Outcome | None], again: Sequence[Tensor | None]) -> None:
    """Raise where outputs of what ran again, as far as they are there, are not the forward's."""
    if gave and len(gave) != len(again):
        raise OtherOutputsError(False)
    for before, now in zip(gave, again, strict=False):
        if before is not None and now is not None and not before.like(now):
            raise OtherOutputsError(before.eps > HALF)


def _elements(t: Tensor) -> Tensor:
    step = -(-t.numel() // KEPT) | 1  # odd: it meets all places of dimensions of even sizes
    return t.reshape(-1)[::step]
