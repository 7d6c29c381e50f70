"""What nodes saved through hooks, where one is asked before the engine runs it.

A checkpoint that is not reentrant gives each saved tensor out once in a backward; offloading, as
often as it is asked; of other hooks nobody knows.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import BackwardCFunction
from torch.utils import checkpoint

from ..ops import NATIVE
from ..sharding import is_fsdp_node

if NATIVE:
    from .._C import Saved, packed

Unpack = Callable[[Any], Tensor]
SavedHook = tuple[Unpack, Any]  # the hook that unpacks, and what it is given
SAVED_NAMES: dict[str, list[str]] = {}  # by a node's name: the attributes that it saved
Holder: Any = getattr(checkpoint, "_Holder", ())  # what a checkpoint gives for a tensor


def can_ask(node: Any) -> tuple[bool, bool]:
    """Return True if a node may be asked, and be run by the engine after that; and whether it saved
    through hooks."""
    if isinstance(node, BackwardCFunction):  # a user's, which only the engine can call
        return is_fsdp_node(node), False
    found = _packed(node)
    return found is not None and all(map(_known, found)), bool(found)


def can_run_twice(node: Any) -> bool:
    """Return True if two backwards may run through a node, as far as is seen."""
    return all(map(_known, _packed(node) or ()))


def is_copy_slices(node: Any) -> bool:
    """Return True if a node wraps another that does not show: an in-place operation on a view."""
    return type(node).__name__ == "CopySlices"


def are_offloaded(nodes: Iterable[Any]) -> bool:
    """Return True if all hooks around these nodes give a tensor as often as it is asked."""
    return all(_offloads(hook) for node in nodes for hook, _ in _packed(node) or ())


def has_checkpoints(nodes: Iterable[Any]) -> bool:
    return any(isinstance(data, Holder) for node in nodes for _, data in _packed(node) or ())


@contextlib.contextmanager
def keep_handles(node: Any) -> Iterator[None]:
    """Keep for the engine what the node asks checkpoints for inside."""
    found = [(hook, data) for hook, data in _packed(node) or () if isinstance(data, Holder)]
    before = [(holder, holder.handles) for _, holder in found]
    try:
        for holder, handles in before:
            holder.handles = _Handles(handles)
        for unpack, holder in found:
            unpack(holder)  # now: a forward that ran again within vmap would be another one
        yield
    finally:
        for holder, handles in before:
            handles.update(holder.handles)
            holder.handles = handles


class _Handles(dict[Any, Any]):
    """Table by backward of what a forward that ran again has saved. Reading takes an entry out."""

    def __setitem__(self, backward: Any, handle: Any) -> None:
        if handle is not None:
            super().__setitem__(backward, handle)


def _packed(node: Any) -> list[SavedHook] | None:
    """Return the hooks of a node's saved tensors, and their data; None: they do not show."""
    if type(node).__name__ == "CppFunction":
        found: list[SavedHook] | None = packed(node) if NATIVE else None
        return found
    kind = node.name()
    if kind not in SAVED_NAMES:
        SAVED_NAMES[kind] = [name for name in dir(node) if name.startswith("_raw_saved")]
    save_leaf = [getattr(node, name) for name in SAVED_NAMES[kind]]
    flat = [t for s in save_leaf for t in (s if isinstance(s, (list, tuple)) else [s])]
    hooks = ((getattr(t, "unpack_hook", t), t) for t in flat)
    return [(hook, getattr(t, "data", None)) for hook, t in hooks if hook is not None]


def _known(packed: SavedHook) -> bool:
    hook, data = packed
    return isinstance(data, Holder) or _offloads(hook)


def _offloads(hook: Unpack) -> bool:
    return getattr(hook, "__qualname__", "").startswith("save_on_cpu.")


def saves_through_hooks() -> bool:
    """Return True if tensors are saved through hooks now, a checkpoint's or others."""
    return torch._C._autograd._top_saved_tensors_default_hooks(True) is not None


def save_leaf(leaf: Any) -> Any:
    """Return an argument as a node would save it: through the hooks in force."""
    if not isinstance(leaf, Tensor):
        return leaf
    return Saved(leaf) if NATIVE else leaf.detach()


def restore_leaf(leaf: Any) -> Any:
    return leaf.unpack() if NATIVE and isinstance(leaf, Saved) else leaf
