"""Which dimension of a tensor holds the samples, followed through the operations of a forward.

Sizes do not tell it where two dimensions are as long as there are samples: a model may give back
[T, N, *] for [N, T, *]. Nothing is guessed: where an operation is not known, or a shape denies what
it should have done, nobody knows (None).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor

from . import order
from .operation import argument_of, indices_of, name_of

__all__ = ["GONE", "VIEWS", "Fed", "Follows", "Place", "first_places", "followed", "guessed",
           "viewed"]  # fmt: skip


class Place(NamedTuple):
    """The index along `dim` is of sample (index // inner) % n."""

    dim: int
    inner: int = 1

    def at(self, dim: int) -> Place:
        return self._replace(dim=dim)


GONE = Place(-1)  # no dimension is of samples any more: they were summed
Fed = tuple[Tensor, Place | None]  # an operand that samples entered, and where they are
Follows = Callable[[int, Tensor], Place | None]  # of an operation's k-th result


def first_places(arguments: Iterable[Tensor], n: int, batch_dim: int) -> list[Place | None]:
    """Where the samples are in what a model is called with: N is of the first tensor, and others
    have them where they can, as a state [layers, N, *] does."""
    found: list[Place | None] = []
    first = True
    for t in arguments:
        fits = [d for d, size in enumerate(t.shape) if size == n]
        said = batch_dim if t.dim() > batch_dim else 0
        if first:
            fits = [said] if said in fits else []
        found.append(Place(*fits) if len(fits) == 1 else None)
        first = first and not t.dim()
    return found


def followed(
    func: Any,
    args: Sequence[Any],
    kwargs: Any,
    fed: Sequence[Fed],
    n: int,
) -> Follows:
    """Of an operation that is yet to run."""
    name = name_of(func)
    if name == "copy":  # what was there is gone, if others take its place
        fed = [(t, place) for t, place in fed if t is args[1]] or fed
    known = [(t, place) for t, place in fed if place is not None and place != GONE]
    lost = GONE if fed and all(place == GONE for _, place in fed) else None
    if not known:
        return lambda k, out: lost
    t, place = known[0]

    def said(key: str) -> Any:
        return argument_of(func, args, kwargs, key)

    def moved(to: int | None) -> Follows:
        size = t.shape[place.dim]  # now: it may work in place
        return lambda k, out: _checked(out, to, size, place)

    if func.namespace not in ("aten", "torchgradx") or name in OTHERWISE:
        return lambda k, out: None
    if name not in WHOLE and torch._C._dispatch_has_kernel_for_dispatch_key(
        func.name(), "CompositeImplicitAutograd"
    ):
        return lambda k, out: None  # of several operations, which are not seen one by one
    if name in MOVED:
        alike = all(at == place for _, at in fed)
        return moved(MOVED[name](t, place.dim, said) if alike else None)
    # What is written into may be a part of what samples entered elsewhere.
    read = [(t, at) for t, at in fed if not (func._schema.is_mutable and t is args[0])]
    unknown = any(at is None and t.is_floating_point() and n in t.shape for t, at in read)
    if name in PRODUCTS:
        product = None if unknown else _product(args[PRODUCTS[name] :][:2], known)
        return lambda k, out: product
    if name in VIEWS:
        return lambda k, out: viewed(out.shape, t.shape, place, n)
    if name == "index":
        chosen = list(next(indices_of(func, args))[1])
        if len(fed) == 1 and len(chosen) == 1 and chosen[0] is t and t.dtype is not torch.bool:
            return moved(place.dim)  # rows of what all samples share
        return moved(_indexed(chosen, place.dim) if args[0] is t else None)
    if isinstance(said("keepdim"), bool):
        return moved(_reduced(t, place.dim, said("dim"), said("keepdim")))
    if name.startswith("_embedding_bag"):
        stands = _in_bags(t, place, args, fed, n)
        return lambda k, out: Place(0) if stands and not k and out.shape[:1] == (n,) else None
    if name == "_cdist_forward":
        return moved(_against(t, args, fed, place))
    if name in LOSSES:
        alike = place.dim == 0 and all(at == place for _, at in fed)
        size = t.shape[place.dim]
        return lambda k, out: (
            _checked(out, 0 if alike else None, size, place) if out.dim() else GONE
        )
    if torch.Tag.pointwise in func.tags or name in BROADCAST:
        return lambda k, out: None if unknown and out.dim() else _broadcast(out, known)
    if "rnn" in name or "lstm" in name or "gru" in name:  # a state is [N, *], or [layers, N, *]
        steps = 1 if "cell" in name else int(bool(said("batch_first")) and "mkldnn" not in name)
        if t is not args[0] or place.dim != 1 - steps:
            return lambda k, out: None
        rows = t.shape[place.dim]
        return lambda k, out: (
            _kept(out, t, place) if k == 0
            else _checked(out, out.dim() - 2, rows, place) if out.dim() > 1 else None
        )  # fmt: skip
    apart = _apart(name, t, place, said) and _alike(name, args, fed, place)
    return lambda k, out: _kept(out, t, place) if apart or not out.dim() else None


def guessed(fed: Sequence[Fed], n: int) -> Iterator[list[Fed]]:
    """Each way in which samples of unknown place may be in one of the operands."""
    for k, (t, place) in enumerate(fed):
        for dim, size in enumerate(t.shape):
            if place is None and size == n:
                yield [(other, Place(dim) if j == k else at) for j, (other, at) in enumerate(fed)]


def _axis(value: Any, dims: int) -> int:
    return int(value) % max(1, dims)


def _axes(value: Any, dims: int) -> list[int]:
    values = [] if value is None else [value] if isinstance(value, int) else value
    return [_axis(v, dims) for v in values]


def _taken(t: Tensor, d: int, said: Callable[[str], Any]) -> int | None:
    """One sample may be put together with others again."""
    axis = _axis(said("dim") or 0, t.dim())
    return None if axis == d else d - (axis < d)


def _swapped(t: Tensor, d: int, said: Callable[[str], Any]) -> int:
    axes = [_axis(said(key), t.dim()) for key in ("dim0", "dim1")]
    return axes[1 - axes.index(d)] if d in axes else d


def _squeezed(t: Tensor, d: int, said: Callable[[str], Any]) -> int:
    axes = range(t.dim()) if said("dim") is None else _axes(said("dim"), t.dim())
    return d - sum(axis < d and t.shape[axis] == 1 for axis in axes)


def _inserted(t: Tensor, d: int, said: Callable[[str], Any]) -> int:
    return d + (_axis(said("dim"), t.dim() + 1) <= d)


def _strided(t: Tensor, d: int, said: Callable[[str], Any]) -> int | None:
    """As pooling in channels_last leaves the strides of what has one element in another way."""
    there = said("storage_offset") in (None, t.storage_offset())
    sizes = zip(t.shape, said("size"), t.stride(), said("stride"), strict=False)
    alike = all(size == to and (size < 2 or by == now) for size, to, by, now in sizes)
    return d if there and alike and len(said("size")) == t.dim() else None


MOVED: dict[str, Callable[[Tensor, int, Callable[[str], Any]], int | None]] = {
    "as_strided": _strided,
    "embedding": lambda t, d, said: d,
    "permute": lambda t, d, said: _axes(said("dims"), t.dim()).index(d),
    "select": _taken,
    "squeeze": _squeezed,
    "stack": _inserted,
    "t": lambda t, d, said: t.dim() - 1 - d,
    "transpose": _swapped,
    "_trilinear": lambda t, d, said: None if d else 0,
    "unbind": _taken,
    "unsqueeze": _inserted,
}
PRODUCTS = {**order.FACTORS, "linear": 0}
VIEWS = {"_reshape_alias", "_unsafe_view", "flatten", "reshape", "unflatten", "view", "view_as"}
BROADCAST = {"binary_cross_entropy", "binary_cross_entropy_with_logits", "cat", "expand",
             "log_sigmoid_forward", "masked_fill", "where"}  # fmt: skip
# Of each row its number, if they are not reduced: that of a class.
LOSSES = {"nll_loss2d_forward", "nll_loss_forward"}
# Seen whole below autograd; the rows of what they make are those of what they are given.
WHOLE = {*VIEWS, "batch_norm", "contiguous", "conv2d", "group_norm", "instance_norm", "layer_norm",
         "linear", "lstm", "narrow", "pad", "prelu", "rms_norm"}  # fmt: skip
ALIKE = {"_standard_gamma", "_to_copy", "alias", "bernoulli", "binomial", "clone", "contiguous",
         "copy", "detach", "hardswish", "lift_fresh", "native_dropout", "normal", "poisson",
         "repeat", "rrelu_with_noise"}  # fmt: skip
# They work along the last dimensions, and leave the rows of the first apart.
BY_ROW = ("col2im", "conv", "grid_sampler", "im2col", "loss", "multi_head_attention", "norm", "pad",
          "pixel", "pool", "prelu", "transformer_encoder", "upsample")  # fmt: skip
WEIGHS = ("conv", "norm", "prelu")
OTHERWISE = {
    "renorm",
    "rot90",
    "_weight_norm",
    "_weight_norm_interface",
}  # dimensions change places, and no argument says it simply


def _checked(out: Tensor, dim: int | None, size: int, place: Place) -> Place | None:
    """As the operation should have left it, unless the sizes deny it."""
    if dim == GONE.dim:
        return GONE
    stands = dim is not None and dim < out.dim() and out.shape[dim] == size
    return place.at(dim) if dim is not None and stands else None


def _apart(name: str, t: Tensor, place: Place, said: Callable[[str], Any]) -> bool:
    """Whether it leaves samples apart, each where it was."""
    last = said("pad") if name == "constant_pad_nd" else said("normalized_shape")
    if last is not None:
        many = len(last) // 2 if name == "constant_pad_nd" else len(last)
        return place.dim < t.dim() - many
    if "scaled_dot_product" in name:
        return place.dim < t.dim() - 2
    if "batch_norm" in name and place.dim == 1:
        return True  # each channel by itself: InstanceNorm has one of each sample there
    if "batch_norm" in name and (said("training") or said("train")):
        return False
    dims = said("dims") if said("dim") is None else said("dim")
    along = dims is not None and place.dim not in _axes(dims, t.dim())
    by_row = not place.dim and any(part in name for part in BY_ROW)
    return along or by_row or name in ALIKE


def _alike(name: str, args: Sequence[Any], fed: Sequence[Fed], place: Place) -> bool:
    """Whether samples meet their own alone, where several operands hold them."""
    held = [(t, at) for t, at in fed if t.is_floating_point()]
    if any(part in name for part in WEIGHS):  # its input: weights meet all samples
        return len(held) == 1 and held[0][0] is args[0]
    if "scaled_dot_product" in name:  # a mask may have been followed from numbers, by no place
        held = [(t, at) for t, at in held if any(t is given for given in args[:3])]
        return all(at == place for _, at in held)
    return all(at in (place, None) for _, at in held)


def _kept(out: Tensor, t: Tensor, place: Place) -> Place | None:
    if not out.dim():
        return GONE  # a sum, or another of all
    return _checked(out, place.dim if out.dim() == t.dim() else None, t.shape[place.dim], place)


def _reduced(t: Tensor, d: int, dims: Any, keeps: bool) -> int:
    axes = _axes(dims, t.dim())
    if not axes or d in axes:
        return GONE.dim
    return d if keeps else d - sum(axis < d for axis in axes)


def viewed(out: Sequence[int], shape: Sequence[int], place: Place, n: int) -> Place | None:
    """In the order of the elements the samples stay where they are."""
    step = place.inner * prod(shape[place.dim + 1 :])
    for dim in reversed(range(len(out))):
        after = prod(out[dim + 1 :])
        if step and after * out[dim] > step:
            inner, rest = divmod(step, after)
            return Place(dim, inner) if not rest and out[dim] % (inner * n) == 0 else None
    return None


def _indexed(chosen: Sequence[Tensor | None], d: int) -> int | None:
    """x[:, ids]; or x[torch.arange(n), ends], which takes a row of each sample."""
    axes = [axis for axis, index in enumerate(chosen) if index is not None]
    held = [index for index in chosen if index is not None]
    plain = axes == list(range(axes[0], axes[0] + len(axes))) if axes else False
    if not plain or any(index.dim() != 1 or index.dtype is torch.bool for index in held):
        return None
    if d in axes:
        return axes[0]
    return d if d < axes[0] else d - len(axes) + 1


def _product(factors: Sequence[Any], known: Sequence[tuple[Tensor, Place]]) -> Place | None:
    """Rows are of the first factor, columns of the second; what is summed over is gone."""
    gone = False
    roles = {(t is factors[0], place.dim - t.dim()) for t, place in known}
    summed, batch = roles <= {(True, -1), (False, -2)}, all(dim < -2 for _, dim in roles)
    batch = batch and len({place.inner for _, place in known}) == 1
    if len(known) > 1 and not summed and not batch:
        return None  # each sample met all
    for t, place in known:
        left, right = (t is factor for factor in factors)
        right_stays = right and t.dim() > 1 and place.dim != t.dim() - 2
        if (left and place.dim != t.dim() - 1) or right_stays:
            return place
        gone |= left or right
    return GONE if gone else None


def _against(t: Tensor, args: Sequence[Any], fed: Sequence[Fed], place: Place) -> int | None:
    """Distances of the first one's rows from each of the second's."""
    batch = place.dim < t.dim() - 2 and all(at == place for _, at in fed)
    rows = place.dim == t.dim() - 2 and len(fed) == 1 and t is args[0]
    return place.dim if args[0].dim() == args[1].dim() and (batch or rows) else None


def _in_bags(t: Tensor, place: Place, args: Sequence[Any], fed: Sequence[Fed], n: int) -> bool:
    """Whether each sample has a bag: where its offset says, or as many ids of each."""
    offsets = args[2]
    if any(offsets is other for other, _ in fed):
        return t is offsets and place == Place(0)
    begin = torch.arange(n, device=offsets.device) * place.inner
    return t is args[1] and place.dim == 0 and torch.equal(offsets[:n], begin.to(offsets))


def _broadcast(out: Tensor, known: Sequence[tuple[Tensor, Place]]) -> Place | None:
    """Of all operands in the same one, or nobody knows: each may meet another's."""
    if not out.dim():  # a loss of them
        return GONE
    places = {place.at(place.dim + out.dim() - t.dim()) for t, place in known}
    t, place = known[0]
    to, size = place.dim + out.dim() - t.dim(), t.shape[place.dim]
    return _checked(out, to, size, place) if len(places) == 1 else None
