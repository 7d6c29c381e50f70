"""What a checkpoint runs again is recorded if it was when it ran first.

A probe that is asked in a checkpoint's forward notes its answer, and gives the same again: by then
it may have been removed or paused, or be paused no more. A reentrant checkpoint is known by its
Function, others by a frame that torch's hooks on saved tensors hold: those of the forward, and
those of whatever runs it again.
"""

from __future__ import annotations

import contextlib
import inspect
import sys
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import BackwardCFunction
from torch.utils import checkpoint

__all__ = ["NONE", "Answer", "Frames", "Told", "enclosing", "holders", "runs_again_once"]

_C = torch._C._autograd
Frame: Any = getattr(checkpoint, "_CheckpointFrame", ())  # of one that is not reentrant
Reentrant: Any = checkpoint.CheckpointFunction._backward_cls


def enclosing() -> list[Any]:
    """The nodes whose own backwards run on this thread, the innermost first: a reentrant
    checkpoint's runs another."""
    return [function for name, function in _functions() if name == "backward"]


def _functions() -> Iterator[tuple[str, Any]]:
    frame = sys._getframe()
    while (frame := frame.f_back) is not None:  # type: ignore[assignment]
        code = frame.f_code
        first = code.co_varnames[0] if code.co_argcount else "self"
        if code.co_name in ("forward", "backward") and first != "self":  # a look keeps what it held
            given = frame.f_locals.get(first)
            if isinstance(given, BackwardCFunction):
                yield code.co_name, given


class _Around(NamedTuple):
    """The checkpoints whose forwards run on this thread; the one around these that runs again, and
    what tells this time from others."""

    forwards: list[Any]
    again: Any = None
    time: Any = None


NOWHERE = _Around([])  # no forward of a checkpoint, and no backward


class Told(NamedTuple):
    """What the user has said of a forward's samples."""

    joint: list[Any] | None = None  # the passes of the same ones
    directed: Sequence[Tensor | None] = ()  # by place


class Answer(NamedTuple):
    """Of a call of the model, or of a module outside of it."""

    serial: int = 0  # its place among those that are recorded
    told: Told = Told()  # when it ran first


NONE = Answer()


@dataclass
class _Notes:
    calls: list[Answer] = field(default_factory=list)  # of the model: as given
    outside: Answer = NONE  # the latest of its modules, called outside of that and recorded
    again: dict[Any, int] = field(default_factory=dict)  # by time: how many calls have come


class Frames:
    """One probe's answers."""

    def __init__(self) -> None:
        self._notes: weakref.WeakKeyDictionary[Any, _Notes] = weakref.WeakKeyDictionary()

    def answer(
        self, on: bool, now: Answer, by_nodes: Callable[[], bool | None], outside: bool
    ) -> Answer:
        """To a call of the model, or `outside` of it: of one that runs again, what it was; else as
        `now`, if it is recorded. `by_nodes`: what the graph says of that, where nothing is
        noted."""
        around = _around()
        if around is NOWHERE:
            return now if on else Answer(0, now.told)
        found = self._noted(around, outside)
        if found is None:
            known = by_nodes()
            if known is None:  # a checkpoint that has no notes ran when this probe was not there
                known = on and not isinstance(around.again, (Frame, Reentrant))
            found = now if known else Answer(0, now.told)
        for frame in around.forwards:
            notes = self._notes.setdefault(frame, _Notes())
            if outside:
                notes.outside = found if found.serial else notes.outside
            else:
                notes.calls.append(found)
        # Only tensors to save come of the graph that one of these makes again.
        return Answer(found.serial) if isinstance(around.again, Frame) else found

    def _noted(self, around: _Around, outside: bool) -> Answer | None:
        notes = None if around.again is None else self._notes.get(around.again)
        if notes is None:
            return None
        if outside:
            return notes.outside
        call = notes.again.get(around.time, 0)
        notes.again[around.time] = call + 1
        return notes.calls[call] if call < len(notes.calls) else None


def runs_again_once(unpack: Callable[..., Any]) -> bool:
    """Whether it is a checkpoint's hook, and what that runs its layers in serves no second time."""
    frames = (held for held in _held_by(unpack) if isinstance(held, Frame))
    return any(
        isinstance(held, contextlib._GeneratorContextManager)
        for frame in frames
        for held in _held_by(frame.recompute_fn)
    )


def holders(unpack: Callable[..., Any] | None) -> list[Any]:
    """Of all that the checkpoint whose hook this is has saved, what is still there."""
    frames = (held for held in _held_by(unpack) if isinstance(held, Frame))
    found = (ref() for frame in frames for ref in frame.weak_holders)
    return [holder for holder in found if holder is not None]


def _around() -> _Around:
    task, plain = torch._C._current_graph_task_id(), torch.is_grad_enabled()
    if task == -1 and plain and _C._top_saved_tensors_default_hooks(True) is None:
        return NOWHERE
    forwards: list[Any] = []
    for hooks in _hooks():  # whoever's
        for held in _held_by(inspect.unwrap(hooks[0])):
            if isinstance(held, Frame):
                forwards.append(held)
            elif isinstance(held, weakref.ref) and isinstance(held(), Frame):
                return _Around(forwards, held(), hooks)
    if task == -1 and plain:  # no reentrant one runs
        return _Around(forwards)
    for name, function in _functions():
        if name == "backward":
            return _Around(forwards, function, task)
        forwards.append(function)
    return _Around(forwards)


def _hooks() -> list[Any]:
    """Those on saved tensors that are in force on this thread, the innermost first."""
    found: list[Any] = []
    try:
        while (hooks := _C._top_saved_tensors_default_hooks(True)) is not None:
            found.append(hooks)
            _C._pop_saved_tensors_default_hooks()
    finally:
        for hooks in reversed(found):
            _C._push_saved_tensors_default_hooks(*hooks)
    return found


def _held_by(function: Any) -> Iterator[Any]:
    for cell in getattr(function, "__closure__", None) or ():
        with contextlib.suppress(ValueError):  # nothing yet
            yield cell.cell_contents
