"""The backward of a user's Function, or of a part that AOTAutograd made one of, asked by us.

It is called as the engine calls it, but for its context: that gives copies of what the forward
saved, since a backward may write into it, and keeps what the backward sets.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import BackwardCFunction
from torch.nn import Parameter
from torch.utils._pytree import tree_leaves, tree_map

from ..extension import _C, NATIVE
from ..kept import random_state_kept
from ..sharding import is_fsdp_node
from .nodes import Node

COMPILED = "CompiledFunctionBackward"


def is_users(node: Node) -> bool:
    """Return True for the node of a user's Function."""
    is_ours = node.name() == COMPILED or is_fsdp_node(node)
    return isinstance(node, BackwardCFunction) and not is_ours


class _Context:
    """Stands for a node in its own backward, and leaves the node as it is."""

    def __init__(self, node: Node) -> None:
        self.__node = node

    def __getattr__(self, name: str) -> Any:
        value = tree_map(_copied, getattr(self.__node, name))
        setattr(self, name, value)
        return value

    def maybe_clear_saved_tensors(self) -> None:
        """Do nothing, where the node would free what it saved."""


def can_ask_function(node: Node) -> bool:
    """Return True if the node can be asked: it has no random state, saved through no hooks, and
    holds nothing that its backward may call (as a checkpoint), and no group of processes."""
    held = tree_leaves(vars(node)) if is_users(node) else ()
    may_run = any(callable(v) or "distributed" in type(v).__module__ for v in held)
    return NATIVE and not (may_run or hasattr(node, "_curr_iter") or _C.packs(node))


def ask_function(node: Node, grads: Sequence[Tensor | None]) -> tuple[Tensor | None, ...]:
    """Return the product for each edge of the node, as a call of another node does.
    A user's Function is asked for half of it: if it is not linear, twice that is another sum."""
    if users := is_users(node):
        grads = [None if g is None else g / 2 for g in grads]
    with random_state_kept() if users else nullcontext():
        out = type(node).apply(_Context(node), *_C.materialized(node, grads))
    # One for each argument, numbers included; an edge leads somewhere if its argument is trained.
    outs = zip(out if isinstance(out, tuple) else (out,), node.needs_input_grad, strict=False)
    live = iter([g for g, is_live in outs if is_live])
    found = (next(live) if child else None for child, _ in node.next_functions)
    return tuple(2 * g if users and g is not None else g for g in found)


def _copied(value: Any) -> Any:
    """Return a copy of a tensor with the same strides; what is expanded, or no tensor, as it is."""
    is_plain = type(value) in (Tensor, Parameter) and value.layout == torch.strided
    if not is_plain or 0 in value.stride():
        return value
    copy = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=value.device)
    return copy.copy_(value.detach()).requires_grad_(value.requires_grad)
