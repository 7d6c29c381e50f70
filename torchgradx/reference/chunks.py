"""What the twins share: the dtype of sums, samples in chunks, norms float32 could not square."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

CHUNK = 1 << 19  # elements of one chunk's largest intermediate: 2 MiB of float32


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


def precise_dtype(tensor: Tensor) -> torch.dtype:
    """float64, where the device has it"""
    return torch.float32 if tensor.device.type == "mps" else torch.float64


def chunks(count: int, elements: int, most: int = CHUNK) -> Iterator[slice]:
    """Slices of range(count), each of as many items of `elements` elements as fit in `most`."""
    step = max(1, most // max(1, elements))
    return (slice(start, min(start + step, count)) for start in range(0, count, step))


def norms(rows: Tensor) -> Tensor:
    """[N, T, D] -> [N], in float64, since squares leave float32's range long before norms do"""
    return torch.linalg.vector_norm(rows, dim=(1, 2), dtype=precise_dtype(rows))


def weights_of(scale: Tensor | None, operand: Tensor) -> Tensor:
    """[N], of 1 where no scale is given, in the dtype of sums"""
    wide = accumulation_dtype(operand.dtype)
    return operand.new_ones(len(operand), dtype=wide) if scale is None else scale.to(wide)


def add_rows(to: Tensor, ids: Tensor, rows: Tensor) -> Tensor:
    """Add rows to those of `to` at their ids, in one order: a GPU's index_add_ has none."""
    return to.index_put_((ids,), rows, True) if to.is_cuda else to.index_add_(0, ids, rows)


def scaled_sum(scale: Tensor, grads: Tensor) -> Tensor:
    """[n], [n, *] -> [*]: a sample of scale 0 is left out, whatever its numbers."""
    kept = (scale != 0).view(-1, *(1,) * (grads.dim() - 1))
    return torch.tensordot(scale, torch.where(kept, grads, 0), dims=1)  # to ask first would wait
