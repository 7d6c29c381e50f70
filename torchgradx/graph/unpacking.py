"""Tensors that nodes saved through hooks, and how often they can be unpacked.

A node may be asked for a gradient before the engine runs it. A non-reentrant checkpoint unpacks
each saved tensor once per backward; offloading unpacks it any number of times. Of other hooks
nothing is known.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from functools import wraps
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import BackwardCFunction
from torch.utils import checkpoint

from ..extension import _C, NATIVE
from ..sharding import is_fsdp_node
from .functions import can_ask_function

SavedHook = tuple[Callable[[Any], Tensor], Any]  # the unpack hook, and its argument
SAVED_NAMES: dict[str, list[str]] = {}  # attributes of saved tensors, by the name of the node
Holder: Any = getattr(checkpoint, "_Holder", ())  # what a checkpoint saves in place of a tensor
INDICES = (torch.int32, torch.int64)
stack: Any = torch._C._autograd  # of saved tensors' hooks, for each thread


class Kept(NamedTuple):
    """An index that was saved through a hook, beside what the hook made of it."""

    packed: Any
    value: Tensor
    version: int  # of the value, when it was saved


def take_hooks() -> list[Any]:
    """Take all hooks off the thread's stack; the lowest comes first."""
    taken = []
    while (hooks := stack._top_saved_tensors_default_hooks(True)) is not None:
        stack._pop_saved_tensors_default_hooks()
        taken.append(hooks)
    return taken[::-1]


def put_hooks(hooks: Iterable[Any]) -> None:
    for pair in hooks:
        stack._push_saved_tensors_default_hooks(*pair)


def keep_indices(block: Any, hooks: Any) -> None:
    """Put hooks on the thread's stack that call these, and keep the indices that nodes save, for
    `saved_value` to read. Autograd gets what the user's hooks give. block: what they are for."""
    user_pack, user_unpack = hooks

    def pack(t: Tensor) -> Any:
        packed, is_index = user_pack(t), t.dtype in INDICES and t.dim() <= 3  # not of a MaxPool2d
        if not is_index or isinstance(packed, Kept):  # by a block around this one
            return packed
        return Kept(packed, t.detach(), t._version)

    @wraps(user_unpack)
    def unpack(saved: Any) -> Tensor:
        return user_unpack(_packed(saved))

    pack.block = block  # type: ignore[attr-defined]
    put_hooks([(pack, unpack)])


def can_ask(node: Any) -> tuple[bool, bool]:
    """Return whether a node can be asked before the engine runs it, and whether it saved through
    hooks."""
    if isinstance(node, BackwardCFunction):
        return is_fsdp_node(node) or can_ask_function(node), False
    hooks = _saved_hooks(node)
    return hooks is not None and all(map(_can_repeat, hooks)), bool(hooks)


def can_run_twice(node: Any) -> bool:
    """Return True if no hook is known to prevent a second backward through a node."""
    return all(map(_can_repeat, _saved_hooks(node) or ()))


def is_copy_slices(node: Any) -> bool:
    """Return True if a node hides another one: that of an in-place operator on a view."""
    return type(node).__name__ == "CopySlices"


def are_offloaded(nodes: Iterable[Any]) -> bool:
    """Return True if all hooks of these nodes unpack a tensor any number of times."""
    return all(_offloads(hook) for node in nodes for hook, _ in _saved_hooks(node) or ())


def has_checkpoints(nodes: Iterable[Any]) -> bool:
    return any(isinstance(data, Holder) for node in nodes for _, data in _saved_hooks(node) or ())


@contextlib.contextmanager
def keep_handles(node: Any) -> Iterator[None]:
    """Let a node unpack checkpointed tensors inside, and the engine unpack them again later."""
    hooks = [(hook, data) for hook, data in _saved_hooks(node) or () if isinstance(data, Holder)]
    before = [(holder, holder.handles) for _, holder in hooks]
    try:
        for holder, handles in before:
            holder.handles = _Handles(handles)
        for unpack, holder in hooks:
            unpack(holder)  # recompute now: inside vmap the forward would run differently
        yield
    finally:
        for holder, handles in before:
            handles.update(holder.handles)
            holder.handles = handles


class _Handles(dict[Any, Any]):
    """Handles of recomputed tensors, by backward. A checkpoint sets one to None after it unpacked
    the tensor, and refuses to unpack it again; here the handle stays."""

    def __setitem__(self, backward: Any, handle: Any) -> None:
        if handle is not None:
            super().__setitem__(backward, handle)


def _saved_hooks(node: Any) -> list[SavedHook] | None:
    """Return the unpack hooks of a node's saved tensors with their arguments, or None if the node
    does not show them."""
    if type(node).__name__ == "CppFunction":
        hooks: list[SavedHook] | None = _C.packed(node) if NATIVE else None
        return None if hooks is None else [(hook, _packed(data)) for hook, data in hooks]
    kind = node.name()
    if kind not in SAVED_NAMES:
        SAVED_NAMES[kind] = [name for name in dir(node) if name.startswith("_raw_saved")]
    saved = [getattr(node, name) for name in SAVED_NAMES[kind]]
    flat = [t for s in saved for t in (s if isinstance(s, (list, tuple)) else [s])]
    pairs = [(getattr(t, "unpack_hook", t), getattr(t, "data", None)) for t in flat]
    return [(hook, _packed(data)) for hook, data in pairs if hook is not None]


def _packed(data: Any) -> Any:
    """Return what the user's hook made of a tensor."""
    return data.packed if isinstance(data, Kept) else data


def _can_repeat(saved: SavedHook) -> bool:
    hook, data = saved
    return isinstance(data, Holder) or _offloads(hook)


def _offloads(hook: Any) -> bool:
    return getattr(hook, "__qualname__", "").startswith("save_on_cpu.")


def saves_through_hooks() -> bool:
    """Return True if saved tensors go through hooks now: a checkpoint's, offloading, or others."""
    return stack._top_saved_tensors_default_hooks(True) is not None


def saved_value(node: Any, key: str) -> Any:
    """Return what a node saved; None if it is absent, or saved through hooks and not kept."""
    raw: Any = getattr(node, f"_raw_saved_{key}", None)
    tensors = raw if isinstance(raw, (list, tuple)) else [raw]
    if not any(map(is_hooked, tensors)):
        return getattr(node, f"_saved_{key}", None)
    kept = [t.data if is_hooked(t) else None for t in tensors]
    if not all(k is None or (isinstance(k, Kept) and k.value._version == k.version) for k in kept):
        return None
    values = [k and k.value for k in kept]
    return values if isinstance(raw, (list, tuple)) else values[0]


def is_hooked(raw: Any) -> bool:
    """Return True if a raw saved tensor went through hooks."""
    return getattr(raw, "unpack_hook", None) is not None


def save_leaf(leaf: Any) -> Any:
    """Return an argument as a node would save it: a tensor goes through the current hooks."""
    if not isinstance(leaf, Tensor):
        return leaf
    return _C.Saved(leaf) if NATIVE else leaf.detach()


def restore_leaf(leaf: Any) -> Any:
    return leaf.unpack() if NATIVE and isinstance(leaf, _C.Saved) else leaf
