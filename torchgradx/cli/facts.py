"""Facts of this installation, to read and to paste into a report."""

from importlib.metadata import version
from pathlib import Path

import torch

from .. import ops
from ..extension import CUDA, NATIVE, WHY_NOT_CUDA, WHY_NOT_NATIVE
from ..plan.gpu import compiled_for


def table() -> str:
    gpus = [torch.device("cuda", i) for i in range(torch.cuda.device_count())]
    named = []
    for gpu in gpus:
        major, minor = torch.cuda.get_device_capability(gpu)
        named.append(f"{torch.cuda.get_device_name(gpu)} (compute capability {major}.{minor})")
    serves = [f"{d}: {'CUDA kernels' if ops.kernels_on(d) else 'vmap'}" for d in gpus]
    auto = "; ".join(["native: C++ CPU kernels", *serves]) if NATIVE else "vmap: pure Python"
    cpu = torch.backends.cpu.get_cpu_capability()
    facts = {
        "torchgradx": f"{version('torchgradx')}, in {Path(__file__).parent.parent}",
        "torch": torch.__version__,
        "extension": f"not loaded: {WHY_NOT_NATIVE}" if WHY_NOT_NATIVE else "loaded",
        "CPU": f"{cpu}, {torch.get_num_threads()} threads",
        "CUDA kernels": f"compiled for {compiled_for()}" if CUDA else f"none: {WHY_NOT_CUDA}",
        "device": ", ".join(named) or "CPU only",
        "backend auto": auto,
    }
    return "\n".join(f"{name:14}{fact}" for name, fact in facts.items())
