"""What a module is made of, before any rule: whose its parameters are, and which it calls."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from ..hooks.copies import stock_of

# Never called: their parameters are their owner's.
CONTAINERS = (nn.ParameterList, nn.ParameterDict)
VALUE_TYPES = {bool, bytes, complex, float, int, str, type(None), torch.device, torch.dtype}
MAX_PARTS = 64
MODULE_STATE = set(vars(nn.Module()))  # what torch keeps in every module
RECURRENT = (nn.RNN, nn.LSTM, nn.GRU, nn.RNNCell, nn.LSTMCell, nn.GRUCell)


def recurrent_weights(module: Any) -> list[tuple[str, str | None]]:
    """Return (weight, bias) of each product of a stock recurrent module, in order; or nothing."""
    forward = stock_of(type(module)).forward
    stock = any(isinstance(module, k) and forward is k.forward for k in RECURRENT)
    if not stock or "forward" in module.__dict__:
        return []
    several = isinstance(module, nn.RNNBase)
    sides = ("", "_reverse") if several and module.bidirectional else ("",)
    ends = [f"_l{k}{side}" for k in range(module.num_layers) for side in sides] if several else [""]
    found: list[tuple[str, str | None]] = []
    for end in ends:
        found += [(f"weight_{w}{end}", f"bias_{w}{end}" if module.bias else None)
                  for w in ("ih", "hh")]  # fmt: skip
        if several and module.proj_size:
            found.append((f"weight_hr{end}", None))
    named = {name for pair in found for name in pair if name}
    own = {name: p for name, p in module._parameters.items() if p is not None}
    dtypes = {p.dtype for p in own.values()}
    served = len(dtypes) == 1 and dtypes <= {torch.float32, torch.float64, torch.bfloat16}
    return found if named == set(own) and served else []


def build_of(model: nn.Module) -> tuple[Any, ...]:
    """Return what a forward may depend on beside tensors: the modules, and their attributes."""
    return tuple(
        (
            name,
            stock_of(type(m)),
            *((k, _same(v)) for k, v in vars(m).items() if k not in MODULE_STATE),
        )
        for name, m in model.named_modules(remove_duplicate=False)
    )


def _same(value: Any, depth: int = 3) -> Any:
    """Return an object that equals that of the same object, or of the same plain value, alone."""
    if isinstance(value, Tensor):
        return Tensor
    if type(value) in VALUE_TYPES:
        return value
    if type(value) in (dict, list, tuple) and len(value) <= MAX_PARTS and depth:
        parts = value.items() if isinstance(value, dict) else value
        return tuple(_same(part, depth - 1) for part in parts)
    try:
        return id(value), weakref.ref(value)  # an id may be given to another object later
    except TypeError:
        return id(value)


def is_opaque(module: nn.Module) -> bool:
    """Return True if a module uses its children's parameters without calling the children."""
    return isinstance(module, nn.MultiheadAttention) or parametrize.is_parametrized(module)


def own_names(module: nn.Module) -> list[str]:
    """Return names of the parameters that a module's own forward uses.

    One that a layer below it holds too (a head's bias, kept beside the decoder that adds it) is the
    layer's: a module that runs again would count it a second time. What the module itself does with
    it is then beyond the recorded uses, and refused when it is read.
    """
    if is_opaque(module):
        return [name for name, _ in module.named_parameters(remove_duplicate=False)]
    called = [child for child in module.children() if not isinstance(child, CONTAINERS)]
    below = {id(p) for child in called for p in child.parameters()}
    own = ((name, p) for name, p in module._parameters.items() if p is not None)
    names = [name for name, p in own if id(p) not in below]
    for child_name, child in module.named_children():
        if isinstance(child, CONTAINERS):
            names += [f"{child_name}.{name}" for name in own_names(child)]
    return names


def parameter_of(module: nn.Module, name: str) -> Tensor | None:
    """Return a parameter by its name within the module, as `own_names` has it."""
    owner, _, key = name.rpartition(".")
    return (module.get_submodule(owner) if owner else module)._parameters.get(key)


def same_parameters(one: nn.Module, other: nn.Module, names: Iterable[str]) -> bool:
    """Return True if two modules compute with the same named parameters: one at least."""
    same = [parameter_of(one, name) is parameter_of(other, name) for name in names]
    return bool(same) and all(same)


def modules_in_order(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """named_modules() that does not descend into opaque modules."""
    inside: tuple[str, ...] = ()
    for name, module in model.named_modules():
        if inside and name.startswith(inside):
            continue
        if is_opaque(module):
            inside += (f"{name}." if name else "",)
        if not isinstance(module, CONTAINERS):
            yield name, module
