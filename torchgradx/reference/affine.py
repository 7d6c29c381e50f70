"""Twins of the operators whose parameters act element by element; operands are [N, T, G, K].

A parameter's gradient is sum_t b_nt f_nt, [G, K]: the weight's with f = (x - mean) rstd, or
min(x, 0) for a PReLU; the bias's with f = 1.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from .chunks import accumulation_dtype, chunks, norms, precise_dtype, scaled_sum

__all__ = ["affine_by_sample", "affine_fused", "affine_sq_norms", "moments", "prelu_fused",
           "prelu_sq_norms", "turned"]  # fmt: skip

AffineFused = tuple[Tensor, Tensor, Tensor, Tensor]
Features = Callable[[Tensor, slice], Tensor]  # of a chunk of input


def _statistic(statistic: Tensor, chunk: slice) -> Tensor:
    """[N or 1, T or 1, G or 1] -> [n or 1, T or 1, G or 1, 1]"""
    part = statistic if statistic.shape[0] == 1 else statistic[chunk]
    return part[..., None]


def _by_feature(weight: Tensor, input: Tensor) -> Tensor:
    """[G, K], in the dtype of sums"""
    features = input.shape[2:]
    if weight.dim() > 1 and features[0] != 1 and weight.shape != features:
        raise ValueError(f"weight must be [G, K], {list(features)}; got {list(weight.shape)}")
    return weight.to(accumulation_dtype(input.dtype)).reshape(features)


def _xhat(mean: Tensor | None, rstd: Tensor | None) -> Features:
    def features(x: Tensor, chunk: slice) -> Tensor:
        centred = x if mean is None else x - _statistic(mean, chunk)
        return centred if rstd is None else centred * _statistic(rstd, chunk)

    return features


def _negative(x: Tensor, chunk: slice) -> Tensor:
    return x.clamp(max=0)


def _chunks(
    input: Tensor, grad_output: Tensor, features: Features
) -> Iterator[tuple[slice, Tensor, Tensor, Tensor]]:
    """Chunks of samples: x, g and the feature, all [n, T, G, K] in the dtype of sums."""
    wide = accumulation_dtype(input.dtype)
    for chunk in chunks(input.shape[0], input.shape[1:].numel()):
        x, g = input[chunk].to(wide), grad_output[chunk].to(wide)
        yield chunk, x, g, features(x, chunk)


def _by_sample(input: Tensor, grad_output: Tensor, features: Features, bias: bool) -> Tensor:
    """[1 + bias, N, 1, G K]: the samples' own gradients."""
    sizes = 1 + bias, input.shape[0], *input.shape[2:]
    gradients = input.new_empty(sizes, dtype=accumulation_dtype(input.dtype))
    for chunk, _, g, f in _chunks(input, grad_output, features):
        gradients[0, chunk] = (g * f).sum(1)
        if bias:
            gradients[1, chunk] = g.sum(1)
    return gradients.flatten(2).unsqueeze(2)


def _sq_norms(each: Tensor) -> Tensor:
    return norms(each.flatten(0, 1)).square().view(each.shape[:2]).to(each.dtype)


def _total(gradients: Tensor, scale: Tensor | None, weight: Tensor) -> Tensor:
    """The sum of one parameter's gradients [N, 1, G K], in the shape and dtype of the weight."""
    scale = gradients.new_ones(len(gradients)) if scale is None else scale.to(gradients.dtype)
    return scaled_sum(scale, gradients.flatten(1)).to(weight.dtype).view(weight.shape)


def empty_in_lines(input: Tensor, by_row: bool) -> Tensor:
    """A result's memory, as the kernels lay it out: csrc/cpu/affine_layer.h says how and why."""
    n, t, g, k = input.shape
    sample, position, group, feature = input.stride()
    contiguous = (k == 1 or feature == 1) and (g == 1 or group == k)
    if by_row or t <= 1 or (g * k > 1 and (contiguous or position != 1)):
        if sample < position:
            return input.new_empty(t, n, g, k).transpose(0, 1)
        return input.new_empty(n, t, g, k)
    return input.new_empty(n, g, k, t).permute(0, 3, 1, 2)


