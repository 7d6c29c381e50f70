"""Factors by which clipping multiplies each sample's gradient, and what a GradScaler adds."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from torch.amp.grad_scaler import OptState

from ..extension import Pass
from ..options import Scale
from ..reference.chunks import accumulation_dtype


class ClipGroup:
    """Parameters that are clipped together, and the samples' factors [N1 + N2 + ...] in passes."""

    def __init__(self, places: Sequence[int], factors: Tensor, runs: Sequence[Pass]) -> None:
        self.places, self._factors = places, factors
        self._parts = dict(zip(runs, factors.split([run.n for run in runs]), strict=True))
        self._cast: dict[Any, tuple[Tensor, float]] = {}  # by pass, device, dtype

    @cached_property
    def clips(self) -> bool:
        """Return True if a factor is not 1. On a GPU always: to read the factors would wait."""
        return not self._factors.is_cpu or bool((self._factors != 1).any())

    def factors(self, run: Pass, p: Tensor, unscaled: float) -> tuple[Tensor, float]:
        """Return factors [N] of a pass, and a scale that the sums are multiplied by in the dtype of
        .grad: `unscaled`, and the largest factor where the sums may be in float16, which has few
        small numbers."""
        key = run, p.device, p.dtype
        if key not in self._cast:
            wide, largest = accumulation_dtype(p.dtype), 1.0
            factors = self._parts[run].to(p.device)
            if (p.dtype == torch.float16 or unscaled != 1) and len(factors):
                found = float(factors.abs().amax())
                largest = found if 0 < found < float("inf") else 1.0
            factors = factors if largest == 1 else factors / largest
            self._cast[key] = factors.to(wide), largest * unscaled
        return self._cast[key]


def factors_of(norms: Tensor, max_norm: Scale | None, factors: Any, drops: bool) -> Tensor:
    """Return [N] float64: by the user's function `factors`, if any, else min(1, max_norm / norm).
    The factor of a norm that is not finite is nan, which spoils .grad; or 0, if `drops` is set or
    `factors` returns 0."""
    if factors is not None:
        return _users_factors(norms, factors, drops)
    exact, bound = norms.double(), _bound(norms, max_norm)
    result = torch.where(exact <= bound, 1.0, bound / exact)
    if drops:
        return result.masked_fill(~exact.isfinite(), 0.0)
    return result + (exact - exact)  # nan where the norm is not finite; masked_fill is slower


def _bound(norms: Tensor, max_norm: Scale | None) -> Tensor:
    """Return max_norm as a Tensor [] or [N] on the device of the norms."""
    if isinstance(max_norm, Tensor):
        bound = max_norm.to(norms.device, torch.float64)
        valid = bound.shape in ((), norms.shape) and bool((bound >= 0).all())
    else:  # filled on the device: a copy from the host would wait
        assert max_norm is not None
        bound, valid = norms.new_full((), max_norm, dtype=torch.float64), max_norm >= 0
    if not valid:
        raise ValueError(
            f"max_norm must be a number, or a Tensor [{len(norms)}], of 0 or more; got {max_norm!r}"
        )
    return bound


def _users_factors(norms: Tensor, factors: Callable[[Tensor], Tensor], drops: bool) -> Tensor:
    result = factors(norms.clone())
    if not isinstance(result, Tensor) or result.shape != norms.shape:
        got = f"shape {list(result.shape)}" if isinstance(result, Tensor) else repr(result)
        raise ValueError(f"factors must turn norms [{len(norms)}] into as many factors; got {got}")
    result = result.detach().double().masked_fill(norms == 0, 0.0)  # zeros stay zeros
    if not bool((result.isfinite() | ~norms.isfinite()).all()):
        raise ValueError(f"factors must be finite where the norms are; got {result}")
    spoiled = 0.0 if drops else float("nan")
    return result.masked_fill(~norms.isfinite() & (result != 0), spoiled)


def is_unscaled(loss_scale: Any) -> bool:
    """Return True if a GradScaler has unscaled gradients whose optimizer has not stepped yet."""
    states = getattr(loss_scale, "_per_optimizer_states", {}).values()
    return any(state["stage"] == OptState.UNSCALED for state in states)


def unscaled_by(loss_scale: Any) -> float:
    """Return the factor by which a GradScaler has multiplied .grad since the backward."""
    if not isinstance(loss_scale, torch.amp.GradScaler) or not loss_scale.is_enabled():
        return 1.0
    if not is_unscaled(loss_scale):
        raise RuntimeError(
            "clip_grad_norm_ goes between scaler.unscale_(optimizer) and scaler.step(optimizer)"
        )
    return 1.0 / loss_scale.get_scale()


def report_overflow(scaler: Any, grads: Sequence[Tensor]) -> None:
    """Tell a GradScaler of inf and nan in gradients that came after unscale_ looked for them."""
    states = scaler._per_optimizer_states.values()
    found = [s["found_inf_per_device"] for s in states if s["stage"] is OptState.UNSCALED]
    by_device: dict[torch.device, list[Tensor]] = {}
    for g in grads if found else ():
        by_device.setdefault(g.device, []).append(g._values() if g.is_sparse else g)
    for device, values in by_device.items():
        largest = torch.stack([t.float() for t in torch._foreach_norm(values, float("inf"))])
        has_inf = (~largest.isfinite().all()).float()
        for per_device in found:
            before = per_device.get(device)
            per_device[device] = has_inf if before is None else torch.maximum(before, has_inf)
