"""Gradients by sample of a module's own parameters, where its rows have owners (graph/owners.py).

The rows of a node's gradient, times what it saved, are added up by sample: at the node that made
the module's output, or else in the graph of running the module again. There, one backward brings
the gradients of the nodes where parameters enter. What that takes on trust another backward
confirms, in which each sample has a weight.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from functools import partial, reduce
from typing import Any, cast

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from ..gradients.by_sample import Gradients, added, in_full, weighted
from ..gradients.elementwise import is_passthrough
from ..gradients.grouped import Grouped, product_by_owner
from ..graph.nodes import Edge, Graph, Node, shape_of
from ..graph.owners import Owned, owners_below
from ..graph.sizes import as_rows, row_dims
from .expert_products import all_products, group
from .experts import ExpertProduct
from .fallback import Call, Unrecorded, copy_to_run, run_again
from .regime import HALF_EPS

TOLERANCE, OF_HALVES = (1e-3, 1e-5), (5e-2, 1e-2)  # of a parameter's norm, and of that of all


def run_by_owner(call: Call, unrecorded: Unrecorded) -> list[Gradients] | None:
    """Run a module again, and return the gradients by sample of its parameters. None: one enters
    otherwise than by products of rows or of elements, or rows meet."""
    pull: Any = partial(torch.autograd.grad, retain_graph=True, materialize_grads=True)
    owners, n = cast(Tensor, call.samples), call.n
    with contextlib.suppress(Exception), unrecorded(), call.regime.again():
        outputs, parameters = run_again(copy_to_run(call))
        pairs = [(t, g) for t, g in zip(outputs, call.grads, strict=True)
                 if g is not None and t.requires_grad]  # fmt: skip
        ends, grads = zip(*pairs, strict=True)
        graph, grid = Graph(ends), ends[0].shape[: row_dims(ends[0], len(owners))]
        heads = {(t.grad_fn, t.output_nr): Owned(owners, 0) for t in ends}
        found, *_ = owners_below(ends, heads, n, grid)
        entries = [_entries(graph, p) for p in parameters]
        nodes = list(dict.fromkeys(node for nodes, _ in entries for node in nodes))
        edges = [GradientEdge(node, 0) for node in nodes]
        arrived = dict(zip(nodes, pull(ends, edges, grads), strict=True))
        gradients = [take(arrived, found, n) for _, take in entries]
        weights = torch.rand(n + 1, generator=torch.Generator().manual_seed(n), device="cpu") + 0.5
        weights[n] = 0
        weights = weights.to(owners.device)
        weighed = [g * as_rows(weights[owners], g).to(g.dtype) for g in grads]
        halves = max(torch.finfo(t.dtype).eps for t in (*grads, *parameters)) > HALF_EPS
        of_own, of_all = OF_HALVES if halves else TOLERANCE
        totals = pull(ends, parameters, weighed)
        size = torch.stack([total.norm().float() for total in totals]).norm()
        for total, g in zip(totals, gradients, strict=True):
            error = (total - weighted(g, weights[:n]).view_as(total)).nan_to_num(0, 0, 0).norm()
            if error > of_own * total.norm() + of_all * size:
                return None
        return gradients
    return None


def _entries(graph: Graph, p: Tensor) -> tuple[list[Node], Callable[..., Gradients]]:
    """Return the nodes where a parameter enters, and what makes its gradients of theirs, the owners
    by edge, and N."""
    for matrices in {2: (p, p[None]), 3: (p,)}.get(p.dim(), ()):
        products = all_products(graph.parents, {id(p): 0}, {0: matrices})
        if products:
            return [product.node for product in products], partial(_group, products, p, matrices)
    uses = list(_uses(graph, p))
    return [node for node, _ in uses], partial(_add_up, uses, p)


def _group(
    products: Sequence[ExpertProduct], p: Tensor, matrices: Tensor, arrived: Any, found: Any, n: int
) -> Gradients:
    """Return the gradients of a parameter that enters by products with its matrices."""
    pairs = group(products, found, {0: matrices}, n)[0].pairs
    both = [product.operands(product.node, arrived[product.node], p) for product in products]
    left, right = (torch.cat(column) for column in zip(*both, strict=True))
    grouped = Grouped(left, right, pairs, is_single=p.dim() == 2)
    return grouped.of_biases() if matrices.dim() == 2 else grouped


def _add_up(uses: Sequence[Edge], p: Tensor, arrived: Any, found: Any, n: int) -> Gradients:
    """Return the gradients of a parameter that enters by sums and products of elements or of rows,
    or is read as a table."""
    parts = [_product(node, k, arrived[node], found.get((node, 0)), n, p) for node, k in uses]
    return reduce(added, parts) if parts else p.new_zeros(n, *p.shape)


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


def _product(node: Node, k: int, g: Tensor, owned: Owned | None, n: int, p: Tensor) -> Gradients:
    """Return the product [N, *shape of p] of a node for its operand k."""
    whole = None if owned is None else product_by_owner(node, k, g, owned.owners, n)
    if whole is None:
        raise ValueError("a parameter enters elsewhere than at nodes of rows")
    is_factored = not isinstance(whole, Tensor) and shape_of(*node.next_functions[k]) == p.shape
    return whole if is_factored else in_full(whole).view(n, *p.shape)
