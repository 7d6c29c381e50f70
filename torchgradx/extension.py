"""Loads the compiled extension: the classes and functions of _C, and the kernels for CUDA.

Without _C, NATIVE is False, and nothing may be taken from it.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
import warnings
from typing import TYPE_CHECKING, Any

import torch  # noqa: F401  # its libraries, which ours need

NOT_BUILT = "it was not built"


def _import(module: str) -> str:
    """Import torchgradx.<module>, which registers kernels; the reason why not, or nothing."""
    name = f"{__package__}.{module}"
    if importlib.util.find_spec(name) is None:
        return NOT_BUILT
    try:
        importlib.import_module(name)
    except (ImportError, OSError) as error:  # another torch's symbols, most often
        return f"it does not load ({error})"
    return ""


WHY_NOT_NATIVE: str = _import("_C")
NATIVE: bool = not WHY_NOT_NATIVE
if not NATIVE:
    warnings.warn(
        f"torchgradx runs without its compiled extension, as {WHY_NOT_NATIVE}: the pure-Python "
        "fallback serves, which is exact but slow. With a C++ compiler and this torch installed, "
        "`pip install --force-reinstall --no-deps torchgradx` builds it.",
        RuntimeWarning,
        stacklevel=2,
    )

# The CUDA kernels are a library of their own, for the operators that _C defines.
WHY_NOT_CUDA: str = _import("_cuda") if NATIVE else NOT_BUILT
CUDA: bool = not WHY_NOT_CUDA
if WHY_NOT_CUDA not in ("", NOT_BUILT):
    warnings.warn(
        f"torchgradx runs without its CUDA kernels, as torchgradx._cuda was built but "
        f"{WHY_NOT_CUDA}: CUDA tensors are served by plain PyTorch, which is exact but slow; "
        "the CPU kernels are not affected. "
        "`pip install --force-reinstall --no-deps torchgradx` builds it for this torch.",
        RuntimeWarning,
        stacklevel=2,
    )

if TYPE_CHECKING:
    from . import _C as _C
    from ._C import Pass as Pass
    from ._C import Recorder as Recorder
else:
    _C = sys.modules.get(f"{__package__}._C")
    Pass = Recorder = Any  # for annotations: record/plain.py has both without the extension
