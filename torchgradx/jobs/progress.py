"""How far a job has come: a bar of tqdm's where it is installed, else a line now and then."""

from __future__ import annotations

import importlib
import sys
import time
from typing import Any

__all__ = ["bar"]

EVERY = 10.0  # seconds between lines


class Lines:
    """What tqdm would draw, in lines on stderr."""

    def __init__(self, total: int, initial: int, shown: bool, desc: str) -> None:
        self._every = EVERY if shown else float("inf")
        self._total, self._done, self._initial, self._desc = total, initial, initial, desc
        self._begun = self._told = time.monotonic()

    def update(self, n: int) -> None:
        self._done += n
        now = time.monotonic()
        if now - self._told > self._every:
            self._told = now
            rate = (self._done - self._initial) / (now - self._begun)
            left = (self._total - self._done) / rate if rate else float("nan")
            said = f"{self._desc}: {self._done} of {self._total}, {left:.0f} s left"
            print(said, file=sys.stderr, flush=True)

    def close(self) -> None:
        pass


def bar(total: int, initial: int, shown: bool, desc: str = "scoring") -> Any:
    """Return an object with update(n) and close()."""
    try:
        tqdm = importlib.import_module("tqdm").tqdm
    except ImportError:
        return Lines(total, initial, shown, desc)
    return tqdm(total=total, initial=initial, desc=desc, unit="sample", disable=not shown)
