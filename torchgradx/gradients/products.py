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
from .outer import LookedUp, Outer, Rowwise, lookup_product

CAST = "ToCopyBackward0"  # autocast's
MAX_LOOPED = 8  # samples; for fewer a loop is faster than to set up vmap
CONVOLUTION = "ConvolutionBackward0"
ADD = "AddBackward0"
EMBEDDING = "EmbeddingBackward0"
INDEX = "IndexBackward0"
INDEX_PUT = "IndexPutBackward0"  # x[mask] = values, which are operand 1
MV = "MvBackward0"  # rows @ vector
# Products of elementwise nodes, before the sum over the dimensions that an operand is broadcast to.
ELEMENTWISE: dict[str, Callable[[Node, int, Tensor], Tensor]] = {
    ADD: lambda node, k, g: g * node._saved_alpha if k and node._saved_alpha != 1 else g,
    "SubBackward0": lambda node, k, g: g * -node._saved_alpha if k else g,
    "DivBackward0": lambda node, k, g: (
        (g * -node._saved_self / node._saved_other if k else g) / node._saved_other
    ),
    "MulBackward0": lambda node, k, g: g * (node._saved_self if k else node._saved_other),
    "ExpandBackward0": lambda node, k, g: g,
    "RepeatBackward0": lambda node, k, g: g,
    # The nodes themselves do not sum over broadcast dimensions.
    **dict.fromkeys(("LerpBackward1", "PowBackward1", "RemainderBackward1", *(
        f"{name}Backward{k}" for k in (0, 1) for name in ("ClampMax", "ClampMin")
    ), *(f"{name}Backward0" for name in (
        "Addcdiv", "Addcmul", "Atan2", "Clamp", "Fmax", "Fmin", "Hypot", "Lerp", "Logaddexp",
        "Maximum", "Minimum", "PreluKernel", "Rsub", "Where", "Xlogy",
    ))), lambda node, k, g: node(g)[k]),
}  # fmt: skip
# Nodes that pass on the gradient in another shape or dtype, if it keeps its size.
LINKS = {CAST, *(f"{name}Backward0" for name in (
    "Alias", "Clone", "Expand", "ReshapeAlias", "Squeeze", "UnsafeView", "Unsqueeze", "View",
))}  # fmt: skip
# Nodes with one operand, that multiply each element's gradient by a factor.
POINTWISE = {f"{name}Backward{k}" for k in (0, 1) for name in (
    "Abs", "Exp", "Log", "Neg", "Pow", "Relu", "Sigmoid", "Silu", "Softplus", "Sqrt", "Tanh",
)}  # fmt: skip
# Nodes of rows @ b: the attribute with the saved rows, and the operand b.
ROWS = {
    "MmBackward0": ("_saved_self", 1),
    "BmmBackward0": ("_saved_self", 1),
    "AddmmBackward0": ("_saved_mat1", 2),
}


def _permute_back(node: Node, g: Tensor) -> Tensor | None:
    """Return the product of a node that permutes dimensions for [N, *]; None: another node."""
    name, dims = node.name(), g.dim() - 1
    if name == "TBackward0":
        return g.mT if dims == 2 else g
    if name == "TransposeBackward0":
        return g.transpose(*(1 + to_signed(d) % dims for d in (node._saved_dim0, node._saved_dim1)))
    if name == "PermuteBackward0":
        order = [to_signed(d) % dims for d in node._saved_dims]
        return g.permute(0, *(1 + order.index(d) for d in range(dims)))
    return None


def is_transpose(node: Node) -> bool:
    """Return True if a node transposes matrices alone. Of 4 dimensions, those of 1 do not count."""
    shape = shape_of(node, 0)
    sizes = [1 if size == 1 and len(shape) > 3 else k for k, size in enumerate(shape, 2)]
    probe = torch.empty(1, *sizes, device="meta")  # of unequal sizes
    permuted = _permute_back(node, probe) if probe.squeeze().dim() > 1 else None
    return permuted is not None and permuted.squeeze().shape == probe.squeeze().mT.shape


def _normalise_groups(node: Node) -> Tensor:
    x, mean, rstd = node._saved_input, node._saved_result1, node._saved_result2
    groups = x.reshape(*mean.shape, -1)
    return ((groups - mean[..., None]) * rstd[..., None]).view(x.shape)


def _normalise_by_running_statistics(node: Node) -> Tensor | None:
    """Return None if the statistics are the batch's."""
    if node._saved_training:
        return None
    x = node._saved_input
    shape = [-1 if d == 1 else 1 for d in range(x.dim())]
    rstd = (node._saved_running_var + node._saved_eps).rsqrt()
    return (x - node._saved_running_mean.view(shape)) * rstd.view(shape)


