"""Clipping by sample, without a second backward: what a pass computed its norms from is kept, and
the parameters' gradients are made from it once more, each sample's share times its factor.

Whatever else .grad holds, from before the record or from backwards of other losses, stays.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.amp.grad_scaler import OptState

from .errors import CoverageError
from .passes import receives
from .reference import accumulation_dtype
from .sharding import data_parallel, mean_over, scattered

if TYPE_CHECKING:
    from .table import Parameters

__all__ = ["Books", "BySample", "factors_of", "group", "unscaled_by"]

HALVES = (torch.float16, torch.bfloat16)


@dataclass(frozen=True)
class BySample:
    """Gradients [N, *] of one parameter, kept as they are."""

    place: int
    grads: Tensor
    intact = True

    @property
    def parameters(self) -> list[int]:
        return [self.place]

    def weighted(self, factors: Tensor, places: Sequence[int]) -> list[Tensor]:
        wide = accumulation_dtype(self.grads.dtype)
        return [factors.to(wide) @ self.grads.reshape(len(factors), -1).to(wide)]


@dataclass(frozen=True)
class Group:
    """Parameters that are clipped together."""

    places: Sequence[int]
    factors: Sequence[Tensor]  # [N] of each pass
    clips: bool  # some factor is not 1
    few: bool  # so few are not that .grad is best corrected: see group()


def group(places: Sequence[int], norms: Tensor, factors: Tensor, sizes: list[int]) -> Group:
    """Where half of the samples or more keep a factor of 1, what the others' factors take away is
    taken from .grad: unless its rounding, that of what is taken away, would cost over two bits."""
    clipped = factors != 1
    kept = (norms * factors.abs()).sum()
    few = clipped.sum() * 2 <= len(factors) and bool(norms.sum() <= 4 * kept)
    return Group(places, factors.split(sizes), bool(clipped.any()), bool(few))


def factors_of(
    norms: Tensor, max_norm: float | Tensor | None, factors: Callable[[Tensor], Tensor] | None
) -> Tensor:
    """[N] float64: what each sample's gradient is multiplied by.

    Where a norm is not finite the factor is nan, as .grad is to be.
    """
    exact = norms.double()
    if factors is None:
        bound = torch.as_tensor(max_norm, dtype=torch.float64, device=norms.device)
        if bound.shape not in ((), norms.shape) or not bool((bound >= 0).all()):
            raise ValueError(
                f"max_norm must be a number, or a Tensor [{len(norms)}], of 0 or more; got "
                f"{max_norm!r}"
            )
        found = torch.where(exact <= bound, 1.0, bound / exact)
        return found.masked_fill(~exact.isfinite(), float("nan"))
    found = factors(norms)
    if not isinstance(found, Tensor) or found.shape != norms.shape:
        got = f"shape {list(found.shape)}" if isinstance(found, Tensor) else repr(found)
        raise ValueError(f"factors must turn norms [{len(norms)}] into as many factors; got {got}")
    found = found.detach().double().masked_fill(norms == 0, 0.0)  # of a gradient of zeros
    if not bool((found.isfinite() | ~norms.isfinite()).all()):
        raise ValueError(f"factors must be finite where the norms are; got {found}")
    return found.masked_fill(~exact.isfinite(), float("nan"))


def unscaled_by(loss_scale: Any) -> float:
    """What a GradScaler has multiplied .grad by since the backward."""
    if not isinstance(loss_scale, torch.amp.GradScaler) or not loss_scale.is_enabled():
        return 1.0
    stages = {state["stage"] for state in loss_scale._per_optimizer_states.values()}
    if stages != {OptState.UNSCALED}:
        raise RuntimeError(
            "clip_grad_norm_ goes between scaler.unscale_(optimizer) and scaler.step(optimizer)"
        )
    return 1.0 / loss_scale.get_scale()


class Books:
    """What the passes of a record keep, and what .grad holds besides."""

    def __init__(self, recorder: Any, parameters: Parameters) -> None:
        self._recorder, self._parameters = recorder, parameters
        self._kept: deque[tuple[Any, Any]] = deque()  # (pass, use)
        self._others: dict[int, Tensor] = {}  # by place
        self._versions: list[int] = []  # of the parameters, when the record began
        self._handles: list[Any] = []
        self._closed = False
        self._ddp: Callable[[], Any] = lambda: None

    def within(self, module: nn.Module) -> None:
        """A forward of this model begins."""
        ddp = data_parallel(module)
        if ddp is not None:
            self._ddp = weakref.ref(ddp)

    def open(self) -> None:
        """From now on uses are kept."""
        self._recorder.books = True
        for place, p in enumerate(self._parameters.tensors()):
            if p.requires_grad and p.is_leaf:
                self._handles.append(p.register_hook(partial(self._received, place)))

    def close(self) -> None:
        self._recorder.books = False
        for handle in self._handles:
            handle.remove()
        self._handles = []
        self._kept.clear()

    def begin(self) -> None:
        """A record begins, before its first gradient is added to .grad."""
        self._kept.clear()
        self._closed = False
        if self._recorder.books:
            tensors = self._parameters.tensors()
            self._versions = [p._version for p in tensors]
            self._others = {k: p.grad.clone() for k, p in enumerate(tensors) if p.grad is not None}

    def keep(self, run: Any, use: Any) -> None:
        self._kept.append((run, use))

    def _received(self, place: int, gradient: Tensor) -> None:
        """Keep apart what comes from a backward that met no pass."""
        task = torch._C._current_graph_task_id()
        if not self._kept or self._recorder.audited(task):
            return
        if receives(self._parameters.tensor(place)):
            before = self._others.get(place)
            gradient = gradient.detach()
            self._others[place] = gradient.clone() if before is None else before + gradient

    def check(self) -> None:
        """Raise where nothing can be clipped, before anything is touched."""
        if not self._recorder.books:
            raise RuntimeError(
                "clip_grad_norm_ needs what the backward had in its hands: attach(..., clip=True)"
            )
        if self._closed:
            raise RuntimeError(
                "this record is clipped already: clip once, between backward and step"
            )
        tensors = self._parameters.tensors()
        self._refuse(
            (place for place, p in enumerate(tensors) if scattered([p])),
            "gradients that are sharded over processes (FSDP) cannot be clipped by sample: use "
            "DistributedDataParallel",
        )
        uses = [use for _, use in self._kept]
        kept = {place for use in uses for place in use.parameters}
        self._refuse(
            (place for place in kept if tensors[place]._version != self._versions[place]),
            "weights were changed since the record began, as by an optimizer's step between its "
            "passes: clip, or reset(), once a step",
        )
        self._refuse(
            (place for place in kept if _hooked(tensors[place])),
            "hooks on parameters change gradients on their way to .grad, which are made once more "
            "without: change .grad itself, after clipping",
        )
        self._refuse(
            (place for use in uses if not use.intact for place in use.parameters),
            "what the forward computed with was changed in place since, and is needed once more: "
            "clip before that",
        )
        self._refuse(
            (place for place in kept if tensors[place].grad is None),
            ".grad is None where a backward left a gradient: clip before zero_grad()",
        )

    def _refuse(self, places: Iterable[int], reason: str) -> None:
        names = [self._parameters.names[place] for place in sorted(set(places))]
        if names:
            raise CoverageError(f"{reason}. Concerned: {', '.join(names)}", names)

    def clip(self, runs: Sequence[Any], groups: Sequence[Group], unscaled: float) -> None:
        """Put the weighted sums into .grad.

        runs: the passes, in the order of the groups' factors. unscaled: what .grad was multiplied
        by since the backward.
        """
        self._closed = True
        ddp = self._ddp() if groups else None
        tensors = self._parameters.tensors()
        numbers = {id(run): k for k, run in enumerate(runs)}
        # Processes that share their gradients go the same way, whatever their samples are.
        group_of = {
            place: group
            for group in groups
            if ddp is not None or group.clips
            for place in group.places
        }
        met: set[int] = set()
        while self._kept:
            run, use = self._kept.popleft()
            shares: dict[int, list[int]] = {}
            for place in use.parameters:
                if place in group_of:
                    shares.setdefault(id(group_of[place]), []).append(place)
            for places in shares.values():
                p, group = tensors[places[0]], group_of[places[0]]
                differs = ddp is None and group.few and p.dtype not in HALVES
                factors = group.factors[numbers[id(run)]].to(p.device)
                factors = (factors - 1 if differs else factors) * unscaled
                # Halves keep small factors apart from gradients that would not hold the product.
                largest = float(factors.abs().amax()) if p.dtype in HALVES and len(factors) else 1.0
                scale = largest if 0 < largest < float("inf") else 1.0
                for place, made in zip(places, use.weighted(factors / scale, places), strict=True):
                    before = self._besides(place, unscaled)
                    add = differs or place in met
                    _put(tensors[place], made, scale, before, add, ddp is None)
                    met.add(place)
        if ddp is not None:
            self._average(ddp, met, unscaled)

    def _besides(self, place: int, unscaled: float) -> Tensor | None:
        others = self._others.get(place)
        return None if others is None else others * unscaled

    def _average(self, ddp: Any, met: set[int], unscaled: float) -> None:
        filled = [(k, p) for k, p in enumerate(self._parameters.tensors()) if p.grad is not None]
        for place, p in filled:
            if place not in met:  # others' samples came to it
                before = self._besides(place, unscaled)
                p.grad.zero_() if before is None else p.grad.copy_(before)
        mean_over(ddp, [p.grad for _, p in filled])


def _hooked(p: Tensor) -> bool:
    """Whether it has hooks of the user's."""
    hooks = (p._backward_hooks or {}).values()
    ours = (
        isinstance(hook, partial) and hook.func.__module__.startswith(__package__) for hook in hooks
    )
    return not all(ours)


def _put(
    p: Tensor, made: Tensor, scale: float, before: Tensor | None, add: bool, alone: bool
) -> None:
    """Add to .grad, or write it; `alone`: its memory may be exchanged."""
    grad, made = p.grad, made.detach().reshape(p.shape)
    assert grad is not None
    if grad.is_sparse:
        total = made.mul(scale) if before is None else before.to_dense() + made.mul(scale)
        p.grad = (grad.to_dense() + total if add else total).to_sparse(1)
    elif add:
        grad.add_(made, alpha=scale)
    elif before is not None:
        grad.copy_(before).add_(made, alpha=scale)
    elif alone and scale == 1 and _takes(grad, made):
        grad.data = made
    else:
        grad.copy_(made if scale == 1 else made * scale)


def _takes(grad: Tensor, made: Tensor) -> bool:
    """Whether it can have another's memory: its own is no part of a larger one."""
    whole = grad.untyped_storage().nbytes() == grad.nbytes
    return whole and (grad.dtype, grad.stride()) == (made.dtype, made.stride())
