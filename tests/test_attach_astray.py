"""Modules of an attached model that are called outside of its own forward: refused by name,
whatever was recorded before, and forgotten by the next record."""

import copy

import pytest
import torch
from attach_oracle import (
    NATIVE,
    Model,
    close,
    every_mode,
    loop_model,
    need_native,
    same_gradients,
    square,
)
from torch import nn
from torch.utils.checkpoint import checkpoint

import torchgradx

N, D = 4, 6


class Odd(nn.Module):
    """No kernel has it."""

    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(torch.randn(D))

    def forward(self, x):
        return torch.sin(x * self.w)


class Sequence(nn.Module):
    def __init__(self, of, **call):
        super().__init__()
        self.of, self.call = of, call

    def forward(self, x):
        rows = x.view(len(x), 2, D)
        if isinstance(self.of, nn.MultiheadAttention):
            return self.of(rows, rows, rows)[0].flatten(1)
        return self.of(rows)[0].flatten(1)


PARTS = {
    "linear": lambda: nn.Sequential(nn.Linear(2 * D, D), nn.Linear(D, D)),
    "convolution": lambda: nn.Sequential(
        nn.Unflatten(1, (2, D)), nn.Conv1d(2, 1, 3, padding=1), nn.Flatten()
    ),
    "norm": lambda: nn.LayerNorm(2 * D),
    "lstm": lambda: Sequence(nn.LSTM(D, 3, batch_first=True)),
    "attention": lambda: Sequence(nn.MultiheadAttention(D, 2, batch_first=True)),
    "no kernel": lambda: nn.Sequential(nn.Linear(2 * D, D), Odd()),
}
parts = pytest.mark.parametrize("part", PARTS)


def made(part, options):
    need_native(options)
    if options.get("backend") == "native":
        unserved = part == "no kernel" or (part == "lstm" and not options.get("fused", True))
        if unserved:
            pytest.skip("backend='native' refuses it at attach")
    body = PARTS[part]()
    width = body(torch.zeros(N, 2 * D)).shape[1]
    model = Model(lambda m, x: m.head(torch.tanh(m.body(x))), body=body, head=nn.Linear(width, 2))
    return model.double(), torch.randn(N, 2 * D).double()


def alone(model, x):
    return model.body(x).square().sum(1).mean()


def by_forward(model, x):
    return model.forward(x).square().sum(1).mean()


@every_mode
@parts
@pytest.mark.parametrize("read", ["at first", "after a read"])
@pytest.mark.parametrize("astray", [alone, by_forward])
def test_is_refused_and_then_forgotten(part, astray, read, options):
    model, x = made(part, options)
    want, twin = loop_model(model, square, x), copy.deepcopy(model)
    with torchgradx.attach(model, **options) as probe:
        if read == "after a read":
            square(model, x).backward()
            close(probe.norms(), want)
        model.zero_grad()
        astray(model, 2 * x).backward()
        with pytest.raises(torchgradx.CoverageError, match="outside of the model's own") as refusal:
            probe.norms()
        concerned = dict(model.named_parameters() if astray is by_forward else
                         model.body.named_parameters(prefix="body"))  # fmt: skip
        assert set(refusal.value.parameters) == set(concerned)
        astray(twin, 2 * x).backward()
        same_gradients(model, twin, 1e-9)  # nothing of it is taken away, not by norms only either
        square(model, x).backward()
        close(probe.norms(), want)


@every_mode
def test_beside_a_pass_that_is_not_read_yet(options):
    model, x = made("linear", options)
    with torchgradx.attach(model, **options) as probe:
        square(model, x).backward()
        alone(model, x).backward()
        with pytest.raises(torchgradx.CoverageError, match="outside of the model's own"):
            probe.norms()


@every_mode
@parts
def test_paused_it_is_no_part_of_the_record(part, options):
    model, x = made(part, options)
    want = loop_model(model, square, x)
    with torchgradx.attach(model, **options) as probe:
        square(model, x).backward()
        with probe.paused():
            loss = alone(model, x)
        loss.backward()
        close(probe.norms(), want)


@every_mode
def test_without_a_backward_it_leaves_nothing(options):
    model, x = made("linear", options)
    want = loop_model(model, square, x)
    with torchgradx.attach(model, **options) as probe:
        loss = alone(model, x)
        torch.autograd.grad(alone(model, x.clone().requires_grad_()), model.body[0].weight)
        with torch.no_grad():
            alone(model, x)
        torch.func.grad(lambda w: torch.func.functional_call(
            model.body, {"0.weight": w}, x).sum())(model.body[0].weight.detach())  # fmt: skip
        square(model, x).backward()
        del loss
        close(probe.norms(), want)


@pytest.mark.parametrize("options", [{}, NATIVE[0]], ids=str)
def test_one_that_failed_is_forgotten(options):
    model, x = made("linear", options)
    want = loop_model(model, square, x)

    def fail(g):
        raise RuntimeError("on its way")

    with torchgradx.attach(model, **options) as probe:
        square(model, x).backward()
        y = x.clone().requires_grad_()
        y.register_hook(fail)
        with pytest.raises(RuntimeError, match="on its way"):
            alone(model, y).backward()
        close(probe.norms(), want)


@every_mode
@parts
def test_through_a_checkpoint_of_the_users(part, options):
    model, x = made(part, options)
    with torchgradx.attach(model, **options) as probe:
        square(model, x).backward()
        probe.norms()
        checkpoint(model.body, x, use_reentrant=False).square().sum(1).mean().backward()
        with pytest.raises(torchgradx.CoverageError, match="outside of the model's own"):
            probe.norms()
