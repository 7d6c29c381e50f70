"""Modules with several outputs: each sample's place is proven in all that a loss uses."""

import contextlib

import pytest
import torch
from attach_oracle import (
    Model,
    a_few_modes,
    check,
    close_named,
    loop,
    need_native,
    refused,
    square,
    title,
)
from clip_oracle import check_clip
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


class Chained(nn.Module):
    """Three outputs, each made from those before and from parameters; the second once more."""

    def __init__(self):
        super().__init__()
        self.v, self.w = (nn.Parameter(torch.randn(3)) for _ in range(2))

    def forward(self, x):
        a = x * self.w + self.v
        b = torch.tanh(a + self.v)
        return a, b, self.w * (a.sin() + 0.5 * b), b


CHAINED = {
    "the first": lambda a, b, c, d: a,
    "the last": lambda a, b, c, d: c,
    "the first two": lambda a, b, c, d: a.square() + b,
    "ends": lambda a, b, c, d: a * c,
    "all": lambda a, b, c, d: torch.cat([a, b, c, d], 1),
    "one twice": lambda a, b, c, d: b * d,
    "what is detached": lambda a, b, c, d: c * a.detach(),
}


def scored(m, x):
    a, b = m.s(x.transpose(0, 1))
    return a.transpose(0, 1) * b[..., None]


class Scores(nn.Module):
    """Sequences first; of each sample, a number for each of its positions: [N, T]."""

    def __init__(self):
        super().__init__()
        self.w, self.q = (nn.Parameter(torch.randn(3)) for _ in range(2))

    def forward(self, x):
        a = x * self.w
        return a, (a @ self.q).t().softmax(-1)


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
    "an output made from another": (
        lambda: Model(lambda m, x: m.t(x)[0].roll(1, 0) + m.t(x)[1], t=Chained()), (N, 3), "t.w"),
    "an output of another layout": (
        lambda: Model(second_transposed, t=Two()), (N, N, 3), "t.w"),
    "a second output of as many numbers, its samples first": (
        lambda: Model(scored, s=Scores()), (N, N, 3), "s.w"),
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


def own_recurrence(m, x):
    """(y [N, T, H], h [1, N, H])"""
    h, steps = x.new_zeros(len(x), 3), []
    for t in range(x.shape[1]):
        h = torch.tanh(x[:, t] * m.v + h * m.w)
        steps.append(h)
    return torch.stack(steps, 1), h[None]


def own_attention(m, x):
    """(y [T, N, D], weights [N, H, T, T]) of [T, N, D]"""
    heads = (x * m.w).unflatten(2, (3, 1)).permute(1, 2, 0, 3)
    weights = torch.softmax(m.v[:, None, None] * heads @ heads.transpose(2, 3), -1)
    return (weights @ heads).permute(2, 0, 1, 3).flatten(2), weights


def of_own(forward, use):
    part = Model(forward, v=torch.randn(3), w=torch.randn(3))
    return Model(lambda m, x: use(lambda y: m.t(y), m.i(x)), i=nn.Linear(3, 3), t=part)


EXACT = {
    "a recurrence of one's own, its state alone": (
        lambda: of_own(own_recurrence, lambda t, x: t(x)[1][0]), (N, T, 3)),
    "and both": (
        lambda: of_own(own_recurrence, lambda t, x: t(x)[0] + t(x)[1][0][:, None]), (N, T, 3)),
    "an attention of one's own, without its weights": (
        lambda: of_own(own_attention, lambda t, x: t(x.transpose(0, 1))[0].transpose(0, 1)),
        (N, T, 3)),
    "sequences of N with their weights": (
        lambda: Model(by_sequence, a=nn.MultiheadAttention(4, 2)), (N, N, 4)),
    "cells alone, of N units": (
        lambda: Model(cells_alone, r=nn.LSTM(3, N, batch_first=True)), (N, T, 3)),
    "states alone, both ways, of N units": (
        lambda: Model(states_alone, r=nn.LSTM(3, N, 2, batch_first=True, bidirectional=True)),
        (N, N, 3)),
    "a view that the root gives of a part's first": (
        lambda: Model(lambda m, x: m.r((x * m.w).transpose(0, 1))[0].transpose(0, 1),
                      r=nn.LSTM(3, 2), w=torch.randn(3)), (N, 1, 3)),
    "one output": (lambda: Model(lambda m, x: m.t(x)[1], t=Two()), (N, T, 3)),
    "both": (lambda: Model(lambda m, x: m.t(x)[0] + m.t(x)[1], t=Two()), (N, T, 3)),
}  # fmt: skip