def is_by_row(input: Tensor, rstd: Tensor | None, frozen: bool) -> bool:
    """Return True if statistics are of each position's features."""
    if rstd is None or frozen:
        return False
    return input.shape[2] == 1 and rstd.shape[1] == input.shape[1]


@torch.no_grad()
def affine_sq_norms(
    input: Tensor,  # [N, T, G, K]
    grad_output: Tensor,  # [N, T, G, K]
    mean: Tensor | None,  # [N, T, 1] or [N, 1, G]
    rstd: Tensor | None,
    bias: bool,
) -> Tensor:
    """|sum_t b_nt xhat_nt|^2 and |sum_t b_nt|^2: -> [1 + bias, N]"""
    return _sq_norms(_by_sample(input, grad_output, _xhat(mean, rstd), bias))


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
    if not (frozen or rstd is not None or weight is None):
        raise ValueError("rstd must be given unless frozen; got None")
    features, by_row = _xhat(mean, rstd), is_by_row(input, rstd, frozen)
    each, dims = _by_sample(input, grad_output, features, bias), (3,) if by_row else (1, 3)
    if weight is None:
        return input.new_empty(0), _sq_norms(each), each
    grad_input, w = empty_in_lines(input, by_row), _by_feature(weight, input)
    for chunk, _, g, xhat in _chunks(input, grad_output, features):
        inner = g * w
        if not frozen:
            slope = (inner * xhat).mean(dims, keepdim=True)
            shift = inner.mean(dims, keepdim=True) if mean is not None else 0
            inner = inner - shift - xhat * slope
        inner = inner if rstd is None else inner * _statistic(rstd, chunk)
        grad_input[chunk] = inner.to(input.dtype)
    return grad_input, _sq_norms(each), each


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
) -> AffineFused:
    """grad_input, sum_n scale_n of the weight's and the bias's gradients, and their sq_norms."""
    grad_input, sq_norms, each = affine_by_sample(
        input, grad_output, weight, mean, rstd, frozen, bias
    )
    totals = [_total(gradients, scale, weight) for gradients in each]
    return grad_input, totals[0], totals[1] if bias else weight.new_empty(0), sq_norms


@torch.no_grad()
def prelu_sq_norms(input: Tensor, grad_output: Tensor) -> Tensor:
    """|sum_t b_nt min(x_nt, 0)|^2: [N, T, G, K], the same -> [1, N]"""
    return _sq_norms(_by_sample(input, grad_output, _negative, False))


@torch.no_grad()
def prelu_fused(
    input: Tensor,  # [N, T, G, K]
    grad_output: Tensor,  # [N, T, G, K]
    weight: Tensor,  # as for affine_fused
    scale: Tensor | None,  # [N]
) -> tuple[Tensor, Tensor, Tensor]:
    """grad_input, sum_n scale_n of the weight's gradients, and their sq_norms [1, N]."""
    each = _by_sample(input, grad_output, _negative, False)
    grad_input, w = empty_in_lines(input, False), _by_feature(weight, input)
    for chunk, x, g, _ in _chunks(input, grad_output, _negative):
        grad_input[chunk] = torch.where(x > 0, g, g * w).to(input.dtype)
    return grad_input, _total(each[0], scale, weight), _sq_norms(each)


@torch.no_grad()
def moments(
    input: Tensor,  # [N, T, G, K]
    eps: float,
    centred: bool,
    over_positions: bool,
) -> tuple[Tensor, Tensor]:
    """mean [N, T, G] over K, or [N, 1, G] over T and K; rstd likewise. Not centred: mean is [0]."""
    n, t, groups, _ = input.shape
    wide, dims = accumulation_dtype(input.dtype), (1, 3) if over_positions else (3,)
    rstd = input.new_empty(n, 1 if over_positions else t, groups, dtype=wide)
    mean = torch.empty_like(rstd) if centred else rstd.new_empty(0)
    for chunk in chunks(n, input.shape[1:].numel()):
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
