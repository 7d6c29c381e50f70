"""Progress of a job: tqdm's bar where it is installed, else a line on stderr now and then."""

from __future__ import annotations

import contextlib
import importlib
import sys
import time
from collections.abc import Callable, Iterator

EVERY = 10.0  # seconds between lines


@contextlib.contextmanager
def progress(total: int, done: int, shown: bool) -> Iterator[Callable[[int], object]]:
    """Yield a function that takes the number of samples scored since its last call."""
    if not shown:
        yield lambda count: None
        return
    try:
        tqdm = importlib.import_module("tqdm").tqdm
    except ImportError:
        yield _lines(total, done)
        return
    with tqdm(total=total, initial=done, desc="scoring", unit="sample") as bar:
        yield bar.update


def _lines(total: int, done: int) -> Callable[[int], None]:
    begun = last = time.monotonic()
    first = done

    def update(count: int) -> None:
        nonlocal done, last
        done, now = done + count, time.monotonic()
        if now - last > EVERY:
            last, left = now, (total - done) * (now - begun) / (done - first)
            print(f"scoring: {done} of {total}, {left:.0f} s left", file=sys.stderr, flush=True)

    return update
