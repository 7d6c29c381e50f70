"""Tensors that are written into between the backward and the reading: static input buffers, a given
gradient. The norms are those of before, or it is refused by name."""

import contextlib

import pytest
import torch
import torch.nn.functional as F
from attach_oracle import (
    Model,
    close,
    every_mode,
    exact_or,
    loop,
    need_native,
    per_model,
    square,
)
from torch import nn

import torchgradx

N, D = 4, 5
WORDS = "written into before"


def bare(m, x):
    return m.o(torch.tanh(x @ m.w))


def tied(m, x):
    return F.linear(torch.tanh(m.o(m.e(x))), m.e.weight)


MODELS = {
    "linear": lambda: nn.Sequential(nn.Linear(D, 4), nn.Tanh(), nn.Linear(4, 2)),
    "convolution": lambda: nn.Sequential(
        nn.Unflatten(1, (1, D)), nn.Conv1d(1, 2, 3), nn.Tanh(), nn.Flatten()
    ),
    "norm": lambda: nn.Sequential(nn.LayerNorm(D), nn.Tanh()),
    "bare": lambda: Model(bare, w=torch.randn(D, 4), o=nn.Linear(4, 2)),
    "tied": lambda: Model(tied, e=nn.Embedding(7, D), o=nn.Linear(D, D)),
}
models = pytest.mark.parametrize("name", MODELS)


def made(name, options):
    need_native(options)
    model = MODELS[name]().double()
    tables = any(isinstance(m, nn.Embedding) for m in model.modules())
    if "bare" in name and options.get("backend") == "native":
        pytest.skip("backend='native' refuses it at attach")
    if tables and (options.get("backend") == "vmap" or not torchgradx.ops.NATIVE):
        pytest.skip("refused: what runs again by vmap has no functional use beside its calls")
    x = torch.randint(7, (N, 3)) if tables else torch.randn(N, D).double()
    return model, x, loop(model, square, x)


def refill(*buffers):
    for x in buffers:
        x.random_(7) if not x.is_floating_point() else x.normal_()


@every_mode
@models
@pytest.mark.parametrize("retain", [False, True])
def test_an_input_after_a_backward(retain, name, options):
    model, x, want = made(name, options)
    with torchgradx.attach(model, **options) as probe:
        for _ in range(2):
            buffer = x.clone()
            square(model, buffer).backward(retain_graph=retain)
            refill(buffer)
            if retain:
                exact_or(torchgradx.CoverageError, WORDS, probe, want)
            else:
                close(probe.norms(), per_model(want))


@every_mode
@models
def test_inputs_of_the_same_samples(name, options):
    model, x, _ = made(name, options)
    z = x.flip(-1)

    def both(m, x, z):
        return (m(x).flatten(1).square() + m(z).flatten(1).sin()).sum(1).mean()

    want = loop(model, both, x, z)
    with torchgradx.attach(model, **options) as probe:
        for _ in range(2):
            buffers = x.clone(), z.clone()
            with probe.same_samples():
                value = both(model, *buffers)
            value.backward()
            refill(*buffers)
            exact_or(torchgradx.CoverageError, WORDS, probe, want)


@every_mode
def test_a_gradient_that_was_given(options):
    model, x, _ = made("linear", options)
    out = model(x)
    given = torch.randn_like(out)

    def loss(m, x, g):
        return (m(x) * g).sum(1).mean()

    want = loop(model, loss, x, given)
    with torchgradx.attach(model, **options) as probe:
        for _ in range(2):
            buffer = given / N
            model(x).backward(buffer, retain_graph=True)
            buffer.zero_()
            exact_or(torchgradx.CoverageError, WORDS, probe, want)


@pytest.mark.parametrize("options", [{}, {"backend": "vmap"}], ids=str)
@models
def test_an_input_before_clipping(name, options):
    model, x, _ = made(name, options)

    def clipped(write):
        model.zero_grad()
        buffer = x.clone()
        square(model, buffer).backward()
        if write:
            refill(buffer)
        probe.clip_grad_norm_(0.1)
        return [p.grad.clone() for p in model.parameters()]

    with torchgradx.attach(model, clip=True, **options) as probe:
        want = clipped(False)
        with contextlib.suppress(torchgradx.CoverageError):
            assert all(map(torch.equal, clipped(True), want))
