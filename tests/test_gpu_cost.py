"""The cost model of a GPU, specified by a table; no GPU is needed, and none is asked."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import nn

import torchgradx
from torchgradx import ops
from torchgradx.layers.table import Parameters, find_layers
from torchgradx.plan import gpu
from torchgradx.plan.cost import Problem, plan
from torchgradx.plan.gpu import RATES, Gpu, from_properties
from torchgradx.sites import native

H200 = Gpu("H200", RATES[9, 0], 132, 1.8e9, 4.3e12)
A100 = Gpu("A100", RATES[8, 0], 108, 1.41e9, 1.6e12)
L4 = Gpu("L4", RATES[8, 9], 58, 2.0e9, 0.3e12)


def linear(n, t, i, o, device=H200, **options):
    options.setdefault("itemsize", 2)
    return Problem("linear", n, t, i, o, device=device, **options)


def conv2d(n, t, i, o, groups=1, **options):
    return Problem("conv2d", n, t, i, o, groups, itemsize=2, device=H200, **options)


VERDICTS = [
    (linear(256, 1, 784, 1024), "rank1", "both operands are read once, and that is all"),
    (linear(256, 1, 784, 1024, weight_grad=True), "fused", "one sum over all samples, and rank1"),
    (linear(8, 1024, 768, 768), "direct", "T beyond 2 I O / (I + O) = 768"),
    (linear(8, 1024, 768, 768, weight_grad=True), "fused", "the tiles are there to be squared"),
    (linear(64, 197, 768, 3072), "gram", "T far below 2 I O / (I + O) = 1229"),
    (linear(64, 197, 768, 3072, itemsize=4), "gram", "the same without tensor cores"),
    (linear(64, 64, 768, 3072), "gram", "a tile of 64 positions holds them all"),
    (linear(8, 128, 4096, 4096), "gram", "8 x 704 tiles of a gradient against 8 of a Gram"),
    (linear(2, 128, 1024, 1024), "direct", "2 tiles of a Gram leave 130 multiprocessors idle"),
    (linear(8, 128, 4096, 8), "direct", "LoRA: a gradient of one row of tiles"),
    (linear(64, 2048, 768, 8), "direct", "LoRA, long: bound by memory"),
    (linear(64, 64, 768, 3072, device=A100), "gram", "half as many tensor cores, the same order"),
    (linear(64, 64, 768, 3072, device=L4, itemsize=8), "gram", "4 FLOP of float64 a clock"),
    (conv2d(64, 3136, 576, 64), "direct", "56 x 56 pixels of 64 channels"),
    (conv2d(64, 3136, 576, 64, weight_grad=True), "fused", "and their gradient"),
    (conv2d(64, 49, 4608, 512), "gram", "7 x 7 pixels of 512 channels"),
    (conv2d(32, 3136, 9, 1, 64), "direct", "depthwise: bound by memory"),
    (conv2d(32, 49, 9, 1, 960, weight_grad=True), "fused", "depthwise, small and with gradient"),
]


@pytest.mark.parametrize(("problem", "verdict", "reason"), VERDICTS)
def test_verdicts(problem, verdict, reason):
    assert plan(problem).algorithm == verdict, f"{reason}\n{plan(problem)}"


@pytest.mark.parametrize("itemsize", [2, 4, 8])
@pytest.mark.parametrize("capability", RATES)
def test_more_of_anything_takes_no_less(capability, itemsize):
    device = Gpu("a card", RATES[capability], 100, 1.5e9, 2e12)
    sizes = {"n": 64, "t": 128, "i": 256, "o": 256}
    for algorithm in ("gram", "direct", "fused"):
        for size in sizes:
            times = [
                gpu.seconds(
                    linear(
                        **{**sizes, size: count},
                        device=device,
                        itemsize=itemsize,
                        weight_grad=algorithm == "fused",
                    ),
                    algorithm,
                )
                for count in (128, 256, 1024, 4096)  # below, other kernels serve
            ]
            assert times == sorted(times), (algorithm, size)
            assert times[0] > 0


def test_tf32_is_the_flags_and_quickens_float32_alone():
    exact, tf32 = H200, Gpu("H200", RATES[9, 0], 132, 1.8e9, 4.3e12, tf32=True)
    for itemsize, faster in ((2, False), (4, True), (8, False)):
        assert (gpu.products(tf32, itemsize) > gpu.products(exact, itemsize)) is faster


def properties(**told):
    return SimpleNamespace(**{"name": "card", "multi_processor_count": 132, **told})


def test_what_the_driver_tells_is_taken():
    told = {"clock_rate": 1_980_000, "memory_clock_rate": 3_201_000, "memory_bus_width": 6144}
    device = from_properties(properties(major=9, minor=0, **told), tf32=True)
    assert device == Gpu("card", RATES[9, 0], 132, 1.98e9, 2 * 3.201e9 * 6144 / 8, tf32=True)


@pytest.mark.parametrize(
    ("capability", "like"),
    [((8, 7), (8, 6)), ((9, 1), (9, 0)), ((13, 0), (12, 0)), ((7, 5), (8, 0))],
)
def test_an_unknown_capability_has_the_rates_of_the_newest_below(capability, like):
    major, minor = capability
    device = from_properties(properties(major=major, minor=minor), tf32=False)
    assert device.rates == RATES[like]


# From a device to its plan


def test_a_layers_plan_is_its_devices(monkeypatch):
    if not ops.NATIVE:
        pytest.skip("torchgradx._C is not built")
    monkeypatch.setattr(native, "gpu_of", lambda device: H200)
    model = nn.Linear(5, 3)
    with torchgradx.attach(model) as probe:
        model(torch.randn(4, 5)).square().mean().backward()
        probe.norms()
        assert "on H200" in probe.explain()


@pytest.mark.parametrize(
    ("built", "capability", "kind"),
    [(True, (9, 0), "linear"), (True, (7, 5), "vmap"), (False, (9, 0), "vmap")],
)
def test_a_cuda_model_takes_the_kernels_where_they_are_and_run(
    monkeypatch, built, capability, kind
):
    monkeypatch.setattr(ops, "CUDA", built)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    model = nn.Linear(5, 3)
    for p in model.parameters():
        p.__class__ = _OnCuda
    options = {"backend": "auto"}
    (layer,) = find_layers(model, Parameters(model), options)
    assert layer.kind == kind


class _OnCuda(nn.Parameter):
    """A parameter that says it is elsewhere: enough to choose a rule by."""

    @property
    def device(self):
        return torch.device("cuda", 0)
