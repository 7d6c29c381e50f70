"""Squared norms of parameters that are used in several places, or several times.

A parameter's gradient is the sum over its uses, so their norm has cross terms. Uses of one kind are
one use with a longer T: their rows are concatenated and go through the same kernel.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch
from torch import Tensor
from torch.nn import functional as F

from .. import ops
from ..layers.rules import Layer
from ..reference.chunks import accumulation_dtype

# (layer, activations, grad_output) of an outer product, (layer, ids, grad_output) of a table looked
# up, or (None, None, per-sample gradients); (None, activations, grad_output) as of a plain Linear,
# (None, ids, grad_output) as of a plain table
Term = tuple[Layer | None, Tensor | None, Tensor]

PLAIN_LINEAR = Layer(name="", kind="linear", type_name="Linear")
CPU_ELEMENTS = 1 << 21  # elements that a chunk copies: 8 MiB of float32, which a cache holds
GPU_ELEMENTS = 1 << 28  # the same on a GPU, where launches cost and memory is quick


def combine(n: int, terms: Sequence[Term]) -> Tensor:
    """Return [N] squared norms of the sum of all terms of one parameter."""
    terms = [(layer or _kind_of(a, g, n, terms), a, g) for layer, a, g in terms]
    grads = [term[2] for term in terms]
    sq_norms = grads[0].new_zeros(n, dtype=accumulation_dtype(grads[0].dtype))
    tables = [term for term in terms if term[0] and term[0].kind == "embedding"]
    outer = [term for term in terms if term[0] and term[0].kind != "embedding"]
    groups = {term[0].groups for term in outer if term[0]}
    closed = len(outer) + len(tables) == len(terms) and (not tables or groups <= {1})
    closed = closed and len(groups) <= 1
    views = closed and [layer.kernel_size for layer, *_ in outer if layer] == [()]
    for chunk in _chunks(n, terms, views):
        if closed:
            sq_norms[chunk] = _closed(outer, tables, n, chunk, max(groups, default=1))
        else:
            total = sum(_gradients(term, n, chunk) for term in terms)
            assert isinstance(total, Tensor)
            sq_norms[chunk] = torch.linalg.vector_norm(total, dim=1, dtype=sq_norms.dtype).square()
    return sq_norms


def combine_segments(n: int, terms: Sequence[Term], owners: Sequence[Tensor | None]) -> Tensor:
    """Return [N] squared norms of the sum of all terms, some with rows that are not n*T+t.

    Samples that have as many rows in each of the uses are a batch by themselves.
    owners: for each term the sample of each of its rows [rows, *], N where it is of none; None: it
    holds the samples in front.
    """
    wide, device = accumulation_dtype(terms[0][2].dtype), terms[0][2].device
    sq_norms = torch.zeros(n, dtype=wide, device=device)
    owned = {k: rows for k, rows in enumerate(owners) if rows is not None}
    counts = [torch.bincount(rows, minlength=n + 1) for rows in owned.values()]
    lengths = torch.stack(counts).tolist()  # by use and sample, read from the device at once
    rows_of = {k: rows.argsort(stable=True).split(length)
               for (k, rows), length in zip(owned.items(), lengths, strict=True)}  # fmt: skip
    alike: dict[tuple[int, ...], list[int]] = {}
    for sample in range(n):
        alike.setdefault(tuple(length[sample] for length in lengths), []).append(sample)
    for members in alike.values():
        samples, parts = torch.tensor(members, device=device), []
        for k, (layer, a, g) in enumerate(terms):
            index = torch.stack([rows_of[k][one] for one in members]) if k in rows_of else samples
            if index.numel():
                parts.append((layer, None if a is None else a[index], g[index]))
        if parts:
            sq_norms[samples] = combine(len(members), parts).to(wide)
    return sq_norms


def _kind_of(a: Tensor | None, g: Tensor, n: int, terms: Sequence[Term]) -> Layer | None:
    """Return the layer that a term without one is like; None: of gradients by sample."""
    if a is None:
        return None
    if a.is_floating_point():
        return PLAIN_LINEAR
    whole = next((g for _, other, g in terms if other is None), None)
    rows = 0 if whole is None else whole.numel() // (n * g.shape[-1])
    return replace(PLAIN_LINEAR, kind="embedding", constants={"padding_idx": -1, "rows": rows})


def _closed(
    outer: Sequence[Term], tables: Sequence[Term], n: int, chunk: slice, groups: int
) -> Tensor:
    """Return |H|^2 + |E|^2 + 2 <H, E>, with H all outer products and E all rows looked up."""
    sq_norms: Tensor | float = 0.0
    if outer:
        a, b = _join([_rows(term, n, chunk) for term in outer])
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
    """Return several uses as one with a longer T."""
    if len(pairs) == 1:
        return tuple(_cast_alike([*pairs[0]]))  # type: ignore[return-value]
    first, second = (torch.cat(_cast_alike([pair[k] for pair in pairs]), 1) for k in (0, 1))
    return tuple(_cast_alike([first, second]))  # type: ignore[return-value]


def _look_up(tables: Sequence[Term], chunk: slice) -> tuple[Tensor, Tensor]:
    """Return ids [n, T] and gradients [n, T, D], 0 where an id is the padding of its layer."""
    ids, rows = [], []
    for layer, indices, grads in tables:
        assert layer is not None
        assert indices is not None
        padding = layer.constants["padding_idx"]
        kept = (indices[chunk] != padding).unsqueeze(-1)
        ids.append(indices[chunk].long())
        rows.append(grads[chunk] if padding < 0 else grads[chunk] * kept)
    return torch.cat(ids, 1), torch.cat(_cast_alike(rows), 1)


def _chunks(n: int, terms: Sequence[Term], views: bool) -> Iterator[slice]:
    """Return the chunks of samples; views: nothing is copied, and one chunk is all."""
    elements = sum(
        (a.numel() * _patch(layer) if a is not None else 0) + g.numel() for layer, a, g in terms
    )
    most = GPU_ELEMENTS if terms[0][2].is_cuda else CPU_ELEMENTS
    step = max(1, n if views else n * most // max(1, elements))
    return (slice(start, min(start + step, n)) for start in range(0, n, step))


def _patch(layer: Layer | None) -> int:
    """Return how many times a pixel is repeated in the rows of a convolution."""
    return layer.kernel_size[0] * layer.kernel_size[1] if layer and layer.kernel_size else 1


def _cast_alike(tensors: list[Tensor]) -> list[Tensor]:
    """Cast to one dtype: uses inside and outside of autocast may differ."""
    dtypes = {t.dtype for t in tensors}
    wide = next(iter(dtypes)) if len(dtypes) == 1 else torch.promote_types(*dtypes)
    return [t.to(wide) for t in tensors]


def _rows(term: Term, n: int, chunk: slice) -> tuple[Tensor, Tensor]:
    """Return [n * groups, T, I], [n * groups, T, O / groups] of some samples."""
    layer, a, b = term
    assert layer is not None
    assert a is not None
    if layer.transposed:  # its weight is the transpose
        a, b = b, a
    if not layer.kernel_size:
        return a[chunk], b[chunk]
    images = a.shape[0] // n  # of one sample
    these = slice(chunk.start * images, chunk.stop * images)
    # Of three dimensions: csrc/layers/convolution.cpp has made them two, the first one padded.
    padding = (0, layer.padding[1]) if layer.depth else layer.padding
    patches = F.unfold(a[these], layer.kernel_size, layer.dilation, padding, layer.stride)
    count, groups = chunk.stop - chunk.start, layer.groups

    def by_group(t: Tensor) -> Tensor:  # [n * images, groups * features, pixels]
        t = t.reshape(count, images, groups, -1, t.shape[-1])
        return t.permute(0, 2, 1, 4, 3).flatten(2, 3).flatten(0, 1)

    return by_group(patches), by_group(b[these].flatten(2))


def _gradients(term: Term, n: int, chunk: slice) -> Tensor:
    """Return [n, size of the parameter], in the order of its memory."""
    layer, _, grads = term
    if layer is None:
        part = grads[chunk]
        return part.reshape(len(part), -1).to(accumulation_dtype(grads.dtype))
    if layer.kind == "embedding":
        ids, rows = _look_up([term], chunk)
        rows = rows.to(accumulation_dtype(rows.dtype))
        table = rows.new_zeros(len(ids), layer.constants["rows"], rows.shape[2])
        return table.scatter_add_(1, ids.unsqueeze(-1).expand_as(rows), rows).flatten(1)
    a, b = _rows(term, n, chunk)
    wide = accumulation_dtype(b.dtype)
    return (b.to(wide).mT @ a.to(wide)).reshape(chunk.stop - chunk.start, -1)
