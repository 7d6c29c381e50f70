"""A batch of no samples among others: an empty shard, a loader's last. Norms are of shape [0].
And layers of no features, as the tail of an adaptive softmax may have."""

import copy

import pytest
import torch
from attach_oracle import (
    Model,
    a_few_modes,
    check,
    close,
    exact_or,
    loop,
    loop_model,
    same_gradients,
    square,
)
from torch import nn

import torchgradx

T, D = 5, 4


def attending():
    return Model(lambda m, x: m.a(x, x, x)[0], a=nn.MultiheadAttention(D, 2, batch_first=True))


def positions():
    return Model(lambda m, x: m.o(x + m.p.tanh() * m.gain), o=nn.Linear(D, 2),
                 p=torch.randn(T, D), gain=torch.randn(D))  # fmt: skip


MODELS = {
    "attention": attending,
    "an encoder layer": lambda: nn.TransformerEncoderLayer(D, 2, 8, 0.0, batch_first=True),
    "parameters of the root": positions,
    "one slope": lambda: Model(lambda m, x: m.a(m.l(x)), a=nn.PReLU(), l=nn.Linear(D, 3)),
    "a recurrent layer": lambda: Model(lambda m, x: m.r(x)[0], r=nn.GRU(D, 3, batch_first=True)),
    "a replay": lambda: Model(lambda m, x: m.l(x), l=nn.utils.parametrizations.weight_norm(
        nn.Linear(D, 3))),
}  # fmt: skip


@a_few_modes
@pytest.mark.parametrize("sizes", [(0, 3), (3, 0, 2)], ids=str)
@pytest.mark.parametrize("name", MODELS)
def test_no_samples_among_others(name, sizes, options):
    model = MODELS[name]().double()
    batches = [torch.randn(n, T, D).double() for n in sizes]
    with torchgradx.attach(model, loss_reduction="sum", **options) as probe:
        for x in batches:
            model(x).square().sum().backward()
            norms = probe.norms()
            assert norms.shape == x.shape[:1]
            if len(x):
                close(norms, loop_model(model, square, x))
        for x in batches:
            model(x).square().sum().backward()
        assert len(probe.norms()) == sum(sizes), "accumulated"


@a_few_modes
@pytest.mark.parametrize("positions", [(), (2,)], ids=str)
def test_layers_of_no_features(positions, options):
    model = nn.Sequential(nn.Linear(D, 0), nn.Linear(0, 3)).double()
    twin, x = copy.deepcopy(model), torch.randn(5, *positions, D).double()
    clip = options.get("weight_grad", True)
    with torchgradx.attach(model, clip=clip, **options) as probe:
        square(model, x).backward()
        want = loop_model(twin, square, x)
        close(probe.norms(), want)
        if clip:
            square(twin, x).backward()
            same_gradients(model, twin, 1e-9)
            close(probe.clip_grad_norm_(1.0), want)


def put_back(m, x, k):
    out = m.a(x)
    out[k] = out[k] + m.b(x[k])
    return out


def in_turn(m, x, k):
    i = k.nonzero()[:, 0].flip(0)
    return m.a(x).index_add(0, i, m.b(x[i]))


def for_nothing(m, x, k):
    return m.a(x).sum(1, keepdim=True) + 0 * m.b(x[k]).sum()


@a_few_modes
@pytest.mark.parametrize("function", [put_back, in_turn, for_nothing])
def test_a_layer_that_is_given_no_rows_leaves_others_exact(function, options):
    model = Model(function, a=nn.Linear(D, 2), b=nn.Linear(D, 2))
    check(model, square, torch.randn(3, D), torch.zeros(3, dtype=torch.bool), **options)


@a_few_modes
@pytest.mark.parametrize("function", [put_back, in_turn, for_nothing])
def test_rows_that_come_after_none_are_proven(function, options):
    model = Model(function, a=nn.Linear(D, 2), b=nn.Linear(D, 2)).double()
    x = torch.randn(3, D).double()
    with torchgradx.attach(model, **options) as probe:
        for given in (0, 0, 3, 2, 0, 3):
            k = torch.arange(3) < given
            square(model, x, k).backward()
            if given and function is in_turn:
                with pytest.raises(torchgradx.CoverageError):
                    probe.norms()
                probe.reset()
            else:
                exact_or(torchgradx.CoverageError, "", probe, loop(model, square, x, k))
                probe.reset()
