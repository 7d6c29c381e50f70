"""No operator holds N weight gradients, T x T numbers, or all patches, and no step, the first
included, another copy of its activations: peak memory is measured.

By the high-water mark of resident memory of a process of its own, with all allocators in it.
"""

import ctypes
import json
import os
import sys
from functools import partial
from itertools import product
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from attach_models import Model
from backends import BACKENDS, parameters
from oracle import Conv2d, Linear
from oracle_gather import Gather
from processes import python
from torch import nn

import torchgradx

MIB = 2**20
WIDE = Linear(32, 2, 1024, 1024)  # N gradients: 128 MiB
LONG = Linear(1, 5120, 8, 8)  # T x T: 100 MiB
MANY = Linear(40, 768, 8, 8)  # N of T x T: 90 MiB
IMAGE = Conv2d(28, 8, 8, (64, 64), (5, 5), padding=(2, 2))  # patches: 87 MiB
SMALL = Conv2d(160, 256, 64, (4, 4), (3, 3), padding=(1, 1))  # N gradients: 90 MiB
CASES = {
    "linear-direct-wide": ("direct", WIDE), "linear-fused-wide": ("fused", WIDE),
    "linear-gram-wide": ("gram", WIDE), "linear-gram-long": ("gram", LONG),
    "linear-gram-many": ("gram", MANY), "conv2d-direct-image": ("direct", IMAGE),
    "conv2d-fused-image": ("fused", IMAGE), "conv2d-direct-small": ("direct", SMALL),
    "conv2d-fused-small": ("fused", SMALL), "conv2d-gram-small": ("gram", SMALL),
}  # fmt: skip
# As [N, T, G, K], 128 MiB: N gradients of the weight or the bias would be 64 MiB.
ELEMENTWISE = {
    "layer_norm": (512, 2, 1, 1 << 15),
    "group_norm": (512, 2, 1 << 11, 16),
    "scale": (512, 2, 1 << 15, 1),
}
LOOKED_UP = Gather(64, 512, 1 << 40, 1024)  # a sum for each id: 128 MiB
TIED = Gather(16, 256, 2048, 1024)  # N gradients of the table: 128 MiB
# What any of these may take beyond its operands: a few chunks of the reference, or a few tiles,
# images and weight gradients a thread; less than what materialising takes in any case above.
BOUND = 56 * MIB
SLOW = {"reference": [pytest.mark.long]}


def _extra_bytes(function):
    status = Path("/proc/self/status")

    def kilobytes(field):
        line = next(s for s in status.read_text().splitlines() if s.startswith(field))
        return int(line.split()[1])

    ctypes.CDLL(None).malloc_trim(0)  # what was freed goes back: a case starts from its operands
    Path("/proc/self/clear_refs").write_text("5")  # resets the high-water mark
    before = kilobytes("VmRSS")
    function()
    return 1024 * (kilobytes("VmHWM") - before)


def _newer_cases(backend):
    for layer, (n, t, g, k) in ELEMENTWISE.items():
        x, b = torch.ones(2, n, t, g, k)
        norms, fused = backend.operator("affine_sq_norms"), backend.operator("affine_fused")
        over_positions, frozen = layer == "group_norm", layer == "scale"
        statistics = (None, None)
        if not frozen:
            moments = partial(backend.operator("moments"), x, 1.0, True, over_positions)
            yield f"{layer}-moments", moments
            statistics = moments()
        yield f"{layer}-norms", partial(norms, x, b, *statistics, True)
        weight = torch.ones(g, k)
        yield f"{layer}-fused", partial(fused, x, b, weight, *statistics, frozen, None, True)
    yield "prelu-norms", partial(backend.operator("prelu_sq_norms"), x, b)
    yield "prelu-fused", partial(backend.operator("prelu_fused"), x, b, weight, None)
    indices, rows = LOOKED_UP.operands(torch.float32, "integers")
    yield "looked-up", partial(backend.operator("gather_sq_norms"), indices, rows, None)
    tied = (*TIED.operands(torch.float32, "integers"), *TIED.linear(256, torch.float32, "integers"))
    yield "tied", partial(backend.operator("gather_dots"), *tied, None)


