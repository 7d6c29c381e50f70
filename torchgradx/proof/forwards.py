"""The trace of a forward, taken on its thread while it runs, and what traces say of a model.

The first forward of a regime is watched: each operator is observed, to find the tensors that are
constant, which means the same for any batch (graph/constant.py). A regime is the modes of the
modules and which parameters are trained. One watched forward serves batches of all sizes, because
the model's code decides what is constant.
"""

from __future__ import annotations

import contextlib
import copy
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from math import prod
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack
from torch.utils._pytree import tree_map

from ..extension import Pass
from ..graph.arguments import has_flat_rows, ones_of, sized_tensors_in
from ..graph.constant import Watch
from ..graph.heads import Taken, last_layers, taken_rows
from ..graph.layout import NOWHERE, SEGMENTS, SHARED, TAKEN
from ..graph.modes import without_user_modes
from ..graph.nodes import Edge, Graph
from ..graph.routes import routes_of
from ..graph.segments import place_among
from ..graph.unpacking import INDICES
from ..sharding import local_part
from ..sites.packed import Packed
from ..sites.several import End

_Facts = dict[tuple[int, int], int | None]  # by site and number of its call; None: it differed


@dataclass
class Memory:
    """Facts that the watched forwards of one regime have shown. Outlives the probe."""

    is_due: bool = True  # the next forward is watched
    constant: _Facts = field(default_factory=dict)  # 1: all inputs of the call are constant
    # Layout of an input that is a view, or an elementwise result, of an argument of the model.
    anchored: _Facts = field(default_factory=dict)
    # By site: True if data decided how many rows it got; and whether they did anywhere.
    picked: dict[int, bool] = field(default_factory=dict)
    picks: bool = False
    # Dimension of the samples in an output, by its place and number of dimensions.
    dims: dict[tuple[int, int], int] = field(default_factory=dict)

    def tables(self, uses: Sequence[Any]) -> set[int]:
        """Return the uses whose inputs, as far as they were watched, are all constant."""
        return set(_look_up(self.constant, uses))

    def is_picked(self, site: int) -> bool:
        """Return True if data may decide how many rows a site gets."""
        return self.picked.get(site, self.picks)

    def anchors(self, uses: Sequence[Any]) -> dict[int, int]:
        """Return {use: layout of its input} for inputs that an argument of the model shows."""
        return _look_up(self.anchored, uses)

    def note_constants(self, uses: Sequence[Any], is_constant: Callable[[Any, int], bool]) -> None:
        """Count uses as tables whose output is constant though an input is not: positions made
        from the shape of the ids, for example."""
        for call, (_, _, node, number) in zip(_calls(uses), uses, strict=True):
            if node is not None and is_constant(node, number):
                self.constant[call] = 1
            else:
                self.constant.setdefault(call, None)

    def learn(self, watch: Watch) -> None:
        """Add what a watched forward has shown; a fact that differs from before becomes None."""
        self.is_due = False
        self.picks = self.picks or watch.observer.picks
        self.picked |= {site: self.picked.get(site, False) or p for site, p in watch.picked.items()}
        for known, seen in (self.constant, watch.inputs), (self.anchored, watch.anchored):
            for call, fact in seen.items():
                known[call] = fact if known.get(call, fact) == fact else None


def _calls(uses: Sequence[Any]) -> Iterator[tuple[int, int]]:
    """Yield for each use its site, and its number among the calls of that site."""
    calls: Counter[int] = Counter()
    for site, *_ in uses:
        yield site, calls[site]
        calls[site] += 1


def _look_up(known: _Facts, uses: Sequence[Any]) -> dict[int, int]:
    """Return {use: fact}. A call that was never watched takes the fact that all watched calls of
    its site share."""
    found: dict[int, int] = {}
    for k, call in enumerate(_calls(uses)):
        fact = known.get(call)
        if call not in known:
            facts = {fact for (site, _), fact in known.items() if site == call[0]}
            fact = facts.pop() if len(facts) == 1 else None
        if fact is not None:
            found[k] = fact
    return found


@dataclass
class ForwardTrace:
    """Facts that one forward shows while it runs."""

    regime: Any = None  # see Parameters.regime, when it began
    memory: Memory = field(default_factory=Memory)  # of the regime
    first: int = 0  # sequence number of the first node that it made
    ones: Any = ()  # see ones_of
    flat: bool = False  # the first argument does not show N: its rows may be of any sample
    watch: Watch | None = None  # None: it was not watched
    nodes: int = 0  # count of the graph's nodes that it made
    kind: Any = None  # of the outputs, see _kind
    # Further outputs of a use, by site and first one's node.
    ends: dict[tuple[int, Any], list[End]] = field(default_factory=dict)
    by_row: dict[Any, Any] = field(default_factory=dict)  # see note_routes
    packed: list[tuple[int, Packed, Edge]] = field(default_factory=list)  # see note_packed
    postponed: list[tuple[int, Callable[[], None]]] = field(default_factory=list)
    caches: list[dict[Any, Any]] = field(default_factory=list)  # of selective checkpoints

    def listen(self, layouts: Sequence[int]) -> None:
        """Add the postponed hooks, but for uses that are SHARED: these are served elsewhere."""
        for use, listen in self.postponed:
            if not 0 <= use < len(layouts) or layouts[use] != SHARED:
                listen()
        self.postponed.clear()

    @contextlib.contextmanager
    def keep_caches(self) -> Iterator[None]:
        """Put back the caches of selective checkpoints: a backward inside empties them."""
        before = [{key: tree_map(_copied, kept) for key, kept in c.items()} for c in self.caches]
        try:
            yield
        finally:
            for cache, kept in zip(self.caches, before, strict=True):
                cache.update(kept)


