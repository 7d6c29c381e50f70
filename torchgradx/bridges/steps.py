"""What the callbacks share: a probe on the trainer's model, read once for each optimizer step.

A trainer scales its losses as it likes: by micro-batches, by tokens, by a GradScaler. What a step's
gradient is the sum of needs no knowledge of that: one share for each of its N samples. A norm here
is N times that of the share. Under a mean over all of equal micro-batches it is the norm of the
sample's own gradient; elsewhere it weighs the sample as the trainer does.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn

from ..attach import attach
from ..jobs import NoiseScale, OutlierWatch
from ..options import check_per
from ..probe import Probe

__all__ = ["Norms", "StepNorms", "scale_of"]

Norms = Tensor | dict[str, Tensor]
THE_TRAINERS = ("loss_reduction", "loss_scale", "weight_grad")


class StepNorms:
    """A probe that lives as long as a fit."""

    def __init__(
        self,
        *,
        per: str = "model",
        prefix: str = "grad_norms",
        on_norms: Callable[[Norms, int], object] | None = None,
        noise_scale: bool = False,
        outliers: bool = False,
        **options: Any,
    ) -> None:
        check_per(per)
        taken = [name for name in options if name in THE_TRAINERS]
        if taken:
            raise TypeError(f"{taken[0]} is the trainer's: leave it out")
        self._per, self._prefix, self._on_norms, self._options = per, prefix, on_norms, options
        self._pause = ExitStack()
        self.probe: Probe | None = None  # while a fit runs
        self.norms: Norms | None = None  # of the latest step
        self.noise_scale = NoiseScale() if noise_scale else None
        self.outliers = OutlierWatch() if outliers else None

    def begin(self, model: nn.Module) -> None:
        self.probe = attach(model, loss_reduction="sum", **self._options)

    def end(self) -> None:
        self.resume()
        if self.probe is not None:
            self.probe.remove()
        self.probe = None

    def pause(self) -> None:
        if self.probe is not None:
            self._pause.enter_context(self.probe.paused())

    def resume(self) -> None:
        self._pause.close()

    def read(self, scale: float, step: int) -> dict[str, Tensor]:
        """Return the statistics to log of a step whose losses were multiplied by `scale`."""
        assert self.probe is not None
        shares = self.probe.norms()
        factor = len(shares) / scale
        norms = shares * factor
        logged = {f"{self._prefix}/{name}": of(norms) for name, of in STATISTICS.items()}
        self.norms = norms
        if self._per != "model":
            named = self.probe.norms(self._per)
            assert isinstance(named, dict)
            self.norms = {name: of * factor for name, of in named.items()}
            for name, of in self.norms.items():
                logged[f"{self._prefix}/mean/{name or 'root'}"] = of.mean()
        if (noise := self.noise_scale) is not None:
            if scale != 1:
                raise RuntimeError(
                    "noise_scale=True needs a training without a GradScaler, as in bfloat16: the "
                    "trainer unscales .grad before its callbacks see it"
                )
            noise.update(self.probe)
            logged[f"{self._prefix}/noise_scale"] = torch.tensor(noise.noise_scale, device="cpu")
        if self.outliers is not None:
            flagged = self.outliers.update(norms, step=step)
            logged[f"{self._prefix}/outliers"] = torch.tensor(float(len(flagged)), device="cpu")
        if self._on_norms is not None:
            self._on_norms(self.norms, step)
        return logged


STATISTICS: dict[str, Callable[[Tensor], Tensor]] = {
    "mean": torch.mean,
    "median": torch.median,
    "q90": lambda norms: norms.quantile(0.9),
    "max": torch.max,
}


def scale_of(scaler: Any) -> float:
    """Return what a GradScaler multiplies the losses of this step by."""
    return scaler.get_scale() if scaler is not None and scaler.is_enabled() else 1.0
