"""Whether an operation may leave the samples in another order, or mixed.

Where no backward can be asked (layout.py), a layer's rows are taken for the samples if sizes leave
no other choice, and if nothing in the forward could have moved them. What works along the dimension
that they were followed to (sample_dims.py) is taken to, and what works along one as long as there
are samples, or along the first, where they may stand flattened.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from .operation import argument_of, indices_of, name_of, numbers, real
from .reordered import Rows, order_by

__all__ = ["adds_up", "disorders", "divides", "moves", "orders", "picks", "sorts_numbers"]

PUTS = {"_add", "_copy", "_put", "_reduce"}
# along their dim nothing is moved
HARMLESS = {"cat", "permute", "squeeze", "stack", "unflatten", "unsqueeze"}
PARTS = {"select", "split", "split_with_sizes", "unbind"}
CHOICES = {"_pack_padded_sequence", "_unique2", "masked_scatter", "masked_select", "nonzero", "put",
           "take", "unique_consecutive", "unique_dim"}  # fmt: skip
# What they write, and where it is among their arguments.
SOURCES = {"index_add": 3, "index_copy": 3, "index_put": 2, "index_reduce": 3, "masked_scatter": 2,
           "put": 2, "scatter": 3, "scatter_add": 3, "scatter_reduce": 3}  # fmt: skip
# Of labels too, of which asked.py is not believed, and as a batch in order does not show.
TURNS = {"cummax": "dim", "cummin": "dim", "flip": "dims", "roll": "dims", "sort": "dim",
         "topk": "dim", "unique_dim": "dim"}  # fmt: skip
PRODUCTS = {
    "_sparse_addmm": 1,
    "_sparse_mm": 0,
    "mm": 0,
    "addmm": 1,
    "mv": 0,
    "addmv": 1,
    "dot": 0,
    "bmm": 0,
}  # the first factor
FACTORS = {**PRODUCTS, "baddbmm": 1}

SUMS = {"_reshape_alias", "_to_copy", "_unsafe_view", "add", "alias", "cat", "clone", "copy",
        "detach", "expand", "lift_fresh", "mean", "nan_to_num", "nansum", "neg", "permute", "rsub",
        "select", "slice", "split", "squeeze", "stack", "sub", "sum", "t", "transpose", "unbind",
        "unsqueeze", "view"}  # fmt: skip
PICKS = {"amax", "amin", "aminmax", "dist", "linalg_vector_norm", "logsumexp", "max", "median",
         "min", "nanmedian", "norm", "prod", "std", "var"}  # fmt: skip
SCALES = {*PRODUCTS, "baddbmm", "convolution", "div", "linear", "matmul", "mul"}


def adds_up(func: Any, args: Sequence[Any], fed: Sequence[Tensor], sums: Sequence[Tensor]) -> bool:
    """Whether of sums over the samples, which are among its operands that these entered, it makes
    another one. Others are numbers that the model was given; what is whole is a count."""
    name = name_of(func)
    fed, sums = ([t for t in some if real(t)]
                 for some in (fed, sums))  # fmt: skip
    if name == "div":
        return len(fed) == 1 and fed[0] is args[0]
    return name in SUMS or (name in SCALES and len(sums) == 1)


def divides(func: Any, args: Sequence[Any]) -> bool:
    """Whether it is a mean by weights of classes: their sum is of all samples. Counts, of targets
    that are there, are undone by a loss_scale."""
    name = name_of(func)
    return name.startswith("nll_loss") and args[2] is not None and args[3] == 1


def picks(func: Any) -> bool:
    """Whether what it makes of all samples is no sum over them."""
    name = name_of(func)
    return name in PICKS


def disorders(
    func: Any,
    args: Sequence[Any],
    kwargs: Any,
    n: int,
    fed: Sequence[Tensor],
    unknown: Sequence[Tensor],
    dim_of: Callable[[Tensor], int | None],
) -> bool:
    """`fed`: the operands that samples entered; `unknown`: of which nobody knows, as of a list that
    Python made. `dim_of`: which dimension of an operand holds the samples."""

    def holds(t: Tensor, dim: int) -> bool:
        known = dim_of(t)
        return dim == known if known is not None else _may_hold(t, dim, n)

    def leaves_out(t: Tensor, dim: int) -> bool:
        """Whether a part along a dimension is one of the samples."""
        known = dim_of(t)
        return dim % t.dim() == known if known is not None else _may_hold(t, dim % t.dim(), n)

    name = name_of(func)
    if name in PRODUCTS:
        left, right = args[PRODUCTS[name] :][:2]
        if name == "bmm":
            return left.shape[0] == 1 and _in(left, fed) and _in(right, fed)
        return _in(right, fed) and (_in(left, fed) or right.shape[0] == n or dim_of(right) == 0)
    if name in CHOICES:
        return True
    if name == "embedding":
        return _in(args[0], fed) and _picks(args[0], [args[1]], holds, [*fed, *unknown])
    if name.startswith("index"):
        into = [args[0], *args[2:4]] if name[5:] in PUTS else args[:1]
        fits = any(_in(t, fed) for t in into)
        picked = [*indices_of(func, args)]
        if name[5:] in PUTS - {"_put"}:
            picked += [(args[3], index) for _, index in picked]  # its rows are put where they say
        return fits and any(_picks(t, index, holds, [*fed, *unknown]) for t, index in picked)
    if "batch_norm" in name:  # in training, over all but the channels
        return dim_of(args[0]) != 1 and any(flag is True for flag in args)
    if "scaled_dot_product" in name and args[0].dim() > 1 and args[0].shape[0] != n:
        return bool(args[0].shape[-2] == n)
    if name in PARTS:
        return leaves_out(args[0], argument_of(func, args, kwargs, "dim") or 0)
    if name == "narrow":
        return leaves_out(args[0], args[1]) and args[3] < args[0].shape[args[1]]
    if name == "slice":
        dim = (argument_of(func, args, kwargs, "dim") or 0) % args[0].dim()
        start, end = (argument_of(func, args, kwargs, key) for key in ("start", "end"))
        whole = args[0].shape[dim]
        part = (start or 0) not in (0, -whole) or (whole if end is None else end) < whole
        return part and leaves_out(args[0], dim)
    if name in HARMLESS:
        return False
    scalars = [t.dim() == 0 for t in fed]
    if any(scalars) and not all(scalars):
        return True  # a sum over the samples goes back into them
    along = [*numbers(argument_of(func, args, kwargs, key) for key in ("dim", "dims"))]
    if name == "roll" and not along:
        return True
    if name in ("mean", "sum") and dim_of(args[0]) in {d % args[0].dim() for d in along}:
        return False  # a loss, or it goes back into them
    return any(-t.dim() <= d < t.dim() and holds(t, d % t.dim()) for t in fed[:1] for d in along)


def orders(
    func: Any,
    args: Sequence[Any],
    kwargs: Any,
    fed: Sequence[Tensor],
    unknown: Sequence[Tensor],
    dim_of: Callable[[Tensor], int | None],
) -> Any:
    """The order in which samples come out, if it is another one, or one that the batch itself
    chooses, as x[lengths.argsort()] has it."""
    name = name_of(func)
    if name in FACTORS:
        left, right = args[FACTORS[name] :][:2]
        return object() if _sends(left, right, fed, dim_of) else None
    t = args[SOURCES.get(name, 0)] if args else None
    dim = dim_of(t) if isinstance(t, Tensor) and _in(t, fed) else None
    if dim is None or t is None:
        return None
    size, doubtful = t.shape[dim], [*fed, *unknown]
    if name in TURNS and (t.dim() > 1 or TURNS[name] == "dims"):
        axes = [d % t.dim() for d in numbers([argument_of(func, args, kwargs, TURNS[name])])]
        return object() if dim in axes or not axes else None  # roll: of all, in a row
    if name in ("put", "take") or name.startswith("_embedding_bag"):
        return object()
    if name == "gather" or name.startswith("scatter"):
        if args[1] % t.dim() != dim or not moves(args[2], dim, size, doubtful):
            return None
        return order_by(args[2], dim, size) if name == "gather" else object()
    if name == "embedding":
        index = [args[1]]
    elif name in ("index", "index_select") or name in SOURCES:
        _, index = next(indices_of(func, args), (t, []))
    else:
        return None
    chosen = index[dim] if dim < len(index) else None
    if chosen is None or chosen.dtype is torch.bool:
        return None
    if not chosen.numel() or chosen.numel() % size:
        return None
    whole = chosen.numel() == size or _in(chosen, doubtful)
    if not whole or not moves(chosen, 0, size, doubtful):
        return None
    if _in(chosen, doubtful):
        plain = name not in SOURCES and chosen.dim() == 1
        return order_by(chosen, 0, size) if plain else object()
    rows = chosen.flatten().argsort() if name in SOURCES else chosen.flatten()
    each = sorted(chosen.flatten().tolist()) == list(range(size))
    return Rows(rows.tolist()) if each else object()


def sorts_numbers(
    func: Any, args: Sequence[Any], fed: Sequence[Tensor], dim_of: Callable[[Tensor], int | None]
) -> bool:
    """Whether samples that are numbers, as their lengths, come out sorted, and by which indices."""
    name = name_of(func)
    sorts = name in ("_unique2", "sort", "topk", "unique_dim") and args[0].dim() == 1
    return sorts and _in(args[0], fed) and dim_of(args[0]) == 0


def moves(index: Tensor, dim: int, size: int, doubtful: Sequence[Tensor] = ()) -> bool:
    """Whether it sends rows elsewhere, or a batch may have it do so."""
    if _in(index, doubtful):
        return True
    there = torch.arange(size, device=index.device).view(-1, *[1] * (index.dim() - 1 - dim))
    return index.shape[dim] == size and not bool((index == there).all())


def _sends(
    left: Tensor, right: Tensor, fed: Sequence[Tensor], dim_of: Callable[[Tensor], int | None]
) -> bool:
    """Whether a product with a matrix makes as many rows, or columns, of samples as it takes."""

    def summed(t: Tensor, axis: int) -> bool:
        return _in(t, fed) and dim_of(t) == axis % t.dim()

    rows, columns = summed(right, -min(2, right.dim())), summed(left, -1)
    if rows and columns:
        return False  # a sum over samples
    n = left.shape[-1]
    return (rows and left.shape[:-1][-1:] == (n,)) or (columns and right.shape[1:][-1:] == (n,))


def _may_hold(t: Tensor, dim: int, n: int) -> bool:
    """Whether samples may be in a dimension of this size."""
    second = t.dim() > 2 and t.shape[1] == n  # then the first is of positions
    return t.shape[dim] == n or (dim == 0 and t.shape[0] % n == 0 and not second)


def _in(t: Tensor, tensors: Iterable[Tensor]) -> bool:
    return any(t is other for other in tensors)


def _picks(
    t: Tensor,
    index: Sequence[Any],
    holds: Callable[[Tensor, int], bool],
    doubtful: Sequence[Tensor],
) -> bool:
    """Whether other rows come out than went in, for this batch or, chosen by it, for another."""
    for dim, chosen in enumerate(index[: t.dim()]):
        if chosen is None or not holds(t, dim):
            continue
        order = torch.arange(t.shape[dim], device=chosen.device)
        flat = chosen.reshape(-1)
        if chosen.dtype is torch.bool or _in(chosen, doubtful) or not torch.equal(flat, order):
            return True
    return False
