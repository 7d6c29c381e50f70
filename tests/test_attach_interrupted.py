"""A step that an exception interrupts, or in which a probe leaves, leaves nothing behind."""

import copy
import sys

import pytest
import torch
from attach_models import Model, identity, square
from attach_modes import ANY, VMAP, each_of
from attach_oracle import close, loop_model
from attach_steps import exact_step, refusal
from torch import nn
from torch.utils.checkpoint import checkpoint

import torchgradx

N = 4
modes = each_of([*ANY, *VMAP, {"clip": True}])
ARMED = []  # what the next backward raises in its middle


def armed(grad):
    if ARMED:
        raise ARMED[0]("interrupted")
    return grad


trap = identity(armed)


def tied(m, x):
    x = trap(m.a(x).tanh())
    return m.b(m.a(x)) + m.b(x)


def two_outputs(m, x):
    first, second = m.pair(m.a(x))
    return m.b(trap(first) + second.tanh())


def reentrant(m, x):
    return m.c(checkpoint(lambda x: m.b(trap(m.a(x)).tanh()), m.c(x), use_reentrant=True))


def linear():
    return nn.Linear(3, 3)


# name -> model, and N samples of it
NETS = {
    "tied": lambda: (Model(tied, a=linear(), b=linear()), torch.randn(N, 3)),
    "two outputs": lambda: (  # a module that runs again in backward: it settles at its end
        Model(two_outputs, a=linear(), b=linear(), pair=Model(
            lambda m, x: (x @ m.w, (x * 2) @ m.w), w=torch.randn(3, 3))), torch.randn(N, 3)),
    "reentrant": lambda: (Model(reentrant, a=linear(), b=linear(), c=linear()), torch.randn(N, 3)),
    "norms and conv": lambda: (
        nn.Sequential(nn.Conv1d(2, 3, 2), nn.LayerNorm(4), Model(lambda m, x: trap(x)),
                      nn.GroupNorm(1, 3), nn.Linear(4, 2)), torch.randn(N, 2, 5)),
}  # fmt: skip
nets = pytest.mark.parametrize("net", NETS)


def made(net="tied"):
    model, x = NETS[net]()
    return model.double(), x.double()


def fails(loss, error=KeyError, **options):
    """A backward with an exception in its middle, which is returned."""
    ARMED.append(error)
    try:
        with pytest.raises(error) as caught:
            loss.backward(**options)
    finally:
        ARMED.clear()
    return caught


def step_is_exact(probe, model, x, options):
    twin = copy.deepcopy(model) if options.get("weight_grad", True) else None
    exact_step(probe, model, x, twin=twin, exactly=options.get("fused") is False)


@modes
@nets
def test_a_failed_backward_leaves_nothing(net, options):
    model, x = made(net)
    with torchgradx.attach(model, **options) as probe:
        for error in (KeyError, KeyboardInterrupt):  # the first time at a structure yet unknown
            for _ in range(2):
                fails(square(model, x), error)
                refusal(probe, "nothing is recorded")
            step_is_exact(probe, model, x, options)
            step_is_exact(probe, model, x, options)


@modes
@pytest.mark.parametrize("net", ["tied", "reentrant", "norms and conv"])
def test_a_second_backward_that_fails_takes_back_what_it_brought_alone(net, options):
    model, x = made(net)
    want = loop_model(model, square, x)
    with torchgradx.attach(model, **options) as probe:
        loss = square(model, x)
        loss.backward(retain_graph=True)
        fails(2 * loss, retain_graph=True)
        close(probe.norms(), want)
        (2 * loss).backward()
        close(probe.norms(), 3 * want)


@modes
def test_an_exception_at_the_very_end_of_a_backward(options):
    model, x = made("two outputs")

    def boom():
        raise KeyError

    def at_the_end(_):
        torch.autograd.Variable._execution_engine.queue_callback(boom)

    with torchgradx.attach(model, **options) as probe:
        handle = model.a.weight.register_hook(at_the_end)
        with pytest.raises(KeyError):
            square(model, x).backward()
        handle.remove()
        refusal(probe, "nothing is recorded")
        step_is_exact(probe, model, x, options)


@modes
def test_what_was_refused_in_a_failed_backward_is_not_held_against_the_next(options):
    model, x = made()
    with torchgradx.attach(model, **options) as probe:
        loss = square(model, x) + model.a.weight.square().sum()  # no sample's
        fails(loss)
        step_is_exact(probe, model, x, options)
        fails(square(model, x), create_graph=True)
        step_is_exact(probe, model, x, options)


@modes
@pytest.mark.parametrize("fails", [int, sys.exit])
def test_a_forward_that_fails_among_those_of_the_same_samples(fails, options):
    model = Model(lambda m, x, last: last(m.a(x.transpose(0, 1)).tanh().transpose(0, 1)),
                  a=linear(), b=linear()).double()  # fmt: skip
    with torchgradx.attach(model, **options) as probe, probe.same_samples():
        x = torch.randn(N, N, 3).double()
        with pytest.raises((ValueError, SystemExit)):
            model(x, fails)
        exact_step(probe, model, x, loss=lambda m, x: square(lambda x: m(x, m.b), x))


@modes
@pytest.mark.parametrize("error", [KeyError, KeyboardInterrupt])
@pytest.mark.parametrize("net", ["tied", "reentrant"])
def test_a_forward_that_fails_leaves_nothing(net, error, options):
    model, x = made(net)
    kept = []

    def boom(*_):
        raise error

    with torchgradx.attach(model, **options) as probe:
        for _ in range(2):
            handle = model.b.register_forward_hook(boom)
            with pytest.raises(error) as caught:
                model(x)
            kept.append(caught)  # and with it the graph
            handle.remove()
            probe.reset()
            refusal(probe, "nothing is recorded")
            assert not torch.utils._python_dispatch._get_current_dispatch_mode_stack()
            step_is_exact(probe, model, x, options)
