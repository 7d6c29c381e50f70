"""Conditions and outputs of a forward, for modules that run again in backward.

A module must run again under the same autocast and random state, and give the same outputs. The
comparison of gradient sums finds another path too (a switch, a state, a mask), but less reliably
the more samples are summed and the fewer digits they have.
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

MAX_ELEMENTS = 1 << 14  # of an output, that are compared
HALF_EPS = 1e-4  # float16 and bfloat16 have larger rounding units
GROSS = 1e-2  # relative difference that rounding cannot make; half types have no such bound
# Rounding units by which a sample may differ from its row in the batch, as in a cosine times 64.
ROUNDINGS = 1024.0
ROUNDINGS_OF_HALVES = 4.0  # sums of half types are made in float32


@dataclass(frozen=True)
class Regime:
    """Conditions of a forward besides its inputs. autocast: None, it is off. rng: states of the
    CPU's, the GPU's, Python's and NumPy's generators; None: the forward draws nothing."""

    device: torch.device
    autocast: torch.dtype | None
    rng: tuple[Tensor, Tensor | None, Any, Any] | None

    @staticmethod
    def current(device: torch.device, draws: bool) -> Regime:
        kind = device.type
        has_autocast = kind in ("cpu", "cuda") or torch.amp.is_autocast_available(kind)
        enabled = has_autocast and torch.is_autocast_enabled(kind)
        autocast = torch.get_autocast_dtype(kind) if enabled else None
        if not draws:
            return Regime(device, autocast, None)
        on_gpu = torch.cuda.get_rng_state(device) if kind == "cuda" else None
        rng = torch.get_rng_state(), on_gpu, random.getstate(), np.random.get_state()
        return Regime(device, autocast, rng)

    @property
    def drew(self) -> bool:
        """Return True if random numbers have been drawn since."""
        if self.rng is None:
            return False
        on_cpu, on_gpu, python, (_, keys, *places) = self.rng
        if on_gpu is not None and not torch.equal(torch.cuda.get_rng_state(self.device), on_gpu):
            return True
        _, keys_now, *places_now = np.random.get_state()
        same = torch.equal(torch.get_rng_state(), on_cpu) and random.getstate() == python
        return not (same and places_now == places and np.array_equal(keys_now, keys))

    @contextlib.contextmanager
    def again(self) -> Iterator[None]:
        """Run what is inside under the same conditions, with the same random numbers."""
        with torch.autocast(self.device.type, self.autocast, enabled=self.autocast is not None):
            if self.rng is None:
                yield
                return
            on_cpu, on_gpu, python, numpy = self.rng
            with random_state_kept():
                torch.set_rng_state(on_cpu)
                if on_gpu is not None:
                    torch.cuda.set_rng_state(on_gpu, self.device)
                random.setstate(python)
                np.random.set_state(numpy)
                yield


def may_draw(module: nn.Module) -> bool:
    """Return True if a forward may draw random numbers."""
    is_stock = type(module).__module__.startswith("torch.nn.modules.")
    is_stock = is_stock and "forward" not in vars(module)
    return not is_stock or (module.training and getattr(module, "dropout", 0.0) > 0)


class OtherOutputsError(RefusedError):
    """Raised where a module that ran again gave other outputs. gross: the difference is none of
    rounding, so that a sample's output in the batch depends on other samples."""

    def __init__(self, gross: bool) -> None:
        super().__init__("other_outputs")
        self.gross = gross


@dataclass(frozen=True)
class Outcome:
    """Elements from all over an output, and the rounding unit it was computed in."""

    elements: Tensor
    eps: float

    @staticmethod
    def of(output: Tensor, eps: float) -> Outcome | None:
        """Return an output's, or None for integers and for tensor subclasses or sparse tensors."""
        plain = type(output) in (Tensor, nn.Parameter) and output.layout is torch.strided
        if not plain or not (output.is_floating_point() or output.is_complex()):
            return None
        with torch.no_grad(), torch._C._DisableTorchDispatch():  # hidden from the user's modes
            elements = _elements(output).clone()
        return Outcome(elements, max(eps, torch.finfo(output.dtype).eps))

    def difference(self, again: Tensor) -> float:
        """Return the relative difference of the finite elements that differ."""
        before, now = (t.to(torch.promote_types(t.dtype, torch.float64))
                       for t in (self.elements, _elements(again.detach())))  # fmt: skip
        differs = before.isfinite() & now.isfinite() & (before != now)
        difference, *sizes = (float(t[differs].norm()) for t in (now - before, before, now))
        return difference / max(sizes) if difference else 0.0


def require_same(outcomes: Sequence[Outcome | None], again: Sequence[Tensor | None]) -> None:
    """Raise unless outputs that were computed again (None: not compared) equal the forward's."""
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
    """Return up to MAX_ELEMENTS of a tensor; the step is odd, so that they cover all columns."""
    return t.reshape(-1)[:: t.numel() // MAX_ELEMENTS | 1]
