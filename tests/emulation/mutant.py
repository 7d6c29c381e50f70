"""One bug to plant in the CUDA kernels."""

from dataclasses import dataclass

from emulation import build


@dataclass(frozen=True)
class Mutant:
    name: str
    file: str  # of csrc/cuda
    via: str  # the .cu that is compiled with it
    arithmetic: str  # bfloat16, float32, float64 or tf32
    old: str
    new: str
    layer: str = "linear"  # or conv2d, batched, affine, gather, hopper: whose problems see it


def file_of(text: str, pattern: str) -> str:
    """Whichever of a kernel's files has it: its parts move between them."""
    files = sorted(build.KERNELS.glob(pattern))
    return next((file.name for file in files if text in file.read_text()), files[0].name)


def planted_in(*place: str | list[tuple[str, str, str]]) -> list[Mutant]:
    """Bugs of one place: file, via, arithmetic, perhaps the layer, and [(name, old, new), ...]."""
    *where, bugs = place
    return [Mutant(name, *where[:3], old, new, *where[3:]) for name, old, new in bugs]
