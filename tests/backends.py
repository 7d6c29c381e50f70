"""Who computes: a registry, so that a CUDA or an emulated backend is one more entry.

A backend offers the raw operators of csrc/operators/ops.h by name, on a device.
"""

import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from emulation import build, operators
from emulation.emulator import ORDERS
from oracle import DTYPES, Conv2d
from torch.utils._pytree import tree_leaves

from torchgradx import extension, ops, reference

LINEAR_ALGORITHMS = ("rank1", "gram", "direct", "fused")
CONV2D_ALGORITHMS = ("gram", "direct", "fused")
OPERATORS = reference.__all__
each_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: str(d)[6:])
each_kind = pytest.mark.parametrize("kind", ["integers", "gaussians"])
CUDA_OPERATORS = (
    *("rank1_sq_norms", "gram_sq_norms", "direct_sq_norms", "bias_sq_norms", "linear_fused"),
    *("conv2d_gram_sq_norms", "conv2d_direct_sq_norms", "conv2d_fused"),
    *("linear_scaled", "conv2d_scaled", "affine_sum"),
    *("affine_sq_norms", "affine_fused", "affine_by_sample", "prelu_sq_norms", "prelu_fused"),
    *("moments", "turned", "gather_sq_norms", "gather_dots"),
)


@dataclass(frozen=True)
class Backend:
    name: str
    operator: Callable[[str], Callable[..., Any]]
    device: str = "cpu"
    missing: str = ""  # why it is not here

    def norms(self, algorithm, a, b, problem=None, bias=True):
        """sq_norms [1 + bias, N] of a Linear's operands [N, T, I] and [N, T, O], or of a
        convolution's [N, C, H, W] and [N, O, H', W']"""
        if algorithm == "fused":
            return self.fused(a, b, problem, None, bias)[2]
        name, geometry = _call(problem)
        return self.operator(f"{name}{algorithm}_sq_norms")(a, b, *geometry, bias)

    def fused(self, a, b, problem=None, scale=None, bias=True):
        """grad_weight, grad_bias, sq_norms"""
        name, geometry = _call(problem)
        return self.operator(f"{name or 'linear_'}fused")(a, b, *geometry, scale, bias)


def _call(problem):
    """What an operator's name begins with, and the arguments that a convolution has more."""
    return ("conv2d_", problem.geometry) if isinstance(problem, Conv2d) else ("", ())


def _no_cuda():
    if not torch.cuda.is_available():
        return "there is no GPU"
    return f"torchgradx._cuda: {extension.WHY_NOT_CUDA}" if extension.WHY_NOT_CUDA else ""


def _emulated(name):
    if name not in CUDA_OPERATORS:
        pytest.skip(f"{name} has no CUDA kernel: plain PyTorch serves it there")
    return operators.operator(name)


BACKENDS = {
    "reference": Backend("reference", lambda name: getattr(reference, name)),
    "native": Backend("native", lambda name: getattr(ops, name),
        missing="" if ops.NATIVE else "torchgradx._C is not built"),
    "emulated": Backend("emulated", _emulated, missing=build.why_not()),
    "cuda": Backend("cuda", lambda name: getattr(ops, name), "cuda", missing=_no_cuda()),
}  # fmt: skip
EMULATED = BACKENDS["emulated"]
needs_emulation = pytest.mark.skipif(bool(EMULATED.missing), reason=EMULATED.missing)


def parameters():
    """Return the registry for pytest.mark.parametrize; what is missing shows up as a skip.

    `cuda` is among them only where there is a GPU: its skips would be a quarter of all cases.
    TORCHGRADX_TEST_BACKENDS names the backends to collect instead, with a comma between two.
    """
    default = [name for name in BACKENDS if name != "cuda" or torch.cuda.is_available()]
    names = [name for name in os.environ.get("TORCHGRADX_TEST_BACKENDS", "").split(",") if name]
    return [
        pytest.param(b, id=b.name, marks=pytest.mark.skipif(bool(b.missing), reason=b.missing))
        for b in (BACKENDS[name] for name in names or default)
    ]


def supports(algorithm, t):
    return algorithm != "rank1" or t <= 1


def algorithms_of(problem):
    if isinstance(problem, Conv2d):
        return [*CONV2D_ALGORITHMS]
    return [algorithm for algorithm in LINEAR_ALGORITHMS if supports(algorithm, problem.t)]


def set_threads(backend, threads, count):
    if count > 1 and backend.name in ("emulated", "cuda"):
        pytest.skip("its threads are not torch's: one count says it all")
    threads(count)


def same_in_every_order(results):
    """Results of `results()`, a tensor or several: the same bits in any order of threads."""
    first = tree_leaves(results())
    for order in ORDERS:
        with operators.operators().order(order):
            assert all(map(torch.equal, first, tree_leaves(results()))), order


def to(backend, *tensors):
    """The same strides at the same offset in a copy of the whole storage: Tensor.to() would lay a
    view with gaps out anew, and the kernels under test would never see one."""
    device = torch.device(backend.device)
    return tuple(x if x.device.type == device.type else _copied(x, device) for x in tensors)


def _copied(x, device):
    whole = torch.empty(0, dtype=x.dtype).set_(x.untyped_storage()).to(device)
    return whole.as_strided(x.shape, x.stride(), x.storage_offset())
