"""What csrc/record/backward.cpp puts at a parameter's node, where there is no extension."""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import Tensor

__all__ = ["put_gate"]


def put_gate(recorder: Any, place: int, node: Any, p: Tensor) -> None:
    """Have the node of p let nothing through under norms only, or tell what met no pass."""
    here = weakref.ref(recorder)

    def gate(grads: tuple[Tensor | None]) -> tuple[None] | None:
        of = here()
        if of is None or not (of.shields or of.books):
            return None
        met = of.audited(torch._C._current_graph_task_id())
        follow: Any = p._post_accumulate_grad_hooks
        if (met and follow) if of.shields else not (met or grads[0] is None):
            of.received(place, grads[0])
        return (None,) if of.shields and met else None

    gates: Any = node.metadata.setdefault("torchgradx gates", weakref.WeakSet())
    if (recorder.shields or recorder.books) and recorder not in gates:
        gates.add(recorder)
        node.register_prehook(gate)
