"""Modules that run again in backward: what their forwards do to weights, and what has changed by
then."""

import copy
import random

import pytest
import torch
import torch.nn.functional as F
from attach_oracle import (
    Model,
    a_few_modes,
    check,
    close_named,
    exact_or,
    fallback_mode,
    loop,
    need_native,
    refused,
    seeded,  # noqa: F401
    square,
)
from torch import nn

import torchgradx

N = 4


class Masked(nn.Conv2d):
    """PixelCNN's: a pixel sees those above it."""

    def forward(self, x):
        mask = torch.ones_like(self.weight)
        mask[:, :, 1, 1:], mask[:, :, 2:] = 0, 0
        self.write(mask)
        return super().forward(x)

    def write(self, mask):
        self.weight.data *= mask


class MaskedWithoutGrad(Masked):
    @torch.no_grad()
    def write(self, mask):
        self.weight.mul_(mask)


class MaskedAnew(Masked):
    def write(self, mask):
        self.weight.data = self.weight.data * mask


class Normed(nn.Module):
    """Its own parameter beside a child's weight, which it writes into."""

    def __init__(self):
        super().__init__()
        self.l, self.scale = nn.Linear(4, 4), nn.Parameter(torch.ones(4))

    def forward(self, x):
        with torch.no_grad():
            self.l.weight.copy_(F.normalize(self.l.weight, dim=1))
        return self.l(x.flatten(1)[:, :4]) * self.scale.cosh()


WRITE = {
    "a mask": lambda: [Masked(1, 4, 3, padding=1), Masked(4, 2, 3, padding=1)],
    "without grad": lambda: [MaskedWithoutGrad(1, 4, 3, padding=1)],
    "another tensor": lambda: [MaskedAnew(1, 4, 3, padding=1)],
    "a child's": lambda: [nn.Conv2d(1, 1, 1), Normed()],
}


@fallback_mode
@pytest.mark.parametrize("name", WRITE)
def test_a_forward_that_writes_into_weights_is_exact(name, options):
    torch.manual_seed(1)
    check(nn.Sequential(*WRITE[name]()), square, torch.randn(N, 1, 4, 4), **options)


class Decayed(nn.Linear):
    def forward(self, x):
        self.weight.data.mul_(0.5)
        return super().forward(x)


@a_few_modes
def test_weights_are_written_into_as_often_as_without_a_probe(options):
    model = nn.Sequential(nn.Linear(3, 3), Decayed(3, 2)).double()
    twin, x = copy.deepcopy(model), torch.randn(N, 3).double()
    with torchgradx.attach(model, **options):
        square(model, x).backward()
    square(twin, x).backward()
    for p, q in zip(model.parameters(), twin.parameters(), strict=True):
        assert torch.equal(p, q)


class Coded(nn.Parameter):
    """A frozen weight of which its module knows more, as a quantised one."""


class OfCodes(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = Coded(torch.randn(4, 4).double(), requires_grad=False)
        self.weight.scale, self.gain = 2.0, nn.Parameter(torch.randn(4).double())

    def forward(self, x):
        return x @ self.weight * self.weight.scale * self.gain.cosh()


@fallback_mode
def test_frozen_weights_of_a_kind_of_their_own_stay_what_they_are(options):
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), OfCodes()).double()
    x = torch.randn(N, 3).double()
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    alone = [torch.autograd.grad(square(model, row), list(trained.values())) for row in x.split(1)]
    norms = torch.tensor([[g.norm() for g in found] for found in alone]).double()
    with torchgradx.attach(model, **options) as probe:
        square(model, x).backward()
        close_named(probe.norms(per="parameter"), dict(zip(trained, norms.T, strict=True)))


class Adapted(nn.Linear):
    """LoRA of one's own."""

    def __init__(self):
        super().__init__(3, 4)
        self.a, self.b = (nn.Parameter(torch.randn(size)) for size in ((3, 2), (2, 4)))
        self.on = True

    def forward(self, x):
        y = super().forward(x)
        return y + x @ self.a @ self.b if self.on else y


@fallback_mode
def test_an_adapter_that_is_on_again_by_the_backward_is_not_counted(options):
    """It was off in the forward, where its parameters received nothing."""
    model = nn.Sequential(Adapted(), nn.Tanh(), nn.Linear(4, 2))

    def loss(model, x):
        model[0].on = False
        value = square(model, x)
        model[0].on = True
        return value

    refused(model, loss, torch.randn(N, 3), names=["0.a", "0.b"], match="received", **options)


@fallback_mode
def test_nor_is_one_in_a_later_pass(options):
    need_native(options)
    model = nn.Sequential(Adapted(), nn.Tanh(), nn.Linear(4, 2)).double()
    x = torch.randn(N, 3).double()
    with torchgradx.attach(model, **options) as probe:
        for off in (False, False, True):
            model[0].on = not off
            value, want = square(model, x), loop(model, square, x)
            model[0].on = True
            value.backward()
            exact_or(torchgradx.CoverageError, "0.a" if off else "never", probe, want)


class Sometimes(nn.Module):
    """Stochastic depth, by a number that torch does not draw."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.randn(4))

    def forward(self, x):
        return x + torch.sinh(x * self.scale) if random.random() < 0.5 else x


@a_few_modes
def test_paths_that_python_chooses_are_exact_or_refused(options):
    model = Model(lambda m, x: m.o(m.s(m.l(x))), l=nn.Linear(3, 4), s=Sometimes(),
                  o=nn.Linear(4, 2)).double()  # fmt: skip
    random.seed(0)
    with torchgradx.attach(model, **options) as probe:
        for _ in range(12):
            x, state = torch.randn(N, 3).double(), random.getstate()
            path = random.random()
            random.setstate(state)
            square(model, x).backward()
            random.setstate(state)
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(random, "random", lambda path=path: path)
                want = loop(model, square, x)
            random.random()
            exact_or(torchgradx.CoverageError, "s.scale", probe, want)
