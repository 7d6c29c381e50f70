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
from .given import norms_of

__all__ = ["Outlier", "OutlierWatch"]

MODEL = ""  # the name of norms that are of the whole model


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
    follows a training whose norms drift; a batch is held against those before it. Outliers enter
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
        writer: a TensorBoard SummaryWriter, or anything with add_scalar(tag, value, step) and
            add_histogram(tag, values, step). Gets the scalars <tag>/mean, /max, /threshold and
            /outliers at each step, and a histogram of the window now and then.
        tag: what the names in `writer` begin with.
        histogram_every: steps between histograms; 0: none.
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
        histogram_every: int = 100,
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
        self.writer, self.tag, self.histogram_every = writer, tag, histogram_every
        self.outliers: deque[Outlier] = deque(maxlen=keep)
        self.steps = 0
        self._latest: dict[str, _Window] = {}

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
        norms = norms_of(norms, named=True)
        step = self.steps if step is None else step
        groups = norms if isinstance(norms, Mapping) else {MODEL: norms}
        flagged: list[Outlier] = []
        before = self._thresholds()
        for name, values in _on_cpu(groups).items():
            ids = _ids(indices, len(values))
            latest = self._latest.setdefault(name, _Window(self.window))
            threshold = before.get(name, math.nan)
            wrong = ~np.isfinite(values) | (values > threshold)  # nothing is above NaN
            found = [
                Outlier(step, int(ids[k]), float(values[k]), threshold, name)
                for k in np.flatnonzero(wrong)
            ]
            latest.add(values[np.isfinite(values)])
            flagged += found
            if self.writer is not None:
                self._write(name, values, threshold, len(found), step, latest)
        self.outliers.extend(flagged)
        self.steps += 1
        return flagged

    @property
    def threshold(self) -> float | dict[str, float]:
        """Return the threshold of the next batch, by name where norms are; NaN while warming up."""
        found = self._thresholds()
        return found.get(MODEL, math.nan) if found.keys() <= {MODEL} else found

    def _thresholds(self) -> dict[str, float]:
        """By name; of all windows that are as full, the quantile is found at once."""
        alike: dict[int, list[str]] = {}
        for name, latest in self._latest.items():
            alike.setdefault(len(latest), []).append(name)
        found = dict.fromkeys(self._latest, math.nan)
        for count, names in alike.items():
            if count >= self.warmup:
                held = np.stack([self._latest[name].in_any_order() for name in names])
                found.update(zip(names, self.factor * _quantile(held, self.quantile), strict=True))
        return {name: float(threshold) for name, threshold in found.items()}

    def _write(
        self,
        name: str,
        values: NDArray[np.float64],
        threshold: float,
        outliers: int,
        step: int,
        latest: _Window,
    ) -> None:
        tag = f"{self.tag}/{name}" if name else self.tag
        scalars = {"outliers": float(outliers), "threshold": threshold}
        if len(values):
            scalars |= {"mean": float(values.mean()), "max": float(values.max())}
        for what, value in scalars.items():
            if not math.isnan(value) or what in ("mean", "max"):
                self.writer.add_scalar(f"{tag}/{what}", value, step)
        held = latest.values()
        if self.histogram_every and self.steps % self.histogram_every == 0 and len(held):
            self.writer.add_histogram(f"{tag}/window", held, step)

    def __repr__(self) -> str:
        found = len(self.outliers)
        return f"OutlierWatch(steps={self.steps}, threshold={self.threshold}, outliers={found})"

    # Checkpoints

    def state_dict(self) -> dict[str, Any]:
        return {
            "steps": self.steps,
            "latest": {name: latest.values().tolist() for name, latest in self._latest.items()},
            "outliers": [astuple(outlier) for outlier in self.outliers],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from `state_dict()`; of a longer window, its last norms count."""
        self.steps = state["steps"]
        self._latest = {}
        for name, values in state["latest"].items():
            self._latest[name] = _Window(self.window)
            self._latest[name].add(np.asarray(values, np.float64))
        self.outliers.clear()
        self.outliers.extend(Outlier(*outlier) for outlier in state["outliers"])


class _Window:
    """The last values, oldest first."""

    def __init__(self, size: int) -> None:
        self._ring = np.empty(size)
        self._count = 0  # ever put there

    def add(self, values: NDArray[np.float64]) -> None:
        size = len(self._ring)
        values = values[-size:]
        places = (self._count + np.arange(len(values))) % size
        self._ring[places] = values
        self._count += len(values)

    def __len__(self) -> int:
        return min(self._count, len(self._ring))

    def in_any_order(self) -> NDArray[np.float64]:
        return self._ring[: self._count]

    def values(self) -> NDArray[np.float64]:
        size = len(self._ring)
        if self._count <= size:
            return self._ring[: self._count]
        return np.roll(self._ring, -(self._count % size))


def _quantile(held: NDArray[np.float64], q: float) -> NDArray[np.float64]:
    """[K] of the rows of [K, count], as np.quantile's, which takes four times as long."""
    place = q * (held.shape[1] - 1)
    low, high = math.floor(place), math.ceil(place)
    held.partition((low, high), axis=1)
    return held[:, low] + (held[:, high] - held[:, low]) * (place - low)


def _on_cpu(groups: Mapping[str, Tensor]) -> dict[str, NDArray[np.float64]]:
    if not groups:
        return {}
    whole = torch.stack([norms.double() for norms in groups.values()])
    return dict(zip(groups, whole.cpu().numpy(), strict=True))


def _ids(indices: Any, count: int) -> NDArray[np.int64]:
    if indices is None:
        return np.arange(count)
    ids = indices.cpu().numpy() if isinstance(indices, Tensor) else np.asarray(indices)
    if ids.shape != (count,):
        raise ValueError(f"indices must be [{count}], as norms are; got {list(ids.shape)}")
    return ids
