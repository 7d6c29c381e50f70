"""Builds the package in a folder that is kept between runs, and compiles only what changed.

    python build_tools/kept.py build/gpu/package

The folder mirrors the sources by content, whatever the times of the files in the tree, and becomes
importable by PYTHONPATH. Nothing is compiled where a digest of the compiled sources, the flags and
the tools is that of the last build; otherwise ninja compiles the files that changed.
"""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
FILES = ("pyproject.toml", "setup.py", "README.md", "LICENSE")
FOLDERS = ("build_tools", "csrc", "torchgradx")
COMPILED = ("pyproject.toml", "setup.py", "build_tools/cuda_toolkit.py", "csrc/")
SETTINGS = ("TORCHGRADX_CUDA", "TORCH_CUDA_ARCH_LIST", "CUDA_HOME", "CXX", "PATH")
DIGEST = "built.sha256"


def sources() -> dict[str, bytes]:
    """Return the contents of all source files by their paths in the tree."""
    paths = [ROOT / name for name in FILES]
    for folder in FOLDERS:
        paths += [p for p in sorted((ROOT / folder).rglob("*")) if p.is_file()]
    skipped = (".so", ".pyc")
    return {str(p.relative_to(ROOT)): p.read_bytes() for p in paths if p.suffix not in skipped}


def mirror(contents: dict[str, bytes], target: Path) -> None:
    """Write the files whose contents differ, and delete those that the tree no longer has."""
    for folder in FOLDERS:
        for path in [*(target / folder).rglob("*")]:
            gone = path.is_file() and str(path.relative_to(target)) not in contents
            if gone and path.suffix != ".so":
                path.unlink()
    for name, content in contents.items():
        path = target / name
        if not path.exists() or path.read_bytes() != content:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content)


def digest(contents: dict[str, bytes]) -> str:
    """Return a digest of all that the compiled extensions depend on."""
    said = [sys.version, version("torch"), *(f"{s}={os.environ.get(s)}" for s in SETTINGS)]
    seen = hashlib.sha256("\n".join(said).encode())
    for name, content in sorted(contents.items()):
        if name.startswith(COMPILED):
            seen.update(f"\n{name} {len(content)}\n".encode() + content)
    return seen.hexdigest()


def main(target: Path) -> None:
    target.mkdir(parents=True, exist_ok=True)
    contents = sources()
    mirror(contents, target)
    stamp, wanted = target / DIGEST, digest(contents)
    if stamp.exists() and stamp.read_text() == wanted:
        print(f"{target}: compiled before, nothing changed")
        return
    stamp.unlink(missing_ok=True)
    command = [sys.executable, "setup.py", "-q", "egg_info", "build_ext", "--inplace"]
    subprocess.run(command, cwd=target, check=True)
    stamp.write_text(wanted)


if __name__ == "__main__":
    try:
        main(Path(sys.argv[1]))
    except subprocess.CalledProcessError as error:
        sys.exit(error.returncode)
