"""Gradients by sample, taken down from a frontier (frontier.py) to the parameters below it.

As the backward reaches it, each node is asked for its vector-Jacobian product sample by sample,
before it runs itself and lets its saved tensors go. Gradients between nodes are [N, *shape].
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ..gradients.by_sample import (
    GRADIENT_ELEMENTS,
    Gradients,
    added,
    in_full,
    keep,
    size,
    sq_norms,
    to_add,
    total,
)
from ..gradients.products import (
    CAST,
    EMBEDDING,
    ask_each,
    closed_form,
    closed_form_below,
    fit_to_edge,
    lookup_product,
    pass_factors,
    scales_by_count,
    split_samples,
    to_dense,
)
from ..graph.layout import NOWHERE
from ..graph.nodes import Node, dtype_of, shape_of
from ..graph.unpacking import keep_handles
from ..hooks.copies import untraced
from ..hooks.engine import receives_grad
from ..ops import NATIVE
from ..reference.chunks import chunks
from ..refusals import cause
from ..sharding import is_fsdp_node
from .stations import Leaf, Match, Station, Trail

if NATIVE:
    from .._C import Terms, hooked


class Descent:
    """The path down through one pass's graph: owned by its hooks, it owns no node."""

    def __init__(
        self, run: Any, match: Match, lift: Any, parameters: Any, refuse: Callable[[str], None]
    ) -> None:
        """lift: see lift.py."""
        self._run, self._refuse, self._tensors = run, refuse, parameters.wholes()
        self._recorder, self._hears, self._delivered = lift.recorder, lift.hears, lift.delivered
        self._norms_only = lift.norms_only
        self._packed, self._leaves = match.packed, match.leaves
        self._task, self._final, self._books, self._rounding = -1, True, False, 0.0
        self._received: dict[tuple[int, int], Gradients] = {}  # between nodes, by node and output
        self._ready: list[tuple[Leaf, Gradients, bool]] = []
        # Then only a hook of the user's between nodes changes what comes down.
        self._guarded, self._compares = match.trail is not None, True
        known: Counter[int] = Counter()
        for leaf in match.leaves:
            if leaf.alone:
                continue
            known[leaf.place] += 1
            if known[leaf.place] > leaf.calls:  # the sum over its uses waits for this one too
                run.expect(leaf.place, self._tensors[leaf.place])
        for node, station in (match.stations or {}).items():
            node.register_prehook(partial(self._arrive, station))
            if station.leaves:
                node.register_hook(self._deliver)

    def serve(self, outline: Any, trail: Trail) -> None:
        """Have nodes of the frontier whose operands are parameters alone served by the extension,
        where a backward wants squared norms, and the samples' gradients to clip at most."""
        self._stations = trail.stations
        outline.serve(self._run, trail.stops, Terms(self._wants, self._at_once))

    @untraced
    def _wants(self) -> int:
        """0: something else; 1: squared norms; 2: gradients by sample too."""
        if self._task != torch._C._current_graph_task_id():
            self._begin()
        if not self._counts or torch.is_grad_enabled() or self._compares:
            return 0
        return 1 if self._final else 2 * self._books

    def _at_once(self, station: int, incoming: Sequence[Tensor | None]) -> None:
        self._arrive(self._stations[station], incoming)
        self._deliver()

    @untraced
    def _arrive(self, station: Station, incoming: Sequence[Tensor | None]) -> None:
        if self._task != torch._C._current_graph_task_id():
            self._begin()
        if torch.is_grad_enabled() or not self._counts:
            return  # create_graph, which is refused when it is read
        node = torch._C._current_autograd_node()
        self._gives = any(g is not None for g in incoming)  # else a cast under norms only
        # Norms only: a fused layer gives its parameters nothing to compare with.
        self._withholds = self._norms_only and node.name().startswith("torchgradx")
        try:
            with keep_handles(node) if station.key in self._packed else nullcontext():
                if not self._run.n:
                    self._nothing(station, node, incoming)
                elif station.layout is not None:
                    self._enter(station, node, incoming)
                else:
                    grads = [
                        self._received.pop((station.key, k), None) for k in range(len(incoming))
                    ]
                    if self._compares or hooked(node, 1, bool(station.leaves)):
                        self._compare(station, node, incoming, grads)
                    self._pass(station, node, grads)
        except Exception as error:  # never from inside backward()
            self._refuse(cause("failed", error=f"at {node.name()}: {error}"))

    def _begin(self) -> None:
        self._task, self._rounding = torch._C._current_graph_task_id(), 0.0
        self._received.clear()
        self._ready.clear()
        arrives = any(self._run.arrive([leaf.place], True) for leaf in self._leaves)
        served = (self._tensors[leaf.place] for leaf in self._leaves)
        self._counts = arrives and any(map(receives_grad, served))
        keeps = torch._C._autograd._get_current_graph_task_keep_graph()
        again = self._run.keep or self._run.retained or keeps or bool(self._run.directions)
        self._books = self._recorder.books and not again
        self._final = not (again or self._recorder.books)
        hears = (self._hears(leaf) for leaf in self._leaves if not leaf.counted)
        self._compares = not self._guarded or self._recorder.auditing or any(hears)
        if self._counts:
            counted = (leaf.place for leaf in self._leaves if leaf.counted)
            self._delivered.update((self._task, place) for place in counted)

    def _compare(
        self,
        station: Station,
        node: Node,
        incoming: Sequence[Tensor | None],
        grads: Sequence[Gradients | None],
    ) -> None:
        """Refuse where a node receives something else than the sum over the samples of what came
        down: of a use that no output leads to, or by a hook of the user's in between."""
        casts = station.leaves and node.name() == CAST  # autocast: for all uses at once
        for g, mine in zip(incoming, grads, strict=True):
            if mine is not None:
                self._measure(mine)
            if g is None or casts:
                continue
            own = size(g)
            off = own if mine is None else size(g - total(mine))
            if off > 64 * (self._rounding + own * torch.finfo(g.dtype).eps):
                self._refuse("not_its_sum")

    def _enter(self, station: Station, node: Node, incoming: Sequence[Tensor | None]) -> None:
        """Through a node of the frontier, whose gradient has rows by sample."""
        g, layout, n = incoming[station.output], station.layout, self._run.n
        if layout is None:
            return
        if g is None or layout == NOWHERE:
            if g is not None and g.any():
                self._refuse("after_zeros")
            self._nothing(station, node, incoming)
            return
        if station.inward or any(self._hears(leaf) for leaf in station.leaves.values()):
            self._measure(g)  # for what will be compared
        masked = []
        for operand in station.operands:
            product = closed_form(node, operand, g, layout, n)
            if product is None:
                masked.append(operand)
            else:
                self._send(station, operand, product)
        if masked:
            self._collect(station, masked, self._ask_masked(station, node, incoming, masked))

    def _ask_masked(
        self,
        station: Station,
        node: Node,
        incoming: Sequence[Tensor | None],
        operands: Sequence[int],
    ) -> Iterator[Sequence[Tensor]]:
        """Ask a node of the frontier for each sample, all others' rows masked."""
        g: Any = incoming[station.output]
        layout: Any = station.layout
        for sample in range(self._run.n):
            only = torch.zeros_like(g)
            split_samples(only, layout, self._run.n)[sample] = split_samples(
                g, layout, self._run.n
            )[sample]
            out = self._ask(node, [only if k == station.output else None
                                   for k in range(len(incoming))])  # fmt: skip
            yield [to_dense(out[operand])[None] for operand in operands]

    def _nothing(self, station: Station, node: Node, incoming: Sequence[Tensor | None]) -> None:
        """Send zeros: of no samples, or behind weights that are zeros."""
        tensors = (*incoming, *(self._tensors[leaf.place] for leaf in station.leaves.values()))
        device = next((t.device for t in tensors if t is not None), None)
        for operand in station.operands:
            edge = node.next_functions[operand]
            zeros = torch.zeros((), dtype=dtype_of(*edge), device=device)
            self._send(station, operand, zeros.expand(self._run.n, *shape_of(*edge)))

    def _pass(self, station: Station, node: Node, grads: list[Gradients | None]) -> None:
        """Through a node of which all outputs are shared."""
        products = pass_factors(node, grads[0])
        if products is not None:
            for operand in station.operands:
                self._send(station, operand, products[operand])
            return
        live = {k: in_full(g).to(dtype_of(node, k)) for k, g in enumerate(grads) if g is not None}
        if not live:
            return
        formed = self._formed(station, node, live, len(grads))
        for operand, product in formed.items():
            self._send(station, operand, product)
        if not formed:
            asked = self._ask_mapped(station, node, live, len(grads))
            self._collect(station, station.operands, asked)

    def _formed(
        self, station: Station, node: Node, live: dict[int, Tensor], outputs: int
    ) -> dict[int, Gradients]:
        """Return products of all operands in closed form; empty: some have none."""
        if node.name() == EMBEDDING and not scales_by_count(node):  # the same ids for all samples
            ids = node._saved_indices.reshape(1, -1).expand(self._run.n, -1)
            return dict.fromkeys(station.operands, lookup_product(node, ids, live[0]))
        formed = {}
        for k in station.operands if outputs == 1 else ():
            product = closed_form_below(node, k, live[0], lambda g: self._ask(node, [g]))
            if product is None:
                return {}
            formed[k] = product
        return formed

    def _ask_mapped(
        self, station: Station, node: Node, live: dict[int, Tensor], outputs: int
    ) -> Iterator[Sequence[Tensor | None]]:
        """Ask a node for so many samples at a time."""
        places = (leaf.place for leaf in station.leaves.values())
        most = max((self._tensors[place].numel() for place in places), default=1)

        def ask(*grads: Tensor) -> tuple[Tensor, ...]:
            by_output = dict(zip(live, grads, strict=True))
            out = self._ask(node, [by_output.get(k) for k in range(outputs)])
            return tuple(out[operand] for operand in station.operands)

        for samples in chunks(self._run.n, most, GRADIENT_ELEMENTS):
            yield ask_each(ask, [g[samples] for g in live.values()])

    def _collect(
        self, station: Station, operands: Sequence[int], parts: Iterable[Sequence[Tensor | None]]
    ) -> None:
        """Send products that come for some samples at a time, reduced as they come."""
        columns: dict[int, list[Tensor]] = {operand: [] for operand in operands}
        for products in parts:
            for operand, product in zip(operands, products, strict=True):
                if product is not None:
                    columns[operand].append(self._reduced(station, operand, product))
        for operand, column in columns.items():
            if column:
                self._pass_on(station, operand, torch.cat(column))

    def _send(self, station: Station, operand: int, product: Gradients) -> None:
        self._pass_on(station, operand, self._reduced(station, operand, product))

    def _reduced(self, station: Station, operand: int, product: Gradients) -> Any:
        """[n, *shape], or [n] squared norms where nothing else is added to it."""
        leaf = station.leaves.get(operand)
        if leaf is None:
            return product
        is_compared = self._hears(leaf) and self._gives and not (self._withholds and operand)
        if is_compared:
            self._measure(product)
        parameter = self._tensors[leaf.place]
        if isinstance(product, Tensor):  # what lies between, a view or a cast, may have had others
            product = product.reshape(len(product), *parameter.shape).to(parameter.dtype)
        if is_compared:
            self._recorder.add_recorded(leaf.place, total(product), self._rounding)
        return sq_norms(product) if leaf.alone and self._final else product

    def _pass_on(self, station: Station, operand: int, whole: Gradients) -> None:
        if operand in station.leaves:
            leaf = station.leaves[operand]
            self._ready.append((leaf, whole, leaf.alone and self._final))
        else:
            key = station.inward[operand]
            self._received[key] = added(whole, self._received.get(key))

    def _ask(self, node: Node, grads: Sequence[Tensor | None]) -> tuple[Any, ...]:
        """Return the node's own products. No hook is called, and nothing of it is recorded."""
        if is_fsdp_node(node):  # which gives back what it is given
            return tuple(grads)
        self._recorder.asking = True
        try:
            out = node(*grads)
        finally:
            self._recorder.asking = False
        products = out if isinstance(out, tuple) else (out,)
        return tuple(map(fit_to_edge, products, node.next_functions))

    def _measure(self, g: Gradients) -> None:
        """Note the rounding of a sum, which is that of its largest terms."""
        rounding = size(g) * self._run.n * torch.finfo(g.dtype).eps
        self._rounding = max(self._rounding, rounding)

    @untraced
    def _deliver(self, *_: Any) -> None:
        """Deliver after the node ran: its own use has arrived by then."""
        ready, self._ready = self._ready, []
        for leaf, whole, squared in ready:
            if not self._run.arrive([leaf.place], not leaf.counted):
                continue
            for _more in range(1, leaf.counted):
                self._run.arrive([leaf.place])
            if squared:  # and nothing else is wanted
                self._run.finish(leaf.place, whole)
                continue
            if leaf.alone and self._books:
                self._run.finish(leaf.place, sq_norms(whole))
            else:
                self._run.add(leaf.place, *to_add(whole))
            keep(self._run, self._recorder, leaf.place, whole)
