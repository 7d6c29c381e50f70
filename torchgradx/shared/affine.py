"""Squared norms of what acts element by element on samples, at the graph's node itself:
`weight * h` of a user's RMSNorm, a layer scale, the framework's norms under a user's class. The
kernels read the node's gradient and its saved operand once, and make nothing of their size.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from math import prod

from torch import Tensor

from .. import ops
from ..proof.layout import BATCH
from ..reference.chunks import accumulation_dtype
from .frontier import Node, shape_of
from .products import by_sample

__all__ = ["at_node"]

# input and grad_output [N, T, G, K], mean and rstd [N or 1, T or 1, G]: as ops.affine_sq_norms
Operands = tuple[Tensor, Tensor, Tensor | None, Tensor | None]


def _layer_norm(node: Node, weight: int, g: Tensor, layout: int, n: int) -> Operands:
    features = prod(shape_of(*node.next_functions[weight]))
    x, grad = (by_sample(t, layout, n).reshape(n, -1, 1, features) for t in (node._saved_input, g))
    mean, rstd = (
        by_sample(t, layout, n).reshape(n, -1, 1)
        for t in (node._saved_result1, node._saved_result2)
    )
    return x, grad, mean, rstd


def _group_norm(node: Node, weight: int, g: Tensor, layout: int, n: int) -> Operands | None:
    mean, rstd = node._saved_result1, node._saved_result2
    if layout != BATCH or len(mean) != n:
        return None
    x, grad = (
        t.movedim(1, -1).reshape(n, -1, mean.shape[1], g.shape[1] // mean.shape[1])
        for t in (node._saved_input, g)
    )
    return x, grad, mean.view(n, 1, -1), rstd.view(n, 1, -1)


def _batch_norm(node: Node, weight: int, g: Tensor, layout: int, n: int) -> Operands | None:
    if layout != BATCH or node._saved_training:
        return None
    wide = accumulation_dtype(g.dtype)
    x, grad = (t.movedim(1, -1).reshape(n, -1, g.shape[1], 1) for t in (node._saved_input, g))
    rstd = (node._saved_running_var.to(wide) + node._saved_eps).rsqrt()
    return x, grad, node._saved_running_mean.to(wide).view(1, 1, -1), rstd.view(1, 1, -1)


def _product(node: Node, weight: int, g: Tensor, layout: int, n: int) -> Operands | None:
    x = node._saved_self if weight else node._saved_other
    shape = tuple(shape_of(*node.next_functions[weight]))
    rows = by_sample(g, layout, n)
    aligned = (*[1] * (rows.dim() - 1 - len(shape)), *shape)
    if x.shape != g.shape or any(a not in (1, b) for a, b in zip(aligned, rows.shape[1:])):  # noqa: B905
        return None
    broadcast = [d for d, size in enumerate(aligned, 1) if size == 1]
    order = [0, *broadcast, *(d for d, size in enumerate(aligned, 1) if size != 1)]
    x, grad = (
        by_sample(t, layout, n).permute(order).reshape(n, -1, 1, prod(shape)) for t in (x, g)
    )
    return x, grad, None, None


ARRANGED: dict[str, Callable[[Node, int, Tensor, int, int], Operands | None]] = {
    "MulBackward0": _product,
    "NativeBatchNormBackward0": _batch_norm,
    "NativeGroupNormBackward0": _group_norm,
    "NativeLayerNormBackward0": _layer_norm,
}


def at_node(
    node: Node, operands: Collection[int], g: Tensor, layout: int, n: int
) -> dict[int, Tensor]:
    """Return {operand: squared norms [N]}, of those operands that the kernels serve.

    g: the gradient of the node's output, which has rows by sample.
    """
    name = node.name()
    weight = next(iter(operands)) if name == "MulBackward0" else 1
    bias = len(operands) > 1
    if name not in ARRANGED or weight not in operands or (bias and set(operands) != {1, 2}):
        return {}
    arranged = None if g.is_complex() else ARRANGED[name](node, weight, g, layout, n)
    if arranged is None:
        return {}
    x, grad, mean, rstd = arranged
    if x.dtype != grad.dtype or (rstd is not None and rstd.dtype != accumulation_dtype(x.dtype)):
        return {}  # rounded otherwise, under autocast
    sq = ops.affine_sq_norms(x, grad, mean, rstd, bias)
    return {1: sq[0], 2: sq[1]} if bias else {weight: sq[0]}
