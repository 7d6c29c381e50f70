"""What nvcc made of each kernel: compiled for an architecture, taken apart again. Needs no GPU.

The disassembler is of the packages nvidia-cuda-cuobjdump and nvidia-cuda-nvdisasm.
"""

import os
import re
import shutil
import subprocess
import sysconfig
from collections import Counter
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

from emulation import build

ARCHITECTURES = ("80", "90a")
SOURCES = sorted(build.KERNELS.glob("*.cu"))
# As torch compiles extensions, without half operators; and everything that is doubtful is an error.
FLAGS = (
    *("-std=c++17", "-O3", "--expt-relaxed-constexpr"),
    *(f"-D__CUDA_NO_{what}__" for what in ("HALF_OPERATORS", "HALF_CONVERSIONS")),
    *(f"-D__CUDA_NO_{what}__" for what in ("BFLOAT16_CONVERSIONS", "HALF2_OPERATORS")),
    *("-Werror", "all-warnings"),
    *("-Xcompiler", "-fPIC,-Wall,-Wextra,-Werror,-Wno-unused-parameter"),
    *("-Xptxas", "-warn-spills,-warn-lmem-usage"),
)


@dataclass
class Kernel:
    name: str  # without namespaces and parameters
    registers: int = 0
    stack: int = 0
    shared: int = 0  # static, bytes
    max_threads: int = 0  # of __launch_bounds__
    opcodes: Counter[str] = field(default_factory=Counter)


@cache
def why_not() -> str:
    if not build.toolkit():
        return "the CUDA kernels are NOT compiled: no nvcc (on PATH, or in CUDA_HOME)"
    return ""


def cuobjdump() -> str | None:
    folder = Path(sysconfig.get_path("purelib")) / "nvidia/cu13/bin"
    return shutil.which("cuobjdump", path=f"{folder}{os.pathsep}{os.environ['PATH']}")


def compiled(source: Path, *architectures: str) -> Path:
    """The object, or RuntimeError with what nvcc had to say."""
    texts = build.texts(source, (build.KERNELS,), {}).values()
    codes = [f"-gencode=arch=compute_{name},code=sm_{name}" for name in architectures]
    command = [f"{build.toolkit()}/bin/nvcc", *FLAGS, *codes, "-c", str(source)]
    return build.made(f"{source.stem}.cubins.o", "".join((*command[:-2], *texts)), command)


def short(name: str) -> str:
    """A demangled function's name without return type, namespaces and parameters."""
    name = name.removeprefix("void ").replace("(anonymous namespace)::", "")
    name = name.replace("torchgradx::cuda::", "")
    depth = 0
    for at, letter in enumerate(name):
        depth += (letter == "<") - (letter == ">")
        if letter == "(" and depth == 0:
            return name[:at]
    return name


def demangled(names: list[str]) -> list[str]:
    done = subprocess.run(["c++filt"], input="\n".join(names), capture_output=True, text=True)
    return done.stdout.split("\n")[: len(names)]


def _dump(what: str, architecture: str, path: Path) -> str:
    tool = cuobjdump()
    assert tool
    environment = {**os.environ, "PATH": f"{Path(tool).parent}{os.pathsep}{os.environ['PATH']}"}
    command = [tool, "-arch", f"sm_{architecture}", what, str(path)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    return done.stdout


@cache
def kernels(architecture: str) -> dict[str, Kernel]:
    """Every kernel of every .cu, by its mangled name."""
    found: dict[str, Kernel] = {}
    for path in objects():
        _read_resources(_dump("-res-usage", architecture, path), found)
        _read_opcodes(_dump("-sass", architecture, path), found)
        _read_launch_bounds(_dump("-elf", architecture, path), found)
    return found


def objects() -> list[Path]:
    """Of every .cu. From the last on: another process may be compiling from the first on."""
    return [compiled(source, *ARCHITECTURES) for source in reversed(SOURCES)]


def _read_resources(text: str, found: dict[str, Kernel]) -> None:
    rows = re.findall(r"Function (\S+):\n\s*(.*)", text)
    for (mangled, usage), name in zip(rows, demangled([row[0] for row in rows]), strict=True):
        used = {key: int(value) for key, value in re.findall(r"(REG|STACK|SHARED):(\d+)", usage)}
        found[mangled] = Kernel(short(name), used["REG"], used["STACK"], used["SHARED"])


def _read_opcodes(text: str, found: dict[str, Kernel]) -> None:
    counts: Counter[str] = Counter()
    for line in text.splitlines():
        if function := re.search(r"Function : (\S+)", line):
            counts = found[function[1]].opcodes
        elif opcode := re.match(r"\s+/\*[0-9a-f]+\*/\s+(?:@!?U?P\w+ )?([A-Z0-9_]+)", line):
            counts[opcode[1]] += 1


def _read_launch_bounds(text: str, found: dict[str, Kernel]) -> None:
    """EIATTR_MAX_THREADS: the three sides of the largest block."""
    mangled = ""
    waiting = False
    for line in text.splitlines():
        if section := re.match(r"\.nv\.info\.(\S+)", line.strip()):
            mangled = section[1]
        elif "EIATTR_MAX_THREADS" in line:
            waiting = True
        elif waiting and (sides := re.search(r"Value:\s*0x(\w+) 0x(\w+) 0x(\w+)", line)):
            x, y, z = (int(side, 16) for side in sides.groups())
            found[mangled].max_threads = x * y * z
            waiting = False