# Normalised inputs of nodes that multiply them by a weight (operand 1) and add a bias (operand 2).
NORMALISED: dict[str, Callable[[Node], Tensor | None]] = {
    "FusedRmsNormBackward0": lambda node: node._saved_input * node._saved_result1,
    "NativeLayerNormBackward0": lambda node: (
        (node._saved_input - node._saved_result1) * node._saved_result2
    ),
    "NativeGroupNormBackward0": _normalise_groups,
    "NativeBatchNormBackward0": _normalise_by_running_statistics,
}
CHANNELS_FIRST_NODES = {"NativeGroupNormBackward0", "NativeBatchNormBackward0"}


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


def keeps_rows(node: Node) -> bool:
    """Return True if pass_factors() may cross a node with the factors of a weight's gradients."""
    if node.name() in ELEMENTWISE:
        shapes = {shape_of(*edge) for edge in node.next_functions if edge[0]} - {shape_of(node, 0)}
        return all(prod(shape) == 1 for shape in shapes)
    known = is_leaf(node) or node.name() in {CAST, *BY_ROWS}
    return known or is_passthrough(node) or is_transpose(node)


def makes_in_full(node: Node) -> bool:
    """Return True if a weight's gradients cross a node as tensors [N, *shape]."""
    shape, known = shape_of(node, 0), keeps_rows(node) or node.name() == EMBEDDING
    return prod(shape) > max(shape, default=1) and not known


def in_closed_form(node: Node) -> bool:
    known = node.name() in {*ROWS, CONVOLUTION, EMBEDDING, INDEX_PUT, MV}
    return known or is_elementwise(node) or _row_indices(node) is not None


def _row_indices(node: Node) -> Tensor | None:
    """Return the indices of rows that a node takes from a matrix, as in table[ids]."""
    if node.name() != INDEX or len(shape_of(*node.next_functions[0])) != 2:
        return None
    ids, *others = node._saved_indices
    return ids if not others and ids.dtype == torch.long else None


def scales_by_count(node: Node) -> bool:
    """Return True if an embedding divides each gradient by the count of its id in the batch."""
    return bool(getattr(node, "_saved_scale_grad_by_freq", False))


def is_elementwise(node: Node) -> bool:
    return node.name() in ELEMENTWISE or node.name() in NORMALISED


def is_passthrough(node: Node) -> bool:
    """Return True if the only operand receives the gradient unchanged, but for shape or dtype."""
    edges = [edge for edge in node.next_functions if edge[0] is not None]
    if len(edges) != 1:
        return False
    if node.name() == ADD:  # to a constant
        is_plain = edges[0] == node.next_functions[0] or node._saved_alpha == 1
        return is_plain and shape_of(*edges[0]) == shape_of(node, 0)
    if node.name() in LINKS:
        return prod(shape_of(node, 0)) == prod(shape_of(*edges[0]))
    permuted = _permute_back(node, torch.empty(1, *shape_of(node, 0), device="meta"))
    return permuted is not None and permuted.is_contiguous()


def _normalisation(node: Node, operand: int, g: Tensor) -> Tensor | None:
    """Return the elementwise product of a normalisation, features last; None for its input. Of
    [B, C, *] it is [B, 1, *, C]: to `split_samples`, N pixels would be the samples."""
    if operand == 0:
        return None
    if operand == 1:
        normalised = NORMALISED[node.name()](node)
        if normalised is None:
            return None
        g = g * normalised
    return g.movedim(1, -1).unsqueeze(1) if node.name() in CHANNELS_FIRST_NODES else g


def fit_to_edge(product: Tensor | None, edge: tuple[Node, int]) -> Tensor | None:
    """Sum a node's product over broadcast dimensions and cast it, which the engine usually does."""
    if product is None or edge[0] is None or product.is_sparse:
        return product
    shape, dtype = shape_of(*edge), dtype_of(*edge)
    product = product if product.shape == shape else product.sum_to_size(shape)
    return product.to(dtype)


def to_dense(t: Tensor) -> Tensor:
    return t.to_dense() if t.is_sparse else t


def ask_each(
    ask: Callable[..., tuple[Tensor, ...]], grads: Sequence[Tensor]
) -> Sequence[Tensor | None]:
    """Call ask(*gradients) for each sample of `grads`, each [n, *], and stack the products.
    None: an operand that this backward leaves out."""
    if len(grads[0]) > MAX_LOOPED:
        with suppress(Exception):  # an operator without a vmap rule
            return vmap(ask)(*grads)
    columns = zip(*(ask(*each) for each in zip(*grads, strict=True)), strict=True)
    return [None if c[0] is None else torch.stack(list(map(to_dense, c))) for c in columns]


