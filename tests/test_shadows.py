"""What operations make of other samples, beside what they make."""

import gc

import pytest
import torch
from attach_oracle import seeded  # noqa: F401
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from torchgradx.proof.operation import Step
from torchgradx.proof.shadows import Shadows

SIZES = [2, 3, 6, 7, 40]


class Watched(TorchDispatchMode):
    def __init__(self, shadows):
        super().__init__()
        self.shadows = shadows

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        operands = [t for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)]
        made = self.shadows.run(Step(func, args, kwargs or {}, operands, [False] * len(operands)))
        out = func(*args, **(kwargs or {}))
        self.shadows.keep(out, made)
        return out


def mixed(made, n, turned=False):
    x = torch.randn(3, 2 * n).t() if turned else torch.randn(2 * n, 3)
    shadows = Shadows(n, [x], len(x))
    with Watched(shadows):
        out = made(x)
    return shadows.mixed([out], n)


@pytest.mark.parametrize("n", SIZES)
def test_any_sample_that_reaches_others_is_seen(n):
    for sample in range(n):
        assert mixed(lambda x, s=sample: x + 1e-3 * x[2 * s], n)


@pytest.mark.parametrize("n", SIZES)
def test_rows_that_go_to_the_next_sample_are_seen(n):
    assert mixed(lambda x: x.roll(2, 0), n)


@pytest.mark.parametrize("n", SIZES)
def test_rows_of_its_own_are_no_others(n):
    assert not mixed(lambda x: x + x.view(n, 2, 3).flip(1).flatten(0, 1), n)
    assert not mixed(lambda x: x.view(n, 2, 3).sum(1), n)


def in_place(x):
    y = torch.zeros_like(x).t()
    y[:, 1:].copy_(x.t()[:, 1:])
    y.sub_(y.mean(1, keepdim=True))
    return y.t()


@pytest.mark.parametrize("n", SIZES)
def test_what_is_written_through_views_is_followed(n):
    assert mixed(in_place, n)


@pytest.mark.parametrize("n", SIZES)
def test_rows_may_lie_in_memory_otherwise(n):
    assert mixed(lambda x: x - x.t().view(-1).mean(), n, turned=True)
    assert not mixed(lambda x: x.t().view(-1).exp().view(3, -1).t(), n, turned=True)


@pytest.mark.parametrize("n", SIZES)
def test_numbers_are_drawn_alike(n):
    assert not mixed(lambda x: x + torch.normal(x.detach(), 1.0), n)


def test_what_is_no_more_is_let_go():
    def alive():
        gc.collect()
        return sum(type(t) is torch.Tensor and t.shape == (12, 5) for t in gc.get_objects())

    x = torch.randn(12, 5)
    shadows = Shadows(6, [x], len(x))
    with Watched(shadows):
        for _ in range(500):
            x = x + 1
    assert alive() < 500
