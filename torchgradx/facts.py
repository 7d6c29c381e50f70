"""The facts of this installation, to read and to paste into a report."""

from __future__ import annotations

from importlib.metadata import version
from pathlib import Path

import torch

from . import ops
from .gpu import compiled_for

__all__ = ["facts", "table"]


def extension() -> str:
    return f"not loaded: {ops.WHY_NOT_NATIVE}" if ops.WHY_NOT_NATIVE else "loaded"


def cuda_kernels() -> str:
    """Return the architectures compiled in, or why there are none."""
    if not ops.CUDA:
        return f"none: {ops.WHY_NOT_CUDA}"
    return f"compiled for {compiled_for()}"


def auto(devices: list[torch.device]) -> str:
    """Return what backend="auto" takes, for the CPU and for each device."""
    if not ops.NATIVE:
        return "vmap: pure Python"
    serves = [f"{d}: {'CUDA kernels' if ops.kernels_on(d) else 'vmap'}" for d in devices]
    return "; ".join(["native: C++ CPU kernels", *serves])


def facts() -> dict[str, str]:
    cpu = torch.backends.cpu.get_cpu_capability()
    gpus = [torch.device("cuda", i) for i in range(torch.cuda.device_count())]
    named = []
    for gpu in gpus:
        major, minor = torch.cuda.get_device_capability(gpu)
        named.append(f"{torch.cuda.get_device_name(gpu)} (compute capability {major}.{minor})")
    return {
        "torchgradx": f"{version('torchgradx')}, in {Path(__file__).parent}",
        "torch": torch.__version__,
        "extension": extension(),
        "CPU": f"{cpu}, {torch.get_num_threads()} threads",
        "CUDA kernels": cuda_kernels(),
        "device": ", ".join(named) or "CPU only",
        "backend auto": auto(gpus),
    }


def table() -> str:
    return "\n".join(f"{name:14}{fact}" for name, fact in facts().items())
