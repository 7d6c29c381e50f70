"""Nodes that work element by element: what an operand that is broadcast to their rows receives.

A table by the name of the node. What sums the products over rows, by sample, is in products.py and
grouped.py.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod

import torch
from torch import Tensor

from ..graph.nodes import Node, shape_of, to_signed

CAST = "ToCopyBackward0"  # autocast's
ADD = "AddBackward0"
INDEX_PUT = "IndexPutBackward0"  # x[mask] = values, which are operand 1
MV = "MvBackward0"  # rows @ vector
# Nodes that are called for their products: the engine, not they, sums over broadcast dimensions.
CALLED = {"ClampMaxBackward1", "ClampMinBackward1", "LerpBackward1", "PowBackward1",
          "RemainderBackward1", *(f"{name}Backward0" for name in (
              "Addcdiv", "Addcmul", "Atan2", "Clamp", "Fmax", "Fmin", "Hypot", "Lerp", "Logaddexp",
              "Maximum", "Minimum", "PreluKernel", "Rsub", "Where", "Xlogy"))}  # fmt: skip
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
    **dict.fromkeys(CALLED, lambda node, k, g: node(g)[k]),
}
# Nodes that pass on the gradient in another shape or dtype, if it keeps its size.
LINKS = {CAST, *(f"{name}Backward0" for name in (
    "Alias", "Clone", "Expand", "ReshapeAlias", "Squeeze", "UnsafeView", "Unsqueeze", "View",
))}  # fmt: skip
# Nodes with one operand, that multiply each element's gradient by a factor.
POINTWISE = {f"{name}Backward{k}" for k in (0, 1) for name in (
    "Abs", "Exp", "Log", "Neg", "Pow", "Relu", "Sigmoid", "Silu", "Softplus", "Sqrt", "Tanh",
)}  # fmt: skip


def permute_back(node: Node, g: Tensor) -> Tensor | None:
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
    permuted = permute_back(node, probe) if probe.squeeze().dim() > 1 else None
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
    permuted = permute_back(node, torch.empty(1, *shape_of(node, 0), device="meta"))
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


def sum_broadcast(pieces: Tensor, shape: Sequence[int]) -> Tensor | None:
    """Sum [N, *] over the dimensions that an operand [*shape] is broadcast to: [N, *shape].
    None: `shape` does not broadcast to [*]."""
    lead = pieces.dim() - 1 - len(shape)
    aligned = (1,) * lead + tuple(shape)
    if lead < 0 or any(s not in (1, p) for s, p in zip(aligned, pieces.shape[1:], strict=True)):
        return None
    over = [d for d, s in enumerate(aligned, 1) if s == 1 and pieces.shape[d] != 1]
    return (pieces.sum(over) if over else pieces).reshape(len(pieces), *shape)
