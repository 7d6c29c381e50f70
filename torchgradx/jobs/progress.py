"""Progress of a job: tqdm's bar, where it is installed."""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Callable, Iterator


@contextlib.contextmanager
def progress(total: int, done: int, shows: bool) -> Iterator[Callable[[int], object]]:
    """Yield a function that takes the number of samples scored since its last call."""
    tqdm = None
    with contextlib.suppress(ImportError):
        tqdm = importlib.import_module("tqdm").tqdm if shows else None
    if tqdm is None:
        yield lambda count: None
        return
    with tqdm(total=total, initial=done, desc="scoring", unit="sample") as bar:
        yield bar.update
