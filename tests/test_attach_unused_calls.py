"""Modules whose output goes nowhere, and whose weights a forward reads beside: the call counts
nothing, and keeps no other use from being seen."""

import pytest
import torch
import torch.nn.functional as F
from attach_oracle import (
    Model,
    check,
    close,
    exact_or_refused,
    fallback_mode,
    loop_model,
    seeded,  # noqa: F401
    square,
)
from torch import nn

import torchgradx

N, D = 5, 4


def table(m, x):
    m.e(torch.arange(D))
    return m.l(x) + m.e.weight


def functional(m, x):
    m.l(x)
    return F.linear(x, m.l.weight, m.l.bias)


def part(m, x):
    m.l(x)
    return m.o(torch.tanh(x @ m.l.weight[:, :2]))


WAYS = [table, functional, part]
ways = pytest.mark.parametrize("way", WAYS, ids=lambda way: way.__name__)


def model(way):
    return Model(way, e=nn.Embedding(D, D), l=nn.Linear(D, D), o=nn.Linear(2, 2))


@fallback_mode
@ways
@pytest.mark.parametrize("n", [N, D, 1])
def test_each_is_exact(n, way, options):
    check(model(way), square, torch.randn(n, D, D), **options)


@fallback_mode
@ways
def test_each_is_exact_in_later_steps(way, options):
    net = model(way).double()
    with torchgradx.attach(net, **options) as probe:
        for n in (N, N, D, 2, 1, N):
            x = torch.randn(n, D, D, dtype=torch.float64)
            square(net, x).backward()
            close(probe.norms(), loop_model(net, square, x))


@fallback_mode
@ways
def test_an_output_that_is_used_after_all_is_exact_or_refused(way, options):
    """By a way that no output of the model shows."""
    net = model(way)
    kept = []
    for layer in (net.l, net.e):
        layer.register_forward_hook(lambda module, args, out: kept.append(out))

    def loss(m, x):
        kept.clear()
        return square(m, x) + kept[0].square().sum() / len(x)

    exact_or_refused(net, loss, torch.randn(N, D, D), **options)


def test_what_no_module_was_called_for_is_said_to_be_so():
    net = Model(lambda m, x: F.linear(x, m.l.weight), l=nn.Linear(D, D))
    with torchgradx.attach(net) as probe:
        square(net, torch.randn(N, D)).backward()
        with pytest.raises(torchgradx.CoverageError, match="called of its modules"):
            probe.norms()
