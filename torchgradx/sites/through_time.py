"""Forward of nn.LSTM, nn.GRU, nn.RNN and their cells, layer by layer, and norms beside PyTorch's.

Each layer is a node of the graph (csrc/nodes/recurrent.cpp). Its backward leaves the gradients at
the gates of all steps, so that each weight is a Linear over the steps.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence

from ..extension import _C
from ..gradients.by_sample import Gradients
from ..gradients.outer import Outer
from ..graph.layout import BATCH, SEQUENCE
from ..layers.modules import recurrent_weights
from .fallback import Call, run_again
from .packed import Packed, is_consistent

TENSOR_TYPES = {Tensor, nn.Parameter}
CELLS = {"RNN_RELU": 0, "RNN_TANH": 1, "LSTM": 2, "GRU": 3}  # Cell in csrc/layers/recurrence.h

# (layer, number of layers, Recurrence, input, state, cell state, weights)
# -> all states [N, T, H], last states and last cell states [directions, N, H]
RunLayer = Callable[..., tuple[Tensor, Any, Any]]


def run(
    layer: RunLayer, module: Any, input: Any, hx: Any = None, packed: Packed | None = None
) -> Any:
    """Return the outputs of the stock forward. packed: of a packed input, if it is made already."""
    if isinstance(module, nn.RNNCellBase):
        return _run_cell(layer, module, input, hx)
    packed = Packed(input) if packed is None and isinstance(input, PackedSequence) else packed
    x = packed.data if packed else input  # [N, T, I], or the rows [total, I] of a packed sequence
    transposes = not (packed or module.batch_first)
    if transposes:
        x = x.transpose(0, 1)
    count, lstm = module.num_layers, module.mode == "LSTM"
    states = _split_states(packed, count, [] if hx is None else list(hx) if lstm else [hx])
    packing, cell = packed.fields if packed else [], CELLS[module.mode]
    flags = module.bias, module.bidirectional, bool(module.proj_size), False, module.training
    recurrence = _C.Recurrence(cell, *flags, packing)
    module._update_flat_weights()
    weights = module._flat_weights
    each = len(weights) // count
    last: list[tuple[Tensor, Any]] = []
    for k in range(count):
        if k and module.dropout and module.training:
            # Random numbers follow the order in memory, which must be the stock forward's.
            x = torch.dropout(x if packed else x.transpose(0, 1), module.dropout, True)
            x = x if packed else x.transpose(0, 1)
        of_layer = weights[k * each : (k + 1) * each]
        y, h, c = layer(k, count, recurrence, x, *states[k], of_layer)
        last.append((h, c))
        x = packed.pack(y) if packed else y
    out: Any = PackedSequence(x, *input[1:]) if packed else x
    if transposes:
        out = _C.of_its_own(x.transpose(0, 1))
    h, c = zip(*last, strict=True)
    return out, (_concat(h), _concat(c)) if lstm else _concat(h)


def _run_cell(layer: RunLayer, cell: Any, input: Tensor, hx: Any) -> Any:
    lstm = isinstance(cell, nn.LSTMCell)
    mode = "LSTM" if lstm else "GRU"
    if isinstance(cell, nn.RNNCell):
        mode = f"RNN_{cell.nonlinearity.upper()}"
    h, c = hx if lstm and hx is not None else (hx, None)
    h, c = (None if t is None else t.unsqueeze(0) for t in (h, c))
    weights = [cell.weight_ih, cell.weight_hh, *((cell.bias_ih, cell.bias_hh) if cell.bias else ())]
    recurrence = _C.Recurrence(CELLS[mode], cell.bias, False, False, True, cell.training, [])
    y, _, c = layer(0, 1, recurrence, input.unsqueeze(1), h, c, weights)
    h = _C.of_its_own(y.squeeze(1))
    return (h, _C.of_its_own(c.squeeze(0))) if lstm else h


def _concat(states: tuple[Tensor, ...]) -> Tensor:
    return states[0] if len(states) == 1 else torch.cat(states)


def _split_states(
    packed: Packed | None, count: int, states: list[Tensor]
) -> list[tuple[Tensor | None, ...]]:
    """Return the first state and cell state of each layer; None: zeros."""
    whole = [packed.sort(t) if packed else t for t in states] + [None] * (2 - len(states))
    if count == 1:
        return [tuple(whole)]
    sides = len(states[0]) // count if states else 1
    return [tuple(t if t is None else t[k * sides : (k + 1) * sides] for t in whole)
            for k in range(count)]  # fmt: skip


def can_serve(module: Any, input: Any, hx: Any = None) -> bool:
    """Return True if csrc/nodes/recurrent.cpp serves this call."""
    single = isinstance(module, nn.RNNCellBase)
    is_packed = isinstance(input, PackedSequence) and not single
    data, sizes = input[:2] if is_packed else (input, None)
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
    if torch.is_autocast_enabled(device) and not (device == "cpu" and _runs_onednn(module, sizes)):
        return False
    dims = 2 if single or sizes is not None else 3
    if data.dim() != dims or data.shape[-1] != module.input_size:
        return False
    if is_packed and not is_consistent(input):
        return False
    if not states:
        return True
    if single:
        shapes: list[Any] = [(len(data), module.hidden_size)] * (1 + lstm)
    else:
        shapes = [module.get_expected_hidden_size(data, sizes)]
        if lstm:
            shapes.append(module.get_expected_cell_size(data, sizes))
    return [tuple(t.shape) for t in states] == [tuple(shape) for shape in shapes]


def has_same_bits(module: Any, input: Any) -> bool:
    """Return True if `run` gives the stock outputs' bits: a GPU runs all layers in one call."""
    data = input[0] if isinstance(input, PackedSequence) else input
    return bool(data.is_cpu) or getattr(module, "num_layers", 1) == 1


