"""Keeps the indices of blocks that may route rows, where saved tensors go through hooks.

A block's forward runs with hooks of ours on the thread's stack, which call those below.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import torch
from torch import nn

from ..graph.unpacking import keep_indices, put_hooks, stack, take_hooks
from ..hooks.copies import Hooks


class Keeping:
    """The blocks of one model."""

    def __init__(self, blocks: Collection[nn.Module], every: list[Hooks]) -> None:
        """every: see Hooks."""
        self._blocks = blocks
        pass_on = lambda *_: None  # noqa: E731  # in a full graph
        for block in blocks:
            hooks = Hooks(block, every)
            hooks.add(block.register_forward_pre_hook, self._enter, pass_on, prepend=True)
            leave = {"prepend": True, "always_call": True}
            hooks.add(block.register_forward_hook, self._leave, pass_on, **leave)

    def end(self) -> None:
        """Take off what the blocks of a forward that was interrupted have left."""
        hooks = take_hooks()
        put_hooks(pair for pair in hooks if getattr(pair[0], "block", None) not in self._blocks)

    def _enter(self, block: nn.Module, *_: Any) -> None:
        hooks = stack._top_saved_tensors_default_hooks(True)
        again = torch._C._current_graph_task_id() != -1  # a checkpoint's recomputation
        if not (hooks is None or again or torch._C._are_functorch_transforms_active()):
            keep_indices(block, hooks)

    def _leave(self, block: nn.Module, *_: Any) -> None:
        hooks = stack._top_saved_tensors_default_hooks(True)
        if hooks is not None and getattr(hooks[0], "block", None) is block:
            stack._pop_saved_tensors_default_hooks()
