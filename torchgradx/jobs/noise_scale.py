"""The gradient noise scale: how large a batch is worth its cost."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from numbers import Real
from typing import Any

import torch
from torch import Tensor, nn

from ..options import check_per
from ..probe import Probe
from .given import norms_of
from .ranks import Ranks, running

__all__ = ["NoiseScale"]

MODEL = ""  # the name of the one group of per="model"
PARTS = (24, 12, 6)  # averages are over the last 1/24, 1/12 and 1/6 of the steps
LONGEST = 100  # steps, of the last of these
AGREE = 3  # standard errors, within which a shorter average agrees with a longer one
ENOUGH = 0.15  # of a ratio: so small a standard error needs no longer average
WARMUP = 30  # steps


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
        print(noise)  # or noise.critical_batch_size, noise.spread

    By default the averages are over the last sixth of the steps so far, a hundred at most, and so
    follow a training whose noise scale grows. Averages over the last twelfth and 24th count where
    they are precise enough, or differ from the longer one significantly. The first steps are a
    warm-up: `warming_up` and `print(noise)` say so.

    Args:
        per: "model", "module" or "parameter": what the noise scale is of, as in `Probe.norms`.
        decay: None, or that of exponential averages, from 0 (the last step alone) to below 1.
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
        self._windows: dict[str, list[_Averages]] = {}  # the shortest first

    def update(self, norms: Probe | Tensor, grad: float | Tensor | nn.Module | None = None) -> None:
        """Count a step in: between its last backward() and unscale_, clipping, step or zero_grad.

        Given a probe, reads `probe.norms`, so that the next backward begins a new record. `.grad`
        must hold the gradient of the record's samples, all of them and nothing else: zero it at
        every step, and read the norms of micro-batches no earlier than here. What makes `.grad`
        smaller meanwhile, as zero_grad between micro-batches or torch's own clipping, is seen with
        attach(clip=True) alone. Under torch.distributed every rank calls this at the same steps;
        two messages are sent, the first so that an error of one rank is one of all.

        Args:
            norms: the probe, or the norms [N] of a batch whose loss was the mean over its samples
                (per="model" only).
            grad: beside norms: the norm of the batch's mean gradient, or the model that holds it in
                `.grad`.

        Raises:
            TypeError, ValueError: an argument is not as above.
            RuntimeError: `.grad` is not there, changed, unscaled or clipped already, another one on
                each rank, larger than the samples of the record can make it, or (seen from the
                second update on) held something before them.
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
        decays = self._decays()
        for name, sq_norm, sq_grad in zip(self._names, sq_norms, sq_grads, strict=True):
            mean = sq_norm / count
            trace = (total * total * mean - sq_grad) / spread
            signal = (sq_grad - squares * mean) / spread
            windows = self._windows.setdefault(name, [_Averages() for _ in decays])
            for averages, decay in zip(windows, decays, strict=True):
                averages.add(trace, signal, decay)
        self.steps += 1
        self.batch_size = int(count)

    def _decays(self) -> list[float]:
        if self.decay is not None:
            return [self.decay]
        steps = min(self.steps, LONGEST * PARTS[-1])
        spans = [max(steps / part, min(3, steps / PARTS[-1])) for part in PARTS]
        return [1 - 1 / (1 + span) for span in spans]

    @property
    def _averages(self) -> dict[str, _Averages]:
        return {name: _longest(windows) for name, windows in self._windows.items()}

    def _measure(self, given: Any, grad: Any) -> tuple[list[float], list[float]]:
        """[4 + K]: count, W, Q, sum w_n |g_n| and the sum of |g_n|^2 by group; [K]: |.grad|^2."""
        ranks = Ranks(running() if self.distributed is None else self.distributed)
        with ranks.together():
            weights, groups, here, sharded = self._read(given, grad)
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

    def _read(self, given: Any, grad: Any) -> tuple[Tensor, Mapping[str, Tensor], Tensor, Tensor]:
        """Weights [N], norms [N] by group; |.grad|^2 [K] of what is whole here, and of parts."""
        if isinstance(given, Probe):
            if grad is not None:
                raise TypeError("grad goes beside norms: a probe knows its model")
            weights = given.shares
            found = given.norms(self.per)
            groups = {MODEL: found} if isinstance(found, Tensor) else found
            self._names = list(groups)
            here, sharded = self._sq_grads(given.gradients(self.per))
            return weights, groups, here, sharded
        norms = norms_of(given)
        assert isinstance(norms, Tensor)
        if self.per != "model":
            raise TypeError(f"norms must be a probe, of which per={self.per!r} can be read")
        self._names = [MODEL]
        if isinstance(grad, nn.Module):
            held = [p.grad for p in grad.parameters() if p.grad is not None]
            here, sharded = self._sq_grads({MODEL: held})
        elif isinstance(grad, (Real, Tensor)) and not isinstance(grad, bool):
            here = torch.as_tensor(grad).detach().double().cpu().reshape(1).square()
            sharded = torch.zeros_like(here)
        else:
            raise TypeError(
                "update(norms, grad) needs the norm of the batch's mean gradient beside norms, or "
                f"the model that holds it in .grad; got {type(grad).__name__}. A probe needs none"
            )
        weights = torch.full((len(norms),), 1 / max(1, len(norms)), dtype=torch.float64)
        return weights, {MODEL: norms}, here, sharded

    def _sq_grads(self, groups: Mapping[str, Sequence[Tensor]]) -> tuple[Tensor, Tensor]:
        """[K], [K]: of gradients that are whole on this rank, and of those of which a part is."""
        sums = torch.zeros(2, len(self._names), dtype=torch.float64)
        found: dict[torch.dtype, list[tuple[int, int, Tensor]]] = {}
        for k, gradients in enumerate(groups.values()):
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
    def warming_up(self) -> bool:
        """True while too few steps were averaged to rely on."""
        return self.steps < self._warmup

    @property
    def _warmup(self) -> int:
        return WARMUP if self.decay is None else math.ceil(1 / (1 - self.decay))

    @property
    def trace(self) -> float | dict[str, float]:
        """tr(Sigma), in squared units of the gradient; NaN before the first step."""
        return self._by_name(lambda averages: averages.trace)

    @property
    def sq_grad_norm(self) -> float | dict[str, float]:
        """|G|^2, of the gradient without noise; an estimate, which may be negative."""
        return self._by_name(lambda averages: averages.signal)

    @property
    def noise_scale(self) -> float | dict[str, float]:
        """B_simple in samples; infinite where no gradient is seen for the noise (|G|^2 <= 0)."""
        return self._by_name(lambda averages: averages.ratio)

    @property
    def critical_batch_size(self) -> float | dict[str, float]:
        """`noise_scale`: the same number, under the approximation said above."""
        return self.noise_scale

    @property
    def spread(self) -> Any:
        """Return (low, high), two standard errors to each side; (0, inf) after too few steps."""
        found = {name: averages.spread() for name, averages in self._averages.items()}
        return found.get(MODEL, (0.0, math.inf)) if self.per == "model" else found

    def efficiency(self, batch_size: float) -> float | dict[str, float]:
        """Return a step's share of the progress that any step can make: B / (B + B_simple)."""
        return self._by_name(lambda averages: _efficiency(batch_size, averages.ratio))

    def _by_name(self, of: Callable[[_Averages], float]) -> Any:
        found = {name: float(of(averages)) for name, averages in self._averages.items()}
        return found.get(MODEL, math.nan) if self.per == "model" else found

    def __str__(self) -> str:
        """A sentence that says what the noise scale means for the batch in use."""
        if not self.steps:
            return "Noise scale: no step was counted yet."
        head = "Noise scale"
        if self.warming_up:
            head += f" (warming up: {self.steps} of {self._warmup} steps)"
        if self.per == "model":
            return f"{head}: {_sentence(self._averages[MODEL], self.batch_size)}"
        lines = [f"  {name or '(root)'}: {_said(a)}" for name, a in self._averages.items()]
        return "\n".join([f"{head}, in samples:", *lines])

    def __repr__(self) -> str:
        warming = ", warming up" if self.warming_up else ""
        return f"NoiseScale(noise_scale={self.noise_scale}, steps={self.steps}{warming})"

    # Checkpoints

    def state_dict(self) -> dict[str, Any]:
        return {
            "per": self.per,
            "decay": self.decay,
            "steps": self.steps,
            "skipped": self.skipped,
            "batch_size": self.batch_size,
            "averages": {
                name: [list(a.sums) for a in each] for name, each in self._windows.items()
            },
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from `state_dict()`, of the same `per`; the decay is the saved one."""
        if state["per"] != self.per:
            raise ValueError(f"the state is of per={state['per']!r}; this is of {self.per!r}")
        self.decay, self.steps = state["decay"], state["steps"]
        self.skipped, self.batch_size = state["skipped"], state["batch_size"]
        self._windows = {k: [_Averages(sums) for sums in v] for k, v in state["averages"].items()}


class _Averages:
    """Exponential averages of a step's tr(Sigma) and |G|^2, and of their products."""

    def __init__(self, sums: Sequence[float] = (0.0,) * 7) -> None:
        # Of weights and their squares; of weights times trace, signal, and these two's products.
        self.sums = list(sums)

    def add(self, trace: float, signal: float, decay: float) -> None:
        new = (1.0, trace, signal, trace * trace, trace * signal, signal * signal)
        weight, squares, *sums = self.sums
        sums = [
            decay * old + (1 - decay) * one for old, one in zip((weight, *sums), new, strict=True)
        ]
        self.sums = [sums[0], decay**2 * squares + (1 - decay) ** 2, *sums[1:]]

    @property
    def trace(self) -> float:
        return self.sums[2] / self.sums[0]

    @property
    def signal(self) -> float:
        return self.sums[3] / self.sums[0]

    @property
    def ratio(self) -> float:
        return self.trace / self.signal if self.signal > 0 else math.inf

    def shares(self, errors: float) -> tuple[float, float]:
        """Return |G|^2 / tr(Sigma), so many standard errors less and more (delta method)."""
        weight, squares, trace, signal, *products = self.sums
        steps = weight * weight / squares  # as many of equal weight
        if steps < 1.5 or trace <= 0:
            return -math.inf, math.inf
        share = signal / trace
        tt, ts, ss = products
        variance = max(0.0, (ss - 2 * share * ts + share * share * tt) / weight)
        error = errors * math.sqrt(variance / (steps - 1)) * weight / trace
        return share - error, share + error

    def spread(self) -> tuple[float, float]:
        low, high = self.shares(2)
        return (1 / high if high > 0 else math.inf), (1 / low if low > 0 else math.inf)


def _longest(windows: Sequence[_Averages]) -> _Averages:
    """The longest average that all shorter ones agree with (Lepski's rule), unless one of these is
    precise enough: a shorter one lags less."""
    low, high, chosen = -math.inf, math.inf, windows[0]
    for averages in windows:
        share = averages.signal / averages.trace if averages.trace > 0 else math.nan
        if not low <= share <= high:
            break
        chosen = averages
        less, more = averages.shares(AGREE)
        if more - share < AGREE * ENOUGH * share:
            break
        low, high = max(low, less), min(high, more)
    return chosen


def _efficiency(batch_size: float, ratio: float) -> float:
    return batch_size / (batch_size + ratio)


def _said(averages: _Averages) -> str:
    low, high = averages.spread()
    if not math.isfinite(averages.ratio) or not math.isfinite(high):
        return f"at least {low:,.0f}" if 0 < low < math.inf else "unknown"
    return f"{averages.ratio:,.0f} ({low:,.0f} to {high:,.0f})"


def _sentence(averages: _Averages, batch: int) -> str:
    ratio = averages.ratio
    if not math.isfinite(ratio):
        return (
            f"{_said(averages)} samples. No gradient is seen for the noise of batches of {batch}; "
            "a much larger batch, or a smaller learning rate, makes more of each step."
        )
    now, double = _efficiency(batch, ratio), _efficiency(2 * batch, ratio)
    text = (
        f"{_said(averages)} samples. A step at this batch of {batch} makes {now:.0%} of the "
        f"progress that one of any size can make; at {2 * batch} it would make {double:.0%}. "
    )
    if batch > 2 * ratio:
        return text + "A smaller batch would learn as much from fewer samples."
    if batch < ratio / 2:
        return text + "A larger batch would need fewer steps, for almost no more samples."
    return text + "That is near the critical batch size."
