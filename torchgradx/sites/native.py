"""Sites of modules with a kernel, and what all sites share: their context.

A native site replaces its module's class, so that its forward runs our operator; or the stock
forward runs and we tap its output: a node of ours at it receives the gradient.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from ..extension import _C, Recorder
from ..graph.layout import BATCH, SECOND, SEQUENCE
from ..hooks.copies import Hooks, untraced
from ..layers.rules import Layer, rule_named
from ..layers.table import Parameters, declared_layout, owns_backward
from ..plan.cost import CODES
from ..plan.gpu import gpu_of
from ..refusals import cause
from .attention import Projection, attention_forward_of
from .standing import StandIns
from .trace import Trace

MAY_MIX = (_BatchNorm, nn.RNNBase, nn.MultiheadAttention)  # some of their calls mix samples
MODULE_CALL = nn.Module._call_impl.__code__


def why_mixed(module: nn.Module, arguments: Sequence[Any], n: int) -> str | None:
    """Return the cause for which a call of a module mixes samples; None: nothing shows that."""
    if isinstance(module, _BatchNorm) and (module.training or module.running_mean is None):
        return "batch_statistics"
    unbatches = isinstance(module, (nn.RNNBase, nn.MultiheadAttention)) and n > 1
    rows = arguments[0] if unbatches and arguments and isinstance(arguments[0], Tensor) else None
    # Rows that are no multiple of N may be a table's.
    unbatched = rows is not None and rows.dim() == 2 and len(rows) % n == 0
    return cause("unbatched", n=n) if unbatched else None


def call_of_hook() -> FrameType:
    """Return the frame of the module call that runs this hook; it outlasts the call's hooks."""
    frame: FrameType | None = sys._getframe()
    while frame is not None and frame.f_code is not MODULE_CALL and frame.f_back is not None:
        frame = frame.f_back
    assert frame is not None
    return frame


def is_running(call: FrameType) -> bool:
    """Return True if a frame is on this thread's stack; an exception may have ended it."""
    frame: FrameType | None = sys._getframe()
    while frame is not None and frame is not call:
        frame = frame.f_back
    return frame is not None


@dataclass(frozen=True)
class Context:
    """Parts that the sites of one probe share."""

    recorder: Recorder
    audit: Any  # proof.audit.Audit, which sites must not import
    parameters: Parameters
    options: Mapping[str, Any]
    trace: Trace
    standing: StandIns
    hooks: list[Hooks]  # which the attachment removes
    # By a recurrent module's id: the C++ site of each of its weights, in order.
    weight_sites: dict[int, list[Any]] = field(default_factory=dict)


class NativeSite:
    """Site of a module with a kernel, or of one projection of nn.MultiheadAttention. fixed: the
    module itself says where its samples are. declared: layout by the user; -1: none. presumed:
    layout where nothing is declared or proven. core: the site in C++."""

    fixed = False

    def __init__(self, module: nn.Module, layer: Layer, index: int, context: Context) -> None:
        options = context.options
        self.layer, self.declared = layer, declared_layout(layer, options)
        self.presumed = SEQUENCE if options["batch_dim"] or layer.role else BATCH
        self._rule = rule_named(layer.kind)
        # For norms only, our node spares a table's gradient, which is as large as the table.
        spares = self._rule.whole and not options["weight_grad"]
        # With a max_norm the forward writes into the weight.
        bounded = getattr(module, "max_norm", None) is not None
        swaps = owns_backward(options) and (self._rule.swaps or (spares and not bounded))
        declared = SECOND if layer.role and self.declared >= 0 else self.declared
        self.core = make_core(layer, index, context, declared, self.presumed, swaps)
        if layer.role:
            attention_of = partial(attention_forward_of, context.recorder)
            projections = context.standing.put(module, attention_of).setdefault(id(module), {})
            projection = Projection(self.core, index, layer, self.declared, fused=swaps)
            projections[layer.role] = projection
            return
        forward_of: Any = partial(_cpp_forward_of, context.trace, self._rule.argument)
        called = self.core
        if not (self._rule.swaps or self._rule.whole):
            forward_of = _tapped_forward_of
            called = _make_tap(self.core, index, layer.kind, context.recorder)
        on_change = context.parameters.altered.append
        context.standing.put(module, forward_of, on_change)[id(module)] = called

    def leads(self, dims: int) -> int:
        """Return how many leading dimensions of its input count rows."""
        return self._rule.leads(self.layer, dims)


def make_core(
    layer: Layer, index: int, context: Context, declared: int, presumed: int, swaps: bool
) -> Any:
    """Return a site in C++. swaps: our operator runs in the forward; else its output is tapped."""
    recorder, options = context.recorder, context.options  # not the context, which owns the site
    rule = rule_named(layer.kind)
    device = gpu_of(context.parameters.tensors()[layer.weight].device)
    weight_grad = swaps and options["weight_grad"]

    def planner(n: int, t: int, itemsize: int) -> int:
        if rule.served_by:
            return CODES["fused"]
        try:
            plan = layer.plan(n, t, itemsize, weight_grad, options["algorithm"], device)
        except ValueError as refusal:  # raised when norms are read, never from inside backward()
            recorder.refuse(index, cause("algorithm", error=refusal))
            plan = layer.plan(n, t, itemsize, weight_grad, None, device)
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


def _cpp_forward_of(trace: Trace, argument: str, stock: Any, sites: dict[int, Any]) -> Any:
    """Return a forward in C++: our operator, or the stock one with a tap (a hook costs more)."""

    @untraced
    def forward(self: Any, input: Any) -> Any:
        # The token first: it is None unless something compiles, and costs less to read.
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


def _tapped_forward_of(stock: Any, taps: dict[int, Any]) -> Any:
    """Return the stock forward followed by a tap of its output; such a module is never traced."""

    @untraced
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        out = stock.forward(self, *args, **kwargs)
        tap = taps.get(id(self))
        if tap is not None:
            tap(self, args[0] if args else kwargs["input"], out)
        return out

    return forward


def _make_tap(site: Any, index: int, kind: str, recorder: Recorder) -> Callable[..., None]:
    """Return a function of (module, input, output) that taps the output."""
    tap = partial(_C.listen, site)

    def tap_batched(module: Any, x: Tensor, out: Tensor) -> None:
        if x.dim() != module._get_no_batch_dim():  # [C, *] has channels in place of samples
            tap(module, x, out)

    def tap_with_statistics(module: Any, x: Tensor, out: Tensor) -> None:
        if module.training or module.running_mean is None:
            run = recorder.current()
            if run is not None:
                run.refuse(index, "batch_statistics")
            return
        _C.tap(site, x, module.weight, module.bias, out, module.running_mean, module.running_var)

    if kind.startswith("batchnorm"):
        return tap_with_statistics
    return tap_batched if kind.startswith("instancenorm") else tap
