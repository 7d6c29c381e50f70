"""Twins of the operators of Linear and Conv2d: one sample's gradient is G_n = sum_t b_nt a_nt^T."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from . import fakes
from .chunks import accumulation_dtype, chunks, norms, scaled_sum, weights_of

__all__ = [
    "bias_sq_norms", "conv2d_direct_sq_norms", "conv2d_fused", "conv2d_gram_sq_norms",
    "conv2d_scaled", "direct_sq_norms", "gram_sq_norms", "linear_fused", "linear_scaled",
    "rank1_sq_norms",
]  # fmt: skip

# Below this share of its terms' absolute sum a Gram has lost four digits to cancellation.
CANCELLED = 1e-4


def _with_bias(sq_norms: Tensor, grad_output: Tensor, bias: bool) -> Tensor:
    """[N], [N, T, O] -> [1 + bias, N]"""
    return torch.stack([sq_norms, bias_sq_norms(grad_output)] if bias else [sq_norms])


@torch.no_grad()
def bias_sq_norms(grad_output: Tensor) -> Tensor:
    """|sum_t b_nt|^2: [N, T, O] -> [N]"""
    return grad_output.sum(1, dtype=accumulation_dtype(grad_output.dtype)).square().sum(1)


@torch.no_grad()
def rank1_sq_norms(activations: Tensor, grad_output: Tensor, bias: bool) -> Tensor:
    """|a_n|^2 |b_n|^2: [N, T, I], [N, T, O] with T <= 1 -> [1 + bias, N]"""
    if activations.shape[1] > 1:
        raise ValueError(f"rank1_sq_norms takes T <= 1; got T = {activations.shape[1]}")
    wide = accumulation_dtype(activations.dtype)
    # Either factor alone may leave float32's range where the product does not: 1e-25 by 1e+10.
    sq_norms = (norms(activations) * norms(grad_output)).square().to(wide)
    return _with_bias(sq_norms, grad_output, bias)


@torch.no_grad()
def gram_sq_norms(activations: Tensor, grad_output: Tensor, bias: bool) -> Tensor:
    """sum_{s,t} (a_s.a_t)(b_s.b_t): [N, T, I], [N, T, O] -> [1 + bias, N]"""
    (n, t, i), o = activations.shape, grad_output.shape[2]
    if activations.device.type == "mps":  # no float64, without which a Gram under- and overflows
        return direct_sq_norms(activations, grad_output, bias)
    sq_norms = activations.new_empty(n, dtype=accumulation_dtype(activations.dtype))
    for chunk in chunks(n, t * max(t, i + o)):
        a, b = activations[chunk].double(), grad_output[chunk].double()
        total, magnitude = a.new_zeros(2, len(a))
        for rows in chunks(t, t * len(a)):
            terms = (a[:, rows] @ a.mT) * (b[:, rows] @ b.mT)
            total += terms.sum((1, 2))
            magnitude += terms.abs().sum((1, 2))
        cancelled = total <= CANCELLED * magnitude
        if cancelled.any():
            total[cancelled] = direct_sq_norms(a[cancelled], b[cancelled], False)[0]
        sq_norms[chunk] = total
    return _with_bias(sq_norms, grad_output, bias)


def _sample_gradients(a: Tensor, b: Tensor) -> Iterator[tuple[slice, Tensor]]:
    """[N, T, I], [N, T, O] -> chunks of samples with their gradients [n, O, I]"""
    wide = accumulation_dtype(a.dtype)
    (n, t, i), o = a.shape, b.shape[2]
    for chunk in chunks(n, max(o * i, t * (i + o))):
        yield chunk, b[chunk].to(wide).mT @ a[chunk].to(wide)


@torch.no_grad()
def direct_sq_norms(activations: Tensor, grad_output: Tensor, bias: bool) -> Tensor:
    """|G_n|^2 from G_n itself: [N, T, I], [N, T, O] -> [1 + bias, N]"""
    sq_norms = activations.new_empty(len(activations), dtype=accumulation_dtype(activations.dtype))
    for chunk, gradients in _sample_gradients(activations, grad_output):
        sq_norms[chunk] = norms(gradients).square()
    return _with_bias(sq_norms, grad_output, bias)


@torch.no_grad()
def linear_fused(
    activations: Tensor,  # [N, T, I]
    grad_output: Tensor,  # [N, T, O]
    scale: Tensor | None,  # [N]
    bias: bool,
) -> fakes.Fused:
    """sum_n scale_n G_n, sum_nt scale_n b_nt, and |G_n|^2 not scaled."""
    weights = weights_of(scale, activations)
    grad_weight = weights.new_zeros(grad_output.shape[2], activations.shape[2])
    sq_norms = torch.empty_like(weights)
    for chunk, gradients in _sample_gradients(activations, grad_output):
        sq_norms[chunk] = norms(gradients).square()
        grad_weight += scaled_sum(weights[chunk], gradients)
    grad_bias = _grad_bias(grad_output, weights, bias)
    return grad_weight.to(activations.dtype), grad_bias, _with_bias(sq_norms, grad_output, bias)


def _grad_bias(grad_output: Tensor, weights: Tensor, bias: bool) -> Tensor:
    """[N, T, O], [N] -> [O], or [0] without a bias"""
    if not bias:
        return grad_output.new_empty(0)
    by_sample = grad_output.sum(1, dtype=weights.dtype)
    return scaled_sum(weights, by_sample).to(grad_output.dtype)


def _rows(
    input: Tensor,  # [N, C, H, W]
    grad_output: Tensor,  # [N, O, H', W']
    kernel_size: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    groups: int,
) -> Iterator[tuple[slice, Tensor, Tensor]]:
    """Yield chunks as a linear layer's operands, each group a sample of its own."""
    n, o, *pixels = grad_output.shape
    t, i = pixels[0] * pixels[1], input.shape[1] // groups * kernel_size[0] * kernel_size[1]
    for chunk in chunks(n, t * i * groups):
        image = input[chunk].to(accumulation_dtype(input.dtype))
        geometry = (tuple(g) for g in (kernel_size, dilation, padding, stride))
        patches = F.unfold(image, *geometry)  # [n, C * kH * kW, T]
        a = patches.reshape(len(image) * groups, i, t).mT
        b = grad_output[chunk].to(a.dtype).reshape(len(image) * groups, o // groups, t).mT
        yield chunk, a, b


@torch.no_grad()
def conv2d_sq_norms_of_rows(
    sq_norms_of_rows: Callable[[Tensor, Tensor, bool], Tensor],
    input: Tensor,  # [N, C, H, W]
    grad_output: Tensor,  # [N, O, H', W']
    *rest: Any,  # kernel_size, stride, padding, dilation, groups, bias
) -> Tensor:
    """A linear kernel applied to chunks of the patches, summed over the groups -> [1 + bias, N]"""
    *geometry, bias = rest
    sq_norms = input.new_empty(len(input), dtype=accumulation_dtype(input.dtype))
    for chunk, a, b in _rows(input, grad_output, *geometry):
        sq_norms[chunk] = sq_norms_of_rows(a, b, False)[0].view(-1, geometry[-1]).sum(1)
    return _with_bias(sq_norms, grad_output.flatten(2).mT, bias)


conv2d_gram_sq_norms = partial(conv2d_sq_norms_of_rows, gram_sq_norms)
conv2d_direct_sq_norms = partial(conv2d_sq_norms_of_rows, direct_sq_norms)


@torch.no_grad()
def conv2d_fused(
    input: Tensor,  # [N, C, H, W]
    grad_output: Tensor,  # [N, O, H', W']
    kernel_size: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    groups: int,
    scale: Tensor | None,  # [N]
    bias: bool,
) -> fakes.Fused:
    """linear_fused of the patches; grad_weight [O, C / groups, kH, kW]"""
    o, channels = grad_output.shape[1], input.shape[1] // groups
    weights = weights_of(scale, input)
    grad_weight = weights.new_zeros(o, channels, *kernel_size)
    by_group = grad_weight.view(groups, o // groups, channels * kernel_size[0] * kernel_size[1])
    sq_norms = torch.empty_like(weights)
    for chunk, a, b in _rows(input, grad_output, kernel_size, stride, padding, dilation, groups):
        in_chunk = sq_norms[chunk].zero_()
        for group in range(groups):
            one = slice(group, None, groups)
            partial_sum, _, partial_sq = linear_fused(a[one], b[one], weights[chunk], False)
            by_group[group] += partial_sum
            in_chunk += partial_sq[0]
    pixels = grad_output.flatten(2).mT  # [N, T, O]
    grad_bias = _grad_bias(pixels, weights, bias)
    return grad_weight.to(input.dtype), grad_bias, _with_bias(sq_norms, pixels, bias)


linear_scaled, conv2d_scaled = fakes.without_norms(linear_fused), fakes.without_norms(conv2d_fused)
