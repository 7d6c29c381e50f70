"""Notes taken while forwards run, on each thread: which tensors are constant (constant.py) in the
first forward of a regime, and the further outputs of modules that have several.

A regime is the modes of the modules and what is trained. What is constant is a matter of the
model's code: seen once, it holds for batches of other sizes.
"""

from __future__ import annotations

import contextlib
import copy
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack
from torch.utils._pytree import tree_map

from ..graph.arguments import has_flat_rows, sized_tensors_in
from ..graph.constant import Watch
from ..graph.layout import SHARED
from ..graph.modes import without_user_modes
from ..graph.nodes import Graph
from ..sharding import local_part
from ..sites.several import End


@dataclass
class Memory:
    """Facts that forwards of one regime have shown; outlives the probe."""

    watches: int = 1  # so many of the next forwards are watched
    # Of the inputs of sites, by the site and the place among its calls; None: it differed.
    constant: dict[tuple[int, int], int | None] = field(default_factory=dict)
    anchored: dict[tuple[int, int], int | None] = field(default_factory=dict)
    picks: bool = False  # data chose how many rows layers have
    # Of the samples in the outputs, by their place and number of dimensions.
    dims: dict[tuple[int, int], int] = field(default_factory=dict)

    def tables(self, uses: Sequence[Any]) -> set[int]:
        """Return the uses with constant inputs, as far as that was observed."""
        return set(_where(self.constant, uses))

    def see(self, uses: Sequence[Any], constant: Callable[[Any, int], bool]) -> None:
        """Note the uses with constant outputs, though not all of their inputs are, as positions
        beside the ids that they are of."""
        for call, (_, _, node, number) in zip(_calls(uses), uses, strict=True):
            same = node is not None and constant(node, number)
            self.constant[call] = 1 if same else self.constant.get(call)

    def anchors(self, uses: Sequence[Any]) -> dict[int, int]:
        """Return layouts of uses that got a view of the model's argument, or its like."""
        return _where(self.anchored, uses)

    def learn(self, watch: Watch) -> None:
        self.watches = max(0, self.watches - 1)
        self.picks = self.picks or watch.observer.picks
        for known, inputs in (self.constant, watch.inputs), (self.anchored, watch.anchored):
            for call, one in inputs.items():
                known[call] = one if known.get(call, one) == one else None


def _calls(uses: Sequence[Any]) -> Iterator[tuple[int, int]]:
    """Yield the site of each use, and its place among the calls of this site."""
    calls: Counter[int] = Counter()
    for site, *_ in uses:
        yield site, calls[site]
        calls[site] += 1


def _where(known: dict[tuple[int, int], int | None], uses: Sequence[Any]) -> dict[int, int]:
    """Return what is known of these uses; of a site called more often, if its calls were alike."""
    found: dict[int, int] = {}
    for k, call in enumerate(_calls(uses)):
        one = known.get(call)
        if call not in known:
            ones = {one for (site, _), one in known.items() if site == call[0]}
            one = ones.pop() if len(ones) == 1 else None
        if one is not None:
            found[k] = one
    return found


class ForwardTrace(NamedTuple):
    """Facts that one forward showed while it ran."""

    watch: Watch | None
    ends: dict[tuple[int, Any], list[End]]  # of several outputs, by site and the first's node
    nodes: int  # of the graph that it made
    kind: Any  # of outputs
    flat: bool  # the first argument shows no N: its rows may be of any sample
    by_row: Mapping[Any, Any]  # nodes that took a sample's rows from its own, see `note_routes`


@dataclass(frozen=True)
class Forward:
    """A forward of the model that has ended."""

    run: Any  # its pass
    uses: Sequence[Any]  # (site, sizes of the output, its node, its number there)
    outputs: Sequence[Tensor]  # of the model
    trace: ForwardTrace

    @property
    def n(self) -> int:
        n: int = self.run.n
        return n

    @cached_property
    def graph(self) -> Graph:
        return Graph(self.outputs)


class _OfThread(threading.local):
    def __init__(self) -> None:
        self.watch: Watch | None = None
        self.caches: list[dict[Any, Any]] = []  # of selective checkpoints
        self.first = 0  # of the graph's nodes that this forward made
        self.ends: dict[tuple[int, Any], list[End]] = {}
        self.by_row: dict[Any, Any] = {}
        self.flat = False
        self.postponed: list[tuple[int, Callable[[], None]]] = []


