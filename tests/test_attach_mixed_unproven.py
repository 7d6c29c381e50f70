"""Samples mixed, or put elsewhere, where no backward can be asked: by products, windows, norms and
sums along the dimension that they were moved to. What loses them is refused, never presumed."""

import pytest
import torch
import torch.nn.functional as F
from attach_oracle import (
    Model,
    Same,
    check,
    exact_or_refused,
    seeded,  # noqa: F401
    square,
)
from torch import nn
from torch.utils.checkpoint import checkpoint

N, T, D = 4, 5, 6


def columns(h):
    """One a sample, the last dimension."""
    return h.flatten(1).T[:, None]


def attending(h):
    t = h.transpose(0, 1)
    return h + (t @ t.transpose(1, 2) @ t).transpose(0, 1)


def back(c, h):
    return h + c[:, 0].T.reshape(h.shape)


def packed(h):
    """[1, N T, D], as models have it that leave out padding."""
    return h.reshape(1, -1, h.shape[-1])


def others_heads(h):
    """Queries in rows n*2+h meet keys in rows h*N+n."""
    split = torch.stack([h, h.tanh()], 1)  # [N, 2, T, D]
    q, k = split.flatten(0, 1), split.transpose(0, 1).flatten(0, 1)
    return (torch.bmm(q, k.transpose(1, 2)).softmax(-1) @ q).view(split.shape).sum(1)


def padded(h):
    return h + F.pad(h.permute(1, 2, 0), (1, 0))[..., :-1].permute(2, 0, 1)


def lstm(rows):
    """Over the samples as steps, its weights being constants."""
    layer = nn.LSTM(T * D, T * D).to(rows.dtype).requires_grad_(False)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        layer.reset_parameters()
    return layer(rows)[0]


def nearby(rows):
    return torch.cdist(rows, rows) @ rows


WAYS = {
    "a mean that is given a dimension": lambda h: h * (1 + h.mean().view(1)),
    "a norm of all": lambda h: h / (1 + h.norm().reshape(1, 1, 1)),
    "attention over the batch": attending,
    "products over the batch": lambda h: h + torch.einsum("ntd,mtd,mte->nte", h, h, h),
    "a matrix from the right": lambda h: (
        h.permute(1, 2, 0) @ torch.ones(len(h), len(h), dtype=h.dtype)
    ).permute(2, 0, 1),
    "windows": lambda h: h + torch.cat([h, h]).unfold(0, 2, 1)[: len(h)].sum(-1),
    "a pool": lambda h: back(F.avg_pool1d(columns(h), 3, 1, 1), h),
    "a convolution": lambda h: back(
        F.conv1d(columns(h), torch.ones(1, 1, 3, dtype=h.dtype), padding=1), h
    ),
    "a norm over the batch": lambda h: F.layer_norm(h.permute(1, 2, 0), (len(h),)).permute(2, 0, 1),
    "a shift by padding": padded,
    "rows reinterpreted": lambda h: h.transpose(0, 1).reshape(h.shape),
    "halves swapped": lambda h: h + h.reshape(-1, 2 - len(h) % 2, T, D).flip(1).reshape(h.shape),
    "halves swapped as complex numbers": lambda h: (
        h + h.to(torch.complex128).reshape(-1, 2 - len(h) % 2, T, D).flip(1).reshape(h.shape).real
    ),
    "pairs": lambda h: h + (h[:, None] - h).square().sum(1),
    "pairs, weighted": lambda h: (
        ((-(h[:, None] - h).square().sum((-1, -2))).softmax(1)[..., None, None] * h).sum(1) + h
    ),
    "samples as kernels": lambda h: h * F.conv1d(h, h).sum(1)[:, None],
    "attention to all": lambda h: F.scaled_dot_product_attention(
        h, *[h.flatten(0, 1).expand(len(h), -1, -1)] * 2
    ),
    "time": lambda h: h + lstm(h.flatten(1)[:, None])[:, 0].view(h.shape),
    "strides": lambda h: h.as_strided(h.shape, (0, D, 1)),
    "distances": lambda h: h * (1 + torch.pdist(h.flatten(1)).sum().view(1)),
    "a triangle": lambda h: h.flatten(1).tril(-1).view(h.shape),
    "singular values": lambda h: (
        h * torch.linalg.svd(h.flatten(1), full_matrices=False)[1].view(-1, 1, 1)
    ),
    "heads of others": others_heads,
    "packed rows in another order": lambda h: (
        torch.zeros_like(packed(h)).index_add(1, torch.arange(len(h) * T).roll(T), packed(h))
        + packed(h)
    ).view(h.shape),
    "rows put in another order": lambda h: (
        torch.zeros_like(packed(h)).index_copy(1, torch.arange(len(h) * T).flip(0), packed(h))
        + packed(h)
    ).view(h.shape),
    "all distances": lambda h: nearby(h.flatten(0, 1)).view(h.shape),
}
PLACES = {
    "after the table": lambda m, h, mix: checkpoint(m.c, mix(h + m.p), use_reentrant=True),
    "before the table": lambda m, h, mix: mix(checkpoint(m.c, h, use_reentrant=True)) + m.p,
    "inside": lambda m, h, mix: checkpoint(lambda u: mix(m.c(u)), h + m.p, use_reentrant=True),
    "beside a function of the user": lambda m, h, mix: mix(Same.apply(m.c(h + m.p))),
}


