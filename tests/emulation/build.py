"""Compiles csrc/cuda/*.cu and their binding with g++ into a library that runs them on the CPU.

Kernels are instrumented. Objects are kept by the hash of all that went into them (build/emulation).
"""

import fcntl
import hashlib
import os
import re
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[2]
sys.path.append(str(ROOT / "build_tools"))
import cuda_toolkit  # noqa: E402

HERE = Path(__file__).parent
CACHE = ROOT / "build/emulation"
RUNTIME = sorted(HERE.glob("*.cpp"))
KERNELS = ROOT / "csrc/cuda"
COMMON = ("-fPIC", "-O2", "-g1", "-Wall", "-Wextra", "-Wno-unknown-pragmas", "-ffp-contract=off")
# The compiler's instrumentation alone: linked without libtsan and libubsan, whose hooks checker.cpp
# has. Hence compiled and linked apart.
CHECKS = (
    "-fsanitize=thread",
    "-fsanitize=alignment,bounds,signed-integer-overflow,shift,integer-divide-by-zero",
)


@cache
def toolkit() -> Path | None:
    """The folder of bin/nvcc and include/cuda_runtime.h, as setup.py finds it."""
    home: Path | None = cuda_toolkit.toolkit()
    return home if home and (home / "include/cuda_runtime.h").exists() else None


@cache
def why_not() -> str:
    """Why kernels cannot be emulated here, or nothing."""
    if not shutil.which("g++"):
        return "the CUDA kernels are NOT emulated: no g++"
    if not toolkit():
        return "the CUDA kernels are NOT emulated: no CUDA headers (nvcc on PATH, or CUDA_HOME)"
    return ""


@cache
def compiler_version() -> str:
    return subprocess.run(["g++", "--version"], capture_output=True, text=True, check=True).stdout


def texts(source: Path, folders: tuple[Path, ...], seen: dict[Path, str]) -> dict[Path, str]:
    """The source and the project's headers under it, however deep, with their texts."""
    seen[source] = source.read_text()
    for name in re.findall(r'#include "(.+)"', seen[source]):
        for folder in (source.parent, *folders):
            header = (folder / name).resolve()
            if header.exists() and header not in seen:
                texts(header, folders, seen)
                break
    return seen


def _run(command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)}\n{done.stderr}")


def made(name: str, key: str, command: list[str]) -> Path:
    """The file that `command -o file` makes, from the cache where it has been made before."""
    digest = hashlib.sha256(f"{compiler_version()}{key}".encode()).hexdigest()[:20]
    path = CACHE / f"{digest}-{name}"
    CACHE.mkdir(parents=True, exist_ok=True)
    # One process makes it: a second copy would replace what the first has mapped already.
    with path.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not path.exists():
            partial = path.with_suffix(f".{os.getpid()}")
            _run([*command, "-o", str(partial)])
            partial.replace(path)
    return path


def compiled(source: Path, folders: tuple[Path, ...], flags: tuple[str, ...]) -> Path:
    """Of a copy of a source too: where it lies is no part of what it is."""
    flags = (*COMMON, *flags, f"-isystem{toolkit()}/include")
    language = ["-x", "c++", "-DCUDA_EMULATION"] if source.suffix == ".cu" else []
    includes = [f"-I{folder}" for folder in folders]
    key = "".join((*flags, *language, *texts(source.resolve(), folders, {}).values()))
    command = ["g++", *flags, *includes, *language, "-c", str(source)]
    return made(f"{source.stem}.o", key, command)


def kernel(source: Path, *flags: str) -> Path:
    folders = dict.fromkeys((source.parent, KERNELS, HERE))  # a copy's own headers come first
    return compiled(source, tuple(folders), ("-std=c++17", *CHECKS, *flags))


def runtime(*, torch: bool) -> list[Path]:
    sources = [s for s in RUNTIME if torch or s.stem != "torch_allocator"]
    return [
        compiled(s, (HERE,), torch_flags() if s.stem == "torch_allocator" else ("-std=c++20",))
        for s in sources
    ]


@cache
def torch_flags() -> tuple[str, ...]:
    import torch
    from torch.utils.cpp_extension import include_paths

    abi = int(torch.compiled_with_cxx11_abi())
    includes = (f"-isystem{path}" for path in include_paths())
    return ("-std=c++20", f"-D_GLIBCXX_USE_CXX11_ABI={abi}", *includes)


def linked(name: str, objects: list[Path], *flags: str) -> Path:
    """-Bsymbolic: a CUDA torch has functions of the CUDA runtime's names in the process too."""
    command = ["g++", "-shared", "-Wl,-Bsymbolic", *[str(path) for path in objects], *flags]
    return made(f"{name}.so", "".join(command), command)


def kernels_alone(source: Path) -> Path:
    """A library of one .cu and the emulator, without torch; for ctypes."""
    return linked(source.stem, [kernel(source), *runtime(torch=False)])


def operators(kernels: dict[str, Path] | None = None) -> Path:
    """The library that registers torch.ops.torchgradx_emulated.*: every kernel, launcher and the
    binding; with some files' objects in place of what csrc/cuda gives."""
    import torch

    flags = ("-DCUDA_EMULATION", *torch_flags())
    folders = (KERNELS, ROOT / "csrc/operators")
    bindings = [compiled(s, folders, flags) for s in sorted(KERNELS.glob("*.cpp"))]
    given = kernels or {}
    sources = sorted(KERNELS.glob("*.cu"))
    with ThreadPoolExecutor(os.cpu_count()) as pool:  # compilers, for which a thread waits
        objects = list(pool.map(lambda s: given.get(s.stem) or kernel(s), sources))
    libraries = Path(torch.__file__).parent / "lib"
    link = (f"-L{libraries}", f"-Wl,-rpath,{libraries}", "-ltorch_cpu", "-ltorch", "-lc10")
    return linked("operators", [*bindings, *objects, *runtime(torch=True)], *link)
