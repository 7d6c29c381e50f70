"""The gradient noise scale: how large a batch is worth its cost."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from ..attach import Probe
from ..options import check_per
from .ranks import Ranks, running

__all__ = ["NoiseScale"]

MODEL = ""  # the name of the one group of per="model"


class NoiseScale:
    """Averages over training steps of tr(Sigma) and |G|^2, whose ratio is the simple noise scale.

    With g_n the gradients of single samples, G their mean over all data and Sigma their covariance,
    B_simple = tr(Sigma) / |G|^2 (McCandlish et al. 2018, arXiv:1812.06162, section 2.2). It is a
    number of samples: far below it, a batch twice as large makes nearly twice the progress a step;
    far above, hardly any. The critical batch size, where a training takes twice the least steps
    and twice the least samples, is B_simple as far as the loss curves alike in all directions.

    Where `.grad` is sum_n w_n g_n of samples drawn evenly, with W = sum w_n, Q = sum w_n^2 and
    M = mean |g_n|^2, unbiased estimates of one step are::

        |G|^2     = (|.grad|^2 - Q M) / (W^2 - Q)
        tr(Sigma) = (W^2 M - |.grad|^2) / (W^2 - Q)

    (for a plain mean over B samples: W = 1, Q = 1/B, as in their appendix A.1). Numerator and
    denominator are averaged apart, since the ratio of a single step is far off and biased.

    Equivalent to, at each step, with gradients [B, number of parameters] of single samples::

        trace = gradients.var(0).sum()
        sq_norm = gradients.mean(0).square().sum() - trace / B

    Example::

        noise = NoiseScale()
        loss.backward()  # of a model with probe = attach(model)
        noise.update(probe)
        optimizer.step()
        noise.critical_batch_size

    Args:
        per: "model", "module" or "parameter": what the noise scale is of, as in `Probe.norms`.
        decay: of the exponential averages, from 0 (the last step alone) to below 1.
        distributed: whether `.grad` is the mean over all ranks (DDP, fully_shard), whose samples
            then count too; None: if torch.distributed runs with several.
    """

    def __init__(
        self, *, per: str = "model", decay: float = 0.99, distributed: bool | None = None
    ) -> None:
        check_per(per)
        if not 0 <= decay < 1:
            raise ValueError(f"decay must be from 0 to below 1; got {decay!r}")
        self.per, self.decay, self.distributed = per, decay, distributed
        self.steps = 0  # that were averaged
        self.skipped = 0  # of one sample, or with infinite or undefined gradients
        self._averages: dict[str, tuple[float, float]] = {}  # tr(Sigma), |G|^2, not yet corrected

    def update(self, probe: Probe) -> None:
        """Count a step in: between its last backward() and unscale_, clipping, step or zero_grad.

        Reads `probe.norms`, so that the next backward begins a new record. `.grad` must hold the
        gradient of the record's samples, all of them and nothing else: zero it at every step, and
        read the norms of micro-batches no earlier than here. What makes `.grad` smaller meanwhile,
        as zero_grad between micro-batches or torch's own clipping, is seen with attach(clip=True)
        alone. Under torch.distributed every rank calls this at the same steps; two messages are
        sent, the first so that an error of one rank is one of all.

        Raises:
            RuntimeError: `.grad` is not there, changed, unscaled or clipped already, another one on
                each rank, larger than the samples of the record can make it, or (seen from the
                second update on) held something before them.
            CoverageError: as of `Probe.norms`.
        """
        sums, sq_grads = self._measure(probe)
        (count, total, squares, most), sq_norms = sums[:4], sums[4:]
        spread = total * total - squares
        if not all(map(math.isfinite, (*sums, *sq_grads))) or count < 2 or spread <= 0:
            self.skipped += 1
            return
        if sum(sq_grads) ** 0.5 > most * 1.01:  # by more than halves round
            raise RuntimeError(
                ".grad is larger than the samples of the record can make it: zero it at every "
                "step, call update() before unscale_ and once a step, and leave penalties out"
            )
        for name, sq_norm, sq_grad in zip(self._names, sq_norms, sq_grads, strict=True):
            mean = sq_norm / count
            now = (total * total * mean - sq_grad) / spread, (sq_grad - squares * mean) / spread
            before = self._averages.get(name, (0.0, 0.0))
            trace, signal = (
                self.decay * old + (1 - self.decay) * new
                for old, new in zip(before, now, strict=True)
            )
            self._averages[name] = trace, signal
        self.steps += 1

    def _measure(self, probe: Probe) -> tuple[list[float], list[float]]:
        """[4 + K]: count, W, Q, sum w_n |g_n| and the sum of |g_n|^2 by group; [K]: |.grad|^2."""
        ranks = Ranks(running() if self.distributed is None else self.distributed)
        with ranks.together():
            weights = probe.shares / ranks.world
            norms = probe.norms(self.per)
            groups: Mapping[str, Tensor] = {MODEL: norms} if isinstance(norms, Tensor) else norms
            self._names = list(groups)
            sq_norms = torch.stack(list(groups.values())).double().cpu().square()  # [K, N]
            most = weights.abs() @ sq_norms.sum(0).sqrt()
            count = weights.count_nonzero().double()  # a weight of 0 is that of no sample
            own = torch.stack([count, weights.sum(), weights.square().sum(), most])
            here, sharded = self._sq_grads(probe)
        alike = torch.stack([here.sum(), here.sum().square()])
        reduced = ranks.sum(torch.cat([own, sq_norms.sum(1), sharded, alike]))
        mean, square = (reduced[-2:] / ranks.world).tolist()
        if square > mean * mean * (1 + 1e-6):
            raise RuntimeError(
                ".grad is another one on each rank: call update() when it is averaged over them, "
                "not under no_sync(), or say distributed=False"
            )
        k = len(groups)
        return reduced[: 4 + k].tolist(), (here + reduced[4 + k : -2]).tolist()

    def _sq_grads(self, probe: Probe) -> tuple[Tensor, Tensor]:
        """[K], [K]: of gradients that are whole on this rank, and of those of which a part is."""
        sums = torch.zeros(2, len(self._names), dtype=torch.float64)
        found: dict[torch.dtype, list[tuple[int, int, Tensor]]] = {}
        for k, gradients in enumerate(probe.gradients(self.per).values()):
            for gradient in gradients:
                part = getattr(gradient, "_local_tensor", None)  # of a DTensor
                values = gradient if part is None else part
                values = values.coalesce().values() if values.is_sparse else values
                found.setdefault(values.dtype, []).append((int(part is not None), k, values))
        for dtype, entries in found.items():  # one message to the device and one back
            wide = torch.promote_types(dtype, torch.float32)
            norms = torch._foreach_norm([values for *_, values in entries], 2, wide)
            sq_norms = torch.stack(norms).double().cpu().square()
            for (sharded, k, _), sq_norm in zip(entries, sq_norms, strict=True):
                sums[sharded, k] += sq_norm
        if not found:
            raise RuntimeError(
                "there is no .grad: call update() between backward() and zero_grad(), with "
                "attach(weight_grad=True)"
            )
        return sums[0], sums[1]

    # What is known

    @property
    def trace(self) -> float | dict[str, float]:
        """tr(Sigma), in squared units of the gradient; NaN before the first step."""
        return self._by_name(lambda trace, signal: trace)

    @property
    def sq_grad_norm(self) -> float | dict[str, float]:
        """|G|^2, of the gradient without noise; an estimate, which may be negative."""
        return self._by_name(lambda trace, signal: signal)

    @property
    def noise_scale(self) -> float | dict[str, float]:
        """B_simple in samples; infinite where no gradient is seen for the noise (|G|^2 <= 0)."""
        return self._by_name(lambda t, s: t / s if s > 0 else float("inf"))

    @property
    def critical_batch_size(self) -> float | dict[str, float]:
        """`noise_scale`: the same number, under the approximation said above."""
        return self.noise_scale

    def efficiency(self, batch_size: float) -> float | dict[str, float]:
        """The progress of a step of this batch size, as a part of the most a step can make:
        B / (B + B_simple)."""
        return self._by_name(lambda t, s: batch_size * s / (batch_size * s + t) if s > 0 else 0.0)

    def _by_name(self, of: Any) -> Any:
        correction = 1 - self.decay**self.steps
        found = {
            name: float(of(trace / correction, signal / correction))
            for name, (trace, signal) in self._averages.items()
        }
        return found.get(MODEL, float("nan")) if self.per == "model" else found

    def __repr__(self) -> str:
        return f"NoiseScale(noise_scale={self.noise_scale}, steps={self.steps})"

    # Checkpoints

    def state_dict(self) -> dict[str, Any]:
        return {
            "per": self.per,
            "decay": self.decay,
            "steps": self.steps,
            "skipped": self.skipped,
            "averages": {name: list(pair) for name, pair in self._averages.items()},
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from `state_dict()`, of the same `per`; the decay is the saved one."""
        if state["per"] != self.per:
            raise ValueError(f"the state is of per={state['per']!r}; this is of {self.per!r}")
        self.decay, self.steps = state["decay"], state["steps"]
        self.skipped = state["skipped"]
        self._averages = {name: (pair[0], pair[1]) for name, pair in state["averages"].items()}
