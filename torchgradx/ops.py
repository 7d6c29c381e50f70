"""The operators from Python: holds their overloads, checks arguments by name.

The public functions check and choose, then make one call. The raw operators beside them
(`ops.gram_sq_norms` and its like, csrc/operators/ops.h) check nothing a user would understand.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from . import _check, reference
from .extension import CUDA, NATIVE
from .reference import fakes
from .reference.linear import conv2d_sq_norms_of_rows

__all__ = [
    "conv2d_sq_norms",
    "conv2d_weight_grad",
    "embedding_sq_norms",
    "linear_sq_norms",
    "linear_weight_grad",
]

Operator = Callable[..., Any]


def kernels_on(device: torch.device) -> bool:
    """Return True if kernels run there; plain PyTorch serves everywhere else."""
    if device.type == "cuda":
        return CUDA and torch.cuda.get_device_capability(device) >= (8, 0)
    return NATIVE and device.type == "cpu"


def _operator(name: str, fake: Operator) -> Operator:
    """Return the overload: a look-up through torch.ops costs more than a small kernel."""
    twin: Operator = getattr(reference, name)

    def serve(*arguments: Any) -> Any:
        return (fake if arguments[0].is_meta else twin)(*arguments)

    serve.__name__ = serve.__qualname__ = name
    serve.__doc__ = twin.__doc__
    if not NATIVE:
        return serve
    overload: Any = getattr(torch.ops.torchgradx, name).default

    def checked(function: Operator) -> Operator:
        def call(*arguments: Any) -> Any:
            for argument, value in zip(overload._schema.arguments, arguments, strict=True):
                if value is None and isinstance(argument.type, torch.TensorType):
                    raise ValueError(f"{argument.name} must be a tensor; got None")
            return function(*arguments)

        return call

    torch.library.register_fake(f"torchgradx::{name}", checked(fake))
    # On every device for which no backend has registered a kernel.
    _library.impl(name, checked(serve), "CompositeExplicitAutograd")
    return overload


if NATIVE:
    _library = torch.library.Library("torchgradx", "IMPL")

rank1_sq_norms = _operator("rank1_sq_norms", fakes.empty_sq_norms)
gram_sq_norms = _operator("gram_sq_norms", fakes.empty_sq_norms)
direct_sq_norms = _operator("direct_sq_norms", fakes.empty_sq_norms)
bias_sq_norms = _operator("bias_sq_norms", fakes.bias_sq_norms)
linear_fused = _operator("linear_fused", fakes.linear_fused)
linear_scaled = _operator("linear_scaled", fakes.linear_scaled)
conv2d_gram_sq_norms = _operator("conv2d_gram_sq_norms", fakes.empty_sq_norms)
conv2d_direct_sq_norms = _operator("conv2d_direct_sq_norms", fakes.empty_sq_norms)
conv2d_fused = _operator("conv2d_fused", fakes.conv2d_fused)
conv2d_scaled = _operator("conv2d_scaled", fakes.conv2d_scaled)
affine_sq_norms = _operator("affine_sq_norms", fakes.empty_sq_norms)
affine_fused = _operator("affine_fused", fakes.affine_fused)
affine_by_sample = _operator("affine_by_sample", fakes.affine_by_sample)
prelu_sq_norms = _operator("prelu_sq_norms", fakes.prelu_sq_norms)
prelu_fused = _operator("prelu_fused", fakes.prelu_fused)
moments = _operator("moments", fakes.moments)
turned = _operator("turned", fakes.turned)
gather_sq_norms = _operator("gather_sq_norms", fakes.gathered)
gather_dots = _operator("gather_dots", fakes.gathered)

_LINEAR = {"rank1": rank1_sq_norms, "gram": gram_sq_norms, "direct": direct_sq_norms}
_CONV2D: dict[str, Operator] = {
    # Where a convolution has one output pixel, its patch is about its input: no kernel of its own.
    "rank1": partial(conv2d_sq_norms_of_rows, rank1_sq_norms),
    "gram": conv2d_gram_sq_norms,
    "direct": conv2d_direct_sq_norms,
}


def linear_sq_norms(
    activations: Tensor,  # [N, *, I]
    grad_output: Tensor,  # [N, *, O]
    *,
    algorithm: str | None = None,
) -> Tensor:
    """Squared norms [N] of a Linear's weight gradient, sample by sample.

    Equivalent to::

        torch.stack([(b.flatten(0, -2).T @ a.flatten(0, -2)).square().sum()
                     for a, b in zip(activations, grad_output)])

    The gradients are those that `grad_output` states: under a mean over N samples, multiply by N^2
    to get those of the samples' own losses. The result carries no autograd graph.

    Args:
        activations: the layer's input [N, *, I]; float16, bfloat16, float32 or float64.
        grad_output: the gradient of its output [N, *, O], of the same dtype.
        algorithm: None lets the cost model choose; "rank1" (T = 1 only; Goodfellow 2015,
            arXiv:1510.01799), "gram" (the ghost norm; Li et al. 2021, arXiv:2110.05679) or
            "direct" (the gradient by tiles, each squared and dropped) forces.

    Returns:
        sq_norms [N], float32; float64 for float64 operands.

    Raises:
        TypeError: an operand is no tensor, or the dtypes or devices do not go together.
        ValueError: the shapes do not go together, or the algorithm forced refuses.
    """
    a, b = _check.linear_operands(activations, grad_output)
    chosen = _check.algorithm(a, a.shape[1], a.shape[2], b.shape[2], 1, algorithm)
    return _LINEAR[chosen](a, b, False).squeeze(0)


def linear_weight_grad(
    activations: Tensor,  # [N, *, I]
    grad_output: Tensor,  # [N, *, O]
    *,
    scale: Tensor | None = None,  # [N]
) -> tuple[Tensor, Tensor]:
    """Return a Linear's weight gradient and its squared norms sample by sample, from one pass.

    Equivalent to::

        g = torch.stack([b.flatten(0, -2).T @ a.flatten(0, -2)
                         for a, b in zip(activations, grad_output)])
        torch.einsum("n,noi->oi", scale, g), g.square().sum((1, 2))

    The gradients are those that `grad_output` states: under a mean over N samples, multiply
    sq_norms by N^2 to get those of the samples' own losses. The result carries no autograd graph.

    Args:
        activations: the layer's input [N, *, I]; float16, bfloat16, float32 or float64.
        grad_output: the gradient of its output [N, *, O], of the same dtype.
        scale: weights [N] of the samples in grad_weight (not in sq_norms); None: all 1.

    Returns:
        grad_weight [O, I] in the operands' dtype; sq_norms [N], float32 (float64 for float64).

    Raises:
        TypeError: an operand is no tensor, or the dtypes or devices do not go together.
        ValueError: the shapes do not go together.
    """
    a, b = _check.linear_operands(activations, grad_output)
    weights = _check.scale(scale, a, "activations")
    grad_weight, _, sq_norms = linear_fused(a, b, weights, False)
    return grad_weight, sq_norms.squeeze(0)


def conv2d_sq_norms(
    input: Tensor,  # [N, C, H, W]
    grad_output: Tensor,  # [N, O, H', W']
    kernel_size: int | Sequence[int],
    *,
    stride: int | Sequence[int] = 1,
    padding: int | Sequence[int] | str = 0,
    dilation: int | Sequence[int] = 1,
    groups: int = 1,
    algorithm: str | None = None,
) -> Tensor:
    """Squared norms [N] of a Conv2d's weight gradient, sample by sample.

    Equivalent to::

        size = (O, C // groups, *kernel_size)
        torch.stack([conv2d_weight(x[None], size, b[None], stride, padding, dilation, groups)
                     .square().sum() for x, b in zip(input, grad_output)])

    with `conv2d_weight` from torch.nn.grad. The gradients are those that `grad_output` states:
    under a mean over N samples, multiply by N^2 to get those of the samples' own losses. The
    result carries no autograd graph.

    Args:
        input: the layer's input [N, C, H, W]; float16, bfloat16, float32 or float64.
        grad_output: the gradient of its output [N, O, H', W'], of the same dtype.
        kernel_size, stride, padding, dilation, groups: as of `torch.nn.Conv2d`; padding may be
            "same" or "valid". Only zeros are padded: for another padding_mode pad `input` first.
        algorithm: None lets the cost model choose; "gram" (Li et al. 2021, arXiv:2110.05679, on
            the patches), "direct" (Rochette et al. 2019, arXiv:1912.06015, by tiles) or "rank1"
            (one output pixel only; Goodfellow 2015, arXiv:1510.01799) forces.

    Returns:
        sq_norms [N], float32; float64 for float64 operands.

    Raises:
        TypeError: an argument has a wrong type, or dtypes or devices do not go together.
        ValueError: shapes or geometry do not go together, or the algorithm forced refuses.
    """
    x, b, geometry = _check.conv2d_operands(
        input, grad_output, kernel_size, stride, padding, dilation, groups
    )
    (kernel_height, kernel_width), _, _, _, groups = geometry
    t = b.shape[2] * b.shape[3]
    i = x.shape[1] // groups * kernel_height * kernel_width
    chosen = _check.algorithm(x, t, i, b.shape[1] // groups, groups, algorithm)
    return _CONV2D[chosen](x, b, *geometry, False).squeeze(0)


def conv2d_weight_grad(
    input: Tensor,  # [N, C, H, W]
    grad_output: Tensor,  # [N, O, H', W']
    kernel_size: int | Sequence[int],
    *,
    stride: int | Sequence[int] = 1,
    padding: int | Sequence[int] | str = 0,
    dilation: int | Sequence[int] = 1,
    groups: int = 1,
    scale: Tensor | None = None,  # [N]
) -> tuple[Tensor, Tensor]:
    """Return a Conv2d's weight gradient and its squared norms sample by sample, from one pass.

    Equivalent to::

        size = (O, C // groups, *kernel_size)
        g = torch.stack([conv2d_weight(x[None], size, b[None], stride, padding, dilation, groups)
                         for x, b in zip(input, grad_output)])
        torch.einsum("n,nochw->ochw", scale, g), g.square().sum((1, 2, 3, 4))

    with `conv2d_weight` from torch.nn.grad (per-sample gradients of a convolution: Rochette et al.
    2019, arXiv:1912.06015). The gradients are those that `grad_output` states: under a mean over N
    samples, multiply sq_norms by N^2 to get those of the samples' own losses. The result carries
    no autograd graph.

    Args:
        input: the layer's input [N, C, H, W]; float16, bfloat16, float32 or float64.
        grad_output: the gradient of its output [N, O, H', W'], of the same dtype.
        kernel_size, stride, padding, dilation, groups: as of `torch.nn.Conv2d`; padding may be
            "same" or "valid". Only zeros are padded: for another padding_mode pad `input` first.
        scale: weights [N] of the samples in grad_weight (not in sq_norms); None: all 1.

    Returns:
        grad_weight [O, C / groups, kH, kW] in the operands' dtype; sq_norms [N], float32 (float64
        for float64 operands).

    Raises:
        TypeError: an argument has a wrong type, or dtypes or devices do not go together.
        ValueError: shapes or geometry do not go together.
    """
    x, b, geometry = _check.conv2d_operands(
        input, grad_output, kernel_size, stride, padding, dilation, groups
    )
    weights = _check.scale(scale, x, "input")
    grad_weight, _, sq_norms = conv2d_fused(x, b, *geometry, weights, False)
    return grad_weight, sq_norms.squeeze(0)


def embedding_sq_norms(
    indices: Tensor,  # [N, *]
    grad_output: Tensor,  # [N, *, D]
    *,
    padding_idx: int | None = None,
) -> Tensor:
    """Squared norms [N] of an Embedding's weight gradient, sample by sample.

    Equivalent to::

        g = [grad_output.new_zeros(V, D).index_add_(0, ids.flatten(), b.flatten(0, -2))
             for ids, b in zip(indices, grad_output)]
        torch.stack(g).square().sum((1, 2))  # for any V above the largest id

    with the rows of `padding_idx` left out. The gradients are those that `grad_output` states:
    under a mean over N samples, multiply by N^2 to get those of the samples' own losses. The
    result carries no autograd graph.

    Args:
        indices: the ids looked up [N, *], int32 or int64.
        grad_output: the gradient of the rows [N, *, D]; float16, bfloat16, float32 or float64.
        padding_idx: the id whose rows count nothing, as of `torch.nn.Embedding`.

    Returns:
        sq_norms [N], float32; float64 for a float64 grad_output.

    Raises:
        TypeError: an argument has a wrong type, or the devices do not go together.
        ValueError: the shapes do not go together, or padding_idx is negative.
        IndexError: an id is negative. On CUDA, where nothing waits, that sample's norm is NaN.
    """
    ids, rows = _check.embedding_operands(indices, grad_output, padding_idx)
    return gather_sq_norms(ids, rows, padding_idx)
