"""Norms of an EmbeddingBag's weight gradient, bag by bag: one closed form, and no kernel.

Every row that a bag looks up receives the same gradient g, times the row's weight: the gradient is
an outer product of the ids' weights and g, its squared norm |g|^2 sum_u (sum of u's weights)^2.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..reference.chunks import accumulation_dtype, precise_dtype

__all__ = ["embedding_bag_sq_norms"]


@torch.no_grad()
def embedding_bag_sq_norms(
    indices: Tensor,  # [B, L], or all bags' one after another [L]
    grad_output: Tensor,  # [B, D]
    offsets: Tensor | None,  # [B], or [B + 1]: where the bags begin, for indices [L]
    mode: str,  # "sum", "mean" or "max"
    per_sample_weights: Tensor | None,  # as indices; of mode "sum" only
    padding_idx: int | None,
) -> Tensor:
    """Squared norms [B], float32, or float64 for a float64 grad_output.

    For a sample of one bag; where a sample has several, their gradients have cross terms.
    """
    count = len(grad_output)
    ids, bags = indices.reshape(-1), _bags(indices, offsets, count)
    precise = precise_dtype(grad_output)
    weights = torch.ones_like(ids, dtype=precise)
    if per_sample_weights is not None:
        weights = per_sample_weights.reshape(-1).to(precise)
    if padding_idx is not None:
        kept = ids != padding_idx
        ids, bags, weights = ids[kept], bags[kept], weights[kept]
    sizes = torch.bincount(bags, minlength=count).to(precise)
    if mode == "max":  # each feature's gradient goes to one id
        squares = (sizes > 0).to(precise)
    else:
        squares = _squares_by_bag(ids, bags, weights, count)
        if mode == "mean":
            squares = squares / sizes.clamp(min=1).square()
    sq_norms = torch.linalg.vector_norm(grad_output, dim=1, dtype=precise).square() * squares
    return sq_norms.to(accumulation_dtype(grad_output.dtype))


def _bags(indices: Tensor, offsets: Tensor | None, count: int) -> Tensor:
    """[L]: each id's bag"""
    if offsets is None:
        return torch.arange(count, device=indices.device).repeat_interleave(indices.shape[1])
    ends = torch.cat([offsets[1:count], offsets.new_tensor([len(indices)])])
    if len(offsets) > count:
        ends = offsets[1:]
    which = torch.arange(count, device=indices.device)
    return which.repeat_interleave(ends - offsets[:count])


def _squares_by_bag(ids: Tensor, bags: Tensor, weights: Tensor, count: int) -> Tensor:
    """[B]: the sum over a bag's distinct ids of (sum of the id's weights)^2"""
    distinct, rank = ids.unique(return_inverse=True)
    pairs, which = (bags * max(1, len(distinct)) + rank).unique(return_inverse=True)
    sums = weights.new_zeros(len(pairs)).index_add_(0, which, weights)
    owner = pairs // max(1, len(distinct))
    return weights.new_zeros(count).index_add_(0, owner, sums.square())
