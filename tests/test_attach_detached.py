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
    square,
)
from torch import nn

import torchgradx

N, T = 6, 4


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
