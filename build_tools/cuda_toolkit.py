"""Finds nvcc, and says how torchgradx._cuda is compiled with it.

No .cu file knows of torch and the binding needs nothing of a CUDA torch, so all of this works
beside a CPU torch too. The CUDA runtime is linked statically: the module then needs no library
that a machine without a GPU may lack, and no particular one of the installed torch's.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

ARCHITECTURES = "8.0+PTX;9.0a"  # where there is no GPU to ask; 9.0a: wgmma
OLDEST = (8, 0)  # mma.sync of bfloat16, cp.async


def toolkit() -> Path | None:
    """The folder of bin/nvcc: CUDA_HOME's, else that of the nvcc on PATH, else the usual one."""
    homes = [os.environ.get("CUDA_HOME"), os.environ.get("CUDA_PATH"), _of_nvcc_on_path()]
    homes += ["/usr/local/cuda"]
    found = (Path(home) for home in homes if home)
    return next((home.resolve() for home in found if (home / "bin/nvcc").exists()), None)


def _of_nvcc_on_path() -> str | None:
    """What nvcc says itself: on PATH it may be a wrapper, kept in quite another folder."""
    nvcc = shutil.which("nvcc")
    if not nvcc:
        return None
    command = [nvcc, "--dryrun", "-x", "cu", "-c", os.devnull, "-o", os.devnull]
    said = subprocess.run(command, capture_output=True, text=True).stderr
    top = re.search(r"^#\$ TOP=(.+)$", said, re.MULTILINE)
    return top[1].strip() if top else None


def why_not(home: Path | None, torch: Any) -> str | None:
    """The reason to leave the CUDA kernels out, if there is one.

    Under TORCHGRADX_CUDA=1 nothing is left out: what is missing ends the build by its name.
    """
    wanted = os.environ.get("TORCHGRADX_CUDA", "")
    if wanted not in ("", "0", "1"):
        raise SystemExit(f"TORCHGRADX_CUDA must be 0, 1 or unset; got {wanted!r}")
    if wanted == "0":
        return "TORCHGRADX_CUDA=0"
    lacking = _lacking(home)
    if wanted == "1":
        if lacking:
            raise SystemExit(f"TORCHGRADX_CUDA=1, but {lacking}")
        return None
    if not torch.version.cuda:
        return "the installed torch is a CPU build"
    if lacking:
        return lacking
    theirs, ours = torch.version.cuda.split(".")[0], _release(home)
    if ours != theirs:
        return f"the installed torch has CUDA {torch.version.cuda}, and {home} is of CUDA {ours}"
    return None


def _lacking(home: Path | None) -> str | None:
    if home is None:
        return (
            "there is no nvcc in CUDA_HOME, on PATH or in /usr/local/cuda: "
            "name a CUDA toolkit by CUDA_HOME"
        )
    if not _runtime(home):
        return f"there is no libcudart_static.a under {home}: name another toolkit by CUDA_HOME"
    fit, too_old = _asked()
    if too_old and not fit:
        return f"TORCH_CUDA_ARCH_LIST has only {' '.join(too_old)}: the kernels need 8.0 or newer"
    return None


def _release(home: Path) -> str:
    """The major version of nvcc."""
    said = subprocess.run([home / "bin/nvcc", "--version"], capture_output=True, text=True).stdout
    release = re.search(r"release (\d+)", said)
    return release[1] if release else "an unknown version"


def _runtime(home: Path) -> list[str]:
    """The folder of the static runtime, which differs between a toolkit's packagings."""
    folders = [home / "lib64", home / "lib", *home.glob("targets/*/lib")]
    return [str(folder) for folder in folders if (folder / "libcudart_static.a").exists()][:1]


def _asked() -> tuple[list[str], list[str]]:
    """Return the entries of TORCH_CUDA_ARCH_LIST to build, and those older than OLDEST.

    9.0 becomes 9.0a, without which Hopper's kernel is left out. PTX of 9.0a runs on no other
    architecture: PTX of 8.0, which runs on all later ones, replaces it.
    """
    asked = os.environ.get("TORCH_CUDA_ARCH_LIST", "").replace("Hopper", "9.0+PTX")
    fit: list[str] = []
    too_old = []
    for entry in re.split("[ ;]+", asked.strip(" ;")):
        version = re.match(r"(\d+)\.(\d+)", entry)
        if version and tuple(map(int, version.groups())) < OLDEST:
            too_old.append(entry)
        elif entry in ("9.0", "9.0+PTX"):
            fit += ["8.0+PTX", "9.0a"] if entry == "9.0+PTX" else ["9.0a"]
        elif entry not in ("", "native"):  # torch knows other names
            fit.append(entry)
    return list(dict.fromkeys(fit)), too_old


def architectures(torch: Any) -> str:
    """Return what fits of TORCH_CUDA_ARCH_LIST, else the GPUs present, else ARCHITECTURES."""
    fit, too_old = _asked()
    if too_old:
        left_out = f"{' '.join(too_old)} of TORCH_CUDA_ARCH_LIST: the kernels need 8.0 or newer"
        print(f"torchgradx: leaving out {left_out}", file=sys.stderr)
    if fit:
        return ";".join(fit)
    gpus = range(torch.cuda.device_count())
    present = {torch.cuda.get_device_capability(gpu) for gpu in gpus}
    new = sorted(capability for capability in present if capability >= OLDEST)
    names = ["9.0a" if capability == (9, 0) else "{}.{}".format(*capability) for capability in new]
    if not names:
        return ARCHITECTURES
    # PTX of 9.0a would run nowhere else
    return ";".join(names) + ("" if names[-1] == "9.0a" else "+PTX")


def extension(home: Path, torch: Any, cxx: list[str]) -> Any:
    """torchgradx._cuda; `cxx` are the flags of the other extension."""
    from torch.utils import cpp_extension

    # Read once, when cpp_extension is imported, and not at all under a CPU torch.
    cpp_extension.CUDA_HOME = str(home)
    built = architectures(torch)
    os.environ["TORCH_CUDA_ARCH_LIST"] = built  # where torch looks; with no GPU it has no default
    # Beside a CPU torch nothing tells ninja which headers a .cu includes: a change is a new flag.
    headers = sorted([*Path("csrc/operators").glob("*.h"), *Path("csrc/cuda").glob("*.*h")])
    digest = hashlib.sha256(b"".join(header.read_bytes() for header in headers)).hexdigest()
    host = [flag for flag in cxx if flag.startswith(("-fvisibility", "-ffile-prefix-map"))]
    return cpp_extension.CppExtension(
        "torchgradx._cuda",
        [str(s) for s in sorted(Path("csrc/cuda").glob("*.c*")) if s.suffix in (".cpp", ".cu")],
        include_dirs=[str(home / "include")],
        library_dirs=_runtime(home),
        libraries=["cudart_static", "dl", "rt", "pthread"],
        extra_compile_args={
            "cxx": [*cxx, f'-DTORCHGRADX_CUDA_ARCHITECTURES="{built}"'],
            "nvcc": [
                "-O3",
                f"-DHEADERS={digest[:16]}",
                *(f"-Xcompiler={flag}" for flag in host),
            ],
        },
        # Its own copy of the runtime, whatever another library of the process exports.
        extra_link_args=["-Wl,--exclude-libs,ALL"],
    )
