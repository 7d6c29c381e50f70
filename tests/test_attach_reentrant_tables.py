"""Tables and parameters of the root beside reentrant checkpoints, where no backward can be asked.

The samples are followed through the forward to where they meet what all of them share: seen to stay
in a first dimension that is like no other, they need no proof. All else is refused, never guessed.
"""

import pytest
import torch
from attach_oracle import (
    Model,
    close_named,
    exact_or_refused,
    loop,
    refused,
    square,
    title,
)
from torch import nn
from torch.utils.checkpoint import checkpoint

import torchgradx

T, D, V = 5, 6, 9
modes = pytest.mark.parametrize(
    "options", [{}, {"fused": False}, {"weight_grad": False}], ids=title
)


def text(m, ids):
    h = m.words(ids) + m.places(torch.arange(T)) * m.gain
    h = checkpoint(m.block, h, use_reentrant=True)
    return m.out(h.flatten(1) + m.bias)


def reader():
    return Model(text, words=nn.Embedding(V, D), places=nn.Embedding(T, D), gain=torch.randn(D),
                 block=nn.Sequential(nn.Linear(D, D), nn.Tanh(), nn.LayerNorm(D)),
                 out=nn.Linear(T * D, 2), bias=torch.randn(T * D)).double()  # fmt: skip


@modes
def test_tables_before_and_after_are_exact_for_every_size(options):
    net = reader()
    with torchgradx.attach(net, **options) as probe:
        for n in (4, 3, 7, 1, 4):
            ids = torch.randint(0, V, (n, T))
            want = loop(net, square, ids)
            square(net, ids).backward()
            close_named(probe.norms(per="parameter"), want)


@modes
@pytest.mark.parametrize("n", [T, D])
def test_as_many_samples_as_another_dimension_has_are_refused(n, options):
    exact_or_refused(reader(), square, torch.randint(0, V, (n, T)), **options)


def patches(m, x):
    """A class token beside what is joined with it, as in a vision transformer."""
    token = m.token.expand(len(x), 1, D)
    h = checkpoint(m.block, torch.cat([token, m.into(x)], 1) + m.places, use_reentrant=True)
    return m.out(h[:, 0] * m.gain)


@modes
def test_parameters_of_a_module_that_cannot_run_again_are_exact(options):
    net = Model(patches, token=torch.randn(1, 1, D), places=torch.randn(1, T + 1, D),
                gain=torch.randn(D), into=nn.Linear(3, D), out=nn.Linear(D, 2),
                block=nn.Sequential(nn.Linear(D, D), nn.Tanh())).double()  # fmt: skip
    with torchgradx.attach(net, **options) as probe:
        for n in (4, 3):
            x = torch.randn(n, T, 3, dtype=torch.float64)
            want = loop(net, square, x)
            square(net, x).backward()
            close_named(probe.norms(per="parameter"), want)


C, L = 4, 5


def images(shared):
    def forward(m, x):
        h = checkpoint(m.c, m.i(x), use_reentrant=True)
        return checkpoint(m.o, torch.tanh(shared(m, h)), use_reentrant=True)

    return Model(forward, i=nn.Conv1d(3, C, 1), c=nn.Conv1d(C, C, 1), o=nn.Conv1d(C, 2, 1),
                 p=torch.randn(C, L), t=nn.Embedding(L, C), l=nn.Linear(C, C))  # fmt: skip


def flattened(m, h):
    """Rows of channels: their number is that of the samples."""
    rows = h.permute(1, 0, 2).reshape(C, -1) + m.p[:, :1]
    return rows.view(C, -1, L).permute(1, 0, 2)


WAYS = {
    "a table of as many rows, made of two": lambda m, h: (
        h + m.l(torch.tanh(m.t(torch.arange(L)))).T * m.p
    ),
    "rows of channels": flattened,
    "samples in the last dimension": lambda m, h: (h.permute(1, 2, 0) + m.p[..., None]).permute(
        2, 0, 1
    ),
    "samples turned round": lambda m, h: h.flip(0) + m.p,
    "read inside as well": lambda m, h: checkpoint(lambda u: u * m.p, h, use_reentrant=True) + m.p,
}


@modes
@pytest.mark.parametrize("way", WAYS)
def test_nothing_is_guessed_where_channels_are_as_many_as_samples(way, options):
    x = torch.randn(C, 3, L)
    refused(images(WAYS[way]), square, x, names=(), check="samples", **options)
