"""What runs again in a module's place, so that nothing it does reaches the module: another thread
may be running that, and a user's forward may count, remember, draw numbers and write into weights.
"""

from __future__ import annotations

import copy
import random
from collections import OrderedDict, deque
from collections.abc import Collection, Iterator
from enum import Enum
from types import MethodType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.utils.parametrizations import _SpectralNorm
from torch.nn.utils.spectral_norm import SpectralNorm

from .copies import stock_of

__all__ = ["as_it_is_now", "held_besides", "makes_weight", "of_its_own", "of_the_user", "put",
           "state_of_its_own"]  # fmt: skip

DRAW = (np.random.Generator, np.random.RandomState, random.Random)
SAID = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device, Enum)
DEPTH = 4  # of what is held in what
OF_TORCH = {*vars(nn.Module()), "_flat_weights", "_flat_weight_refs"}


def stand_in(module: nn.Module, made: dict[int, nn.Module] | None = None) -> nn.Module:
    """Return a shallow copy to run, hooks off. `made`: copies of its parts, by id."""
    made = {} if made is None else made
    if id(module) in made:
        return made[id(module)]
    # Not by its class, which builds the plain module in __new__ where it is sharded.
    twin = made[id(module)] = object.__new__(stock_of(type(module)))
    twin.__dict__ = {
        key: MethodType(v.__func__, twin) if _is_method(v, module) else v
        for key, v in module.__dict__.items()
    }
    makers = {key: h for key, h in module._forward_pre_hooks.items() if makes_weight(h)}
    twin.__dict__.update(
        _parameters=dict(module._parameters),
        _buffers={key: b if b is None else b.clone() for key, b in module._buffers.items()},
        _modules={key: m and stand_in(m, made) for key, m in module._modules.items()},
        _forward_hooks=OrderedDict(),
        _forward_pre_hooks=OrderedDict(makers),
        _backward_hooks=OrderedDict(),
        _backward_pre_hooks=OrderedDict(),
    )
    if any(
        isinstance(maker, (SpectralNorm, _SpectralNorm)) for maker in (module, *makers.values())
    ):
        twin.training = False  # no step of the power iteration: its vectors are the forward's
    if isinstance(module, (nn.Embedding, nn.EmbeddingBag)):
        twin.__dict__["max_norm"] = None  # the forward has bounded its rows
    return twin


def of_its_own(module: nn.Module, weights: bool = True) -> nn.Module:
    """To run: where a forward is a user's, with memories that it may write into, and weights."""
    own = any(map(of_the_user, module.modules()))
    twin = (as_it_is_now if weights and own else stand_in)(module)
    seen: dict[int, Any] = {id(p): p for p in twin.parameters()}
    for part in twin.modules() if own else ():
        for name in set(vars(part)) - OF_TORCH:
            vars(part)[name] = state_of_its_own(vars(part)[name], seen)
    return twin


def of_the_user(module: nn.Module) -> bool:
    """Return True if its forward is the user's."""
    stock = stock_of(type(module)).__module__.startswith("torch.nn.")
    return not stock or "forward" in vars(module)


def as_it_is_now(module: nn.Module) -> nn.Module:
    """A stand-in that keeps its weights: later in a backward others step them, or shard them."""
    twin = stand_in(module)
    held = [p for p in twin.parameters() if p.requires_grad or type(p) is nn.Parameter]
    put(twin, {id(p): p.detach().clone().requires_grad_(p.requires_grad) for p in held})
    return twin


def put(module: nn.Module, swaps: dict[int, Tensor]) -> None:
    """Let a stand-in compute with other tensors, by the ids of those that they replace."""
    for m, name in list(held_besides(module, swaps)):
        vars(m)[name] = state_of_its_own(vars(m)[name], dict(swaps))
    for m in module.modules():
        held = {key: swaps.get(id(p), p) for key, p in m._parameters.items()}
        m.__dict__["_parameters"] = held
        if isinstance(m, nn.RNNBase):  # holds its weights a second time
            m.__dict__["_flat_weights"] = [swaps.get(id(w), w) for w in m._flat_weights]


def held_besides(module: nn.Module, ids: Collection[int]) -> Iterator[tuple[nn.Module, str]]:
    """Yield these tensors where a module has them in a list of its own, or the like."""
    for m in module.modules():
        for name in set(vars(m)) - OF_TORCH:
            if any(id(t) in ids for t in _tensors_of(vars(m)[name], 0)):
                yield m, name


def _tensors_of(value: Any, depth: int) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif depth > DEPTH or isinstance(value, (*SAID, nn.Module, type)):
        return
    elif isinstance(value, (dict, list, tuple, set, deque)):
        for v in value.values() if isinstance(value, dict) else value:
            yield from _tensors_of(v, depth + 1)
    elif is_memory(value, 0):
        yield from _tensors_of(vars(value), depth)


def makes_weight(hook: Any) -> bool:
    return type(hook).__module__.startswith("torch.nn.utils.")  # weight_norm of old


def _is_method(value: Any, module: nn.Module) -> bool:
    """Return True for a method that was put onto the module, as a forward."""
    return isinstance(value, MethodType) and value.__self__ is module


def state_of_its_own(value: Any, seen: dict[int, Any]) -> Any:
    """A copy of what a forward may remember in: tensors, containers, generators, and objects that
    hold nothing else. All other things are what they are. `seen`: the copies, by id."""
    if isinstance(value, SAID):
        return value
    if id(value) not in seen:
        seen[id(value)] = value  # should it hold itself
        seen[id(value)] = _copied(value, seen)
    return seen[id(value)]


def _copied(value: Any, seen: dict[int, Any]) -> Any:
    if isinstance(value, Tensor):
        return value if isinstance(value, nn.Parameter) else value.detach().clone()
    if isinstance(value, torch.Generator):
        return value.clone_state()
    if isinstance(value, (np.ndarray, *DRAW)):
        return copy.deepcopy(value)
    if isinstance(value, (dict, list, deque)):
        twin: Any = copy.copy(value)
        for key, v in value.items() if isinstance(value, dict) else enumerate(value):
            twin[key] = state_of_its_own(v, seen)
        return twin
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(state_of_its_own(v, seen) for v in value))
    if type(value) in (tuple, set):
        return type(value)(state_of_its_own(v, seen) for v in value)
    if isinstance(value, bytearray):
        return bytearray(value)
    if is_memory(value, 0):
        twin = copy.copy(value)
        vars(twin).update({key: state_of_its_own(v, seen) for key, v in vars(value).items()})
        return twin
    return value


def is_memory(value: Any, depth: int) -> bool:
    """Return True if an object holds tensors, numbers and the like alone, as a cache."""
    if isinstance(value, (*SAID, Tensor, torch.Generator, np.ndarray, *DRAW)):
        return depth > 0
    if depth > DEPTH or isinstance(value, (nn.Module, type)) or callable(value):
        return False
    parts = value.values() if isinstance(value, dict) else value
    if isinstance(value, (dict, list, tuple, set, deque)):
        exact = isinstance(value, (dict, list, deque)) or type(value) in (tuple, set)
        if not exact and not hasattr(value, "_fields"):  # it is not copied
            return depth > 0 and all(isinstance(v, SAID) for v in parts)
        return depth > 0 and all(is_memory(v, depth + 1) for v in parts)
    held = getattr(value, "__dict__", None) or {}
    if hasattr(type(value), "__del__"):  # a copy would close the file
        return False
    return bool(held) and all(is_memory(v, depth + 1) for v in held.values())