@dataclass(eq=False)
class Forward:
    """A forward of the model that has ended."""

    run: Pass  # its pass
    uses: Sequence[Any]  # (site, sizes of the output, node of the output, output of the node)
    outputs: Sequence[Tensor]  # of the model
    trace: ForwardTrace
    sites: Sequence[Any]

    @property
    def n(self) -> int:
        return int(self.run.n)

    @cached_property
    def key(self) -> tuple[Any, ...]:
        """Return the cache key of its structure, and of its graph beside that and N."""
        # In a backward, a checkpoint runs the model again: less can be proven there.
        in_backward, trace = torch._C._current_graph_task_id() != -1, self.trace
        rest = in_backward, trace.nodes, trace.kind, trace.ones, trace.regime
        return self.run.structure, self.n, *rest

    @property
    def calls(self) -> tuple[Any, ...]:
        """Return the cache key of its calls: the same for batches of any size."""
        called = tuple((site, len(sizes), node is None) for site, sizes, node, _ in self.uses)
        return called, *self.key[2:]

    @cached_property
    def graph(self) -> Graph:
        return Graph(self.outputs)

    @cached_property
    def inner(self) -> list[Tensor]:
        """Return the outputs of the last layers, if the model's outputs have no samples."""
        n, tables = self.n, self.trace.memory.tables(self.uses)
        live = [t for t in self.outputs if t.grad_fn is not None]
        if n < 2 or any(n in t.shape for t in live) or any(self.taken_outputs):
            return []
        layers = {node for k, (_, _, node, _) in enumerate(self.uses) if k not in tables}
        return last_layers(live, layers, n)

    @property
    def heads(self) -> Sequence[Tensor]:
        """Return what may have the samples."""
        return self.inner or self.outputs

    @cached_property
    def taken_outputs(self) -> list[Taken | None]:
        """Return the rows that indices took, by output of the model."""
        return taken_rows(self.outputs, self.n, lambda _: self.graph)

    @cached_property
    def taken(self) -> list[Taken | None]:
        """Return the rows that indices took, by head."""
        return taken_rows(self.inner, self.n) if self.inner else self.taken_outputs

    def samples_of(self, k: int) -> Tensor | None:
        """Return the sample of each row of a use, if indices took these rows."""
        index, sizes, node, number = self.uses[k]
        site = self.sites[index]
        samples = next((one.samples for one in self.taken if one and node in one.nodes), None)
        if samples is None or site.declared >= 0:
            return None
        samples = samples.to(node._input_metadata[number].device)
        each, rest = divmod(prod(sizes[: site.leads(len(sizes))]), len(samples))
        return None if rest else samples if each == 1 else samples.repeat_interleave(each)

    def takes(self, layouts: Sequence[int]) -> bool:
        """Return True if the uses of layout TAKEN are those whose rows indices took."""
        return all(
            layout in (SHARED, NOWHERE) or (layout == TAKEN) == (self.samples_of(k) is not None)
            for k, layout in enumerate(layouts)
        )

    @cached_property
    def routes(self) -> list[Any]:
        """Return the rows that the batch's values chose: graph/routes.py."""
        taken = [one for one in self.taken if one]
        indices = {node: "taken" for one in taken for node in one.indices}
        by_row = {**self.trace.by_row, **indices}
        for k, (site, packed, end) in enumerate(self.trace.packed):
            others = [(edge, one) for _, one, edge in self.trace.packed[:k]]
            known = packed.nodes(self.graph, end, others)
            by_row.update(dict.fromkeys(known, ("packed", site)))
        routes = routes_of(self.heads, self.n, by_row)
        # Rows of one sample do not show whether those of two would mix.
        return routes + [None] * any(bool(one.samples[0] == one.samples[-1]) for one in taken)

    def place_segments(self) -> None:
        """Give the pass the segments of uses whose layout is TAKEN."""
        run, layouts = self.run, list(self.run.layouts)
        segments, first = list(run.segments), len(layouts) - len(self.uses)
        for k in range(len(self.uses)):
            if layouts[first + k] != TAKEN:
                continue
            samples: Any = self.samples_of(k)
            layouts[first + k] = SEGMENTS + place_among(segments, samples, self.n)
        run.layouts, run.segments = layouts, segments


class _OfThread(threading.local):
    def __init__(self) -> None:
        self.trace = ForwardTrace()


