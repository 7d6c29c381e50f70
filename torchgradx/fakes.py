"""Shapes of the operators' results, for FakeTensor and the meta device. Kernels check more."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor
from torch._prims_common import suggest_memory_format

from .reference.affine import AffineFused, empty_in_lines, is_by_row
from .reference.chunks import accumulation_dtype
from .reference.linear import Fused, Scaled

__all__ = [
    "affine_by_sample",
    "affine_fused",
    "affine_sq_norms",
    "bias_sq_norms",
    "conv2d_fused",
    "conv2d_scaled",
    "conv2d_sq_norms",
    "gather_dots",
    "gather_sq_norms",
    "linear_fused",
    "linear_scaled",
    "linear_sq_norms",
    "moments",
    "prelu_fused",
    "prelu_sq_norms",
    "turned",
]


def _expect(dimensions: int | None, **operands: Any) -> None:
    wanted = "a tensor" if dimensions is None else f"a tensor of {dimensions} dimensions"
    for name, operand in operands.items():
        if not isinstance(operand, Tensor) or dimensions not in (None, operand.dim()):
            shape = list(operand.shape) if isinstance(operand, Tensor) else operand
            raise ValueError(f"{name} must be {wanted}; got {shape}")


def linear_sq_norms(activations: Tensor, grad_output: Tensor, bias: bool) -> Tensor:
    _expect(3, activations=activations, grad_output=grad_output)
    dtype = accumulation_dtype(activations.dtype)
    return activations.new_empty((1 + bias, activations.shape[0]), dtype=dtype)


def bias_sq_norms(grad_output: Tensor) -> Tensor:
    _expect(3, grad_output=grad_output)
    dtype = accumulation_dtype(grad_output.dtype)
    return grad_output.new_empty(grad_output.shape[0], dtype=dtype)


def linear_fused(
    activations: Tensor, grad_output: Tensor, scale: Tensor | None, bias: bool
) -> Fused:
    sq_norms = linear_sq_norms(activations, grad_output, bias)
    o = grad_output.shape[2]
    grad_weight = activations.new_empty(o, activations.shape[2])
    grad_bias = grad_output.new_empty(o if bias else 0)
    return grad_weight, grad_bias, sq_norms


def conv2d_sq_norms(
    input: Tensor,
    grad_output: Tensor,
    kernel_size: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    groups: int,
    bias: bool,
) -> Tensor:
    _expect(4, input=input, grad_output=grad_output)
    if len(kernel_size) != 2 or groups < 1:
        seen = f"{list(kernel_size)} and {groups}"
        raise ValueError(f"kernel_size must be a pair and groups at least 1; got {seen}")
    dtype = accumulation_dtype(input.dtype)
    return input.new_empty((1 + bias, input.shape[0]), dtype=dtype)


def conv2d_fused(
    input: Tensor,
    grad_output: Tensor,
    kernel_size: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    groups: int,
    scale: Tensor | None,
    bias: bool,
) -> Fused:
    geometry = (kernel_size, stride, padding, dilation, groups)
    sq_norms = conv2d_sq_norms(input, grad_output, *geometry, bias)
    o = grad_output.shape[1]
    grad_weight = input.new_empty(o, input.shape[1] // groups, *kernel_size)
    if input.is_cuda and input.itemsize == 2 and kernel_size[0] * kernel_size[1] > 1:
        # as csrc/cuda/bindings.cpp leaves it
        grad_weight = grad_weight.to(memory_format=suggest_memory_format(input))
    grad_bias = grad_output.new_empty(o if bias else 0)
    return grad_weight, grad_bias, sq_norms


def linear_scaled(activations: Tensor, grad_output: Tensor, scale: Tensor, bias: bool) -> Scaled:
    return linear_fused(activations, grad_output, scale, bias)[:2]


def conv2d_scaled(input: Tensor, grad_output: Tensor, *rest: Any) -> Scaled:
    return conv2d_fused(input, grad_output, *rest)[:2]


def affine_sq_norms(
    input: Tensor, grad_output: Tensor, mean: Tensor | None, rstd: Tensor | None, bias: bool
) -> Tensor:
    _expect(4, input=input, grad_output=grad_output)
    return input.new_empty(1 + bias, input.shape[0], dtype=accumulation_dtype(input.dtype))


def affine_fused(
    input: Tensor,
    grad_output: Tensor,
    weight: Tensor,
    mean: Tensor | None,
    rstd: Tensor | None,
    frozen: bool,
    scale: Tensor | None,
    bias: bool,
) -> AffineFused:
    sq_norms = affine_sq_norms(input, grad_output, mean, rstd, bias)
    _expect(None, weight=weight)
    if rstd is not None:
        _expect(3, rstd=rstd)
    grad_input = empty_in_lines(input, is_by_row(input, rstd, frozen))
    grad_weight = weight.new_empty(weight.shape)
    grad_bias = weight.new_empty(weight.shape if bias else (0,))
    return grad_input, grad_weight, grad_bias, sq_norms


def affine_by_sample(
    input: Tensor, grad_output: Tensor, weight: Tensor | None, *rest: Any
) -> tuple[Tensor, Tensor, Tensor]:
    mean, rstd, frozen, bias = rest
    sq_norms = affine_sq_norms(input, grad_output, mean, rstd, bias)
    lines = empty_in_lines(input, is_by_row(input, rstd, frozen))
    grad_input = input.new_empty(0) if weight is None else lines
    return grad_input, sq_norms, sq_norms.new_empty(*sq_norms.shape, 1, input.shape[2:].numel())


def prelu_sq_norms(input: Tensor, grad_output: Tensor) -> Tensor:
    return affine_sq_norms(input, grad_output, None, None, False)


def prelu_fused(
    input: Tensor, grad_output: Tensor, weight: Tensor, scale: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    sq_norms = prelu_sq_norms(input, grad_output)
    _expect(None, weight=weight)
    return empty_in_lines(input, False), weight.new_empty(weight.shape), sq_norms


def moments(
    input: Tensor, eps: float, centred: bool, over_positions: bool
) -> tuple[Tensor, Tensor]:
    _expect(4, input=input)
    n, t, groups, _ = input.shape
    dtype = accumulation_dtype(input.dtype)
    rstd = input.new_empty(n, 1 if over_positions else t, groups, dtype=dtype)
    return rstd.new_empty(rstd.shape if centred else (0,)), rstd


def turned(input: Tensor) -> Tensor:
    _expect(3, input=input)
    return input.new_empty(input.shape)


def gather_sq_norms(indices: Tensor, grad_output: Tensor, padding_idx: int | None) -> Tensor:
    _expect(2, indices=indices)
    _expect(3, grad_output=grad_output)
    dtype = accumulation_dtype(grad_output.dtype)
    return grad_output.new_empty(grad_output.shape[0], dtype=dtype)


def gather_dots(
    indices: Tensor,
    grad_rows: Tensor,
    activations: Tensor,
    grad_output: Tensor,
    padding_idx: int | None,
) -> Tensor:
    _expect(3, activations=activations, grad_output=grad_output)
    return gather_sq_norms(indices, grad_rows, padding_idx)
