"""Modules that run again in backward: what their forwards do to weights, what has changed since."""

import copy
import random

import numpy as np
import pytest
import torch
from attach_models import Model, square
from attach_modes import fallback_mode
from attach_oracle import check, close_named, joined, loop, loop_within
from attach_steps import read_or_refused, refusal
from clip_oracle import bounded, gradients, is_sum, norms_of, refuses, weighted
from test_attach_modules import squares
from torch import nn

import torchgradx

N = 4


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


MEMORIES = {
    "a dict": (in_a_dict, dict),
    "a tensor": (in_a_tensor, lambda: torch.zeros(())),
    "a generator": (lambda kept, y: y * torch.rand(4, generator=kept).to(y),
                    lambda: torch.Generator().manual_seed(0)),
}  # fmt: skip


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
            alone = loop_within(before, squares, x)
            value, plain = square(model, x), square(twin, x)
            value.backward()
            assert torch.equal(value, plain)
            read_or_refused(probe, alone, "1.scale")


@fallback_mode
@pytest.mark.parametrize("view", [False, True])
def test_what_a_module_writes_into_its_argument_is_written_once(view, options):
    def add(m, x):
        x += m.b
        return m.o(x * m.l(x))

    parts = {"b": nn.Parameter(torch.randn(4)), "l": nn.Linear(4, 4), "o": nn.Linear(4, 2)}
    model = Model(lambda m, x: m.m(m.i(x).mT if view else m.i(x)), i=nn.Linear(3, 4),
                  m=Model(add, **parts)).double()  # fmt: skip
    check(model, square, torch.randn(N, 4, 3).double(), **options)


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
    """Clipping runs it again where its gradients by sample take more memory than its input."""
    model = nn.Sequential(nn.Linear(3, 4), Stateful(), nn.Linear(4, 2)).double()
    x = torch.randn(N, 3).double()
    rows = [gradients(model, square, row)[0] for row in x.split(1)]
    clipped = weighted(rows, bounded(norms_of(rows, "model"), 0.1), "model")
    with torchgradx.attach(model, clip=True, layout={"1": "batch"}, **options) as probe:
        square(model, x).backward()
        probe.clip_grad_norm_(0.1)
    is_sum(model, {name: g / N for name, g in clipped.items()})


def sometimes(draw):
    """Stochastic depth, by a number that torch does not draw."""
    return Model(lambda m, x: x + torch.sinh(x * m.scale) if draw() < 0.5 else x,
                 scale=torch.randn(4))  # fmt: skip


@fallback_mode
@pytest.mark.parametrize("draw", [random.random, np.random.rand], ids=["Python", "NumPy"])
def test_paths_that_others_numbers_choose_are_the_forwards(draw, options):
    model = nn.Sequential(nn.Linear(3, 4), sometimes(draw), nn.Linear(4, 2)).double()
    with torchgradx.attach(model, **options) as probe:
        for seed in range(6):
            x = torch.randn(N, 3).double()
            alone = []
            for row in x.split(1):
                seeded_by(seed)
                alone.append(loop(model, square, row))
            seeded_by(seed)
            value = square(model, x)
            random.random(), np.random.rand()
            after = random.getstate(), np.random.get_state()[1].tolist()
            value.backward()
            assert (random.getstate(), np.random.get_state()[1].tolist()) == after
            close_named(probe.norms(per="parameter"), joined(alone))
            model.zero_grad()


def seeded_by(seed):
    random.seed(seed)
    np.random.seed(seed)


MANY, WIDE = 6, 16
SAID = {"*": "batch"}  # a module whose layout is said is run again, and not asked at its nodes
HALVES = {
    "bfloat16": (torch.bfloat16, None),
    "float16": (torch.float16, None),
    "autocast to bfloat16": (torch.float32, torch.bfloat16),
    "autocast to float16": (torch.float32, torch.float16),
}
in_halves = pytest.mark.parametrize(("dtype", "autocast"), HALVES.values(), ids=HALVES)


def matrix(way):
    more = {"calls": 0, "on": False, "drawing": torch.Generator().manual_seed(0)}
    return Model(way, w=torch.randn(WIDE, WIDE) / 4, **more)


def drops(m, x):
    return torch.tanh(x * (torch.rand(x.shape, generator=m.drawing) < 0.7).to(x) @ m.w)


def switched(m, x):
    """On in the forward, as by a context manager around it."""
    return torch.tanh((2 * x if m.on else x) @ m.w)


def drifts(m, x):
    m.calls += 1
    return torch.tanh(x @ m.w) * (1 + 1e-3 * m.calls)


def ahead(module, x, autocast=None):
    """Loss, with all that is switched off again by the backward."""
    module[1].on = True
    with torch.autocast("cpu", autocast or torch.bfloat16, enabled=autocast is not None):
        y = module(x)
    module[1].on = False
    return y.to(torch.promote_types(y.dtype, torch.float32)).square().sum() / len(x)


@fallback_mode
@in_halves
@pytest.mark.parametrize("way", [drops, switched])
def test_halves_show_another_way_too(way, dtype, autocast, options):
    """By sums of gradients, of 64 roundings each, they do not."""
    model = nn.Sequential(nn.Linear(WIDE, WIDE), matrix(way), nn.Linear(WIDE, 4)).to(dtype)
    with torchgradx.attach(model, layout=SAID, **options) as probe:
        ahead(model, torch.randn(MANY, WIDE).to(dtype), autocast).backward()
        refusal(probe, "other outputs")


@fallback_mode
@pytest.mark.parametrize("n", [8, 2048])
def test_a_small_drift_shows_at_any_number_of_samples(n, options):
    model = nn.Sequential(nn.Linear(WIDE, WIDE), matrix(drifts), nn.Linear(WIDE, 4))
    with torchgradx.attach(model, layout=SAID, **options) as probe:
        ahead(model, torch.randn(n, WIDE)).backward()
        refusal(probe, "other outputs")


FACTOR = {"now": 1.0}


@pytest.mark.parametrize("options", [{}, {"fused": False}], ids=["default", "fused=False"])
def test_clipping_after_a_switch_is_refused_and_leaves_grad(options, monkeypatch):
    model = nn.Sequential(
        nn.Linear(WIDE, WIDE),
        matrix(lambda m, x: torch.tanh(x @ m.w) * FACTOR["now"]),
        nn.Linear(WIDE, 4),
    )
    with torchgradx.attach(model, layout=SAID, clip=True, **options) as probe:
        square(model, torch.randn(MANY, WIDE)).backward()
        monkeypatch.setitem(FACTOR, "now", 3.0)
        words = r"(?s)other outputs.*Concerned: 1\.w$"
        refuses(torchgradx.CoverageError, words, probe, model, 0.1)
