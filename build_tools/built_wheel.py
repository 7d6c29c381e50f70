"""Check what a built wheel needs: it is loaded in a folder of its own, and its libraries are read.

python build_tools/built_wheel.py dist/torchgradx-*.whl
"""

import platform
import re
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

SHOWN = ("torchgradx", "torch", "extension", "CUDA kernels")


def needed(library: Path) -> str:
    """The newest glibc and libstdc++ whose symbols a library asks for."""
    text = subprocess.run(
        ["readelf", "--version-info", library], capture_output=True, text=True, check=True
    ).stdout
    newest = []
    for name in ("GLIBC", "GLIBCXX"):
        found = {tuple(map(int, v.split("."))) for v in re.findall(rf"\b{name}_([\d.]+)", text)}
        newest += [f"{name} {'.'.join(map(str, max(found)))}"] if found else []
    return ", ".join(newest)


def main(wheel: Path) -> None:
    with tempfile.TemporaryDirectory() as folder:
        zipfile.ZipFile(wheel).extractall(folder)
        command = [sys.executable, "-m", "torchgradx"]  # what lies in its folder comes first
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True)
        facts = [line for line in done.stdout.splitlines() if line.startswith(SHOWN)]
        if f", in {folder}" not in done.stdout or not re.search("extension +loaded", done.stdout):
            raise SystemExit(f"{wheel} does not load:\n{done.stdout}{done.stderr}")
        libraries = sorted(Path(folder).rglob("*.so"))
        print(f"{wheel}: for CPython {platform.python_version()}, and for this torch alone:")
        print("\n".join(facts))
        for library in libraries:
            print(f"{library.name} needs {needed(library)} or newer")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
