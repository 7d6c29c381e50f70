"""One call of a module that runs again, from its forward until the gradients of its outputs are
there."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten

from ..proof.several import ends_at
from ..record.unpacking import saved, saves_through_hooks
from .copies import stock_of
from .experts import Served
from .outcome import Outcome
from .regime import Regime

Ends = dict[Any, list[tuple[int, int]]]  # by node: output of the module, and of the node


def ends_by_node(outputs: Sequence[Tensor]) -> Ends:
    """Return where these are made."""
    ends: Ends = {}
    for (node, number), k in ends_at(outputs).items():
        ends.setdefault(node, []).append((k, number))
    return ends


@dataclass
class Use:
    """A call of a module, without its graph."""

    run: Any
    number: int  # among the uses of the run
    parameters: dict[int, Tensor]  # that are trained, by place
    regime: Regime
    first: torch.Size  # of the output whose rows are proven
    samples: Tensor | None = None  # of each row of the first output, where it is packed
    drew: bool = False  # random numbers
    several: bool = False  # nodes that the outputs are of
    inner: set[int] = field(default_factory=set)  # outputs that others are made from
    outcomes: Sequence[Outcome | None] = ()  # of the forward, where it is a user's
    products: Served | None = None  # by which its parameters are all used, see experts.py
    arrivals: list[int] = field(default_factory=list)  # the backward, once a node that has been

    def save(self, module: nn.Module, arguments: Any, outputs: list[Tensor], eps: float) -> None:
        """Save what runs again. eps: of the coarsest gradient inside."""
        leaves, spec = tree_flatten(arguments)
        self.module, self.eps = module, eps
        self.arguments, self.spec = [saved(leaf) for leaf in leaves], spec
        self.drew = self.regime.drew
        self.hooked = saves_through_hooks()
        self.shapes = [t.shape for t in outputs]
        self.grads: list[Tensor | None] = [None] * len(outputs)

    @property
    def places(self) -> list[int]:
        return list(self.parameters)

    def take_grads(self) -> list[Tensor | None]:
        """Return what has arrived, and forget it."""
        self.arrivals.clear()
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


def copy_shared_outputs(module: nn.Module, out: Any) -> Any:
    """Return a stock module's outputs with copies of those that share a node or memory; or None.

    An LSTMCell makes its h from its c: to a copy of c no gradient comes but the loss's. What is
    written over a view puts another node in its node's place, but for a copy. A user's module may
    keep its outputs, or have them share memory: it is run once more, see of_the_loss.
    """
    stock = stock_of(type(module))
    if stock is nn.LSTMCell:
        return out[0], out[1].clone()
    views = stock in (nn.LSTM, nn.MultiheadAttention) and isinstance(out[0], Tensor)
    return (out[0].clone(), *out[1:]) if views and out[0]._base is not None else None