class Forwards:
    """The forwards of one probe."""

    def __init__(self, parameters: Any, memories: dict[Any, Memory]) -> None:
        self._parameters, self._memories = parameters, memories
        self._local = _OfThread()

    @property
    def memory(self) -> Memory:
        """Return the memory of the regime that the modules are in."""
        regime = self._parameters.regime()
        return self._memories.get(regime) or self._memories.setdefault(regime, Memory())

    def watch_again(self) -> None:
        """Have the next forward of this regime watched, at least."""
        self.memory.watches = max(1, self.memory.watches)

    @property
    def first(self) -> int:
        return self._local.first

    @property
    def watching(self) -> bool:
        return self._local.watch is not None

    def start(self, n: int, model: nn.Module, arguments: Any, batch_dim: int) -> None:
        local = self._local
        local.caches, local.first = [], torch.autograd._get_sequence_nr()
        local.postponed = []
        local.flat = n > 1 and has_flat_rows(arguments, n, batch_dim)
        if n > 1 and self.memory.watches:
            constants = [*map(local_part, model.parameters()), *model.buffers()]
            local.watch = Watch(constants, sized_tensors_in(arguments), n, batch_dim)

    def stop(self, whole: bool = True, outputs: Any = None) -> ForwardTrace:
        """Stop watching at the end of a forward (whole), or of a call of the model by itself."""
        local = self._local
        nodes = torch.autograd._get_sequence_nr() - local.first
        if outputs is None:  # it failed
            local.postponed = []
        if not whole:
            return ForwardTrace(None, local.ends, nodes, _kind(outputs), local.flat, local.by_row)
        watch, ends, by_row = local.watch, local.ends, local.by_row
        local.watch, local.ends, local.by_row = None, {}, {}
        if watch is not None:
            watch.observer.stop()
            if outputs is not None:  # else it failed, or was left by an interrupt
                self.memory.learn(watch)
        return ForwardTrace(watch, ends, nodes, _kind(outputs), local.flat, by_row)

    def postpone(self, use: int, listen: Callable[[], None]) -> None:
        """Listen to a use at the end of the forward only, if it is not SHARED."""
        self._local.postponed.append((use, listen))

    def listen(self, layouts: Sequence[int]) -> None:
        postponed, self._local.postponed = self._local.postponed, []
        for use, listen in postponed:
            if not 0 <= use < len(layouts) or layouts[use] != SHARED:
                listen()

    def note_ends(self, site: int, first: Tensor, ends: list[End]) -> None:
        """Note the outputs of a use beside its first."""
        if first.grad_fn is not None:
            self._local.ends.setdefault((site, first.grad_fn), []).extend(ends)

    @property
    def picks(self) -> bool:
        """Return whether this forward, watched, has taken rows of data by data."""
        watch = self._local.watch
        return watch is not None and bool(watch.observer.picks)

    def note_routes(self, use: int, nodes: Mapping[Any, int], picks: bool) -> None:
        """Note nodes of a use that sent rows by values, each sample's to its own; so many did not.

        picks: before it. What it took itself was used by these alone.
        """
        self._local.by_row.update({node: (use, others) for node, others in nodes.items()})
        if self._local.watch is not None:
            self._local.watch.observer.picks = picks

    def note_call(self, site: int, inputs: Sequence[Tensor]) -> None:
        """Note a call of a site where operators are watched, or under a selective checkpoint."""
        if self._local.watch is not None:
            with without_user_modes():
                self._local.watch.note_call(site, inputs)
        for mode in _get_current_dispatch_mode_stack():
            cache = getattr(mode, "storage", None)
            if isinstance(cache, dict) and all(cache is not known for known in self._local.caches):
                self._local.caches.append(cache)

    @contextlib.contextmanager
    def unspent(self) -> Iterator[None]:
        """Have a backward inside leave selective checkpoints as they are: they serve one alone."""
        caches = self._local.caches
        before = [{key: tree_map(_detached, kept) for key, kept in c.items()} for c in caches]
        try:
            yield
        finally:
            self._local.caches = caches  # and not those of forwards that ran again
            for cache, kept in zip(caches, before, strict=True):
                cache.update(kept)


def _kind(outputs: Any) -> Any:
    """Return the kind of a model's outputs, at a glance: each forward is asked."""
    if isinstance(outputs, dict):
        return tuple(outputs)
    return len(outputs) if isinstance(outputs, (tuple, list)) else 1


def _detached(entry: Any) -> Any:
    """Return a copy of what a selective checkpoint keeps, which is made a view once."""
    if not isinstance(getattr(entry, "val", None), Tensor):
        return entry
    twin = copy.copy(entry)
    twin.val = entry.val.detach()
    return twin
