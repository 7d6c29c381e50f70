"""Squared norms of a parameter that has several uses.

Its gradient is the sum over the uses, so the norm has cross terms. Uses of one kind are one use
with a longer T: their rows are concatenated, and one kernel reads them all.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from .. import ops
from ..extension import NATIVE
from ..gradients.grouped import Grouped, Pairs
from ..graph.segments import MAX_RUNS
from ..layers.rules import Layer
from ..reference.chunks import accumulation_dtype, chunks

PLAIN_LINEAR = Layer(name="", kind="linear", type_name="Linear")
CPU_ELEMENTS = 1 << 21  # elements of a chunk's copies: 8 MiB of float32, which a cache holds
GPU_ELEMENTS = 1 << 28  # the same on a GPU, where launches cost more than memory


class Term(NamedTuple):
    """The gradients by sample that one use adds to a parameter.

    They are the outer product of activations [N, T, I] and grads [N, T, O], as the layer has it
    (None: as a Linear has it); or rows grads [N, T, D] of a table, at the ids in `activations`
    [N, T]; or, where activations are None, grads [N, *] themselves.
    """

    layer: Layer | None
    activations: Tensor | None
    grads: Tensor


def combine(n: int, terms: Sequence[Term]) -> Tensor:
    """Return [N] squared norms of the sum of all terms of one parameter."""
    terms = [Term(layer or _layer_like(a, g, n, terms), a, g) for layer, a, g in terms]
    grads = terms[0].grads
    sq_norms = grads.new_zeros(n, dtype=accumulation_dtype(grads.dtype))
    tables = [term for term in terms if term.layer and term.layer.kind == "embedding"]
    outer = [term for term in terms if term.layer and term.layer.kind != "embedding"]
    groups = {term.layer.groups for term in outer if term.layer}
    closed = len(outer) + len(tables) == len(terms) and (not tables or groups <= {1})
    closed = closed and len(groups) <= 1
    views = closed and [term.layer.kernel_size for term in outer if term.layer] == [()]
    for chunk in _chunks(n, terms, views):
        if closed:
            sq_norms[chunk] = _sq_norms(outer, tables, n, chunk, max(groups, default=1))
        else:
            total = sum(_gradients(term, n, chunk) for term in terms)
            assert isinstance(total, Tensor)
            sq_norms[chunk] = torch.linalg.vector_norm(total, dim=1, dtype=sq_norms.dtype).square()
    return sq_norms


def combine_segments(n: int, terms: Sequence[Term], owners: Sequence[Tensor | None]) -> Tensor:
    """Return the same for terms of which some have rows [rows, *] in no fixed order. owners: for
    each term the sample of each row [rows], N for padding; None if the samples are in front."""
    wide, device = accumulation_dtype(terms[0].grads.dtype), terms[0].grads.device
    owned = {k: rows for k, rows in enumerate(owners) if rows is not None}
    counts = [torch.bincount(rows, minlength=n + 1) for rows in owned.values()]
    lengths = torch.stack(counts).tolist()  # by term and sample, read from the device at once
    alike: dict[tuple[int, ...], list[int]] = {}  # samples with equal lengths: one batch
    for sample in range(n):
        alike.setdefault(tuple(length[sample] for length in lengths), []).append(sample)
    layers = [layer for layer, *_ in terms if layer and not layer.kernel_size]
    matrices = [layer for layer in layers if layer.kind != "embedding"]
    if NATIVE and len(matrices) == len(owned) == len(terms) and len(alike) > MAX_RUNS:
        return _sq_norms_of_rows(n, terms, owners)
    rows_of = {k: rows.argsort(stable=True).split(length)
               for (k, rows), length in zip(owned.items(), lengths, strict=True)}  # fmt: skip
    sq_norms = torch.zeros(n, dtype=wide, device=device)
    for members in alike.values():
        samples, parts = torch.tensor(members, device=device), []
        for k, (layer, a, g) in enumerate(terms):
            index = torch.stack([rows_of[k][one] for one in members]) if k in rows_of else samples
            if index.numel():
                index = index.flatten() if layer and layer.kernel_size else index  # of images
                a, g = None if a is None else a[index], g[index]
                if a is not None and index.dim() > 1:  # rows may be [R, 1, *]
                    a = a.flatten(1, -2 if a.is_floating_point() else -1)
                    g = g.flatten(1, -2)
                parts.append(Term(layer, a, g))
        if parts:
            sq_norms[samples] = combine(len(members), parts).to(wide)
    return sq_norms


def _sq_norms_of_rows(n: int, terms: Sequence[Term], owners: Sequence[Any]) -> Tensor:
    """Return the same for a weight that multiplies all of these rows, which one kernel reads."""
    operands, of_rows = [], []
    for (layer, a, g), rows in zip(terms, owners, strict=True):
        assert a is not None
        whole = Term(layer, a.flatten(0, -2)[None], g.flatten(0, -2)[None])  # as of one sample
        operands.append(_operands(whole, 1, slice(None)))
        of_rows.append(rows.repeat_interleave(whole.grads.shape[1] // len(rows)))
    (left,), (right,) = _join(operands)
    sample = torch.cat(of_rows)
    pairs = Pairs.of(sample, torch.zeros_like(sample), n, 1)
    return Grouped(left, right, pairs, is_single=True).sq_norms()


def _layer_like(a: Tensor | None, g: Tensor, n: int, terms: Sequence[Term]) -> Layer | None:
    """Return a layer for a term without one; None for a term of gradients by sample."""
    if a is None:
        return None
    if a.is_floating_point():
        return PLAIN_LINEAR
    full = next((other.grads for other in terms if other.activations is None), None)
    rows = 0 if full is None else full.numel() // (n * g.shape[-1])
    return replace(PLAIN_LINEAR, kind="embedding", constants={"padding_idx": -1, "rows": rows})


def _sq_norms(outer: list[Term], tables: list[Term], n: int, chunk: slice, groups: int) -> Tensor:
    """Return |H|^2 + |E|^2 + 2 <H, E>: H is the sum of outer products, E that of table rows."""
    sq_norms: Tensor | float = 0.0
    if outer:
        a, b = _join([_operands(term, n, chunk) for term in outer])
        sq_norms = ops.linear_sq_norms(a, b).view(-1, groups).sum(1)
    if tables:
        ids, rows = _look_up(tables, chunk)
        sq_norms = sq_norms + ops.embedding_sq_norms(ids, rows)
    if outer and tables:
        rows, a, b = _cast_alike([rows, a, b])
        sq_norms = sq_norms + 2 * ops.gather_dots(ids, rows, a, b, None)
    assert isinstance(sq_norms, Tensor)
    return sq_norms.clamp_min(0)


def _join(pairs: Sequence[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    """Return the operands of several uses as those of one with a longer T."""
    joined: Sequence[Tensor] = pairs[0]
    if len(pairs) > 1:
        joined = [torch.cat(_cast_alike(list(column)), 1) for column in zip(*pairs, strict=True)]
    first, second = _cast_alike(list(joined))
    return first, second


def _look_up(tables: Sequence[Term], chunk: slice) -> tuple[Tensor, Tensor]:
    """Return ids [n, T] and gradients [n, T, D], zeros where an id is its layer's padding."""
    ids, rows = [], []
    for layer, indices, grads in tables:
        assert layer is not None
        assert indices is not None
        padding = layer.constants["padding_idx"]
        is_padding = (indices[chunk] == padding).unsqueeze(-1)
        ids.append(indices[chunk].long())
        rows.append(grads[chunk] if padding < 0 else grads[chunk].masked_fill(is_padding, 0))
    return torch.cat(ids, 1), torch.cat(_cast_alike(rows), 1)


