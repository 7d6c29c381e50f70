"""Arguments of a job's update(): a probe, or norms that were read from one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..probe import Probe


def norms_of(given: Any) -> Tensor:
    """Return norms [N]: those of a probe's record, or those of a Tensor, an array or a sequence."""
    if isinstance(given, Probe):
        return given.norms()
    norms: Any = given
    if isinstance(given, (np.ndarray, Sequence)) and not isinstance(given, str):
        norms = torch.as_tensor(given)
    if not isinstance(norms, Tensor):
        raise TypeError(f"norms must be a Tensor [N] or a probe; got {type(given).__name__}")
    if norms.dim() != 1:
        raise ValueError(f"norms must be [N]; got {list(norms.shape)}")
    return norms.detach()
