"""Arguments of the public operators: checked once, by name, in a few microseconds.

Every text says what was expected, what came, and where it helps what to do.
"""

from __future__ import annotations

from math import prod
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from .plan.cost import make_plan, plan
from .plan.gpu import Problem, gpu_of
from .reference.chunks import accumulation_dtype

Pair = tuple[int, int]
Geometry = tuple[Pair, Pair, Pair, Pair, int]  # kernel_size, stride, padding, dilation, groups

DTYPES = frozenset((torch.float32, torch.bfloat16, torch.float16, torch.float64))
LARGEST = 2**20  # of a geometry's integers, as the kernels have it: sizes derived stay in 64 bits


def _seen(value: Any) -> str:
    """Return what came, in a few words."""
    if isinstance(value, Tensor):
        return f"{list(value.shape)}"
    text = repr(value)
    return f"{type(value).__name__} {text if len(text) <= 60 else text[:57] + '...'}"


def _dense(name: str, value: Any) -> None:
    if not isinstance(value, Tensor):
        raise TypeError(f"{name} must be a torch.Tensor; got {_seen(value)}")
    if value.layout is not torch.strided or value.is_nested:
        layout = "a nested tensor: pad it" if value.is_nested else f"{value.layout}: densify it"
        raise TypeError(f"{name} must be a dense (strided) tensor; got {layout}")


def _operand(name: str, value: Any) -> Tensor:
    """Return a dense tensor of a supported dtype, without its autograd graph."""
    _dense(name, value)
    if value.dtype not in DTYPES:
        raise TypeError(
            f"{name} must be float16, bfloat16, float32 or float64; got {value.dtype}: convert it"
        )
    return value.detach() if value.requires_grad else value


def _same_device(first_name: str, first: Tensor, name: str, value: Tensor) -> None:
    if value.device != first.device:
        raise TypeError(
            f"{name} must be on {first.device}, as {first_name} is; got {value.device}: move one"
        )


def _pair(first_name: str, first: Any, second_name: str, second: Any) -> tuple[Tensor, Tensor]:
    """Return two operands of one dtype on one device."""
    _dense(second_name, second)
    first = _operand(first_name, first)
    if second.dtype is not first.dtype:
        raise TypeError(
            f"{second_name} must be {first.dtype}, as {first_name} is; got {second.dtype}: "
            "convert one"
        )
    _same_device(first_name, first, second_name, second)
    return first, _operand(second_name, second)


def linear_operands(activations: Tensor, grad_output: Tensor) -> tuple[Tensor, Tensor]:
    """[N, *, I], [N, *, O] -> [N, T, I], [N, T, O]"""
    activations, grad_output = _pair("activations", activations, "grad_output", grad_output)
    a_shape, b_shape = activations.shape, grad_output.shape
    if len(a_shape) < 2:
        raise ValueError(
            f"activations must be [N, *, I], of two dimensions at least; got {list(a_shape)}"
        )
    if a_shape[:-1] != b_shape[:-1]:
        positions = "".join(f" and T = {t}" for t in (prod(a_shape[1:-1]),) if len(a_shape) > 2)
        letters = {2: "[N, O]", 3: "[N, T, O]"}.get(len(a_shape), "[N, *, O]")
        raise ValueError(
            f"grad_output must be {letters} with N = {a_shape[0]}{positions}, "
            f"as activations are {list(a_shape)}; got {list(b_shape)}"
        )
    if len(a_shape) == 3:
        return activations, grad_output
    n, t = a_shape[0], prod(a_shape[1:-1])
    return activations.reshape(n, t, a_shape[-1]), grad_output.reshape(n, t, b_shape[-1])


def embedding_operands(
    indices: Tensor, grad_output: Tensor, padding_idx: Any
) -> tuple[Tensor, Tensor]:
    """[N, *], [N, *, D] -> [N, T], [N, T, D]"""
    _dense("indices", indices)
    if indices.dtype not in (torch.int32, torch.int64):
        raise TypeError(f"indices must be int32 or int64; got {indices.dtype}: convert it")
    grad_output = _operand("grad_output", grad_output)
    _same_device("indices", indices, "grad_output", grad_output)
    if padding_idx is not None and type(padding_idx) is not int:
        raise TypeError(f"padding_idx must be an int or None; got {_seen(padding_idx)}")
    if padding_idx is not None and not 0 <= padding_idx < 2**63:
        raise ValueError(
            f"padding_idx must be an id, from 0 on; got {padding_idx}: add num_embeddings to it"
        )
    shape = indices.shape
    if not shape or grad_output.shape[:-1] != shape:
        raise ValueError(
            f"grad_output must be [N, *, D] where indices are [N, *]; got {list(grad_output.shape)}"
            f" and {list(shape)}"
        )
    n, t = shape[0], prod(shape[1:])
    return indices.reshape(n, t), grad_output.reshape(n, t, grad_output.shape[-1])


def scale(value: Tensor | None, operand: Tensor, operand_name: str) -> Tensor | None:
    """[N], in the dtype the kernels accumulate in"""
    if value is None:
        return None
    if not isinstance(value, Tensor):
        raise TypeError(f"scale must be a torch.Tensor [N] or None; got {_seen(value)}")
    weights, n = _operand("scale", value), operand.shape[0]
    _same_device(operand_name, operand, "scale", weights)
    if weights.shape != (n,):
        raise ValueError(f"scale must be [N] with N = {n}; got {list(weights.shape)}")
    return weights.to(accumulation_dtype(operand.dtype))


