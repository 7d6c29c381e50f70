"""The gradient noise scale: how large a batch is worth its cost."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import reduce
from numbers import Real
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from ..options import check_per
from ..probe import Probe
from .arguments import MODEL, norms_of
from .ranks import Ranks

SPANS = np.array([1 / 6, 1 / 3])  # of the two averages, as parts of the steps so far
LONGEST = np.array([100.0, 200.0])  # steps
STEEPEST = 4.0  # ratio of the two averages
WARMUP = 30  # steps


class NoiseScale:
    """Averages over training steps of tr(Sigma) and |G|^2, whose ratio is the simple noise scale.

    With g_n the gradients of single samples, G their mean over all data and Sigma their covariance,
    B_simple = tr(Sigma) / |G|^2 (McCandlish et al. 2018, arXiv:1812.06162, section 2.2). It is a
    number of samples: far below it, a batch twice as large makes nearly twice the progress a step;
    far above, hardly any.

    Where `.grad` is sum_n w_n g_n of samples drawn evenly, with W = sum w_n, Q = sum w_n^2 and
    M = mean |g_n|^2, unbiased estimates of one step are (appendix A.1, for W = 1 and Q = 1/B)::

        |G|^2     = (|.grad|^2 - Q M) / (W^2 - Q)
        tr(Sigma) = (W^2 M - |.grad|^2) / (W^2 - Q)

    Equivalent to, at each step, with gradients [B, number of parameters] of single samples::

        trace = gradients.var(0).sum()
        sq_norm = gradients.mean(0).square().sum() - trace / B

    Example::

        noise = NoiseScale()
        loss.backward()  # of a model with probe = attach(model)
        noise.update(probe)
        optimizer.step()
        print(noise)  # or noise.critical_batch_size, noise.spread

    Both are averaged separately, since the ratio of a single step is biased. An average lags behind
    a training; so by default there are two, A over about the last sixth of the steps and B over the
    last third, and A^2 / B extrapolates to the current step (to first order in the growth rate).
    The first 30 steps are a warm-up; `warming_up` and `print(noise)` say so.

    Args:
        per: "model", "module" or "parameter": what the noise scale is of, as in `Probe.norms`.
        decay: None, or that of one exponential average, from 0 (the last step alone) to below 1.
        distributed: whether `.grad` is the mean over all ranks (DDP, fully_shard), whose samples
            then count too; None: if torch.distributed runs with several.
    """

    def __init__(
        self, *, per: str = "model", decay: float | None = None, distributed: bool | None = None
    ) -> None:
        check_per(per)
        if decay is not None and not 0 <= decay < 1:
            raise ValueError(f"decay must be None, or from 0 to below 1; got {decay!r}")
        self.per, self.decay, self.distributed = per, decay, distributed
        self.steps = 0  # that were averaged
        self.skipped = 0  # of one sample, or with infinite or undefined gradients
        self.batch_size = 0  # samples of the latest step, of all ranks
        self._names: list[str] = []
        # [K, 2, 6]: averages by group of 1, trace, signal and the products of these two. [2, 2]:
        # sums over steps of products of the averages' weights.
        self._sums, self._weights = np.zeros((1, 2, 6)), np.zeros((2, 2))

    def update(self, norms: Probe | Tensor, grad: float | Tensor | nn.Module | None = None) -> None:
        """Count a step in: between its last backward() and unscale_, clipping, step or zero_grad.

        Given a probe, reads `probe.norms`, so that the next backward begins a new record. `.grad`
        must hold the gradient of the record's samples, all of them and nothing else: zero it at
        every step. Under torch.distributed every rank calls this at the same steps.

        Args:
            norms: the probe, or the norms [N] of a batch whose loss was the mean over its samples
                (per="model" only).
            grad: beside norms: the norm of the batch's mean gradient, or the model that holds it in
                `.grad`.

        Raises:
            TypeError, ValueError: an argument is not as above.
            RuntimeError: `.grad` is not there, is larger than the samples of the record can make
                it, differs between ranks, or was seen to be changed, unscaled or clipped. What
                made it smaller is seen with attach(clip=True) alone.
            CoverageError: as of `Probe.norms`.
        """
        sums, sq_grads = self._measure(norms, grad)
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
        decays = 1 - 1 / (1 + np.minimum(self.steps * SPANS, LONGEST))
        if self.decay is not None:
            decays[:] = self.decay
        mean, grads = np.array(sq_norms) / count, np.array(sq_grads)
        trace = (total * total * mean - grads) / spread
        signal = (grads - squares * mean) / spread
        new = np.stack([trace**0, trace, signal, trace**2, trace * signal, signal**2], 1)
        self._sums = decays[:, None] * self._sums + (1 - decays)[:, None] * new[:, None]
        self._weights = np.outer(decays, decays) * self._weights + np.outer(1 - decays, 1 - decays)
        self.steps += 1
        self.batch_size = int(count)

    def _measure(self, source: Any, grad: Any) -> tuple[list[float], list[float]]:
        """[4 + K]: count, W, Q, sum w_n |g_n| and the sum of |g_n|^2 by group; [K]: |.grad|^2."""
        ranks = Ranks(self.distributed is None or self.distributed)
        with ranks.together():
            weights, groups, here, sharded = self._read(source, grad)
            if self.steps and list(groups) != self._names:
                raise ValueError(
                    f"other parameters are trained than in the {self.steps} steps before: average "
                    "in a new NoiseScale where you freeze or unfreeze"
                )
            self._names = list(groups)
            weights = weights / ranks.world
            sq_norms = torch.stack(list(groups.values())).double().cpu().square()  # [K, N]
            most = weights.abs() @ sq_norms.sum(0).sqrt()
            count = weights.count_nonzero().double()  # a weight of 0 is that of no sample
            own = torch.stack([count, weights.sum(), weights.square().sum(), most])
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

    def _read(self, source: Any, grad: Any) -> tuple[Tensor, Mapping[str, Tensor], Tensor, Tensor]:
        """Return weights [N], norms [N] by group; |.grad|^2 [K] of what is whole here; of parts."""
        if isinstance(source, Probe):
            if grad is not None:
                raise TypeError("grad goes beside norms: a probe knows its model")
            weights = source.shares
            found = source.norms(self.per)
            groups = {MODEL: found} if isinstance(found, Tensor) else found
            return weights, groups, *self._sq_grads(source.gradients(self.per))
        norms = norms_of(source)
        if self.per != "model":
            raise TypeError(f"norms must be a probe, of which per={self.per!r} can be read")
        if isinstance(grad, nn.Module):
            grads = [p.grad for p in grad.parameters() if p.grad is not None]
            here, sharded = self._sq_grads({MODEL: grads})
        elif isinstance(grad, (Real, Tensor)) and not isinstance(grad, bool):
            here = torch.as_tensor(grad, device="cpu").detach().double().reshape(1).square()
            sharded = torch.zeros_like(here)
        else:
            raise TypeError(
                "update(norms, grad) needs the norm of the batch's mean gradient beside norms, or "
                f"the model that holds it in .grad; got {type(grad).__name__}. A probe needs none"
            )
        weights = torch.ones(len(norms), dtype=torch.float64, device="cpu") / max(1, len(norms))
        return weights, {MODEL: norms}, here, sharded

    def _sq_grads(self, groups: Mapping[str, Sequence[Tensor]]) -> tuple[Tensor, Tensor]:
        """[K], [K]: of gradients that are whole on this rank, and of those of which a part is."""
        sums = torch.zeros(2, len(groups), dtype=torch.float64, device="cpu")
        found: list[tuple[int, int, Tensor]] = []
        for k, gradients in enumerate(groups.values()):
            for gradient in gradients:
                part = getattr(gradient, "_local_tensor", None)  # of a DTensor
                values = gradient if part is None else part
                values = values.coalesce().values() if values.is_sparse else values
                found.append((int(part is not None), k, values))
        if not found:
            raise RuntimeError(
                "there is no .grad: call update() between backward() and zero_grad(), with "
                "attach(weight_grad=True)"
            )
        wide = reduce(torch.promote_types, (v.dtype for *_, v in found), torch.float32)
        norms = torch._foreach_norm([values for *_, values in found], 2, wide)
        read = torch.stack([norm.to(norms[0].device) for norm in norms]).double().cpu()
        for (sharded, k, _), norm in zip(found, read, strict=True):
            sums[sharded, k] += norm.square()
        return sums[0], sums[1]

    @property
    def warming_up(self) -> bool:
        """True while too few steps were averaged to rely on."""
        return self.steps < self._warmup

    @property
    def _warmup(self) -> int:
        return WARMUP if self.decay is None else math.ceil(1 / (1 - self.decay))

    @property
    def trace(self) -> float | dict[str, float]:
        """tr(Sigma), in squared units of the gradient; NaN before the first step."""
        return self._by_name(self._extrapolated(1))

    @property
    def sq_grad_norm(self) -> float | dict[str, float]:
        """|G|^2, of the gradient without noise; an estimate, which may be negative."""
        return self._by_name(self._extrapolated(2))

    @property
    def noise_scale(self) -> float | dict[str, float]:
        """B_simple in samples; infinite where no gradient is seen for the noise (|G|^2 <= 0)."""
        return self._by_name(self._ratios())

    @property
    def critical_batch_size(self) -> float | dict[str, float]:
        """The batch size beyond which larger batches hardly help: `noise_scale`, the same number.

        There a training takes twice the least steps and twice the least samples, as far as the loss
        curves alike in all directions.
        """
        return self.noise_scale

    @property
    def spread(self) -> Any:
        """Return (low, high), two standard errors to each side; (0, inf) after too few steps."""
        return self._by_name(self._spreads()) if self.steps else (0.0, math.inf)

    def efficiency(self, batch_size: float) -> float | dict[str, float]:
        """Return a step's share of the progress that any step can make: B / (B + B_simple)."""
        return self._by_name(batch_size / (batch_size + self._ratios()))

    def _by_name(self, values: Any) -> Any:
        found = dict(zip(self._names, values.tolist(), strict=True)) if self.steps else {}
        return found.get(MODEL, math.nan) if self.per == "model" else found

    def _extrapolated(self, place: int) -> NDArray[np.float64]:
        """Return A^2 / B [K] where both are positive, else A."""
        if not self.steps:
            return np.full(1, math.nan)
        a, b = np.moveaxis(self._sums[..., place] / self._sums[..., 0], -1, 0)
        steep = np.clip(a / np.where(b > 0, b, 1), 1 / STEEPEST, STEEPEST)
        return np.where((a > 0) & (b > 0), a * steep, a)

    @np.errstate(divide="ignore", invalid="ignore")  # a trace of 0
    def _ratios(self) -> NDArray[np.float64]:
        return _inverse(self._extrapolated(2) / self._extrapolated(1))

    @np.errstate(divide="ignore", invalid="ignore")
    def _spreads(self) -> NDArray[np.float64]:
        """[K, 2]: the ratio two standard errors below and above (delta method)."""
        total = self._sums[0, :, 0]
        weights, factors = self._weights / np.outer(total, total), np.array([2, -1])
        trace, signal, tt, ts, ss = (self._sums[:, 1] / self._sums[:, 1, :1]).T[1:]
        share = signal / trace
        variance = np.maximum(0, ss - 2 * share * ts + share**2 * tt)
        variance = variance * (factors @ weights @ factors) / max(1e-9, 1 - weights[1, 1])
        error = 2 * np.sqrt(variance) / trace if weights[1, 1] < 2 / 3 else math.inf
        now = self._extrapolated(2) / self._extrapolated(1)
        return np.stack([_inverse(now + error), _inverse(now - error)], 1)

    def __str__(self) -> str:
        """Return a sentence that says what the noise scale means for the batch in use."""
        if not self.steps:
            return "Noise scale: no step was counted yet."
        head = "Noise scale"
        if self.warming_up:
            head += f" (warming up: {self.steps} of {self._warmup} steps)"
        texts = [_said(*each) for each in zip(self._ratios(), *self._spreads().T, strict=True)]
        if self.per == "model":
            return f"{head}: {texts[0]} samples. {_meaning(self.batch_size, *self._ratios())}"
        lines = [f"  {n or '(root)'}: {text}" for n, text in zip(self._names, texts, strict=True)]
        return "\n".join([f"{head}, in samples:", *lines])

    def __repr__(self) -> str:
        warming = ", warming up" if self.warming_up else ""
        return f"NoiseScale(noise_scale={self.noise_scale}, steps={self.steps}{warming})"

    def state_dict(self) -> dict[str, Any]:
        return {
            "per": self.per,
            "decay": self.decay,
            "steps": self.steps,
            "skipped": self.skipped,
            "batch_size": self.batch_size,
            "averages": dict(zip(self._names, self._sums.tolist(), strict=False)),
            "weights": self._weights.tolist(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from `state_dict()`, of the same `per`; the decay is the saved one."""
        if state["per"] != self.per:
            raise ValueError(f"the state is of per={state['per']!r}; this is of {self.per!r}")
        self.decay, self.steps = state["decay"], state["steps"]
        self.skipped, self.batch_size = state["skipped"], state["batch_size"]
        self._names = list(state["averages"])
        self._sums = np.array([*state["averages"].values()] or np.zeros((1, 2, 6)))
        self._weights = np.array(state["weights"])


def _inverse(share: NDArray[np.float64]) -> NDArray[np.float64]:
    return np.divide(1, share, out=np.full_like(share, math.inf), where=share > 0)


def _said(ratio: float, low: float, high: float) -> str:
    if not math.isfinite(ratio) or not math.isfinite(high):
        return f"at least {low:,.0f}" if 0 < low < math.inf else "unknown"
    return f"{ratio:,.0f} ({low:,.0f} to {high:,.0f})"


def _meaning(batch: int, ratio: float) -> str:
    if not math.isfinite(ratio):
        return (
            f"No gradient is seen for the noise of batches of {batch}; a much larger batch, or a "
            "smaller learning rate, makes more of each step."
        )
    now, double = batch / (batch + ratio), 2 * batch / (2 * batch + ratio)
    text = (
        f"A step at this batch of {batch} makes {now:.0%} of the progress that one of any size can "
        f"make; at {2 * batch} it would make {double:.0%}. "
    )
    if batch > 2 * ratio:
        return text + "A smaller batch would learn as much from fewer samples."
    if batch < ratio / 2:
        return text + "A larger batch would need fewer steps, for almost no more samples."
    return text + "That is near the critical batch size."
