"""`python -m torchgradx`: the facts of this installation, to read and to paste into a report."""

from __future__ import annotations

import importlib
import warnings
from importlib.metadata import version
from pathlib import Path

import torch

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # what it would say is in the table
    from torchgradx import ops


def extension() -> str:
    if ops.NATIVE:
        return "loaded"
    try:
        importlib.import_module("torchgradx._C")
    except ImportError as error:
        return f"not loaded: {error}"
    return "loads, but was refused"


def facts() -> dict[str, str]:
    cpu = torch.backends.cpu.get_cpu_capability()
    gpus = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    return {
        "torchgradx": f"{version('torchgradx')}, in {Path(__file__).parent}",
        "torch": torch.__version__,
        "extension": extension(),
        "CPU": f"{cpu}, {torch.get_num_threads()} threads",
        "CUDA kernels": "none in this build",
        "device": ", ".join(gpus) or "CPU only",
        "backend auto": "native: C++ CPU kernels" if ops.NATIVE else "vmap: pure Python",
    }


if __name__ == "__main__":
    for name, fact in facts().items():
        print(f"{name:14}{fact}")
