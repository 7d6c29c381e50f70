"""Conditions and outputs of a forward, for what runs again to run under these and give the same.

The sums of gradients would show that it took another path, by another switch, state or mask: but
the less the more samples they are of and the fewer digits they have.
"""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from ..kept import random_state_kept
from ..refusals import RefusedError

KEPT_ELEMENTS = 1 << 14  # elements of an output
HALF_EPS = 1e-4  # rounding units above it are of halves
GROSS = 1e-2  # a difference that is none of rounding, where terms cancel; halves have no such bound
ROUNDINGS = 1024.0  # that may differ between a batch and its samples, as in a cosine times 64
ROUNDINGS_OF_HALVES = 4.0  # their sums are made in float32


@dataclass(frozen=True)
class Regime:
    """Besides its inputs."""

    device: str
    autocast: torch.dtype | None
    rng: tuple[Tensor, Tensor | None, Any, Any] | None  # CPU, device's, Python's, NumPy's

    @staticmethod
    def current(device: torch.device, draws: bool) -> Regime:
        kind = device.type
        there = kind in ("cpu", "cuda") or torch.amp.is_autocast_available(kind)
        enabled = there and torch.is_autocast_enabled(kind)
        autocast = torch.get_autocast_dtype(kind) if enabled else None
        if not draws:
            return Regime(kind, autocast, None)
        own = torch.cuda.get_rng_state(device) if kind == "cuda" else None
        rng = torch.get_rng_state(), own, random.getstate(), np.random.get_state()
        return Regime(kind, autocast, rng)

    @property
    def drew(self) -> bool:
        """Return whether random numbers have been drawn since then."""
        if self.rng is None:
            return False
        torchs, devices, pythons, (_, numpys, place, *_) = self.rng
        if devices is not None and not torch.equal(torch.cuda.get_rng_state(), devices):
            return True
        _, now, at, *_ = np.random.get_state()
        same = torch.equal(torch.get_rng_state(), torchs) and random.getstate() == pythons
        return not (same and at == place and np.array_equal(now, numpys))

    @contextlib.contextmanager
    def again(self) -> Iterator[None]:
        """Run inside as the forward did, and draw the same random numbers."""
        with torch.autocast(self.device, self.autocast, enabled=self.autocast is not None):
            if self.rng is None:
                yield
                return
            torchs, devices, pythons, numpys = self.rng
            with random_state_kept():
                torch.set_rng_state(torchs)
                if devices is not None:
                    torch.cuda.set_rng_state(devices)
                random.setstate(pythons)
                np.random.set_state(numpys)
                yield


def may_draw(module: nn.Module) -> bool:
    """Return True if a forward may draw random numbers."""
    stock = type(module).__module__.startswith("torch.nn.modules.")
    stock = stock and "forward" not in vars(module)
    return not stock or (module.training and getattr(module, "dropout", 0.0) > 0)


class OtherOutputsError(RefusedError):
    """A module that ran again gave something else. gross: by far, so that other samples are in what
    a sample gives in its batch."""

    def __init__(self, gross: bool) -> None:
        super().__init__("other_outputs")
        self.gross = gross


@dataclass(frozen=True)
class Outcome:
    """Elements from all over an output, and the rounding unit that it was computed in."""

    elements: Tensor
    eps: float

    @staticmethod
    def of(output: Tensor, eps: float) -> Outcome | None:
        """None: it is of whole numbers, or none that could be looked into."""
        plain = type(output) in (Tensor, nn.Parameter) and output.layout is torch.strided
        if not plain or not (output.is_floating_point() or output.is_complex()):
            return None
        with torch.no_grad(), torch._C._DisableTorchDispatch():  # no mode is to hear of it
            elements = _elements(output).clone()
        return Outcome(elements, max(eps, torch.finfo(output.dtype).eps))

    def difference(self, again: Tensor) -> float:
        """Return the relative difference of the elements that differ, inf and nan left out."""
        before, now = (t.to(torch.promote_types(t.dtype, torch.float64))
                       for t in (self.elements, _elements(again.detach())))  # fmt: skip
        differs = before.isfinite() & now.isfinite() & (before != now)
        difference, *sizes = (float(t[differs].norm()) for t in (now - before, before, now))
        return difference / max(sizes) if difference else 0.0


def outcomes_of(
    outputs: Sequence[Tensor], versions: Sequence[int], eps: float
) -> list[Outcome | None]:
    """Return the outcomes of outputs, of those that nobody has written into since `versions`."""
    pairs = zip(outputs, versions, strict=True)
    return [Outcome.of(t, eps) if t._version == version else None for t, version in pairs]


def require_same(outcomes: Sequence[Outcome | None], again: Sequence[Tensor | None]) -> None:
    """Raise where outputs of what ran again, as far as they are there, are not the forward's."""
    if outcomes and len(outcomes) != len(again):
        raise OtherOutputsError(True)
    for before, now in zip(outcomes, again, strict=False):
        if before is None or now is None:
            continue
        roundings = ROUNDINGS_OF_HALVES if before.eps > HALF_EPS else ROUNDINGS
        difference = before.difference(now)
        if difference > roundings * before.eps:
            raise OtherOutputsError(difference > GROSS and before.eps < HALF_EPS)


def _elements(t: Tensor) -> Tensor:
    """Take every so many; the step is odd, for not all to be of the same columns."""
    return t.reshape(-1)[:: t.numel() // KEPT_ELEMENTS | 1]