class Forwards:
    """Traces the forwards of one probe."""

    def __init__(self, parameters: Any, memories: dict[Any, Memory]) -> None:
        self._parameters, self._memories = parameters, memories
        self._local = _OfThread()

    def _memory_of(self, regime: Any) -> Memory:
        return self._memories.get(regime) or self._memories.setdefault(regime, Memory())

    def watch_again(self) -> None:
        """Watch the next forward of this regime."""
        self._memory_of(self._parameters.regime()).is_due = True

    def start(self, n: int, model: nn.Module, arguments: Any, batch_dim: int) -> None:
        """Begin the trace of a forward, and watch it if its regime asks for that."""
        regime = self._parameters.regime()
        trace = ForwardTrace(regime, self._memory_of(regime), torch.autograd._get_sequence_nr())
        tensors = sized_tensors_in(arguments) if n > 1 else []
        first = next((t for t in tensors if t.dim()), None)
        if first is not None:
            trace.flat = has_flat_rows(first, arguments, n, batch_dim)
            trace.ones = ones_of(first)
        if n > 1 and trace.memory.is_due:
            constants = [*map(local_part, model.parameters()), *model.buffers(), *_kept_ids(model)]
            trace.watch = Watch(constants, tensors, n, batch_dim)
        self._local.trace = trace

    def stop(self, whole: bool = True, outputs: Any = None) -> ForwardTrace:
        """Return the trace of a forward. whole: end it; False for the inner call of a model that
        calls itself. outputs: None if the forward failed, or an interrupt left it."""
        trace = self._local.trace
        trace.nodes = torch.autograd._get_sequence_nr() - trace.first
        trace.kind = _kind(outputs)
        if outputs is None:
            trace.postponed.clear()
        if not whole:
            return replace(trace, watch=None)
        facts = trace.regime, trace.memory, trace.first, trace.ones, trace.flat
        self._local.trace = ForwardTrace(*facts)  # of what follows an interrupt
        if trace.watch is not None:
            trace.watch.observer.stop()
            if outputs is not None:
                trace.memory.learn(trace.watch)
        return trace

    def postpone(self, use: int, listen: Callable[[], None]) -> None:
        """Have a use's hooks added by `listen` at the end of the forward."""
        self._local.trace.postponed.append((use, listen))

    def note_ends(self, site: int, first: Tensor, ends: list[End]) -> None:
        """Note the outputs of a use beside its first."""
        if first.grad_fn is not None:
            self._local.trace.ends.setdefault((site, first.grad_fn), []).extend(ends)

    def note_routes(
        self, use: int, nodes: Mapping[Any, int], inputs: Sequence[Tensor], output: Tensor
    ) -> None:
        """Note a use's nodes that route rows by their values and keep each row in its sample, as
        {node: count of routing nodes of the use that do not}. They cover its own picks of rows."""
        self._local.trace.by_row.update({node: (use, others) for node, others in nodes.items()})
        if (watch := self._local.trace.watch) and not any(map(watch.observer.is_picked, inputs)):
            watch.observer.unpick(output)

    def note_packed(self, site: int, packed: Packed, rows: Tensor) -> None:
        """Note a call that was given a packed sequence, and the rows that it made, packed alike."""
        if rows.grad_fn is not None:
            self._local.trace.packed.append((site, packed, (rows.grad_fn, rows.output_nr)))

    def note_outputs(self, site: int, outputs: Sequence[Tensor]) -> None:
        """Note in a watched forward whether data decided how many rows a call of a site made."""
        if self._local.trace.watch is not None:
            self._local.trace.watch.note_rows(site, outputs)

    def note_call(self, site: int, *inputs: Tensor) -> None:
        """Note a call of a site in a watched forward, and the caches of selective checkpoints."""
        if self._local.trace.watch is not None:
            with without_user_modes():
                self._local.trace.watch.note_call(site, inputs)
        caches = self._local.trace.caches
        for mode in _get_current_dispatch_mode_stack():
            cache = getattr(mode, "storage", None)
            if isinstance(cache, dict) and all(cache is not known for known in caches):
                caches.append(cache)


def _kept_ids(model: nn.Module) -> Iterator[Tensor]:
    """Yield tensors of integers that modules keep beside their buffers: ids of positions, or of
    prompts. Integers choose rows of tables, and nothing else of theirs can mix samples."""
    for kept in (value for module in model.modules() for value in vars(module).values()):
        parts = kept.values() if isinstance(kept, dict) else kept
        for t in parts if isinstance(kept, (dict, list, tuple)) else (kept,):
            if isinstance(t, Tensor) and t.dtype in INDICES:
                yield t


def _kind(outputs: Any) -> Any:
    """Return a cheap description of a model's outputs: the keys of a dict, or their count."""
    if isinstance(outputs, dict):
        return tuple(outputs)
    return len(outputs) if isinstance(outputs, (tuple, list)) else 1


def _copied(entry: Any) -> Any:
    """Return a copy of an entry of a selective checkpoint's cache, which can be used once."""
    if not isinstance(getattr(entry, "val", None), Tensor):
        return entry
    twin = copy.copy(entry)
    twin.val = entry.val.detach()
    return twin
