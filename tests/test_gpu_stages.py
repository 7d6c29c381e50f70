"""`make gpu` and its benchmark as far as they run without a GPU: code paths, shapes, failures."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

ROOT = Path(__file__).parents[1]
SCRIPT = ROOT / "benchmarks/gpu.py"
sys.path.append(str(SCRIPT.parent))
from gpu_plan import ROWS, Ceilings, Conv, conv2d, linear  # noqa: E402


def benchmark(*arguments: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-W", "ignore", str(SCRIPT), *map(str, arguments)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.run(command, env=environment, capture_output=True, text=True)


def test_the_benchmark_measures_every_row_at_tiny_sizes(tmp_path: Path) -> None:
    pytest.importorskip("rich")
    done = benchmark("--device", "cpu", "--tiny", "--seconds", 0, "--out", tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    layers = json.loads((tmp_path / "layers.json").read_text())
    assert {"commit", "date", "torch", "ceilings", "rows"} <= set(layers)
    for row in layers["rows"]:
        ways = row["ways"]
        assert {"fused", "weight gradient", "bmm + norm", "vmap"} < set(ways)
        assert all(figures["us"] > 0 for figures in ways.values())
        assert ways["fused"]["to_floor"] > 0
    models = json.loads((tmp_path / "models.json").read_text())["rows"]
    assert [set(row["ways"]) for row in models] == [{"fused", "clip", "fused=False", "scoring"}] * 3


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_the_benchmark_says_so_in_one_line() -> None:
    pytest.importorskip("rich")
    done = benchmark()
    assert done.returncode == 1
    assert done.stderr.count("\n") == 1
    assert "sees no GPU" in done.stderr


def test_planned_convolutions_have_the_outputs_that_torch_gives_them() -> None:
    for layer in (row.layer for row in ROWS if row.layer.conv):
        c = layer.conv
        x = torch.empty(layer.n, c.channels, c.size, c.size, device="meta")
        weight = torch.empty(layer.o, c.channels, c.kernel, c.kernel, device="meta")
        out = F.conv2d(x, weight, None, c.stride, c.padding)
        assert (out[:, 0].numel(), weight[0].numel()) == (layer.n * layer.t, layer.i)


def test_a_floor_is_of_the_scarcer_of_flop_and_bytes() -> None:
    peak = Ceilings(1e12, {"bfloat16": 1e14})
    long = linear("", 8, 1024, 768, 768)
    assert peak.floor(long, "fused", "bfloat16") == 2 * 8 * 1024 * 768**2 / 1e14
    short = linear("", 4096, 1, 1024, 1024)
    assert peak.floor(short, "rank1", "bfloat16") == 2 * 4096 * 2048 / 1e12
    image = conv2d("", 2, 8, Conv(4, 6, 3))  # read once, not nine times
    assert image.bytes("direct", "float32") == 4 * (2 * 4 * 36 + 2 * 36 * 8)
    strided = conv2d("", 2, 8, Conv(4, 6, 1, 2))  # three pixels of four are in no patch
    assert strided.bytes("direct", "float32") == 4 * (2 * 4 * 9 + 2 * 9 * 8)


STAGES = ["build", "facts", "wrappers", "operators", "device", "attachment", "memcheck"]
STAGES += ["racecheck", "benchmarks"]


@pytest.mark.parametrize("broken", [None, "tests/test_cuda.py"])
def test_a_stage_that_fails_hides_no_other(tmp_path: Path, broken: str | None) -> None:
    """The script itself, with stand-ins for Python and compute-sanitizer."""
    stub = f'#!/bin/sh\ncase "$*" in *{broken}*) exit 3;; esac\necho "ran $*"\n'
    (tmp_path / ".ci").mkdir()
    shutil.copy(ROOT / ".ci/gpu", tmp_path / ".ci")
    for name in ("python", "compute-sanitizer"):
        (tmp_path / name).write_text(stub)
        (tmp_path / name).chmod(0o755)
    out = tmp_path / "out"
    environment = {**os.environ, "PYTHON": str(tmp_path / "python"), "OUT": str(out)}
    environment["PATH"] = f"{tmp_path}:{os.environ['PATH']}"
    command = ["bash", str(tmp_path / ".ci/gpu")]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    seen = [line.split()[1] for line in done.stdout.splitlines() if line.startswith("=== ")]
    assert seen[:-1] == STAGES, done.stdout + done.stderr
    assert done.returncode == bool(broken)
    end = done.stdout.rpartition("=== ")[2]
    assert ("device (exit status 3" in end) if broken else ("all stages passed" in end)
    assert "-n 12 tests/test_ops.py" in (tmp_path / "build/gpu/logs/operators.log").read_text()
    with tarfile.open(out / "gpu.tar.gz") as made:
        assert {f"build/gpu/logs/{stage}.log" for stage in STAGES} <= set(made.getnames())


def test_all_stages_together_have_eight_minutes() -> None:
    stages = re.findall(r"^ *stage (\S+) (\d+)", (ROOT / ".ci/gpu").read_text(), re.MULTILINE)
    limits = {name: int(seconds) for name, seconds in stages}
    assert sum(limits.values()) + limits['"$tool"'] <= 480  # two tools
