"""Tensor hooks on parameters.

torch leaves an empty table of hooks where all are removed, and each backward then takes Python's
lock to read it: `drop_empty_tables` removes it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Iterable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ..extension import NATIVE


class ParameterHooks:
    """Our hooks on parameters."""

    def __init__(self) -> None:
        # By id: parameters and the handles of their hooks; parameters with our empty tables.
        self._hooked: dict[int, tuple[Tensor, Any]] = {}
        self.left: dict[int, Tensor] = {}

    def before(self, p: Tensor, hook: Callable[[Tensor], None]) -> None:
        """Register a hook that gets the gradient before the user's own hooks change it, unless the
        parameter has one of ours."""
        if id(p) in self._hooked:
            return
        handle = p.register_hook(hook)
        hooks: dict[int, Any] = p._backward_hooks  # type: ignore[assignment]
        others = {key: h for key, h in hooks.items() if key != handle.id}
        for key in others:  # torch calls hooks in order of insertion and ignores move_to_end()
            del hooks[key]
        hooks.update(others)
        self._hooked[id(p)] = p, handle
        self.left.pop(id(p), None)

    def stop(self, lasting: Collection[Tensor] = ()) -> None:
        """Remove the hooks on all parameters but these, and the empty tables if that is safe."""
        for key, (p, handle) in list(self._hooked.items()):
            if p not in lasting:
                handle.remove()
                self.left[key] = self._hooked.pop(key)[0]
        self.leave()

    def leave(self) -> None:
        """Remove the empty tables, if no backward runs."""
        if self.left and drop_empty_tables(self.left.values()):
            self.left = {}


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
