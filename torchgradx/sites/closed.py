"""Gradients by sample in closed form, of modules that have no kernel: their operands.

From what a module was called with and the gradient of its output, as fallback.py has them. None
stands for a call that has no such form: it is served as that of any other module.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from ..reference.chunks import accumulation_dtype
from ..shared.gradients import Gradients
from ..shared.outer import LookedUp, Outer
from .fallback import Call, by_sample

Form = Callable[[Call], dict[str, Gradients] | None]  # by parameter


def embedding_bag(call: Call) -> dict[str, Gradients] | None:
    """Return the rows that each sample looks up, for samples of one bag each."""
    g, module = call.grads[0], cast(nn.EmbeddingBag, call.module)
    if g is None or len(g) != call.n:
        return None
    return {
        "weight": rows_of_bags(module, g, *_named(call, "input", "offsets", "per_sample_weights"))
    }


def bilinear(call: Call) -> dict[str, Gradients] | None:
    """Return a Linear's operands, whose input are all products of the two inputs."""
    operands = [by_sample(call, t) for t in (call.grads[0], *_named(call, "input1", "input2"))]
    if any(t is None for t in operands):
        return None
    g, x, y = (t for t in operands if t is not None)
    pairs = (x.unsqueeze(3) * y.unsqueeze(2)).flatten(2)
    return {"weight": Outer(g, pairs.to(g.dtype)), "bias": g.sum(1)}


def _named(call: Call, *names: str) -> list[Any]:
    args, kwargs = call.arguments
    return [*args, *map(kwargs.get, names[len(args) :])]


@torch.no_grad()
def rows_of_bags(
    module: nn.EmbeddingBag,
    g: Tensor,  # [B, D], of the output
    ids: Tensor,  # [B, L], or all bags' one after another [L]
    offsets: Tensor | None = None,  # [B], or [B + 1]: where the bags begin, for ids [L]
    weights: Tensor | None = None,  # as ids; of mode "sum" only
) -> LookedUp:
    """Return a gradient for each id of a bag: the bag's, times the id's weight."""
    wide = accumulation_dtype(g.dtype)
    weights = torch.ones_like(ids, dtype=wide) if weights is None else weights.to(wide)
    if module.padding_idx is not None:
        weights = weights.where(ids != module.padding_idx, 0)
    if offsets is not None:
        ends = [*offsets.tolist(), len(ids)][1 : len(g) + 1]
        sizes = [end - start for start, end in zip([0, *ends], ends, strict=False)]
        parts = (t[: ends[-1]].split(sizes) for t in (ids, weights))
        ids, weights = (pad_sequence(part, batch_first=True) for part in parts)
    rows = weights.unsqueeze(2)
    if module.mode == "mean":
        rows = rows / rows.count_nonzero(1).clamp(min=1).unsqueeze(1)
    elif module.mode == "max":  # each feature's gradient goes to one id
        values = module.weight[ids].masked_fill(rows == 0, -torch.inf)
        largest = torch.zeros_like(values).scatter_(1, values.argmax(1, keepdim=True), 1)
        rows = largest.to(wide) * rows
    return LookedUp(ids, (rows * g.unsqueeze(1)).to(g.dtype), module.num_embeddings)
