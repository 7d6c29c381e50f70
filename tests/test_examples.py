"""The examples run as they are, in a folder of their own, and hold what they promise."""

import csv
import os
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parent.parent / "examples"


def run(script, *arguments):
    for needed in ("sklearn", "matplotlib", "tqdm"):
        pytest.importorskip(needed)
    command = [sys.executable, str(EXAMPLES / script), *map(str, arguments)]
    environment = {**os.environ, "MPLBACKEND": "agg"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_rank_digits_finds_the_flipped_labels(tmp_path):
    summary = run("rank_digits.py", "--quick", "--out", tmp_path)
    with (tmp_path / "ranking.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))

    assert len(rows) == 1797
    assert sorted(int(row["index"]) for row in rows) == list(range(1797))
    assert [int(row["rank"]) for row in rows] == list(range(1, 1798))
    norms = [float(row["norm"]) for row in rows]
    assert norms == sorted(norms, reverse=True)
    assert all(bool(int(r["flipped"])) == (r["given"] != r["true"]) for r in rows)

    k = sum(int(row["flipped"]) for row in rows)
    found = sum(int(row["flipped"]) for row in rows[:k])
    assert k == 180
    assert found > 0.8 * k  # chance: 0.1 k
    assert summary.count("\n") == 1, "one line"
    assert summary.startswith(f"{found} of {k} flipped labels")
    assert "all agree" in summary
    assert (tmp_path / "ranking.png").stat().st_size > 50_000
