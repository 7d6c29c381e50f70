"""Processes of their own, so that no measurement finds what another has left in the heap.

A script started anew has the allocator and the threads that it is to be measured with; it forks one
process more for each measurement, which so need not import torch again. Rows are lines of JSON.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

# Under "warm", glibc keeps freed memory, so that no page faults are timed (a fault costs near two
# microseconds, and even the plain step moves with it); "default" is what a user has who sets
# nothing. Under "tight" a tensor's memory goes back as it is freed, so that a process has resident
# what it needs: what the default heap keeps besides differs by a tenth from run to run.
HEAPS = {
    "warm": {
        "MALLOC_MMAP_MAX_": "0",
        "MALLOC_TRIM_THRESHOLD_": "100000000000",
        "MALLOC_TOP_PAD_": "67108864",
    },
    "default": {},
    "tight": {"MALLOC_MMAP_THRESHOLD_": str(2**17)},
}


def rows_of(script: str, *arguments: str, heap: str, threads: int) -> Iterator[Any]:
    """What the script prints."""
    command = [sys.executable, str(Path(__file__).parent / script), *arguments]
    environment = {**os.environ, **HEAPS[heap], "OMP_NUM_THREADS": str(threads)}
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) as child:
        assert child.stdout
        for line in child.stdout:
            yield json.loads(line)
    if child.returncode:
        raise SystemExit(f"{script} on the {heap} heap and {threads} threads failed: see above")


def forked(measure: Callable[..., dict[str, Any]], *arguments: object) -> dict[str, Any]:
    """What it returns; {"verdict": "killed"} of one that took too much memory."""
    context = multiprocessing.get_context("fork")
    here, there = context.Pipe(duplex=False)
    child = context.Process(target=send, args=(there, measure, *arguments))
    child.start()
    there.close()
    try:
        result: dict[str, Any] = here.recv()
    except EOFError:
        child.join()
        if child.exitcode != -9:
            raise SystemExit(f"{measure.__name__}{arguments} failed: see above") from None
        result = {"verdict": "refuses: killed, out of memory"}
    child.join()
    return result


def send(there: Connection, measure: Callable[..., dict[str, Any]], *arguments: object) -> None:
    there.send(measure(*arguments))
    there.close()


def say(row: object) -> None:
    print(json.dumps(row), flush=True)
