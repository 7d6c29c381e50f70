"""Tensors without values, as fake ones, or on meta: an attached model runs as it would without."""

import copy

import pytest
import torch
from attach_oracle import (
    Model,
    a_few_modes,
    close_named,
    loop,
    mlp,
    square,
)
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

import torchgradx


def own():
    scale = Model(lambda m, x: x * m.scale, scale=torch.rand(5) + 0.5)
    return nn.Sequential(nn.Linear(3, 5), nn.Tanh(), scale, nn.Linear(5, 2))


def fake_input(model, x):
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        assert model(mode.from_tensor(x)).shape == (4, 2)


def exported(model, x):
    program = torch.export.export(model, (x,))
    assert torch.equal(program.module()(x), model(x))


@a_few_modes
@pytest.mark.parametrize("use", [fake_input, exported])
@pytest.mark.parametrize("make", [mlp, own])
def test_beside_steps(make, use, options):
    model, x = make(), torch.randn(4, 3)
    twin = copy.deepcopy(model)
    with torchgradx.attach(model, **options) as probe:
        for _ in range(2):
            use(model, x)
            square(model, x).backward()
            use(model, x)
            close_named(probe.norms(per="parameter"), loop(twin, square, x), 1e-4)


@a_few_modes
@pytest.mark.parametrize(
    "kind", [FakeTensorMode, lambda: torch.device("meta")], ids=["fake", "meta"]
)
@pytest.mark.parametrize("make", [mlp, own])
def test_nothing_else(make, kind, options):
    with kind():
        model = make()
        with torchgradx.attach(model, **options) as probe:
            square(model, torch.randn(4, 3)).backward()
            assert all(p.grad.shape == p.shape for p in model.parameters())
            with pytest.raises(torchgradx.CoverageError):
                probe.norms()
