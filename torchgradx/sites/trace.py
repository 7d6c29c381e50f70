"""Attached, then compiled with fullgraph=True: the pass is recorded from within one graph.

Dynamo traces the hooks of the root and the forwards of the layers. Here each leaves an operator in
the graph that the compiler does not look into: `trace_begin` opens the pass, of whatever batch the
graph is run on; `trace_layer` is a layer, and its backward, `trace_backward`, records what it would
outside of a graph (csrc/nodes/trace.cpp).
"""

from __future__ import annotations

import contextlib
import itertools
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from types import CodeType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._C._dynamo import eval_frame

from .. import ops
from ..graph.arguments import batch_size
from ..kept import model_kept, random_state_kept
from ..layers.rules import Layer

if ops.NATIVE:
    from .. import _C

# A layer's forward in plain PyTorch, for the compiler.
TRACED_FORWARDS: dict[str, Callable[[Layer, Tensor, Tensor, Tensor | None], Tensor]] = {
    "linear": lambda layer, x, w, b: F.linear(x, w, b),
    "conv2d": lambda layer, x, w, b: F.conv2d(
        x, w, b, layer.stride, layer.padding, layer.dilation, layer.groups
    ),
    "layernorm": lambda layer, x, w, b: F.layer_norm(x, w.shape, w, b, layer.constants["eps"]),
    "groupnorm": lambda layer, x, w, b: F.group_norm(
        x, layer.constants["groups"], w, b, layer.constants["eps"]
    ),
    "embedding": lambda layer, x, w, b: F.embedding(x, w),
}
LOWERED = ("linear", "conv2d")  # autocast computes them in its lower precision


def _traceable(module: Any, layer: Layer) -> bool:
    whole = not (layer.role or layer.inside or layer.pre_pad)
    other = getattr(module, "sparse", False) or getattr(module, "max_norm", None) is not None
    return layer.kind in TRACED_FORWARDS and whole and not other


class Trace:
    """What Dynamo reads of a probe. Its attributes are guards of what it compiles."""

    def __init__(self, options: Any, open_pass: Callable[..., Any]) -> None:
        self.able = ops.NATIVE and options["weight_grad"] and options["backend"] != "vmap"
        self.on = True  # neither removed nor paused
        self.token: Tensor | bool | None = None  # of the layer before; False: nothing is recorded
        self._options, self._open = options, open_pass
        self._keys: dict[int, tuple[str, str]] = {}  # by module's id: its site's key, and its kind
        self._held: list[Any] = []
        self.calls: dict[str, TracedCall] = {}  # of the root, while it was traced
        _make_room()
        self._number = str(next(_numbers))  # an integer might become a symbol
        _traces[self._number] = self

    def add(self, module: Any, layer: Layer, site: Any | None) -> None:
        """Add a module that owns parameters."""
        if not (self.able and site and _traceable(module, layer)):
            self.able = False
            return
        self._held.append(_C.Key(site))
        key = str(self._held[-1])
        self._keys[id(module)] = key, layer.kind
        _layers[key] = layer

    # In a trace. NotImplemented: what is done outside of graphs is to be done, at a break.

    def enter(self, module: Any, args: Any, kwargs: Any) -> Any:
        if not self.able or _breaks_allowed():
            return NotImplemented
        if not self.on or not torch.is_grad_enabled():
            self.token = False
            return None
        n = batch_size(self._options, args, kwargs)
        tensors: list[Tensor] = []
        how = _described((args, kwargs), tensors)
        if n is None or how is None or not tensors:
            return NotImplemented
        device = tensors[0].device.type
        autocast = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None
        call = _new_call(self._number, how, device, autocast)
        self.token = torch.ops.torchgradx.trace_begin(tensors, n, self._number, call)
        return None

    def leave(self, *_: Any) -> Any:
        if self.token is None:
            return NotImplemented
        self.token = None
        return None

    def layer(self, module: Any, x: Tensor, out: Tensor) -> Tensor:
        """`out` is what the framework's own makes; the compiler leaves it out."""
        if self.token is False:
            return out
        key, kind = self._keys[id(module)]
        weight, bias = module.weight, getattr(module, "bias", None)
        if torch.is_autocast_enabled(x.device.type):
            if kind in LOWERED:
                weight = weight.to(out.dtype)
                bias = None if bias is None else bias.to(out.dtype)
            x = x.to(out.dtype) if x.is_floating_point() else x
        use = _new_use(key)
        made, self.token = torch.ops.torchgradx.trace_layer(x, weight, bias, self.token, use)
        return made

    # When the graph runs

    def begin(self, inputs: Sequence[Tensor], n: int, call: str) -> Any:
        return self._open(n, self.calls[call], inputs)


@dataclass(frozen=True)
class TracedCall:
    """How a graph's root was called when it was traced."""

    how: Any  # its arguments, see _described
    device: str
    autocast: torch.dtype | None


def root_of(model: nn.Module | None) -> nn.Module:
    """Whose calls are passes: inside of what torch.compile made of a model, the model."""
    assert model is not None
    compiled = type(model).__name__ == "OptimizedModule" and "_orig_mod" in model._modules
    return model._orig_mod if compiled else model  # type: ignore[return-value]


# A thread's dispatch keys: where autograd and autocast are at work.
KEYS = torch._C._dispatch_tls_local_include_set(), torch._C._dispatch_tls_local_exclude_set()


@contextlib.contextmanager
def outside(model: nn.Module, call: TracedCall, inputs: Sequence[Tensor]) -> Iterator[Any]:
    """Call the model of a running graph as it is without the compiler, and put all back."""
    copies = [t.detach().clone().requires_grad_(t.requires_grad) for t in inputs]
    with (
        model_kept(model),
        random_state_kept(),
        torch.compiler.set_stance("force_eager"),
        torch._C._ForceDispatchKeyGuard(*KEYS),
        torch.autocast(call.device, call.autocast, enabled=call.autocast is not None),
        torch.enable_grad(),
    ):
        yield _restored(call.how, copies)


