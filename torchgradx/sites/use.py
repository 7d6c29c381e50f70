"""One call of a module that runs again, from its forward until the gradients of its outputs are
there."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from .outcome import Outcome
from .regime import Regime

__all__ = ["Use"]


@dataclass
class Use:
    run: Any
    number: int  # among the uses of the run
    places: list[int]  # of the parameters
    arguments: tuple[list[Any], Any]  # leaves as saved, and their structure
    regime: Regime
    samples: Tensor | None  # of each row of the first output, where it is packed
    eps: float  # of the coarsest gradient inside
    module: nn.Module  # to run again
    first: torch.Size  # of the output whose rows are proven
    shapes: list[torch.Size]  # of the outputs
    grads: list[Tensor | None]
    hooked: bool  # saved through hooks, a checkpoint's or others
    several: bool  # nodes that the outputs are of
    inner: set[int]  # outputs that others are made from
    gave: list[Outcome | None]  # where a user's forward runs again
    arrived: list[int] = field(default_factory=list)  # the backward, once a node that has been

    def forget(self) -> list[Tensor | None]:
        """Return what has arrived, and drop it."""
        self.arrived.clear()
        grads, self.grads = self.grads, [None] * len(self.grads)
        return grads
