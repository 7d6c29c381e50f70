"""Modules with several outputs, of which the samples are in different dimensions, or turned inside:
each is exact, or refused, whatever came before and wherever nothing can be proven."""

import contextlib

import pytest
import torch
from attach_oracle import (
    Model,
    Same,
    a_few_modes,
    close_named,
    loop,
    refused,
    seeded,  # noqa: F401
    square,
)
from torch import nn
from torch.utils.checkpoint import checkpoint

import torchgradx

N, T = 4, 5


class Elsewhere(nn.Module):
    """Two outputs with their samples in different places, of x [N, T, D]."""

    def __init__(self, places):
        super().__init__()
        self.places = places
        self.v, self.w = (nn.Parameter(torch.randn(5)) for _ in range(2))

    def forward(self, x):
        return ELSEWHERE[self.places](x * self.w, torch.tanh(x * self.v))


# at_home() undoes each, by its name.
ELSEWHERE = {
    "[T, N, D] and [N, 1, T, D]": lambda a, b: (a.transpose(0, 1), b[:, None]),
    "[N, 1, T, D] and [T, N, D]": lambda a, b: (b[:, None], a.transpose(0, 1)),
    "[T, N, D] and [N, T, D]": lambda a, b: (a.transpose(0, 1), b),
    "[N, T, D] and [T, N, D]": lambda a, b: (b, a.transpose(0, 1)),
    "rows t*N+n and [T, N, D]": lambda a, b: (a.transpose(0, 1).flatten(0, 1), b.transpose(0, 1)),
    "rows t*N+n and [N, T, D]": lambda a, b: (a.transpose(0, 1).flatten(0, 1), b),
    "[T, N, D] and rows n*T+t": lambda a, b: (a.transpose(0, 1), b.flatten(0, 1)),
    "[N, T, D] and rows t*N+n": lambda a, b: (b, a.transpose(0, 1).flatten(0, 1)),
}


def at_home(name, output, n):
    """[N, T, D] of an output, by what its part of the name says."""
    if output.dim() == 2:
        rows = (n, -1) if name.endswith("n*T+t") else (-1, n)
        output = output.unflatten(0, rows)
        return output if name.endswith("n*T+t") else output.transpose(0, 1)
    if output.dim() == 4:
        return output[:, 0]
    return output.transpose(0, 1) if name == "[T, N, D]" else output


WHERE = {
    "plain": lambda use, x: use(x),
    "a checkpoint": lambda use, x: checkpoint(use, x, use_reentrant=False),
    "a reentrant checkpoint": lambda use, x: checkpoint(use, x, use_reentrant=True),
    "below a Function of the user's": lambda use, x: tuple(map(Same.apply, use(x))),
}


TURNED = {
    "rows t*N+n": lambda y: y.transpose(0, 1).flatten(0, 1),
    "heads first, then samples": lambda y: y.unflatten(2, (5, 1)).permute(2, 0, 1, 3).flatten(0, 1),
    "[T, N, D]": lambda y: y.transpose(0, 1),
}
BACK = {
    "rows t*N+n": lambda y, n: y.unflatten(0, (-1, n)).transpose(0, 1),
    "heads first, then samples": lambda y, n: y.unflatten(0, (5, n)).permute(1, 2, 0, 3).flatten(2),
    "[T, N, D]": lambda y, n: y.transpose(0, 1),
}


@a_few_modes
@pytest.mark.parametrize("where", WHERE)
@pytest.mark.parametrize("turn", TURNED)
def test_a_part_that_turns_its_samples_inside_is_exact_or_refused(turn, where, options):
    part = Model(lambda m, x: TURNED[turn](torch.tanh(x * m.w)), w=torch.randn(5))
    model = Model(lambda m, x: BACK[turn](WHERE[where](lambda y: (m.t(y),), m.i(x))[0], len(x)),
                  i=nn.Linear(3, 5), t=part).double()  # fmt: skip
    with torchgradx.attach(model, check="samples", **options) as probe:
        for t in (6, 1, 8, N, 2):
            x = torch.randn(N, t, 3, dtype=torch.float64)
            square(model, x).backward()
            with contextlib.suppress(torchgradx.CoverageError):
                close_named(probe.norms(per="parameter"), loop(model, square, x))


@a_few_modes
def test_an_output_is_proven_as_soon_as_it_is_used(options):
    """By as many nodes as that which was used before."""

    def forward(m, x):
        a, b = m.t(m.i(x))
        if m.second:
            return b.unflatten(0, (-1, len(x))).transpose(0, 1) + 0
        return a.view(a.shape).transpose(0, 1).transpose(0, 1)

    part = Model(lambda m, x: (torch.tanh(x * m.v),
                               torch.tanh(x * m.w).transpose(0, 1).flatten(0, 1)),
                 v=torch.randn(5), w=torch.randn(5))  # fmt: skip
    model = Model(forward, i=nn.Linear(3, 5), t=part).double()
    with torchgradx.attach(model, **options) as probe:
        for model.second in (False, True, False, True):
            x = torch.randn(N, T, 3, dtype=torch.float64)
            square(model, x).backward()
            close_named(probe.norms(per="parameter"), loop(model, square, x))


def elsewhere(places, where="plain"):
    names = places.split(" and ")

    def outputs(m, x):
        each = zip(names, WHERE[where](m.t, m.i(x)), strict=True)
        return tuple(at_home(name, output, len(x)) for name, output in each)

    return Model(outputs, t=Elsewhere(places), i=nn.Linear(3, 5))


@a_few_modes
@pytest.mark.parametrize("first", ["samples", "positions"])
def test_a_layout_that_one_of_several_outputs_cannot_have_is_refused(first, options):
    def outputs(m, x):
        x = m.i(x)
        return m.t(x if first == "samples" else x.transpose(0, 1))

    def pair(m, x):
        a, b = (y if first == "positions" else y.transpose(0, 1) for y in (x * m.v, x * m.w))
        return a, torch.tanh(b)[:, None]  # [T, N, D] and [T, 1, N, D]

    part = Model(pair, v=torch.randn(5), w=torch.randn(5))
    loss = lambda m, x: sum(y.square().sum() / len(x) for y in m(x))  # noqa: E731
    refused(Model(outputs, t=part, i=nn.Linear(3, 5)), loss, torch.randn(N, 6, 3), names=["t.w"],
            match="the 4 samples of the pass", layout={"t": "sequence"}, **options)  # fmt: skip


@a_few_modes
@pytest.mark.parametrize("where", WHERE)
@pytest.mark.parametrize("places", ELSEWHERE)
def test_samples_in_different_places_of_several_outputs_are_exact_or_refused(
    places, where, options
):
    """In each step, whichever of the outputs the losses before used, of whatever sizes."""
    model = elsewhere(places, where).double()
    with torchgradx.attach(model, **options) as probe:
        for t, used in [(6, 3), (1, 3), (8, 3), (N, 2), (1, 2), (8, 1), (6, 2)]:

            def loss(model, x, used=used):
                each = [y for k, y in enumerate(model(x)) if used & (k + 1)]
                return sum(y.sin().square().flatten(1).sum(1).mean() for y in each)

            x = torch.randn(N, t, 3, dtype=torch.float64)
            loss(model, x).backward()
            with contextlib.suppress(torchgradx.CoverageError):
                close_named(probe.norms(per="parameter"), loop(model, loss, x))
