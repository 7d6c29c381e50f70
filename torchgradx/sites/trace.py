"""Recording inside one compiled graph, of a model compiled with fullgraph=True after attach.

Dynamo traces the hooks of the root and the forwards of the layers. Each leaves an operator in the
graph, into which the compiler does not look (csrc/nodes/trace.cpp). `trace_begin` opens the pass of
the batch that the graph runs on. `trace_layer` is a layer, and `trace_backward` records its
gradient. A token goes from each operator to the next, so that none is moved or left out.
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

from ..extension import _C, NATIVE
from ..graph.arguments import batch_size
from ..kept import model_kept, random_state_kept
from ..layers.rules import Layer

# Forwards in plain PyTorch, from which the compiler infers shapes. By kind of layer.
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
LOWERED = ("linear", "conv2d")  # kinds that autocast computes in its lower precision


class Trace:
    """State of one probe that Dynamo reads; it recompiles when an attribute changes."""

    def __init__(self, options: Any, open_pass: Callable[..., Any]) -> None:
        self.can_trace = NATIVE and options["weight_grad"] and options["backend"] != "vmap"
        self.on = True  # neither removed nor paused
        # While the root is traced: the latest operator's token; False: nothing is recorded.
        self.token: Tensor | bool | None = None
        self._options, self.open_pass = options, open_pass
        self._keys: dict[int, tuple[str, str]] = {}  # by module's id: its site's key, and its kind
        self._site_keys: list[Any] = []  # which keep the keys valid
        self.calls: dict[str, TracedCall] = {}  # by number
        _reset_compiled_code()
        self._number = str(next(_numbers))  # Dynamo might make a symbol of an integer
        _traces[self._number] = self

    def add(self, module: Any, layer: Layer, site: Any) -> None:
        """Add a module that owns parameters. One that cannot be traced rules out full graphs."""
        altered = getattr(module, "sparse", False) or getattr(module, "max_norm", None) is not None
        is_part = layer.role or layer.inside or layer.pre_pad
        served = site and layer.kind in TRACED_FORWARDS and not is_part and not altered
        self.can_trace = self.can_trace and bool(served)
        if self.can_trace:
            self._site_keys.append(_C.Key(site))
            key = str(self._site_keys[-1])
            self._keys[id(module)] = key, layer.kind
            _layers[key] = layer

    # While Dynamo traces. Returning NotImplemented breaks the graph, and the eager hook runs.

    def enter(self, module: Any, args: Any, kwargs: Any) -> Any:
        """Leave `trace_begin` in the graph, where the root's forward begins."""
        if not self.can_trace or _may_break():
            return NotImplemented
        if not self.on or not torch.is_grad_enabled():
            self.token = False
            return None
        n = batch_size(self._options, args, kwargs)
        tensors: list[Tensor] = []
        arguments = _describe((args, kwargs), tensors)
        if n is None or arguments is None or not tensors:
            return NotImplemented
        device = tensors[0].device.type
        autocast = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None
        call = _add_call(self._number, arguments, device, autocast)
        self.token = torch.ops.torchgradx.trace_begin(tensors, n, self._number, call)
        return None

    def leave(self, *_: Any) -> Any:
        if self.token is None:
            return NotImplemented
        self.token = None
        return None

    def layer(self, module: Any, x: Tensor, out: Tensor) -> Tensor:
        """Return the output of `trace_layer`. out: of the stock forward, used for its dtype."""
        if self.token is False:
            return out
        key, kind = self._keys[id(module)]
        weight, bias = module.weight, getattr(module, "bias", None)
        if torch.is_autocast_enabled(x.device.type):
            if kind in LOWERED:
                weight = weight.to(out.dtype)
                bias = None if bias is None else bias.to(out.dtype)
            x = x.to(out.dtype) if x.is_floating_point() else x
        use = _name_use(key)
        y, self.token = torch.ops.torchgradx.trace_layer(x, weight, bias, self.token, use)
        return y


@dataclass(frozen=True)
class TracedCall:
    """One call of the root that was traced."""

    arguments: Any  # see _describe
    device: str
    autocast: torch.dtype | None


def root_of(model: nn.Module | None) -> nn.Module:
    """Return the module whose calls are passes: of a torch.compile wrapper, the model inside."""
    assert model is not None
    compiled = type(model).__name__ == "OptimizedModule" and "_orig_mod" in model._modules
    return model._orig_mod if compiled else model  # type: ignore[return-value]


# Dispatch keys of a thread on which autograd and autocast work, unlike inside a graph's operator.
KEYS = torch._C._dispatch_tls_local_include_set(), torch._C._dispatch_tls_local_exclude_set()


@contextlib.contextmanager
def outside(model: nn.Module, call: TracedCall, inputs: Sequence[Tensor]) -> Iterator[Any]:
    """Yield the arguments for an eager call of a running graph's model, and undo what it does."""
    copies = [t.detach().clone().requires_grad_(t.requires_grad) for t in inputs]
    with (
        model_kept(model),
        random_state_kept(),
        torch.compiler.set_stance("force_eager"),
        torch._C._ForceDispatchKeyGuard(*KEYS),
        torch.autocast(call.device, call.autocast, enabled=call.autocast is not None),
        torch.enable_grad(),
    ):
        yield _restore(call.arguments, copies)


_numbers = itertools.count(1)
_traces: weakref.WeakValueDictionary[str, Trace] = weakref.WeakValueDictionary()
_layers: weakref.WeakValueDictionary[str, Layer] = weakref.WeakValueDictionary()
_codes: dict[int, weakref.ref[CodeType]] = {}  # by id: code that calls a layer of ours


