"""Where and on what a file of results was measured; neither host name nor paths."""

from __future__ import annotations

import os
import platform
import subprocess
from datetime import date
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch

import torchgradx

ROOT = Path(__file__).parent.parent
RIVAL_PACKAGES = ("opacus", "backpack-for-pytorch", "fastDP")


def facts() -> dict[str, object]:
    git = ["git", "-C", str(ROOT), "describe", "--always", "--dirty", "--abbrev=40"]
    commit = subprocess.run(git, capture_output=True, text=True).stdout.strip()
    return {
        "date": date.today().isoformat(),
        "commit": commit or "unknown",
        "torchgradx": torchgradx.__version__,
        "torch": torch.__version__,
        "rivals_versions": {package: version_of(package) for package in RIVAL_PACKAGES},
        "machine": {
            "cpu": cpu_name(),
            "cores": os.cpu_count(),
            "capability": torch.backends.cpu.get_cpu_capability(),
            "system": f"{platform.system()} {platform.machine()}",
        },
    }


def version_of(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"


def cpu_name() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.processor())
