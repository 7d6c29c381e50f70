"""Whether what a checkpoint runs again was recorded when it ran first.

A non-reentrant checkpoint has a frame, which torch's hooks on saved tensors hold: those of its
forward, and those of its recomputations. A probe notes there what it answered, and answers the same
again: by then it may have been removed or paused, or be paused no more.
"""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils.checkpoint import _CheckpointFrame

__all__ = ["Frames"]


@dataclass
class _Notes:
    roots: list[bool] = field(default_factory=list)  # by call of the model
    outside: bool = False  # of any call of its modules outside of that


class Frames:
    """One probe's answers."""

    def __init__(self) -> None:
        self._notes: weakref.WeakKeyDictionary[_CheckpointFrame, _Notes] = (
            weakref.WeakKeyDictionary()
        )
        self._calls: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()  # by hook

    def answer(self, on: bool, by_nodes: Callable[[], bool | None], outside: bool) -> bool:
        """Whether to record a call of the model, or `outside` of it; of one that runs again,
        whether it was. `by_nodes`: what the graph says of that where no frame does."""
        hook = (torch._C._autograd._top_saved_tensors_default_hooks(True) or (None,))[0]
        frame, again = _frame_of(hook)
        recorded = self._noted(hook, frame, outside) if frame and again else None
        if recorded is None:
            recorded = by_nodes()
        if recorded is None:
            recorded = on and not again  # when it ran first, the probe was not asked
        if frame and not again:
            notes = self._notes.setdefault(frame, _Notes())
            if outside:
                notes.outside |= recorded
            else:
                notes.roots.append(recorded)
        return recorded

    def _noted(self, hook: Any, frame: _CheckpointFrame, outside: bool) -> bool | None:
        notes = self._notes.get(frame)
        if notes is None:
            return None
        if outside:
            return notes.outside
        call = self._calls.get(hook, 0)
        self._calls[hook] = call + 1
        return notes.roots[call] if call < len(notes.roots) else None


def _frame_of(hook: Any) -> tuple[_CheckpointFrame | None, bool]:
    """That of a checkpoint, if this is its hook; and whether it runs again."""
    for held in _held_by(inspect.unwrap(hook)):
        again = isinstance(held, weakref.ref)
        frame = held() if again else held
        if isinstance(frame, _CheckpointFrame):
            return frame, again
    return None, False


def _held_by(function: Any) -> Iterator[Any]:
    for cell in getattr(function, "__closure__", None) or ():
        with suppress(ValueError):  # nothing yet
            yield cell.cell_contents
