"""Which kernel sees a module's parameters: RULES for layers that have one, else the fallback.

A rule is chosen by the identity of the forward function, never by type alone: a subclass with its
own forward computes something else.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.nn.utils import parametrize

from .cost import Plan, Problem, plan

__all__ = ["RULES", "Layer", "Rule", "modules_in_order", "opaque", "own_names", "rule_of"]


DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
CONTAINERS = (
    nn.ParameterList,
    nn.ParameterDict,
)  # never called: their parameters are their owner's


@dataclass
class Layer:
    """One module of an attached model: what is known of it before any data is seen."""

    name: str
    kind: str  # the name of its rule, or "vmap"
    type_name: str
    weight: int = -1  # places in the probe's table of parameters; -1: none
    bias: int = -1
    parameters: tuple[int, ...] = ()
    in_features: int = 0
    out_features: int = 0  # of one group, as in_features
    groups: int = 1
    kernel_size: tuple[int, ...] = ()  # () but for convolutions
    stride: tuple[int, ...] = ()
    padding: tuple[int, ...] = ()
    dilation: tuple[int, ...] = ()
    pre_pad: tuple[int, ...] = ()  # what `padding` cannot say, as for F.pad
    pad_mode: str = "constant"
    plans: dict[tuple[int, int], Plan] = field(default_factory=dict)  # by (N, T)
    notes: dict[str, None] = field(default_factory=dict)  # how the fallback served, once each

    def plan(self, n: int, t: int, itemsize: int, weight_grad: bool, forced: str | None) -> Plan:
        problem = Problem(
            layer="conv2d" if self.kernel_size else "linear",
            n=n,
            t=t,
            i=self.in_features,
            o=self.out_features,
            groups=self.groups,
            itemsize=itemsize,
            weight_grad=weight_grad,
        )
        # direct, where the weight gradient is wanted too, is what fused does in one pass
        if forced == "direct" and weight_grad:
            forced = "fused"
        self.plans[n, t] = chosen = plan(problem, forced)
        return chosen


@dataclass(frozen=True)
class Rule:
    name: str
    accepts: Callable[[nn.Module], bool]
    describe: Callable[[Any], dict[str, Any]]  # fields of Layer


def _linear(module: nn.Linear) -> dict[str, Any]:
    return {"in_features": module.in_features, "out_features": module.out_features}


def _convolution(module: nn.Conv1d | nn.Conv2d) -> dict[str, Any]:
    lift = (1,) * (2 - len(module.kernel_size))  # one dimension is two, of height 1
    sides = list(module._reversed_padding_repeated_twice)  # as for F.pad: last dimension first
    pairs = [(sides[k], sides[k + 1]) for k in range(0, len(sides), 2)]
    symmetric = module.padding_mode == "zeros" and all(low == high for low, high in pairs)
    return {
        "in_features": module.in_channels // module.groups * _product(module.kernel_size),
        "out_features": module.out_channels // module.groups,
        "groups": module.groups,
        "kernel_size": lift + tuple(module.kernel_size),
        "stride": lift + tuple(module.stride),
        "dilation": lift + tuple(module.dilation),
        "padding": (0,) * len(lift) + tuple(low for low, _ in reversed(pairs))
        if symmetric
        else (0, 0),
        "pre_pad": () if symmetric else tuple(sides),
        "pad_mode": "constant" if module.padding_mode == "zeros" else module.padding_mode,
    }


def _product(sizes: tuple[int, ...]) -> int:
    product = 1
    for size in sizes:
        product *= size
    return product


def _forward_of(stock: Any, *methods: str) -> Callable[[nn.Module], bool]:
    """Whether a module computes just what the stock class does."""

    def accepts(module: nn.Module) -> bool:
        kind = type(module)
        return all(getattr(kind, method, None) is getattr(stock, method) for method in methods)

    return accepts


RULES: dict[type[nn.Module], Rule] = {
    nn.Linear: Rule("linear", _forward_of(nn.Linear, "forward"), _linear),
    nn.Conv1d: Rule("conv1d", _forward_of(nn.Conv1d, "forward", "_conv_forward"), _convolution),
    nn.Conv2d: Rule("conv2d", _forward_of(nn.Conv2d, "forward", "_conv_forward"), _convolution),
}


def rule_of(module: nn.Module) -> Rule | None:
    own = {name for name, p in module._parameters.items() if p is not None}
    plain = "forward" not in module.__dict__ and "_conv_forward" not in module.__dict__
    if not plain or not own <= {"weight", "bias"} or "weight" not in own:
        return None
    if any(p is not None and p.dtype not in DTYPES for p in module._parameters.values()):
        return None
    return next((rule for rule in RULES.values() if rule.accepts(module)), None)


def opaque(module: nn.Module) -> bool:
    """Whether a module uses its children's parameters without calling the children."""
    return isinstance(module, nn.MultiheadAttention) or parametrize.is_parametrized(module)


def own_names(module: nn.Module) -> list[str]:
    """The parameters that a module's own forward uses, by their names within it."""
    if opaque(module):
        return [name for name, _ in module.named_parameters(remove_duplicate=False)]
    names = [name for name, p in module._parameters.items() if p is not None]
    for child_name, child in module.named_children():
        if isinstance(child, CONTAINERS):
            names += [f"{child_name}.{name}" for name in own_names(child)]
    return names


def modules_in_order(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """named_modules() that does not descend into opaque modules."""
    inside: tuple[str, ...] = ()
    for name, module in model.named_modules():
        if inside and name.startswith(inside):
            continue
        if opaque(module):
            inside += (f"{name}." if name else "",)
        if not isinstance(module, CONTAINERS):
            yield name, module
