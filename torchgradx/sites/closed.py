"""Squared norms in closed form, of modules that are called on more than one tensor.

From what a module was called with and the gradient of its output, as fallback.py has them. None
stands for what has no such form: it is served as any other module.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

from torch import Tensor, nn

from .. import ops
from ..reference.chunks import accumulation_dtype, chunks, precise_dtype
from .bags import embedding_bag_sq_norms
from .fallback import Call, by_sample

__all__ = ["Form", "bilinear", "embedding_bag"]

Form = Callable[[Call], dict[str, Tensor] | None]  # {parameter: squared norms [N]}


def embedding_bag(call: Call) -> dict[str, Tensor] | None:
    """For samples of one bag each; several have cross terms."""
    g, module = call.grads[0], cast(nn.EmbeddingBag, call.module)
    indices, offsets, weights = _named(call, "input", "offsets", "per_sample_weights")
    if g is None or len(g) != call.n:
        return None
    padding = module.padding_idx
    return {"weight": embedding_bag_sq_norms(indices, g, offsets, module.mode, weights, padding)}


def bilinear(call: Call) -> dict[str, Tensor] | None:
    """|sum_t g_t x_t y_t|^2 = sum_st (g_s.g_t) (x_s.x_t) (y_s.y_t), or from the rows x_t y_t."""
    operands = [by_sample(call, t) for t in (call.grads[0], *_named(call, "input1", "input2"))]
    if any(t is None for t in operands):
        return None
    g, x, y = (t for t in operands if t is not None)
    (n, t, o), i, j = g.shape, x.shape[2], y.shape[2]
    gram = t * (o + i + j) <= o * i * j
    wide = precise_dtype(g) if gram else accumulation_dtype(g.dtype)
    sq_norms = g.new_zeros(n, dtype=accumulation_dtype(g.dtype))
    for chunk in chunks(n, t * t if gram else t * i * j):
        a, b, c = (operand[chunk].to(wide) for operand in (g, x, y))
        if gram:
            sq_norms[chunk] = (a @ a.mT).mul_(b @ b.mT).mul_(c @ c.mT).sum((1, 2)).to(sq_norms)
        else:
            rows = (b.unsqueeze(3) * c.unsqueeze(2)).flatten(2)
            sq_norms[chunk] = ops.linear_sq_norms(rows, a)
    return {"weight": sq_norms, "bias": ops.bias_sq_norms(g)}


def _named(call: Call, *names: str) -> list[Any]:
    args, kwargs = call.arguments
    return [*args, *(kwargs.get(name) for name in names[len(args) :])]
