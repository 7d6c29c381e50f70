"""Twins of the operators whose parameters act element by element; operands are [N, T, G, K].

A parameter's gradient is sum_t b_nt f_nt, [G, K]: the weight's with f = (x - mean) rstd, or
min(x, 0) for a PReLU; the bias's with f = 1.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from . import fakes
from .chunks import accumulation_dtype, chunks, norms, precise_dtype, scaled_sum, weights_of

__all__ = [
    "affine_by_sample", "affine_fused", "affine_sq_norms", "moments", "prelu_fused",
    "prelu_sq_norms", "turned",
]  # fmt: skip


def _of(statistic: Tensor, chunk: slice) -> Tensor:
    """[N or 1, T or 1, G or 1] -> [n or 1, T or 1, G or 1, 1]"""
    return (statistic if statistic.shape[0] == 1 else statistic[chunk])[..., None]


def _normalised(x: Tensor, mean: Tensor | None, rstd: Tensor | None, chunk: slice) -> Tensor:
    centred = x if mean is None else x - _of(mean, chunk)
    return centred if rstd is None else centred * _of(rstd, chunk)


def _chunks(input: Tensor, grad_output: Tensor) -> Iterator[tuple[slice, Tensor, Tensor]]:
    """Yield chunks of samples: x and g [n, T, G, K] in the dtype of sums."""
    wide = accumulation_dtype(input.dtype)
    for chunk in chunks(input.shape[0], input.shape[1:].numel()):
        yield chunk, input[chunk].to(wide), grad_output[chunk].to(wide)


def _gradients(g: Tensor, feature: Tensor, bias: bool) -> tuple[Tensor, Tensor]:
    """Return the samples' own gradients [1 + bias, n, 1, G K], and their squared norms."""
    each = [(g * feature).sum(1), g.sum(1)] if bias else [(g * feature).sum(1)]
    gradients = torch.stack(each).flatten(2).unsqueeze(2)
    sq_norms = norms(gradients.flatten(0, 1)).square().view(gradients.shape[:2])
    return gradients, sq_norms.to(g.dtype)


def _by_feature(weight: Tensor, input: Tensor) -> Tensor:
    """[G, K], in the dtype of sums"""
    features = input.shape[2:]
    if weight.dim() > 1 and features[0] != 1 and weight.shape != features:
        raise ValueError(f"weight must be [G, K], {list(features)}; got {list(weight.shape)}")
    return weight.to(accumulation_dtype(input.dtype)).reshape(features)


@torch.no_grad()
def affine_sq_norms(
    input: Tensor,  # [N, T, G, K]
    grad_output: Tensor,  # [N, T, G, K]
    mean: Tensor | None,  # [N, T, 1] or [N, 1, G]
    rstd: Tensor | None,
    bias: bool,
) -> Tensor:
    """|sum_t b_nt xhat_nt|^2 and |sum_t b_nt|^2: -> [1 + bias, N]"""
    sq_norms = fakes.empty_sq_norms(input, bias)
    for chunk, x, g in _chunks(input, grad_output):
        sq_norms[:, chunk] = _gradients(g, _normalised(x, mean, rstd, chunk), bias)[1]
    return sq_norms


def _affine(
    input: Tensor,
    grad_output: Tensor,
    weight: Tensor | None,
    mean: Tensor | None,
    rstd: Tensor | None,
    frozen: bool,
    bias: bool,
) -> Iterator[tuple[slice, Tensor, Tensor, Tensor]]:
    """Yield chunks of samples: grad_input, by a weight of 1 if there is none; _gradients()."""
    w = 1 if weight is None else _by_feature(weight, input)
    if not (frozen or rstd is not None or weight is None):
        raise ValueError("rstd must be given unless frozen; got None")
    dims = (3,) if fakes.is_by_row(input, rstd, frozen) else (1, 3)
    for chunk, x, g in _chunks(input, grad_output):
        xhat, inner = _normalised(x, mean, rstd, chunk), g * w
        if not frozen:
            slope = (inner * xhat).mean(dims, keepdim=True)
            shift = inner.mean(dims, keepdim=True) if mean is not None else 0
            inner = inner - shift - xhat * slope
        inner = inner if rstd is None else inner * _of(rstd, chunk)
        yield chunk, inner, *_gradients(g, xhat, bias)