def _reset_compiled_code() -> None:
    """Reset code that was compiled four times or more. Dynamo refuses code that it has compiled
    eight times, even if the models are gone."""
    for key, ref in list(_codes.items()):
        code = ref()
        if code is None:
            del _codes[key]
        elif len(eval_frame._debug_get_cache_entry_list(code)) >= 4:
            eval_frame.reset_code(code)
            del _codes[key]


def _describe(value: Any, tensors: list[Tensor]) -> Any:
    """Return arguments as nested (type, value), and append their tensors and numbers to `tensors`;
    None for other types."""
    if isinstance(value, Tensor):
        tensors.append(value)
        return "tensor", len(tensors) - 1
    if value is None or isinstance(value, (bool, str)):
        return "value", value
    if isinstance(value, (int, float)):  # in a graph it may be a symbol
        dtype = torch.int64 if isinstance(value, int) else torch.float64
        tensors.append(torch.tensor(value, dtype=dtype, device="cpu"))
        return "number", len(tensors) - 1
    if type(value) in (tuple, list):
        parts = [_describe(v, tensors) for v in value]
        return None if None in parts else (type(value).__name__, tuple(parts))
    if type(value) is dict:
        parts = [_describe(v, tensors) for v in value.values()]
        return None if None in parts else ("dict", tuple(zip(value.keys(), parts, strict=True)))
    return None


def _restore(description: Any, tensors: Sequence[Tensor]) -> Any:
    """Return the arguments that `_describe` has described."""
    kind, value = description
    if kind == "tensor":
        return tensors[value]
    if kind == "value":
        return value
    if kind == "number":
        return tensors[value].item()
    if kind == "dict":
        return {key: _restore(part, tensors) for key, part in value}
    parts = [_restore(part, tensors) for part in value]
    return tuple(parts) if kind == "tuple" else parts


def _may_break() -> bool:
    """Return True if the graph being traced may break."""
    from torch._dynamo.symbolic_convert import InstructionTranslator  # slow to import

    tx = InstructionTranslator.current_tx()
    return not (tx.one_graph or tx.error_on_graph_break)


def _add_call(probe: str, arguments: Any, device: str, autocast: torch.dtype | None) -> str:
    number = str(next(_numbers))
    _traces[probe].calls[number] = TracedCall(arguments, device, autocast)
    return number


def _name_use(site: str) -> str:
    """Return the name of a new use of a site, "key/number", while it is traced."""
    from torch._dynamo.guards import GuardBuilder, install_guard
    from torch._dynamo.source import LocalSource
    from torch._dynamo.symbolic_convert import InstructionTranslator

    # Dynamo limits how often it compiles one code object for each set of modules in its guards.
    tx = InstructionTranslator.current_tx()
    for name in [name for name, v in tx.output.local_scope.items() if isinstance(v, nn.Module)]:
        install_guard(LocalSource(name).make_guard(GuardBuilder.ID_MATCH))
    _codes[id(tx.f_code)] = weakref.ref(tx.f_code)
    return f"{site}/{next(_numbers)}"


# Dynamo calls these while it traces, and takes their results as constants.
for _function in (_may_break, _add_call, _name_use):
    setattr(_function, "_dynamo_marked_constant", True)  # noqa: B010


if NATIVE:
    _library = torch.library.Library("torchgradx", "IMPL")

    def _begin(inputs: Sequence[Tensor], n: int, probe: str, call: str) -> Tensor:
        trace = _traces.get(probe)
        return _C.token(trace.open_pass(n, trace.calls[call], inputs) if trace else None)

    for _key in ("CPU", "CUDA"):
        _library.impl("trace_begin", _begin, _key)

    def _token() -> Tensor:
        return torch.empty(1, dtype=torch.int64, device="cpu")

    def _like(t: Tensor, wanted: bool) -> Tensor:
        if not wanted:
            return t.new_empty(0)
        return torch.empty_like(t, memory_format=torch._prims_common.suggest_memory_format(t))

    @torch.library.register_fake("torchgradx::trace_begin")
    def _(inputs: Any, n: Any, probe: Any, call: Any) -> Tensor:
        return _token()

    @torch.library.register_fake("torchgradx::trace_layer")
    def _(x: Any, weight: Any, bias: Any, token: Any, use: str) -> tuple[Tensor, Tensor]:
        layer = _layers[use.partition("/")[0]]
        return TRACED_FORWARDS[layer.kind](layer, x, weight, bias), _token()

    @torch.library.register_fake("torchgradx::trace_backward")
    def _(g: Any, x: Any, weight: Any, bias: Any, token: Any, use: Any, wanted: Any) -> Any:
        return tuple(map(_like, (x, weight, weight if bias is None else bias), wanted))

    def _save(ctx: Any, inputs: Any, output: Any) -> None:
        x, weight, bias, _, ctx.use = inputs
        ctx.save_for_backward(x, weight, bias, output[1])

    def _backward(ctx: Any, g: Any, _: Any) -> Any:
        x, weight, bias, token = ctx.saved_tensors
        wanted = list(ctx.needs_input_grad[:3])
        grads = torch.ops.torchgradx.trace_backward(g, x, weight, bias, token, ctx.use, wanted)
        return (*(g if want else None for g, want in zip(grads, wanted, strict=True)), None, None)

    torch.library.register_autograd("torchgradx::trace_layer", _backward, setup_context=_save)