@pytest.mark.parametrize("alone", [False, True], ids=["outputs", "loss"])
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("way", WAYS)
def test_samples_that_are_lost_on_their_way_are_refused(way, place, alone):
    def forward(m, x):
        out = m.o(PLACES[place](m, m.i(x), WAYS[way]))
        return out.square().flatten(1).sum(1).mean() if alone else out

    net = Model(forward, i=nn.Linear(3, D), c=nn.Sequential(nn.Linear(D, D), nn.Tanh()),
                o=nn.Linear(D, 2), p=torch.randn(T, D)).double()  # fmt: skip
    exact_or_refused(net, (lambda m, x: m(x)) if alone else square, torch.randn(N, T, 3))


AFTER = {
    "squared": lambda s: s.square(),
    "multiplied": lambda s: s @ s.T,
    "normed": lambda s: s / s.norm(),
    "a divisor": lambda s: torch.ones_like(s) / (3 + s),
    "scaled": lambda s: 2 * s.T @ torch.ones(T, 1, dtype=s.dtype) - s.mean(0)[:, None],
}


@pytest.mark.parametrize("way", AFTER)
def test_sums_over_all_samples_are_refused_unless_they_add_up(way):
    """The model returns its loss, a sum over the samples: of what is in it nothing else is one."""

    def forward(m, x):
        last = checkpoint(m.c, m.i(x), use_reentrant=True).permute(1, 2, 0)  # [T, 2, N]
        return AFTER[way]((last @ torch.ones(len(x), 1, dtype=x.dtype))[..., 0]).sum()

    net = Model(forward, i=nn.Linear(3, D), c=nn.Linear(D, 2)).double()
    loss = lambda m, x: m(x)  # noqa: E731
    refusal = exact_or_refused(net, loss, torch.randn(N, T, 3), loss_reduction="sum")
    assert (refusal is None) == (way == "scaled")


GROWN = {
    "expanded": lambda h: (h.T @ torch.ones(len(h), dtype=h.dtype)).expand(len(h), -1),
    "by a product": lambda h: (h.reshape(1, -1) @ TABLE[: h.numel(), : h.numel()]).view(h.shape),
}
TABLE = torch.linspace(-1, 1, (N * D) ** 2, dtype=torch.float64).cos().view(N * D, N * D)


@pytest.mark.parametrize("way", GROWN)
def test_sums_over_all_samples_that_have_as_many_rows_again_are_refused(way):
    net = Model(lambda m, x: m.o(GROWN[way](torch.tanh(m.i(x)))).sum(1).mean(), i=nn.Linear(3, D),
                o=nn.Linear(D, 2)).double()  # fmt: skip
    refusal = exact_or_refused(net, lambda m, x: m(x), torch.randn(N, 3))
    assert "o.weight" in refusal.parameters


