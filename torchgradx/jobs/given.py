"""Arguments of a job's update(): a probe, or norms that were read from one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..probe import Probe

__all__ = ["norms_of"]


def norms_of(given: Any, *, named: bool = False) -> Tensor | dict[str, Tensor]:
    """Return norms [N]: those of a probe's record, or those that are given.

    Args:
        given: a probe, a Tensor, an array or a sequence of numbers.
        named: whether a dict of such, by name, will do too.

    Raises:
        TypeError: it is something else.
        ValueError: it is not [N].
    """
    if isinstance(given, Probe):
        return given.norms()
    if named and isinstance(given, Mapping):
        return {name: _one(values, named) for name, values in given.items()}
    return _one(given, named)


def _one(given: Any, named: bool) -> Tensor:
    norms: Any = given
    if isinstance(given, (np.ndarray, Sequence)) and not isinstance(given, (str, bytes)):
        try:
            norms = torch.as_tensor(given)
        except (TypeError, ValueError, RuntimeError):
            norms = None
    if not isinstance(norms, Tensor) or norms.is_complex() or norms.dtype == torch.bool:
        which = "a Tensor [N], a dict of them or a probe" if named else "a Tensor [N] or a probe"
        raise TypeError(f"norms must be {which}; got {type(given).__name__}")
    if norms.dim() != 1:
        raise ValueError(f"norms must be [N]; got {list(norms.shape)}")
    return norms.detach()
