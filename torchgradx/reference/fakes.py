"""Empty results of the operators, laid out as the kernels' are: for FakeTensor and the meta device,
and for the twins to fill. They check nothing: kernels do.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor
from torch._prims_common import suggest_memory_format

from .chunks import accumulation_dtype

Fused = tuple[Tensor, Tensor, Tensor]  # grad_weight, grad_bias [O] (or [0]), sq_norms [1 + bias, N]
Scaled = tuple[Tensor, Tensor]  # as Fused, without norms
AffineFused = tuple[Tensor, Tensor, Tensor, Tensor]  # grad_input, then as Fused


def _sums(like: Tensor, *shape: int) -> Tensor:
    """In the dtype that sums are kept in"""
    return like.new_empty(shape, dtype=accumulation_dtype(like.dtype))


def empty_sq_norms(operand: Tensor, *rest: Any) -> Tensor:
    """[1 + bias, N]; of all operators whose last argument is the bias"""
    return _sums(operand, 1 + rest[-1], operand.shape[0])


def bias_sq_norms(grad_output: Tensor) -> Tensor:
    return _sums(grad_output, grad_output.shape[0])


def linear_fused(
    activations: Tensor, grad_output: Tensor, scale: Tensor | None, bias: bool
) -> Fused:
    o = grad_output.shape[2]
    grad_weight = activations.new_empty(o, activations.shape[2])
    return grad_weight, grad_output.new_empty(o if bias else 0), empty_sq_norms(activations, bias)


def conv2d_fused(
    input: Tensor, grad_output: Tensor, kernel_size: Sequence[int], *rest: Any
) -> Fused:
    *_, groups, _, bias = rest
    if len(kernel_size) != 2 or groups < 1:
        seen = f"{list(kernel_size)} and {groups}"
        raise ValueError(f"kernel_size must be a pair and groups at least 1; got {seen}")
    o = grad_output.shape[1]
    grad_weight = input.new_empty(o, input.shape[1] // groups, *kernel_size)
    if input.is_cuda and input.itemsize == 2 and kernel_size[0] * kernel_size[1] > 1:
        # as csrc/cuda/bindings.cpp leaves it
        grad_weight = grad_weight.to(memory_format=suggest_memory_format(input))
    return grad_weight, grad_output.new_empty(o if bias else 0), empty_sq_norms(input, bias)


def without_norms(fused: Callable[..., Fused]) -> Callable[..., Scaled]:
    """Return a function of the same arguments that gives the gradients alone."""
    return lambda *arguments: fused(*arguments)[:2]


linear_scaled, conv2d_scaled = without_norms(linear_fused), without_norms(conv2d_fused)


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


def affine_fused(input: Tensor, grad_output: Tensor, weight: Tensor, *rest: Any) -> AffineFused:
    _, rstd, frozen, _, bias = rest
    grad_input = _in_lines(input, is_by_row(input, rstd, frozen))
    grad_bias = weight.new_empty(weight.shape if bias else (0,))
    return grad_input, weight.new_empty(weight.shape), grad_bias, empty_sq_norms(input, bias)


def affine_by_sample(
    input: Tensor, grad_output: Tensor, weight: Tensor | None, *rest: Any
) -> tuple[Tensor, Tensor, Tensor]:
    _, rstd, frozen, bias = rest
    lines = _in_lines(input, is_by_row(input, rstd, frozen))
    grad_input = input.new_empty(0) if weight is None else lines
    squares = empty_sq_norms(input, bias)
    return grad_input, squares, _sums(input, *squares.shape, 1, input.shape[2:].numel())


def prelu_sq_norms(input: Tensor, grad_output: Tensor) -> Tensor:
    return empty_sq_norms(input, False)


def prelu_fused(
    input: Tensor, grad_output: Tensor, weight: Tensor, scale: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    return _in_lines(input, False), weight.new_empty(weight.shape), empty_sq_norms(input, False)


def moments(
    input: Tensor, eps: float, centred: bool, over_positions: bool
) -> tuple[Tensor, Tensor]:
    n, t, groups, _ = input.shape
    rstd = _sums(input, n, 1 if over_positions else t, groups)
    return rstd.new_empty(rstd.shape if centred else (0,)), rstd


def turned(input: Tensor) -> Tensor:
    return input.new_empty(input.shape)


def gathered(indices: Tensor, grad_rows: Tensor, *rest: Any) -> Tensor:
    """[N]; of both operators on tables of rows"""
    return bias_sq_norms(grad_rows)
