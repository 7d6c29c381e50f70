"""The cost models of CPUs and GPUs, specified by tables: integers in, a verdict out."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn

import torchgradx
from torchgradx import ops
from torchgradx.layers.table import Parameters, find_layers
from torchgradx.plan.cost import Problem, plan
from torchgradx.plan.gpu import CARDS, Gpu, from_properties
from torchgradx.sites import native


def linear(n, t, i, o, weight_grad=False):
    return Problem("linear", n, t, i, o, weight_grad=weight_grad)


def conv2d(n, t, i, o, groups=1, weight_grad=False):
    return Problem("conv2d", n, t, i, o, groups, weight_grad=weight_grad)


VERDICTS = [
    (linear(256, 1, 784, 1024), "rank1"),  # an MLP: two row sums
    (linear(256, 1, 784, 1024, True), "fused"),  # a GEMM over all samples, and row sums
    (linear(16, 2, 512, 512), "gram"),  # 3 (I + O) against 2 I O
    (linear(16, 4, 512, 512, True), "fused"),  # a Gram inside: below T = 16 no tile is squared
    (linear(8, 1024, 512, 512), "direct"),  # past T = 2 I O / (I + O) a Gram is dearer
    (linear(8, 1024, 512, 512, True), "fused"),  # the gradient's tiles are there to be squared
    (conv2d(64, 1024, 27, 32, weight_grad=True), "fused"),  # a CNN's first layer
    (conv2d(32, 256, 9, 1, groups=64), "direct"),  # depthwise: nine numbers a channel
    (conv2d(16, 4, 4608, 512), "gram"),  # 2x2 pixels of 512 channels
]


# On a GPU: none is needed, and none is asked
H200 = Gpu("H200", CARDS[9, 0], 132, 1.8e9, 4.3e12)
L4 = Gpu("L4", CARDS[8, 9], 58, 2.0e9, 0.3e12)


def on_gpu(kind, n, t, i, o, groups=1, device=H200, itemsize=2, **options):
    return Problem(kind, n, t, i, o, groups, device=device, itemsize=itemsize, **options)


ON_A_GPU = [
    (on_gpu("linear", 256, 1, 784, 1024), "rank1"),  # both operands are read once, and that is all
    (on_gpu("linear", 256, 1, 784, 1024, weight_grad=True), "fused"),  # one sum, and rank1
    (on_gpu("linear", 8, 1024, 768, 768), "direct"),  # T beyond 2 I O / (I + O) = 768
    (on_gpu("linear", 8, 1024, 768, 768, weight_grad=True), "fused"),  # the tiles are there
    (on_gpu("linear", 64, 197, 768, 3072), "gram"),  # T far below 2 I O / (I + O) = 1229
    (on_gpu("linear", 8, 128, 4096, 4096), "gram"),  # 8 x 704 tiles of a gradient, 8 of a Gram
    (on_gpu("linear", 2, 128, 1024, 1024), "direct"),  # 2 of a Gram leave 130 multiprocessors idle
    (on_gpu("linear", 64, 64, 768, 3072, device=L4, itemsize=8), "gram"),  # 4 FLOP a clock
    (on_gpu("conv2d", 64, 3136, 576, 64), "direct"),  # 56 x 56 pixels of 64 channels
    (on_gpu("conv2d", 64, 3136, 576, 64, weight_grad=True), "fused"),  # and their gradient
    (on_gpu("conv2d", 64, 49, 4608, 512), "gram"),  # 7 x 7 pixels of 512 channels
    (on_gpu("conv2d", 32, 49, 9, 1, 960, weight_grad=True), "fused"),  # depthwise, small
]


@pytest.mark.parametrize(("problem", "verdict"), VERDICTS + ON_A_GPU)
def test_verdicts(problem, verdict):
    assert plan(problem).algorithm == verdict, plan(problem)


def properties(**told):
    return SimpleNamespace(**{"name": "card", "multi_processor_count": 132, **told})


def test_what_the_driver_tells_is_taken():
    told = {"clock_rate": 1_980_000, "memory_clock_rate": 3_201_000, "memory_bus_width": 6144}
    device = from_properties(properties(major=9, minor=0, **told), tf32=True)
    assert device == Gpu("card", CARDS[9, 0], 132, 1.98e9, 2 * 3.201e9 * 6144 / 8, tf32=True)


@pytest.mark.parametrize(
    ("capability", "like"),
    [((8, 7), (8, 6)), ((9, 1), (9, 0)), ((13, 0), (12, 0)), ((7, 5), (8, 0))],
)
def test_an_unknown_capability_has_the_rates_of_the_newest_below(capability, like):
    major, minor = capability
    assert from_properties(properties(major=major, minor=minor), tf32=False).rates == CARDS[like]


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
def test_a_cuda_model_takes_kernels_where_they_are_and_run(monkeypatch, built, capability, kind):
    monkeypatch.setattr(ops, "CUDA", built)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    model = nn.Linear(5, 3)
    for p in model.parameters():
        p.__class__ = _OnCuda
    (layer,) = find_layers(model, Parameters(model), {"backend": "auto"})
    assert layer.kind == kind


class _OnCuda(nn.Parameter):
    """A parameter that says it is elsewhere: enough to choose a rule by."""

    @property
    def device(self):
        return torch.device("cuda", 0)
