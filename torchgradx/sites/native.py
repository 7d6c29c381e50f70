"""Where a probe touches a module that has a kernel: its class is swapped, or its output tapped."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from functools import partial
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from .. import ops
from ..graph.layout import BATCH, SECOND, SEQUENCE
from ..hooks.copies import Hook, exclude_from_copies, include_in_copies, stock_of, untraced
from ..layers.rules import Layer, rule_named
from ..layers.table import declared_layout, owns_backward
from ..plan.gpu import gpu_of
from ..refusals import cause
from .attention import Part, attending
from .context import Context
from .trace import Trace

if ops.NATIVE:
    from .. import _C

MIXING = ("batchnorm1d", "batchnorm2d", "batchnorm3d")
MIXED = (_BatchNorm, nn.RNNBase, nn.MultiheadAttention)  # of which some calls mix samples
MODULE_CALL = nn.Module._call_impl.__code__
CODES = {"rank1": 0, "gram": 1, "direct": 2, "fused": 3}  # Algorithm in csrc/nodes/site.h


def why_mixed(module: nn.Module, arguments: Sequence[Any], n: int) -> str | None:
    """Return the cause where a module mixes the samples of a call."""
    if isinstance(module, _BatchNorm) and (module.training or module.running_mean is None):
        return "batch_statistics"
    along = isinstance(module, (nn.RNNBase, nn.MultiheadAttention)) and n > 1
    rows = arguments[0] if along and arguments and isinstance(arguments[0], Tensor) else None
    unbatched = rows is not None and rows.dim() == 2 and len(rows) % n == 0  # else a table's
    return cause("unbatched", n=n) if unbatched else None


def call_of_hook() -> FrameType:
    """Return the frame of the module call that this hook belongs to; it lasts to the last hook."""
    frame = inspect.currentframe()
    while frame is not None and frame.f_code is not MODULE_CALL and frame.f_back is not None:
        frame = frame.f_back
    assert frame is not None
    return frame


def is_running(call: FrameType) -> bool:
    """Return whether a frame is on the stack of this thread: an exception may have ended it."""
    frame = inspect.currentframe()
    while frame is not None and frame is not call:
        frame = frame.f_back
    return frame is not None


class Hooks:
    """A module's hooks, left out of its copies, and their removal."""

    def __init__(self, module: nn.Module) -> None:
        self._kind = stock_of(type(module))
        self._handles: list[Any] = []
        exclude_from_copies(self._kind)

    def add(
        self,
        register: Callable[..., Any],
        function: Callable[..., Any],
        traced: Callable[..., Any] | None = None,
        **options: Any,
    ) -> None:
        self._handles.append(register(Hook(function, traced), **options))

    def remove(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles = []
        include_in_copies(self._kind)


class NativeSite:
    """A module whose parameters a kernel sees."""

    fixed = False

    def __init__(self, module: nn.Module, layer: Layer, index: int, context: Context) -> None:
        options = context.options
        self.layer, self.declared = layer, declared_layout(layer, options)
        self.presumed = SEQUENCE if options["batch_dim"] or layer.role else BATCH
        self._rule = rule_named(layer.kind)
        # A table's own gradient, as large as all its rows, is left out only in a node of ours.
        table = self._rule.whole and not options["weight_grad"]
        bounded = getattr(module, "max_norm", None) is not None  # its forward changes the weight
        swaps = owns_backward(options) and (self._rule.swaps or (table and not bounded))
        declared = SECOND if layer.role and self.declared >= 0 else self.declared
        site = self.core = core(layer, index, context, declared, self.presumed, swaps)
        self._hooks = Hooks(module)
        if layer.role:
            sites = context.standing.put(module, attending(context.recorder))
            part = Part(site, index, layer, self.declared, fused=swaps)
            sites.setdefault(id(module), {})[layer.role] = part
        else:
            argument = self._rule.argument
            ours = self._rule.swaps or self._rule.whole
            forward_of = partial(_forward_of if ours else _listening_of, context.trace, argument)
            altered = context.parameters.altered.append
            sites = context.standing.put(module, forward_of, altered)
            sites[id(module)] = site if ours else _tap(site, index, layer.kind, context.recorder)

    def leads(self, dims: int) -> int:
        """Return how many leading dimensions of its input count rows."""
        return self._rule.leads(self.layer, dims)

    def remove(self) -> None:
        self._hooks.remove()


def core(
    layer: Layer, index: int, context: Context, declared: int, presumed: int, swaps: bool
) -> Any:
    """Make the site's part in C++."""
    recorder, options = context.recorder, context.options  # not the context, which owns the site
    rule = rule_named(layer.kind)
    device = gpu_of(context.parameters.tensors()[layer.weight].device)
    beside = swaps and options["weight_grad"]

    def planner(n: int, t: int, itemsize: int) -> int:
        if rule.served_by:
            return CODES["fused"]
        try:
            plan = layer.plan(n, t, itemsize, beside, options["algorithm"], device)
        except ValueError as refusal:  # raised when it is read, never from inside backward()
            recorder.refuse(index, cause("algorithm", error=refusal))
            plan = layer.plan(n, t, itemsize, beside, None, device)
        return CODES[plan.algorithm]

    return _C.Site(
        recorder=recorder,
        index=index,
        weight=layer.weight,
        bias=layer.bias,
        weight_grad=options["weight_grad"],
        taps=not swaps,
        layout=declared,
        presumed=presumed,
        planner=planner,
        layer=rule.make(layer),
        weight_rows=layer.weight_rows,
        bias_rows=layer.bias_rows,
    )


def _forward_of(
    trace: Trace, argument: str, stock: Any, sites: dict[int, Any]
) -> Callable[..., Any]:
    """Make the forward in C++: ours, or the stock operator and a tap (hooks cost more)."""

    @untraced
    def forward(self: Any, input: Any) -> Any:
        # the token first: where nothing is compiled it is none
        if trace.token is not None and torch.compiler.is_dynamo_compiling():
            return trace.layer(self, input, stock.forward(self, input))
        site = sites.get(id(self))
        if site is None:
            return stock.forward(self, input)
        out = _C.forward(site, self, input)
        if out is None:
            out = stock.forward(self, input)
            _C.listen(site, self, input, out)
        return out

    return forward if argument == "input" else lambda self, x: forward(self, x)


def _listening_of(
    trace: Trace, argument: str, stock: Any, taps: dict[int, Any]
) -> Callable[..., Any]:
    """Make the stock forward, with a tap at its output."""

    @untraced
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        out = stock.forward(self, *args, **kwargs)
        x = args[0] if args else kwargs[argument]
        if trace.token is not None and torch.compiler.is_dynamo_compiling():
            return trace.layer(self, x, out)
        tap = taps.get(id(self))
        if tap is not None:
            tap(self, x, out)
        return out

    return forward


def _tap(site: Any, index: int, kind: str, recorder: Any) -> Callable[[Any, Tensor, Tensor], None]:
    listen = partial(_C.listen, site)

    def unless_alone(module: Any, x: Tensor, out: Tensor) -> None:
        if x.dim() != module._get_no_batch_dim():  # [C, *]: its channels are no samples
            listen(module, x, out)

    def with_statistics(module: Any, x: Tensor, out: Tensor) -> None:
        if module.training or module.running_mean is None:
            run = recorder.current()
            if run is not None:
                run.refuse(index, "batch_statistics")
            return
        _C.tap(site, x, module.weight, module.bias, out, module.running_mean, module.running_var)

    if kind in MIXING:
        return with_statistics
    return unless_alone if kind.startswith("instancenorm") else listen
