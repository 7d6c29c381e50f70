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
    refused,
    seeded,  # noqa: F401
    square,
)
from torch import nn
from torch.utils.checkpoint import checkpoint

import torchgradx

N, T = 6, 4


def along_samples(function):
    """Of one that works along the last dimension."""
    return lambda x: function(x.movedim(0, -1)).movedim(-1, 0)


def in_place(x, change):
    change(x)
    return x


def smoothed(x):
    return F.conv1d(x.flatten(0, 1)[:, None], torch.tensor([[[0.2, 0.5, 0.3]]]).to(x), padding=1)[
        :, 0
    ].view_as(x)


MIXED = {
    "summed up": lambda x: x.cumsum(0),
    "multiplied up": lambda x: x.cumprod(0),
    "the largest so far": lambda x: x.cummax(0).values,
    "logs summed up": lambda x: x.logcumsumexp(0),
    "differences": lambda x: x.diff(dim=0, prepend=x[:1]),
    "differences from the last": lambda x: torch.cat([x[:1], x])[:-1] - x,
    "a softmax": lambda x: x.softmax(0),
    "in place": lambda x: x.clone().cumsum_(0),
    "a convolution": along_samples(smoothed),
    "averages": along_samples(lambda x: F.avg_pool1d(x, 3, 1, 1)),
    "the largest around": along_samples(lambda x: F.max_pool1d(x, 3, 1, 1)),
    "interpolated": along_samples(
        lambda x: F.interpolate(F.interpolate(x, 4 * N, mode="linear"), N, mode="linear")),
    "windows": lambda x: F.pad(x, (0, 0, 0, 0, 1, 1)).unfold(0, 3, 1).mean(-1),
    "a transform": lambda x: torch.fft.fft(x, dim=0).real,
    "a triangular system": lambda x: torch.linalg.solve_triangular(
        torch.ones(N, N, dtype=x.dtype).tril(), x.flatten(1), upper=False).view_as(x),
    "directions": lambda x: torch.linalg.svd(x.flatten(1), full_matrices=False)[0][:, :T, None],
    "distances": lambda x: torch.cdist(x[:, :, 0], x[:, :, 0])[:, :T, None],
    "likeness": lambda x: (x[:, :, 0] @ x[:, :, 0].T)[:, :T, None],
    "attention": lambda x: F.scaled_dot_product_attention(*[x.movedim(0, 1)] * 3).movedim(1, 0),
    "batch statistics": lambda x: F.batch_norm(x, None, None, training=True),
    "less the mean": lambda x: x - x.mean(0),
    "less the mean of all": lambda x: x - x.mean(),
    "over the largest": lambda x: x / x.max(),
    "over the norm": lambda x: x / x.norm(),
    "standardised": lambda x: (x - x.mean(0)) / x.std(0),
    "less the median": lambda x: x - x.median(0).values,
    "ranks": lambda x: (x > x.quantile(0.5, 0)).to(x),
    "whitened": lambda x: x @ torch.linalg.inv(torch.cov(x.flatten(0, 1).T) + torch.eye(1).to(x)),
    "less the mean of some": lambda x: x - x[x[:, 0, 0] > -9].mean(0),
    "over the largest of some": lambda x: x / x[x > 0].max(),
    "less the first": lambda x: x - x[:1],
    "less the one before": lambda x: torch.cat([x[:1], x[1:] - x[:-1]]),
    "in place of a part": lambda x: in_place(x.clone(), lambda y: y[1:].add_(x[:-1])),
    "into what is given": lambda x: torch.sub(x, x[:1], out=torch.empty_like(x)),
    "halves": lambda x: torch.cat([x[:3] + x[3:], x[3:] + x[:3]]),
    "over the sum": lambda x: x / x.sum(),
    "in parts": lambda x: torch.cat([y - y.mean(0) for y in x.split(2)]),
    "in parts, summed up": lambda x: torch.cat([y.cumsum(0) for y in x.split(3)]),
    "in parts, batch statistics": lambda x: torch.cat(
        [F.batch_norm(y, None, None, training=True) for y in x.chunk(2)]),
    "of a list": lambda x: x - torch.stack(list(x)).mean(0),
    "of parts put together": lambda x: x - torch.cat(x.chunk(2)).amax(0),
    "of norms of each": lambda x: x / torch.stack([y.norm() for y in x]).mean(),
    "of sequences": lambda x: x - nn.utils.rnn.pad_sequence(list(x), batch_first=True).mean(0),
    "by the first one's order": lambda x: x[:, x[0, :, 0].argsort()],
    "a context": lambda x: torch.cat([x, x.mean(0, keepdim=True).expand_as(x)], 1)[:, 2:-2],
}  # fmt: skip


