"""Gradients by sample of parameters that enter a graph whose rows have owners (graph/owners.py).

The rows of a node's gradient, times what it saved, are added up by sample: at the node that made a
module's output, or in a graph that one runs again for. There, one backward brings the gradients of
the nodes where parameters enter. What that takes on trust another backward confirms, in which each
sample has a weight.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from ..graph.nodes import Edge, Graph, Node, shape_of
from ..graph.owners import Owned, owners_below
from ..graph.sizes import as_rows, row_dims
from ..reference.chunks import accumulation_dtype, add_rows
from .by_sample import sq_norms
from .products import elementwise_product, is_passthrough, sum_broadcast

TOLERANCE, OF_HALVES = 1e-3, 5e-2  # of sums over samples, as of samples that run alone


def gradients_at(
    node: Node, g: Tensor, parameters: Sequence[Tensor], owners: Tensor, n: int, first: int
) -> list[Tensor] | None:
    """Return the gradients [N, *shape] of each parameter; None: one enters elsewhere than at this
    node, which made rows with these owners. g: of them. first: sequence number of the first node
    that may use the parameters."""
    graph = Graph([node], first)
    while is_passthrough(node):
        node = next(child for child, _ in node.next_functions if child is not None)
    uses = [list(_uses(graph, p)) for p in parameters]
    if any(len(edges) != 1 or edges[0][0] is not node for edges in uses):
        return None
    g, owned = g.reshape(shape_of(node, 0)), Owned(owners, 0)
    both = zip(parameters, uses, strict=True)
    return [_summed(node, k, g, owned, n).view(n, *p.shape) for p, [(_, k)] in both]


def gradients_by_owner(
    ends: Sequence[tuple[Tensor, Tensor]], parameters: Sequence[Tensor], owners: Tensor, n: int
) -> list[Tensor]:
    """Return the gradients [N, *shape] of each parameter, or raise ValueError: it enters elsewhere,
    or rows meet. ends: outputs, whose leading rows have these owners (N: no sample), and their
    gradients."""
    outputs, grads = zip(*ends, strict=True)
    graph, grid = Graph(outputs), outputs[0].shape[: row_dims(outputs[0], len(owners))]
    heads = {(t.grad_fn, t.output_nr): Owned(owners, 0) for t in outputs}
    found, *_ = owners_below(outputs, heads, n, grid)
    uses = [list(_uses(graph, p)) for p in parameters]
    nodes = list(dict.fromkeys(node for edges in uses for node, _ in edges))
    pull = partial(torch.autograd.grad, outputs, retain_graph=True, materialize_grads=True)
    arrived = dict(zip(nodes, pull([GradientEdge(v, 0) for v in nodes], grads), strict=True))
    weights = torch.rand(n + 1, generator=torch.Generator().manual_seed(n)).to(owners.device) + 0.5
    weights[n] = 0
    weighted = [g * as_rows(weights[owners], g).to(g.dtype) for g in grads]
    is_half = max(torch.finfo(t.dtype).eps for t in (*grads, *parameters)) > 1e-4
    by_sample = []
    for p, edges, total in zip(parameters, uses, pull(parameters, weighted), strict=True):
        whole = p.new_zeros(n, *p.shape, dtype=accumulation_dtype(p.dtype), requires_grad=False)
        for node, operand in edges:
            whole += _summed(node, operand, arrived[node], found.get((node, 0)), n).view_as(whole)
        error = (total - torch.tensordot(weights[:n].to(whole), whole, 1)).nan_to_num(0, 0, 0)
        size = weights[:n] @ sq_norms(whole).sqrt().to(weights)
        if error.norm() > (OF_HALVES if is_half else TOLERANCE) * size:
            raise ValueError("rows have other owners than the graph shows")
        by_sample.append(whole)
    return by_sample


def _uses(graph: Graph, p: Tensor) -> Iterator[Edge]:
    """Yield the nodes where a parameter enters, and as which operand."""
    todo = [get_gradient_edge(p).node]
    for node in todo:  # grows
        for parent in dict.fromkeys(parent for parent, _ in graph.parents.get(node, ())):
            if is_passthrough(parent):
                todo.append(parent)
            else:
                operands = enumerate(parent.next_functions)
                yield from ((parent, k) for k, (child, _) in operands if child is node)


def _summed(node: Node, operand: int, g: Tensor, owned: Owned | None, n: int) -> Tensor:
    """Return [N, *shape of the operand]: the product of an elementwise node, added up by sample."""
    product = elementwise_product(node, operand, g)
    dims = 0 if product is None or owned is None else row_dims(product, len(owned.owners))
    if product is None or owned is None or not dims:
        raise ValueError("a parameter enters elsewhere than at elementwise nodes of rows")
    rows = product.flatten(0, dims - 1).to(accumulation_dtype(product.dtype))
    sums = add_rows(rows.new_zeros(n + 1, *rows.shape[1:]), owned.owners, rows)[:n]
    sums = sums.view(n, *[1] * dims, *rows.shape[1:])
    whole = sum_broadcast(sums, shape_of(*node.next_functions[operand]))
    if whole is None:
        raise ValueError("a parameter with rows of its own")
    return whole
