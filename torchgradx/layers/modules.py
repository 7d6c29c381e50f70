"""Modules: the owner of each parameter, and the modules that a module calls.

A module owns the parameters that its own forward uses, not those of the children that it calls.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from ..hooks.copies import stock_of

# torch never calls these modules: their parent owns their parameters.
CONTAINERS = (nn.ParameterList, nn.ParameterDict)
VALUE_TYPES = {bool, bytes, complex, float, int, str, type(None), torch.device, torch.dtype}
MAX_PARTS = 64
MODULE_STATE = set(vars(nn.Module()))  # what torch keeps in every module
RECURRENT = (nn.RNN, nn.LSTM, nn.GRU, nn.RNNCell, nn.LSTMCell, nn.GRUCell)


def recurrent_weights(module: Any) -> list[tuple[str, str | None]]:
    """Return the names (weight, bias or None) of each product of a stock recurrent module, in order
    of the layers. Empty: it is not stock, or our kernels do not take its dtype."""
    forward = stock_of(type(module)).forward
    stock = any(isinstance(module, kind) and forward is kind.forward for kind in RECURRENT)
    if not stock or "forward" in module.__dict__:
        return []
    has_layers = isinstance(module, nn.RNNBase)  # a cell has one, without a suffix
    sides = ("", "_reverse") if has_layers and module.bidirectional else ("",)
    layers = range(module.num_layers) if has_layers else ()
    pairs: list[tuple[str, str | None]] = []
    for end in [f"_l{k}{side}" for k in layers for side in sides] or [""]:
        pairs += [(f"weight_{w}{end}", f"bias_{w}{end}" if module.bias else None)
                  for w in ("ih", "hh")]  # fmt: skip
        if has_layers and module.proj_size:
            pairs.append((f"weight_hr{end}", None))
    names = {name for pair in pairs for name in pair if name}
    own = {name: p for name, p in module._parameters.items() if p is not None}
    dtypes = {p.dtype for p in own.values()}
    is_served = len(dtypes) == 1 and dtypes <= {torch.float32, torch.float64, torch.bfloat16}
    return pairs if names == set(own) and is_served else []


def build_of(model: nn.Module) -> tuple[Any, ...]:
    """Return a cache key of all modules and their attributes, without the values of tensors."""

    def key(name: str, m: nn.Module) -> tuple[Any, ...]:
        own = ((k, _key_of(v)) for k, v in vars(m).items() if k not in MODULE_STATE)
        return name, stock_of(type(m)), *own

    return tuple(key(*pair) for pair in model.named_modules(remove_duplicate=False))


def _key_of(value: Any, depth: int = 3) -> Any:
    """Return a key that is equal for equal plain values and for the same object only."""
    if isinstance(value, Tensor):
        return Tensor
    if type(value) in VALUE_TYPES:
        return value
    if type(value) in (dict, list, tuple) and len(value) <= MAX_PARTS and depth:
        parts = value.items() if isinstance(value, dict) else value
        return tuple(_key_of(part, depth - 1) for part in parts)
    try:
        return id(value), weakref.ref(value)  # a later object may have the same id
    except TypeError:
        return id(value)


def named_in_full(module: nn.Module) -> dict[str, Tensor]:
    """Return a module's parameters by all of their names, whatever its own method lists."""
    return dict(nn.Module.named_parameters(module, remove_duplicate=False))


def is_opaque(module: nn.Module) -> bool:
    """Return True if a module uses its children's parameters without calling the children."""
    return isinstance(module, nn.MultiheadAttention) or parametrize.is_parametrized(module)


def own_names(module: nn.Module) -> list[str]:
    """Return the names of the parameters that a module's own forward uses.
    A parameter that a child holds too (a head's bias, kept beside the decoder that adds it) is the
    child's: a module that runs again would count it twice. If the module itself uses it as well,
    that use is not recorded, and refused when the norms are read."""
    if is_opaque(module):
        return list(named_in_full(module))
    children = [child for child in module.children() if not isinstance(child, CONTAINERS)]
    below = {id(p) for child in children for p in child.parameters()}
    names = [name for name, p in module._parameters.items() if p is not None]
    for child_name, child in module.named_children():
        if isinstance(child, CONTAINERS):
            names += [f"{child_name}.{name}" for name in own_names(child)]
    return [name for name in names if id(parameter_of(module, name)) not in below]


def parameter_of(module: nn.Module, name: str) -> Tensor | None:
    """Return a parameter by a name that `own_names` returns; None: it is gone."""
    *path, key = name.split(".")
    for part in path:  # no attribute: a part may have the name of a method
        module = module._modules[part]  # type: ignore[assignment]
    return module._parameters.get(key)


def modules_in_order(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield (name, module) as named_modules() does, but nothing inside opaque modules."""
    inside: tuple[str, ...] = ()
    for name, module in model.named_modules():
        if inside and name.startswith(inside):
            continue
        if is_opaque(module):
            inside += (f"{name}." if name else "",)
        if not isinstance(module, CONTAINERS):
            yield name, module
