"""What a forward runs under, for what runs again to run under it too."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from ..kept import random_state_kept


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
            return _without_random(kind, autocast)
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


@cache
def _without_random(device: str, autocast: torch.dtype | None) -> Regime:
    return Regime(device, autocast, None)


def may_draw(module: nn.Module) -> bool:
    """Return True if a forward may draw random numbers."""
    stock = type(module).__module__.startswith("torch.nn.modules.")
    stock = stock and "forward" not in vars(module)
    return not stock or (module.training and getattr(module, "dropout", 0.0) > 0)
