"""Vector-Jacobian products of a graph node, per sample, from one gradient of all samples.

On the frontier (shared/frontier.py) a node's output has rows by sample: `closed_form`. Below it, no
output has, and the gradients are [N, *shape]: `pass_factors` and `closed_form_below`. Where none of
these applies, the node is called: mapped over the samples, or with all samples but one masked.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch.func import vmap

from ..graph.layout import BATCH, LAST, MINOR, SECOND, SEQUENCE
from ..graph.nodes import Node, dtype_of, is_leaf, shape_of, to_signed
from ..reference.chunks import accumulation_dtype
from .by_sample import Gradients
from .convolved import Convolved
from .elementwise import (
    CALLED,
    CAST,
    ELEMENTWISE,
    INDEX_PUT,
    MV,
    POINTWISE,
    elementwise_product,
    is_elementwise,
    is_passthrough,
    is_transpose,
    permute_back,
    sum_broadcast,
)
from .outer import LookedUp, Outer, Rowwise, lookup_product

MAX_TABLE = 1 << 14  # elements of a small table
MAX_LOOPED = 8  # samples; for fewer a loop is faster than to set up vmap
CONVOLUTION = "ConvolutionBackward0"
EMBEDDING = "EmbeddingBackward0"
INDEX = "IndexBackward0"
INDEX_SELECT = "IndexSelectBackward0"
# Nodes of rows @ b: the attribute with the saved rows, and the operand b.
ROWS = {
    "MmBackward0": ("_saved_self", 1),
    "BmmBackward0": ("_saved_self", 1),
    "AddmmBackward0": ("_saved_mat1", 2),
}


def _standardise(node: Node, g: Rowwise) -> Sequence[Gradients] | None:
    """Cross batch_norm of a weight [1, A, *], which standardises each row (weight standardisation).
    Return the gradients of the weight, and of the scale and the bias of the node."""
    x, weight = node._saved_input, node._saved_weight
    mean, rstd = (t.to(g.dtype) for t in (node._saved_result1, node._saved_result2))
    if not node._saved_training or x.shape[:2] != (1, g.of.shape[0]):
        return None
    normalised = (x[0].flatten(1) - mean[:, None]) * rstd[:, None]
    units = torch.ones_like(normalised[:1]), normalised
    along = [g.along_rows(unit, 0) for unit in units]
    root, scale = normalised.shape[1] ** 0.5, rstd if weight is None else rstd * weight
    unit_units, along_units = ([t / root for t in tensors] for tensors in (units, along))
    return Rowwise(g.of, x.shape, scale, unit_units, along_units), *along[::-1]


def _weight_norm(node: Node, g: Rowwise) -> Sequence[Gradients] | None:
    """Cross g * v / |v|; return the gradients of v and of g, with a norm for each row of v."""
    v, of_v, norms = (t.to(g.dtype) for t in (node._saved_v, node._saved_g, node._saved_result1))
    dim = to_signed(node._saved_dim) % v.dim()
    if not dim and len(v) != g.of.shape[0]:
        return None
    along, scale = g.along_rows(v / norms, dim), (of_v / norms).flatten()
    return Rowwise(g.of, v.shape, scale, [v / norms], [along], dim), along.view(-1, *norms.shape)


# Nodes that compute a weight row by row from weights alone: the gradients of their operands.
BY_ROWS: dict[str, Callable[[Node, Rowwise], Sequence[Gradients] | None]] = {
    "NativeBatchNormBackward0": _standardise,
    "WeightNormInterfaceBackward0": _weight_norm,
}


def selected_rows(node: Node) -> range | None:
    """Return the rows along the first dimension that a select or a slice takes; None: another
    node."""
    if node.name() not in ("SelectBackward0", "SliceBackward0") or to_signed(node._saved_dim):
        return None
    count = shape_of(*node.next_functions[0])[0]
    if node.name() == "SelectBackward0":
        index = to_signed(node._saved_index) % count
        return range(index, index + 1)
    start, end = map(to_signed, (node._saved_start, node._saved_end))
    return range(count)[start:end] if node._saved_step == 1 else None


def keeps_rows(node: Node) -> bool:
    """Return True if the factors of a weight's gradients may cross a node, see grouped.py too."""
    if node.name() in ELEMENTWISE:
        shapes = {shape_of(*edge) for edge in node.next_functions if edge[0]} - {shape_of(node, 0)}
        return all(prod(shape) == 1 for shape in shapes)
    selects = selected_rows(node) is not None and len(shape_of(node, 0)) == 2
    known = selects or is_leaf(node) or node.name() in {CAST, *BY_ROWS}
    return known or is_passthrough(node) or is_transpose(node)


def makes_in_full(node: Node) -> bool:
    """Return True if a weight's gradients cross a node as tensors [N, *shape]."""
    shape, known = shape_of(node, 0), keeps_rows(node) or node.name() == EMBEDDING
    return prod(shape) > max(shape, default=1) and not known


def in_closed_form(node: Node) -> bool:
    known = node.name() in {*ROWS, CONVOLUTION, EMBEDDING, INDEX_PUT, MV}
    return known or is_elementwise(node) or takes_rows(node)


