"""Modules with several outputs: each sample's place is proven in all that a loss uses."""

import pytest
import torch
from attach_oracle import (
    Model,
    a_few_modes,
    check,
    close_named,
    loop,
    refused,
    seeded,  # noqa: F401
    square,
)
from torch import nn

import torchgradx

N, T = 4, 5


def lstm_cells_of_another(m, x):
    y, (_, c) = m.r(x)
    return m.o(y[:, -1]) + m.p(c[0].roll(1, 0))


def states_as_rows(m, x):
    """[layers, N, H] taken for [N, layers * H], an error that is often made."""
    y, h = m.r(x)
    return m.o(y.sum(1)) + m.p(h.reshape(len(x), -1))


def second_of_another(m, x):
    a, b = m.t(x)
    return a + b.roll(1, 0)


def second_transposed(m, x):
    a, b = m.t(x)
    return a + b.transpose(0, 1)


class Two(nn.Module):
    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(torch.randn(3))

    def forward(self, x):
        return x * self.w, torch.tanh(x * self.w)


def weights_of_another(m, x):
    y, w = m.a(x, x, x)
    return y.sum(1) + w.roll(1, 0).square().sum((1, 2))[:, None]


MIXED = {
    "cells of an LSTM": (
        lambda: Model(lstm_cells_of_another, r=nn.LSTM(3, 5, batch_first=True),
                      o=nn.Linear(5, 2), p=nn.Linear(5, 2)), (N, T, 3), "r.weight_ih_l0"),
    "states of layers": (
        lambda: Model(states_as_rows, r=nn.GRU(3, 4, 2, batch_first=True),
                      o=nn.Linear(4, 2), p=nn.Linear(8, 2)), (N, T, 3), "r.weight_hh_l1"),
    "a second output": (lambda: Model(second_of_another, t=Two()), (N, 3), "t.w"),
    "an output of another layout": (
        lambda: Model(second_transposed, t=Two()), (N, N, 3), "t.w"),
    "attention's weights": (
        lambda: Model(weights_of_another, a=nn.MultiheadAttention(4, 2, batch_first=True)),
        (N, T, 4), "a.in_proj_weight"),
}  # fmt: skip


@a_few_modes
@pytest.mark.parametrize("name", MIXED)
def test_samples_that_mix_by_one_of_several_outputs_are_refused(name, options):
    make, shape, parameter = MIXED[name]
    refused(make(), square, torch.randn(shape), names=[parameter], match="samples", **options)


def by_sequence(m, x):
    x = x.transpose(0, 1)
    y, w = m.a(x, x, x)
    return y.sum(0) + w.square().sum((1, 2))[:, None]


def cells_alone(m, x):
    return m.r(x)[1][1].transpose(0, 1)


def states_alone(m, x):
    return m.r(x)[1][0].transpose(0, 1)


EXACT = {
    "sequences of N with their weights": (
        lambda: Model(by_sequence, a=nn.MultiheadAttention(4, 2)), (N, N, 4)),
    "cells alone, of N units": (
        lambda: Model(cells_alone, r=nn.LSTM(3, N, batch_first=True)), (N, T, 3)),
    "states alone, both ways, of N units": (
        lambda: Model(states_alone, r=nn.LSTM(3, N, 2, batch_first=True, bidirectional=True)),
        (N, N, 3)),
    "one output": (lambda: Model(lambda m, x: m.t(x)[1], t=Two()), (N, N, 3)),
    "both": (lambda: Model(lambda m, x: m.t(x)[0] + m.t(x)[1], t=Two()), (N, N, 3)),
}  # fmt: skip


@a_few_modes
@pytest.mark.parametrize("name", EXACT)
def test_outputs_with_the_samples_where_they_should_be_are_exact(name, options):
    make, shape = EXACT[name]
    check(make(), square, torch.randn(shape), **options)


@a_few_modes
@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU])
def test_a_recurrent_module_of_which_one_weight_is_frozen_later_is_exact(kind, options):
    """Of as many units as samples, where sizes tell nothing: its other weight is proven too."""
    net = Model(lambda m, x: m.r(x)[0][:, -1], r=kind(3, N, bias=False, batch_first=True)).double()
    with torchgradx.attach(net, **options) as probe:
        for step in range(3):
            net.r.weight_ih_l0.requires_grad_(step == 0)
            x = torch.randn(N, T, 3, dtype=torch.float64)
            square(net, x).backward()
            close_named(probe.norms(per="parameter"), loop(net, square, x))
