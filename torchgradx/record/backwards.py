"""A backward that fails leaves nothing behind.

What a backward adds to the record counts under its graph task's number. The engine gets a
callback for the end; where it drops that uncalled, the backward was interrupted, and what it
added is taken back at once. A backward inside of another (reentrant checkpoints) ends with it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import torch

from ..hooks.copies import untraced
from ..hooks.engine import at_the_end


class Backwards:
    """Backwards under way that have reached passes of one probe."""

    def __init__(
        self,
        recorder: Any,
        over: Callable[[list[int], bool], None],
        finished: Callable[[list[Any]], None],
    ) -> None:
        """finished: called within the outermost backward, when all else is done, with the passes
        that it was the first to come to. over: called after each."""
        self._recorder, self._over, self._finished = recorder, over, finished
        self.open: dict[int, _Backward] = {}  # by graph task

    def reach(self, run: Any) -> None:
        """Note that the backward that runs now reaches a pass; None: only its number is wanted."""
        task = torch._C._current_graph_task_id()
        if task == -1:
            return
        backward = self._present(task)
        if run is not None and not any(b.knows(run) for b in list(self.open.values())):
            backward.add(run)

    def _present(self, task: int) -> _Backward:
        found = self.open.get(task)
        if found is None:
            found = self.open[task] = _Backward(task, self._ended, self._finished)
            self._recorder.open(task)
            at_the_end(_End(found))
        return found

    def sweep(self) -> None:
        """End, outside of any backward, those that an exception's traceback keeps alive."""
        if self.open and torch._C._current_graph_task_id() == -1:
            for backward in list(self.open.values()):
                if backward.thread == threading.get_ident():
                    backward.end()

    def at_rest(self) -> bool:
        """Return True if none runs, on this thread at all, or on others that reached a pass."""
        return torch._C._current_graph_task_id() == -1 and not self.under_way()

    def under_way(self) -> bool:
        """Return True if another thread runs one."""
        if not self.open or torch._C._current_graph_task_id() != -1:
            return False
        return not all(backward.over for backward in list(self.open.values()))

    def _ended(self, backward: _Backward) -> None:
        self.open.pop(backward.tasks[0], None)
        if not backward.done:
            backward.undo()
            self._recorder.drop(backward.tasks)
        self._over(backward.tasks, backward.done)
        outer = torch._C._current_graph_task_id()
        if backward.done and outer != -1:
            self._present(outer).take(backward)
        elif backward.done:
            self._recorder.merge(backward.tasks)
        elif outer != -1:
            self._recorder.refuse(-1, "inner_failed")


class _Backward:
    def __init__(
        self,
        task: int,
        ended: Callable[[_Backward], None],
        finished: Callable[[list[Any]], None],
    ) -> None:
        self.tasks = [task]  # and those inside of it, which have ended
        self.begun: list[Any] = []  # passes
        self.before: dict[Any, Any] = {}  # passes that others brought gradients, as they were then
        self.thread = threading.get_ident()
        self.done = self.over = False
        self._calls, self._finished = 0, finished
        self._end: Callable[[_Backward], None] | None = ended

    def knows(self, run: Any) -> bool:
        return run in self.begun or run in self.before

    def add(self, run: Any) -> None:
        if run.recorded:
            self.before[run] = run.state()
        else:
            self.begun.append(run)

    def take(self, inner: _Backward) -> None:
        self.tasks += inner.tasks
        self.begun += [run for run in inner.begun if not self.knows(run)]
        self.before |= {run: s for run, s in inner.before.items() if not self.knows(run)}

    def undo(self) -> None:
        for run in self.begun:
            run.forget()
        for run, state in self.before.items():
            run.restore(state)

    def end(self) -> None:
        """End it, once."""
        end, self._end, self.over = self._end, None, True
        if end is not None:
            end(self)

    def called(self) -> bool:
        """Return True if the engine is to call this once more, at the end."""
        self._calls += 1
        if self._calls < 4:  # after what is done at the end, and at the end of that: it may fail
            return True
        self.done = self.over = True
        if torch._C._current_autograd_node() is None:  # no backward runs around this one
            self._finished(self.begun)
        return False


class _End:
    """Owned by the engine alone, which lets it go in the thread of the backward that ends."""

    def __init__(self, backward: _Backward) -> None:
        self._backward = backward

    @untraced
    def __call__(self) -> None:
        if self._backward.called():
            at_the_end(self)

    @untraced
    def __del__(self) -> None:
        self._backward.end()
