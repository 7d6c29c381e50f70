"""Copies of an attached model are unattached: deepcopy and pickle leave out what a probe added."""

from __future__ import annotations

import copyreg
from collections import Counter, OrderedDict
from collections.abc import Callable
from typing import Any

from torch import nn

__all__ = ["Hook", "keep_out", "let_in", "swapped"]

HOOKS = ("_forward_hooks", "_forward_pre_hooks")
FLAGS = ("_with_kwargs", "_always_called")

_kept_out: Counter[type] = Counter()


class Hook:
    """A hook of ours on a module."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function = function

    def __call__(self, *args: Any) -> Any:
        return self.function(*args)


def keep_out(kind: type) -> None:
    """While any probe has hooks on modules of this class; nothing is added to the modules."""
    _kept_out[kind] += 1
    copyreg.dispatch_table.setdefault(kind, _reduce)


def let_in(kind: type) -> None:
    _kept_out[kind] -= 1
    if not _kept_out[kind] and copyreg.dispatch_table.get(kind) is _reduce:
        del copyreg.dispatch_table[kind]


def _reduce(module: Any) -> tuple[Any, ...]:
    made = module.__reduce_ex__(2)
    return (*made[:2], _without_hooks(made[2]), *made[3:])


def _without_hooks(state: Any) -> Any:
    if not isinstance(state, dict):
        return state
    state = dict(state)
    for name in HOOKS:
        hooks = state.get(name, {})
        ours = {key for key, hook in hooks.items() if isinstance(hook, Hook)}
        for part in (name, *(name + flag for flag in FLAGS)) if ours else ():
            if part in state:
                state[part] = OrderedDict((k, v) for k, v in state[part].items() if k not in ours)
    return state


def swapped(stock: type[nn.Module], forward: Callable[..., Any]) -> type[nn.Module]:
    """A subclass with another forward, whose copies are of the stock class."""

    def reduce(self: Any, protocol: Any) -> tuple[Any, ...]:
        made = stock.__reduce_ex__(self, 2)
        return (copyreg._reconstructor, (stock, object, None), _without_hooks(made[2]))  # type: ignore[attr-defined]

    body = {
        "forward": forward,
        "__reduce_ex__": reduce,
        "__module__": stock.__module__,
        "__qualname__": stock.__qualname__,
        "__doc__": stock.__doc__,
    }
    return type(stock.__name__, (stock,), body)
