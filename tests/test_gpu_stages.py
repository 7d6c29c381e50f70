"""`make gpu` and its benchmark as far as they run without a GPU: code paths, shapes, failures."""

import json
import os
import shutil
import sys
import tarfile
from pathlib import Path

import pytest
from processes import python, run

ROOT = Path(__file__).parents[1]
SCRIPT = ROOT / "benchmarks/gpu.py"
sys.path.append(str(SCRIPT.parent))
from gpu_models import MODELS  # noqa: E402


def benchmark(*arguments):
    return python("-W", "ignore", SCRIPT, *arguments, OMP_NUM_THREADS="1")


OURS = {"fused", "scoring", "clip", "deferred clip", "fused=False"}


def test_the_benchmark_measures_every_row_at_tiny_sizes(tmp_path):
    pytest.importorskip("rich")
    parts = ("models", "layers", "firststep")
    done = benchmark(*parts, "--device", "cpu", "--tiny", "--seconds", 0, "--out", tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    layers = json.loads((tmp_path / "layers.json").read_text())
    assert {"commit", "date", "torch", "ceilings", "rows"} <= set(layers)
    for row in layers["rows"]:
        ways = row["ways"]
        assert {"fused", "weight gradient", "bmm + norm", "vmap"} < set(ways)
        assert all(figures["us"] > 0 for figures in ways.values())
        assert ways["fused"]["to_floor"] > 0
    for part in ("models", "firststep"):
        rows = json.loads((tmp_path / f"{part}.json").read_text())["rows"]
        assert [row["model"] for row in rows] == list(MODELS)
        measured = {row["model"]: row for row in rows if "skipped" not in row}
        assert {name for name in MODELS if not MODELS[name].needs} <= set(measured)
        for row in measured.values():
            assert row["plain"]["ms"] > 0
            for way in OURS if part == "models" else ("fused",):
                figures = row["ways"][way]
                assert figures["off"] < 0.1
                assert figures["first"]["backwards"] >= 1
                assert ("median" in figures) == (part == "models")


STAGES = ["build", "facts", "wrappers", "operators", "device", "attachment", "sanitizers"]
STAGES += ["firststep", "layers", "models"]


def run_stages(folder, broken, **environment):
    """Run the script itself, with stand-ins for Python and compute-sanitizer."""
    stub = f'#!/bin/sh\ncase "$*" in *{broken}*) exit 3;; esac\necho "ran $*"\n'
    (folder / ".ci").mkdir()
    shutil.copy(ROOT / ".ci/gpu", folder / ".ci")
    for name in ("python", "compute-sanitizer"):
        (folder / name).write_text(stub)
        (folder / name).chmod(0o755)
    environment = {"PYTHON": str(folder / "python"), **environment}
    environment |= {"PATH": f"{folder}:{os.environ['PATH']}", "OUT": str(folder / "out")}
    done = run("bash", folder / ".ci/gpu", **environment)
    return done, [line.split()[1] for line in done.stdout.splitlines() if line.startswith("=== ")]


@pytest.mark.parametrize("broken", [None, "tests/test_cuda.py", "racecheck"])
def test_a_stage_that_fails_hides_no_other(tmp_path, broken):
    done, seen = run_stages(tmp_path, broken)
    assert seen[:-1] == STAGES, done.stdout + done.stderr
    assert done.returncode == bool(broken)
    end = done.stdout.rpartition("=== ")[2]
    stage = {"tests/test_cuda.py": "device", "racecheck": "sanitizers"}.get(broken)
    assert (f"{stage} (exit status 3" if stage else "all stages passed") in end
    logs = tmp_path / "build/gpu/logs"
    assert "-n 14 --all-cases tests/test_ops.py" in (logs / "operators.log").read_text()
    assert "-x tests/test_properties.py" in (logs / "memcheck.log").read_text()
    assert "--limit 131 --each 30" in (logs / "models.log").read_text()
    with tarfile.open(tmp_path / "out/gpu.tar.gz") as made:
        assert {f"build/gpu/logs/{stage}.log" for stage in STAGES} <= set(made.getnames())


def test_stages_are_run_by_name_behind_the_build_that_is_kept(tmp_path):
    done, seen = run_stages(tmp_path, None, STAGES="models", MODELS="GPT|MLP", PROFILE="1")
    assert (seen[:-1], done.returncode) == (["build", "models"], 0)
    assert "--models GPT|MLP --profile" in (tmp_path / "build/gpu/logs/models.log").read_text()
