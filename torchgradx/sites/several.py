"""Modules with several outputs: each sample's place is proven in all of them.

A loss may take y from one sample's rows of an LSTM's output and c from another's: what arrives at y
alone does not show it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from math import prod
from typing import Any

import torch
from torch import Tensor, nn

from ..graph.layout import BATCH, SEQUENCE, Watched, owners
from ..graph.nodes import Graph, nodes_below
from .fallback import Call, copy_to_run, dim_of, run_again
from .regime import Regime


@dataclass(frozen=True)
class End:
    """One output of a use."""

    watched: Watched
    taken: tuple[Tensor | None, Tensor | None]  # of each row, if the use is BATCH, or SEQUENCE

    def joined(self, use: Any, verdict: Any, presumed: int, n: int) -> Any:
        """Return what is known of a use, from `use` so far and the verdict on this end."""
        if isinstance(use, str) or verdict is None or n <= 1:
            return use
        if isinstance(verdict, str):
            return verdict
        packed, taken = self.watched.samples, dict(zip((BATCH, SEQUENCE), self.taken, strict=True))
        kinds = owners(self.watched.leads, n, self.watched.second)
        is_of = packed if packed is not None else kinds.get(verdict)
        if is_of is None:  # of no rows
            return use
        fits = [kind for kind, of in taken.items() if of is not None and torch.equal(of, is_of)]
        if use is None and fits:
            return presumed if presumed in fits else fits[0]
        return "different_outputs" if use not in fits and use in (BATCH, SEQUENCE, None) else use

    def clear(self, use: Watched, layout: int, n: int) -> bool:
        """Return True if, without a proof, it is the use's output or has the samples there."""
        if (self.watched.node, self.watched.output_nr) == (use.node, use.output_nr):
            return True
        rows, taken = list(self.watched.leads), self.taken[layout == SEQUENCE]
        if rows.count(n) != 1 or taken is None:
            return False
        return torch.equal(taken, places_along(rows, rows.index(n)))


def ends_of_module(
    module: nn.Module,
    outputs: Sequence[Tensor],
    first: Tensor,
    inputs: Iterable[Tensor],
    leads: Callable[[int], int],
    n: int,
    samples: Tensor | None,
) -> list[End]:
    """Return the ends of a call with these inputs. first: the output with the samples in rows.
    leads: how many dimensions of an output count its rows. samples: of each row, if packed."""
    before = {(t.grad_fn, t.output_nr) for t in inputs}
    calls = [Call(module, (), ((), {}), outputs, n, how, first.shape, Regime("cpu", None, None))
             for how in (BATCH, SEQUENCE)]  # fmt: skip
    ends = []
    for t in outputs:
        if t.grad_fn is None or not t.dim() or (t.grad_fn, t.output_nr) in before:
            continue
        dims = [dim_of(call, t) for call in calls]
        # rows of numbers, where they may be in the second of two dimensions
        rows = list(t.shape[: max(leads(t.dim()), *(dim + 1 for dim in dims))])
        packed = samples if t is outputs[0] else None
        cuts = _cut(rows, n, dims[0], True), _cut(rows, n, dims[1], False)
        taken = cuts if packed is None else (packed, packed)
        second = max(dims) == 1 and rows[1] > n  # a state [1, N * K, H]
        ends.append(End(Watched(t.grad_fn, t.output_nr, rows, second, samples=packed), taken))
    return ends


def _cut(rows: Sequence[int], n: int, dim: int, major: bool) -> Tensor | None:
    """Return the sample of each row, where this dimension is cut; None: it cannot be."""
    each, rest = divmod(rows[dim], n)
    if rest or not each:
        return None
    places = places_along(rows, dim)
    return places // each if major else places % n


def places_along(rows: Sequence[int], dim: int) -> Tensor:
    """Return the place of each row along a dimension."""
    return torch.arange(prod(rows)) // prod(rows[dim + 1 :]) % rows[dim]


def ends_of_node(
    node: Any, graph: Graph, outputs: Iterable[Tensor], leads: Sequence[int], n: int
) -> Iterator[End]:
    """Yield all outputs of a recurrent layer's node, each with its samples first."""
    rows = owners(leads, n)
    ends = {t.output_nr for t in outputs if t.grad_fn is node}
    for number in sorted(ends.union(graph.numbers(node))):
        yield End(Watched(node, number, leads), (rows.get(BATCH), rows.get(SEQUENCE)))


def ends_at(outputs: Iterable[Tensor]) -> dict[tuple[Any, int], int]:
    """Return the output at each end of a graph; the first, where it is returned several times."""
    ends: dict[tuple[Any, int], int] = {}
    for k, t in enumerate(outputs):
        if t.grad_fn is not None:
            ends.setdefault((t.grad_fn, t.output_nr), k)
    return ends


def end_of(t: Tensor) -> Tensor:
    """Return what to listen at: in-place operations replace a view's node, not its base's."""
    base = t._base
    plain = base is not None and base.grad_fn is not None and base.numel() == t.numel()
    same_order = base is not None and base.is_contiguous() and t.is_contiguous()
    return base if plain and same_order else t  # type: ignore[return-value]


def needed_by(node: Any, parameters: dict[int, Tensor], arguments: list[Any]) -> list[int]:
    """Return the parameters that every plain backward() through this node needs."""
    before = {t.grad_fn for t in arguments if isinstance(t, Tensor)}
    reached = {child for inner in nodes_below([node], before) for child, _ in inner.next_functions}
    edges = {place: torch.autograd.graph.get_gradient_edge(p) for place, p in parameters.items()}
    return [place for place, edge in edges.items() if edge.node in reached]


def made_from_others(outputs: list[Tensor], arguments: list[Any]) -> set[int]:
    """Return outputs that others were made from: their gradients are the module's too."""
    before = {t.grad_fn for t in arguments if isinstance(t, Tensor)}
    ends = {end: k for end, k in ends_at(outputs).items() if end[0] not in before}
    nodes = nodes_below((node for node, _ in ends), before)
    return {ends[edge] for node in nodes for edge in node.next_functions if edge in ends}


def without_inner_grads(
    call: Call, inner: set[int], silent: Callable[[], AbstractContextManager[None]]
) -> Call:
    """Return the call without the gradients of outputs (`inner`) that came through others."""
    with silent(), call.regime.again():
        outputs, _ = run_again(copy_to_run(call))
        found: dict[int, Tensor] = {}
        made = [(t.grad_fn._sequence_nr(), k) for k, t in enumerate(outputs) if t.grad_fn]
        for _, k in sorted(made, reverse=True):  # what is made from others first
            g = call.grads[k]
            if g is None:
                continue
            if k in inner and found:
                later = [outputs[j] for j in found]
                (through,) = torch.autograd.grad(
                    later, outputs[k], [*found.values()], retain_graph=True, allow_unused=True
                )
                g = g if through is None else g - through
            found[k] = g
    return replace(call, grads=[found.get(k) for k in range(len(call.grads))])
