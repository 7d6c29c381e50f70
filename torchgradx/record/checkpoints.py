"""Decides for each call of the model whether to record it.

A call that a checkpoint runs again is answered as when it ran first. By then the probe may have
been paused, resumed or removed. So each answer is noted with the number of the graph node that the
thread makes next, and is found by the number of the node whose backward runs the call again.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from operator import itemgetter
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import BackwardCFunction
from torch.utils import checkpoint

from ..extension import Recorder
from ..graph.unpacking import put_hooks, take_hooks
from ..refusals import cause

_C = torch._C._autograd
MAX_CALLS = 1024  # calls under no_grad that are remembered
Reentrant: Any = checkpoint.CheckpointFunction._backward_cls


class Answer(NamedTuple):
    """The answer to a call of the model, or of a module outside of it, and the user's settings for
    its samples when it ran first."""

    serial: int = 0  # number of the forward; 0: it is not recorded
    joint: list[Any] | None = None  # the passes inside the same `with probe.same_samples()`
    directed: Sequence[Tensor | None] = ()  # directions, by the parameter's place


NOT_RECORDED = Answer()


@dataclass
class _Notes:
    """The notes of one thread, in the order of its graph nodes."""

    turns: list[tuple[int, bool]] = field(default_factory=list)  # from this node on: recorded?
    calls: list[tuple[int, Answer]] = field(default_factory=list)  # of the model, under no_grad
    lost: int = -1  # first node of the latest call that was dropped from `calls`
    rerun: Any = None  # (task, node number) of the latest node that ran calls again
    count: int = 0  # calls that it ran before this one


class Frames:
    """The answers of one probe."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder, self._born = recorder, recorder.next_node()
        self._notes: dict[int, _Notes] = defaultdict(_Notes)  # by thread

    def answer(self, on: bool, now: Answer, outside: bool) -> Answer:
        """Return the answer to a call of the model, or of a module `outside` of it. now: the answer
        if recording is `on`, and the call does not run again."""
        found = now if on else NOT_RECORDED
        node = self._recorder.running_node()
        if node is not None:
            found = self._answer_rerun(node, on, now, outside)
        notes, first = self.turn(bool(found.serial))
        if not outside and not torch.is_grad_enabled():  # perhaps in a reentrant checkpoint
            notes.calls.append((first, found))
            if len(notes.calls) > MAX_CALLS:
                notes.lost = notes.calls.pop(0)[0]
        return found

    def turn(self, on: bool) -> tuple[_Notes, int]:
        """Note if this thread's forwards are recorded from its next node on; return that node."""
        thread, number = self._recorder.next_node()
        notes = self._notes[thread]
        if not notes.turns or notes.turns[-1][1] != on:
            notes.turns = [*notes.turns[-MAX_CALLS:], (number, on)]
        return notes, number

    def _answer_rerun(self, node: tuple[int, int], on: bool, now: Answer, outside: bool) -> Answer:
        """Return the answer to a call in the backward of a node, (thread, number)."""
        thread, number = node
        notes, running = self._notes[thread], torch._C._current_autograd_node()
        turn = bisect_right(notes.turns, number, key=itemgetter(0)) - 1
        recorded = turn >= 0 and notes.turns[turn][1]
        if thread == self._born[0] and number < self._born[1]:
            return NOT_RECORDED
        if inside_checkpoint("_recomputation_hook"):  # which needs only the tensors that are saved
            return Answer(now.serial) if recorded else NOT_RECORDED
        is_new = on and not isinstance(running, Reentrant)
        if outside:
            return now if is_new else NOT_RECORDED
        if not isinstance(running, BackwardCFunction):
            return now if recorded else NOT_RECORDED
        task = torch._C._current_graph_task_id()
        notes.count = notes.count + 1 if notes.rerun == (task, number) else 0
        notes.rerun = task, number
        if number < notes.lost:
            self._recorder.refuse(-1, cause("forgotten", many=MAX_CALLS))
            return NOT_RECORDED
        call = bisect_right(notes.calls, number, key=itemgetter(0)) + notes.count
        if call >= len(notes.calls):  # it ran first before attach, or the node is no checkpoint
            return now if is_new else NOT_RECORDED
        before, found = notes.calls[call]
        if not _C._get_current_graph_task_keep_graph():  # it cannot run again: drop the settings
            notes.calls[call] = before, Answer(found.serial)
        return found


def inside_checkpoint(kind: str) -> bool:
    """Return True if saved-tensor hooks of this kind of a checkpoint are active on this thread."""
    hooks = take_hooks()
    put_hooks(hooks)
    return any(getattr(unpack, "__qualname__", "").startswith(f"{kind}.") for _, unpack in hooks)
