"""Hooks and checkpoints that come after steps without them, of the same shapes: what was proven
then is no proof of a graph that has their nodes, or saved through them."""

import contextlib

import pytest
import torch
from attach_oracle import (
    Model,
    a_few_modes,
    close,
    exact_or,
    loop,
    loop_model,
    mlp,
    square,
)
from test_attach_unpacking import KINDS, D, N, Once, T, model, plain
from torch import nn
from torch.autograd.graph import save_on_cpu
from torch.utils.checkpoint import checkpoint

import torchgradx


@a_few_modes
@pytest.mark.parametrize("place", [0, 1, 2])
@pytest.mark.parametrize("kind", ["register_full_backward_hook", "register_full_backward_pre_hook"])
def test_a_modules_backward_hook_may_come_and_go(kind, place, options):
    net = mlp().double()
    with torchgradx.attach(net, **options) as probe:
        for step in range(6):
            if step == 2:
                hook = getattr(net[place], kind)(lambda *_: None)
            if step == 4:
                hook.remove()
            x = torch.randn(N, 3, dtype=torch.float64)
            square(net, x).backward()
            close(probe.norms(), loop_model(net, square, x))


@a_few_modes
@pytest.mark.parametrize("first", [contextlib.nullcontext, save_on_cpu])
@pytest.mark.parametrize("kind", KINDS)
def test_hooks_on_saved_tensors_may_come_and_go(kind, first, options):
    """A scale is exact in another way than to ask nodes; what has none is refused each time."""
    net = model(kind, plain).double()
    with torchgradx.attach(net, **options) as probe:
        for step, around in enumerate((first, first, Once, Once, Once, first, Once)):
            x = torch.randn(N, T, D, dtype=torch.float64)
            with around():
                loss = square(net, x)
            loss.backward()
            # Under other hooks than the first ones a forward is watched from its beginning.
            known = first is contextlib.nullcontext or step != 2
            if step < 2 or (kind == "a scale" and known):
                close(probe.norms(), loop_model(net, square, x))
            else:
                exact_or(torchgradx.CoverageError, "", probe, loop(net, square, x))


class Scaled(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer, self.scale = nn.Linear(D, D), nn.Parameter(torch.randn(D))

    def forward(self, x):
        return x + self.scale * torch.tanh(self.layer(x))


def reentrant(block, x):
    return checkpoint(block, x, use_reentrant=True)


def hooked(block, x):
    with Once():
        return block(x)


def straight(block, x):
    return block(x)


@a_few_modes
@pytest.mark.parametrize("later", [reentrant, hooked])
def test_inside_of_a_forward_they_are_refused_once_at_most(later, options):
    """Where no hook is in force as it begins: until a forward with them is watched."""
    net = Model(lambda m, x: m.last(m.way(m.block, m.first(x)).mean(1)), first=nn.Linear(3, D),
                block=Scaled(), last=nn.Linear(D, 2)).double()  # fmt: skip
    with torchgradx.attach(net, **options) as probe:
        for step, net.way in enumerate((straight, straight, later, later, later, straight, later)):
            x = torch.randn(N, T, 3, dtype=torch.float64)
            square(net, x).backward()
            if step == 2:
                exact_or(torchgradx.CoverageError, "no proof", probe, loop(net, square, x))
            else:
                close(probe.norms(), loop_model(net, square, x))
