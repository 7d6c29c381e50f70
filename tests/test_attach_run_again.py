"""Modules that run again in backward: what their forwards do to weights, and what has changed by
then."""

import copy
import random
from collections import deque
from types import MethodType, SimpleNamespace

import numpy as np
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


class Memory(nn.Module):
    """One that keeps something of each call, other than in buffers."""

    def __init__(self, how, made):
        super().__init__()
        self.how, self.kept, self.scale = how, made(), nn.Parameter(torch.randn(4))

    def forward(self, x):
        return self.how(self.kept, torch.sinh(x * self.scale))


def in_a_dict(kept, y):
    last, kept["last"] = kept.get("last", 0), y.detach()
    return y + 0.1 * last


def in_a_tensor(kept, y):
    kept += 1
    return y * kept


def in_an_object(kept, y):
    kept.rows.append(y.detach())
    kept.steps += 1
    return y + torch.stack(list(kept.rows)).mean(0)


def drawn(kept, y):
    return y * torch.rand(4, generator=kept).to(y)


def by_rows(model, x):
    """The norms of each sample's part in the loss of all, which what is kept may depend on."""
    names, parameters = zip(*model.named_parameters(), strict=True)
    parts = model(x).square().flatten(1).sum(1)
    found = [torch.autograd.grad(part, parameters, retain_graph=True) for part in parts]
    norms = torch.tensor([[g.norm() for g in gradients] for gradients in found]).double()
    return dict(zip(names, norms.T, strict=True))


class Rows(list):
    """Of one's own."""


MEMORIES = {
    "a dict": (in_a_dict, dict),
    "a tensor": (in_a_tensor, lambda: torch.zeros(())),
    "an object": (in_an_object, lambda: SimpleNamespace(rows=deque(maxlen=2), steps=0)),
    "an object of kinds": (
        in_an_object,
        lambda: SimpleNamespace(
            rows=Rows(), steps=0, dtype=torch.float64, device=torch.device("cpu")
        ),
    ),
    "a generator": (drawn, lambda: torch.Generator().manual_seed(0)),
}


@fallback_mode
@pytest.mark.parametrize("name", MEMORIES)
def test_what_a_module_keeps_of_its_calls_is_as_without_a_probe(name, options):
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(3, 4), Memory(*MEMORIES[name]), nn.Linear(4, 2)).double()
    twin = nn.Sequential(nn.Linear(3, 4), Memory(*MEMORIES[name]), nn.Linear(4, 2)).double()
    twin.load_state_dict(model.state_dict())
    with torchgradx.attach(model, **options) as probe:
        for _ in range(3):
            x, before = torch.randn(N, 3).double(), copy.deepcopy(twin)
            alone = by_rows(before, x)
            value, plain = square(model, x), square(twin, x)
            value.backward()
            assert torch.equal(value, plain)
            exact_or(torchgradx.CoverageError, "1.scale", probe, alone)


class Stateful(nn.Module):
    """Of the batch before, if that had as many samples; else it begins anew."""

    def __init__(self):
        super().__init__()
        self.scale, self.state = nn.Parameter(torch.randn(2, 4)), None

    def forward(self, x):
        state = self.state if self.state is not None and len(self.state) == len(x) else 0
        y = torch.sinh(x * self.scale.sum(0) + 0.5 * state)
        self.state = y.detach()
        return y


@fallback_mode
def test_what_is_clipped_had_the_forwards_state(options):
    """Sample by sample it runs without one, as in the first pass, and as a batch with another.

    It runs again where its layout is said, and its gradients by sample would take more memory than
    its input.
    """
    if options.get("weight_grad") is False:
        pytest.skip("nothing is clipped")
    model = nn.Sequential(nn.Linear(3, 4), Stateful(), nn.Linear(4, 2)).double()
    x = torch.randn(N, 3).double()
    with torchgradx.attach(model, clip=True, layout={"1": "batch"}, **options) as probe:
        square(model, x).backward()
        with pytest.raises(torchgradx.CoverageError, match=r"1\.scale"):
            probe.clip_grad_norm_(0.1)


class Cache:
    def __init__(self):
        self.rows = []


@fallback_mode
def test_what_it_keeps_in_an_argument_too(options):
    def forward(m, x):
        cache = Cache()
        y = m.s(m.l(x), cache)
        assert len(cache.rows) == 1
        m.caches.append(cache)
        return m.o(y)

    class Keeps(nn.Module):
        def __init__(self):
            super().__init__()
            self.scale = nn.Parameter(torch.randn(4))

        def forward(self, x, cache):
            cache.rows.append(x.detach())
            return torch.sinh(x * self.scale)

    model = Model(forward, l=nn.Linear(3, 4), s=Keeps(), o=nn.Linear(4, 2)).double()
    model.caches, x = [], torch.randn(N, 3).double()
    want = loop(model, square, x)
    with torchgradx.attach(model, **options) as probe:
        square(model, x).backward()
        close_named(probe.norms(per="parameter"), want)
    assert [len(cache.rows) for cache in model.caches] == [1]


@fallback_mode
def test_a_forward_that_was_put_onto_a_module_is_its_stand_ins(options):
    """transformers and accelerate put some there."""

    class Counts(nn.Module):
        def __init__(self):
            super().__init__()
            self.scale, self.calls = nn.Parameter(torch.randn(4)), 0
            self.register_buffer("seen", torch.zeros(()))

    def forward(self, x):
        self.calls += 1
        self.seen += 1
        return torch.sinh(x * self.scale)

    model = nn.Sequential(nn.Linear(3, 4), Counts(), nn.Linear(4, 2)).double()
    model[1].forward, x = MethodType(forward, model[1]), torch.randn(N, 3).double()
    want = by_rows(model, x)
    model[1].calls = 0
    model[1].seen.zero_()
    with torchgradx.attach(model, **options) as probe:
        square(model, x).backward()
        close_named(probe.norms(per="parameter"), want)
    assert (model[1].calls, float(model[1].seen)) == (1, 1)


class Sometimes(nn.Module):
    """Stochastic depth, by a number that torch does not draw."""

    def __init__(self, draw):
        super().__init__()
        self.draw, self.scale = draw, nn.Parameter(torch.randn(4))

    def forward(self, x):
        return x + torch.sinh(x * self.scale) if self.draw() < 0.5 else x


@fallback_mode
@pytest.mark.parametrize("draw", [random.random, np.random.rand], ids=["Python", "NumPy"])
def test_paths_that_others_numbers_choose_are_the_forwards(draw, options):
    model = nn.Sequential(nn.Linear(3, 4), Sometimes(draw), nn.Linear(4, 2)).double()
    with torchgradx.attach(model, **options) as probe:
        for seed in range(6):
            x = torch.randn(N, 3).double()
            want = None
            for row in x.split(1):
                seeded_by(seed)
                found = loop(model, square, row)
                want = found if want is None else {k: torch.cat([want[k], found[k]]) for k in want}
            seeded_by(seed)
            value = square(model, x)
            random.random(), np.random.rand()
            after = random.getstate(), np.random.get_state()[1].tolist()
            value.backward()
            assert (random.getstate(), np.random.get_state()[1].tolist()) == after
            close_named(probe.norms(per="parameter"), want)
            model.zero_grad()


def seeded_by(seed):
    random.seed(seed)
    np.random.seed(seed)
