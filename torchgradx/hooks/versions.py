"""Detects writes into tensors that we keep while others may write into them."""

from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor


class Versions:
    """Version counters of some tensors; inference tensors have none and are left out."""

    def __init__(self, tensors: Iterable[Tensor]) -> None:
        self._versions = [(t, t._version) for t in tensors if not t.is_inference()]

    def stand(self) -> bool:
        """Return True if no tensor was written into since."""
        return all(t._version == version for t, version in self._versions)
