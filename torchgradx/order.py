"""Whether an operation may leave the samples in another order, or mixed.

Where no backward can be asked (layout.py), a layer's rows are taken for the samples if sizes leave
no other choice, and if nothing in the forward could have moved them. What works along a dimension
as long as there are samples is taken to.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

__all__ = ["argument_of", "disorders", "indices_of"]

HARMLESS = {"cat", "permute", "squeeze", "stack", "unsqueeze"}  # along their dim nothing is moved
PRODUCTS = {"mm": 0, "addmm": 1, "mv": 0, "addmv": 1, "dot": 0, "bmm": 0}  # the first factor


def disorders(func: Any, args: Sequence[Any], kwargs: Any, n: int, fed: Sequence[Tensor]) -> bool:
    """`fed`: the operands that samples entered."""
    name: str = func._schema.name.partition("::")[2].rstrip("_")
    if name in PRODUCTS:
        left, right = args[PRODUCTS[name] :][:2]
        if name == "bmm":
            return left.shape[0] == 1 and _in(left, fed) and _in(right, fed)
        return _in(right, fed) and (_in(left, fed) or right.shape[0] == n)
    if name.startswith("index"):
        return any(_picks(t, index, n) for t, index in indices_of(func, args) if _in(t, fed))
    if "batch_norm" in name:
        return any(flag is True for flag in args)  # training
    if "scaled_dot_product" in name and args[0].dim() > 1 and args[0].shape[0] != n:
        return bool(args[0].shape[-2] == n)
    if name == "narrow":
        return args[0].shape[args[1]] == n and args[3] < n
    if name == "slice":
        whole = args[0].shape[argument_of(func, args, kwargs, "dim") or 0]
        start, end = (argument_of(func, args, kwargs, key) for key in ("start", "end"))
        return whole == n and ((start or 0) not in (0, -n) or (n if end is None else end) < n)
    if name in HARMLESS:
        return False
    scalars = [t.dim() == 0 for t in fed]
    if any(scalars) and not all(scalars):
        return True  # a sum over the samples goes back into them
    along = [*_numbers(argument_of(func, args, kwargs, key) for key in ("dim", "dims"))]
    if name == "roll" and not along:
        return True
    return any(-t.dim() <= d < t.dim() and t.shape[d] == n for t in fed[:1] for d in along)


def _in(t: Tensor, tensors: Iterable[Tensor]) -> bool:
    return any(t is other for other in tensors)


def argument_of(func: Any, args: Sequence[Any], kwargs: Any, name: str) -> Any:
    for place, argument in enumerate(func._schema.arguments):
        if argument.name == name:
            given = args[place] if place < len(args) else kwargs.get(name)
            return argument.default_value if given is None else given
    return None


def _numbers(values: Iterable[Any]) -> Iterator[int]:
    for value in values:
        if isinstance(value, int):
            yield value
        elif isinstance(value, (list, tuple)):
            yield from value


def indices_of(func: Any, args: Sequence[Any]) -> Iterator[tuple[Tensor, list[Any]]]:
    """What is indexed, and by dimension with what."""
    if isinstance(args[1], (list, tuple)):
        yield args[0], list(args[1])
    elif isinstance(args[1], int) and len(args) > 2:  # index_select, index_copy, index_add
        dim = args[1] % max(1, args[0].dim())
        yield args[0], [None] * dim + [args[2]]


def _picks(t: Tensor, index: Sequence[Any], n: int) -> bool:
    """Whether other rows come out than went in, along a dimension of `n`."""
    for size, chosen in zip(t.shape, index, strict=False):
        if size != n or chosen is None:
            continue
        order = torch.arange(n, device=chosen.device)
        flat = chosen.reshape(-1)
        if chosen.dtype is torch.bool or flat.shape != order.shape or not torch.equal(flat, order):
            return True
    return False
