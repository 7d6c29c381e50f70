"""nn.LSTM, nn.GRU, nn.RNN and their cells: our backward through time instead of a replay.

The framework's own forward runs layer by layer, each a node of the graph (nodes/recurrent.cpp)
whose backward leaves the gradients at the gates of all steps. Each weight is then a Linear over
these.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence

from .. import ops
from ..gradients.by_sample import Gradients
from ..gradients.outer import Outer
from ..graph.layout import BATCH, SEQUENCE
from ..layers.modules import recurrent_weights
from .fallback import Call, copy_to_keep, run_again
from .packed import Packed

if ops.NATIVE:
    from .. import _C

TENSOR_TYPES = {Tensor, nn.Parameter}
CELLS = {"RNN_RELU": 0, "RNN_TANH": 1, "LSTM": 2, "GRU": 3}  # Cell in csrc/layers/recurrence.h

# (k, of how many, its options, input, state, cell state, weights) -> states, last ones, last cells
RunLayer = Callable[..., tuple[Tensor, Any, Any]]


def run(layer: RunLayer, module: Any, input: Any, hx: Any = None) -> Any:
    """Return what the module's own forward gives."""
    single = isinstance(module, nn.RNNCellBase)
    return (_step if single else _sequence)(layer, module, input, hx)


def _step(layer: RunLayer, cell: Any, input: Tensor, hx: Any) -> Any:
    lstm = isinstance(cell, nn.LSTMCell)
    h, c = hx if lstm and hx is not None else (hx, None)
    biases = (cell.bias_ih, cell.bias_hh) if cell.bias else ()
    of = _C.Recurrence(CELLS[_mode(cell)], cell.bias, False, False, True, cell.training, [])
    y, _, c = layer(
        0,
        1,
        of,
        input.unsqueeze(1),
        None if h is None else h.unsqueeze(0),
        None if c is None else c.unsqueeze(0),
        [cell.weight_ih, cell.weight_hh, *biases],
    )
    h = _C.of_its_own(y.squeeze(1))
    return (h, _C.of_its_own(c.squeeze(0))) if lstm else h


def _sequence(layer: RunLayer, module: Any, input: Any, hx: Any) -> Any:
    packed = Packed(input) if isinstance(input, PackedSequence) else None
    x = packed.data if packed else input  # [N, T, I] or [total, I]
    turns = not (packed or module.batch_first)
    if turns:
        x = x.transpose(0, 1)
    count, lstm = module.num_layers, module.mode == "LSTM"
    firsts = _by_layer(packed, count, [] if hx is None else list(hx) if lstm else [hx])
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
    each = len(weights) // count
    last: list[Tensor] = []
    cells: list[Tensor] = []
    for k in range(count):
        if k and module.dropout and module.training:
            # in the order of memory, which is that of the random numbers
            x = torch.dropout(x if packed else x.transpose(0, 1), module.dropout, True)
            x = x if packed else x.transpose(0, 1)
        y, h, c = layer(k, count, of, x, *firsts[k], weights[k * each : (k + 1) * each])
        last.append(h)
        cells.append(c)
        x = packed.pack(y) if packed else y
    out: Any = PackedSequence(x, *input[1:]) if packed else x
    if turns:
        out = _C.of_its_own(x.transpose(0, 1))
    h = _joined(last)
    return out, (h, _joined(cells)) if lstm else h


def _joined(states: list[Tensor]) -> Tensor:
    return states[0] if len(states) == 1 else torch.cat(states)


def _by_layer(
    packed: Packed | None, count: int, states: list[Tensor]
) -> list[tuple[Tensor | None, ...]]:
    """Return the first state and cell state of each layer; None: zeros."""
    whole = [packed.sort(t) if packed else t for t in states] + [None] * (2 - len(states))
    if count == 1:
        return [tuple(whole)]
    sides = len(states[0]) // count if states else 1
    return [tuple(t if t is None else t[k * sides : (k + 1) * sides] for t in whole)
            for k in range(count)]  # fmt: skip


def _mode(module: Any) -> str:
    if isinstance(module, nn.RNNCell):
        return f"RNN_{module.nonlinearity.upper()}"
    return "LSTM" if isinstance(module, nn.LSTMCell) else "GRU"


