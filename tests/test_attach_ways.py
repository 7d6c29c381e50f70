"""Where no proof can be had, what one forward showed is believed of those that go the same way."""

import torch
from attach_oracle import (
    UNPROVEN,
    Model,
    a_few_modes,
    close_named,
    loop,
    square,
)
from torch import nn

import torchgradx

N = 4


def seen(net, probe, loss, *batch):
    """Whether it was answered; and if so, exactly."""
    want = loop(net, loss, *batch)
    net.zero_grad()
    loss(net, *batch).backward()
    try:
        close_named(probe.norms(per="parameter"), want)
    except torchgradx.CoverageError:
        probe.reset()
        return False
    return True


def rarely(forward):
    """A model whose every fourth step goes another way."""

    def step(m, x):
        return UNPROVEN["a Function of the user's"](lambda h: m.b(torch.tanh(h)), forward(m, x))

    return Model(step, i=nn.Linear(3, 3), a=nn.Linear(3, 3), b=nn.Linear(3, 2)).double()


def test_a_rare_path_of_other_layers_is_exact_once_it_was_watched():
    net = rarely(lambda m, x: m.i(x) if m.rare else m.i(x) + torch.tanh(m.a(x)))
    with torchgradx.attach(net) as probe:
        found = []
        for k in range(16):
            net.rare, x = k % 4 == 3, torch.randn(N, 3, dtype=torch.float64)
            found.append(seen(net, probe, square, x))
    assert all(found[4:])


@a_few_modes
def test_an_output_that_was_left_out_is_proven_when_it_is_there(options):
    """It is computed each time."""

    def forward(m, x):
        h = torch.tanh(m.i(x))
        apart, out = h - h.mean(0), m.b(h)
        return (out, apart) if m.both else (out,)

    def loss(m, x):
        return sum(t.square().sum() for t in m(x)) / len(x)

    net = Model(forward, i=nn.Linear(3, 3), b=nn.Linear(3, 2)).double()
    with torchgradx.attach(net, **options) as probe:
        for net.both in (False, False, True, True, False):
            x = torch.randn(N, 3, dtype=torch.float64)
            assert seen(net, probe, loss, x) == (not net.both)