def _integers(name: str, value: Any, least: int) -> Pair:
    """Return a pair, for an int or a pair of them."""
    pair = (value, value) if type(value) is int else value
    is_sequence = isinstance(pair, (tuple, list))
    if is_sequence and len(pair) != 2:
        raise ValueError(f"{name} must be an int or a pair of ints; got {_seen(value)}")
    if not is_sequence or type(pair[0]) is not int or type(pair[1]) is not int:
        raise TypeError(f"{name} must be an int or a pair of ints; got {_seen(value)}")
    first, second = pair
    if not (least <= first <= LARGEST and least <= second <= LARGEST):
        raise ValueError(f"{name} must be from {least} to {LARGEST}; got {_seen(value)}")
    return first, second


def _padding(value: Any, kernel_size: Pair, stride: Pair, dilation: Pair) -> tuple[Pair, Pair]:
    """Return padding on each side, and rows and columns lacking at the far side ("same")."""
    if not isinstance(value, str):
        return _integers("padding", value, 0), (0, 0)
    if value == "valid":
        return (0, 0), (0, 0)
    if value != "same":
        raise ValueError(f'padding must be an int, a pair, "same" or "valid"; got {_seen(value)}')
    if stride != (1, 1):
        raise ValueError(f'padding="same" needs stride = 1; got stride = {stride}')
    total = (dilation[0] * (kernel_size[0] - 1), dilation[1] * (kernel_size[1] - 1))
    if max(total) > LARGEST:
        raise ValueError(f'padding="same" would pad {total} pixels; at most {LARGEST}')
    return (total[0] // 2, total[1] // 2), (total[0] % 2, total[1] % 2)


def _output_size(size: Pair, geometry: Geometry) -> Pair:
    """H', W' of a convolution on H, W"""
    kernel_size, stride, padding, dilation, _ = geometry
    down = size[0] + 2 * padding[0] - dilation[0] * (kernel_size[0] - 1) - 1
    along = size[1] + 2 * padding[1] - dilation[1] * (kernel_size[1] - 1) - 1
    if down < 0 or along < 0:
        raise ValueError(
            f"kernel_size = {kernel_size} with dilation = {dilation} must fit into the input's "
            f"{list(size)} pixels padded by {padding}"
        )
    return down // stride[0] + 1, along // stride[1] + 1


def conv2d_operands(
    input: Tensor,  # [N, C, H, W]
    grad_output: Tensor,  # [N, O, H', W']
    kernel_size: Any,
    stride: Any,
    padding: Any,
    dilation: Any,
    groups: Any,
) -> tuple[Tensor, Tensor, Geometry]:
    """Return the operands, the input padded where "same" is lopsided, and the geometry as pairs."""
    input, grad_output = _pair("input", input, "grad_output", grad_output)
    kernel = _integers("kernel_size", kernel_size, 1)
    steps = _integers("stride", stride, 1)
    spread = _integers("dilation", dilation, 1)
    margin, lacking = _padding(padding, kernel, steps, spread)
    if type(groups) is not int:
        raise TypeError(f"groups must be an int; got {_seen(groups)}")
    if input.dim() != 4:
        raise ValueError(f"input must be [N, C, H, W]; got {list(input.shape)}")
    if grad_output.dim() != 4:
        raise ValueError(f"grad_output must be [N, O, H', W']; got {list(grad_output.shape)}")
    n, channels, height, width = input.shape
    o = grad_output.shape[1]
    if groups < 1 or channels % groups or o % groups:
        raise ValueError(
            f"groups must divide input's C = {channels} and grad_output's O = {o}; got {groups}"
        )
    if lacking != (0, 0):
        input = F.pad(input, (0, lacking[1], 0, lacking[0]))
    geometry = (kernel, steps, margin, spread, groups)
    pixels = _output_size((height + lacking[0], width + lacking[1]), geometry)
    if grad_output.shape != (n, o, *pixels):
        raise ValueError(
            f"grad_output must be [N, O, H', W'] with N = {n}, H' = {pixels[0]} and "
            f"W' = {pixels[1]}, as input is {[n, channels, height, width]}, "
            f"kernel_size = {kernel}, stride = {steps}, padding = {padding} and "
            f"dilation = {spread}; got {list(grad_output.shape)}"
        )
    return input, grad_output, geometry


def algorithm(operand: Tensor, t: int, i: int, o: int, groups: int, forced: str | None) -> str:
    """Return the algorithm to run: by the cost model, or as forced unless it refuses."""
    if forced is not None and type(forced) is not str:
        raise TypeError(f"algorithm must be a str or None; got {_seen(forced)}")
    layer: Any = "linear" if operand.dim() == 3 else "conv2d"
    device = gpu_of(operand.device) if operand.is_cuda else None
    problem = Problem(layer, operand.shape[0], t, i, o, groups, operand.itemsize, device=device)
    # Dynamo warns of caches, and has no need of them.
    choose = make_plan if torch.compiler.is_compiling() else plan
    return choose(problem, forced).algorithm
