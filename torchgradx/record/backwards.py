"""The backwards under way, each of which leaves nothing in the record if it fails.

What a backward adds is kept under its `task`, the engine's number for it, until it has ended. The
engine calls an _End at the end; if it drops that uncalled, the backward failed, and what it added
is taken back. A backward inside another one (reentrant checkpoints) ends with that.
"""

from __future__ import annotations

import threading
from typing import Any

import torch

from ..extension import Pass, Recorder
from ..hooks.copies import untraced
from ..hooks.engine import at_the_end


class Backwards:
    """The backwards under way that have reached passes of one probe."""

    def __init__(self, recorder: Recorder, over: Any, finished: Any) -> None:
        """over: called after each backward with its tasks, and False if it failed. finished: called
        last in the outermost backward, with the passes that no backward had reached before, and its
        tasks."""
        self._recorder, self._over, self.finished = recorder, over, finished
        self.open: dict[int, _Backward] = {}  # by task

    def reach(self, run: Pass | None) -> None:
        """Note that the current backward reaches a pass; None: only open the backward."""
        task = torch._C._current_graph_task_id()
        if task == -1:
            return
        backward = self._get_or_open(task)
        if run is not None and not any(run in b.reached for b in list(self.open.values())):
            backward.reached[run] = run.state() if run.recorded else None

    def _get_or_open(self, task: int) -> _Backward:
        backward = self.open.get(task)
        if backward is None:
            backward = self.open[task] = _Backward(task, self)
            self._recorder.open(task)
            at_the_end(_End(backward))
        return backward

    def end_failed(self) -> None:
        """End, outside of any backward, failed ones that an exception's traceback keeps alive."""
        if self.open and torch._C._current_graph_task_id() == -1:
            for backward in list(self.open.values()):
                if backward.thread == threading.get_ident():
                    backward.end()

    def is_idle(self) -> bool:
        """Return True if no backward runs on this thread, and none of ours on another."""
        return torch._C._current_graph_task_id() == -1 and not self.is_under_way()

    def is_under_way(self) -> bool:
        """Return True if one of ours runs on another thread."""
        if not self.open or torch._C._current_graph_task_id() != -1:
            return False
        return not all(backward.is_done for backward in list(self.open.values()))

    def end(self, backward: _Backward) -> None:
        """Add what a backward brought to the record, or to the backward around it; or undo it."""
        self.open.pop(backward.tasks[0], None)
        if not backward.is_done:
            backward.undo()
            self._recorder.drop(backward.tasks)
        self._over(backward.tasks, backward.is_done)
        outer = torch._C._current_graph_task_id()
        if backward.is_done and outer != -1:
            self._get_or_open(outer).take(backward)
        elif backward.is_done:
            self._recorder.merge(backward.tasks)
        elif outer != -1:
            self._recorder.refuse(-1, "inner_failed")


class _Backward:
    def __init__(self, task: int, owner: Backwards) -> None:
        self.tasks = [task]  # and those of backwards inside it that have ended
        self.thread = threading.get_ident()
        self.is_done = False  # True: it has ended, and did not fail
        # The state of each pass before this backward; None: no backward had reached it.
        self.reached: dict[Any, Any] = {}
        self._owner, self._has_ended = owner, False

    def take(self, inner: _Backward) -> None:
        """Take over what a backward inside this one has reached."""
        self.tasks += inner.tasks
        self.reached = {**inner.reached, **self.reached}

    def undo(self) -> None:
        for run, state in self.reached.items():
            if state is None:
                run.forget()
            else:
                run.restore(state)

    def end(self) -> None:
        """End it, once."""
        if not self._has_ended:
            self._has_ended = True
            self._owner.end(self)

    def finish(self) -> None:
        self.is_done = True
        if torch._C._current_autograd_node() is None:  # no backward runs around this one
            new = [run for run, state in self.reached.items() if state is None]
            self._owner.finished(new, self.tasks)


class _End:
    """Callback that the engine alone owns, and drops in the thread of the backward that ends."""

    def __init__(self, backward: _Backward) -> None:
        self._backward, self._calls = backward, 0

    @untraced
    def __call__(self) -> None:
        self._calls += 1
        if self._calls < 4:  # after what others do at the end, which may fail
            at_the_end(self)
        else:
            self._backward.finish()

    @untraced
    def __del__(self) -> None:
        self._backward.end()
