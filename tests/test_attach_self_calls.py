"""A root that calls itself: what the outermost call gives back holds the samples."""

import pytest
import torch
from attach_oracle import (
    Model,
    a_few_modes,
    close,
    exact_or_refused,
    loop_model,
    square,
)
from torch import nn
from torch.utils.checkpoint import checkpoint

import torchgradx

N, T, D = 4, 5, 3


def flat(m, x):
    """Rows of all positions, and a mean of each sample's."""
    if x.dim() == 3:
        rows = m(x.flatten(0, 1)).unflatten(0, x.shape[:2])
        return m.o(rows.mean(1))
    return torch.tanh(m.l(x))


def turned(m, x):
    if x.dim() == 3:
        return m(x.transpose(0, 1).flatten(0, 1)).unflatten(0, (-1, len(x))).sum(0)
    return torch.tanh(m.l(x))


def chunks(m, x):
    """As a model that takes large images apart."""
    if x.dim() == 3 and x.shape[1] > 1:
        return sum(m(x[:, k : k + 1]) for k in range(x.shape[1])) + m.o(x.mean(1))[:, None]
    return torch.tanh(m.l(x))


def deep(m, x, depth=2):
    return m.o(m(torch.tanh(m.l(x)), depth - 1)) if depth else m.l(x)


def failing(m, x, inner=False):
    """One call fails, of which nothing is used, and another follows."""
    if inner:
        m.l(x)
        raise KeyError
    h = m.o(x)
    with pytest.raises(KeyError):
        m(x, True)
    return m.l(h)


def checkpointed(m, x):
    if x.dim() == 3:
        return m.o(checkpoint(m, x.flatten(0, 1), use_reentrant=False)).unflatten(0, x.shape[:2])
    return torch.tanh(m.l(x))


WAYS = [flat, turned, chunks, deep, failing, checkpointed]
ways = pytest.mark.parametrize("way", WAYS, ids=lambda way: way.__name__)


@a_few_modes
@ways
def test_each_is_exact_in_steps_of_several_sizes(way, options):
    """Those too that are called on what they call themselves on."""
    net = Model(way, l=nn.Linear(D, D), o=nn.Linear(D, D)).double()
    with torchgradx.attach(net, **options) as probe:
        for shape in [(N, T, D), (N, T, D), (N * T, D), (N, T, D), (N, N, D), (2, T, D), (N, D)]:
            x = torch.randn(shape, dtype=torch.float64)
            square(net, x).backward()
            close(probe.norms(), loop_model(net, square, x))


@a_few_modes
def test_samples_that_are_mixed_between_calls_are_refused(options):
    def forward(m, x):
        if x.dim() == 3:
            return m(x.flatten(0, 1).sub(x.mean((0, 1)))).unflatten(0, x.shape[:2])
        return m.o(torch.softmax(m.l(x), 0))

    net = Model(forward, l=nn.Linear(D, D), o=nn.Linear(D, D))
    assert exact_or_refused(net, square, torch.randn(N, T, D), **options)