def elementwise_product(node: Node, operand: int, g: Tensor) -> Tensor | None:
    """Return the product of a node for an operand that is broadcast to its output, before it is
    summed over these dimensions; None: of another node or operand, or of complex numbers."""
    name = node.name()
    if g.is_complex():  # saved tensors would have to be conjugated
        return None
    if is_elementwise(node):
        return (ELEMENTWISE.get(name) or _normalisation)(node, operand, g)
    if name == INDEX_PUT and operand == 1:
        return _masked_product(node, g, shape_of(*node.next_functions[operand]))
    if name == MV and operand == 1:
        return (g.unsqueeze(-1) * node._saved_self).unsqueeze(1)  # beside the rows no N features
    if name == "AddmmBackward0" and operand == 0:
        return g if node._saved_beta == 1 else g * node._saved_beta
    return None


def closed_form(node: Node, operand: int, g: Tensor, layout: int, n: int) -> Gradients | None:
    """Return the product of a frontier node for all samples at the cost of one call, or None.
    g: the gradient of its output, whose rows have this layout."""
    edge, product = node.next_functions[operand], elementwise_product(node, operand, g)
    if product is None:
        return None if g.is_complex() else _product_of_rows(node, operand, g, layout, n)
    pieces = split_samples(product, layout, n)
    return sum_broadcast(pieces.to(dtype_of(*edge)), shape_of(*edge))


def _masked_product(node: Node, g: Tensor, shape: Sequence[int]) -> Tensor | None:
    """Return the product for `values` [*shape] in x[mask] = values; None for other indices, and for
    values by masked row, which are of other rows than the product has."""
    mask, *others = node._saved_indices
    if others or mask is None or mask.dtype != torch.bool:
        return None
    rows = len(shape) - 1 - (g.dim() - mask.dim())  # dimension of the masked rows
    if rows >= 0 and shape[rows] != 1:
        return None
    return g.masked_fill(~mask.view(*mask.shape, *[1] * (g.dim() - mask.dim())), 0)


def _product_of_rows(node: Node, operand: int, g: Tensor, layout: int, n: int) -> Gradients | None:
    """Return the product of a node that multiplies rows, looks them up, or convolves."""
    name = node.name()
    if name in ("MmBackward0", "BmmBackward0") and operand == 0 and layout == LAST:
        grads, columns = (split_samples(t, layout, n) for t in (g, node._saved_mat2))
        return Outer(grads.mT, columns.mT)
    if name == EMBEDDING:
        ids, grads = (split_samples(t, layout, n) for t in (node._saved_indices, g))
        return lookup_product(node, ids, grads)
    if (indices := _row_indices(node)) is not None:
        count, width = shape_of(*node.next_functions[0])
        ids, grads = (split_samples(t, layout, n) for t in (indices % count, g))
        return LookedUp(ids.reshape(n, -1), grads.reshape(n, -1, width), count)
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
    product = _permute_back(node, g)
    if is_passthrough(node):
        product = g.reshape(len(g), *shape)
    elif name in ELEMENTWISE and not g.is_complex():
        product = sum_broadcast(ELEMENTWISE[name](node, operand, g), shape)
    elif name in POINTWISE and not g.is_complex() and shape == shape_of(node, 0):
        factor = ask(torch.ones_like(g[0]))[operand]
        product = None if factor is None else g * factor
    elif (ids := _row_indices(node)) is not None:
        rows = g.reshape(len(g), -1, shape[1])
        return LookedUp(ids.flatten().expand(len(g), -1) % shape[0], rows, shape[0])
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
    has_dims = list(g.of.shape) in (list(g.shape), [size for size in g.shape if size > 1])
    if isinstance(g.of, Outer) and is_view and has_dims and is_transpose(node):
        return [Rowwise(g.of.transposed(), shape_of(*edges[0])).simplest()]
    if name in BY_ROWS and is_view and (isinstance(g.of, Convolved) or len(g.of.shape) == 2):
        return BY_ROWS[name](node, replace(g, of=g.of.to(accumulation_dtype(g.dtype))))
    if is_passthrough(node) and name != CAST:
        return [replace(g, shape=shape_of(*e)).simplest() if e[0] else g for e in edges]
    if name not in ELEMENTWISE:
        return None
    one = torch.ones((), dtype=g.dtype, device=g.operands[0].device)
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


def sum_broadcast(pieces: Tensor, shape: Sequence[int]) -> Tensor | None:
    """Sum [N, *] over the dimensions that an operand [*shape] is broadcast to: [N, *shape].
    None: `shape` does not broadcast to [*]."""
    lead = pieces.dim() - 1 - len(shape)
    aligned = (1,) * lead + tuple(shape)
    if lead < 0 or any(s not in (1, p) for s, p in zip(aligned, pieces.shape[1:], strict=True)):
        return None
    over = [d for d, s in enumerate(aligned, 1) if s == 1 and pieces.shape[d] != 1]
    return (pieces.sum(over) if over else pieces).reshape(len(pieces), *shape)