def _chunks(n: int, terms: Sequence[Term], views: bool) -> Iterator[slice]:
    """Return chunks of the samples. views: nothing is copied, so one chunk is enough."""
    if views:
        return chunks(n, 0, n)
    # A convolution's patches repeat each pixel as often as the kernel has elements.
    elements = sum(
        (0 if a is None else a.numel() * prod(layer.kernel_size if layer else ())) + g.numel()
        for layer, a, g in terms
    )
    most = GPU_ELEMENTS if terms[0].grads.is_cuda else CPU_ELEMENTS
    return chunks(n, elements // max(1, n), most)


def _cast_alike(tensors: list[Tensor]) -> list[Tensor]:
    """Return the tensors in one dtype: uses inside and outside of autocast may differ."""
    dtypes = {t.dtype for t in tensors}
    wide = next(iter(dtypes)) if len(dtypes) == 1 else torch.promote_types(*dtypes)
    return [t.to(wide) for t in tensors]


def _operands(term: Term, n: int, chunk: slice) -> tuple[Tensor, Tensor]:
    """Return [n * groups, T, I] and [n * groups, T, O / groups] of a chunk of n samples."""
    layer, a, b = term
    assert layer is not None
    assert a is not None
    if layer.transposed:
        a, b = b, a
    if not layer.kernel_size:
        return a[chunk], b[chunk]
    images = a.shape[0] // n  # of one sample
    rows = slice(chunk.start * images, chunk.stop * images)
    # csrc/layers/convolution.cpp has made three dimensions two, and padded the first of these.
    padding = (0, layer.padding[1]) if layer.depth else layer.padding
    patches = F.unfold(a[rows], layer.kernel_size, layer.dilation, padding, layer.stride)
    count, groups = chunk.stop - chunk.start, layer.groups

    def by_group(t: Tensor) -> Tensor:  # [n * images, groups * features, pixels]
        t = t.reshape(count, images, groups, -1, t.shape[-1])
        return t.permute(0, 2, 1, 4, 3).flatten(2, 3).flatten(0, 1)

    return by_group(patches), by_group(b[rows].flatten(2))


def _gradients(term: Term, n: int, chunk: slice) -> Tensor:
    """Return the gradients [n, *] of a chunk of n samples, flat, in the parameter's order."""
    layer, _, grads = term
    if layer is None:
        part = grads[chunk]
        return part.reshape(len(part), -1).to(accumulation_dtype(grads.dtype))
    if layer.kind == "embedding":
        ids, rows = _look_up([term], chunk)
        rows = rows.to(accumulation_dtype(rows.dtype))
        table = rows.new_zeros(len(ids), layer.constants["rows"], rows.shape[2])
        return table.scatter_add_(1, ids.unsqueeze(-1).expand_as(rows), rows).flatten(1)
    a, b = _operands(term, n, chunk)
    wide = accumulation_dtype(b.dtype)
    return (b.to(wide).mT @ a.to(wide)).reshape(chunk.stop - chunk.start, -1)
