"""Runs tasks in child processes and yields what they report, one message at a time.

A device-side assert or an illegal access spoils a process's CUDA context for good. So each group of
tasks has a process of its own, and one that dies or hangs is a message that says so. Children are
forked from a parent that has imported everything and has not touched CUDA: none of them pays for
the imports again.
"""

from __future__ import annotations

import multiprocessing
import time
import traceback
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

Message = dict[str, Any]
GRACE = 10.0  # seconds beyond its deadline after which a child is killed


class Task(NamedTuple):
    """A generator function and its arguments, all of them picklable."""

    function: Callable[..., Iterator[Message]]
    arguments: tuple[Any, ...] = ()


class Processes:
    """Starts children by fork, or by spawn where CUDA does not start in a forked child."""

    def __init__(self, method: str = "fork") -> None:
        self.method = method

    def run(self, task: Task, deadline: float) -> Iterator[Message]:
        """Yield the messages of one task; the last is {"error": ...} if it did not end well.

        `deadline` is a time.monotonic(); the task is expected to keep it itself.
        """
        context = multiprocessing.get_context(self.method)
        receiver, sender = context.Pipe(duplex=False)
        child = context.Process(target=_child, args=(task, sender), daemon=True)
        child.start()
        sender.close()
        try:
            while True:
                if not receiver.poll(max(0.0, deadline + GRACE - time.monotonic())):
                    yield {"error": "hung: killed after its time"}
                    return
                try:
                    message = receiver.recv()
                except EOFError:
                    child.join()
                    yield {"error": f"its process died with exit code {child.exitcode}"}
                    return
                if message is None:
                    return
                yield message
        finally:
            if child.is_alive():
                child.join(5)
            if child.is_alive():
                child.kill()
            receiver.close()


def _child(task: Task, sender: Connection) -> None:
    try:
        for message in task.function(*task.arguments):
            sender.send(message)
    except Exception as error:  # a row, not a crash of the run
        sender.send({"error": said(error), "traceback": traceback.format_exc()})
    sender.send(None)


def said(error: BaseException, most: int = 300) -> str:
    """Return the error's type and the beginning of its text in one line."""
    text = f"{type(error).__name__}: {' '.join(str(error).split())}"
    return text if len(text) <= most else f"{text[:most]}..."
