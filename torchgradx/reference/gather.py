"""Twins of the operators on tables of rows looked up by id, one sample at a time."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from .chunks import accumulation_dtype, norms, precise_dtype

__all__ = ["gather_dots", "gather_sq_norms"]


def _rows(
    indices: Tensor,  # [N, T]
    grads: Tensor,  # [N, T, D]
    padding_idx: int | None,
    V: int | None = None,
) -> Iterator[tuple[Tensor, Tensor]]:
    """For each sample the ids that occur [U], and the sums of their rows [U, D]."""
    wrong = (indices < 0) if V is None else (indices < 0) | (indices >= V)
    if wrong.any():
        n, t = wrong.nonzero()[0].tolist()
        highest = "on" if V is None else f"to {V - 1}"
        raise IndexError(
            f"indices must be from 0 {highest}; got {indices[n, t]} in sample {n}, position {t}"
        )
    for ids, rows in zip(indices, grads.to(accumulation_dtype(grads.dtype)), strict=True):
        if padding_idx is not None:
            kept = ids != padding_idx
            ids, rows = ids[kept], rows[kept]
        distinct, which = ids.unique(return_inverse=True)
        yield distinct, rows.new_zeros(len(distinct), rows.shape[1]).index_add_(0, which, rows)


@torch.no_grad()
def gather_sq_norms(indices: Tensor, grad_output: Tensor, padding_idx: int | None) -> Tensor:
    """sum over ids of |sum of the id's rows|^2: [N, T], [N, T, D] -> [N]"""
    out = grad_output.new_empty(len(indices), dtype=accumulation_dtype(grad_output.dtype))
    for n, (_, sums) in enumerate(_rows(indices, grad_output, padding_idx)):
        out[n] = norms(sums[None]).square()
    return out


@torch.no_grad()
def gather_dots(
    indices: Tensor,  # [N, T]
    grad_rows: Tensor,  # [N, T, D]
    activations: Tensor,  # [N, S, D]
    grad_output: Tensor,  # [N, S, V]
    padding_idx: int | None,
) -> Tensor:
    """<E_n, H_n>, a table's gradients as it is looked up and as it is a Linear's weight -> [N]"""
    out = grad_rows.new_empty(len(indices), dtype=accumulation_dtype(grad_rows.dtype))
    pairs = _rows(indices, grad_rows, padding_idx, grad_output.shape[2])
    for n, (ids, sums) in enumerate(pairs):
        b = grad_output[n][:, ids].to(sums.dtype)  # [S, U]
        out[n] = ((b.mT @ activations[n].to(sums.dtype)).to(precise_dtype(sums)) * sums).sum()
    return out
