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


def test_a_rare_path_that_mixes_is_taken_for_another_once():
    def forward(m, x):
        hidden = m.i(x)
        return hidden + hidden.flip(0) if m.rare else hidden

    net = rarely(forward)
    with torchgradx.attach(net) as probe:
        for k in range(16):
            net.rare, x = k % 4 == 3, torch.randn(N, 3, dtype=torch.float64)
            if k == 3:
                square(net, x).backward()  # docs/limits.md
                probe.reset()
            else:
                assert seen(net, probe, square, x) == (not net.rare)


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


@a_few_modes
def test_groups_of_samples_whose_size_follows_from_their_number(options):
    """Of one sample where there are seven."""

    def forward(m, x):
        h = m.i(x)
        size = next(k for k in (4, 3, 2, 1) if len(x) % k == 0)
        groups = h.view(size, len(x) // size, -1)
        return m.b(h + torch.tanh(groups - groups.mean(0)).flatten(0, 1))

    net = Model(forward, i=nn.Linear(3, 3), b=nn.Linear(3, 2)).double()
    with torchgradx.attach(net, **options) as probe:
        for n in (7, 8, 7, 8):
            assert seen(net, probe, square, torch.randn(n, 3, dtype=torch.float64)) == (n == 7)
