"""The sites of nn.LSTM, nn.GRU, nn.RNN and their cells, which go through time (through_time.py).

Each weight has its own site. With fused=False, and where a GPU runs several layers in one
piece, the framework's own gradients stay, and norms are made beside them. What is not served, as
under autocast, is run again in backward like any other module.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from torch import nn

from .. import ops
from ..graph.layout import BATCH
from ..hooks.copies import Hook, stock_of
from ..layers.rules import Layer
from ..layers.table import declared_layout
from . import through_time
from .context import Context
from .native import core
from .rerun import FallbackSite

if ops.NATIVE:
    from .. import _C


class RecurrentSite(FallbackSite):
    """A recurrent module as a whole."""

    by_nodes = True  # of the calls that do not go through time

    def _attend(self, context: Context) -> None:
        module, options = self._module, context.options
        self._stock = stock_of(type(module))
        self._closed = partial(through_time.run_beside, self.layer.notes)
        self._strict = options["backend"] == "native"
        self._products = context.products.setdefault(id(module), [])
        context.standing.put(module, _forward_of)[id(module)] = Hook(self._forward)

    def _forward(self, module: Any, input: Any, hx: Any) -> Any:
        run = self._recorder.current()
        trained = any(p is not None and p.requires_grad for p in module._parameters.values())
        served = run is not None and trained and through_time.can_serve(module, input, hx)
        if served and through_time.keeps_outputs(module, input):
            return through_time.run(self._layer, module, input, hx)
        if run is not None and trained and self._strict and not served:
            run.refuse(self._index, "no_kernel")
        self._before(module, ())
        out = self._stock.forward(module, input, hx)
        return self._after(module, (input, hx), {}, out) or out

    def _layer(self, k: int, layers: int, *arguments: Any) -> Any:
        count = len(self._products) // layers
        return _C.call_recurrent(self._products[k * count : (k + 1) * count], *arguments)


class BesideSite(FallbackSite):
    """The same, with fused=False."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._closed = partial(through_time.run_beside, self.layer.notes)
        self.layer.notes["through time"] = None

    @property
    def by_nodes(self) -> bool:
        regime = getattr(self._call, "regime", None)  # of a call on this thread
        casts = regime is not None and regime.autocast is not None  # else one more run costs less
        return casts and not isinstance(self._module, nn.LSTM)


class RecurrentWeight:
    """One weight of a recurrent module, which is a Linear over all steps."""

    fixed = False

    def __init__(self, module: nn.Module, layer: Layer, index: int, context: Context) -> None:
        self.layer, self.declared = layer, declared_layout(layer, context.options)
        self.presumed = BATCH  # the module's own batch_first is undone before it
        products = context.products.setdefault(id(module), [])
        products.append(core(layer, index, context, self.declared, BATCH, True))

    def leads(self, dims: int) -> int:
        return 1

    def remove(self) -> None:
        pass  # the module's site does it


def _forward_of(stock: Any, sites: dict[int, Any]) -> Any:
    def forward(self: Any, input: Any, hx: Any = None) -> Any:
        site = sites.get(id(self))
        return stock.forward(self, input, hx) if site is None else site(self, input, hx)

    return forward