@a_few_modes
@pytest.mark.parametrize("name", EXACT)
def test_outputs_with_the_samples_where_they_should_be_are_exact(name, options):
    make, shape = EXACT[name]
    check(make(), square, torch.randn(shape), **options)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@a_few_modes
@pytest.mark.parametrize("use", CHAINED)
def test_outputs_that_others_are_made_from_are_exact(use, dtype, options):
    """What arrives there came through those others too."""
    model = Model(lambda m, x: CHAINED[use](*m.t(m.i(x))), t=Chained(), i=nn.Linear(3, 3))
    check(model, square, torch.randn(N, 3), dtype=dtype, **options)


@a_few_modes
def test_an_output_that_is_of_other_modules_alone_beside_one_of_the_own_parameters(options):
    """Of as many values as samples, so that it runs again: by a replay, for a buffer's sake."""

    def pair(m, x):
        h = m.i(x)
        m.mean.mul_(0.9).add_(h.detach().mean(0))
        return h, m.v.expand(len(x), 2)

    def loss(model, x):
        return torch.cat(model(x), 1).square().sum(1).mean()

    model = Model(pair, i=nn.Linear(3, 2), v=torch.randn(2))
    model.register_buffer("mean", torch.zeros(2))
    check(model, loss, torch.randn(2, 3), **options)


class Features(nn.Module):
    """A classifier that returns its features as well, with parameters of its own; one is spare."""

    def __init__(self):
        super().__init__()
        self.token, self.scale = nn.Parameter(torch.randn(1, 1, 4)), nn.Parameter(torch.ones(()))
        self.spare = nn.Parameter(torch.ones(2))
        self.embed, self.head = nn.Linear(3, 4), nn.Linear(4, 2)
        self.block = nn.TransformerEncoderLayer(4, 2, 8, 0.0, batch_first=True)

    def forward(self, x):
        tokens = self.token.expand(len(x), -1, -1)
        features = self.block(torch.cat([tokens, self.embed(x)], 1))[:, 0]
        return self.scale * self.head(features), features


@a_few_modes
@pytest.mark.parametrize("which", [(1, 0), (0, 1), (1, 1)], ids=["logits", "features", "both"])
def test_logits_and_the_features_they_are_made_from(which, options):
    """What the loss leaves out, and the parameters that serve it alone, get no gradient."""

    def loss(model, x):
        outputs = [y for y, used in zip(model(x), which, strict=True) if used]
        return sum(y.exp().mean() for y in outputs)

    check(Features(), loss, torch.randn(N, T, 3), **options)


@pytest.mark.parametrize("options", [{}, {"fused": False}], ids=title)
@pytest.mark.parametrize("use", CHAINED)
def test_outputs_that_others_are_made_from_are_clipped(use, options):
    model = Model(lambda m, x: CHAINED[use](*m.t(m.i(x))), t=Chained(), i=nn.Linear(3, 3))
    check_clip(model, square, torch.randn(N, 3), **options)


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


class ActorAndCritic(nn.Module):
    def __init__(self, *sizes):
        super().__init__()
        self.actor, self.critic = (nn.Parameter(torch.randn(size)) for size in sizes)

    def forward(self, x):
        return x @ self.actor, torch.tanh(x @ self.critic)


@a_few_modes
@pytest.mark.parametrize("retained", [False, True])
@pytest.mark.parametrize("offloaded", [False, True])
def test_outputs_that_come_back_in_backwards_of_their_own(retained, offloaded, options):
    need_native(options)
    model = nn.Sequential(nn.Linear(3, 3), ActorAndCritic((3, 2), (3, 1))).double()
    model[0].requires_grad_(False)  # nothing that both have is let go
    x, hooks = torch.randn(N, 3).double(), torch.autograd.graph.save_on_cpu()
    want = loop(model, lambda m, x: sum(t.square().sum() for t in m(x)), x)
    want = {name: norms for name, norms in want.items() if name[0] == "1"}
    with torchgradx.attach(model, **options) as probe:
        with hooks if offloaded else contextlib.nullcontext():
            first, second = (t.square().sum() / N for t in model(x))
        first.backward(retain_graph=retained)
        second.backward()
        if retained:
            close_named(probe.norms(per="parameter"), want)
        else:
            with pytest.raises(torchgradx.CoverageError, match="retain_graph=True"):
                probe.norms()