@torch.no_grad()
def affine_by_sample(
    input: Tensor,  # [N, T, G, K]
    grad_output: Tensor,  # [N, T, G, K]
    weight: Tensor | None,  # as for affine_fused; without one grad_input is [0]
    mean: Tensor | None,  # [N, T, 1] or [N, 1, G]
    rstd: Tensor | None,
    frozen: bool,
    bias: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """grad_input, sq_norms, and the samples' own gradients [1 + bias, N, P, G K], P = 1."""
    rest = weight, mean, rstd, frozen, bias
    grad_input, sq_norms, gradients = fakes.affine_by_sample(input, grad_output, *rest)
    for chunk, inner, each, squares in _affine(input, grad_output, *rest):
        gradients[:, chunk], sq_norms[:, chunk] = each, squares
        if weight is not None:
            grad_input[chunk] = inner
    return grad_input, sq_norms, gradients


@torch.no_grad()
def affine_fused(
    input: Tensor,  # [N, T, G, K]
    grad_output: Tensor,  # [N, T, G, K]
    weight: Tensor,  # [G, K] or [G K]; of any sizes if G = 1; so its gradients
    mean: Tensor | None,  # [N, T, 1] or [N, 1, G]
    rstd: Tensor | None,
    frozen: bool,
    scale: Tensor | None,  # [N]
    bias: bool,
) -> fakes.AffineFused:
    """grad_input, sum_n scale_n of the weight's and the bias's gradients, and their sq_norms."""
    found = fakes.affine_fused(input, grad_output, weight, mean, rstd, frozen, scale, bias)
    grad_input, grad_weight, grad_bias, sq_norms = found
    weights = weights_of(scale, input)
    totals = weights.new_zeros(1 + bias, 1, weight.numel())
    parts = _affine(input, grad_output, weight, mean, rstd, frozen, bias)
    for chunk, inner, each, squares in parts:
        grad_input[chunk], sq_norms[:, chunk] = inner, squares
        totals += scaled_sum(weights[chunk], each.transpose(0, 1))
    grad_weight.copy_(totals[0].view_as(weight))
    if bias:
        grad_bias.copy_(totals[1].view_as(weight))
    return found


@torch.no_grad()
def prelu_sq_norms(input: Tensor, grad_output: Tensor) -> Tensor:
    """|sum_t b_nt min(x_nt, 0)|^2: [N, T, G, K], the same -> [1, N]"""
    sq_norms = fakes.empty_sq_norms(input, False)
    for chunk, x, g in _chunks(input, grad_output):
        sq_norms[:, chunk] = _gradients(g, x.clamp(max=0), False)[1]
    return sq_norms


@torch.no_grad()
def prelu_fused(
    input: Tensor,  # [N, T, G, K]
    grad_output: Tensor,  # [N, T, G, K]
    weight: Tensor,  # as for affine_fused
    scale: Tensor | None,  # [N]
) -> tuple[Tensor, Tensor, Tensor]:
    """grad_input, sum_n scale_n of the weight's gradients, and their sq_norms [1, N]."""
    grad_input, grad_weight, sq_norms = fakes.prelu_fused(input, grad_output, weight, scale)
    w, weights = _by_feature(weight, input), weights_of(scale, input)
    total = weights.new_zeros(1, weight.numel())
    for chunk, x, g in _chunks(input, grad_output):
        (each,), sq_norms[:, chunk] = _gradients(g, x.clamp(max=0), False)
        total += scaled_sum(weights[chunk], each)
        grad_input[chunk] = torch.where(x > 0, g, g * w)
    return grad_input, grad_weight.copy_(total.view_as(weight)), sq_norms


@torch.no_grad()
def moments(
    input: Tensor,  # [N, T, G, K]
    eps: float,
    centred: bool,
    over_positions: bool,
) -> tuple[Tensor, Tensor]:
    """mean [N, T, G] over K, or [N, 1, G] over T and K; rstd likewise. Not centred: mean is [0]."""
    mean, rstd = fakes.moments(input, eps, centred, over_positions)
    dims = (1, 3) if over_positions else (3,)
    for chunk in chunks(input.shape[0], input.shape[1:].numel()):
        x = input[chunk].to(precise_dtype(input))
        if centred:
            middle = x.mean(dims, keepdim=True)
            mean[chunk] = middle[..., 0]
            x = x - middle
        rstd[chunk] = (x.square().mean(dims, keepdim=True) + eps).rsqrt()[..., 0]
    return mean, rstd


@torch.no_grad()
def turned(input: Tensor) -> Tensor:
    """[N, R, C] as a contiguous tensor of its own."""
    return input.clone(memory_format=torch.contiguous_format)
