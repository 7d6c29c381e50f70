"""Modules called under no_grad, then in earnest: deep equilibria, recycling, refinement."""

import pytest
import torch
from attach_oracle import (
    Model,
    Same,
    a_few_modes,
    check,
    close,
    exact_or,
    exact_or_refused,
    loop,
    loop_model,
    square,
)
from torch import nn
from torch.utils.checkpoint import checkpoint

import torchgradx

N, D = 4, 6
STATES = {
    "zeros": lambda m, x: x.new_zeros(*x.shape[:-1], D),
    "a constant": lambda m, x: m.c.expand(*x.shape[:-1], D),
    "a table": lambda m, x: m.t,
    "the samples": lambda m, x: torch.tanh(m.i(x)),
    "the samples, turned": lambda m, x: torch.tanh(m.i(x)).transpose(0, -2),
}
states = pytest.mark.parametrize("state", STATES)


def model(state, steps, earnest=True):
    def forward(m, x):
        z = STATES[state](m, x)
        with torch.no_grad():
            for _ in range(steps):
                z = torch.tanh(m.f(z) / 2)
        if state.endswith("turned"):
            z = z.transpose(0, -2)
        if state == "a table":
            z = z.mean(0, keepdim=True)
        return m.o(torch.tanh((m.f if earnest else m.g)(z) + m.i(x)))

    parts = {"f": nn.Linear(D, D), "g": nn.Linear(D, D), "i": nn.Linear(3, D), "o": nn.Linear(D, 2)}
    made = Model(forward, **parts)
    made.register_buffer("c", torch.randn(D))
    made.register_buffer("t", torch.randn(2 * N, D))
    return made


@a_few_modes
@states
@pytest.mark.parametrize("steps", [1, 3])
@pytest.mark.parametrize("shape", [(N, 3), (D, 3), (1, 3), (N, 5, 3), (N, N, 3)], ids=str)
def test_each_is_exact(shape, steps, state, options):
    check(model(state, steps), square, torch.randn(shape), **options)


@a_few_modes
@states
def test_a_module_of_which_nothing_is_asked_counts_nothing(state, options):
    check(model(state, 2, earnest=False), square, torch.randn(N, 3), **options)


@a_few_modes
def test_another_number_of_silent_steps_is_refused_once_at_most(options):
    """Until a forward of that many is watched."""
    net = model("zeros", 0).double()
    silent = {steps: model("zeros", steps).function for steps in (0, 1, 2)}
    with torchgradx.attach(net, **options) as probe:
        known = set()
        for n, steps in [(N, 0), (N, 1), (N, 1), (N, 2), (N, 2), (N, 0), (N, 2), (N, 1)]:
            net.function = silent[steps]
            x = torch.randn(n, 3, dtype=torch.float64)
            square(net, x).backward()
            if steps in known:
                close(probe.norms(), loop_model(net, square, x))
            else:
                exact_or(torchgradx.CoverageError, "no proof", probe, loop(net, square, x))
            known.add(steps)


class Again(torch.autograd.Function):
    """A checkpoint of the user's, whose forward has no ctx."""

    @staticmethod
    def forward(use, x):
        return use(x)

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.use = inputs[0]
        ctx.save_for_backward(inputs[1])

    @staticmethod
    def backward(ctx, grad):
        x = ctx.saved_tensors[0].detach().requires_grad_()
        with torch.enable_grad():
            out = ctx.use(x)
        torch.autograd.backward(out, grad)
        return None, x.grad


REENTRANT = {
    "torch's": lambda use, x: checkpoint(use, x, use_reentrant=True),
    "the user's": Again.apply,
    "within a Function": lambda use, x: Same.apply(checkpoint(use, x, use_reentrant=True)),
}


@a_few_modes
@pytest.mark.parametrize("earnest", [False, True])
@pytest.mark.parametrize("where", REENTRANT)
@pytest.mark.parametrize("rows", [N, 2 * N, 3])
def test_what_a_function_runs_again_is_not_silent(rows, where, earnest, options):
    """A table whose rows are as many as samples, or twice as many, is no batch."""

    def forward(m, x):
        h = m.i(x)
        z = REENTRANT[where](lambda x: x + m.f(m.t[:rows]).square().mean(0), h)
        return m.o(torch.tanh((m.f if earnest else m.g)(z) + h))

    net = model("zeros", 0)
    net.function = forward
    exact_or_refused(net, square, torch.randn(N, 3), **options)
