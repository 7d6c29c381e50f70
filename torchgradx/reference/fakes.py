"""Empty results of the operators, laid out as the kernels' are: for FakeTensor and the meta device,
and for the twins to fill. Kernels check more than these do.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor
from torch._prims_common import suggest_memory_format

from .chunks import accumulation_dtype

Fused = tuple[Tensor, Tensor, Tensor]  # grad_weight, grad_bias [O] (or [0]), sq_norms [1 + bias, N]
Scaled = tuple[Tensor, Tensor]  # as Fused, without norms
AffineFused = tuple[Tensor, Tensor, Tensor, Tensor]  # grad_input, then as Fused


def _expect(dimensions: int | None, **operands: Any) -> None:
    wanted = "a tensor" if dimensions is None else f"a tensor of {dimensions} dimensions"
    for name, operand in operands.items():
        if not isinstance(operand, Tensor) or dimensions not in (None, operand.dim()):
            shape = list(operand.shape) if isinstance(operand, Tensor) else operand
            raise ValueError(f"{name} must be {wanted}; got {shape}")


def _sums(like: Tensor, *shape: int) -> Tensor:
    """In the dtype that sums are kept in"""
    return like.new_empty(shape, dtype=accumulation_dtype(like.dtype))


# Linear and Conv2d


def linear_sq_norms(activations: Tensor, grad_output: Tensor, bias: bool) -> Tensor:
    _expect(3, activations=activations, grad_output=grad_output)
    return _sums(activations, 1 + bias, activations.shape[0])


def bias_sq_norms(grad_output: Tensor) -> Tensor:
    _expect(3, grad_output=grad_output)
    return _sums(grad_output, grad_output.shape[0])


def linear_fused(
    activations: Tensor, grad_output: Tensor, scale: Tensor | None, bias: bool
) -> Fused:
    sq_norms = linear_sq_norms(activations, grad_output, bias)
    o = grad_output.shape[2]
    grad_weight = activations.new_empty(o, activations.shape[2])
    return grad_weight, grad_output.new_empty(o if bias else 0), sq_norms


def linear_scaled(*arguments: Any) -> Scaled:
    return linear_fused(*arguments)[:2]


def conv2d_sq_norms(
    input: Tensor, grad_output: Tensor, kernel_size: Sequence[int], *rest: Any
) -> Tensor:
    *_, groups, bias = rest
    _expect(4, input=input, grad_output=grad_output)
    if len(kernel_size) != 2 or groups < 1:
        seen = f"{list(kernel_size)} and {groups}"
        raise ValueError(f"kernel_size must be a pair and groups at least 1; got {seen}")
    return _sums(input, 1 + bias, input.shape[0])


def conv2d_fused(
    input: Tensor, grad_output: Tensor, kernel_size: Sequence[int], *rest: Any
) -> Fused:
    *others, groups, _, bias = rest
    sq_norms = conv2d_sq_norms(input, grad_output, kernel_size, *others, groups, bias)
    o = grad_output.shape[1]
    grad_weight = input.new_empty(o, input.shape[1] // groups, *kernel_size)
    if input.is_cuda and input.itemsize == 2 and kernel_size[0] * kernel_size[1] > 1:
        # as csrc/cuda/bindings.cpp leaves it
        grad_weight = grad_weight.to(memory_format=suggest_memory_format(input))
    return grad_weight, grad_output.new_empty(o if bias else 0), sq_norms


def conv2d_scaled(*arguments: Any) -> Scaled:
    return conv2d_fused(*arguments)[:2]


# Parameters that act element by element; operands are [N, T, G, K]


def _in_lines(input: Tensor, by_row: bool) -> Tensor:
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


def affine_sq_norms(
    input: Tensor, grad_output: Tensor, mean: Tensor | None, rstd: Tensor | None, bias: bool
) -> Tensor:
    _expect(4, input=input, grad_output=grad_output)
    return _sums(input, 1 + bias, input.shape[0])


def affine_fused(input: Tensor, grad_output: Tensor, weight: Tensor, *rest: Any) -> AffineFused:
    mean, rstd, frozen, _, bias = rest
    sq_norms = affine_sq_norms(input, grad_output, mean, rstd, bias)
    _expect(None, weight=weight)
    if rstd is not None:
        _expect(3, rstd=rstd)
    grad_input = _in_lines(input, is_by_row(input, rstd, frozen))
    grad_weight = weight.new_empty(weight.shape)
    return grad_input, grad_weight, weight.new_empty(weight.shape if bias else (0,)), sq_norms


def affine_by_sample(
    input: Tensor, grad_output: Tensor, weight: Tensor | None, *rest: Any
) -> tuple[Tensor, Tensor, Tensor]:
    mean, rstd, frozen, bias = rest
    sq_norms = affine_sq_norms(input, grad_output, mean, rstd, bias)
    lines = _in_lines(input, is_by_row(input, rstd, frozen))
    grad_input = input.new_empty(0) if weight is None else lines
    return grad_input, sq_norms, _sums(input, *sq_norms.shape, 1, input.shape[2:].numel())


def prelu_sq_norms(input: Tensor, grad_output: Tensor) -> Tensor:
    return affine_sq_norms(input, grad_output, None, None, False)


def prelu_fused(
    input: Tensor, grad_output: Tensor, weight: Tensor, scale: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    sq_norms = prelu_sq_norms(input, grad_output)
    _expect(None, weight=weight)
    return _in_lines(input, False), weight.new_empty(weight.shape), sq_norms


def moments(
    input: Tensor, eps: float, centred: bool, over_positions: bool
) -> tuple[Tensor, Tensor]:
    _expect(4, input=input)
    n, t, groups, _ = input.shape
    rstd = _sums(input, n, 1 if over_positions else t, groups)
    return rstd.new_empty(rstd.shape if centred else (0,)), rstd


def turned(input: Tensor) -> Tensor:
    _expect(3, input=input)
    return input.new_empty(input.shape)


# Tables of rows looked up by id


def gather_sq_norms(indices: Tensor, grad_output: Tensor, padding_idx: int | None) -> Tensor:
    _expect(2, indices=indices)
    _expect(3, grad_output=grad_output)
    return _sums(grad_output, grad_output.shape[0])


def gather_dots(
    indices: Tensor,
    grad_rows: Tensor,
    activations: Tensor,
    grad_output: Tensor,
    padding_idx: int | None,
) -> Tensor:
    _expect(3, activations=activations, grad_output=grad_output)
    return gather_sq_norms(indices, grad_rows, padding_idx)
