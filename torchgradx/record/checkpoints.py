"""What a checkpoint runs again is recorded if it was when it ran first.

A probe that is asked in a forward notes its answer under the number of the graph node to be made
next on that thread, and looks it up by the number of the node whose backward runs it again: by then
it may have been removed or paused, or be paused no more.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, field
from operator import itemgetter
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import BackwardCFunction
from torch.utils import checkpoint

from ..refusals import cause

_C = torch._C._autograd
MAX_CALLS = 1024  # calls under no_grad that are kept
Reentrant: Any = checkpoint.CheckpointFunction._backward_cls


class PassOptions(NamedTuple):
    """What the user has said of a forward's samples."""

    joint: list[Any] | None = None  # the passes of the same ones
    directed: Sequence[Tensor | None] = ()  # by place


class Answer(NamedTuple):
    """Of a call of the model, or of a module outside of it."""

    serial: int = 0  # its place among those that are recorded
    options: PassOptions = PassOptions()  # when it ran first


NOT_RECORDED = Answer()


@dataclass
class _Notes:
    """Notes of one thread, in order."""

    turns: list[tuple[int, bool]] = field(default_factory=list)  # from a node on: recorded or not
    calls: list[tuple[int, Answer]] = field(default_factory=list)  # of the model, under no_grad
    lost: int = -1  # the latest call that is kept no more
    again: Any = None  # what runs again: a node of a backward
    count: int = 0  # of its calls so far


class Frames:
    """One probe's answers."""

    def __init__(self, recorder: Any) -> None:
        self._recorder, self._born = recorder, recorder.next_node()
        self._notes: dict[int, _Notes] = {}  # by thread

    def answer(self, on: bool, now: Answer, outside: bool) -> Answer:
        """Return the answer to a call of the model, or of a module `outside` of it.

        What runs again is answered as when it ran first, all else by `now` if it is recorded.
        """
        found = now if on else Answer(0, now.options)
        node = self._recorder.running_node()
        if node is not None:
            thread, number = node
            found = self._again(thread, number, on, now, outside)
        notes, first = self.turn(bool(found.serial))
        if not outside and not torch.is_grad_enabled():  # perhaps in a reentrant checkpoint
            notes.calls.append((first, found))
            if len(notes.calls) > MAX_CALLS:
                notes.lost = notes.calls.pop(0)[0]
        return found

    def turn(self, on: bool) -> tuple[_Notes, int]:
        """Note whether this thread's forwards are recorded from its next node on."""
        thread, number = self._recorder.next_node()
        notes = self._notes.setdefault(thread, _Notes())
        if not notes.turns or notes.turns[-1][1] != on:
            notes.turns = [*notes.turns[-MAX_CALLS:], (number, on)]
        return notes, number

    def _again(self, thread: int, number: int, on: bool, now: Answer, outside: bool) -> Answer:
        """Return the answer in the backward of a node: its thread, and its number there."""
        notes, node = self._notes.setdefault(thread, _Notes()), torch._C._current_autograd_node()
        turn = bisect_right(notes.turns, number, key=itemgetter(0)) - 1
        recorded = turn >= 0 and notes.turns[turn][1]
        if thread == self._born[0] and number < self._born[1]:
            return NOT_RECORDED
        if inside_checkpoint(
            "_recomputation_hook"
        ):  # only tensors to save come of the graph that it makes
            return Answer(now.serial) if recorded else NOT_RECORDED
        if outside:
            return now if on and not isinstance(node, Reentrant) else NOT_RECORDED
        if not isinstance(node, BackwardCFunction):
            return now if recorded else NOT_RECORDED
        task = torch._C._current_graph_task_id()
        notes.count = notes.count + 1 if notes.again == (task, number) else 0
        notes.again = task, number
        if number < notes.lost:
            self._recorder.refuse(-1, cause("forgotten", many=MAX_CALLS))
            return NOT_RECORDED
        call = bisect_right(notes.calls, number, key=itemgetter(0)) + notes.count
        if call >= len(notes.calls):  # it ran first when there was no probe, or is no checkpoint
            return now if on and not isinstance(node, Reentrant) else NOT_RECORDED
        before, found = notes.calls[call]
        if not _C._get_current_graph_task_keep_graph():  # never again: the options may go
            notes.calls[call] = before, Answer(found.serial)
        return found


def inside_checkpoint(kind: str) -> bool:
    """Return whether hooks of this kind of torch's checkpoints are in force on this thread."""
    found: list[Any] = []
    try:
        while (hooks := _C._top_saved_tensors_default_hooks(True)) is not None:
            found.append(hooks)
            _C._pop_saved_tensors_default_hooks()
    finally:
        for hooks in reversed(found):
            _C._push_saved_tensors_default_hooks(*hooks)
    return any(getattr(unpack, "__qualname__", "").startswith(f"{kind}.") for _, unpack in found)
