"""Modules with several outputs: each sample's place is proven in all of them.

A loss may take y from one sample's rows of an LSTM's output and c from another's: what arrives at y
alone does not show it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from .fallback import Call, as_it_stands, dims_of, run_again
from .layout import BATCH, SEQUENCE, Watched, alike
from .shared import Graph

__all__ = ["End", "ends_at", "ends_of_module", "ends_of_node", "made_from_others", "of_the_loss"]

CONFLICT = "its outputs have the samples in different places"


@dataclass(frozen=True)
class End:
    """One output of a use."""

    watched: Watched
    kinds: tuple[int, int]  # where its samples are taken to be, if the use is BATCH, or SEQUENCE

    def joined(self, use: Any, verdict: Any, presumed: int, n: int) -> Any:
        """What is known of a use, from `use` so far and the verdict on this end."""
        if isinstance(use, str) or verdict is None or n <= 1:
            return use
        if isinstance(verdict, str):
            return verdict
        fits = [kind for kind in (BATCH, SEQUENCE)
                if alike(self.watched.leads, n, verdict, self.kinds[kind])]  # fmt: skip
        if use is None and fits:
            return presumed if presumed in fits else fits[0]
        return CONFLICT if use not in fits and use in (BATCH, SEQUENCE, None) else use


def ends_of_module(
    module: nn.Module,
    outputs: Sequence[Tensor],
    given: Iterable[Tensor],
    leads: Callable[[int], int],
    n: int,
    samples: Tensor | None,
) -> list[End]:
    """given: what it was called with. leads: how many dimensions of an output count its rows.
    samples: of each row of the first, where it is packed."""
    before = {(t.grad_fn, t.output_nr) for t in given}
    ends = []
    for t, (batch, sequence) in zip(outputs, dims_of(module, outputs, n), strict=True):
        if t.grad_fn is None or not t.dim() or (t.grad_fn, t.output_nr) in before:
            continue
        major = SEQUENCE if sequence == 1 or t.shape[0] != n else BATCH
        kinds = SEQUENCE if batch == 1 else BATCH, major
        packed = samples if t is outputs[0] else None
        # rows of numbers, where they may be in the second of two dimensions
        rows = list(t.shape[: max(leads(t.dim()), batch + 1, sequence + 1)])
        watched = Watched(t.grad_fn, t.output_nr, rows, samples=packed)
        ends.append(End(watched, kinds))
    return ends


def ends_of_node(
    node: Any, graph: Graph, outputs: Iterable[Tensor], leads: Sequence[int]
) -> Iterator[End]:
    """All outputs of a recurrent layer's node, each with its samples first."""
    ends = {t.output_nr for t in outputs if t.grad_fn is node}
    for number in sorted(ends.union(graph.numbers(node))):
        yield End(Watched(node, number, leads), (BATCH, SEQUENCE))


def ends_at(outputs: Iterable[Tensor]) -> dict[tuple[Any, int], int]:
    """Which output is at an end of a graph; the first, where it is returned several times."""
    ends: dict[tuple[Any, int], int] = {}
    for k, t in enumerate(outputs):
        if t.grad_fn is not None:
            ends.setdefault((t.grad_fn, t.output_nr), k)
    return ends


def made_from_others(outputs: list[Tensor], arguments: list[Any]) -> set[int]:
    """Of a module's outputs, those that others of them were computed from: what arrives there came
    through the module too."""
    before = {t.grad_fn for t in arguments if isinstance(t, Tensor)}
    ends = {end: k for end, k in ends_at(outputs).items() if end[0] not in before}
    found: set[int] = set()
    for start in {node for node, _ in ends}:
        seen: set[Any] = {start, None, *before}
        rest: list[Any] = [start]
        while rest:
            for node, number in rest.pop().next_functions:
                found.update({ends[node, number]} if (node, number) in ends else ())
                if node not in seen:
                    seen.add(node)
                    rest.append(node)
    return found


def of_the_loss(
    call: Call, inner: set[int], silent: Callable[[], AbstractContextManager[None]]
) -> Call:
    """The same without what came back into outputs (`inner`) by way of those made from them."""
    with silent(), call.regime.again():
        outputs, _ = run_again(as_it_stands(call))
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
