"""Takes per-sample gradients from a frontier (frontier.py) down to the parameters below it.

When the backward reaches a node, the node is asked for its vector-Jacobian products per sample,
before it runs itself and frees its saved tensors. Between nodes gradients are [N, *shape]. Inside
backward() nothing raises: what fails is refused, and raised by the call that reads.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ..extension import _C, Pass
from ..gradients import by_sample, products
from ..gradients.by_sample import Gradients
from ..gradients.elementwise import CAST
from ..gradients.grouped import pass_matrices, product_by_owner
from ..gradients.outer import lookup_product
from ..graph.functions import COMPILED, ask_function, is_users
from ..graph.layout import BATCH, NOWHERE, SEGMENTS
from ..graph.nodes import Node, coarsest_eps, dtype_of, shape_of
from ..graph.unpacking import keep_handles
from ..hooks.copies import untraced
from ..hooks.engine import receives_grad
from ..reference.chunks import accumulation_dtype, chunks
from ..refusals import cause
from ..sharding import is_fsdp_node
from .stations import Leaf, Match, Station, Trail

Grads = Sequence[Tensor | None]  # by the outputs or the operands of a node


class Descent:
    """Descent through the graph of one pass. Its hooks own it, and it owns no node."""

    def __init__(
        self, run: Pass, match: Match, lift: Any, parameters: Any, refuse: Callable[[str], None]
    ) -> None:
        """lift: the Lift of the probe, see lift.py."""
        self._run, self._lift, self._refuse = run, lift, refuse
        self._recorder, self._tensors = lift.recorder, parameters.wholes()
        self._hooked_keys, self._leaves = match.hooked_keys, match.leaves
        self._counted = match.counted
        self._task, self._rounding = -1, 0.0  # the others are set in _begin()
        self._received: dict[tuple[int, int], Gradients] = {}  # by key of the node, and output
        self._ready: list[tuple[Leaf, Any, bool]] = []  # its gradients; True: their squared norms
        self._eps, self._sums = 0.0, dict[int, Any]()  # of a user's Function, see _confirm()
        # If the extension guards the path, only a user's hook can change a gradient on it.
        self._is_guarded, self._compares = match.trail is not None, True
        for place in match.expected:  # the sum over its uses waits for these too
            run.expect(place, self._tensors[place])
        for node, station in (match.stations or {}).items():
            node.register_prehook(partial(self._arrive, station))
            if station.leaves:
                node.register_hook(self._deliver)
            if is_users(node):
                node.register_hook(self._confirm)

    def serve(self, outline: Any, trail: Trail) -> None:
        """Let the extension serve the frontier nodes whose operands are all parameters.
        It does so in backwards that need squared norms, and per-sample gradients for clipping."""
        self._stations = trail.stations
        outline.serve(self._run, trail.native, _C.Terms(self._wants, self._serve_here))

    @untraced
    def _wants(self) -> int:
        """Return 1 if squared norms are needed, 2 for per-sample gradients too, 0 for else."""
        self._begin()
        if not self._counts or torch.is_grad_enabled() or self._compares:
            return 0
        return 1 if self._is_final else 2 * self._keeps_tape

    def _serve_here(self, station: int, incoming: Grads) -> None:
        """Serve a node in place of the extension, in a backward that needs something else."""
        self._arrive(self._stations[station], incoming)
        self._deliver()

    @untraced
    def _arrive(self, station: Station, incoming: Grads) -> None:
        """Take per-sample gradients through a node that the backward has reached."""
        self._begin()
        if torch.is_grad_enabled() or not self._counts:
            return  # create_graph is refused by the call that reads
        node = torch._C._current_autograd_node()
        self._has_grad = any(g is not None for g in incoming)  # False: a cast, for norms only
        # For norms only, a fused layer returns no gradient of its parameters to compare with.
        self._withholds = self._lift.norms_only and node.name().startswith("torchgradx")
        try:
            self._eps, self._sums = coarsest_eps([node], ()) if is_users(node) else 0.0, {}
            is_hooked = station.key in self._hooked_keys
            with keep_handles(node) if is_hooked else nullcontext():
                if not self._run.n:
                    self._send_zeros(station, node, incoming)
                elif station.layout is not None:
                    self._cross_frontier(station, station.layout, node, incoming)
                else:
                    keys = ((station.key, k) for k in range(len(incoming)))
                    grads = [self._received.pop(key, None) for key in keys]
                    if self._compares or _C.hooked(node, 1, bool(station.leaves)):
                        self._compare(station, node, incoming, grads)
                    self._cross(station, node, grads)
        except Exception as error:
            self._refuse(cause("failed", error=f"at {node.name()}: {error}"))

    def _begin(self) -> None:
        """Decide what this backward needs, when it reaches its first node."""
        task = torch._C._current_graph_task_id()
        if task == self._task:
            return
        self._task, self._rounding = task, 0.0
        self._received.clear()
        self._ready.clear()
        arrives = any(self._run.arrive([leaf.place], True) for leaf in self._leaves)
        tensors = (self._tensors[leaf.place] for leaf in self._leaves)
        self._counts = arrives and any(map(receives_grad, tensors))
        keeps = torch._C._autograd._get_current_graph_task_keep_graph()
        self._may_finish = not (self._run.keep or self._run.retained or keeps)
        wants_norms = self._may_finish and not self._run.directions
        self._keeps_tape = wants_norms and self._recorder.keeps_tape
        self._is_final = wants_norms and not self._recorder.keeps_tape
        hears = (self._lift.hears(leaf) for leaf in self._leaves if not leaf.edges)
        self._compares = not self._is_guarded or self._recorder.auditing or any(hears)
        if self._counts:
            self._lift.delivered.setdefault(task, set()).update(self._counted)

    def _compare(
        self, station: Station, node: Node, incoming: Grads, grads: Sequence[Gradients | None]
    ) -> None:
        """Refuse if a node does not receive the sum of its per-sample gradients.
        Then a use that no output leads to, or a user's hook on the path, has changed it."""
        casts_all = station.leaves and node.name() == CAST  # one cast serves all uses
        for g, mine in zip(incoming, grads, strict=True):
            if mine is not None:
                self._note_rounding(mine)
            if g is None or casts_all:
                continue
            norm = by_sample.size(g)
            error = norm if mine is None else by_sample.size(g - by_sample.total(mine))
            if error > 64 * (self._rounding + norm * torch.finfo(g.dtype).eps):
                self._refuse("not_its_sum")

    @untraced
    def _confirm(self, outs: Grads, _: Grads) -> None:
        """Refuse if the engine got other products of a user's Function than their sum by sample."""
        edges, sums = torch._C._current_autograd_node().next_functions, self._sums
        self._sums, units = {}, 64 if self._eps < 1e-4 else 4
        for operand, (total, squares) in sums.items():
            g = products.fit_to_edge(outs[operand], edges[operand])
            g = torch.zeros_like(total) if g is None else g.to_dense()
            size = by_sample.size(g) + squares**0.5
            if by_sample.size(g - total) > units * self._eps * size:
                self._refuse("not_its_sum")

    def _cross_frontier(self, station: Station, layout: int, node: Node, incoming: Grads) -> None:
        """Take a gradient with rows by sample through a node of the frontier."""
        g = next(filter(torch.is_tensor, incoming), None) if self._eps else incoming[station.output]
        if g is None or layout == NOWHERE:
            if g is not None and g.any():
                self._refuse("after_zeros")
            self._send_zeros(station, node, incoming)
            return
        if station.inward or any(self._lift.hears(leaf) for leaf in station.leaves.values()):
            self._note_rounding(g)  # something will be compared
        rest = []
        for operand in station.operands:
            product = self._closed_form(node, operand, g, layout)
            if product is None:
                rest.append(operand)
            else:
                self._send(station, operand, product)
        if rest:
            self._send_all(station, rest, self._ask_masked(station, node, incoming, rest))

    def _closed_form(self, node: Node, operand: int, g: Tensor, layout: int) -> Gradients | None:
        if layout < SEGMENTS:
            return products.closed_form(node, operand, g, layout, self._run.n)
        owners = self._run.segments[layout - SEGMENTS].owners
        if (product := product_by_owner(node, operand, g, owners, self._run.n)) is None:
            raise ValueError("it neither adds nor multiplies rows with owners")
        return product

    def _ask_masked(
        self, station: Station, node: Node, incoming: Any, operands: Sequence[int]
    ) -> Iterator[Grads]:
        """Ask a node of the frontier for each sample, with the rows of all others zero."""
        split: Any = partial(products.split_samples, layout=station.layout or BATCH, n=self._run.n)
        outputs = range(len(incoming)) if self._eps else [station.output]
        live = {k: split(incoming[k]) for k in outputs if incoming[k] is not None}
        for sample in range(self._run.n):
            masked = [torch.zeros_like(g) if k in live else None for k, g in enumerate(incoming)]
            for k, rows in live.items():
                split(masked[k])[sample] = rows[sample]
            out = self._ask(node, masked)
            # Copies: a CUDA graph of a compiled part writes into the same memory again.
            yield [out[operand].to_dense()[None].clone() for operand in operands]

    def _send_zeros(self, station: Station, node: Node, incoming: Grads) -> None:
        """Send zeros: the batch is empty, or weights above are zeros."""
        tensors = (*incoming, *(self._tensors[leaf.place] for leaf in station.leaves.values()))
        device = next((t.device for t in tensors if t is not None), None)
        for operand in station.operands:
            edge = node.next_functions[operand]
            zeros = torch.zeros((), dtype=dtype_of(*edge), device=device)
            self._send(station, operand, zeros.expand(self._run.n, *shape_of(*edge)))

    def _cross(self, station: Station, node: Node, grads: list[Gradients | None]) -> None:
        """Take per-sample gradients of its outputs through a node below the frontier."""
        if (factors := pass_matrices(node, grads[0])) is not None:
            for operand in station.operands:
                self._send(station, operand, factors[operand])
            return
        present = ((k, g) for k, g in enumerate(grads) if g is not None)
        live = {k: by_sample.in_full(g).to(dtype_of(node, k)) for k, g in present}
        if not live:
            return
        forms = self._closed_forms(station, node, live, len(grads))
        for operand, product in forms.items():
            self._send(station, operand, product)
        if not forms:
            parts = self._ask_mapped(station, node, live, len(grads))
            self._send_all(station, station.operands, parts)

    def _closed_forms(
        self, station: Station, node: Node, live: dict[int, Tensor], outputs: int
    ) -> dict[int, Gradients]:
        """Return the products of all operands in closed form; empty if some have none."""
        if node.name() == products.EMBEDDING and not products.scales_by_count(node):
            ids = node._saved_indices.reshape(1, -1).expand(self._run.n, -1)  # of every sample
            return dict.fromkeys(station.operands, lookup_product(node, ids, live[0]))
        forms: dict[int, Gradients] = {}
        for k in station.operands if outputs == 1 else ():
            product = products.closed_form_below(node, k, live[0], lambda g: self._ask(node, [g]))
            if product is None:
                return {}
            forms[k] = product
        return forms

    def _ask_mapped(
        self, station: Station, node: Node, live: dict[int, Tensor], outputs: int
    ) -> Iterator[Grads]:
        """Ask a node below the frontier for a few samples at a time."""
        places = (leaf.place for leaf in station.leaves.values())
        most = max((self._tensors[place].numel() for place in places), default=1)
        if self._eps or node.name() == COMPILED:  # one sample at a time: no vmap
            most = by_sample.GRADIENT_ELEMENTS

        def ask(*grads: Tensor) -> tuple[Tensor, ...]:
            by_output = dict(zip(live, grads, strict=True))
            out = self._ask(node, [by_output.get(k) for k in range(outputs)])
            return tuple(out[operand] for operand in station.operands)

        for samples in chunks(self._run.n, most, by_sample.GRADIENT_ELEMENTS):
            yield products.ask_each(ask, [g[samples] for g in live.values()])

    def _send_all(self, station: Station, operands: Sequence[int], parts: Iterable[Grads]) -> None:
        """Send products that come for a few samples at a time, each reduced before the next."""
        columns: dict[int, list[Tensor]] = {operand: [] for operand in operands}
        for part in parts:
            for operand, product in zip(operands, part, strict=True):
                if product is not None:
                    columns[operand].append(self._reduce(station, operand, product))
                    if self._eps:
                        total, squares = self._sums.get(operand, (0, 0))
                        total = total + product.sum(0, dtype=accumulation_dtype(product.dtype))
                        self._sums[operand] = total, squares + by_sample.sq_norms(product).sum()
        for operand, column in columns.items():
            if column:
                self._store(station, operand, torch.cat(column))

    def _send(self, station: Station, operand: int, product: Gradients) -> None:
        self._store(station, operand, self._reduce(station, operand, product))

    def _reduce(self, station: Station, operand: int, product: Gradients) -> Any:
        """Return the product [n, *shape], or its squared norms [n] if a parameter needs no more."""
        leaf = station.leaves.get(operand)
        if leaf is None:
            return product
        withholds = not self._has_grad or (self._withholds and operand)
        is_compared = not withholds and self._lift.hears(leaf)
        if is_compared:
            self._note_rounding(product)
        parameter = self._tensors[leaf.place]
        if isinstance(product, Tensor):  # a view or a cast on the path may have changed both
            product = product.reshape(len(product), *parameter.shape).to(parameter.dtype)
        if is_compared:
            self._recorder.add_recorded(leaf.place, by_sample.total(product), self._rounding)
        return by_sample.sq_norms(product) if leaf.is_alone and self._is_final else product

    def _store(self, station: Station, operand: int, whole: Gradients) -> None:
        """Store a product of all samples for the parameter, or the node, that it belongs to."""
        leaf = station.leaves.get(operand)
        if leaf is not None:
            self._ready.append((leaf, whole, leaf.is_alone and self._is_final))
        else:
            key = station.inward[operand]
            self._received[key] = by_sample.added(whole, self._received.get(key))

    def _ask(self, node: Node, grads: Grads) -> tuple[Any, ...]:
        """Return the products that a node computes, without hooks and without recording."""
        if is_fsdp_node(node):  # it returns its gradients unchanged
            return tuple(grads)
        self._recorder.asking = True
        try:
            is_python = self._eps or node.name() == COMPILED
            out = ask_function(node, grads) if is_python else node(*grads)
        finally:
            self._recorder.asking = False
        outs = out if isinstance(out, tuple) else (out,)
        return tuple(map(products.fit_to_edge, outs, node.next_functions))

    def _note_rounding(self, g: Gradients) -> None:
        """Note the rounding error of a sum, which is that of its largest terms."""
        rounding = by_sample.size(g) * self._run.n * max(torch.finfo(g.dtype).eps, self._eps)
        self._rounding = max(self._rounding, rounding)

    @untraced
    def _deliver(self, *_: Any) -> None:
        """Deliver to the pass after a node ran: then its own use of a parameter has arrived."""
        ready, self._ready = self._ready, []
        for leaf, whole, is_squared in ready:
            if not self._run.arrive([leaf.place], not leaf.edges):
                continue
            for _more in range(1, leaf.edges):
                self._run.arrive([leaf.place])
            if is_squared:  # and nothing else is needed
                self._run.finish(leaf.place, whole, leaf.parts)
                continue
            if leaf.is_alone and self._may_finish:
                self._run.finish(leaf.place, by_sample.sq_norms(whole), leaf.parts)
            else:
                self._run.add(leaf.place, *by_sample.to_add(whole))
            by_sample.keep(self._run, self._recorder, leaf.place, whole)