def takes_rows(node: Node) -> bool:
    """Return True if a node takes rows from a table, as in table[ids], or elements from a small
    one, as in table[i, j]. A table that is no matrix is a parameter itself."""
    operand, _ = edge = node.next_functions[0]
    if node.name() == INDEX_SELECT:
        return node._saved_dim == 0 and (len(shape_of(*edge)) == 2 or is_leaf(operand))
    if node.name() != INDEX:
        return False
    shape, indices = shape_of(*edge), node._saved_indices
    fits = len(indices) == 1 and (len(shape) == 2 or is_leaf(operand))
    is_long = all(ids is not None and ids.dtype == torch.long for ids in indices)
    return is_long and (fits or prod(shape) <= MAX_TABLE)


def row_numbers(node: Node) -> Tensor:
    """Return the numbers of the rows that a node takes."""
    if node.name() == INDEX_SELECT:
        return node._saved_index
    shape, indices = shape_of(*node.next_functions[0]), node._saved_indices
    numbers = indices[0] % shape[0]
    for ids, size in zip(indices[1:], shape[1:], strict=False):
        numbers = numbers * size + ids % size
    return numbers


def rows_product(node: Node, numbers: Tensor, g: Tensor) -> Gradients:
    """Return the product for a table that rows are taken from. numbers, g: by sample [N, *]."""
    operand, _ = edge = node.next_functions[0]
    n, shape = len(g), shape_of(*edge)
    dims = 1 if node.name() == INDEX_SELECT else len(node._saved_indices)
    rows = g.reshape(n, -1, prod(shape[dims:]))
    product = LookedUp(numbers.reshape(n, -1), rows, prod(shape[:dims]))
    is_table = dims == 1 and (len(shape) == 2 or is_leaf(operand))
    return product if is_table else product.in_full().view(n, *shape)


def scales_by_count(node: Node) -> bool:
    """Return True if an embedding divides each gradient by the count of its id in the batch."""
    return bool(getattr(node, "_saved_scale_grad_by_freq", False))


def fit_to_edge(product: Tensor | None, edge: tuple[Node, int]) -> Tensor | None:
    """Sum a node's product over broadcast dimensions and cast it, which the engine usually does."""
    if product is None or edge[0] is None or product.is_sparse:
        return product
    shape, dtype = shape_of(*edge), dtype_of(*edge)
    product = product if product.shape == shape else product.sum_to_size(shape)
    return product.to(dtype)


def ask_each(
    ask: Callable[..., tuple[Tensor, ...]], grads: Sequence[Tensor]
) -> Sequence[Tensor | None]:
    """Call ask(*gradients) for each sample of `grads`, each [n, *], and stack the products.
    None: an operand that this backward leaves out."""
    if len(grads[0]) > MAX_LOOPED:
        with suppress(Exception):  # an operator without a vmap rule
            return vmap(ask)(*grads)
    columns = zip(*(ask(*each) for each in zip(*grads, strict=True)), strict=True)
    return [None if c[0] is None else torch.stack([t.to_dense() for t in c]) for c in columns]


def closed_form(node: Node, operand: int, g: Tensor, layout: int, n: int) -> Gradients | None:
    """Return the product of a frontier node for all samples at the cost of one call, or None.
    g: the gradient of its output, whose rows have this layout."""
    edge, product = node.next_functions[operand], elementwise_product(node, operand, g)
    if product is None:
        return None if g.is_complex() else _product_of_rows(node, operand, g, layout, n)
    pieces = split_samples(product, layout, n)
    return sum_broadcast(pieces.to(dtype_of(*edge)), shape_of(*edge))


def _product_of_rows(node: Node, operand: int, g: Tensor, layout: int, n: int) -> Gradients | None:
    """Return the product of a node that multiplies rows, looks them up, or convolves."""
    name = node.name()
    if name in ("MmBackward0", "BmmBackward0") and operand == 0 and layout == LAST:
        grads, columns = (split_samples(t, layout, n) for t in (g, node._saved_mat2))
        return Outer(grads.mT, columns.mT)
    if name == EMBEDDING:
        ids, grads = (split_samples(t, layout, n) for t in (node._saved_indices, g))
        return lookup_product(node, ids, grads)
    if takes_rows(node):
        return rows_product(node, *(split_samples(t, layout, n) for t in (row_numbers(node), g)))
    if name == CONVOLUTION:
        return _convolution(node, operand, g, layout, n)
    saved, place = ROWS.get(name, ("", -1))
    if operand != place:
        return None
    rows, shape = getattr(node, saved), shape_of(*node.next_functions[operand])
    if layout == SEQUENCE and name == "BmmBackward0":
        if len(g) > 1 and g.shape[1] == n:
            layout = SECOND
        elif len(g) == 1 and g.shape[2] != n:  # [1, T N, *]; else `*` may be the samples
            layout = MINOR
    if layout not in (BATCH, SECOND, MINOR):
        # Rows t*N+n, if no dimension of features can be taken for that of the samples.
        features = rows.shape[1], g.shape[-1]
        if layout != SEQUENCE or g.dim() != 2 or n in features:
            return None
    rows, grads = (split_samples(t, layout, n) for t in (rows, g))
    alpha = getattr(node, "_saved_alpha", 1)
    product = Outer(rows, grads if alpha == 1 else grads * alpha)
    return product if product.shape == shape else None


