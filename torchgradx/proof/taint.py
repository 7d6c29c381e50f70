"""Which tensors of a forward are the same for any batch: computed from parameters and constants.

A gradient that mixes samples may be that of a position table, which all samples share, or of
something computed from several of them, which has no gradient by sample. The graph cannot tell
these apart, since data needs no gradient. So every operation of a forward is watched once. Nothing
is clean by default: arguments, data hidden in objects and what comes from NumPy are not. Nor does
everything else hold samples: only what the arguments entered does.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import (
    TorchDispatchMode,
    _get_current_dispatch_mode_stack,
    _pop_mode,
    _push_mode,
)
from torch.utils._pytree import tree_leaves

from .arranged import Arranged, Meeting, has_gradients, in_a_function
from .memory import ByMemory, storage_of, view_of
from .operation import Step, of_sizes_only, real, tensors_of, written
from .order import adds_up, disorders, divides, picks
from .sample_dims import GONE, Fed, Follows, Place, first_places, followed, guessed
from .shadows import Shadows

__all__ = ["Given", "Taint", "entered", "watching"]


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
        each: Sequence[Tensor] = (),
        rows: int | None = None,
    ) -> None:
        super().__init__()
        self.n, self._parameters, self._arguments = n, parameters, arguments
        self._batch_dim = batch_dim
        self._known: ByMemory[bool | None] = ByMemory()
        self._seen: dict[tuple[Any, int], bool] = {}  # clean, as consumed; by node and output
        self._where: dict[tuple[Any, int], Place | None] = {}  # the samples, in what they entered
        self.given: dict[tuple[int, bool], Given] = {}  # by site, and whether without a graph
        self.orderly = True  # nothing moved or mixed the samples
        self._arranged = Arranged(n, batch_dim, arguments, parameters)
        self.ends: list[Place | None] = []  # where they are in the model's outputs
        self._on, self.rows = True, rows
        self._shadows = None if rows is None else Shadows(n, arguments, rows)
        self.doubtful = False  # it did with samples what cannot be followed
        self.mixed = False  # samples that are given as rows alone are, in the outputs
        for t in held:
            self._known.keep(t, True)
        self._places: dict[Any, Place | None] = {}  # of the samples, by storage and geometry
        for t, place in zip(arguments, entered(arguments, n, batch_dim, each), strict=True):
            self._places[view_of(t)] = place or self.place(t)  # one may be given twice
        for k, t in enumerate(each):
            if t.shape[batch_dim : batch_dim + 1] != (n,):  # else it may be one argument of several
                self._arranged.pieces.keep(t, (k % n,))
        of_all = _of_all(arguments, n, batch_dim)
        for t in of_all:
            self._known.keep(t, True)
        for t in arguments:  # after them: one may be a view of what holds samples
            if all(t is not other for other in of_all):
                self._known.keep(t, False)
        self.__enter__()

    def stop(self, outputs: Iterable[Tensor] = ()) -> None:
        outputs = list(outputs)
        self.ends = list(map(self.place, outputs))
        for t in outputs:
            self._stands(t)
        self._arranged.reordered.enter(
            t for t, at in zip(outputs, self.ends, strict=True) if at != GONE
        )
        mixed = (
            place == GONE and t.dim() > 0 and (t.requires_grad or self.n in t.shape)
            for t, place in zip(outputs, self.ends, strict=True)
        )
        self.orderly = self.orderly and not any(mixed)
        self._on = False
        self.mixed = self._shadows is not None and self._shadows.mixed(outputs, self.n)
        self._shadows = None
        self._known, self._places, self._arguments = ByMemory(), {}, ()
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

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if not self._on or func._schema.name == "aten::embedding_renorm_":  # of rows of its own
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
        step = Step(func, args, kwargs, operands, verdicts)
        fed = step.fed
        if fed:
            try:
                told = self.n, fed, step.unknown, self._dim_of
                self.orderly = self.orderly and not disorders(func, args, kwargs, *told)
            except Exception:  # what it was given has no values, or is none of torch's
                self.orderly = False
        places = [(t, self.place(t)) for t in fed]
        follows = self._following(func, args, kwargs, places)
        meeting = Meeting(self._arranged, step, places, follows)
        before = {at for _, at in places} - {None}
        guesses = [
            self._following(func, args, kwargs, guess)
            for guess in (guessed(places, self.n) if self.orderly and not before else ())
        ]
        changed = [(t, view_of(t), self.place(t)) for t in written(func, args, kwargs)]
        made = self._shadows.run(step) if self._shadows else None
        out = func(*args, **kwargs)
        if self._shadows:
            self._shadows.keep(out, made)
        clean = False if False in verdicts else None if None in verdicts else True
        if func._schema.name == "aten::set_" and len(args) > 1:  # to a memory, as a deepcopy does
            source = args[1]
            clean = None if isinstance(source, Tensor) else self._known.get(source, None)
        if of_sizes_only(func):
            for _, t in tensors_of(out):
                self._known.keep(t, True)
                self._places[view_of(t)] = None
                self._arranged.forget(t)
        else:
            for k, (t, at) in enumerate(meeting.results(out)):
                self._known.keep(t, clean)
                self._places[view_of(t)] = at
                if k == 0:
                    self._doubt(places, at)
        if fed and isinstance(out, (bool, int, float, complex)):
            self.doubtful = True  # Python reads it
        try:
            strays = self._strays(func, args, places, before, guesses, out)
        except Exception:  # as above
            strays = True
        self.orderly = self.orderly and not (strays or meeting.failed)
        for t, view, was in changed if not clean else ():
            self._known.keep(t, clean)
            self._arranged.mark(t, meeting.put)
            if meeting.fills is not None and t._base is not None and not self.place(t._base):
                self._places[view_of(t._base)] = meeting.fills
            now = self.place(t)
            self._arranged.stores.wrote(t, now)
            if view and view == view_of(t) and now != was:  # of its other views nobody knows
                others = [v for v in self._places if v and v[0] == view[0] and v != view]
                self._places.update((v, None) for v in others if not self._as(v, view, now))
        return out

    def _doubt(self, places: Sequence[Fed], at: Place | None) -> None:
        """Samples are not found again, or meet a number of their batch."""
        apart = any(place not in (None, GONE) for _, place in places)
        meets = at is None or any(place == GONE for _, place in places)
        self.doubtful |= apart and meets

    @property
    def ordered(self) -> bool:
        """Whether layers, or the outputs, have the samples in an order that no graph shows."""
        return self._arranged.missed

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
        if func._schema.name == "aten::as_strided_" or of_sizes_only(func):
            return False
        first = next((t for t in tree_leaves(out) if isinstance(t, Tensor)), None)
        if first is None or not first.numel():
            return False
        if not real(first):
            return False
        if GONE in before:
            fed, sums = [t for t, _ in places], [t for t, at in places if at == GONE]
            graph = torch.is_grad_enabled() and any(t.requires_grad for t in fed)
            if not first.dim() and not graph and not in_a_function():
                return False  # it is logged, or goes back into the samples
            return self.n in first.shape or not adds_up(func, args, fed, sums)
        now = self.place(first)
        if not before:
            return any(guess(0, first) in (None, GONE) for guess in guesses)
        some = self.n in first.shape or picks(func) or divides(func, args)
        return now is None or (now == GONE and some)

    def _following(self, func: Any, args: Any, kwargs: Any, fed: Sequence[Fed]) -> Follows:
        try:
            return followed(func, args, kwargs, fed, self.n)
        except Exception:  # as above
            return lambda k, out: None

    def met(self, site: int, given: Sequence[Tensor], counts: Tensor) -> None:
        """A use of a site, whose rows are those of `counts`."""
        if self._on:
            verdicts = [self._is_clean(t) for t in given]
            if has_gradients():
                self._arranged.enter(given, verdicts)
            dim, place = self._dim_of(given[0]) if given else None, self.place(counts)
            key = site, not torch.is_grad_enabled()
            before = self.given.get(key, Given(True, True, dim))
            rows = before.rows if place is None else before.rows | {(counts.shape, place)}
            fed = False in verdicts
            in_turn = all(t.dim() and self.place(t) == Place(0, len(t) // self.n) for t in given)
            dim = dim if dim == before.dim else None
            told = before.fed and fed, before.in_turn and in_turn, dim, rows
            self.given[key] = Given(*told, before.again or in_a_function())

    def _is_clean(self, t: Tensor) -> bool | None:
        """False: samples entered it. None: nobody knows."""
        if storage_of(t) is None:
            return None
        # What is not known and of no dimension is a number that Python made.
        clean = self._known.get(t, True if t.dim() == 0 else None)
        if clean is None and isinstance(t, nn.Parameter):  # fully_shard brings them together
            clean = any(t is p for p in self._parameters()) or None
        return clean


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
    each: Sequence[Tensor] = (),
    rows: int | None = None,
) -> Taint:
    """The operations from here to `stop`: `held` is clean, and what is met among `parameters` then;
    samples enter by the arguments, of which each in `each` may be one's. `rows`: so many has the
    first, one sample after the other, where it shows no N."""
    kind = _Untraced if "torch._dynamo" in sys.modules else Taint
    return kind(n, held, arguments, batch_dim, parameters, each, rows)


def entered(
    arguments: Sequence[Tensor], n: int, batch_dim: int, each: Sequence[Tensor]
) -> list[Place | None]:
    """Where the samples are in what a model is called with."""
    others = [*each, *_of_all(arguments, n, batch_dim)]
    places = zip(arguments, first_places(arguments, n, batch_dim), strict=True)
    return [None if any(t is other for other in others) else place for t, place in places]


def _of_all(arguments: Sequence[Tensor], n: int, batch_dim: int) -> list[Tensor]:
    whole = (t for t in arguments if t.shape[batch_dim : batch_dim + 1] == (n,))
    first = next(whole, None)
    return [t for t in arguments if first is not None and _is_of_all(t, first, n, batch_dim)]


def _is_of_all(t: Tensor, first: Tensor, n: int, batch_dim: int) -> bool:
    """Ids and masks that all samples share, as positions [T] or [1, T] beside tokens [N, T] or
    [N, T, D]; beside anything else, as weights [N, T] of nodes, they may be packed ones."""
    shape, like = list(t.shape), list(first.shape)
    if real(t) or not shape or (real(first) and first.dim() < 3):
        return False
    one = [*like[:batch_dim], 1, *like[batch_dim + 1 :]]
    if n in shape:
        return shape == one  # T = N
    rows = [like[:batch_dim] + like[batch_dim + 1 :]]
    if len(shape) > max(1, batch_dim):
        rows.append(one)
    return any(shape == row[: len(shape)] for row in rows)