ALONE = {
    "distances": lambda h: torch.cdist(h, h.tanh()) @ torch.ones(len(h), D, dtype=h.dtype),
    "a window": lambda h: F.conv1d(h.T[None], torch.ones(D, D, 3, dtype=h.dtype), padding=1)[0].T,
    "neighbours": lambda h: F.avg_pool1d(F.pad(h.T, (1, 1)), 3, 1).T,
    "a triangle": lambda h: torch.einsum("ab,bd->ad", torch.ones(len(h), len(h), dtype=h.dtype), h),
}


@pytest.mark.parametrize("options", [{}, {"fused": False}], ids=str)
@pytest.mark.parametrize("name", ALONE)
def test_a_second_argument_of_as_many_columns_as_samples_is_not_mixed_unseen(name, options):
    """Its first one does not enter: sizes alone would have to say where the samples are."""
    model = Model(lambda m, ids, y: Same.apply(m.b(ALONE[name](m.a(y)))), a=nn.Linear(N, D),
                  b=nn.Linear(D, 3))  # fmt: skip
    loss = lambda m, ids, y: m(ids, y).square().sum() / len(ids)  # noqa: E731
    refusal = exact_or_refused(model, loss, torch.arange(N), torch.randn(N, N), **options)
    assert "no proof could be had" in str(refusal)


CHOSEN = {
    "distinct": torch.unique,
    "distinct neighbours": torch.unique_consecutive,
    "positions": lambda ids: (ids[:, None] == torch.arange(30)).nonzero()[:, 1],
}


@pytest.mark.parametrize("name", CHOSEN)
def test_ids_that_the_batch_chose_are_not_its_samples(name):
    model = Model(lambda m, ids: Same.apply(m.l(m.e(CHOSEN[name](ids)))), e=nn.Embedding(30, 5),
                  l=nn.Linear(5, 3))  # fmt: skip
    loss = lambda m, ids: m(ids).square().sum() / len(ids)  # noqa: E731
    refusal = exact_or_refused(model, loss, torch.tensor([9, 3, 1, 2]))
    assert ("no proof could be had" if name == "positions" else "another order") in str(refusal)


APART = {  # samples first, in modules that torch takes apart where nobody sees it
    "lstm": (lambda: nn.LSTM(3, D, batch_first=True), lambda m, x: m.l(x)[0]),
    "gru": (lambda: nn.GRU(3, D, batch_first=True), lambda m, x: m.l(x)[0]),
    "instance norm": (lambda: nn.InstanceNorm1d(T, affine=True), lambda m, x: m.l(x)),
    "instance norm of nothing": (lambda: nn.InstanceNorm1d(T), lambda m, x: m.l(m.c(x))),
    "prelu": (lambda: nn.PReLU(T), lambda m, x: m.l(x)),
    "one prelu": (nn.PReLU, lambda m, x: m.l(m.c(x))),
    "bilinear": (lambda: nn.Bilinear(3, 3, D), lambda m, x: m.l(x, x.tanh())),
}


@pytest.mark.parametrize("options", [{}, {"fused": False}, {"backend": "vmap"}], ids=str)
@pytest.mark.parametrize("alone", [False, True], ids=["a Function", "its loss"])
@pytest.mark.parametrize("name", APART)
def test_modules_that_leave_samples_apart_are_exact(name, alone, options):
    make, use = APART[name]

    def forward(m, x):
        out = m.o(use(m, x).flatten(1))
        return out.square().sum(1).mean() if alone else Same.apply(out)

    size = T * D if name in ("lstm", "gru", "bilinear") else T * 3
    net = Model(forward, l=make(), c=nn.Linear(3, 3), o=nn.Linear(size, 2))
    check(net, (lambda m, x: m(x)) if alone else square, torch.randn(N, T, 3), **options)


def test_channels_that_samples_share_are_mixed_by_their_statistics():
    """As they are where samples are in the first dimension, and not in that of the channels."""
    over = lambda h: F.batch_norm(h, None, None, training=True)  # noqa: E731
    net = Model(lambda m, x: Same.apply(m.o(over(m.i(x)))), i=nn.Linear(3, D), o=nn.Linear(D, 2))
    assert exact_or_refused(net, square, torch.randn(N, T, 3)) is not None
