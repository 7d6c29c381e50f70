"""Stand-ins: copies of modules that run again, so that nothing of that reaches the modules.

Another thread may be running the module itself, and a user's forward may count its calls, keep
state, draw random numbers or write into weights.
"""

from __future__ import annotations

import copy
import random
from collections import OrderedDict, deque
from functools import partial
from types import MethodType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.utils.parametrizations import _SpectralNorm
from torch.nn.utils.spectral_norm import SpectralNorm

from ..hooks.copies import stock_of

GENERATORS = (np.random.Generator, np.random.RandomState, random.Random)
SPECTRAL = (SpectralNorm, _SpectralNorm)
TORCH_ATTRIBUTES = {*vars(nn.Module()), "_flat_weights", "_flat_weight_refs"}


def stand_in(module: nn.Module, weights: bool | None = None) -> nn.Module:
    """Return a copy of a module without hooks, with copies of its buffers and, if a forward is the
    user's, of other attributes. weights: copy the parameters, which others may step or reshard
    later in the backward; None: only if a forward is the user's."""
    twin, is_users = _copy_shallow(module, {}), has_users_forward(module)
    if is_users if weights is None else weights:
        plain = [p for p in twin.parameters() if p.requires_grad or type(p) is nn.Parameter]
        swaps = {id(p): p.detach().clone().requires_grad_(p.requires_grad) for p in plain}
        swap_tensors(twin, swaps)
    copies: dict[int, Any] = {id(p): p for p in twin.parameters()}
    for part in twin.modules() if is_users else ():
        for name in set(vars(part)) - TORCH_ATTRIBUTES:
            vars(part)[name] = copy_state(vars(part)[name], copies)
    return twin


def _copy_shallow(module: nn.Module, copies: dict[int, nn.Module]) -> nn.Module:
    """Return a copy of a module and its children, which shares their parameters. copies: by id."""
    if id(module) in copies:
        return copies[id(module)]
    # Not by calling the class: a sharded module's class makes the plain module in __new__.
    twin = copies[id(module)] = object.__new__(stock_of(type(module)))
    twin.__dict__ = dict(module.__dict__)
    for key, v in module.__dict__.items():  # a forward set on the instance
        if isinstance(v, MethodType) and v.__self__ is module:
            twin.__dict__[key] = MethodType(v.__func__, twin)
        elif isinstance(v, partial):
            given = (twin if part is module else part for part in v.args)
            twin.__dict__[key] = partial(v.func, *given, **v.keywords)
    makers = {key: h for key, h in module._forward_pre_hooks.items() if makes_weight(h)}
    twin.__dict__.update(
        _parameters=dict(module._parameters),
        _buffers={key: b if b is None else b.clone() for key, b in module._buffers.items()},
        _modules={key: m and _copy_shallow(m, copies) for key, m in module._modules.items()},
        _forward_hooks=OrderedDict(),
        _forward_pre_hooks=OrderedDict(makers),
        _backward_hooks=OrderedDict(),
        _backward_pre_hooks=OrderedDict(),
    )
    if any(isinstance(maker, SPECTRAL) for maker in (module, *makers.values())):
        twin.training = False  # no step of the power iteration: keep the forward's vectors
    if isinstance(module, (nn.Embedding, nn.EmbeddingBag)):
        twin.__dict__["max_norm"] = None  # the forward has renormalised the rows already
    return twin


def has_users_forward(module: nn.Module) -> bool:
    """Return True if the forward of a module, or of one inside it, is the user's."""
    return any(
        "forward" in vars(part) or not stock_of(type(part)).__module__.startswith("torch.nn.")
        for part in module.modules()
    )


def swap_tensors(module: nn.Module, swaps: dict[int, Tensor]) -> None:
    """Replace parameters of a stand-in. swaps: the new tensors, by the ids of the old ones."""
    for m in module.modules():
        parameters = {key: swaps.get(id(p), p) for key, p in m._parameters.items()}
        m.__dict__["_parameters"] = parameters
        if isinstance(m, nn.RNNBase):  # has a second list of its weights
            m.__dict__["_flat_weights"] = [swaps.get(id(w), w) for w in m._flat_weights]


def makes_weight(hook: Any) -> bool:
    """Return True if a pre-hook computes the module's weight, like torch.nn.utils.weight_norm's."""
    return type(hook).__module__.startswith("torch.nn.utils.")


def copy_state(value: Any, copies: dict[int, Any]) -> Any:
    """Return a copy of what a forward may write into: tensors, containers and generators. Other
    objects, and parameters, are returned as they are. copies: by id."""
    if id(value) in copies:
        return copies[id(value)]
    twin = copies[id(value)] = value  # first, for a container that contains itself
    if isinstance(value, Tensor):
        twin = value if isinstance(value, nn.Parameter) else value.detach().clone()
    elif isinstance(value, torch.Generator):
        twin = value.clone_state()
    elif isinstance(value, (np.ndarray, *GENERATORS)):
        twin = copy.deepcopy(value)
    elif isinstance(value, (dict, list, deque)):
        twin = copy.copy(value)
        for key, v in value.items() if isinstance(value, dict) else enumerate(value):
            twin[key] = copy_state(v, copies)
    elif type(value) in (tuple, set):
        twin = type(value)(copy_state(v, copies) for v in value)
    copies[id(value)] = twin
    return twin
