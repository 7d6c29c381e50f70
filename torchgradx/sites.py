"""Where a probe touches a module that has a kernel: its class is swapped, or its output tapped."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from . import ops
from .copies import Hook, keep_out, let_in, swapped
from .layout import BATCH, SEQUENCE
from .rules import Layer
from .table import Context, declared_layout

if ops.NATIVE:
    from . import _C

__all__ = ["Hooks", "NativeSite"]

CODES = {"rank1": 0, "gram": 1, "direct": 2, "fused": 3}  # Algorithm in csrc/site.h


class Hooks:
    """A module's hooks, left out of its copies, and their removal."""

    def __init__(self, module: nn.Module) -> None:
        self._kind = type(module)
        self._handles: list[Any] = []
        keep_out(self._kind)

    def add(
        self, register: Callable[..., Any], function: Callable[..., Any], **options: Any
    ) -> None:
        self._handles.append(register(Hook(function), **options))

    def remove(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles = []
        let_in(self._kind)


class NativeSite:
    """A module whose parameters a kernel sees."""

    def __init__(
        self,
        module: nn.Module,
        layer: Layer,
        index: int,
        context: Context,
    ) -> None:
        options = context.options
        self.layer, self.declared = layer, declared_layout(layer, options)
        self.presumed = SEQUENCE if options["batch_dim"] else BATCH
        self._module, self._stock = module, type(module)
        weight_grad = options["weight_grad"]
        itemsize = module._parameters["weight"].element_size()  # type: ignore[union-attr]
        beside = weight_grad and options["fused"]

        def planner(n: int, t: int) -> int:
            try:
                plan = layer.plan(n, t, itemsize, beside, options["algorithm"])
            except ValueError as refusal:  # raised when it is read, never from inside backward()
                context.recorder.refuse(index, str(refusal))
                plan = layer.plan(n, t, itemsize, beside, None)
            return CODES[plan.algorithm]

        site = _C.Site(
            recorder=context.recorder,
            index=index,
            weight=layer.weight,
            bias=layer.bias,
            weight_grad=weight_grad,
            layout=self.declared,
            presumed=self.presumed,
            planner=planner,
        )
        if layer.kernel_size:
            site.groups = layer.groups
            site.one_dimensional = layer.kind == "conv1d"
            site.pre_pad, site.pad_mode = list(layer.pre_pad), layer.pad_mode
            for name in ("kernel_size", "stride", "padding", "dilation"):
                setattr(site, name, list(getattr(layer, name)))
        self._hooks = Hooks(module)
        if beside or not weight_grad:
            operator = _C.convolution if layer.kernel_size else _C.linear
            module.__class__ = swapped(self._stock, _calls(operator, site))
        else:
            self._hooks.add(
                module.register_forward_hook, _tap(site), prepend=True, with_kwargs=True
            )

    def leads(self, dims: int) -> int:
        """How many leading dimensions of its input count rows."""
        return 1 if self.layer.kernel_size else dims - 1

    def remove(self) -> None:
        self._module.__class__ = self._stock
        self._hooks.remove()


def _calls(operator: Callable[..., Tensor], site: Any) -> Callable[..., Tensor]:
    def forward(self: Any, input: Tensor) -> Tensor:
        return operator(site, input, self.weight, self.bias)

    return forward


def _tap(site: Any) -> Callable[..., None]:
    def hook(module: Any, args: Any, kwargs: Any, out: Tensor) -> None:
        _C.tap(site, args[0] if args else kwargs["input"], module.weight, module.bias, out)

    return hook
