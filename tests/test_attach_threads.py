"""Threads that train one model at once: no sample is lost, and none waits for another for ever."""

import copy
import sys
import threading

import pytest
import torch
from attach_oracle import (
    Model,
    close,
    loop_model,
    mlp,
    same_gradients,
    square,
)
from torch import nn

import torchgradx

THREADS, ROUNDS = 6, 12


@pytest.fixture
def switching():
    """Between threads as often as may be."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    yield
    sys.setswitchinterval(before)


def own():
    scale = Model(lambda m, x: x * m.scale, scale=torch.rand(5) + 0.5)
    return nn.Sequential(nn.Linear(3, 5), nn.Tanh(), scale, nn.Linear(5, 2))


MODELS = {"layers": mlp, "a module with a parameter of its own": own}


@pytest.mark.parametrize("fused", [True, False], ids=["fused", "beside"])
@pytest.mark.parametrize("make", MODELS.values(), ids=MODELS)
def test_steps_in_threads(make, fused, switching):
    """The first rounds prove the structure, all at once."""
    model, x = make().double(), torch.randn(THREADS, 3, 3).double()
    twin = copy.deepcopy(model)
    square_of_all = [square(twin, part) for part in x]
    torch.stack(square_of_all).sum().backward()
    want = loop_model(twin, square, x.flatten(0, 1)).sort()[0]
    with torchgradx.attach(model, fused=fused) as probe:
        for _ in range(ROUNDS):
            model.zero_grad()
            step = lambda part: square(model, part).backward()  # noqa: E731
            threads = [threading.Thread(target=step, args=(part,), daemon=True) for part in x]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join(60)
            assert not any(thread.is_alive() for thread in threads)
            close(probe.norms().sort()[0], want)
            same_gradients(model, twin, 1e-9)
