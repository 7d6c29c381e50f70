"""Whether tensors that are kept, though others may write into them, are as they were."""

from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor


class Versions:
    def __init__(self, tensors: Iterable[Tensor]) -> None:
        self._seen = [(t, t._version) for t in tensors if not t.is_inference()]

    def stand(self) -> bool:
        return all(t._version == version for t, version in self._seen)
