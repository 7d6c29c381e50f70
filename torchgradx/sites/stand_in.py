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

from ..hooks.copies import stock_of

DRAW = (np.random.Generator, np.random.RandomState, random.Random)
SPECTRAL = (SpectralNorm, _SpectralNorm)
OF_TORCH = {*vars(nn.Module()), "_flat_weights", "_flat_weight_refs"}


def stand_in(module: nn.Module, weights: bool | None = None) -> nn.Module:
    """Return a copy to run, hooks off, with copies of the buffers.

    Where a forward is a user's, also of memories, which that may write into. weights:
    copied too, for others step or shard them later in a backward; None: where a forward is a
    user's.
    """
    twin, users = _shallow(module, {}), has_users_forward(module)
    if users if weights is None else weights:
        kept = [p for p in twin.parameters() if p.requires_grad or type(p) is nn.Parameter]
        swap_tensors(
            twin, {id(p): p.detach().clone().requires_grad_(p.requires_grad) for p in kept}
        )
    copies: dict[int, Any] = {id(p): p for p in twin.parameters()}
    for part in twin.modules() if users else ():
        for name in set(vars(part)) - OF_TORCH:
            vars(part)[name] = copy_state(vars(part)[name], copies)
    return twin


def _shallow(module: nn.Module, made: dict[int, nn.Module]) -> nn.Module:
    """made: copies of its parts, by id."""
    if id(module) in made:
        return made[id(module)]
    # Not by its class, which builds the plain module in __new__ where it is sharded.
    twin = made[id(module)] = object.__new__(stock_of(type(module)))
    twin.__dict__ = dict(module.__dict__)
    for key, v in module.__dict__.items():
        if isinstance(v, MethodType) and v.__self__ is module:  # put onto the module, as a forward
            twin.__dict__[key] = MethodType(v.__func__, twin)
    makers = {key: h for key, h in module._forward_pre_hooks.items() if makes_weight(h)}
    twin.__dict__.update(
        _parameters=dict(module._parameters),
        _buffers={key: b if b is None else b.clone() for key, b in module._buffers.items()},
        _modules={key: m and _shallow(m, made) for key, m in module._modules.items()},
        _forward_hooks=OrderedDict(),
        _forward_pre_hooks=OrderedDict(makers),
        _backward_hooks=OrderedDict(),
        _backward_pre_hooks=OrderedDict(),
    )
    if any(isinstance(maker, SPECTRAL) for maker in (module, *makers.values())):
        twin.training = False  # no step of the power iteration: its vectors are the forward's
    if isinstance(module, (nn.Embedding, nn.EmbeddingBag)):
        twin.__dict__["max_norm"] = None  # the forward has bounded its rows
    return twin


def has_users_forward(module: nn.Module) -> bool:
    """Return True if the forward of a module, or of a part of it, is the user's."""
    return any(
        "forward" in vars(part) or not stock_of(type(part)).__module__.startswith("torch.nn.")
        for part in module.modules()
    )


def swap_tensors(module: nn.Module, swaps: dict[int, Tensor]) -> None:
    """Let a stand-in compute with other tensors, by the ids of those that they replace."""
    for m in module.modules():
        parameters = {key: swaps.get(id(p), p) for key, p in m._parameters.items()}
        m.__dict__["_parameters"] = parameters
        if isinstance(m, nn.RNNBase):  # holds its weights a second time
            m.__dict__["_flat_weights"] = [swaps.get(id(w), w) for w in m._flat_weights]


def makes_weight(hook: Any) -> bool:
    return type(hook).__module__.startswith("torch.nn.utils.")  # weight_norm of old


def copy_state(value: Any, copies: dict[int, Any]) -> Any:
    """Copy what a forward may remember in: tensors, containers, generators. All other things stay
    what they are. `copies`: by id."""
    if id(value) not in copies:
        copies[id(value)] = value  # should it hold itself
        copies[id(value)] = _copied(value, copies)
    return copies[id(value)]


def _copied(value: Any, copies: dict[int, Any]) -> Any:
    if isinstance(value, Tensor):
        return value if isinstance(value, nn.Parameter) else value.detach().clone()
    if isinstance(value, torch.Generator):
        return value.clone_state()
    if isinstance(value, (np.ndarray, *DRAW)):
        return copy.deepcopy(value)
    if isinstance(value, (dict, list, deque)):
        twin: Any = copy.copy(value)
        for key, v in value.items() if isinstance(value, dict) else enumerate(value):
            twin[key] = copy_state(v, copies)
        return twin
    if type(value) in (tuple, set):
        return type(value)(copy_state(v, copies) for v in value)
    return value
