"""Activations that meet others of which no gradient is, as a frozen part's: those of their own
sample, or of others, as keys of a contrastive loss."""

import copy

import pytest
import torch
import torch.nn.functional as F
from attach_oracle import (
    Model,
    a_few_modes,
    check,
    close_named,
    refused,
    seeded,  # noqa: F401
    square,
)
from torch import nn

import torchgradx

N, T = 6, 4


MEETINGS = {  # of activations h [N, 2] with others' d, of which no gradient is
    "the first": lambda h, d: h - d[:1],
    "likeness": lambda h, d: torch.cat([h, h @ d.T], 1)[:, :3],
    "contrast": lambda h, d: F.nll_loss(
        (h @ d.T).log_softmax(1), torch.arange(len(h)), reduction="none")[:, None],
    "memory": lambda h, d: (h @ d.T).softmax(1) @ d,
    "attention": lambda h, d: F.scaled_dot_product_attention(h[None], d[None], d[None])[0],
    "distances": lambda h, d: torch.cdist(h, d)[:, :1],
    "differences": lambda h, d: (h[:, None] - d).square().mean(1),
    "einsum": lambda h, d: torch.einsum("ni,mi->nm", h, d)[:, :1],
}  # fmt: skip


@a_few_modes
@pytest.mark.parametrize("alone", [False, True], ids=["", "a loss alone"])
@pytest.mark.parametrize("frozen", [False, True], ids=["", "of a frozen part"])
@pytest.mark.parametrize("way", MEETINGS)
def test_detached_samples_that_meet_others_are_refused(way, frozen, alone, options):
    def forward(m, x):
        h = torch.tanh(m.r(x))
        out = MEETINGS[way](h, m.frozen(x) if frozen else h.detach())
        return out.square().sum(1).mean() if alone else out

    model = Model(forward, r=nn.Linear(3, 2), frozen=nn.Linear(3, 2).requires_grad_(False))
    loss = (lambda m, x: m(x)) if alone else square
    refused(model, loss, torch.randn(N, 3), names=["r.weight"], match="mixes|no proof", **options)


LATER = {  # of activations h, taken with their gradient and detached afterwards
    "less the mean": lambda h: h - h.mean(0).detach(),
    "over the deviation": lambda h: h / h.std(0).detach(),
    "over the norm": lambda h: h / h.norm().detach(),
    "by a penalty's size": lambda h: h * h.square().mean().detach(),
    "likeness": lambda h: h + (h @ h.T).detach()[:, :1],
    "a softmax": lambda h: h * h.softmax(0).detach(),
    "summed up": lambda h: h + h.cumsum(0).detach(),
    "turned over": lambda h: h + h.flip(0).detach(),
    "batch statistics": lambda h: h + F.batch_norm(h, None, None, training=True).detach(),
    "its data": lambda h: h - h.mean(0).data,
    "above the mean": lambda h: h * (h > h.mean(0)),
    "the largest": lambda h: torch.where(h == h.max(0).values, h, h / 2),
    "clamped": lambda h: h.clamp(max=h.quantile(0.5, 0).detach()),
}


@a_few_modes
@pytest.mark.parametrize("way", LATER)
def test_statistics_that_are_detached_are_refused(way, options):
    model = Model(lambda m, x: m.o(LATER[way](torch.tanh(m.r(x)))), r=nn.Linear(3, 2),
                  o=nn.Linear(2, 2))  # fmt: skip
    refused(model, square, torch.randn(N, 3), names=["r.weight"], match="mixes", **options)


def watched(m, x):
    h = torch.tanh(m.r(x))
    m.seen = {"mean": h.mean(0).detach(), "likeness": (h @ h.T).detach(), "largest": float(h.max())}
    return m.o(h - h.max(-1, keepdim=True).values.detach())


def straight_through(m, x):
    h = m.r(x)
    return m.o(h + (h.round() - h).detach())


@a_few_modes
@pytest.mark.parametrize("forward", [watched, straight_through])
def test_what_is_detached_of_each_or_only_looked_at_is_exact(forward, options):
    model = Model(forward, r=nn.Linear(3, 2), o=nn.Linear(2, 2), seen=None)
    check(model, square, torch.randn(N, 3), **options)


