"""Modes that hear every operation, as a selective checkpoint's or a counter of FLOP, hear those of
the model alone: what they keep of an operation is given to the next one of its kind."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch.utils._python_dispatch import _get_current_dispatch_mode, _pop_mode, _push_mode

from .constant import WatchMode

SEVERAL = torch._C._dispatch_key_parse("VmapMode")  # by name at each call it takes longer


def in_batched_backward() -> bool:
    """Return True inside a backward of is_grads_batched=True: its gradients are nobody's .grad."""
    return bool(torch._C._dispatch_tls_is_dispatch_key_included(SEVERAL))


def without_user_modes() -> AbstractContextManager[None]:
    """Disable modes above our own; one that is entered inside is below them."""
    return _off() if torch._C._len_torch_dispatch_stack() else nullcontext()


@contextmanager
def _off() -> Iterator[None]:
    taken: list[Any] = []
    while not isinstance(mode := _get_current_dispatch_mode(), (WatchMode, type(None))):
        if hasattr(mode, "_mode_key"):  # fake tensors, tracing: nothing runs without
            break
        taken.append(_pop_mode())
    try:
        yield
    finally:
        for mode in reversed(taken):
            _push_mode(mode)
