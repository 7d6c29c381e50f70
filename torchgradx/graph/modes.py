"""Dispatch modes of the user, such as a FLOP counter or a selective checkpoint.

They must see the operators of the model alone. A selective checkpoint gives a saved result to the
next operator of the same kind, so one operator of ours would shift all results that follow.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch.utils._python_dispatch import _get_current_dispatch_mode, _pop_mode, _push_mode

from .constant import WatchMode

VMAP_KEY = torch._C._dispatch_key_parse("VmapMode")  # parsing it at each call takes longer


def in_batched_backward() -> bool:
    """Return True in a backward with is_grads_batched=True, whose gradients enter no .grad."""
    return bool(torch._C._dispatch_tls_is_dispatch_key_included(VMAP_KEY))


def without_user_modes() -> AbstractContextManager[None]:
    """Disable the user's dispatch modes above our own. A mode entered inside ends up below them."""
    return _disabled() if torch._C._len_torch_dispatch_stack() else nullcontext()


@contextmanager
def _disabled() -> Iterator[None]:
    popped: list[Any] = []
    while not isinstance(mode := _get_current_dispatch_mode(), (WatchMode, type(None))):
        if hasattr(mode, "_mode_key"):  # fake tensors and tracing: operators need these modes
            break
        popped.append(_pop_mode())
    try:
        yield
    finally:
        for mode in reversed(popped):
            _push_mode(mode)
