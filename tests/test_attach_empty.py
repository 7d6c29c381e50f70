"""A batch of no samples among others: an empty shard, a loader's last. Norms are of shape [0].
And layers of no features, as the tail of an adaptive softmax may have."""

import copy

import pytest
import torch
from attach_oracle import (
    Model,
    a_few_modes,
    close,
    loop_model,
    same_gradients,
    seeded,  # noqa: F401
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
    model, x = (
        nn.Sequential(nn.Linear(D, 0), nn.Linear(0, 3)).double(),
        torch.randn(5, *positions, D),
    )
    twin, x = copy.deepcopy(model), x.double()
    clip = options.get("weight_grad", True)
    with torchgradx.attach(model, clip=clip, **options) as probe:
        square(model, x).backward()
        want = loop_model(twin, square, x)
        close(probe.norms(), want)
        if clip:
            square(twin, x).backward()
            same_gradients(model, twin, 1e-9)
            close(probe.clip_grad_norm_(1.0), want)
