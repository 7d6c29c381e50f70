"""A watch for outliers: samples whose gradient is far beyond what the latest ones were."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping
from dataclasses import astuple, dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ..probe import Probe
from .arguments import MODEL, indices_of, norms_of


@dataclass(frozen=True)
class Outlier:
    step: int
    index: int  # of the sample, or its place in the batch
    norm: float
    threshold: float  # at that step; NaN for a norm that is not finite, while warming up
    name: str  # of the parameter or module; "" for the model


class OutlierWatch:
    """Flags samples whose norm is above factor x a running quantile: what made the loss spike.

    The quantile is exact, of the last `window` finite norms (numpy's linear interpolation), which
    follows a training whose norms drift; a batch is compared with those before it. Outliers enter
    the window like all others, so that a lasting change is no outlier for long. A norm that is not
    finite is always flagged and never enters. One copy to the CPU a step.

    Equivalent to::

        threshold = factor * np.quantile(norms_before[-window:], quantile)
        flagged = [n for n in range(N) if norms[n] > threshold]

    Args:
        quantile: from 0 to 1.
        factor: how far above it a norm is an outlier's.
        window: how many norms the quantile is of; 8 bytes each.
        warmup: no finite norm is flagged before so many were seen.
        writer: a callable (dict, step), such as a Lightning logger's log_metrics, or a TensorBoard
            SummaryWriter. Gets <tag>/mean, /max, /threshold and /outliers at each step.
        tag: what the names in `writer` begin with.
        keep: how many of the latest outliers `outliers` holds.
    """

    def __init__(
        self,
        *,
        quantile: float = 0.99,
        factor: float = 3.0,
        window: int = 4096,
        warmup: int = 256,
        writer: Any = None,
        tag: str = "grad_norm",
        keep: int = 1000,
    ) -> None:
        if not 0 <= quantile <= 1:
            raise ValueError(f"quantile must be from 0 to 1; got {quantile!r}")
        if not factor > 0:
            raise ValueError(f"factor must be above 0; got {factor!r}")
        if not 1 <= warmup <= window:
            raise ValueError(f"warmup must be from 1 to window = {window!r}; got {warmup!r}")
        self.quantile, self.factor = quantile, factor
        self.window, self.warmup = window, warmup
        self.writer, self.tag = writer, tag
        self.outliers: deque[Outlier] = deque(maxlen=keep)
        self.steps = 0
        self._latest: dict[str, NDArray[np.float64]] = {}

    def update(
        self,
        norms: Probe | Tensor | Mapping[str, Tensor],
        indices: Any = None,
        step: int | None = None,
    ) -> list[Outlier]:
        """Hold a batch's norms against those before it; returns what is flagged.

        Args:
            norms: a probe, or [N], or a dict of them by name, as `Probe.norms` returns them.
            indices: [N], of the samples in their dataset; None: their places in the batch.
            step: of the training; None: how many updates there were before.

        Raises:
            TypeError, ValueError: an argument is not as above.
            CoverageError: as of `Probe.norms`.
        """
        step = self.steps if step is None else step
        by_name = norms if isinstance(norms, Mapping) else {MODEL: norms}
        groups = {name: norms_of(each).double() for name, each in by_name.items()}
        together = torch.stack(list(groups.values())).cpu().numpy() if groups else ()
        flagged: list[Outlier] = []
        scalars: dict[str, float] = {}
        for name, values in zip(groups, together, strict=True):
            ids = np.arange(len(values)) if indices is None else indices_of(indices)
            if ids.shape != values.shape:
                raise ValueError(f"indices must be [{len(values)}], as norms are; got {len(ids)}")
            threshold = self._threshold(name)
            wrong = ~np.isfinite(values) | (values > threshold)  # nothing is above NaN
            found = [
                Outlier(step, int(ids[k]), float(values[k]), threshold, name)
                for k in np.flatnonzero(wrong)
            ]
            latest = np.append(self._latest.get(name, ()), values[np.isfinite(values)])
            self._latest[name] = latest[-self.window :]
            flagged += found
            tag = f"{self.tag}/{name}" if name else self.tag
            if len(values):
                scalars[f"{tag}/mean"] = float(values.mean())
                scalars[f"{tag}/max"] = float(values.max())
            if not math.isnan(threshold):
                scalars[f"{tag}/threshold"] = threshold
            scalars[f"{tag}/outliers"] = float(len(found))
        if callable(self.writer):
            self.writer(scalars, step)
        elif self.writer is not None:
            for tagged, value in scalars.items():
                self.writer.add_scalar(tagged, value, step)
        self.outliers.extend(flagged)
        self.steps += 1
        return flagged

    @property
    def threshold(self) -> float | dict[str, float]:
        """Return the threshold of the next batch, by name where norms are; NaN while warming up."""
        if self._latest.keys() <= {MODEL}:
            return self._threshold(MODEL)
        return {name: self._threshold(name) for name in self._latest}

    def _threshold(self, name: str) -> float:
        latest = self._latest.get(name, ())
        if len(latest) < self.warmup:
            return math.nan
        return float(self.factor * np.quantile(latest, self.quantile))

    def __repr__(self) -> str:
        found = len(self.outliers)
        return f"OutlierWatch(steps={self.steps}, threshold={self.threshold}, outliers={found})"

    def state_dict(self) -> dict[str, Any]:
        return {
            "steps": self.steps,
            "latest": {name: latest.tolist() for name, latest in self._latest.items()},
            "outliers": [astuple(outlier) for outlier in self.outliers],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from `state_dict()`; of a longer window, its last norms count."""
        self.steps = state["steps"]
        latest = state["latest"].items()
        self._latest = {name: np.array(values, float)[-self.window :] for name, values in latest}
        self.outliers.clear()
        self.outliers.extend(Outlier(*outlier) for outlier in state["outliers"])
