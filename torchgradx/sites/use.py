"""One call of a module that runs again, from its forward until the gradients of its outputs are
there."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ..proof.several import ends_at
from .copies import stock_of
from .experts import Group, Served
from .outcome import Outcome
from .regime import Regime


class Called(NamedTuple):
    """A call of a module, as it was when the call ended."""

    regime: Regime
    arguments: Any
    outputs: list[Tensor]
    made: list[Tensor]  # what to listen at
    ends: dict[Any, list[tuple[int, int]]]  # by node: output of the module, and of the node
    first: Tensor  # whose rows are proven
    samples: Tensor | None
    versions: list[int]  # of the outputs
    products: Mapping[int, Group]  # by place, see experts.py

    def gave(self, eps: float) -> list[Outcome | None]:
        """Return what the outputs were, of those that nobody has written into."""
        pairs = zip(self.outputs, self.versions, strict=True)
        return [Outcome.of(t, eps) if t._version == version else None for t, version in pairs]


def by_node(made: Sequence[Tensor]) -> dict[Any, list[tuple[int, int]]]:
    """Return where these are made, as Called.ends has it."""
    ends: dict[Any, list[tuple[int, int]]] = {}
    for (node, number), k in ends_at(made).items():
        ends.setdefault(node, []).append((k, number))
    return ends


@dataclass
class Use:
    run: Any
    number: int  # among the uses of the run
    places: list[int]  # of the parameters
    arguments: tuple[list[Any], Any]  # leaves as saved, and their structure
    regime: Regime
    drew: bool  # random numbers
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
    products: Served | None = None  # by which its parameters are all used, see experts.py
    arrived: list[int] = field(default_factory=list)  # the backward, once a node that has been

    def forget(self) -> list[Tensor | None]:
        """Return what has arrived, and drop it."""
        self.arrived.clear()
        grads, self.grads = self.grads, [None] * len(self.grads)
        return grads

    def rounding(
        self, grads: Sequence[Tensor | None], gradient: Tensor, size: float, alone: float
    ) -> float:
        """Return the rounding of a sum of terms of this size; alone: sum of the samples' norms."""
        kinds = {self.regime.autocast or gradient.dtype}
        kinds.update(g.dtype for g in grads if g is not None)
        rounding = size * max(torch.finfo(kind).eps for kind in kinds)
        return rounding + alone * self.eps / 32  # of 64


def apart(module: nn.Module, out: Any) -> Any:
    """An LSTMCell makes its h from its c: to a copy of c no gradient comes but the loss's. What is
    written over a view puts another node in its node's place, but for a copy. A user's module may
    keep its outputs, or have them share memory: it is run once more, see of_the_loss."""
    stock = stock_of(type(module))
    if stock is nn.LSTMCell:
        return out[0], out[1].clone()
    views = stock in (nn.LSTM, nn.MultiheadAttention) and isinstance(out[0], Tensor)
    return (out[0].clone(), *out[1:]) if views and out[0]._base is not None else None
