"""Arguments of jobs: a probe, or norms that were read from one; indices of a dataset."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ..probe import Probe

MODEL = ""  # the name of norms that are of the whole model


def norms_of(value: Any) -> Tensor:
    """Return norms [N]: those of a probe's record, or those of a Tensor, an array or a sequence."""
    if isinstance(value, Probe):
        return value.norms()
    norms: Any = value
    if isinstance(value, (np.ndarray, Sequence)) and not isinstance(value, str):
        norms = torch.as_tensor(value, device="cpu")
    if not isinstance(norms, Tensor):
        raise TypeError(f"norms must be a Tensor [N] or a probe; got {type(value).__name__}")
    if norms.dim() != 1:
        raise ValueError(f"norms must be [N]; got {list(norms.shape)}")
    return norms.detach()


def indices_of(value: Any, size: int | None = None) -> NDArray[np.int64]:
    """Return indices [B]. size: of the dataset, which they must be within."""
    found = value.cpu().numpy() if isinstance(value, Tensor) else np.asarray(value)
    if found.ndim != 1 or (found.size and not np.issubdtype(found.dtype, np.integer)):
        raise TypeError(f"indices must be integers [B]; got {found.dtype} {list(found.shape)}")
    found = found.astype(np.int64)
    if size is not None and found.size and not 0 <= found.min() <= found.max() < size:
        low, high = found.min(), found.max()
        raise ValueError(f"indices must be from 0 to {size - 1}; got {low} to {high}")
    return found
