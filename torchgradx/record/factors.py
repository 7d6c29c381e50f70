"""What clipping multiplies each sample's gradient by, and what a GradScaler has done to .grad."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from torch.amp.grad_scaler import OptState

from ..reference.chunks import accumulation_dtype


class ClipGroup:
    """Parameters that are clipped together, and the samples' factors [N1 + N2 + ...]."""

    def __init__(self, places: Sequence[int], factors: Tensor, sizes: list[int]) -> None:
        self.places, self._factors, self._sizes = places, factors, sizes
        self._made: dict[Any, tuple[Tensor, float]] = {}

    @cached_property
    def clips(self) -> bool:
        """Return True if a factor is not 1. On a GPU it is presumed: to ask would wait."""
        return not self._factors.is_cpu or bool((self._factors != 1).any())

    def factors(self, k: int, p: Tensor, unscaled: float) -> tuple[Tensor, float]:
        """Return [N] of pass k, and a scale for the sums: float16 has few small numbers."""
        key = k, p.device, p.dtype
        if key not in self._made:
            narrow, wide = p.dtype == torch.float16, accumulation_dtype(p.dtype)
            factors = self._factors.split(self._sizes)[k].to(p.device)
            factors = factors if unscaled == 1 else factors * unscaled
            largest = float(factors.abs().amax()) if narrow and len(factors) else 1.0
            scale = largest if 0 < largest < float("inf") else 1.0
            self._made[key] = (factors if scale == 1 else factors / scale).to(wide), scale
        return self._made[key]


def factors_of(
    norms: Tensor,
    max_norm: float | Tensor | None,
    factors: Callable[[Tensor], Tensor] | None,
    drops: bool,
) -> Tensor:
    """Return [N] float64: what each sample's gradient is multiplied by.

    Where a norm is not finite the factor is nan, as .grad is to be; or 0, if `drops` or `factors`
    says so.
    """
    if factors is not None:
        return _of_user(norms, factors, drops)
    exact, bound = norms.double(), _bound(norms, max_norm)
    result = torch.where(exact <= bound, 1.0, bound / exact)
    if drops:
        return result.masked_fill(~exact.isfinite(), 0.0)
    return result + (exact - exact)  # nan where it is not finite, by fewer kernels


def _bound(norms: Tensor, max_norm: float | Tensor | None) -> Tensor:
    """Return max_norm as a Tensor [] or [N] on the device of the norms."""
    if isinstance(max_norm, Tensor):
        bound = max_norm.to(norms.device, torch.float64)
        valid = bound.shape in ((), norms.shape) and bool((bound >= 0).all())
    else:  # written there: a copy from the host's memory would wait
        assert max_norm is not None
        bound, valid = norms.new_full((), max_norm, dtype=torch.float64), max_norm >= 0
    if not valid:
        raise ValueError(
            f"max_norm must be a number, or a Tensor [{len(norms)}], of 0 or more; got {max_norm!r}"
        )
    return bound


def _of_user(norms: Tensor, factors: Callable[[Tensor], Tensor], drops: bool) -> Tensor:
    result = factors(norms.clone())
    if not isinstance(result, Tensor) or result.shape != norms.shape:
        got = f"shape {list(result.shape)}" if isinstance(result, Tensor) else repr(result)
        raise ValueError(f"factors must turn norms [{len(norms)}] into as many factors; got {got}")
    result = result.detach().double().masked_fill(norms == 0, 0.0)  # of a gradient of zeros
    if not bool((result.isfinite() | ~norms.isfinite()).all()):
        raise ValueError(f"factors must be finite where the norms are; got {result}")
    spoiled = 0.0 if drops else float("nan")
    return result.masked_fill(~norms.isfinite() & (result != 0), spoiled)


def is_unscaled(loss_scale: Any) -> bool:
    """Return True if a GradScaler has unscaled gradients of an optimizer that did not step yet."""
    states = getattr(loss_scale, "_per_optimizer_states", {}).values()
    return any(state["stage"] == OptState.UNSCALED for state in states)


def unscaled_by(loss_scale: Any) -> float:
    """Return what a GradScaler has multiplied .grad by since the backward."""
    if not isinstance(loss_scale, torch.amp.GradScaler) or not loss_scale.is_enabled():
        return 1.0
    if not is_unscaled(loss_scale):
        raise RuntimeError(
            "clip_grad_norm_ goes between scaler.unscale_(optimizer) and scaler.step(optimizer)"
        )
    return 1.0 / loss_scale.get_scale()


def report_overflow(scaler: Any, grads: Sequence[Tensor]) -> None:
    """Tell a GradScaler of infinities in what came after unscale_, which looked for them."""
    states = scaler._per_optimizer_states.values()
    found = [s["found_inf_per_device"] for s in states if s["stage"] is OptState.UNSCALED]
    by_device: dict[torch.device, list[Tensor]] = {}
    for g in grads if found else ():
        by_device.setdefault(g.device, []).append(g._values() if g.is_sparse else g)
    for device, those in by_device.items():
        largest = torch.stack([t.float() for t in torch._foreach_norm(those, float("inf"))])
        bad = (~largest.isfinite().all()).float()
        for per_device in found:
            before = per_device.get(device)
            per_device[device] = bad if before is None else torch.maximum(before, bad)