TARGETS = {  # h and d [N, T, 2], each with its own
    "a loss": lambda h, d: F.mse_loss(h, d, reduction="none"),
    "likeness": lambda h, d: F.cosine_similarity(h, d, dim=-1),
    "attention": lambda h, d: F.scaled_dot_product_attention(h, d, d),
    "distances": lambda h, d: torch.cdist(h, d),
    "likeness of tokens": lambda h, d: torch.einsum("nti,nsi->nts", h, d).softmax(-1),
    "gates": lambda h, d: h * d.sigmoid() + d,
    "together": lambda h, d: torch.tanh(torch.cat([h, d], 1)),
}


@a_few_modes
@pytest.mark.parametrize("size", [T, N])
@pytest.mark.parametrize("way", TARGETS)
def test_detached_samples_that_meet_their_own_are_exact(way, size, options):
    def forward(m, x):
        return TARGETS[way](torch.tanh(m.r(x)), m.frozen(x).sin())

    model = Model(forward, r=nn.Linear(3, 2), frozen=nn.Linear(3, 2).requires_grad_(False))
    check(model, square, torch.randn(N, size, 3), **options)


def by_rows(m, h):
    m.queue[: len(h)] = h.detach()
    return h @ m.queue.t()


def by_columns(m, h):
    m.queue.t()[:, 2 : 2 + len(h)] = h.detach().t()
    return torch.cat([h, h @ m.queue.t()], 1)


def copied(m, h):
    m.queue.narrow(0, 0, len(h)).copy_(h.detach())
    return torch.cdist(h, m.queue.clone())


def averaged(m, h):
    with torch.no_grad():
        m.queue[1 : 1 + len(h)] = h
    return h - m.queue.mean(0)


@a_few_modes
@pytest.mark.parametrize("way", [by_rows, by_columns, copied, averaged])
def test_a_queue_that_is_read_after_it_was_given_this_batch_is_refused(way, options):
    model = Model(lambda m, x: way(m, torch.tanh(m.r(x))), r=nn.Linear(3, 2))
    model.register_buffer("queue", torch.randn(9, 2))
    refused(model, square, torch.randn(N, 3), names=["r.weight"], match="mixes", **options)


def read_first(m, h):
    out = h @ m.queue.clone().t()
    m.queue[: len(h)] = h.detach()
    return out


def own_rows(m, h):
    m.queue[: len(h)] = h.detach()
    return h * m.queue[: len(h)] + h


def cached(m, h):
    """As of keys, step by step."""
    m.cache[: len(h), :1] = h[:, None].detach()
    return (h[:, None] * m.cache[: len(h), :2]).sum(1)


def with_a_row_of_padding(m, h):
    padded = torch.zeros(len(h) + 1, 2).to(h)
    padded[1:] = h.detach()
    other = h.new_zeros(len(h) + 1, 2)
    other[1:] = h.detach().sin()
    return h * (padded * 2 + other).exp()[1:]


@a_few_modes
@pytest.mark.parametrize("way", [read_first, own_rows, cached, with_a_row_of_padding])
def test_a_queue_of_others_and_rows_of_its_own_are_exact(way, options):
    model = Model(lambda m, x: way(m, torch.tanh(m.r(x))), r=nn.Linear(3, 2)).double()
    model.register_buffer("queue", torch.randn(9, 2).double())
    model.register_buffer("cache", torch.zeros(9, 3, 2).double())
    x, twin = torch.randn(N, 3).double(), copy.deepcopy(model)
    want = []
    for k in range(N):
        one = copy.deepcopy(twin)
        square(one, x[k : k + 1]).backward()
        want.append([p.grad.norm() for p in one.parameters()])
    with torchgradx.attach(model, **options) as probe:
        square(model, x).backward()
        got = probe.norms(per="parameter")
    columns = map(torch.stack, zip(*want, strict=True))
    close_named(got, dict(zip(got, columns, strict=True)))
