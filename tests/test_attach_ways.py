"""Where no proof can be had, what one forward showed is believed of those that go the same way."""

import pytest
import torch
from attach_oracle import (
    UNPROVEN,
    Model,
    a_few_modes,
    close_named,
    loop,
    seeded,  # noqa: F401
    square,
    unproven,
)
from torch import nn

import torchgradx

N = 4


class MixesLongOnes(nn.Module):
    """By the length of what it is given, on one path or another."""

    def __init__(self, where):
        super().__init__()
        self.i, self.b, self.where = nn.Linear(3, 3), nn.Linear(3, 2), where

    def forward(self, x):
        hidden = self.i(x)
        if x.shape[1] > 6:
            hidden = hidden + hidden.roll(1, 0)
        return UNPROVEN[self.where](lambda t: self.b(torch.tanh(t)), hidden)


@a_few_modes
@unproven
def test_a_path_that_mixes_condemns_no_other_and_no_other_absolves_it(where, options):
    net = MixesLongOnes(where).double()
    with torchgradx.attach(net, **options) as probe:
        # What a pass of inf shows is not kept: the path is met again, after another was orderly.
        for positions, scale in ((5, 1), (7, float("inf")), (3, 1), (7, 1), (5, 1), (7, 1)):
            x = torch.randn(N, positions, 3, dtype=torch.float64)
            want = loop(net, square, x)
            net.zero_grad()
            (scale * square(net, x)).backward()
            if positions == 7:
                with pytest.raises(torchgradx.CoverageError):
                    probe.norms()
                probe.reset()
            else:
                close_named(probe.norms(per="parameter"), want)


@unproven
def test_rows_that_are_once_as_many_as_samples_are_not_theirs(where):
    """A table of the distinct ids, in their order."""

    def forward(m, ids, x):
        distinct, back = ids.unique(return_inverse=True)
        return UNPROVEN[where](lambda t: m.b(t[back] + x), torch.tanh(m.a(m.e(distinct))))

    net = Model(forward, e=nn.Embedding(30, 3), a=nn.Linear(3, 3), b=nn.Linear(3, 2)).double()
    x = torch.randn(N, 3, dtype=torch.float64)
    with torchgradx.attach(net) as probe:
        for ids in ([3, 3, 1, 2], [9, 3, 1, 2], [9, 3, 1, 2]):
            square(lambda x, ids=ids: net(torch.tensor(ids), x), x).backward()
            with pytest.raises(torchgradx.CoverageError):
                probe.norms()
            probe.reset()


@unproven
def test_a_path_of_other_nodes_is_watched_as_soon_as_it_is_met(where):
    """Its first forward is taken for those of the same sizes; from the second on it is known."""

    def forward(m, x):
        hidden = m.i(x)
        hidden = hidden + hidden.roll(1, 0) if m.mixes else hidden
        return UNPROVEN[where](lambda t: m.b(torch.tanh(t)), hidden)

    net = Model(forward, i=nn.Linear(3, 3), b=nn.Linear(3, 2)).double()
    x = torch.randn(N, 5, 3, dtype=torch.float64)
    with torchgradx.attach(net) as probe:
        for k, net.mixes in enumerate((False, True, True, False, True, False)):
            net.zero_grad()
            want = loop(net, square, x)
            net.zero_grad()
            square(net, x).backward()
            if net.mixes and k > 1:
                with pytest.raises(torchgradx.CoverageError):
                    probe.norms()
                probe.reset()
            elif not net.mixes:
                close_named(probe.norms(per="parameter"), want)
            else:
                probe.reset()


class TurnsItsOutput(nn.Module):
    """Samples first or positions first, as the batch says; by another node of the graph."""

    def __init__(self):
        super().__init__()
        self.b, self.c = nn.Linear(3, 5), nn.Linear(5, 2)

    def forward(self, x, first):
        hidden = self.c(torch.tanh(self.b(x)))
        return hidden if first == "samples" else hidden.transpose(0, 1) * 1


@a_few_modes
@pytest.mark.parametrize("alternating", [False, True], ids=["in turns", "then the other"])
def test_a_way_may_have_its_samples_elsewhere_in_the_output(alternating, options):
    """Where sizes leave a doubt, as here, the other way is refused until it was watched."""

    def by_rows(net, x, first):
        out = net(x, first)
        rows = out if first == "samples" else out.transpose(0, 1)
        return rows.square().flatten(1).sum(1).mean()

    net = TurnsItsOutput().double()
    steps = 3 * ["samples", "positions"] if alternating else ["samples"] + 5 * ["positions"]
    exact, refused = [], {}
    with torchgradx.attach(net, **options) as probe:
        for first in steps:
            x = torch.randn(N, N, 3, dtype=torch.float64)
            want = loop(net, lambda net, x, first=first: by_rows(net, x, first), x)
            net.zero_grad()
            by_rows(net, x, first).backward()
            try:
                close_named(probe.norms(per="parameter"), want)
                exact.append(first)
            except torchgradx.CoverageError as error:
                probe.reset()
                refused[first] = str(error)
    assert refused.keys() == {"positions"}
    assert "in two dimensions" in refused["positions"]
    assert exact[-2:] == steps[-2:]
