"""nn.LSTM, nn.GRU, nn.RNN and their cells: our backward through time instead of a replay.

The framework's own forward runs layer by layer, each layer a node of the graph (csrc/recurrent.cpp)
whose backward leaves the gradients at the gates of all steps. Each weight is then a Linear over
these, with a site of its own. What is not served so, as under autocast, is run again in backward
like any other module; all of it with fused=False, where the gradients must have the framework's
bits.
"""

from __future__ import annotations

from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence

from .. import ops
from ..proof.layout import BATCH
from ..rules import Layer, rule_named
from ..table import Context, declared_layout
from .copies import Hook, stock_of
from .native import NativeSite, core
from .packed import Packed
from .rerun import FallbackSite

if ops.NATIVE:
    from .. import _C

__all__ = ["Site", "site_of"]

PLAIN = {Tensor, nn.Parameter}
CELLS = {"RNN_RELU": 0, "RNN_TANH": 1, "LSTM": 2, "GRU": 3}  # Cell in csrc/layers/recurrence.h


class RecurrentSite(FallbackSite):
    """A recurrent module as a whole."""

    def _attend(self, context: Context) -> None:
        module, options = self._module, context.options
        self._stock = stock_of(type(module))
        self._strict = options["backend"] == "native"
        self._products = context.products.setdefault(id(module), [])
        context.standing.put(module, _forward_of)[id(module)] = Hook(self._forward)

    def _forward(self, module: Any, input: Any, hx: Any) -> Any:
        run = self._recorder.current()
        if run is not None and _served(module, input, hx):
            single = isinstance(module, nn.RNNCellBase)
            return (self._step if single else self._sequence)(module, input, hx)
        if run is not None and self._strict:
            run.refuse(self._index, 'backend="native" has no kernel for how it was called')
        self._before(module, ())
        out = self._stock.forward(module, input, hx)
        return self._after(module, (input, hx), {}, out) or out

    def _step(self, cell: Any, input: Tensor, hx: Any) -> Any:
        lstm = isinstance(cell, nn.LSTMCell)
        h, c = hx if lstm and hx is not None else (hx, None)
        biases = (cell.bias_ih, cell.bias_hh) if cell.bias else ()
        kind = _mode(cell)
        of = _C.Recurrence(CELLS[kind], cell.bias, False, False, True, cell.training, [])
        y, _, c = _C.call_recurrent(
            self._products,
            of,
            input.unsqueeze(1),
            None if h is None else h.unsqueeze(0),
            None if c is None else c.unsqueeze(0),
            [cell.weight_ih, cell.weight_hh, *biases],
        )
        return (y.squeeze(1), c.squeeze(0)) if lstm else y.squeeze(1)

    def _sequence(self, module: Any, input: Any, hx: Any) -> Any:
        packed = Packed(input) if isinstance(input, PackedSequence) else None
        x = packed.data if packed else input  # [N, T, I] or [total, I]
        if not (packed or module.batch_first):
            x = x.transpose(0, 1)
        layers, ways = module.num_layers, 1 + module.bidirectional
        lstm = module.mode == "LSTM"
        given = [] if hx is None else list(hx) if lstm else [hx]
        if packed:
            given = [packed.sort(state) for state in given]
        first = [*given, None, None][:2]  # none: zeros
        of = _C.Recurrence(
            CELLS[module.mode],
            module.bias,
            module.bidirectional,
            bool(module.proj_size),
            False,
            module.training,
            packed.fields if packed else [],
        )
        module._update_flat_weights()
        weights = module._flat_weights
        last: list[Tensor] = []
        cells: list[Tensor] = []
        for k in range(layers):
            if k and module.dropout and module.training:
                # in the order of memory, which is that of the random numbers
                x = torch.dropout(x if packed else x.transpose(0, 1), module.dropout, True)
                x = x if packed else x.transpose(0, 1)
            here = slice(k * ways, (k + 1) * ways)
            states = [t if t is None or layers == 1 else t[here] for t in first]
            y, h, c = _C.call_recurrent(
                _share(self._products, k, layers),
                of,
                x,
                *states,
                _share(weights, k, layers),
            )
            last.append(h)
            cells.append(c)
            x = packed.pack(y) if packed else y
        out: Any = PackedSequence(x, *input[1:]) if packed else x
        if not (packed or module.batch_first):
            out = x.transpose(0, 1)
        h, c = (t[0] if layers == 1 else torch.cat(t) for t in (last, cells if lstm else last))
        return out, (h, c) if lstm else h


class Product:
    """One weight of a recurrent module, which is a Linear over all steps."""

    fixed, keeps_rows = False, True

    def __init__(self, module: nn.Module, layer: Layer, index: int, context: Context) -> None:
        self.layer, self.declared = layer, declared_layout(layer, context.options)
        self.presumed = BATCH  # the module's own batch_first is undone before it
        products = context.products.setdefault(id(module), [])
        products.append(core(layer, index, context, self.declared, BATCH, True))

    def leads(self, dims: int) -> int:
        return 1

    def remove(self) -> None:
        pass  # the module's site does it


Site: TypeAlias = NativeSite | FallbackSite | Product


def site_of(module: nn.Module, layer: Layer, index: int, context: Context) -> Site:
    kind: Any = NativeSite
    if layer.inside:
        kind = Product
    elif layer.kind == "recurrent":
        kind = RecurrentSite
    elif layer.kind == "vmap" or rule_named(layer.kind).closed:
        kind = FallbackSite
    site: Site = kind(module, layer, index, context)
    return site


def _forward_of(stock: Any, sites: dict[int, Any]) -> Any:
    def forward(self: Any, input: Any, hx: Any = None) -> Any:
        site = sites.get(id(self))
        return stock.forward(self, input, hx) if site is None else site(self, input, hx)

    return forward


def _mode(module: Any) -> str:
    if isinstance(module, nn.RNNCell):
        return f"RNN_{module.nonlinearity.upper()}"
    return "LSTM" if isinstance(module, nn.LSTMCell) else "GRU"


def _share(items: Any, k: int, layers: int) -> Any:
    """What belongs to the k-th layer."""
    count = len(items) // layers
    return items[k * count : (k + 1) * count]


def _served(module: Any, input: Any, hx: Any) -> bool:
    """Whether this call is one that csrc/recurrent.cpp knows: else the framework's, run again."""
    single = isinstance(module, nn.RNNCellBase)
    data, sizes = input[:2] if isinstance(input, PackedSequence) and not single else (input, None)
    lstm = isinstance(module, (nn.LSTM, nn.LSTMCell))
    given = [] if hx is None else list(hx) if lstm and isinstance(hx, (tuple, list)) else [hx]
    parameters = [p for p in module._parameters.values() if p is not None]
    held = [data, *(t for t in given if t is not None), *parameters]
    for t in held:
        if type(t) not in PLAIN or t.dtype is not data.dtype or not t.is_cpu:
            return False
    if not data.numel() or not any(p.requires_grad for p in parameters):
        return False
    if torch.is_autocast_enabled("cpu") or torch._C._are_functorch_transforms_active():
        return False
    if data.dim() != (2 if single or sizes is not None else 3):
        return False
    if data.shape[-1] != module.input_size:
        return False
    if not given:
        return True
    if single:
        wanted: list[Any] = [(len(data), module.hidden_size)] * (1 + lstm)
    else:
        wanted = [module.get_expected_hidden_size(data, sizes)]
        if lstm:
            wanted.append(module.get_expected_cell_size(data, sizes))
    return [tuple(t.shape) for t in given] == [tuple(w) for w in wanted]
