"""The backward that the engine runs now: what it executes, gates at parameters' nodes (for norms
only and for clipping), and calls at its end."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from .copies import untraced

at_the_end = torch.autograd.Variable._execution_engine.queue_callback  # of the current backward


def will_execute(node: Any) -> bool:
    try:
        return torch._C._will_engine_execute_node(node)
    except RuntimeError:  # autograd.grad, which only captures: no .grad receives anything
        return False


def receives_grad(parameter: Tensor) -> bool:
    """Return True if this backward adds to a parameter's .grad."""
    return will_execute(torch.autograd.graph.get_gradient_edge(parameter).node)


def put_gate(recorder: Any, place: int, node: Any, p: Tensor) -> None:
    """Do as Gate in csrc/record/backward.cpp."""
    here = weakref.ref(recorder)

    def gate(grads: tuple[Tensor | None]) -> tuple[None] | None:
        of = here()
        if of is None or not (of.shields or of.books):
            return None
        has_pass = of.audited(torch._C._current_graph_task_id())
        follow: Any = p._post_accumulate_grad_hooks
        if (has_pass and follow) if of.shields else not (has_pass or grads[0] is None):
            of.received(place, grads[0])
        return (None,) if of.shields and has_pass else None

    gates: Any = node.metadata.setdefault("torchgradx gates", weakref.WeakSet())
    if (recorder.shields or recorder.books) and recorder not in gates:
        gates.add(recorder)
        node.register_prehook(gate)


def weakly(owner: Callable[[], Any], method: str) -> Callable[..., Any]:
    """Return a function that calls a method while its owner lives."""

    @untraced
    def call(*args: Any) -> Any:
        alive = owner()
        return None if alive is None else getattr(alive, method)(*args)

    return call
