"""Reads the arguments of a model: the tensors in them, the batch size N, where the samples are.

Nested tensors have no sizes and never show N.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Iterator, Mapping, MutableMapping
from dataclasses import fields, is_dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributions import Distribution
from torch.nn.utils.rnn import PackedSequence, pack_sequence, pad_packed_sequence
from torch.utils._pytree import tree_leaves, tree_map


def entries_of(leaf: Any) -> dict[Any, Any] | None:
    """Return the parts of a mapping, dataclass or distribution, which a pytree takes for a leaf."""
    if isinstance(leaf, MutableMapping):
        return dict(leaf)
    if is_dataclass(leaf) and not isinstance(leaf, type):
        named = {field.name: getattr(leaf, field.name, None) for field in fields(leaf)}
        return named | getattr(leaf, "__dict__", {})
    return vars(leaf) if isinstance(leaf, Distribution) else None


def leaves_in(tree: Any) -> Iterator[Any]:
    """Yield the leaves of a tree in order, those of mappings, dataclasses and distributions too."""
    for leaf in tree_leaves(tree):
        parts = entries_of(leaf)
        yield from [leaf] if parts is None else leaves_in(list(parts.values()))


def map_leaves(function: Callable[[Any], Any], tree: Any) -> Any:
    """Return a copy of a tree with function(leaf) in place of each of `leaves_in`."""

    def mapped(leaf: Any) -> Any:
        parts = entries_of(leaf)
        if parts is None:
            return function(leaf)
        other, is_mapping = copy.copy(leaf), isinstance(leaf, MutableMapping)
        put: Any = type(leaf).__setitem__ if is_mapping else object.__setattr__  # of a frozen one
        for name, part in parts.items():
            put(other, name, map_leaves(function, part))
        return other

    # A packed sequence moves some of its parts alone.
    return tree_map(mapped, tree, is_leaf=lambda part: isinstance(part, PackedSequence))


def tensors_in(tree: Any) -> list[Tensor]:
    """Return the tensors of arguments or outputs in order; see `leaves_in`."""
    if isinstance(tree, Tensor):
        return [tree]
    if type(tree) in (tuple, list, dict):  # tree_leaves takes ten times as long
        parts = tree.values() if type(tree) is dict else tree
        return [t for part in parts if part is not None for t in tensors_in(part)]
    return [leaf for leaf in leaves_in(tree) if isinstance(leaf, Tensor)]


def sized_tensors_in(tree: Any) -> list[Tensor]:
    """Return the tensors of arguments or outputs in order, without nested tensors."""
    return [t for t in tensors_in(tree) if _has_sizes(t)]


def ones_of(first: Tensor) -> tuple[int, ...]:
    """Return the dimensions of size 1 of a model's first tensor, if it has three or more: as many
    flat rows may be [T, N, 1], in the order of a layout, or [T / 2, N, 2]."""
    return tuple(d for d, size in enumerate(first.shape) if size == 1 and first.dim() > 2)


def batch_size(options: Mapping[str, Any], args: Any, kwargs: Any) -> int | None:
    """Return N from the option batch_size, else from the first tensor argument that shows it."""
    size = options["batch_size"]
    if callable(size):
        n = size(args, kwargs)
        if not hasattr(n, "__index__") or isinstance(n, bool):
            raise TypeError(f"batch_size(args, kwargs) must return an int; got {n!r}")
        if n < 1 and (n < 0 or all(t.numel() for t in tensors_in((args, kwargs)))):
            raise ValueError(f"batch_size(args, kwargs) must return 1 or more; got {n}")
        return n if isinstance(n, int) else int(n)  # a compiler's symbolic size stays symbolic
    if size is not None:
        return int(size)
    first = args[0] if args else None
    tensors = [first] if isinstance(first, Tensor) and first.dim() else tensors_in((args, kwargs))
    for tensor in tensors:
        if tensor.dim() and _has_sizes(tensor):
            return size_of_batch(tensor, options["batch_dim"])
    return None


def sample_rows(options: Mapping[str, Any], args: Any, kwargs: Any) -> tuple[Tensor, int] | None:
    """Return the ids that the user's `sample_ids` gives, and N; None if there is no such option."""
    if options["sample_ids"] is None:
        return None
    ids = options["sample_ids"](args, kwargs)
    is_whole = isinstance(ids, Tensor) and not (ids.is_floating_point() or ids.is_complex())
    if not is_whole or ids.dtype is torch.bool:
        got = ids.dtype if isinstance(ids, Tensor) else type(ids).__name__
        raise TypeError(f"sample_ids(args, kwargs) must return a LongTensor; got {got}")
    if ids.dim() not in (1, 2):
        raise ValueError(
            f"sample_ids(args, kwargs) must return ids [rows] or [B, T]; got shape "
            f"{list(ids.shape)}"
        )
    highest, size = int(ids.max()) if ids.numel() else -1, options["batch_size"]
    n = highest + 1 if size is None else size(args, kwargs) if callable(size) else size
    if highest >= n:
        raise ValueError(f"sample_ids(args, kwargs) has the id {highest}, and batch_size= is {n}")
    return ids.detach().long().clone(), n


