"""What runs again in a module's place, so that nothing it does reaches the module: another thread
may be running that, and a user's forward may count, remember, draw numbers and write into weights.
"""

from __future__ import annotations

import copy
import random
from collections import OrderedDict, deque
from types import MethodType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.utils.parametrizations import _SpectralNorm
from torch.nn.utils.spectral_norm import SpectralNorm

from .copies import stock_of

DRAW = (np.random.Generator, np.random.RandomState, random.Random)
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
    for m in module.modules():
        held = {key: swaps.get(id(p), p) for key, p in m._parameters.items()}
        m.__dict__["_parameters"] = held
        if isinstance(m, nn.RNNBase):  # holds its weights a second time
            m.__dict__["_flat_weights"] = [swaps.get(id(w), w) for w in m._flat_weights]


def makes_weight(hook: Any) -> bool:
    return type(hook).__module__.startswith("torch.nn.utils.")  # weight_norm of old


def _is_method(value: Any, module: nn.Module) -> bool:
    """Return True for a method that was put onto the module, as a forward."""
    return isinstance(value, MethodType) and value.__self__ is module


def state_of_its_own(value: Any, seen: dict[int, Any]) -> Any:
    """Copy what a forward may remember in: tensors, containers, generators. All other things stay
    what they are. `seen`: the copies, by id."""
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
    if type(value) in (tuple, set):
        return type(value)(state_of_its_own(v, seen) for v in value)
    return value
