"""Modules with several outputs: where the samples are is proven for each output.

A loss may take y from one sample's rows of an LSTM's output and c from another's, which the
gradient of y alone does not show. An *end* is one output of a graph node: (node, output number).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any

import torch
from torch import Tensor, nn

from ..graph.layout import BATCH, SEQUENCE, Watched, owners
from ..graph.nodes import Graph, nodes_below
from .fallback import Call, dim_of, run_again
from .regime import Regime


@dataclass(frozen=True)
class End:
    """One output of a use. samples: of each row, under a use of layout BATCH, and of SEQUENCE;
    None: the output cannot hold the samples under that layout."""

    watched: Watched
    samples: tuple[Tensor | None, Tensor | None]

    def joined(self, use: Any, verdict: Any, presumed: int, n: int) -> Any:
        """Return the layout of a use, or a cause, given the verdict on the use so far and that on
        this end; None: nothing shows it. presumed: returned if this end fits both layouts."""
        if isinstance(use, str) or verdict is None or n <= 1:
            return use
        if isinstance(verdict, str):
            return verdict
        proven = self.watched.samples
        if proven is None:
            proven = owners(self.watched.leads, n, self.watched.second).get(verdict)
        if proven is None:  # a layout without rows of samples, as SHARED
            return use
        by_layout = zip((BATCH, SEQUENCE), self.samples, strict=True)
        fits = [layout for layout, of in by_layout if of is not None and torch.equal(of, proven)]
        if use is None and fits:
            return presumed if presumed in fits else fits[0]
        return "different_outputs" if use not in fits and use in (BATCH, SEQUENCE, None) else use

    def clear(self, use: Watched, layout: int, n: int) -> bool:
        """Return True if sizes alone show that it holds the samples as a use of this layout does;
        or if it is the output that the use's layout is of."""
        if (self.watched.node, self.watched.output_nr) == (use.node, use.output_nr):
            return True
        rows, samples = list(self.watched.leads), self.samples[layout == SEQUENCE]
        if rows.count(n) != 1 or samples is None:
            return False
        return torch.equal(samples, _indices_along(rows, rows.index(n)))


def ends_of_module(
    module: nn.Module,
    outputs: Sequence[Tensor],
    first: Tensor,
    inputs: Iterable[Tensor],
    leads: Callable[[int], int],
    n: int,
    samples: Tensor | None,
) -> list[End]:
    """Return the ends of a call with these inputs. first: the output whose layout is the use's.
    leads: (dimensions of an output) -> how many of them count rows. samples: of each row of the
    first output, if it is packed."""
    above = {(t.grad_fn, t.output_nr) for t in inputs}
    regime = Regime(first.device, None, None)
    calls = [Call(module, (), ((), {}), outputs, n, layout, first.shape, regime, None)
             for layout in (BATCH, SEQUENCE)]  # fmt: skip
    ends = []
    for t in outputs:
        if t.grad_fn is None or not t.dim() or (t.grad_fn, t.output_nr) in above:
            continue
        dims = [dim_of(call, t) for call in calls]
        # Up to the samples' dimension, which may be the second of two.
        rows = list(t.shape[: max(leads(t.dim()), *(dim + 1 for dim in dims))])
        packed = samples if t is outputs[0] else None
        by_layout = _split(rows, n, dims[0], True), _split(rows, n, dims[1], False)
        second = max(dims) == 1 and rows[1] > n  # a state [1, N * K, H]
        watched = Watched(t.grad_fn, t.output_nr, rows, second, samples=packed)
        ends.append(End(watched, by_layout if packed is None else (packed, packed)))
    return ends


def _split(rows: Sequence[int], n: int, dim: int, batch_first: bool) -> Tensor | None:
    """Return the sample of each row, where a dimension holds N K rows, K of each sample: one after
    the other (batch_first) or in turns. None: its size is no multiple of N."""
    each, rest = divmod(rows[dim], n)
    if rest or not each:
        return None
    indices = _indices_along(rows, dim)
    return indices // each if batch_first else indices % n


def _indices_along(rows: Sequence[int], dim: int) -> Tensor:
    """Return the index of each row in a dimension."""
    return torch.arange(prod(rows), device="cpu") // prod(rows[dim + 1 :]) % rows[dim]


def ends_of_node(
    node: Any, graph: Graph, outputs: Iterable[Tensor], leads: Sequence[int], n: int
) -> Iterator[End]:
    """Yield the ends of a recurrent layer's node that are used; all have the samples first."""
    rows = owners(leads, n)
    numbers = {t.output_nr for t in outputs if t.grad_fn is node}
    for number in sorted(numbers.union(graph.numbers(node))):
        yield End(Watched(node, number, leads), (rows.get(BATCH), rows.get(SEQUENCE)))


def ends_at(outputs: Iterable[Tensor]) -> dict[tuple[Any, int], int]:
    """Return the index of the output at each end; the first, if it is returned several times."""
    ends: dict[tuple[Any, int], int] = {}
    for k, t in enumerate(outputs):
        if t.grad_fn is not None:
            ends.setdefault((t.grad_fn, t.output_nr), k)
    return ends


def end_of(t: Tensor) -> Tensor:
    """Return the tensor at whose node to register a prehook: the base of a reshaping view, since
    in-place operations replace the view's node."""
    base = t._base
    if base is None or base.grad_fn is None or base.numel() != t.numel():
        return t
    return base if base.is_contiguous() and t.is_contiguous() else t


def needed_by(node: Any, parameters: dict[int, Tensor], arguments: list[Any]) -> list[int]:
    """Return the places of the parameters below a node, but not below the module's arguments."""
    above = {t.grad_fn for t in arguments if isinstance(t, Tensor)}
    reached = {child for inner in nodes_below([node], above) for child, _ in inner.next_functions}
    edges = {place: torch.autograd.graph.get_gradient_edge(p) for place, p in parameters.items()}
    return [place for place, edge in edges.items() if edge.node in reached]


def inner_outputs(outputs: list[Tensor], arguments: list[Any]) -> set[int]:
    """Return the indices of outputs that other outputs were computed from."""
    above = {t.grad_fn for t in arguments if isinstance(t, Tensor)}
    ends = {end: k for end, k in ends_at(outputs).items() if end[0] not in above}
    nodes = nodes_below((node for node, _ in ends), above)
    return {ends[edge] for node in nodes for edge in node.next_functions if edge in ends}


def without_inner_grads(call: Call, inner: set[int]) -> Call:
    """Return the call without the parts of gradients at `inner` outputs that came through others: a
    replay would count these twice, since it pulls back the gradients of all outputs."""
    with call.again() as twin:
        outputs, _ = run_again(twin)
        grads: dict[int, Tensor] = {}  # that came from outside of the module
        order = [(t.grad_fn._sequence_nr(), k) for k, t in enumerate(outputs) if t.grad_fn]
        for _, k in sorted(order, reverse=True):  # an output before those that it is computed from
            g = call.grads[k]
            if g is None:
                continue
            if k in inner and grads:
                later = [outputs[j] for j in grads]
                (through,) = torch.autograd.grad(
                    later, outputs[k], [*grads.values()], retain_graph=True, allow_unused=True
                )
                g = g if through is None else g - through
            grads[k] = g
    return replace(call, grads=[grads.get(k) for k in range(len(call.grads))])