def is_broadcast(options: Mapping[str, Any], arguments: Any, outputs: Any) -> bool:
    """Return True if N = 1 was read off a first tensor that is broadcast against larger ones."""
    dim = options["batch_dim"]
    shapes = [t.shape for t in sized_tensors_in(arguments) if t.dim() > dim]
    larger = [shape for shape in shapes if shape[dim] > 1]
    if not larger or options["batch_size"] is not None:
        return False
    size = next((t.shape[dim] for t in sized_tensors_in(outputs) if t.dim() > dim), None)
    if size == 1 or size in {shape[dim] for shape in larger}:
        return size != 1
    # The first output shows nothing: it is a loss, or has its samples elsewhere. So the first
    # tensor must agree with a larger one in all other dimensions.
    first = shapes[0]
    others = [(shape[:dim], shape[dim + 1 : len(first)]) for shape in (first, *larger)]
    return len(first) > 1 and others[0] in others[1:]


def _lists_samples(argument: Any, n: int) -> bool:
    """Return True if an argument contains a list of N tensors, which may be one per sample."""
    parts = entries_of(argument)
    if parts is not None:
        return any(_lists_samples(part, n) for part in parts.values())
    if not isinstance(argument, (list, tuple)):
        return False
    is_list = len(argument) == n and all(isinstance(part, Tensor) for part in argument)
    return is_list or any(_lists_samples(part, n) for part in argument)


def has_flat_rows(first: Tensor, arguments: Any, n: int, batch_dim: int) -> bool:
    """Return True if the first tensor has another size than N and no argument lists N tensors.
    Its rows may then be flattened or packed: rows of any sample."""
    args, kwargs = arguments
    lists = any(_lists_samples(argument, n) for argument in (*args, *kwargs.values()))
    return size_of_batch(first, batch_dim) != n and not lists


def _has_sizes(t: Tensor) -> bool:
    return not (t.is_nested and t.layout is torch.strided)


def one_sample(tree: Any, sample: int, n: int, dim: int, *, shared: Collection[int] = ()) -> Any:
    """Return arguments or outputs in which tensors with N entries in `dim` (or the only one) have
    one of them, except those with the ids `shared`. Nothing flows back to those given."""

    def one(leaf: Any) -> Any:
        if isinstance(leaf, PackedSequence) and leaf.batch_sizes[0] == n:
            rows, lengths = pad_packed_sequence(leaf)
            return pack_sequence([rows[: lengths[sample], sample].detach()])
        if not isinstance(leaf, Tensor) or not leaf.dim() or size_of_batch(leaf, dim) != n:
            return leaf
        d, one = dim if leaf.dim() > dim else 0, leaf.detach()
        one = one if id(leaf) in shared else one.narrow(d, sample, 1)
        return one.requires_grad_(leaf.requires_grad)

    return map_leaves(one, tree) if tensors_in(tree) else tree


def size_of_batch(t: Tensor, batch_dim: int) -> int:
    """Return the size of dimension `batch_dim`, or of the first where `t` has no such one."""
    return t.shape[batch_dim if t.dim() > batch_dim else 0]