def _measure(name):
    backend, extra = BACKENDS[name], {}
    torch.set_num_threads(2)
    for case, (algorithm, problem) in CASES.items():
        tiny = problem._replace(n=2, t=2) if isinstance(problem, Linear) else problem._replace(n=2)
        for p in (tiny, problem):  # first what stays: thread pools, BLAS buffers
            operands = p.operands(torch.float32, "integers")
            extra[case] = _extra_bytes(partial(backend.norms, algorithm, *operands, p))
    for case, call in _newer_cases(backend):
        extra[case] = _extra_bytes(call)
    a, b = WIDE.operands(torch.float32, "integers")
    extra["materialised"] = _extra_bytes(lambda: (b.mT @ a).square().sum((1, 2)))
    return extra


def _deep():
    """Of 64 samples: activations of 4 MiB, 12 of them saved."""
    layers = [layer for _ in range(12) for layer in (nn.Linear(256, 256), nn.Tanh())]
    return nn.Sequential(*layers), torch.randn(64, 64, 256)


MODELS = {
    "deep": _deep,
    # Of 64 samples: 4 MiB of logits, and N gradients of the table 256 MiB.
    "tied": lambda: (Model(lambda m, ids: F.linear(torch.tanh(m.table(ids)), m.table.weight),
                           table=nn.Embedding(8192, 128)), torch.arange(128).view(64, 2)),
}  # fmt: skip


def _measure_steps(name):
    torch.set_num_threads(1)
    model, x = MODELS[name]()
    extra = {}
    for way, n in product(("plain", "fused", "scoring"), (2, 64)):  # what stays, on two samples
        probe = None if way == "plain" else torchgradx.attach(model, weight_grad=way == "fused")

        def step(n=n):
            model.zero_grad()
            model(x[:n]).square().mean().backward()

        extra[way] = [_extra_bytes(step) for _ in range(2)]
        if probe:
            probe.norms()
            probe.remove()
    return extra


def _measured(what):
    at_once = {"MALLOC_MMAP_THRESHOLD_": "65536"}  # goes back what is freed
    result = python("-W", "ignore", __file__, what, **at_once)
    assert result.returncode == 0, result.stderr
    return json.loads(result.stdout)


in_linux = pytest.mark.skipif(not os.access("/proc/self/clear_refs", os.W_OK), reason="needs /proc")


@in_linux
@pytest.mark.parametrize("model", MODELS)
def test_a_step_with_norms_holds_no_more_than_one_without(model):
    extra = _measured(model)
    plain = max(extra.pop("plain"))
    assert plain > 2 * 4 * MIB, "the measurement does not see memory"
    over = {
        way: f"{most / MIB:.0f} MiB beside {plain / MIB:.0f}"
        for way, most in ((way, max(taken)) for way, taken in extra.items())
        if most > plain + 2 * 4 * MIB  # gradients on their way down, while the graph is kept
    }
    assert not over


@in_linux
@pytest.mark.parametrize(
    "backend",
    [pytest.param(*p.values, id=p.id, marks=[*p.marks, *SLOW.get(p.id, ())]) for p in parameters()],
)
def test_extra_memory_is_bounded(backend):
    if backend.name == "emulated":
        pytest.skip("test_emulated.py counts what CUDA operators allocate")
    if backend.device != "cpu":
        pytest.skip("measures resident memory of the CPU")
    extra = _measured(backend.name)
    assert extra.pop("materialised") >= 128 * MIB, "the measurement does not see memory"
    assert set(CASES) < set(extra)
    results = {case: 128 * MIB for case in extra if case.startswith((*ELEMENTWISE, "prelu"))}
    over = {
        case: f"{taken / MIB:.0f} MiB"
        for case, taken in extra.items()
        if taken > BOUND + (results[case] if case.endswith("-fused") and case in results else 0)
    }
    assert not over


if __name__ == "__main__":
    what = sys.argv[1]
    print(json.dumps(_measure_steps(what) if what in MODELS else _measure(what)))
