"""Compiles csrc into torchgradx._C, and csrc/cuda into torchgradx._cuda, against the torch that is
installed. They are two so that CUDA kernels which do not load leave the CPU's at work.

Everything else about the package is in pyproject.toml. The environment may say:

    TORCHGRADX_NO_EXTENSION=1   install without the extensions; the pure-Python fallback serves
    TORCHGRADX_CUDA=0 or 1      leave the CUDA kernels out, or insist on them; unset: if torch has
                                CUDA and nvcc is found, be there a GPU or not
    TORCH_CUDA_ARCH_LIST        compute capabilities, as torch has it: "8.0;9.0+PTX"; older than 8.0
                                is left out
    CUDA_HOME                   the CUDA toolkit, where the nvcc on PATH is not the one wanted
    TORCHGRADX_SANITIZE=1       AddressSanitizer and UndefinedBehaviorSanitizer, see `make sanitize`
    CXX, MAX_JOBS               the compiler, and how many of them at once
"""

import os
import re
import shlex
import subprocess
import sys
import sysconfig
from glob import glob
from pathlib import Path

from setuptools import setup

ROOT = os.path.dirname(os.path.abspath(__file__))
sys.path.insert(0, os.path.join(ROOT, "build_tools"))
import cuda_toolkit  # noqa: E402

SANITIZE = os.environ.get("TORCHGRADX_SANITIZE") == "1"
COMPILING = {"build", "build_ext", "bdist_wheel", "editable_wheel", "develop", "install"}


def why_not() -> str | None:
    """The reason to leave the extensions out, if there is one."""
    if os.environ.get("TORCHGRADX_NO_EXTENSION") == "1":
        return "TORCHGRADX_NO_EXTENSION=1"
    compiler = shlex.split(os.environ.get("CXX", "c++"))
    command = [*compiler, "-xc++", "-fsyntax-only", f"-I{sysconfig.get_path('include')}", "-"]
    source = "#include <Python.h>\n#include <vector>\n"
    try:
        probe = subprocess.run(command, input=source, capture_output=True, text=True)
    except OSError as error:
        return f"no C++ compiler ({error})"
    return None if probe.returncode == 0 else f"{compiler[0]} failed:\n{probe.stderr}"


# Python's own flags have -fwrapv, under which no signed overflow is an error.
SANITIZERS = ["-fsanitize=address,undefined", "-fno-sanitize-recover=all", "-fno-wrapv"]
CHECKED = ["-O0", "-g1", "-fno-omit-frame-pointer", "-D_GLIBCXX_ASSERTIONS", *SANITIZERS]


def flags(torch) -> list[str]:
    project = Path(ROOT, "pyproject.toml").read_text()
    version = re.search(r'^version = "(.+)"', project, re.M)[1]
    site = os.path.dirname(os.path.dirname(torch.__file__))
    return [
        *(CHECKED if SANITIZE else ["-O3", "-g0"]),
        "-fopenmp",  # torch's at::parallel_for is inline code, and serial without it
        "-fvisibility=hidden",
        # No iostream, see csrc/operators/text.h: torch's inline functions join their messages with
        # a stream unless told not to, and <iostream>, which its dispatcher includes and does not
        # use, leaves an initializer in every object. The second is libstdc++'s own guard.
        "-DSTRIP_ERROR_MESSAGES",
        "-D_GLIBCXX_IOSTREAM",
        # checks print the file they stand in: no path of the building machine in a binary
        f"-ffile-prefix-map={ROOT}/=",
        f"-ffile-prefix-map={site}/=",
        f'-DTORCHGRADX_VERSION="{version}"',
        # also makes ninja compile again for another torch, whose headers may well be older files
        f'-DTORCHGRADX_TORCH_VERSION="{torch.__version__}"',
    ]


def units() -> list[str]:
    """The sources of torchgradx._C: one a folder, which includes the folder's files, since torch's
    headers take longer to compile than what is in it. Tiles are of one instruction set each."""
    found = ["csrc/python.cpp", *sorted(glob("csrc/cpu/tile_*.cpp"))]
    for folder in ("operators", "record", "nodes", "layers", "cpu"):
        files = sorted(set(glob(f"csrc/{folder}/*.cpp")) - set(found))
        unit = Path(base, "units", f"{folder}.cpp")
        text = "".join(f'#include "{file}"\n' for file in files)
        unit.parent.mkdir(parents=True, exist_ok=True)
        if not unit.exists() or unit.read_text() != text:  # else ninja would compile it again
            unit.write_text(text)
        found.append(str(unit))
    return found


def extensions() -> dict:
    import torch  # here, since sdist and egg_info must do without
    from torch.utils.cpp_extension import BuildExtension, CppExtension

    if tuple(map(int, torch.__version__.split(".")[:2])) < (2, 11):
        sys.exit(f"torchgradx needs torch >= 2.11, found {torch.__version__}: upgrade torch first")
    gib = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") >> 30
    # torch's headers take about 1.5 GiB a compiler
    os.environ.setdefault("MAX_JOBS", str(max(1, min(os.cpu_count(), gib // 2))))
    # Not linked with -fopenmp: torch brings its own OpenMP runtime, and two would mean two pools.
    native = CppExtension(
        "torchgradx._C",
        units(),
        include_dirs=[ROOT],
        extra_compile_args={"cxx": flags(torch)},
        extra_link_args=SANITIZERS if SANITIZE else [],
    )
    modules = [native]
    home = cuda_toolkit.toolkit()
    left_out = "a sanitized build" if SANITIZE else cuda_toolkit.why_not(home, torch)
    if left_out:
        print(f"torchgradx: installing without CUDA kernels: {left_out}", file=sys.stderr)
    else:
        modules.append(cuda_toolkit.extension(home, torch, flags(torch)))
    return {"ext_modules": modules, "cmdclass": {"build_ext": BuildExtension}}


base = "build/sanitize" if SANITIZE else "build"
# force: setuptools compares times of sources only; ninja also sees headers and flags
options = {"build_ext": {"force": True}, "build": {"build_base": base}}
compiling = bool(COMPILING & set(sys.argv))
reason = why_not() if compiling else None
if reason:
    print(f"torchgradx: installing without the compiled extensions: {reason}", file=sys.stderr)
setup(options=options, **(extensions() if compiling and not reason else {}))
