"""Samples of several lengths in one launch of Hopper's kernel (csrc/cuda/direct_sm90.cuh) under
emulation, against each sample's own product in float64; and the node that asks for it."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
import torch.nn.functional as F
from attach_oracle import close_named
from backends import needs_emulation, same_in_every_order
from emulation.operators import operator, operators
from segment_models import CASES
from test_emulated_sm90 import _hopper  # noqa: F401  # around each test
from test_segments import ids_of, loop, norms_of, step
from torch import nn

import torchgradx
from torchgradx import ops

pytestmark = needs_emulation
HALVES = (torch.bfloat16, torch.float16)
LENGTHS = (
    [1, 300],
    [16, 32, 5, 48],  # whole steps, and not
    [7, 1, 1, 64, 63, 65, 2],
    [129, 17, 400],  # several rectangles each
    [1] * 20 + [40],
)
FEATURES = ((8, 8), (72, 64), (200, 136), (64, 392))


def rows(lengths, inputs, outputs, dtype):
    count = sum(lengths) + 3  # and some of no sample
    a, g = torch.randn(count, inputs, dtype=dtype), torch.randn(count, outputs, dtype=dtype)
    return a, g, torch.tensor([0, *lengths]).cumsum(0).int()


def truth(a, g, starts):
    """[N, O, I + 1]"""
    a, g = F.pad(a.double(), (0, 1), value=1.0), g.double()
    return torch.stack([g[i:j].T @ a[i:j] for i, j in pairwise(starts)])


def near(actual, expected, rtol):
    assert torch.allclose(actual.double(), expected, rtol, rtol * float(expected.abs().max()))


def assert_right(given, a, g, starts, of=slice(None)):
    weight, bias, norms = given
    each = truth(a, g, starts)
    sq = each[of].square().sum(1)
    assert torch.allclose(norms[0, of].double(), sq[:, :-1].sum(1), rtol=1e-4)
    assert torch.allclose(norms[1, of].double(), sq[:, -1], rtol=1e-4)
    if of == slice(None):
        eps = torch.finfo(a.dtype).eps
        near(weight, each.sum(0)[:, :-1], eps)
        near(bias, each.sum(0)[:, -1], eps)


def served(a, g, starts, bias=True):
    longest = int(starts.diff().max())
    before = operators().launches()
    given = operator("segments_fused")(a, g, starts, longest, True, bias)
    (alone,) = operator("segments_fused")(a, g, starts, longest, False, bias)
    assert operators().launches() == before + 2
    return given, alone


@pytest.mark.grid(pairs=False)
@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("features", FEATURES, ids=str)
@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
def test_segments_are_right_when_emulated(lengths, features, dtype):
    a, g, starts = rows(lengths, *features, dtype)
    given, alone = served(a, g, starts)
    assert_right(given, a, g, starts)
    assert torch.allclose(alone, given[2], rtol=1e-5)


@pytest.mark.parametrize("count", [1, 2, 13])
def test_emulated_segments_by_any_number_of_multiprocessors_in_any_order_of_threads(count):
    a, g, starts = rows(LENGTHS[2], 200, 136, torch.bfloat16)
    with operators().multiprocessors(count):
        assert_right(served(a, g, starts)[0], a, g, starts)
        same_in_every_order(lambda: served(a, g, starts))


@pytest.mark.parametrize("poison", [float("nan"), float("inf")])
@pytest.mark.parametrize("sample", [0, 2, 4])
def test_an_emulated_segment_without_numbers_leaves_the_others_alone(poison, sample):
    a, g, starts = rows(LENGTHS[2], 72, 64, torch.bfloat16)
    a[starts[sample] : starts[sample + 1]] = poison
    g[starts[sample] : starts[sample + 1]] = poison
    others = [n for n in range(len(starts) - 1) if n != sample]
    given, alone = served(a, g, starts)
    assert_right(given, a, g, starts, others)
    assert not alone[:, sample].isfinite().any()


def test_emulated_segments_without_a_bias():
    a, g, starts = rows(LENGTHS[1], 72, 64, torch.bfloat16)
    (weight, bias, norms), alone = served(a, g, starts, False)
    each = truth(a, g, starts)[:, :, :-1]
    assert bias.numel() == 0
    assert norms.shape == alone.shape == (1, 4)
    assert torch.allclose(norms[0].double(), each.square().sum((1, 2)), rtol=1e-4)
    near(weight, each.sum(0), torch.finfo(a.dtype).eps)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_emulated_segments_of_other_dtypes_are_not_served(dtype):
    a, g, starts = rows(LENGTHS[0], 72, 64, dtype)
    assert operator("segments_fused")(a, g, starts, 300, True, True) == []


@pytest.fixture
def at_once():
    """Calls of a kernel that takes samples of several lengths, as a GPU has it: whether gradients
    are wanted, and the lengths."""
    calls = []

    def fused(a, g, starts, longest, weight, bias):
        assert (starts.dtype, a.dim(), g.dim()) == (torch.int32, 2, 2)
        parts = [(a[i:j], g[i:j]) for i, j in pairwise(starts.tolist())]
        calls.append((weight, [len(x) for x, _ in parts]))
        assert longest == max(calls[-1][1])
        each = torch.stack([y.T @ x for x, y in parts])
        sums = torch.stack([y.sum(0) for _, y in parts])
        sq_norms = torch.stack([t.flatten(1).square().sum(1) for t in (each, sums)[: 1 + bias]])
        return [each.sum(0), sums.sum(0), sq_norms] if weight else [sq_norms]

    library = torch.library.Library("torchgradx", "IMPL")
    library.impl("segments_fused", fused, "CPU")
    yield calls
    library._destroy()


@pytest.mark.skipif(not ops.NATIVE, reason="the pure-Python recorder has no kernels")
@pytest.mark.parametrize("options", [{}, {"fused": False}, {"weight_grad": False}], ids=str)
def test_samples_of_several_lengths_are_served_at_once_where_a_kernel_takes_them(at_once, options):
    make, sizes = CASES["packed"]
    model = make().model().double()
    with torchgradx.attach(model, sample_ids=ids_of, algorithm="direct", **options) as probe:
        for k, each in enumerate(sizes):
            case = make().draw(each, torch.Generator().manual_seed(k))
            with probe.paused():
                want = loop(model, case, case.loss_of_one)
            step(model, case)
            close_named(probe.norms(per="parameter"), norms_of(want))
    assert at_once
    assert all(len(set(lengths)) > 1 and not weight for weight, lengths in at_once)


@pytest.mark.skipif(not ops.NATIVE, reason="the pure-Python recorder has no kernels")
@pytest.mark.parametrize(("bias", "line"), [(True, True), (False, True), (True, False)])
def test_weight_gradients_of_several_lengths_come_from_the_same_call(at_once, bias, line):
    model = nn.Linear(256, 192, bias).double()
    x = torch.randn(230, 256, dtype=torch.float64)
    ids = torch.tensor([0] * 80 + [1] * 100 + [2] * 40 + [-1] * 10)  # padding at the end
    given = (x[None], ids[None]) if line else (x[:, None], ids)
    with torchgradx.attach(model, sample_ids=lambda *_: given[1], loss_reduction="sum") as probe:
        model(given[0]).sin().sum().backward()
        norms = probe.norms(per="parameter")

    def own(these):
        return torch.autograd.grad(model(x[these]).sin().sum(), [*model.parameters()])

    torch.testing.assert_close([p.grad for p in model.parameters()], [*own(slice(None))])
    for n in range(3):
        wants = [g.norm() for g in own(ids == n)]
        torch.testing.assert_close([norm[n] for norm in norms.values()], wants)
    assert at_once == [(True, [80, 100, 40])]


def battery():
    with operators().hopper():
        for lengths in LENGTHS:
            for features in FEATURES[1:3]:
                with operators().multiprocessors(2):
                    a, g, starts = rows(lengths, *features, torch.bfloat16)
                    assert_right(served(a, g, starts)[0], a, g, starts)
        for sample in range(7):
            test_an_emulated_segment_without_numbers_leaves_the_others_alone(float("nan"), sample)
