"""What forwards show while they run: once for each regime of the model's modules, their modes and
what is trained, the operations of a forward are watched (taint.py).

What no sample's value enters is a matter of the model's code: seen once, it holds for batches of
other sizes. Where the samples are, which counts where no proof can be had, holds for forwards that
go the same way; once it counted, those with arguments of other shapes are watched each.
"""

from __future__ import annotations

import contextlib
import copy
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack
from torch.utils._pytree import tree_map

from ..passes.modes import unheard
from ..shared.frontier import Graph, Node, Plan
from .arguments import flattened, of_each, one_of_several, rows_alone, sized, tensors_in
from .layout import Watched
from .others import Others
from .sample_dims import GONE, Place
from .several import End
from .taint import Given, Taint, entered, watching
from .unproven import Known, Use, followed, shown

__all__ = ["Looked", "Seen", "Witness"]

LONG = 32  # forwards
MANY = 256  # ways: sizes that never repeat must not add up


@dataclass
class Way:
    """Of forwards that go one way."""

    orderly: bool = False  # nothing moved or mixed the samples
    given: dict[tuple[int, int, bool], Given] = field(default_factory=dict)  # see given_to()
    known: Known = field(default_factory=dict)
    borrowed: bool = False  # from a way with another number of nodes

    def given_to(self, use: Use) -> Given | None:
        """By site, dimensions, and whether it leaves a graph."""
        site, sizes, node, _ = use
        found = self.given.get((site, len(sizes), node is None))
        return self.given.get((site, len(sizes), False)) if self.borrowed and not found else found

    def over(self, use: Use) -> bool:
        """Whether it left no graph, and no backward runs it again."""
        given = self.given_to(use)
        return use[2] is None and given is not None and not (given.again or self.borrowed)


@dataclass
class Seen:
    """Of one regime; outlives the probe."""

    watch: int = 1  # so many of the next forwards
    counted: set[int] = field(default_factory=set)  # numbers of samples that were watched
    patience: int = 2  # how many, when a way is waited for next
    lent: set[Any] = field(default_factory=set)  # ways that were taken for others once
    sorts: bool = False  # the batch orders its samples, before the graph begins
    uneven: bool = False  # rows alone were seen, and none of which samples have as many each
    shapes: set[Any] | None = None  # of arguments that were watched, once a way counted
    ways: dict[Any, Way] = field(default_factory=dict)
    # Of the outputs, whatever the sizes: by how many nodes the graph has, and what it calls.
    ends: dict[Any, list[Place | None]] = field(default_factory=dict)
    # By what is served, and N or the latest; with the groups that are, by place: uses have other
    # numbers in each pass.
    plans: dict[Any, tuple[Plan, list[int]]] = field(default_factory=dict)

    def planned(self, key: Any, plan: Plan, served: list[int]) -> None:
        self.plans.pop(key, None)  # the latest comes last
        self.plans[key] = plan, served
        if len(self.plans) > MANY:
            del self.plans[next(iter(self.plans))]


class _OfThread(threading.local):
    def __init__(self) -> None:
        self.taint: Taint | None = None
        self.caches: list[dict[Any, Any]] = []  # of selective checkpoints
        self.others: Others | None = None
        self.first = 0  # of the graph's nodes that this forward made
        self.shapes: Any = None  # of its arguments, where layouts are followed
        self.ends: dict[tuple[int, Node], list[End]] = {}


class Looked(NamedTuple):
    """What a forward showed while it ran."""

    taint: Taint | None
    ends: dict[tuple[int, Node], list[End]]  # of several outputs, by site and the first's node
    way: Any = None  # how many nodes of the graph it made, and outputs; its arguments' shapes
    broadcast: bool = False  # the tensor that N = 1 was read off is, against others
    others: Others | None = None  # where it did what cannot be followed
    flat: bool = False  # the first tensor shows no N: rows one after the other, or packed

    def beside(self, options: Any, arguments: Any, outputs: Any, n: int) -> Looked:
        """With what the arguments of a first pass show."""
        broadcast = n == 1 and one_of_several(options, arguments, outputs)
        flat = n > 1 and flattened(arguments, n, options["batch_dim"])
        return self._replace(broadcast=broadcast, flat=flat)