def can_serve(module: Any, input: Any, hx: Any = None) -> bool:
    """Return True if csrc/nodes/recurrent.cpp knows this call; the framework's runs otherwise."""
    single = isinstance(module, nn.RNNCellBase)
    data, sizes = input[:2] if isinstance(input, PackedSequence) and not single else (input, None)
    lstm = isinstance(module, (nn.LSTM, nn.LSTMCell))
    states = [] if hx is None else list(hx) if lstm and isinstance(hx, (tuple, list)) else [hx]
    for t in (data, *states, *module._parameters.values()):
        if t is None:
            continue
        if type(t) not in TENSOR_TYPES or t.dtype is not data.dtype or t.device != data.device:
            return False
    device = data.device.type
    if not data.numel() or device not in ("cpu", "cuda"):
        return False
    if torch._C._are_functorch_transforms_active():
        return False
    if torch.is_autocast_enabled(device) and not (device == "cpu" and _lowered(module, sizes)):
        return False
    if data.dim() != (2 if single or sizes is not None else 3):
        return False
    if data.shape[-1] != module.input_size:
        return False
    if not states:
        return True
    if single:
        wanted: list[Any] = [(len(data), module.hidden_size)] * (1 + lstm)
    else:
        wanted = [module.get_expected_hidden_size(data, sizes)]
        if lstm:
            wanted.append(module.get_expected_cell_size(data, sizes))
    return [tuple(t.shape) for t in states] == [tuple(w) for w in wanted]


def keeps_outputs(module: Any, input: Any) -> bool:
    """Return True if layer by layer the outputs have the bits of the module's own: a GPU runs all
    layers in one piece."""
    data = input[0] if isinstance(input, PackedSequence) else input
    return bool(data.is_cpu) or getattr(module, "num_layers", 1) == 1


def _lowered(module: Any, sizes: Any) -> bool:
    """Return True if all that autocast does to a call is to cast what oneDNN is given."""
    whole = isinstance(module, nn.LSTM) and sizes is None and not module.proj_size
    bfloat16 = torch.get_autocast_dtype("cpu") is torch.bfloat16
    onednn: Any = torch.backends.mkldnn
    runs = onednn.is_available() and onednn.enabled
    return whole and bfloat16 and runs and torch.ops.mkldnn._is_mkldnn_bf16_supported()


def run_beside(notes: dict[str, str | None], call: Call) -> dict[str, Gradients] | None:
    """Return gradients by parameter, from one more run of the module; None: it is replayed."""
    args, kwargs = call.arguments
    module: Any = copy_to_keep(call).module
    weights = recurrent_weights(module)
    ids = [id(p) for p in module._parameters.values() if p is not None]
    with call.regime.again():
        known = can_serve(module, *args, **kwargs)
    if not (weights and known and len(set(ids)) == len(ids) and _a_row_each(call)):
        return None
    drops = module.training and getattr(module, "dropout", 0) > 0
    if drops and not keeps_outputs(module, args[0] if args else kwargs["input"]):
        return None  # its random numbers are cuDNN's own
    layers: list[Any] = []

    def layer(k: int, count: int, *operands: Any) -> Any:
        layers.append(_C.Gathered())
        return _C.call_recurrent([], *operands, layers[-1])

    module.__dict__["forward"] = partial(run, layer, module)
    with call.regime.again():
        outputs, parameters = run_again(replace(call, module=module))
    arrived = [k for k, g in enumerate(call.grads) if g is not None]
    made, grads = [outputs[k] for k in arrived], [call.grads[k] for k in arrived]
    torch.autograd.grad(made, parameters, grads, allow_unused=True)
    found: dict[str, Gradients] = {
        name: p.new_zeros(()).expand(call.n, *p.shape)
        for name, p in zip(call.names, parameters, strict=True)
    }
    pairs = [pair for gathered in layers for pair in gathered.operands]
    for (weight, bias), pair in zip(weights, pairs, strict=True):
        if pair and weight in found:
            found[weight] = Outer(pair[1], pair[0])
        if pair and bias in found:
            found[bias] = pair[1].sum(1)
    notes["through time"] = None
    return found


def _a_row_each(call: Call) -> bool:
    """Return True if a sample is one sequence, and where the module says."""
    if call.samples is not None:  # packed
        return True
    module, (args, kwargs) = call.module, call.arguments
    x = args[0] if args else kwargs["input"]
    first = isinstance(module, nn.RNNCellBase) or bool(module.batch_first)
    is_there = isinstance(module, nn.RNNCellBase) or call.layout == (BATCH if first else SEQUENCE)
    return bool(is_there and x.shape[0 if first else 1] == call.n)
