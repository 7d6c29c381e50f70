"""Where the samples are in a model's outputs: followed through its forward, not read off sizes."""

import pytest
import torch
from attach_oracle import (
    Model,
    a_few_modes,
    check,
    every_mode,
    exact_or,
    exact_or_refused,
    loop,
    need_native,
)
from torch import nn
from torch.utils.checkpoint import checkpoint

import torchgradx

N = 4


def by_rows(model, x):
    """The mean over the samples of a loss of each, wherever the model's output has them."""
    return model(x).square().sum() / len(x)


def head(*shape):
    return {"l": nn.Linear(3, *shape)}


TURNED = {
    "transposed": (lambda m, x: m.l(x).transpose(0, 1), head(5)),
    "permuted": (lambda m, x: m.l(x).permute(2, 0, 1), head(5)),
    "by einsum": (lambda m, x: torch.einsum("ntd->tnd", m.l(x)), head(5)),
    "back and forth": (
        lambda m, x: m.l(x.transpose(0, 1)).tanh().transpose(0, 1).contiguous(),
        head(5),
    ),
    "after views": (
        lambda m, x: (
            m.l(x.reshape(-1, 3)).view(len(x), -1, 1, 5).squeeze(2).unsqueeze(0).transpose(1, 2)[0]
        ),
        head(5),
    ),
    "a row of each": (
        lambda m, x: m.b(m.l(x)[torch.arange(len(x)), torch.zeros(len(x), dtype=torch.long)]).T,
        {**head(5), "b": nn.Linear(5, N)},
    ),
    "its own parameter": (lambda m, x: (x * m.w).transpose(0, 1), {"w": torch.randn(3)}),
}


@every_mode
@pytest.mark.parametrize("positions", [N, 6])
@pytest.mark.parametrize("name", TURNED)
def test_a_model_that_returns_its_samples_in_another_dimension_is_exact(name, positions, options):
    forward, parts = TURNED[name]
    if "w" in parts and options.get("backend") == "native":
        pytest.skip("its parameter has no kernel")
    model, x = Model(forward, **parts), torch.randn(N, positions, 3)
    if positions == N or name == "a row of each":  # two dimensions have the samples' number
        exact_or_refused(model, by_rows, x, **options)
    else:
        check(model, by_rows, x, **options)


@every_mode
def test_as_many_classes_as_samples_beside_samples_in_dimension_1(options):
    model = Model(lambda m, x: m.l(torch.tanh(m.into(x)).mean(0)), into=nn.Linear(3, 5),
                  l=nn.Linear(5, N))  # fmt: skip
    loss = lambda m, x: m(x).square().sum() / x.shape[1]  # noqa: E731
    check(model, loss, torch.randn(6, N, 3), dims=1, batch_dim=1, **options)


def filled(y):
    out = torch.empty(y.shape[1], y.shape[0], *y.shape[2:], dtype=y.dtype)
    for k in range(len(out)):
        out[k] = y[:, k]
    return out


LOST = {
    "by strides": lambda y: y.as_strided((y.shape[1], len(y), 5), (5, 5 * y.shape[1], 1)),
    "filled": filled,
    "put together": lambda y: torch.stack([y[:, k] for k in range(y.shape[1])]),
    "in a loop": lambda y: torch.cat([y[:, k].unsqueeze(0) for k in range(y.shape[1])]),
    "shuffled by data": lambda y: y.gather(0, torch.arange(len(y)).view(-1, 1, 1).expand_as(y)),
}


@every_mode
@pytest.mark.parametrize("name", LOST)
def test_where_nobody_can_follow_it_is_exact_or_refused(name, options):
    model = Model(lambda m, x: LOST[name](m.l(x)), **head(5))
    exact_or_refused(model, by_rows, torch.randn(N, N, 3), **options)


def lost(y):
    return y.unfold(-1, 1, 1).squeeze(-1)


def by_all(model, x):
    found = model(x)
    each = [found] if isinstance(found, torch.Tensor) else found
    return sum(y.square().sum() for y in each) / len(x)


def of_parts(forward, width):
    return Model(forward, l=nn.Linear(3, width), k=nn.Linear(3, 3), o=nn.Linear(3, width))


def of_one_trunk(m, x):
    h = torch.softmax(x @ x.mT, -1) @ m.k(x)
    return [lost(layer(h) * k) for k in range(3) for layer in (m.l, m.o)]


SURE = {
    "images of N channels": (lambda m, x: lost(m.c(x)), (N, N, N, N)),
    "series of N channels": (lambda m, x: lost(m.s(x)), (N, N, N)),
    "N numbers of N positions": (lambda m, x: m.n(x).permute(0, 2, 1), (N, N, 3)),
    "six of one trunk": (of_one_trunk, (N, N, 3)),
}


@every_mode
@pytest.mark.parametrize("name", SURE)
def test_where_another_place_would_mix_them_equal_sizes_leave_no_doubt(name, options):
    forward, shape = SURE[name]
    model = of_parts(forward, 5)
    model.c, model.s = nn.Conv2d(N, N, 3, padding=1), nn.Conv1d(N, N, 3, padding=1)
    model.n = nn.Linear(3, N)
    check(model, by_all, torch.randn(shape), **options)


def apart(m, x, y):
    """The second has positions first, and never meets the first one."""
    return m.l(x), m.b(y).transpose(0, 1)


@every_mode
@pytest.mark.parametrize("positions", [N, 6])
def test_a_second_tensor_may_have_its_samples_elsewhere(positions, options):
    def loss(m, x, y):
        return sum(out.square().sum() for out in m(x, y)) / len(x)

    need_native(options)
    model = Model(apart, l=nn.Linear(3, 5), b=nn.Linear(3, 5)).double()
    x, y = torch.randn(N, positions, 3), torch.randn(positions, N, 3)
    want = loop(model, loss, x, y, dims=(0, 1))
    with torchgradx.attach(model, **options) as probe:
        loss(model, x.double(), y.double()).backward()
        exact_or(torchgradx.CoverageError, "two dimensions", probe, want)


def biased(m, x, bias):
    """[N, T] of numbers, and [T, T] for all of them."""
    h = torch.tanh(m.l(x[..., None]))
    return (h @ h.mT + m.b(bias[..., None])[..., 0]).softmax(-1) @ h


def looked_up(m, i, apart):
    """[N, T] of ids, and [T, T] of distances for all of them."""
    h = m.e(i)
    return (h @ h.mT + m.d(apart)[..., 0]).softmax(-1) @ h


SHARED = {
    "biases": (biased, {"l": nn.Linear(1, 3), "b": nn.Linear(1, 1)}, torch.randn),
    "distances": (
        looked_up,
        {"e": nn.Embedding(9, 3), "d": nn.Embedding(9, 1)},
        lambda *shape: torch.randint(0, 9, shape),
    ),
}


@a_few_modes
@pytest.mark.parametrize("reentrant", [None, True])
@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize("name", SHARED)
def test_one_that_all_share_is_not_taken_for_theirs(name, turned, reentrant, options):
    """It has the shape of the first, as there are as many positions as samples."""
    forward, parts, make = SHARED[name]

    def whole(m, x, beside):
        beside = beside.T if turned else beside
        if reentrant is None:
            return forward(m, x, beside)
        live = torch.zeros((), requires_grad=True)
        return checkpoint(lambda x, _: forward(m, x, beside), x, live, use_reentrant=True)

    beside = make(N, N)

    def loss(m, x):
        return m(x, beside.to(x.dtype)).square().sum() / len(x)

    exact_or_refused(Model(whole, **parts), loss, make(N, N), **options)
