"""A call kept for clipping: it runs once more."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten

from ..record.versions import Versions
from .fallback import Call, as_it_stands, weighted, whole_gradients, without

__all__ = ["Booked"]


class Booked:
    runs_again = True  # its module, to clip it

    def __init__(self, call: Call, places: list[int], silent: Any) -> None:
        self.parameters, self._call, self._silent = places, as_it_stands(call), silent
        kept = [*tree_flatten(call.arguments)[0], *call.module.parameters(), *self._call.grads]
        tensors = (t for t in kept if isinstance(t, Tensor))
        self._versions = Versions(tensors)

    @property
    def intact(self) -> bool:
        return self._versions.stand()

    def weighted(self, factors: Tensor, places: list[int]) -> list[Tensor]:
        call, left_out = weighted(self._call, factors), factors == 0
        found = whole_gradients(call, self._silent)
        if bool(left_out.all()):
            found = [torch.zeros_like(g) for g in found]
        elif bool(left_out.any()) and not all(bool(g.isfinite().all()) for g in found):
            found = whole_gradients(without(call, left_out), self._silent)
        return [g for place, g in zip(self.parameters, found, strict=True) if place in places]
