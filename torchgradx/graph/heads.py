"""Heads: the outputs of a model from which weighted backwards begin (layout.py).

The samples are in one dimension of an output. Or its rows are those of a mask, as in head(x[mask])
for masked words or patches: then the indices in the graph show the sample of each row. A model that
returns only its loss has its heads where the loss begins: the first tensors below it with samples.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..extension import _C, NATIVE
from .indices import READING, selected_by
from .layout import BATCH, SEQUENCE, Heads, is_python, layout_from_sizes, owners
from .nodes import Node, is_leaf, shape_of
from .sizes import RESHAPES

MAX_NODES, MAX_NODES_OF_A_LOSS = 64, 256  # above indices, and above tensors with samples


def tensors_with_samples(outputs: Sequence[Tensor], n: int, batch_dim: int) -> Sequence[Tensor]:
    """Return the outputs; or if none has samples, tensors at the first nodes below that have."""
    live = [t for t in outputs if t.grad_fn is not None]
    if n < 2 or not NATIVE or any(n in t.shape or taken_rows(t, n) for t in live):
        return outputs
    todo: list[Node] = [t.grad_fn for t in live if t.grad_fn is not None]
    found: list[Tensor] = []
    edges = set[tuple[Node, int]]()
    for node in todo:  # grows
        if is_python(node) or len(todo) > MAX_NODES_OF_A_LOSS:
            return outputs
        for child, number in node.next_functions:
            if child is None or is_leaf(child) or (child, number) in edges:
                continue
            edges.add((child, number))
            shape = shape_of(child, number)
            t = _C.at_node(child, number) if len(shape) > 1 and not is_python(child) else None
            if t is not None and (shape[batch_dim] == n or taken_rows(t, n)):
                found.append(t)
            elif child not in todo:
                todo.append(child)
    return found or outputs


def heads_of(
    outputs: Sequence[Tensor],
    taken: Sequence[Sequence[Tensor]],
    n: int,
    dims: dict[tuple[int, int], int],
    batch_dim: int,
) -> tuple[Heads, Sequence[Heads]]:
    """Return outputs with the likely dimension of the samples, and with others of size N.
    taken: by output, the samples of rows that indices took, the likely ones first. dims: proven
    dimensions, by the place of an output and its number of dimensions."""
    heads: list[tuple[Tensor, int | Tensor]] = []
    rests: list[Sequence[int | Tensor]] = []
    for k, (t, of_rows) in enumerate(zip(outputs, taken, strict=True)):
        fits: Sequence[Any] = of_rows or [d for d, size in enumerate(t.shape) if size == n]
        if not fits or not t.requires_grad or not t.is_floating_point():
            continue
        first, *rest = fits
        if not of_rows:
            proven = dims.get((k, t.dim()))
            first = proven if proven in fits else batch_dim if batch_dim in fits else first
            rest = [d for d in fits if d != first and proven not in fits]
        heads.append((t, first))
        rests.append(rest)
    others = [
        [(t, rest[min(j, len(rest) - 1)] if rest else first)
         for (t, first), rest in zip(heads, rests, strict=True)]
        for j in range(max(map(len, rests), default=0))
    ]  # fmt: skip
    return heads, others


class Taken(NamedTuple):
    """The rows of an output of the model that indices took from rows of N samples."""

    samples: Tensor  # of each row
    others: Tensor | None  # the same if the samples were in the second dimension, of size N too
    nodes: set[Node]  # above the indices
    indices: set[Node]  # nodes that took the rows


def taken_rows(output: Tensor, n: int) -> Taken | None:
    """Return the rows of an output, if its graph has the indices that took them; else None.
    Their samples must ascend: other indices may undo a sorting of the samples."""
    if n < 2 or not output.dim() or output.grad_fn is None:
        return None
    samples: Tensor | None = None
    others: Tensor | None = None
    todo: list[Node] = [output.grad_fn]
    nodes, indices = {output.grad_fn}, set[Node]()
    for node in todo:  # grows
        found = _taken_by(node, n) if node.name() in READING else None
        if found is not None:
            before, (samples, others) = samples, found
            is_same = before is None or torch.equal(before, samples)
            if len(samples) != len(output) or not is_same:
                return None
            indices.add(node)
            continue
        rows = (child for child, number in node.next_functions
                if child and shape_of(child, number)[:1] == output.shape[:1])  # fmt: skip
        new = [child for child in rows if child not in nodes and not is_leaf(child)]
        nodes.update(new)
        todo += new
        if len(todo) > MAX_NODES:
            return None
    if samples is None or bool((samples[1:] < samples[:-1]).any()):
        return None
    if len(samples) == n and torch.equal(samples, torch.arange(n, device=samples.device)):
        return None  # one row for each sample
    return Taken(samples, others, nodes - indices, indices)


def _taken_by(node: Node, n: int) -> tuple[Tensor, Tensor | None] | None:
    """Return the sample of each row that a node reads by index; None if sizes do not show it. Then
    the same with the samples in the second dimension, if both have size N."""
    operand, number = node.next_functions[0]
    selection = selected_by(node, shape_of(operand, number), (n,))[1] if operand else None
    if selection is None or selection.dims < 0 or any(map(bool, selection.flags)):
        return None
    while operand and not is_leaf(operand):
        shape = shape_of(operand, number)
        cuts = (shape[:k] for k in range(1, len(shape) + 1))
        leads = next((cut for cut in cuts if prod(cut) == selection.size), None)
        layout = None if leads is None else layout_from_sizes(leads, n)
        if leads is not None and (layout is not None or leads[:2] == (n, n)):
            rows = {one: of.to(selection.rows.device)[selection.rows]
                    for one, of in owners(leads, n).items()}  # fmt: skip
            return (rows[BATCH], rows[SEQUENCE]) if layout is None else (rows[layout], None)
        if operand.name() not in RESHAPES:
            break
        operand, number = operand.next_functions[0]
    return None
