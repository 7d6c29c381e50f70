"""Modes that hear every operation, as a selective checkpoint's or a counter of FLOP, hear those of
the model alone: what they keep of an operation is given to the next one of its kind."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch.utils._python_dispatch import _get_current_dispatch_mode, _pop_mode, _push_mode

from ..proof.taint import Taint

__all__ = ["unheard"]


@contextmanager
def unheard() -> Iterator[None]:
    """The modes above the latest Taint are off inside; one that is entered here is below them."""
    taken: list[Any] = []
    while not isinstance(mode := _get_current_dispatch_mode(), (Taint, type(None))):
        if hasattr(mode, "_mode_key"):  # fake tensors, tracing: nothing runs without
            break
        taken.append(_pop_mode())
    try:
        yield
    finally:
        for mode in reversed(taken):
            _push_mode(mode)
