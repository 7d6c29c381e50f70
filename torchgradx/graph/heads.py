"""Heads: the outputs of a model from which weighted backwards begin (layout.py).

The samples are in one dimension of an output. Or its rows are those of a mask, as in head(x[mask])
for masked words or patches: then the indices in the graph show the sample of each row. Of a model
whose outputs have no samples, as of one that returns only its loss, the heads are the outputs of
its last layers. Backwards from these show rows that mix. They do not show where the samples are,
since a layer may have N rows of something else.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from math import prod
from typing import NamedTuple

import torch
from torch import Tensor

from ..extension import _C, NATIVE
from .indices import READING, selected_by
from .layout import BATCH, Heads, is_python, layout_from_sizes, owners
from .nodes import Edge, Graph, Node, is_leaf, shape_of
from .routes import READS, WRITES
from .sizes import RESHAPES

MAX_ABOVE_INDICES, MAX_ABOVE_LAYERS, MAX_OF_WEIGHTS = 64, 256, 16  # nodes
REORDERS = READS | WRITES | {"FlipBackward0", "RollBackward0"}


def last_layers(outputs: Sequence[Tensor], layers: Collection[Node], n: int) -> list[Tensor]:
    """Return tensors at the first nodes of layers below the outputs that have N rows; none if they
    cannot be made. layers: the nodes of layers' outputs, less tables."""
    edges: list[Edge] = [(t.grad_fn, t.output_nr) for t in outputs]
    found: list[Tensor] = []
    for node, number in edges:  # grows
        if is_python(node) or len(edges) > MAX_ABOVE_LAYERS:
            return []
        is_view = node.name() in RESHAPES and node.next_functions[0][0] in layers
        t = _C.at_node(node, number) if NATIVE and (is_view or node in layers) else None
        if t is not None and (n in t.shape[:-1] or _taken(t, n)):
            found.append(t)
            continue
        below = dict.fromkeys(edge for edge in node.next_functions if edge[0])
        edges += [edge for edge in below if edge not in edges and not is_leaf(edge[0])]
    return found


def heads_of(
    outputs: Sequence[Tensor],
    taken: Sequence[Taken | None],
    n: int,
    dims: dict[tuple[int, int], int],
    batch_dim: int,
) -> tuple[Heads, Sequence[Heads]]:
    """Return outputs with the likely dimension of the samples, and with others of size N.
    taken: see taken_rows. dims: proven dimensions, by the place of an output and its number of
    dimensions."""
    heads: list[tuple[Tensor, int | Tensor]] = []
    rests: list[list[int]] = []
    for k, (t, rows) in enumerate(zip(outputs, taken, strict=True)):
        fits = [d for d, size in enumerate(t.shape) if size == n]
        if not (fits or rows) or not t.requires_grad or not t.is_floating_point():
            continue
        if rows:
            heads.append((t, rows.samples))
            rests.append([])
            continue
        proven = dims.get((k, t.dim()))
        first = batch_dim if batch_dim in fits else fits[0]
        if proven in fits:
            first, fits = proven, [proven]
        heads.append((t, first))
        rests.append([d for d in fits if d != first])
    others = [
        [(t, rest[min(j, len(rest) - 1)] if rest else first)
         for (t, first), rest in zip(heads, rests, strict=True)]
        for j in range(max(map(len, rests), default=0))
    ]  # fmt: skip
    return heads, others


class Taken(NamedTuple):
    """The rows of an output of the model that indices took from rows of N samples."""

    samples: Tensor  # of each row
    sure: bool  # False: the samples are in the first of two dimensions of size N, perhaps
    nodes: set[Node]  # above the indices
    indices: set[Node]  # nodes that took the rows


def taken_rows(
    outputs: Sequence[Tensor], n: int, graph_of: Callable[[Sequence[Tensor]], Graph] = Graph
) -> list[Taken | None]:
    """Return the rows of each output, if its graph has the indices that took them, and nothing else
    reads these rows; else None. graph_of: returns the graph of outputs."""
    found = [_taken(t, n) for t in outputs]
    if not any(found):
        return found
    parents, above = graph_of(outputs).parents, {v for one in found if one for v in one.nodes}

    def is_closed(one: Taken) -> bool:
        return all(v in above for node in one.nodes | one.indices for v, _ in parents[node])

    return [one if one and is_closed(one) else None for one in found]


def _taken(output: Tensor, n: int) -> Taken | None:
    """Return what the indices below an output show, if each node above them keeps its rows.
    Their samples must ascend: other indices may undo a sorting of the samples."""
    if n < 2 or not output.dim() or not len(output) or output.grad_fn is None:
        return None
    samples: Tensor | None = None
    sure = True
    todo: list[Node] = [output.grad_fn]
    indices = set[Node]()
    for node in todo:  # grows
        found = _taken_by(node, n) if node.name() in READING else None
        if found is not None:
            here = found[0].to(output.device)
            samples, sure = here if samples is None else samples, sure and found[1]
            if len(samples) != len(output) or not torch.equal(samples, here):
                return None
            indices.add(node)
            continue
        below = [(child, number) for child, number in node.next_functions
                 if child and not is_leaf(child) and child not in todo]  # fmt: skip
        rows = [child for child, k in below if shape_of(child, k)[:1] == output.shape[:1]]
        rest = [child for child, _ in below if child not in rows]
        reorders = node.name() in REORDERS and bool(below)
        if reorders or len(todo) > MAX_ABOVE_INDICES or not all(map(_is_of_weights, rest)):
            return None
        todo += dict.fromkeys(rows)
    if samples is None or bool((samples[1:] < samples[:-1]).any()):
        return None
    if len(samples) == n and torch.equal(samples, torch.arange(n, device=samples.device)):
        return None  # one row for each sample
    return Taken(samples, sure, set(todo) - indices, indices)


def _is_of_weights(node: Node) -> bool:
    """Return True if a few nodes compute a node's outputs from leaves alone."""
    nodes = [node]
    for v in nodes:  # grows
        if len(nodes) > MAX_OF_WEIGHTS or v.name() in REORDERS:
            return False
        nodes += [child for child, _ in v.next_functions
                  if child and not is_leaf(child) and child not in nodes]  # fmt: skip
    return True


def _taken_by(node: Node, n: int) -> tuple[Tensor, bool] | None:
    """Return the sample of each row that a node reads by index, and False if these may be in the
    second dimension as well; None if sizes do not show them, or if a row is a sample."""
    operand, number = node.next_functions[0]
    selection = selected_by(node, shape_of(operand, number), (n,))[1] if operand else None
    if selection is None or selection.dims < 0 or any(map(bool, selection.flags)):
        return None
    while operand and not is_leaf(operand) and selection.size > n:
        shape = shape_of(operand, number)
        cuts = (shape[:k] for k in range(1, len(shape) + 1))
        leads = next((cut for cut in cuts if prod(cut) == selection.size), ())
        sized = layout_from_sizes(leads, n) if leads else None
        if sized is not None or leads[:2] == (n, n):
            of_rows = owners(leads, n)[BATCH if sized is None else sized]
            return of_rows.to(selection.rows.device)[selection.rows], sized is not None
        if operand.name() not in RESHAPES:
            break
        operand, number = operand.next_functions[0]
    return None
