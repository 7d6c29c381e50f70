"""Nodes that the current backward executes, callbacks at its end, and gates at parameters' nodes.

A gate keeps gradients out of `.grad` for norms only, and reports others for clipping.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor

from .copies import untraced

at_the_end = torch.autograd.Variable._execution_engine.queue_callback  # of the current backward


def will_execute(node: Any) -> bool:
    """Return True if this backward executes a node."""
    try:
        return torch._C._will_engine_execute_node(node)
    except RuntimeError:  # autograd.grad returns this node's gradient, and fills no .grad
        return False


def receives_grad(parameter: Tensor) -> bool:
    """Return True if this backward adds to a parameter's .grad."""
    return will_execute(torch.autograd.graph.get_gradient_edge(parameter).node)


def put_gate(recorder: Any, place: int, node: Any, parameter: Tensor) -> None:
    """Register a prehook at a parameter's node, like Gate in csrc/record/backward.cpp: for norms
    only it stops gradients of recorded passes, for clipping it reports all others."""
    owner = weakref.ref(recorder)

    def gate(grads: tuple[Tensor | None]) -> tuple[None] | None:
        recorder = owner()
        if recorder is None:
            return None
        has_pass = recorder.audited(torch._C._current_graph_task_id())
        if not recorder.shields:
            if recorder.keeps_tape and not has_pass and grads[0] is not None:
                recorder.received(place, grads[0])
            return None
        # The user's hooks after accumulation must run although nothing is accumulated.
        if has_pass and parameter._post_accumulate_grad_hooks:
            recorder.received(place, grads[0])
        return (None,) if has_pass else None

    gates: Any = node.metadata.setdefault("torchgradx gates", weakref.WeakSet())
    if (recorder.shields or recorder.keeps_tape) and recorder not in gates:
        gates.add(recorder)
        node.register_prehook(gate)


def weakly(owner: Callable[[], Any], method: str) -> Callable[..., Any]:
    """Return a function that calls a method of a weak reference's object while that lives. method:
    its name; with dots, that of a part's method."""
    find = attrgetter(method)

    @untraced
    def call(*args: Any) -> Any:
        alive = owner()
        return None if alive is None else find(alive)(*args)

    return call