_numbers = itertools.count(1)
_traces: weakref.WeakValueDictionary[str, Trace] = weakref.WeakValueDictionary()
_layers: weakref.WeakValueDictionary[str, Layer] = weakref.WeakValueDictionary()
_codes: dict[int, weakref.ref[CodeType]] = {}  # compiled with a layer of ours inside


def _make_room() -> None:
    """Forget code that was compiled often, to be compiled anew where it is called: the compiler
    refuses code that it has compiled eight times, also for models that are gone."""
    for key, ref in list(_codes.items()):
        code = ref()
        if code is None:
            del _codes[key]
        elif len(eval_frame._debug_get_cache_entry_list(code)) >= 4:
            eval_frame.reset_code(code)
            del _codes[key]


def _described(value: Any, tensors: list[Tensor]) -> Any:
    """Arguments as constants, their tensors put aside; None where that cannot be."""
    if isinstance(value, Tensor):
        tensors.append(value)
        return "tensor", len(tensors) - 1
    if value is None or isinstance(value, (bool, str)):
        return "value", value
    if isinstance(value, (int, float)):  # which may be a symbol
        tensors.append(
            torch.tensor(value, dtype=torch.int64 if isinstance(value, int) else torch.float64)
        )
        return "number", len(tensors) - 1
    if type(value) in (tuple, list):
        parts = [_described(v, tensors) for v in value]
        return None if None in parts else (type(value).__name__, tuple(parts))
    if type(value) is dict:
        parts = [_described(v, tensors) for v in value.values()]
        return None if None in parts else ("dict", tuple(zip(value.keys(), parts, strict=True)))
    return None


def _restored(how: Any, tensors: Sequence[Tensor]) -> Any:
    kind, value = how
    if kind == "tensor":
        return tensors[value]
    if kind == "value":
        return value
    if kind == "number":
        return tensors[value].item()
    if kind == "dict":
        return {key: _restored(part, tensors) for key, part in value}
    parts = [_restored(part, tensors) for part in value]
    return tuple(parts) if kind == "tuple" else parts


def _breaks_allowed() -> bool:
    """Return True if the graph being traced may break."""
    from torch._dynamo.symbolic_convert import InstructionTranslator  # slow to import

    tx = InstructionTranslator.current_tx()
    return not (tx.one_graph or tx.error_on_graph_break)


def _new_call(probe: str, how: Any, device: str, autocast: torch.dtype | None) -> str:
    number = str(next(_numbers))
    _traces[probe].calls[number] = TracedCall(how, device, autocast)
    return number


def _new_use(site: str) -> str:
    from torch._dynamo.guards import GuardBuilder, install_guard
    from torch._dynamo.source import LocalSource
    from torch._dynamo.symbolic_convert import InstructionTranslator

    # The compiler bounds how often it compiles one code, but anew for each module that guards name.
    tx = InstructionTranslator.current_tx()
    for name in [name for name, v in tx.output.local_scope.items() if isinstance(v, nn.Module)]:
        install_guard(LocalSource(name).make_guard(GuardBuilder.ID_MATCH))
    _codes[id(tx.f_code)] = weakref.ref(tx.f_code)
    return f"{site}/{next(_numbers)}"


for _function in (_breaks_allowed, _new_call, _new_use):  # run while tracing, for their results
    setattr(_function, "_dynamo_marked_constant", True)  # noqa: B010


if ops.NATIVE:
    _library = torch.library.Library("torchgradx", "IMPL")

    def _begin(inputs: Sequence[Tensor], n: int, probe: str, call: str) -> Tensor:
        trace = _traces.get(probe)
        return _C.token(trace.begin(inputs, n, call) if trace is not None else None)

    for _key in ("CPU", "CUDA"):
        _library.impl("trace_begin", _begin, _key)

    def _token() -> Tensor:
        return torch.empty(1, dtype=torch.int64, device="cpu")

    def _like(of: Tensor, wanted: bool) -> Tensor:
        if not wanted:
            return of.new_empty(0)
        return torch.empty_like(of, memory_format=torch._prims_common.suggest_memory_format(of))

    @torch.library.register_fake("torchgradx::trace_begin")
    def _(inputs: Any, n: Any, probe: Any, call: Any) -> Tensor:
        return _token()

    @torch.library.register_fake("torchgradx::trace_layer")
    def _(x: Any, weight: Any, bias: Any, token: Any, use: str) -> tuple[Tensor, Tensor]:
        layer = _layers[use.partition("/")[0]]
        return TRACED_FORWARDS[layer.kind](layer, x, weight, bias), _token()

    @torch.library.register_fake("torchgradx::trace_backward")
    def _(g: Any, x: Any, weight: Any, bias: Any, token: Any, use: Any, wanted: Any) -> Any:
        of = (x, weight, weight if bias is None else bias)
        return tuple(map(_like, of, wanted))

    def _save(ctx: Any, inputs: Any, output: Any) -> None:
        x, weight, bias, _, ctx.use = inputs
        ctx.save_for_backward(x, weight, bias, output[1])

    def _backward(ctx: Any, g: Any, _: Any) -> Any:
        x, weight, bias, token = ctx.saved_tensors
        wanted = list(ctx.needs_input_grad[:3])
        found = torch.ops.torchgradx.trace_backward(g, x, weight, bias, token, ctx.use, wanted)
        gradients = [g if want else None for g, want in zip(found, wanted, strict=True)]
        return (*gradients, None, None)

    torch.library.register_autograd("torchgradx::trace_layer", _backward, setup_context=_save)
