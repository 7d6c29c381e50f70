"""Opacus' ghost clipping with our kernels: its norms become exact, and no gradient is formed.

A norm sampler is what Opacus asks for the norms of one layer, given what its hooks caught. It has
them for Linear and Embedding, and forms each sample's gradient for the rest; here is one for every
layer that it can form gradients of.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import wraps
from typing import Any

import torch
from opacus.grad_sample import GradSampleHooksFastGradientClipping
from torch import Tensor, nn
from torch.nn import functional as F

from .. import ops
from ..gradients.convolved import Convolved
from ..layers.rules import RULES
from ..reference.chunks import accumulation_dtype
from ..refusals import cause, refused_all
from ..sites.fallback import rows_of_bags

__all__ = ["SAMPLERS", "Registration", "register"]

# A weight's squared norms, and rows [N, T, O] that add up to the bias's gradient.
Found = tuple[Callable[[], Tensor], Tensor]
Sampler = Callable[[Any, list[Tensor], Tensor], dict[nn.Parameter, Tensor]]


def linear(layer: nn.Linear, inputs: list[Tensor], g: Tensor) -> Found:
    return lambda: ops.linear_sq_norms(inputs[0].to(g.dtype), g), g.unsqueeze(1).flatten(1, -2)


def convolution(layer: nn.Conv1d | nn.Conv2d | nn.Conv3d, inputs: list[Tensor], g: Tensor) -> Found:
    kind = next(kind for kind in type(layer).__mro__ if kind in RULES)  # fully_shard makes another
    form = RULES[kind].describe(layer)
    deep = form["depth"] or (1, 1, 0, 1)
    names = ("stride", "padding", "dilation")
    sizes = [(size, *form[name])[2 - g.dim() :] for size, name in zip(deep[1:], names, strict=True)]

    def weight() -> Tensor:
        x = inputs[0].to(g.dtype)
        if form["pre_pad"]:
            x = F.pad(x, form["pre_pad"], mode=form["pad_mode"])
        one = x.unsqueeze(1), g.unsqueeze(1)  # image for each sample
        return Convolved(*one, layer.weight.shape, sizes, layer.groups).sq_norms()

    return weight, g.flatten(2).mT


def embedding(layer: nn.Embedding, inputs: list[Tensor], g: Tensor) -> Found:
    ids, padding = inputs[0], layer.padding_idx
    if layer.scale_grad_by_freq:
        raise refused_all("scale_grad_by_freq", ())
    return lambda: ops.embedding_sq_norms(ids, g, padding_idx=padding), g


def bag(layer: nn.EmbeddingBag, inputs: list[Tensor], g: Tensor) -> Found:
    return rows_of_bags(layer, g, *inputs).sq_norms, g


def rows_norm(layer: nn.LayerNorm | nn.RMSNorm, inputs: list[Tensor], g: Tensor) -> Found:
    """Normalised over its last dimensions: [N, T, 1, D]."""
    last, centred = g.dim() - layer.weight.dim(), isinstance(layer, nn.LayerNorm)
    both = (t.flatten(last).unsqueeze(1).flatten(1, -2) for t in (inputs[0].to(g.dtype), g))
    x, b = (t.unsqueeze(2) for t in both)
    eps = torch.finfo(accumulation_dtype(g.dtype)).eps
    return _affine(x, b, eps if layer.eps is None else layer.eps, centred, over_positions=False)


def channels_norm(layer: Any, inputs: list[Tensor], g: Tensor) -> Found:
    """Normalised over positions, by groups of channels: [N, T, G, C / G]."""
    groups = getattr(layer, "num_groups", g.shape[1])
    pixels = (t.unsqueeze(2).flatten(2) for t in (inputs[0].to(g.dtype), g))  # [N, C, T]
    x, b = (t.unflatten(1, (groups, -1)).permute(0, 3, 1, 2) for t in pixels)
    return _affine(x, b, layer.eps, centred=True, over_positions=True)


def _affine(x: Tensor, g: Tensor, eps: float, centred: bool, over_positions: bool) -> Found:
    def weight() -> Tensor:
        mean, rstd = ops.moments(x, eps, centred, over_positions)
        return ops.affine_sq_norms(x, g, mean if centred else None, rstd, False)[0]

    return weight, g.flatten(2)


def _sampler(find: Callable[..., Found]) -> Sampler:
    @wraps(find)
    @torch.no_grad()
    def sampler(layer: Any, inputs: list[Tensor], g: Tensor) -> dict[nn.Parameter, Tensor]:
        length = getattr(layer, "max_batch_len", len(g))
        if length != len(g):  # and has multiplied g by it, under a mean
            kind = type(layer).__name__
            raise refused_all(cause("opacus_samples", layer=kind, said=length, n=len(g)), ())
        weight_sq_norms, rows = find(layer, inputs, g)
        bias = getattr(layer, "bias", None)
        found = {layer.weight: weight_sq_norms().sqrt()} if layer.weight.requires_grad else {}
        if bias is not None and bias.requires_grad:
            found[bias] = ops.bias_sq_norms(rows).sqrt()
        return found

    return sampler


FINDERS: dict[tuple[type[nn.Module], ...], Callable[..., Found]] = {
    (nn.Linear,): linear,
    (nn.Conv1d, nn.Conv2d, nn.Conv3d): convolution,
    (nn.Embedding,): embedding,
    (nn.EmbeddingBag,): bag,
    (nn.LayerNorm, nn.RMSNorm): rows_norm,
    (nn.GroupNorm, nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d): channels_norm,
}
SAMPLERS: dict[type[nn.Module], Sampler] = {
    kind: _sampler(find) for kinds, find in FINDERS.items() for kind in kinds
}


class Registration(AbstractContextManager["Registration"]):
    """Handle of `register`: `remove()`, or the end of a `with`, leaves Opacus as it was."""

    def __init__(self, table: dict[Any, Any]) -> None:
        self._table, self._before = table, dict(table)
        table.update(SAMPLERS)

    def remove(self) -> None:
        for kind, sampler in SAMPLERS.items():
            if self._table.get(kind) is sampler:
                del self._table[kind]
                if kind in self._before:
                    self._table[kind] = self._before[kind]

    def __exit__(self, *exception: object) -> None:
        self.remove()


def register() -> Registration:
    """Have Opacus' ghost mode take the norms of every layer it knows from our kernels.

    For all models of the process, from the next backward on. Ghost mode refuses a module that is
    called twice in a forward wherever it has a norm sampler: it then has one for all of these.

    Returns:
        A handle whose `remove()` leaves Opacus as it was; also a context manager. Of several, the
        last one is removed first.
    """
    return Registration(GradSampleHooksFastGradientClipping.NORM_SAMPLERS)
