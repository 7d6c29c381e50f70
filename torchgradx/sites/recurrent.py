"""Sites of nn.LSTM, nn.GRU, nn.RNN and their cells, which run by through_time.py.

A module has one site, and each of its weights has one more. With fused=False, and where a GPU runs
several layers in one call, PyTorch's gradients stay and norms are made beside them. A call that is
not served, as under autocast, runs again in backward like that of any other module.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from torch import nn
from torch.nn.utils.rnn import PackedSequence

from ..extension import _C
from ..graph.layout import BATCH
from ..hooks.copies import Hook, stock_of
from ..layers.rules import Layer
from ..layers.table import declared_layout, owns_backward
from . import through_time
from .native import Context, make_core
from .packed import Packed
from .rerun import FallbackSite


class RecurrentSite(FallbackSite):
    """Site of a recurrent module, whose gradients may be ours or stay PyTorch's."""

    def _attach(self, context: Context) -> None:
        module, options = self._module, context.options
        self._closed_form = partial(through_time.run_beside, self.layer.notes)
        self._is_ours = owns_backward(options)
        if not self._is_ours:
            self.layer.notes["through time"] = None
            super()._attach(context)
            return
        self._stock = stock_of(type(module))
        self._needs_kernel = options["backend"] == "native"
        self._weight_sites = context.weight_sites.setdefault(id(module), [])
        context.standing.put(module, _forward_of)[id(module)] = Hook(self._forward)

    def _forward(self, module: Any, input: Any, hx: Any) -> Any:
        run = self._recorder.current()
        is_trained = any(p is not None and p.requires_grad for p in module._parameters.values())
        served = run is not None and is_trained and through_time.can_serve(module, input, hx)
        if served and through_time.has_same_bits(module, input):
            packed = Packed(input) if isinstance(input, PackedSequence) else None
            out = through_time.run(self._run_layer, module, input, hx, packed)
            if packed is not None and self._recorder.depth():  # else a checkpoint's recomputation
                self._audit.forwards.note_packed(self._index, packed, out[0].data)
            return out
        if run is not None and is_trained and self._needs_kernel and not served:
            run.refuse(self._index, "no_kernel")
        self._before_forward(module, (input, hx), {})
        out = self._stock.forward(module, input, hx)
        return self._after_forward(module, (input, hx), {}, out) or out

    def _run_layer(self, k: int, layers: int, *arguments: Any) -> Any:
        count = len(self._weight_sites) // layers
        return _C.call_recurrent(self._weight_sites[k * count : (k + 1) * count], *arguments)

    @property
    def by_nodes(self) -> bool:
        if self._is_ours:
            return True  # of calls that through_time.py does not serve
        regime = getattr(self._call, "regime", None)  # of a call on this thread
        # Under autocast, `run_beside` serves only an LSTM. Elsewhere it costs less than the nodes.
        casts = regime is not None and regime.autocast is not None
        return casts and not isinstance(self._module, nn.LSTM)


class RecurrentWeight:
    """Site of one weight of a recurrent module, which is a Linear over all steps."""

    fixed = False

    def __init__(self, module: nn.Module, layer: Layer, index: int, context: Context) -> None:
        self.layer, self.declared = layer, declared_layout(layer, context.options)
        self.presumed = BATCH  # through_time.py transposes before it
        weight_sites = context.weight_sites.setdefault(id(module), [])
        weight_sites.append(make_core(layer, index, context, self.declared, BATCH, True))

    def leads(self, dims: int) -> int:
        return 1


def _forward_of(stock: Any, sites: dict[int, Any]) -> Any:
    """Return a forward for `make_subclass`."""

    def forward(self: Any, input: Any, hx: Any = None) -> Any:
        site = sites.get(id(self))
        return stock.forward(self, input, hx) if site is None else site(self, input, hx)

    return forward
