"""A checkpoint around the whole model: what it runs again is compared, added up and multiplied as
the forward was, and is of the probe that was there."""

import copy

import pytest
import torch
from attach_oracle import (
    Model,
    a_few_modes,
    close_named,
    loop,
    mlp,
    same_gradients,
    square,
)
from torch import nn
from torch.utils.checkpoint import checkpoint

import torchgradx

WAYS = {
    "no checkpoint": lambda run, x: run(x),
    "not reentrant": lambda run, x: checkpoint(run, x, use_reentrant=False),
    "reentrant": lambda run, x: checkpoint(run, x.clone().requires_grad_(), use_reentrant=True),
}
ways = pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)


def own(width=5):
    """A module of its own parameter among others."""
    scale = Model(lambda m, x: x * m.scale, scale=torch.rand(width) + 0.5)
    return nn.Sequential(nn.Linear(3, width), nn.Tanh(), scale, nn.Linear(width, 2)).double()


@a_few_modes
@pytest.mark.parametrize("way", list(WAYS.values())[:2], ids=list(WAYS)[:2])
def test_what_is_recorded_is_held_against_what_is_received(way, options):
    """A hook that changes an output inside of what runs again is not called there."""
    function = lambda m, x: torch.tanh(m.act(x @ m.weight))  # noqa: E731
    first = nn.Linear(5, 5, bias=False)
    shares = Model(function, weight=torch.zeros(1), act=nn.Identity())
    shares.weight = first.weight
    model = nn.Sequential(first, nn.Tanh(), shares, nn.Linear(5, 2)).double()
    shares.act.register_forward_hook(lambda module, args, out: 3 * out)
    with torchgradx.attach(model, **options) as probe:
        for _ in range(2):
            way(model, torch.randn(4, 5).double()).square().sum().backward()
            with pytest.raises(torchgradx.CoverageError, match=r"0\.weight"):
                probe.norms()


@a_few_modes
@ways
def test_two_forwards_in_one_backward(way, options):
    model, batches = own(), [torch.randn(n, 3).double() for n in (4, 3)]
    twin = copy.deepcopy(model)
    with torchgradx.attach(model, **options) as probe:
        for _ in range(3):
            sum(square(lambda x: way(model, x), x) for x in batches).backward()
            close_named(probe.norms(per="parameter"), loop(twin, square, torch.cat(batches)))


@a_few_modes
@pytest.mark.parametrize("inside", [True, False], ids=["backward inside", "after"])
@ways
def test_the_same_samples_twice(way, inside, options):
    model, x = mlp().double(), torch.randn(4, 3).double()
    twin = copy.deepcopy(model)

    def both(net, x):
        return square(net, x) + square(net, 2 * x)

    for _ in range(2):
        with torchgradx.attach(model, **options) as probe:
            with probe.same_samples():
                loss = both(lambda x: way(model, x), x)
                if inside:
                    loss.backward()
            if not inside:
                loss.backward()
            close_named(probe.norms(per="parameter"), loop(twin, both, x))


@a_few_modes
@ways
def test_directions_are_those_of_the_forward(way, options):
    model, x = mlp().double(), torch.randn(4, 3).double()
    first, second = ({"0.weight": torch.randn(5, 3).double()} for _ in range(2))
    found = []
    for later in (first, second):
        with torchgradx.attach(model, directions=first, **options) as probe:
            loss = square(lambda x: way(model, x), x)
            probe.directions = later
            loss.backward()
            found.append(probe.dot())
    assert torch.equal(*found)


PLANS = ["abAB", "abBA", "abA", "baAB", "baBA", "abB"]


@a_few_modes
@pytest.mark.parametrize("plan", PLANS)
def test_gradients_of_two_forwards_that_a_removed_probe_saw(plan, options):
    """a, b: a forward in a reentrant checkpoint, and one beside; A, B: their backwards, under the
    next probe. Each has a checkpoint inside."""

    def forward(m, x):
        return m.last(checkpoint(lambda x: torch.tanh(m.block(x)), m.first(x), use_reentrant=False))

    parts = {"first": nn.Linear(3, 5), "block": nn.Linear(5, 5), "last": nn.Linear(5, 2)}
    model = Model(forward, **parts).double()
    twin, x = copy.deepcopy(model), torch.randn(2, 4, 3).double()

    def run(net, between):
        losses = {}
        for step in plan:
            if step == "A" or (step == "B" and "A" not in plan):
                between()
                between = lambda: None  # noqa: E731
            if step in "ab":
                way = WAYS["reentrant" if step == "a" else "no checkpoint"]
                losses[step.upper()] = square(lambda x, way=way: way(net, x), x["ab".index(step)])
            else:
                losses.pop(step).backward()

    probes = [torchgradx.attach(model, **options)]

    def next_one():
        probes[0].remove()
        probes.append(torchgradx.attach(model))

    run(model, next_one)
    run(twin, lambda: None)
    if options.get("weight_grad", True):
        same_gradients(model, twin, 1e-9)
