"""NoiseScale's default while a model is trained, against the truth of its whole pool."""

import statistics

import pytest
import torch
from attach_models import Model
from torch import nn

import torchgradx
from torchgradx import NoiseScale


def digits():
    """Of which a tenth are labelled at random."""
    x, y = (torch.as_tensor(t) for t in pytest.importorskip("sklearn.datasets").load_digits(
        return_X_y=True))  # fmt: skip
    return x.float() / 16, torch.where(torch.rand(len(y)) < 0.1, torch.randint(0, 10, y.shape), y)


def cross_entropy(output, y):
    return nn.functional.cross_entropy(output.reshape(-1, output.shape[-1]), y.reshape(-1))


def perceptron():
    return nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))


TRAININGS = {  # model, pool, batch, optimizer, learning rate
    "perceptron": lambda: (perceptron(), digits(), 64, torch.optim.SGD, 0.05),
    "linear": lambda: (nn.Linear(64, 10), digits(), 128, torch.optim.SGD, 0.1),
}


def truth(model, x, y):
    """tr(Sigma) and |G|^2 of the pool that batches are drawn from, by its norms and gradient."""
    norms = torchgradx.grad_norms(model, cross_entropy, x, y).double()
    gradients = torch.autograd.grad(cross_entropy(model(x), y), list(model.parameters()))
    whole = float(sum(g.double().square().sum() for g in gradients))
    return float(norms.square().mean()) - whole, whole


def train(name, noise, looks, steps):
    """The estimate, and the truth as (tr(Sigma), |G|^2), at each look."""
    model, (x, y), size, optimizer, rate = TRAININGS[name]()
    optimizer = optimizer(model.parameters(), lr=rate)
    found = []
    for step in range(1, steps + 1):
        batch = torch.randint(0, len(x), (size,))
        model.zero_grad()
        with torchgradx.attach(model) as probe:
            cross_entropy(model(x[batch]), y[batch]).backward()
            noise.update(probe)
        if step in looks:
            found.append((noise.critical_batch_size, truth(model, x, y)))
        optimizer.step()
    return found


@pytest.mark.parametrize("name", TRAININGS)
def test_the_default_follows_training_and_is_near_at_a_batch_near_the_truth(name):
    """Each of four trainings, and their mean, which is not biased."""
    off = []
    for seed in range(4):
        torch.manual_seed(seed)
        noise, late = NoiseScale(), range(180, 201, 2)  # a step alone goes up and down
        looks = train(name, noise, [*range(50, 180, 10), *late], 200)
        assert all(1 / 3 < estimate / (trace / signal) < 3 for estimate, (trace, signal) in looks)
        estimates, truths = zip(*looks[-len(late) :], strict=True)
        traces, signals = zip(*truths, strict=True)
        off.append(statistics.geometric_mean(estimates) / (sum(traces) / sum(signals)))
        low, high = noise.spread
        assert low < noise.critical_batch_size < high < 4 * low
    assert all(1 / 1.4 < each < 1.4 for each in off), off
    assert 1 / 1.2 < statistics.geometric_mean(off) < 1.2


def falling(noise, steps, rate=14.5, size=16, width=200):
    """Of gradients whose mean falls e-fold in `rate` steps, and their noise not at all."""
    model = Model(lambda m, x: (m.w * x).sum(1), w=torch.zeros(width, dtype=torch.float64))
    mean = torch.ones(width, dtype=torch.float64) / width**0.5
    with torchgradx.attach(model) as probe:
        for step in range(steps):
            x = torch.randn(size, width, dtype=torch.float64) / width**0.5
            model.zero_grad()
            model(x + mean * torch.tensor((100 - step) / rate / 2).exp()).mean().backward()
            noise.update(probe)
    return noise.critical_batch_size / torch.tensor((steps - 1 - 100) / rate).exp().item()


def test_a_noise_scale_that_moves_fast_is_followed():
    assert 1 / 3 < falling(NoiseScale(), 100) < 1.5
    assert falling(NoiseScale(decay=0.99), 100) < 0.1