@a_few_modes
@pytest.mark.parametrize("way", MIXED)
def test_data_that_are_mixed_before_a_layer_are_refused(way, options):
    model = Model(lambda m, x: torch.tanh(m.r(MIXED[way](x))).flatten(1), r=nn.Linear(1, 2))
    refused(model, square, torch.randn(N, T, 1), names=["r.weight"], match="mixes", **options)


@pytest.mark.parametrize("value", [0.0, 1.0])
@pytest.mark.parametrize("way", ["less the mean of all", "summed up", "averages"])
def test_a_first_batch_of_equal_numbers_hides_nothing(way, value):
    model = Model(lambda m, x: torch.tanh(m.r(MIXED[way](x))).flatten(1), r=nn.Linear(1, 2))
    refused(model, square, torch.full((N, T, 1), value), names=["r.weight"], match="mixes")


@a_few_modes
@pytest.mark.parametrize("again", [False, True], ids=["", "a reentrant checkpoint"])
@pytest.mark.parametrize("way", ["less the mean", "summed up", "batch statistics", "none"])
def test_inputs_that_need_gradients_are_data_too(way, again, options):
    """As of adversarial training."""

    def forward(m, x):
        def use(x):
            return m.l(MIXED.get(way, torch.tanh)(x))

        return checkpoint(use, x, use_reentrant=True) if again else use(x)

    model, x = Model(forward, l=nn.Linear(1, 2)), torch.randn(N, T, 1).requires_grad_()
    with torchgradx.attach(model, **options) as probe:
        square(model, x).backward()
        if way == "none":
            assert probe.norms().shape == (N,)
        else:
            with pytest.raises(torchgradx.CoverageError, match=r"mixes|no proof"):
                probe.norms()
    assert x.grad is not None


class Centred(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x - x.mean(0)

    @staticmethod
    def backward(ctx, grad):
        return grad


@a_few_modes
def test_so_is_what_a_function_is_given(options):
    model = Model(lambda m, x: m.l(Centred.apply(x)), l=nn.Linear(1, 2))
    refused(model, square, torch.randn(N, T, 1), names=["l.weight"], match="mixes", **options)


@a_few_modes
@pytest.mark.parametrize("way", ["less the mean", "over the norm", "summed up"])
def test_detached_ones_are_refused_where_they_meet_others(way, options):
    def forward(m, x):
        h = m.r(x)
        return (h * MIXED[way](h.detach())).flatten(1)

    model = Model(forward, r=nn.Linear(1, 2))
    refused(model, square, torch.randn(N, T, 1), names=["r.weight"], match="mixes", **options)


IDS = {
    "padded and cut": lambda ids: F.pad(ids, (0, 0, 1, -1)),
    "twice and cut": lambda ids: torch.cat([ids, ids])[1 : len(ids) + 1],
    "repeated and cut": lambda ids: ids.repeat(2, 1)[1 : len(ids) + 1],
    "rolled": lambda ids: ids.roll(1, 0),
    "of the first": lambda ids: torch.where(ids > 5, ids[:1], ids),
}


@a_few_modes
@pytest.mark.parametrize("way", IDS)
def test_so_are_ids(way, options):
    model = Model(lambda m, ids: m.l(m.e(IDS[way](ids))).flatten(1), e=nn.Embedding(9, 3),
                  l=nn.Linear(3, 2))  # fmt: skip
    refused(model, square, torch.randint(0, 9, (N, T)), names=["e.weight"], match="mixes",
            **options)  # fmt: skip


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


@pytest.mark.parametrize("by", [0, 1])
def test_operators_of_the_users_own_are_asked_too(shifts, by):
    model = Model(lambda m, x: torch.tanh(m.l(shifts(x, by))), l=nn.Linear(3, 2))
    if by:
        refused(model, square, torch.randn(N, T, 3), names=["l.weight"], match="order")
    else:
        check(model, square, torch.randn(N, T, 3))


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
