"""Keeps the indices of blocks that may route rows, where saved tensors go through hooks.

A block's forward runs with hooks of ours on the thread's stack, which call those below. An
interrupt runs no hook of a module: then each block left one of the hooks below ours there.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from ..graph.unpacking import keep_indices
from .native import Hooks

_stack: Any = torch._C._autograd  # of saved tensors' hooks


class _OfThread(threading.local):
    def __init__(self) -> None:
        self.blocks: list[tuple[int, bool]] = []  # running: id of the module; hooks were pushed
        self.below = 0  # count of hooks when the model was called


class Keeping:
    """The blocks of one model."""

    def __init__(self, blocks: Iterable[nn.Module]) -> None:
        self._local = _OfThread()
        self._hooks: list[Hooks] = []
        for block in blocks:
            hooks, pass_on = Hooks(block), (lambda *_: None)  # in a full graph
            hooks.add(block.register_forward_pre_hook, self._enter, pass_on, prepend=True)
            leave = {"prepend": True, "always_call": True}
            hooks.add(block.register_forward_hook, self._leave, pass_on, **leave)
            self._hooks.append(hooks)

    def remove(self) -> None:
        for hooks in self._hooks:
            hooks.remove()
        self._hooks = []

    def begin(self) -> None:
        """Note how many hooks there are before a forward of the model."""
        hooks = _take_all()
        _put(hooks)
        self._local.below = len(hooks)

    def end(self) -> None:
        """Take off what the blocks of a forward that was interrupted have left."""
        count, below = sum(pushed for _, pushed in self._local.blocks), self._local.below
        self._local.blocks = []
        if count:
            hooks = _take_all()
            _put(hooks[:below] + hooks[below + count :])

    def _enter(self, block: nn.Module, *_: Any) -> None:
        hooks = _stack._top_saved_tensors_default_hooks(True)
        again = torch._C._current_graph_task_id() != -1  # a checkpoint's recomputation
        pushed = not (hooks is None or again or torch._C._are_functorch_transforms_active())
        if pushed:
            keep_indices(hooks)
        self._local.blocks.append((id(block), pushed))

    def _leave(self, block: nn.Module, *_: Any) -> None:
        blocks = self._local.blocks
        if blocks and blocks[-1][0] == id(block) and blocks.pop()[1]:
            _stack._pop_saved_tensors_default_hooks()


def _take_all() -> list[Any]:
    """Take all hooks off the stack; the lowest comes first."""
    taken = []
    while (hooks := _stack._top_saved_tensors_default_hooks(True)) is not None:
        _stack._pop_saved_tensors_default_hooks()
        taken.append(hooks)
    return taken[::-1]


def _put(hooks: list[Any]) -> None:
    for pair in hooks:
        _stack._push_saved_tensors_default_hooks(*pair)
