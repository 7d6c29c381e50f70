"""Hooks on parameters that leave nothing behind."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from .. import ops


class ParameterHooks:
    def __init__(self) -> None:
        self._handles: list[Any] = []
        self.tensors: dict[int, Tensor] = {}  # by id: where our hooks are, or what they left

    def before(self, p: Tensor, hook: Callable[[Tensor], None]) -> None:
        """Call a hook with the gradient as it comes, before the user's own hooks change it."""
        handle = p.register_hook(hook)
        hooks: dict[int, Any] = p._backward_hooks  # type: ignore[assignment]
        theirs = {key: h for key, h in hooks.items() if key != handle.id}
        for key in theirs:  # torch calls them as they were put in, whatever move_to_end() says
            del hooks[key]
        hooks.update(theirs)
        self._handles.append(handle)
        self.tensors[id(p)] = p

    def stop(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles = []
        self.leave()

    def leave(self) -> None:
        """Remove what is left, where nobody listens any more and no backward runs."""
        if self.tensors and not self._handles and drop_empty_tables(self.tensors.values()):
            self.tensors = {}


def has_user_hooks(hooks: Any) -> bool:
    """Return True if a tensor's hooks are not all ours."""
    for hook in hooks.values() if hooks else ():
        if not isinstance(hook, partial) or not hook.func.__module__.startswith("torchgradx."):
            return True
    return False


def drop_empty_tables(where: Iterable[Tensor]) -> bool:
    """Remove the emptied tables of hooks that were taken away: each backward would take Python's
    lock to look into them. False: a backward of some other thread may be looking, now."""
    if not ops.NATIVE:
        return True  # there it stays: every pass is listened to
    if torch._C._current_graph_task_id() != -1 or threading.active_count() > 1:
        return False
    for p in where:
        if p.is_leaf and p._backward_hooks is not None and not p._backward_hooks:
            p._backward_hooks = None
        if p.is_leaf and p._post_accumulate_grad_hooks is not None:
            emptied: Any = p._post_accumulate_grad_hooks or None
            p._post_accumulate_grad_hooks = emptied
    return True