def _runs_onednn(module: Any, sizes: Any) -> bool:
    """Return True if a CPU call under autocast is oneDNN's LSTM, whose operands alone are cast."""
    whole = isinstance(module, nn.LSTM) and sizes is None and not module.proj_size
    bfloat16 = torch.get_autocast_dtype("cpu") is torch.bfloat16
    onednn: Any = torch.backends.mkldnn
    enabled = onednn.is_available() and onednn.enabled
    return whole and bfloat16 and enabled and torch.ops.mkldnn._is_mkldnn_bf16_supported()


def run_beside(notes: dict[str, str | None], call: Call) -> dict[str, Gradients] | None:
    """Return gradients by sample, by the parameter's name, from one more run of the module; None:
    the call is not served, and is replayed. notes: get "through time" if it is served."""
    gathered: list[Any] = []  # by layer, the operands of each weight

    def layer(
        k: int, count: int, of: Any, x: Tensor, state: Any, cell: Any, weights: list[Tensor]
    ) -> Any:
        gathered.append(_C.Gathered())
        return _C.call_recurrent([], of, x, state, cell, weights, gathered[-1])

    with call.again() as twin:
        module: Any = twin.module
        args, kwargs = twin.arguments
        x = args[0] if args else kwargs["input"]
        weights = recurrent_weights(module)
        ids = [id(p) for p in module._parameters.values() if p is not None]
        is_served = weights and len(set(ids)) == len(ids) and can_serve(module, *args, **kwargs)
        drops = module.training and getattr(module, "dropout", 0) > 0
        # A GPU's dropout is cuDNN's, which draws its random numbers itself.
        is_drawn = drops and not has_same_bits(module, x)
        if is_drawn or not (is_served and _has_one_row_each(call, x)):
            return None
        module.__dict__["forward"] = partial(run, layer, module)
        outputs, parameters = run_again(twin)
    arrived = [k for k, g in enumerate(call.grads) if g is not None]
    ends, grads = [outputs[k] for k in arrived], [call.grads[k] for k in arrived]
    torch.autograd.grad(ends, parameters, grads, allow_unused=True)
    gradients: dict[str, Gradients] = {
        name: p.new_zeros(()).expand(call.n, *p.shape)
        for name, p in zip(call.names, parameters, strict=True)
    }
    pairs = [pair for one in gathered for pair in one.operands]  # (activations, gradients) or None
    for (weight, bias), pair in zip(weights, pairs, strict=True):
        if pair and weight in gradients:
            gradients[weight] = Outer(pair[1], pair[0])
        if pair and bias in gradients:
            gradients[bias] = pair[1].sum(1)
    notes["through time"] = None
    return gradients


def _has_one_row_each(call: Call, x: Any) -> bool:
    """Return True if each sample is one sequence of the input, in the dimension of batch_first."""
    if call.samples is not None:  # packed
        return True
    module, is_cell = call.module, isinstance(call.module, nn.RNNCellBase)
    first = is_cell or bool(module.batch_first)
    is_there = is_cell or call.layout == (BATCH if first else SEQUENCE)
    return bool(is_there and x.shape[0 if first else 1] == call.n)
