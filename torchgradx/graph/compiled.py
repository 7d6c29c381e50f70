"""The backward of a part that torch.compile compiled, asked for its products by us.

AOTAutograd made it as a Function. It is called as the engine calls it, but for the tensors that it
saved: these stay, and it is given copies, since it may have been compiled to write into them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ..extension import _C, NATIVE
from .nodes import Node

COMPILED = "CompiledFunctionBackward"


class _Unspent:
    """Stands for a node in its own backward, which leaves what the node saved."""

    def __init__(self, node: Node) -> None:
        self._node = node

    def __getattr__(self, name: str) -> Any:
        return getattr(self._node, name)

    @property
    def saved_tensors(self) -> list[Tensor | None]:
        return [None if t is None else _copied(t) for t in self._node.saved_tensors]

    def maybe_clear_saved_tensors(self) -> None:
        """Do nothing, where the node would free what it saved."""


def can_ask_compiled(node: Node) -> bool:
    """Return True if the node can be asked: it has no random state and saved through no hooks."""
    is_plain = NATIVE and node.name() == COMPILED and not hasattr(node, "_curr_iter")
    return is_plain and not _C.packs(node)


def ask_compiled(node: Node, grads: Sequence[Tensor | None]) -> tuple[Tensor | None, ...]:
    """Return the product for each edge of the node, as a call of another node does."""
    device = next(g.device for g in grads if g is not None)
    tangents = [torch.zeros(kind.shape, dtype=kind.dtype, device=device) if g is None else g
                for g, kind in zip(grads, node._input_metadata, strict=True)]  # fmt: skip
    out = type(node).apply(_Unspent(node), *tangents)
    # One for each argument, numbers included; an edge leads somewhere if its argument is trained.
    live = iter([g for g, is_live in zip(out, node.needs_input_grad, strict=True) if is_live])
    return tuple(next(live) if child else None for child, _ in node.next_functions)


def _copied(t: Tensor) -> Tensor:
    if any(stride == 0 and size > 1 for size, stride in zip(t.shape, t.stride(), strict=True)):
        return t  # expanded: nothing writes into it
    return torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device=t.device).copy_(t)
