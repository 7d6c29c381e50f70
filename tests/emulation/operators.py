"""torch.ops.torchgradx_emulated.*: the CUDA operators, binding and launchers included, on the CPU.

Every tensor that reaches a kernel lies in memory of its own, whose bounds are checked.
"""

import os
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from functools import cache
from pathlib import Path
from typing import Any

import torch
from emulation import build
from emulation.emulator import Emulator
from torch import Tensor

CACHE_LINE = 64  # a guarded copy keeps its address modulo this, since kernels choose by alignment


class Operators(Emulator):
    def __init__(self, path: Path) -> None:
        super().__init__(path)
        torch.ops.load_library(str(path))
        self.c.cuda_emulation_allocated.restype = int

    def __call__(self, name: str, *arguments: Any) -> Any:
        overload = getattr(torch.ops.torchgradx_emulated, name).default
        self.c.cuda_emulation_clear()
        self.c.cuda_emulation_record(1)
        try:
            with ExitStack() as stack:
                guarded = [self._guarded(x, stack) for x in arguments]
                self.c.cuda_emulation_record(1)  # counts from here
                return overload(*guarded)
        finally:
            self.c.cuda_emulation_record(0)
            self.expect_silence()

    def _guarded(self, x: Any, stack: ExitStack) -> Any:
        if not _is_plain(x):
            return x
        span = 1 + sum((size - 1) * step for size, step in zip(x.shape, x.stride(), strict=True))
        off = x.data_ptr() % CACHE_LINE
        bytes_ = span * x.element_size()
        memory = torch.empty(off + bytes_, dtype=torch.uint8)
        assert memory.data_ptr() % CACHE_LINE == 0
        flat = memory[off:].view(x.dtype)
        flat.copy_(x.detach().as_strided((span,), (1,), x.storage_offset()))
        self.c.cuda_emulation_forget(memory.data_ptr())
        stack.enter_context(self.buffers((flat.data_ptr(), bytes_, False)))
        return flat.as_strided(x.shape, x.stride())

    def batched(self) -> AbstractContextManager[None]:
        """With the framework's batched products wherever a GPU would have them."""
        return self._flag("batched")

    def allocated(self) -> int:
        """Bytes that the last call took for its results and workspace."""
        bytes_: int = self.c.cuda_emulation_allocated()
        return bytes_


def _is_plain(x: object) -> bool:
    """A tensor with memory; any other is the binding's to refuse."""
    if not isinstance(x, Tensor) or x.is_nested or x.layout is not torch.strided:
        return False
    return x.device.type == "cpu" and x.numel() > 0


@cache
def operators() -> Operators:
    """Built on first use. `make mutants` names a library of its own."""
    given = os.environ.get("TORCHGRADX_EMULATED")
    return Operators(Path(given) if given else build.operators())


def operator(name: str) -> Callable[..., Any]:
    return lambda *arguments: operators()(name, *arguments)
