"""Other derivatives than those of a loss, of a model that has a probe: they are the model's own."""

import copy

import pytest
import torch
import torch.autograd.forward_ad as forward_ad
from attach_oracle import (
    Model,
    close_named,
    every_mode,
    exact_or,
    loop,
    need_native,
    square,
)
from torch import nn

import torchgradx

N, T, C = 3, 5, 4


def first(rnn):
    return Model(lambda m, x: m.r(x)[0], r=rnn)


def looked_up():
    return Model(
        lambda m, x: m.l(x * m.e(torch.arange(T))), e=nn.Embedding(T, C), l=nn.Linear(C, 2)
    )


ROWS, IMAGES = (N, T, C), (N, C, 6, 6)
MODELS = {
    "linear": (lambda: nn.Linear(C, 6), ROWS),
    "a linear of vectors": (lambda: nn.Linear(C, 6), (N, C)),
    "one without bias": (lambda: nn.Linear(C, 6, bias=False), ROWS),
    "conv1d": (lambda: nn.Conv1d(T, 6, 3), ROWS),
    "conv2d": (lambda: nn.Conv2d(C, 6, 3, groups=2), IMAGES),
    "transposed": (lambda: nn.ConvTranspose2d(C, 6, 3), IMAGES),
    "layer norm": (lambda: nn.LayerNorm(C), ROWS),
    "rms norm": (lambda: nn.RMSNorm(C), ROWS),
    "group norm": (lambda: nn.GroupNorm(2, C), IMAGES),
    "instance norm": (lambda: nn.InstanceNorm2d(C, affine=True), IMAGES),
    "batch norm": (lambda: nn.BatchNorm2d(C).eval(), IMAGES),
    "prelu": (lambda: nn.PReLU(C), IMAGES),
    "embedding": (looked_up, ROWS),
    "lstm": (lambda: first(nn.LSTM(C, 6, batch_first=True)), ROWS),
    "gru": (lambda: first(nn.GRU(C, 6, batch_first=True, bidirectional=True)), ROWS),
    "rnn": (lambda: first(nn.RNN(C, 6, batch_first=True)), ROWS),
    "mlp": (lambda: nn.Sequential(nn.Linear(C, 8), nn.Tanh(), nn.Linear(8, 2)), ROWS),
    "encoder": (lambda: nn.TransformerEncoderLayer(C, 2, 8, 0.0, batch_first=True), ROWS),
}
each_model = pytest.mark.parametrize("name", MODELS)
forwards = pytest.mark.parametrize(
    "name", [m for m in MODELS if m != "encoder"]
)  # attention has no tangents


def example(name):
    make, sizes = MODELS[name]
    model = make().double()
    return model, copy.deepcopy(model), torch.randn(sizes, dtype=torch.float64)


def near(got, want):
    """Sums of fewer than a thousand terms each, none much larger than what comes of them."""
    assert got.shape == want.shape
    assert (got - want).abs().max() <= 1e3 * torch.finfo(got.dtype).eps * want.abs().max()


def exact_afterwards(probe, model, x):
    want = loop(model, square, x)
    for _ in range(2):
        model.zero_grad()
        square(model, x).backward()
        close_named(probe.norms(per="parameter"), want)


@every_mode
@forwards
def test_tangents_go_through(name, options):
    """Forward-mode differentiation."""
    need_native(options)
    model, twin, x = example(name)
    v = torch.randn_like(x)

    def tangent(m):
        with forward_ad.dual_level():
            return forward_ad.unpack_dual(m(forward_ad.make_dual(x, v))).tangent

    want = tangent(twin)
    with torchgradx.attach(model, **options) as probe:
        for _ in range(2):
            near(tangent(model), want)
            exact_afterwards(probe, model, x)


@every_mode
@forwards
def test_a_backward_beside_tangents_is_exact_or_refused(name, options):
    need_native(options)
    model, _, x = example(name)
    want = loop(model, square, x)
    with torchgradx.attach(model, **options) as probe:
        for _ in range(2):
            with forward_ad.dual_level():
                y = model(forward_ad.make_dual(x, torch.randn_like(x)))
                loss = forward_ad.unpack_dual(y).primal.square().flatten(1).sum(1).mean()
            loss.backward()
            exact_or(torchgradx.CoverageError, "tangents", probe, want)
            exact_afterwards(probe, model, x)


@every_mode
@each_model
def test_several_gradients_at_once_come_back(name, options):
    """is_grads_batched, as of a Jacobian: by the input, and by parameters."""
    need_native(options)
    model, twin, x = example(name)
    x.requires_grad_()

    def several(m):
        out = m(x)
        given = torch.stack([torch.ones_like(out), out.detach()])
        sources = [x, *m.parameters()]
        by_input = torch.autograd.grad(out, x, given, retain_graph=True, is_grads_batched=True)
        return by_input + torch.autograd.grad(out, sources, given, is_grads_batched=True)

    want = several(twin)
    with torchgradx.attach(model, **options) as probe:
        for _ in range(2):
            for a, b in zip(several(model), want, strict=True):
                near(a, b)
            exact_afterwards(probe, model, x.detach())
