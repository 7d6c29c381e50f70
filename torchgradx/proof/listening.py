"""Hooks on parameters that leave nothing behind."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from torch import Tensor

from .. import ops

if ops.NATIVE:
    from .. import _C

__all__ = ["Listening", "forget"]


class Listening:
    def __init__(self) -> None:
        self._handles: list[Any] = []
        self.heard: dict[int, Tensor] = {}  # by id: where our hooks are, or what they left

    def before(self, p: Tensor, hook: Callable[[Tensor], Tensor | None]) -> int:
        """Sees the gradient as it comes, before the user's own hooks change it; its key."""
        handle = p.register_hook(hook)
        hooks: dict[int, Any] = p._backward_hooks  # type: ignore[assignment]
        theirs = {key: h for key, h in hooks.items() if key != handle.id}
        for key in theirs:  # torch calls them as they were put in, whatever move_to_end() says
            del hooks[key]
        hooks.update(theirs)
        return self._keep(p, handle)

    def after(self, p: Tensor, hook: Callable[[Tensor], None]) -> int:
        """Is called once .grad has it; its key."""
        return self._keep(p, p.register_post_accumulate_grad_hook(hook))

    def _keep(self, p: Tensor, handle: Any) -> int:
        self._handles.append(handle)
        self.heard[id(p)] = p
        return handle.id

    def stop(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles = []
        self.leave()

    def leave(self) -> None:
        """Where nobody listens any more, and no backward runs, nothing is left of it."""
        if self.heard and not self._handles and forget(self.heard.values()):
            self.heard = {}


def forget(where: Iterable[Tensor]) -> bool:
    """What hooks that were taken away have left at these: each backward would ask it. False: one
    runs, and may be asking."""
    if not ops.NATIVE:
        return True  # there it stays: every pass is listened to
    return _C.drop_emptied_hooks([p for p in where if p.is_leaf])
