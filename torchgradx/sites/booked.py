"""A call kept for clipping: it runs once more."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.utils._pytree import tree_flatten

from ..passes.versions import Versions
from .fallback import Call, as_it_stands, weighted, whole_gradients

__all__ = ["Booked"]


class Booked:
    runs_again = True

    def __init__(self, call: Call, places: list[int], silent: Any) -> None:
        self.parameters, self._call, self._silent = places, as_it_stands(call), silent
        kept = [*tree_flatten(call.arguments)[0], *call.module.parameters(), *self._call.grads]
        tensors = (t for t in kept if isinstance(t, Tensor))
        self._versions = Versions(tensors)

    @property
    def intact(self) -> bool:
        return self._versions.stand()

    def weighted(self, factors: Tensor, places: list[int]) -> list[Tensor]:
        found = whole_gradients(weighted(self._call, factors), self._silent)
        return [g for place, g in zip(self.parameters, found, strict=True) if place in places]
