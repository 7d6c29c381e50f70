"""Tensor hooks on parameters.

torch leaves an empty table of hooks where all are removed, and each backward then takes Python's
lock to read it: `drop_empty_tables` removes it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ..extension import NATIVE


class ParameterHooks:
    """Our hooks on parameters."""

    def __init__(self) -> None:
        self._handles: list[Any] = []
        self.tensors: dict[int, Tensor] = {}  # by id: those with our hooks, or our empty tables

    def before(self, p: Tensor, hook: Callable[[Tensor], None]) -> None:
        """Register a hook that gets the gradient before the user's own hooks change it."""
        handle = p.register_hook(hook)
        hooks: dict[int, Any] = p._backward_hooks  # type: ignore[assignment]
        others = {key: h for key, h in hooks.items() if key != handle.id}
        for key in others:  # torch calls hooks in order of insertion and ignores move_to_end()
            del hooks[key]
        hooks.update(others)
        self._handles.append(handle)
        self.tensors[id(p)] = p

    def stop(self) -> None:
        """Remove all hooks, and the empty tables if that is safe now."""
        for handle in self._handles:
            handle.remove()
        self._handles = []
        self.leave()

    def leave(self) -> None:
        """Remove the empty tables, if no hook of ours is left and no backward runs."""
        if self.tensors and not self._handles and drop_empty_tables(self.tensors.values()):
            self.tensors = {}


def has_user_hooks(hooks: Any) -> bool:
    """Return True if a tensor's table of hooks (None: it has none) has any that is not ours."""
    for hook in hooks.values() if hooks else ():
        if not isinstance(hook, partial) or not hook.func.__module__.startswith("torchgradx."):
            return True
    return False


def drop_empty_tables(where: Iterable[Tensor]) -> bool:
    """Remove these tensors' empty tables; return False if a backward may be reading them now."""
    if not NATIVE:
        return True  # without the extension, every pass is listened to: the tables stay
    if torch._C._current_graph_task_id() != -1 or threading.active_count() > 1:
        return False
    for p in where:
        if p.is_leaf and p._backward_hooks is not None and not p._backward_hooks:
            p._backward_hooks = None
        if p.is_leaf and p._post_accumulate_grad_hooks is not None:
            table: Any = p._post_accumulate_grad_hooks or None
            p._post_accumulate_grad_hooks = table
    return True
