"""Data of which samples are mixed before the layers, as by statistics of the batch: alone, each has
others. No gradient shows it."""

import copy

import pytest
import torch
import torch.nn.functional as F
from attach_oracle import (
    Model,
    a_few_modes,
    check,
    close_named,
    loop,
    square,
)
from torch import nn

import torchgradx

N, T = 6, 4


@a_few_modes
def test_a_frozen_batch_norm_is_refused_until_eval(options):
    frozen = nn.Sequential(nn.Conv1d(T, 3, 1), nn.BatchNorm1d(3), nn.ReLU()).requires_grad_(False)
    model = nn.Sequential(frozen, nn.Flatten(), nn.Linear(15, 2))
    x = torch.randn(N, T, 5)
    with torchgradx.attach(model, **options) as probe:
        square(model, x).backward()
        with pytest.raises(torchgradx.CoverageError, match=r"eval\(\)") as error:
            probe.norms()
    assert error.value.parameters == ("2.weight", "2.bias")
    check(model.eval(), square, x, **options)


def a_count(m, x):
    """A mean over tokens, as of a loss inside of the model."""
    mask = (x[:, :, :1] > -9).to(x)
    return m.l(x) * mask / (mask.sum() / len(x))


RUNNING = {
    "frozen": lambda: nn.BatchNorm1d(T).requires_grad_(False),
    "no weights": lambda: nn.InstanceNorm1d(T, track_running_stats=True),
}


@pytest.mark.parametrize("name", RUNNING)
def test_running_statistics_are_as_they_would_be(name):
    """No schema says that an operation writes into them."""
    model = nn.Sequential(RUNNING[name](), nn.Linear(3, 2))
    twin, x = copy.deepcopy(model), torch.randn(N, T, 3)
    with torchgradx.attach(model):
        for m in (model, twin):
            square(m, x).backward()
    assert torch.equal(model[0].running_mean, twin[0].running_mean)
    assert torch.equal(model[0].running_var, twin[0].running_var)


def logged(m, x):
    m.scale.update(largest=x.abs().max(), mean=x.mean(0), std=x.flatten(1).std(0))
    return m.l(x)


def balanced(m, x):
    """Experts, of which the load is counted."""
    gates = m.g(x).softmax(-1)
    chosen = F.one_hot(gates.argmax(-1), 2).to(x)
    m.scale["balance"] = float((chosen.mean(0) * gates.mean(0)).sum())
    return m.l(x) * gates


def of_valid_tokens(m, x):
    mask = x[:, :, 0] > 0
    y = torch.zeros_like(x)
    y[mask] = x[mask] - x[mask].mean(1, keepdim=True)
    return m.l(y)


def longest(m, x):
    lengths = (x[:, :, 0] > 0).sum(1).clamp(min=T)
    return m.l(x * (torch.arange(T) < lengths.max())[:, None])


def neighbours(m, x):
    """As graph networks of points: rows of flattened samples, which values choose."""
    nearest = torch.cdist(x, x).topk(2, largest=False).indices
    rows = (nearest + torch.arange(len(x))[:, None, None] * T).flatten()
    return m.l(x.flatten(0, 1)[rows].view(len(x), T, 2, 3).amax(2) - x)


def both_views(m, x):
    first, second = torch.cat([x, x.flip(1)]).tanh().chunk(2)
    return m.l(first) * m.l(second)


def statistics_of_each(m, x):
    x = (x - x.mean((1, 2), keepdim=True)) / x.std((1, 2), keepdim=True)
    return m.l(F.instance_norm(x.mT).mT.cumsum(1))


def in_parts(m, x):
    x, half = x.clone(), (len(x) + 1) // 2
    x[:half] *= 3
    rest = torch.arange(half, len(x))
    x[rest] = x[rest].mul(3)
    x[::2], x[1::2] = x[::2] - 1, x[1::2] - 1
    return m.l(torch.cat([x[:0], x[:half].tanh(), x[half:].tanh()]))


def margins(m, x):
    """For samples that have a label, as it happens all."""
    labelled = (x[:, 0, 0] > -99).nonzero()[:, 0]
    x = x.clone()
    x[labelled] -= 0.5
    return m.l(x.index_copy(0, labelled, x[labelled].tanh()))


def unknown_to_us(m, x):
    """Operations that are not followed by name."""
    x = torch.linalg.solve(x[:, :3, :3] + 4 * torch.eye(3).to(x), x.mT).mT
    x = torch.fft.irfft(torch.fft.rfft(x, dim=1), T, dim=1).unfold(1, 2, 1).flatten(2)
    return m.k(F.pad(x, (0, 0, 1, 1)).renorm(2, 0, 3.0))