def _convolution(node: Node, operand: int, g: Tensor, layout: int, n: int) -> Gradients | None:
    """Return the product for the weight (operand 1) or the bias of a convolution."""
    has_image_rows = layout == BATCH or (layout == SEQUENCE and g.shape[1] != n)  # else channels
    stride = node._saved_stride
    fits = all(k < step for k, step in zip(node._saved_output_padding, stride, strict=True))
    if not operand or not has_image_rows or len(g) % n or not fits:
        return None
    order = (n, -1) if layout == BATCH else (-1, n)
    grads = g.unflatten(0, order).movedim(order.index(n), 0)
    if operand == 2:
        return grads.flatten(3).sum((1, 3))
    images = node._saved_input.unflatten(0, order).movedim(order.index(n), 0)
    geometry = stride, node._saved_padding, node._saved_dilation
    if node._saved_transposed:
        images, grads = grads, images
    return Convolved(images, grads, shape_of(*node.next_functions[1]), geometry, node._saved_groups)


def closed_form_below(
    node: Node, operand: int, g: Tensor, ask: Callable[[Tensor], Sequence[Tensor | None]]
) -> Gradients | None:
    """Return the product of a node below the frontier, which has one output; None: no closed form.
    g: per-sample gradients [N, *] of the output. ask: calls the node with one gradient."""
    name, shape = node.name(), shape_of(*node.next_functions[operand])
    if name == MV and operand == 0:
        return Outer(g[:, None], node._saved_vec.expand(len(g), 1, -1))
    product = permute_back(node, g)
    if is_passthrough(node):
        product = g.reshape(len(g), *shape)
    elif name in ELEMENTWISE and not g.is_complex():
        product = sum_broadcast(ELEMENTWISE[name](node, operand, g), shape)
    elif name in POINTWISE and not g.is_complex() and shape == shape_of(node, 0):
        factor = ask(torch.ones_like(g[0]))[operand]
        product = None if factor is None else g * factor
    elif takes_rows(node):
        return rows_product(node, row_numbers(node).flatten().expand(len(g), -1), g)
    return None if product is None else product.to(dtype_of(*node.next_functions[operand]))


def pass_factors(node: Node, g: Gradients | None) -> Sequence[Gradients] | None:
    """Return the gradients of each operand if a node passes on a weight's gradients as factors.
    It casts, reshapes or transposes the weight, or computed it row by row or element by element.
    None: another node, or gradients that are not factors of a weight."""
    name, edges = node.name(), node.next_functions
    if isinstance(g, (Outer, Convolved)):
        if name == CAST:
            return [g.to(dtype_of(*edges[0]))]
        g = Rowwise(g, g.shape)
    if not isinstance(g, Rowwise):
        return None
    is_view = g.scale is g.by is None
    sizes = [size for size in g.shape if size > 1 or len(g.shape) < 4]  # see is_transpose()
    if isinstance(g.of, Outer) and is_view and sizes == [*g.of.shape] and is_transpose(node):
        return [Rowwise(g.of.transposed(), shape_of(*edges[0])).simplest()]
    if name in BY_ROWS and is_view and (isinstance(g.of, Convolved) or len(g.of.shape) == 2):
        return BY_ROWS[name](node, replace(g, of=g.of.to(accumulation_dtype(g.dtype))))
    if is_passthrough(node) and name != CAST:
        return [replace(g, shape=shape_of(*e)).simplest() if e[0] else g for e in edges]
    if name not in ELEMENTWISE:
        return None
    one = torch.ones((), dtype=g.dtype, device=g.operands[0].device)
    one = one.expand(shape_of(node, 0)) if name in CALLED else one
    found: Any = [g.scaled(ELEMENTWISE[name](node, k, one), shape_of(*e)) if e[0] else g
             for k, e in enumerate(edges)]  # fmt: skip
    return None if any(of is None for of in found) else found


def split_samples(g: Tensor, layout: int, n: int) -> Tensor:
    """Return a view [N, *], where [*] is what the node would get for one sample."""
    if n == 1:
        return g[None]
    if layout == LAST:
        return g.unflatten(-1, (n, -1)).movedim(-2, 0)
    if layout == SECOND:
        return g.unflatten(1, (n, -1)).movedim(1, 0)
    if layout == MINOR:
        return g.unflatten(1, (-1, n)).movedim(2, 0)
    if g.shape[0] == 1:  # leading_sizes() skips leading 1s
        return split_samples(g[0], layout, n).unsqueeze(1)
    if layout == BATCH:
        return g.unflatten(0, (n, -1))
    if g.dim() > 1 and g.shape[1] == n:
        return g.movedim(1, 0).unsqueeze(2)
    return g.unflatten(0, (-1, n)).movedim(1, 0)
