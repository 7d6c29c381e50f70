"""Whether data leave the samples where the batch has them: no graph shows how they are taken apart
and joined (pieces.py), put into another order (order.py, reordered.py), or mixed, of which the
operation itself is asked (asked.py)."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ..sites import packed, through_time
from .asked import NOTHING, Answer, answers, runs
from .counts import Counts
from .memory import ByMemory, storage_of, view_of
from .operation import (
    Step,
    argument_of,
    indices_of,
    name_of,
    numbers,
    of_processes,
    real,
    tensors_of,
    written,
)
from .order import moves, orders, sorts_numbers
from .pieces import JOINS, Chosen, Pieces, Taken
from .reordered import Put, Reordered, Rows, order_by, shows
from .sample_dims import GONE, Fed, Follows, Place
from .stores import Stores

__all__ = ["Arranged", "Meeting", "has_gradients", "in_a_function"]

APPLY = inspect.unwrap(torch.autograd.Function.apply).__code__
PACKS = {"torch.nn.modules.rnn", "torch.nn.utils.rnn", packed.__name__, through_time.__name__}
CHOOSES = {"argsort", "cumsum", "nonzero", "searchsorted", "sort", "topk"}  # numbers of rows
TURNS = {"permute", "t", "transpose"}


class Arranged:
    """Of one forward."""

    def __init__(
        self,
        n: int,
        batch_dim: int,
        arguments: Sequence[Tensor],
        parameters: Callable[[], Iterable[Tensor]],
    ) -> None:
        self.n, self.batch_dim, self.arguments = n, batch_dim, arguments
        self._parameters = parameters
        self._beyond: ByMemory[bool] = ByMemory()  # of a weight that is trained
        self.in_turn: ByMemory[bool] = ByMemory()  # of numbers of rows, one after the other
        self._turned: set[Any] = set()  # views of which nobody knows, whose dimensions were moved
        self.reordered, self.pieces = Reordered(), Pieces(n, batch_dim)
        self.counts, self.stores = Counts(), Stores()

    @property
    def missed(self) -> bool:
        """Whether layers, or the outputs, have the samples in an order that no graph shows."""
        return self.reordered.missed

    def enter(self, given: Sequence[Tensor], clean: Sequence[bool | None]) -> None:
        """A layer is given these: numbers of rows first, and offsets beside them."""
        self.reordered.enter(given, clean)
        read = [t for t, same in zip(given, clean, strict=True)
                if same is False and (t is given[0] or t.is_floating_point())]  # fmt: skip
        self.reordered.missed = self.missed or any(map(self.counts.enter, read))

    def mark(self, t: Tensor, put: Put | None = None) -> None:
        """Parameters are given, also such that a first batch is to set."""
        held = map(storage_of, self._parameters()) if put is not None else ()
        memory = storage_of(t)
        weight = any(x is not None and memory is not None and x._cdata == memory._cdata
                     for x in held)  # fmt: skip
        self.reordered.mark(t, None if weight else put)

    def forget(self, t: Tensor) -> None:
        """There are no samples in it."""
        self.reordered.mark(t, None)
        self.pieces.keep(t, None)
        self.stores.make(t)

    def turned(self, t: Tensor) -> bool:
        return view_of(t) in self._turned

    def turn(self, t: Tensor, turned: bool) -> None:
        (self._turned.add if turned else self._turned.discard)(view_of(t))

    def trains(self, t: Tensor) -> bool:
        given = any(t is x for x in self.arguments)
        return isinstance(t, nn.Parameter) and t.requires_grad and not given

    def beyond(self, t: Tensor) -> bool:
        """Whether it is a weight that is trained, or computed with one, seen in a graph or not."""
        return self.trains(t) or self._beyond.get(t, False)

    def pass_layer(self, t: Tensor) -> None:
        self._beyond.keep(t, True)

    def shown(self, fed: Iterable[Tensor]) -> bool:
        return any(shows(t, self.arguments) for t in fed)


class Meeting:
    """With an operation that samples enter, which is yet to run: `places` of them in what it is
    given, `follows` in what it will make."""

    def __init__(
        self, arranged: Arranged, step: Step, places: Sequence[Fed], follows: Follows
    ) -> None:
        self._arranged, self._step, self._places, self._follows = arranged, step, places, follows
        self.failed = False  # what it was given has no values or sizes, or is none of torch's
        self._taken: Taken = lambda k: None
        self._moved: Put | None = None
        self._sorted = self._graph = self._data = self._detached = False
        self._fed, self._n = places, arranged.n
        self._runs: Sequence[Any] = ()
        self.fills: Place | None = None
        self._packs = bool(step.fed) and _packing()
        try:
            if step.fed:
                self._look()
        except Exception:
            self.failed = True
        self.put = self._joined()
        self._beyond = any(map(arranged.beyond, step.operands))
        self._reads = arranged.stores.read(step)
        self._turns = name_of(step.func) in TURNS or any(map(arranged.turned, step.fed))
        there = (self._beyond and in_a_function()) or arranged.missed or self._packs
        try:
            if step.fed and arranged.n > 1 and not there:
                self._ask()
        except Exception:
            self.failed = True

    def results(self, out: Any) -> Iterator[tuple[Tensor, Place | None]]:
        """What came out, and where the samples are in it."""
        step, arranged = self._step, self._arranged
        told = self._answers(out)
        before = self.put
        for k, t in tensors_of(out):
            at = None
            try:
                at = self._of_result(k, t, told[k] if told else NOTHING, before)
            except Exception:
                self.failed = True
            arranged.mark(t, self.put)
            if self._beyond:
                arranged.pass_layer(t)
            arranged.pieces.keep(t, self._taken(k))
            arranged.turn(t, at is None and self._turns)
            arranged.stores.follow(step, t)
            if name_of(step.func) == "nonzero" and t.shape[1] == 1:
                arranged.in_turn.keep(t, True)
            yield t, at
        if self._sorted:
            order = order_by(out[1], 0, len(step.args[0])) if len(out) == 2 else object()
            arranged.mark(out[0], Put(order, False, True))

    def _ask(self) -> None:
        step = self._step
        self._graph = self._in_graph()
        self._fed, self._n = self._whole_or_piece()
        self._data = not self._graph
        self._detached = self._graph and any(map(_alone, self._places))
        self.fills = self._arranged.pieces.fills(step.func, step.args)
        changed = [*enumerate(written(step.func, step.args, step.kwargs))]
        if changed and self._asks(changed):  # afterwards, what it was given is no more
            self._runs = [*self._others()]

    def _of_result(self, k: int, t: Tensor, told: Answer, before: Put | None) -> Place | None:
        func, args, kwargs, *_ = self._step
        at, strays = self._follows(k, t), False
        at = at or self._arranged.pieces.joined(func, args, kwargs, t.dim())
        if at is None or self._moved is not None:
            at, strays = self._settled(at, told, t)
        if self._moved is not None:
            self.put = self._moved if before is None else before.then(self._moved)
        else:
            self.put = self._mixed(k, t, at, strays) or self.put
        return at

    def _mixed(self, k: int, t: Tensor, at: Place | None, strays: bool) -> Put | None:
        """What is made of a result of several samples; a graph shows it until it is detached."""
        if not self._step.fed or self._arranged.n < 2 or self._packs:
            return None
        before, tokens = {at for _, at in self._places}, t.dim() == 0 and self._sums_tokens()
        counted = self._arranged.counts.meet(
            self._step, before, k, t, at, strays=strays, tokens=tokens
        )
        floats = t.is_floating_point()
        if floats and self._graph and (self._reads or (self._detached and strays)):
            self._arranged.reordered.missed = True  # each has met others', of which no gradient is
        looked = self._data or (self._graph and floats)
        mixed = looked and not tokens and (self._reads or self._strewn(t, at, strays))
        return Put(object(), self._graph and not counted, True) if counted or mixed else None

    def _strewn(self, t: Tensor, at: Place | None, strays: bool) -> bool:
        """Whether a result of data is of several samples, or has another's where one was. Counts
        are given, and whole numbers, as offsets and the longest, choose no data."""
        n, fed, name = self._arranged.n, self._step.fed, name_of(self._step.func)
        if not real(t):
            alike = any(t.shape == given.shape for given in fed)
            table = n in t.shape if t.dim() > 1 else alike and t.dim() == 1
            return strays and table and name not in CHOOSES
        lost = at == GONE and any(at != GONE for _, at in self._places)
        lost = lost or self._sums_chosen(t)
        return strays or lost

    def _sums_tokens(self) -> bool:
        """By a mask, or by lengths."""
        if name_of(self._step.func) != "sum":
            return False
        t = self._step.fed[0]
        try:
            flags = bool(((t == 0) | (t == 1)).all())
            return flags or (t.dim() < 2 and bool((t == t.round()).all()))
        except Exception:  # as above
            return False

    def _sums_chosen(self, out: Tensor) -> bool:
        """Whether it sums over rows that the batch's values chose, as tokens by a mask."""
        (func, args, kwargs, *_), dim = self._step, self._arranged.batch_dim
        if (
            not isinstance(self._arranged.pieces.of(self._step.fed[0]), Chosen)
            or self._step.fed[0] is not args[0]
        ):
            return False
        dims = [d % args[0].dim() for d in numbers([argument_of(func, args, kwargs, "dim")])]
        keeps = isinstance(argument_of(func, args, kwargs, "keepdim"), bool)
        return out.dim() == 0 or (keeps and (dim in dims or not dims))

    def _look(self) -> None:
        (func, args, kwargs, *_), arranged = self._step, self._arranged
        fed, likely = self._step.fed, self._likely
        placed = [at is not None and at != GONE for _, at in self._places]
        given = func, args, kwargs, fed
        self._taken, joins = arranged.pieces.made(*given, likely(fed[0]), placed)
        if not arranged.missed and not self._packs:
            doubtful = self._step.unknown
            order = object() if joins else orders(*given, doubtful, likely)
            order = None if not joins and self._chosen_in_turn() else order
            if order is not None:
                quiet = isinstance(order, Rows) and not torch.is_grad_enabled()  # as keys are
                shown = all(arranged.shown([t]) for t in fed) if joins else arranged.shown(fed)
                self._moved = Put(order, shown, quiet)
            numbers = sorts_numbers(func, args, fed, self._dim_of)
            self._sorted = numbers and not arranged.shown(fed)

    def _chosen_in_turn(self) -> bool:
        """Whether its rows are chosen by flags, all of them as it happens, where those were asked
        which are set."""
        func, args, *_ = self._step
        if name_of(func) == "gather":
            (_, dim, index, *_), in_turn = args, self._arranged.in_turn.get(args[2], False)
            return in_turn and not moves(index, dim, args[0].shape[dim])
        if not name_of(func).startswith("index"):
            return False
        chosen = [index for _, given in indices_of(func, args) for index in given]
        return all(index is None or self._arranged.in_turn.get(index, False) for index in chosen)

    def _joined(self) -> Put | None:
        reordered = self._arranged.reordered
        if not reordered or reordered.missed:
            return None
        sums = {at for _, at in self._places} == {GONE}  # as for the balance of experts
        return reordered.joined(
            self._step.operands, self._step.verdicts, has_gradients() and not sums
        )

    def _dim_of(self, t: Tensor) -> int | None:
        place = next((at for x, at in self._places if x is t), None)
        return None if place is None or place == GONE else place.dim

    def _likely(self, t: Tensor) -> int | None:
        """Where they could not be followed, where they are in the model's arguments."""
        dim, n = self._arranged.batch_dim, self._arranged.n
        lost = all(at is None for x, at in self._places if x is t)
        lost = lost and not self._arranged.turned(t) and self._arranged.pieces.of(t) is None
        there = t.is_floating_point() and t.dim() > dim and t.shape[dim] == n
        return dim if there and lost else self._dim_of(t)

    def _in_graph(self) -> bool:
        """Whether that of a layer: a model's input may need gradients too."""
        live = [t for t in self._step.operands if t.requires_grad and torch.is_grad_enabled()]
        given = any(t.requires_grad for t in self._arranged.arguments)
        weight = any(map(self._arranged.trains, live))
        return bool(live) and (not given or weight or self._arranged.shown(live))

    def _whole_or_piece(self) -> tuple[Sequence[Fed], int]:
        """Where samples are in what it is given, and how many; or those of one piece, if it is
        taken apart no further."""
        pieces, dim = self._arranged.pieces, self._arranged.batch_dim
        held = [pieces.of(t) for t in self._step.fed]
        if self._taken(0) is None:
            return self._places, self._arranged.n
        if isinstance(self._taken(0), Chosen):
            return self._places, 0
        many = len(held[0] or ())
        alike = set(held) == {self._taken(0)} and torch.Tag.pointwise not in self._step.func.tags
        if not alike or any(t.shape[dim : dim + 1] != (many,) for t in self._step.fed):
            return self._places, 0
        return [(t, Place(dim)) for t in self._step.fed], many

    def _asks(self, results: Iterable[tuple[int, Tensor]]) -> bool:
        """Where one of them is not followed, or moved. Rows that values chose may be any's; what is
        joined with them has its own."""
        func, places = self._step.func, {at for _, at in self._fed}
        sure = self._moved is None and all(self._follows(k, t) is not None for k, t in results)
        known = bool(places - {None, GONE}) and (None not in places or name_of(func) in JOINS)
        asks = known and self._n > 1 and torch.Tag.nondeterministic_seeded not in func.tags
        asks = asks and (self._data or self._graph) and not sure
        return asks and not of_processes(func)

    def _others(self) -> Iterator[list[Any]]:
        func, args, kwargs, *_ = self._step
        return runs(func, args, kwargs, self._fed, self._n)

    def _answers(self, out: Any) -> Sequence[Answer]:
        in_place = self._step.func._schema.is_mutable
        if not (self._runs if in_place else self._asks(tensors_of(out))):
            return ()
        try:
            return answers(out, self._runs if in_place else self._others(), self._n)
        except Exception:  # as above
            return ()

    def _settled(
        self, followed: Place | None, found: Answer, t: Tensor
    ) -> tuple[Place | None, bool]:
        """What was followed, or found where samples are known in all that it was given."""
        place, n = found.place, self._arranged.n
        whole = n == self._n and all(at is not None for _, at in self._places)
        if whole and place is not None and place != GONE and t.shape[place.dim] != n:
            self._moved = None  # rows of flattened samples: each was given its own
        asked = whole and followed is None and not self._graph  # there it is proven
        return (place if asked else followed), found.astray


def _alone(fed: Fed) -> bool:
    """Whether samples' activations are there without their graph, in rows of their own."""
    t, at = fed
    return not t.requires_grad and t.is_floating_point() and at not in (None, GONE)


def has_gradients() -> bool:
    """Whether gradients will be had of what is done now."""
    return torch.is_grad_enabled() or in_a_function()


def in_a_function() -> bool:
    """Whether torch.autograd.Functions run on this thread: reentrant checkpoints are some."""
    return _runs(lambda frame: frame.f_code is APPLY)


def _packing() -> bool:
    """Whether torch sorts samples to pack them, which unpacking undoes."""
    return _runs(
        lambda frame: (
            frame.f_globals.get("__name__") in PACKS and frame.f_code.co_name != "pad_sequence"
        )
    )


def _runs(what: Callable[[Any], bool]) -> bool:
    frame: Any = sys._getframe()
    while frame is not None and not what(frame):
        frame = frame.f_back
    return frame is not None
