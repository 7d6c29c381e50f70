"""What is known of memory, which views and in-place writes share."""

from __future__ import annotations

from typing import Any, Generic, TypeVar

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

__all__ = ["ByMemory", "storage_of", "view_of"]

T = TypeVar("T")


class ByMemory(Generic[T]):
    def __init__(self) -> None:
        # A weak reference keeps the address of what is gone.
        self._known: dict[int, tuple[StorageWeakRef, T]] = {}

    def __bool__(self) -> bool:
        return bool(self._known)

    def get(self, t: Tensor | torch.UntypedStorage, default: T) -> T:
        storage = storage_of(t)
        known = None if storage is None else self._known.get(storage._cdata)
        return known[1] if known else default

    def keep(self, t: Tensor, value: T) -> None:
        storage = storage_of(t)
        if storage is not None:
            self._known[storage._cdata] = StorageWeakRef(storage), value

    def forget(self, t: Tensor) -> None:
        storage = storage_of(t)
        if storage is not None:
            self._known.pop(storage._cdata, None)


def storage_of(t: Tensor | torch.UntypedStorage) -> torch.UntypedStorage | None:
    """None: some have none, as those of mkldnn."""
    try:
        return t if isinstance(t, torch.UntypedStorage) else _numbers_of(t).untyped_storage()
    except Exception:
        return None


def view_of(t: Tensor) -> Any:
    """A tensor's memory, and how it looks at it; several views of one memory differ in this."""
    try:
        numbers = _numbers_of(t)
        strides = t.stride() if numbers is t else ()
        return numbers.untyped_storage()._cdata, numbers.storage_offset(), t.shape, strides
    except Exception:  # some have no storage, nested ones no sizes
        return None


def _numbers_of(t: Tensor) -> Tensor:
    if t.layout is torch.strided:
        return t
    return t._values() if t.layout is torch.sparse_coo else t.values()
