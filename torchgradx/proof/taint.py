"""Which tensors of a forward are the same for any batch: computed from parameters and constants.

A gradient that mixes samples may be that of a position table, which all samples share, or of
something computed from several of them, which has no gradient by sample. The graph cannot tell
these apart, since data needs no gradient. So every operation of a forward is watched once. Nothing
is clean by default: arguments, data hidden in objects and what comes from NumPy are not. Nor does
everything else hold samples: only what the arguments entered does.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import (
    TorchDispatchMode,
    _get_current_dispatch_mode_stack,
    _pop_mode,
    _push_mode,
)
from torch.utils._pytree import tree_leaves

from ..sites import packed, through_time
from .order import adds_up, disorders, divides, orders, picks, sorts_numbers
from .pieces import Firsts, Pieces
from .reordered import Put, Reordered, Rows, order_by, shows
from .sample_dims import GONE, Fed, Follows, Place, first_places, followed, guessed, view_of

__all__ = ["Given", "Taint", "watching"]

APPLY = inspect.unwrap(torch.autograd.Function.apply).__code__
PACKS = {"torch.nn.modules.rnn", "torch.nn.utils.rnn", packed.__name__, through_time.__name__}


class Given(NamedTuple):
    """What a site was given, each time."""

    fed: bool  # samples entered it
    in_turn: bool  # and its rows are of one sample after the other
    dim: int | None = None  # where the samples are in the first of what it was given
    rows: frozenset[tuple[Sequence[int], Place]] = frozenset()  # and in what counts its rows
    again: bool = False  # a Function called it, whose backward may run it again


class Taint(TorchDispatchMode):
    """Watches the operations of this thread, from here to `stop`."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # torch would import the whole compiler, 70 MiB and two seconds

    def __init__(
        self,
        n: int,
        held: Iterable[Tensor],
        arguments: Sequence[Tensor],
        batch_dim: int,
        parameters: Callable[[], Iterable[Tensor]] = tuple,
    ) -> None:
        super().__init__()
        self._n, self._parameters, self._arguments = n, parameters, arguments
        self._batch_dim = batch_dim
        # By storage, which views and in-place writes share; a weak reference keeps its address.
        self._known: dict[int, tuple[StorageWeakRef, bool | None]] = {}
        self._seen: dict[tuple[Any, int], bool] = {}  # clean, as consumed; by node and output
        self._where: dict[tuple[Any, int], Place | None] = {}  # the samples, in what they entered
        self.given: dict[tuple[int, bool], Given] = {}  # by site, and whether without a graph
        self.orderly = True  # nothing moved or mixed the samples
        self._reordered, self._pieces = Reordered(), Pieces(n, batch_dim)
        self.ends: list[Place | None] = []  # where they are in the model's outputs
        self._on = True
        for t in held:
            self._mark(t, True)
        self._places: dict[Any, Place | None] = {}  # of the samples, by storage and geometry
        for t, place in zip(arguments, first_places(arguments, n, batch_dim), strict=True):
            self._places[view_of(t)] = place or self.place(t)  # one may be given twice
        of_all = [t for t in arguments if _of_all(t, arguments[0], n, batch_dim)]
        for t in of_all:
            self._mark(t, True)
        for t in arguments:  # after them: one may be a view of what holds samples
            if all(t is not other for other in of_all):
                self._mark(t, False)
        self.__enter__()

    def stop(self, outputs: Iterable[Tensor] = ()) -> None:
        outputs = list(outputs)
        self.ends = list(map(self.place, outputs))
        for t in outputs:
            self._stands(t)
        self._reordered.enter(outputs)
        mixed = (
            place == GONE and t.dim() > 0 and (t.requires_grad or self._n in t.shape)
            for t, place in zip(outputs, self.ends, strict=True)
        )
        self.orderly = self.orderly and not any(mixed)
        self._on = False
        self._known, self._places, self._arguments = {}, {}, ()
        self._depart()

    def _depart(self) -> None:
        """Also from beneath others, as those of a forward that an interrupt left, or within which
        the probe is removed: what we found when we came is theirs to put back."""
        users = [m for m in _get_current_dispatch_mode_stack() if not hasattr(m, "_mode_key")]
        if self not in users:
            return
        above = [_pop_mode() for _ in users[users.index(self) + 1 :]]
        if above:
            _pop_mode()
            for name, found in vars(self).items():
                if name.startswith("old_"):
                    getattr(above[-1], name)[-1] = found.pop()
        else:
            self.__exit__(None, None, None)
        for mode in reversed(above):
            _push_mode(mode)

    def clean(self, node: Any, number: int) -> bool:
        """Whether this output of a graph node is known to be computed from no sample."""
        return self._seen.get((node, number), False)

    def where(self, node: Any, number: int) -> Place | None:
        """Where the samples are in this output of a graph node, as far as that was seen."""
        return self._where.get((node, number))

    def _enters(self, t: Tensor, clean: bool | None) -> None:
        key = t.grad_fn, t.output_nr
        self._seen[key] = self._seen.get(key, True) and clean is True

    def _stands(self, t: Tensor) -> None:
        key, place = (t.grad_fn, t.output_nr), self.place(t)
        self._where[key] = place if self._where.get(key, place) == place else None

    def place(self, t: Tensor) -> Place | None:
        """Where the samples are in it."""
        return self._places.get(view_of(t))

    def _dim_of(self, t: Tensor) -> int | None:
        place = self.place(t)
        return None if place is None or place == GONE else place.dim

    def _likely(self, t: Tensor) -> int | None:
        """Where they could not be followed, where they are in the model's arguments."""
        dim = self._batch_dim
        there = t.is_floating_point() and t.dim() > dim and t.shape[dim] == self._n
        return dim if there and self.place(t) is None else self._dim_of(t)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if not self._on:
            return func(*args, **kwargs)
        operands = [t for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)]
        verdicts = [self._is_clean(t) for t in operands]  # before it runs: it may work in place
        for t, clean in zip(operands, verdicts, strict=True):
            if t.grad_fn is not None:
                self._enters(t, clean)
                base = t._base  # the graph leads through it where a view of it was written into
                if base is not None and base.grad_fn is not None:
                    self._enters(base, clean)
                if clean is False:
                    self._stands(t)
        fed = [t for t, clean in zip(operands, verdicts, strict=True) if clean is False]
        put, numbers = None, False
        firsts: Firsts = lambda k: None  # noqa: E731
        if fed:
            unknown = [t for t, clean in zip(operands, verdicts, strict=True) if clean is None]
            try:
                told = self._n, fed, unknown, self._dim_of
                self.orderly = self.orderly and not disorders(func, args, kwargs, *told)
                given = func, args, kwargs, fed
                firsts, joins = self._pieces.made(*given, self._likely(fed[0]))
                put = None if self.ordered else self._put(*given, unknown, joins)
                numbers = sorts_numbers(func, args, fed, self._dim_of) and self._hidden(fed)
            except Exception:  # what it was given has no values, or is none of torch's
                self.orderly = False
        if self._reordered and not self.ordered:
            joined = self._reordered.joined(operands, verdicts, _counts())
            put = joined if put is None else put if joined is None else joined.then(put)
        places = [(t, self.place(t)) for t in fed]
        place = self._following(func, args, kwargs, places)
        before = {at for _, at in places} - {None}
        guesses = [
            self._following(func, args, kwargs, guess)
            for guess in (guessed(places, self._n) if self.orderly and not before else ())
        ]
        written = [(t, view_of(t), self.place(t)) for t in _written(func, args, kwargs)]
        out = func(*args, **kwargs)
        clean = False if False in verdicts else None if None in verdicts else True
        if func._schema.name == "aten::set_" and len(args) > 1:  # to a memory, as a deepcopy does
            known = self._known.get(args[1]._cdata) if hasattr(args[1], "_cdata") else None
            clean = known[1] if known else None
        for k, t in enumerate(tree_leaves(out)):
            if isinstance(t, Tensor):
                sizes = _of_sizes_only(func)
                self._mark(t, True if sizes else clean, None if sizes else put)
                self._places[view_of(t)] = None if sizes else place(k, t)
                self._pieces.keep(t, None if sizes else firsts(k))
        if numbers:
            order = order_by(out[1], 0, len(args[0])) if len(out) == 2 else object()
            self._reordered.mark(out[0], Put(order, False, True))
        self.orderly = self.orderly and not self._strays(func, args, places, before, guesses, out)
        for t, view, was in written if not clean else ():
            self._mark(t, clean, put)
            now = self.place(t)
            if view and view == view_of(t) and now != was:  # of its other views nobody knows
                others = [v for v in self._places if v and v[0] == view[0] and v != view]
                self._places.update((v, None) for v in others if not self._as(v, view, now))
        return out

    @property
    def ordered(self) -> bool:
        """Whether layers, or the outputs, have the samples in an order that no graph shows."""
        return self._reordered.missed

    def _put(
        self, func: Any, args: Any, kwargs: Any, fed: Any, unknown: Any, joins: bool
    ) -> Put | None:
        """`joins`: pieces of samples, in another order."""
        order = object() if joins else orders(func, args, kwargs, fed, unknown, self._likely)
        if order is None or _packing():
            return None
        quiet = isinstance(order, Rows) and not torch.is_grad_enabled()  # as keys are shuffled
        return Put(order, any(shows(t, self._arguments) for t in fed), quiet)

    def _hidden(self, fed: Iterable[Tensor]) -> bool:
        return not (_packing() or any(shows(t, self._arguments) for t in fed))

    def _as(self, view: Any, written: Any, place: Place | None) -> bool:
        """Whether a view has its samples where another one of the same memory has got them."""
        if place is None or place == GONE or self._places[view] != place:
            return False
        strides, others = view[3], written[3]
        return len(strides) == len(others) and bool(strides[place.dim] == others[place.dim])

    def _strays(
        self,
        func: Any,
        args: Any,
        places: Sequence[Fed],
        before: set[Place | None],
        guesses: Sequence[Follows],
        out: Any,
    ) -> bool:
        """Whether samples followed up to here are lost, or mixed with a sum over all of them; or
        with each other, in one of the places that they may have."""
        if len(before) > 1 and GONE in before:
            return True
        # Convolutions restride what they made in place; masks and ids are indexed by sample.
        if func._schema.name == "aten::as_strided_" or _of_sizes_only(func):
            return False
        first = next((t for t in tree_leaves(out) if isinstance(t, Tensor)), None)
        if first is None or not first.numel():
            return False
        if not first.is_floating_point() and not first.is_complex():
            return False
        if GONE in before:
            fed, sums = [t for t, _ in places], [t for t, at in places if at == GONE]
            graph = torch.is_grad_enabled() and any(t.requires_grad for t in fed)
            if not first.dim() and not graph and not _in_a_function():
                return False  # it is logged, or goes back into the samples
            return self._n in first.shape or not adds_up(func, args, fed, sums)
        now = self.place(first)
        if not before:
            return any(guess(0, first) in (None, GONE) for guess in guesses)
        some = self._n in first.shape or picks(func) or divides(func, args)
        return now is None or (now == GONE and some)

    def _following(self, func: Any, args: Any, kwargs: Any, fed: Sequence[Fed]) -> Follows:
        try:
            return followed(func, args, kwargs, fed, self._n)
        except Exception:  # as above
            return lambda k, out: None

    def met(self, site: int, given: Sequence[Tensor], counts: Tensor) -> None:
        """A use of a site, whose rows are those of `counts`."""
        if self._on:
            verdicts = [self._is_clean(t) for t in given]
            if _counts():
                self._reordered.enter(given, verdicts)
            dim, place = self._dim_of(given[0]) if given else None, self.place(counts)
            key = site, not torch.is_grad_enabled()
            before = self.given.get(key, Given(True, True, dim))
            rows = before.rows if place is None else before.rows | {(counts.shape, place)}
            fed = False in verdicts
            in_turn = all(t.dim() and self.place(t) == Place(0, len(t) // self._n) for t in given)
            dim = dim if dim == before.dim else None
            told = before.fed and fed, before.in_turn and in_turn, dim, rows
            self.given[key] = Given(*told, before.again or _in_a_function())

    def _is_clean(self, t: Tensor) -> bool | None:
        """False: samples entered it. None: nobody knows."""
        try:
            known = self._known.get(t.untyped_storage()._cdata)
        except Exception:  # sparse tensors have no storage
            return None
        clean = known[1] if known else True if t.dim() == 0 else None  # a number that Python made
        if clean is None and isinstance(t, nn.Parameter):  # fully_shard brings them together
            clean = any(t is p for p in self._parameters()) or None
        return clean

    def _mark(self, t: Tensor, clean: bool | None, put: Put | None = None) -> None:
        try:
            storage = t.untyped_storage()
        except Exception:
            return
        self._known[storage._cdata] = StorageWeakRef(storage), clean
        self._reordered.mark(t, put)


class _Untraced(Taint):
    """Where the compiler is there already, it must not trace what watches."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return True

    __torch_dispatch__ = Taint.__torch_dispatch__


def watching(
    n: int,
    held: Iterable[Tensor],
    arguments: Sequence[Tensor],
    batch_dim: int,
    parameters: Callable[[], Iterable[Tensor]] = tuple,
) -> Taint:
    """The operations from here to `stop`: `held` is clean, and what is met among `parameters` then;
    samples enter by the arguments."""
    kind = _Untraced if "torch._dynamo" in sys.modules else Taint
    return kind(n, held, arguments, batch_dim, parameters)


def _of_all(t: Tensor, first: Tensor, n: int, batch_dim: int) -> bool:
    """Ids and masks that all samples share, as positions [1, T] beside tokens [N, T, ...]; beside
    anything else, ids of one row may be packed ones."""
    if t.is_floating_point() or t.is_complex() or t.dim() <= max(1, batch_dim) or n in t.shape:
        return False
    like = list(first.shape[: t.dim()])
    there = len(like) == t.dim() and like[batch_dim] == n
    like[batch_dim : batch_dim + 1] = [1]
    return there and list(t.shape) == like


def _packing() -> bool:
    """Whether torch sorts samples to pack them, which unpacking undoes."""
    frame = sys._getframe()
    while frame.f_back is not None and frame.f_globals["__name__"] not in PACKS:
        frame = frame.f_back
    return frame.f_globals["__name__"] in PACKS


def _in_a_function() -> bool:
    """Whether torch.autograd.Functions run on this thread: reentrant checkpoints are some."""
    frame = sys._getframe()
    while frame.f_back is not None and frame.f_code is not APPLY:
        frame = frame.f_back
    return frame.f_code is APPLY


def _counts() -> bool:
    """Whether gradients will be had of what is done now."""
    return torch.is_grad_enabled() or _in_a_function()


def _of_sizes_only(func: Any) -> bool:
    """zeros_like(x), x.new_ones(...): nothing of the operand's values."""
    name: str = func._schema.name.partition("::")[2]
    return name.endswith("_like") or name.startswith("new_")


def _written(func: Any, args: Any, kwargs: Any) -> Iterator[Tensor]:
    if func._schema.is_mutable:
        for place, argument in enumerate(func._schema.arguments):
            value = args[place] if place < len(args) else kwargs.get(argument.name)
            if argument.alias_info is not None and argument.alias_info.is_write:
                yield from (t for t in tree_leaves(value) if isinstance(t, Tensor))