class Witness:
    """Of one probe's forwards."""

    def __init__(self, parameters: Any, seen: dict[Any, Seen]) -> None:
        self._parameters, self._seen = parameters, seen
        self._local = _OfThread()

    @property
    def seen(self) -> Seen:
        """Of the regime that the modules are in."""
        return self._seen_in(self._parameters.regime())

    def _seen_in(self, regime: Any) -> Seen:
        return self._seen.get(regime) or self._seen.setdefault(regime, Seen())

    @property
    def first(self) -> int:
        return self._local.first

    def start(
        self, n: int, model: nn.Module, arguments: Any, batch_dim: int, joins: bool = False
    ) -> None:
        """Before a forward: see what its samples enter, unless that is known. `joins`: others of
        the same samples, so that its way is another one."""
        local, seen = self._local, self.seen
        local.caches, local.first = [], torch.autograd._get_sequence_nr()
        local.shapes = None
        if seen.watch or seen.shapes is not None:
            local.shapes = tuple(t.shape for t in sized(arguments))
        other = seen.shapes is not None and (joins or local.shapes not in seen.shapes)
        other = other or (n not in seen.counted and len(seen.counted) < LONG)
        asks = n > 1 and (seen.watch or other or seen.uneven)
        flat, rows = rows_alone(arguments, n, batch_dim) if asks else (False, None)
        if n > 1 and (seen.watch or other or (seen.uneven and rows)):
            seen.uneven = flat and not rows
            held = [*model.parameters(), *model.buffers()]
            now = self._parameters.tensors
            args, kwargs = arguments
            each = [t for one in (*args, *kwargs.values()) for t in of_each(one, n)]
            given = sized(arguments)
            places = entered(given, n, batch_dim, each)
            local.others = None if rows else Others.of(n, model, arguments, places, batch_dim)
            local.taint = watching(n, held, given, batch_dim, now, each, rows)

    def stop(self, whole: bool = True, outputs: Any = None) -> Looked:
        """At the end of a forward (whole), or of a call of the model by itself."""
        local = self._local
        way = (torch.autograd._get_sequence_nr() - local.first, _which(outputs)), local.shapes
        if not whole:
            return Looked(None, local.ends, way)
        taint, others = local.taint, local.others
        found = Looked(taint, local.ends, way)
        local.taint, local.others, local.ends = None, None, {}
        if taint is not None:
            taint.stop(tensors_in(outputs))
        return found._replace(others=others) if taint is not None and taint.doubtful else found

    def several(self, site: int, first: Tensor, ends: list[End]) -> None:
        """A use has outputs beside its first."""
        if first.grad_fn is not None:
            self._local.ends.setdefault((site, first.grad_fn), []).extend(ends)

    def met(self, site: int, given: Sequence[Tensor], counts: Tensor) -> None:
        """A use of a site, where operations are watched or taken down."""
        if self._local.taint is not None:
            with unheard():
                self._local.taint.met(site, given, counts)
        for mode in _get_current_dispatch_mode_stack():
            cache = getattr(mode, "storage", None)
            if isinstance(cache, dict) and all(cache is not known for known in self._local.caches):
                self._local.caches.append(cache)

    @contextlib.contextmanager
    def unspent(self) -> Iterator[None]:
        """A backward inside leaves selective checkpoints theirs: they serve one, and no second."""
        caches = self._local.caches
        before = [{key: tree_map(_apart, kept) for key, kept in cache.items()} for cache in caches]
        try:
            yield
        finally:
            self._local.caches = caches  # and not those of forwards that ran again
            for cache, kept in zip(caches, before, strict=True):
                cache.update(kept)

    def keep(self, taint: Taint, uses: Sequence[Use], way: Any) -> None:
        """What a whole forward showed."""
        seen = self.seen
        seen.watch, seen.ends[_calls(uses, way)] = max(0, seen.watch - 1), taint.ends
        seen.counted.add(taint.n)
        if seen.shapes is not None:
            seen.shapes.add(self._local.shapes)
        seen.sorts = seen.sorts or taint.ordered
        given = {(site, len(sizes), node is None): found for site, sizes, node, _ in uses
                 for silent in (False, node is None)
                 if (found := taint.given.get((site, silent)))}  # fmt: skip
        seen.ways[way] = Way(taint.orderly, given)
        if len(seen.ways) > MANY:
            oldest = next(iter(seen.ways))
            del seen.ways[oldest]
            (seen.shapes or set()).discard(oldest[1][1])  # watched again, should it come back

    def fed(self, use: Use) -> bool:
        """Whether samples entered it in any forward, however that went."""
        found = (way.given_to(use) for way in self.seen.ways.values())
        return any(given is not None and given.fed for given in found)

    def went(self, way: Any, n: int) -> Way:
        """What forwards that went this way have shown; or such that made another number of nodes,
        as autocast does which casts a weight once, until the next forward that is watched."""
        seen, (structure, (made, shapes)) = self.seen, way
        if way in seen.ways:
            return seen.ways[way]
        sizes = structure, shapes
        other = next((w for (s, (_, t)), w in seen.ways.items() if (s, t) == sizes), None)
        if way in seen.lent:
            return Way()
        seen.lent.add(way)
        if other is None:
            seen.counted.discard(n)  # the next one of as many samples is watched
            # What modules were given is alike where its shapes were not looked at, too.
            alike = (w.given for (s, (nodes, _)), w in seen.ways.items()
                     if shapes is None and (s, nodes) == (structure, made))  # fmt: skip
            given = next(alike, {})
            return Way(given=given, borrowed=bool(given))
        self.watch()
        return replace(other, borrowed=True)

    def watch(self) -> None:
        """The next forwards: the more, the rarer the way is that is waited for."""
        seen = self.seen
        seen.watch = max(seen.watch, seen.patience)
        seen.patience = min(2 * seen.patience, LONG)

    def rows_alone(self, even: bool, mixed: bool) -> None:
        """Of such a forward: whether each sample has as many, one after the other."""
        self.seen.uneven = not even
        self.seen.sorts = self.seen.sorts or mixed

    def believed(self) -> None:
        """Where samples are is taken from a way."""
        seen = self.seen
        seen.shapes = {*(seen.shapes or ()), self._local.shapes}

    def followed(
        self,
        found: list[int | str | None],
        n: int,
        went: Way,
        uses: Sequence[Use],
        watched: Sequence[Watched],
        graph: Graph,
        taint: Taint | None,
    ) -> list[int | str | None]:
        """The layouts of uses, where no proof could be had as a forward that was watched, and went
        the same way, has shown them."""
        if taint is not None and went.orderly and n > 1:
            went.known = shown(taint, graph, uses, watched, n)
        layouts = followed(went.known, graph, uses, watched, n)
        if any(s is not None for f, s in zip(found, layouts, strict=True) if f is None):
            self.believed()
        return [s if f is None else f for f, s in zip(found, layouts, strict=True)]

    def counts(self, way: Any) -> tuple[Any, ...]:
        """What of a forward's way a verdict holds for, and in which modes."""
        (nodes, shapes), regime = way, self._parameters.regime()
        followed = self._seen_in(regime).shapes is not None
        return nodes, shapes if followed else None, regime[0]

    def places(
        self, outputs: Sequence[Tensor], n: int, uses: Sequence[Use], way: Any
    ) -> list[Place | None] | None:
        """Where the samples are in the model's outputs, as far as that was seen. None: they may be
        elsewhere than in those of other ways, until this one is watched."""
        known = self.seen.ends
        ends = known.get(_calls(uses, way))
        if ends is None and outputs and n > 1:
            ends = next((e for e in known.values() if len(e) == len(outputs)), None)
            if ends is None or not all(map(partial(_only_place, n), outputs, ends)):
                self.watch()
                return None
        ends = ends or []
        return ends if len(ends) == len(outputs) else [None] * len(outputs)


def _which(outputs: Any) -> Any:
    """Of a model's outputs, at a glance: each forward is asked."""
    if isinstance(outputs, dict):
        return tuple(outputs)
    return len(outputs) if isinstance(outputs, (tuple, list)) else 1


def _calls(uses: Sequence[Use], way: Any) -> Any:
    _, (nodes, _) = way
    return nodes, *(site for site, *_ in uses)


def _only_place(n: int, t: Tensor, place: Place | None) -> bool:
    """Whether sizes leave the samples no other place."""
    fits = [dim for dim, size in enumerate(t.shape) if size == n]
    if place is None:
        return len(fits) < 2
    return fits == ([] if place == GONE else [place.dim])


def _apart(entry: Any) -> Any:
    """What a selective checkpoint keeps, as a tensor of its own: what runs again makes that a view
    of others, once."""
    if not isinstance(getattr(entry, "val", None), Tensor):
        return entry
    twin = copy.copy(entry)
    twin.val = entry.val.detach()
    return twin