APART = {
    "a count": a_count,
    "logged": logged,
    "balanced": balanced,
    "of valid tokens": of_valid_tokens,
    "the longest": longest,
    "neighbours": neighbours,
    "both views": both_views,
    "statistics of each": statistics_of_each,
    "in parts": in_parts,
    "margins": margins,
    "unknown to us": unknown_to_us,
}


@a_few_modes
@pytest.mark.parametrize("name", APART)
def test_what_leaves_samples_apart_is_exact(name, options):
    parts = {"l": nn.Linear(3, 2), "g": nn.Linear(3, 2), "k": nn.Linear(6, 2)}
    check(Model(APART[name], scale={}, **parts), square, torch.randn(N, T, 3), **options)


@a_few_modes
@pytest.mark.parametrize("dtype", [torch.bool, torch.int64, torch.float64])
def test_a_mask_that_is_turned_over_is_taken_by_steps(dtype, options):
    """Of as many steps as samples."""

    def forward(m, x, mask):
        h = 0
        for step, valid in zip(m.l(x).transpose(0, 1), mask.transpose(0, 1).to(x), strict=True):
            h = torch.tanh(step + h) * valid[:, None] + h * (1 - valid[:, None])
        return h

    x = torch.randn(N, N, 3).double()
    mask = (torch.arange(N) < torch.arange(1, N + 1)[:, None]).to(dtype)
    check(Model(forward, l=nn.Linear(3, 2)), square, x, mask, **options)


@a_few_modes
def test_a_codebook_follows_what_it_stands_for(options):
    """Of as many features as there are samples."""

    def forward(m, x):
        h = m.l(x)
        chosen = torch.zeros(len(x), 2).to(x).scatter_(1, h[:, :1].gt(0).long(), 1)
        m.codes.data = (m.codes.data + chosen.T @ h.detach()) / (1 + chosen.sum(0)[:, None])
        return h * chosen[:, 1:]

    codes = nn.Parameter(torch.ones(2, N), requires_grad=False)
    check(Model(forward, codes=codes, l=nn.Linear(3, N)), square, torch.randn(N, 3), **options)


@a_few_modes
def test_weights_that_a_first_batch_sets_are_given(options):
    """As ActNorm's."""

    def forward(m, x):
        if not m.count:
            m.scale.data.copy_(1 / x.std((0, 1)))
            m.count += 1
        return m.l(x * m.scale)

    parts = {"scale": torch.zeros(3), "l": nn.Linear(3, 2)}
    model, x = Model(forward, count=0, **parts).double(), torch.randn(N, T, 3).double()
    with torchgradx.attach(model, **options) as probe:
        square(model, x).backward()
        norms = probe.norms(per="parameter")
    close_named(norms, loop(model, square, x))


@pytest.fixture
def shifts():
    """An operator of a user's own."""
    with torch.library._scoped_library("user", "FRAGMENT") as library:
        library.define("shift(Tensor x, int by) -> Tensor")
        library.impl("shift", lambda x, by: x.roll(by, 0), "CompositeExplicitAutograd")
        yield torch.ops.user.shift


def test_random_numbers_are_drawn_as_they_would_be():
    with torch.library._scoped_library("user", "FRAGMENT") as library:
        library.define("noisy(Tensor x) -> Tensor")
        library.impl("noisy", lambda x: x + torch.randn_like(x), "CompositeExplicitAutograd")
        model = Model(lambda m, x: m.l(torch.ops.user.noisy(x)), l=nn.Linear(3, 2))
        twin, x = copy.deepcopy(model), torch.randn(N, T, 3)
        torch.manual_seed(1)
        square(twin, x).backward()
        want = torch.rand(1)
        torch.manual_seed(1)
        with torchgradx.attach(model) as probe:
            square(model, x).backward()
            assert torch.equal(torch.rand(1), want)
            assert probe.norms().shape == (N,)
    torch.testing.assert_close(model.l.weight.grad, twin.l.weight.grad)


def test_statistics_may_be_returned_beside_what_is_trained():
    def loss(model, x):
        return model(x)[0].square().flatten(1).sum(1).mean()

    check(Model(lambda m, x: (m.l(x), x.mean(0)), l=nn.Linear(3, 2)), loss, torch.randn(N, T, 3))
