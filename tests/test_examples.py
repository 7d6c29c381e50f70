"""The examples run as they are, in a folder of their own, and hold what they promise."""

import csv
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from statistics import median

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
    assert f"Wrote {tmp_path / 'ranking.png'}" in summary
    rivals = re.search(r"by loss (\d+), by EL2N (\d+), by chance 18", summary)
    assert all(0.8 * k < int(number) <= k for number in rivals.groups())
    assert (tmp_path / "ranking.png").stat().st_size > 50_000


def test_the_notebook_runs_from_its_first_cell_to_its_last(monkeypatch, capsys):
    for needed in ("sklearn", "matplotlib"):
        pytest.importorskip(needed)
    monkeypatch.setenv("MPLBACKEND", "agg")
    notebook = json.loads((EXAMPLES / "first_hour.ipynb").read_text())
    names = {}
    for number, cell in enumerate(notebook["cells"]):
        if cell["cell_type"] == "code":
            assert not cell["outputs"], "committed without what a run shows"
            exec(compile("".join(cell["source"]), f"cell {number}", "exec"), names)
    said = capsys.readouterr().out
    assert "Noise scale: " in said
    assert "1 left out" in said
    assert all(count > names["k"] / 2 for count in names["found"].values())


def rows_of(path):
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def test_active_learning_scores_labels_that_nobody_gave(tmp_path):
    summary = run("active_learning.py", "--quick", "--out", tmp_path)
    rows = rows_of(tmp_path / "active_learning.csv")
    assert {row["labels"] for row in rows} == {"20", "40", "60", "80", "100", "120"}
    assert {row["chosen by"] for row in rows} == {"random", "margin", "expected gradient length"}
    last = [float(row["accuracy"]) for row in rows if row["labels"] == "120"]
    assert min(last) > 0.8  # chance: 0.1
    assert summary.startswith("accuracy with 120 labels")
    assert (tmp_path / "active_learning.png").stat().st_size > 50_000


def test_scores_are_compared_with_their_baselines(tmp_path):
    summary = run("which_score.py", "--quick", "--out", tmp_path)
    rows = rows_of(tmp_path / "which_score.csv")
    scores = {"norm", "loss", "el2n", "margin", "entropy", "last layer's norm"}
    assert {row["score"] for row in rows} == scores
    assert {row["epochs"] for row in rows} == {"1", "2", "3", "5", "8", "12"}
    best = {name: max(int(r["found"]) for r in rows if r["score"] == name) for name in scores}
    for name in ("norm", "loss", "el2n"):
        assert 0.8 * 180 < best[name] <= 180, name  # chance: 18
    assert "found of 180" in summary
    assert (tmp_path / "which_score.png").stat().st_size > 50_000


def test_the_noise_scale_grows_in_training(tmp_path):
    summary = run("noise_scale.py", "--quick", "--out", tmp_path)
    rows = rows_of(tmp_path / "noise_scale.csv")
    scales, truths = ([float(row[name]) for row in rows] for name in ("noise_scale", "truth"))
    assert len(scales) == 36
    assert 10 < scales[1] < scales[-1]
    off = [estimate / true for estimate, true in zip(scales[5:], truths[5:], strict=True)]
    assert 1 / 2 < median(off) < 2
    assert summary.startswith(f"first run: noise scale {scales[1]:.0f} samples after 20 steps")
    assert (tmp_path / "noise_scale.png").stat().st_size > 50_000


def test_importance_sampling_learns(tmp_path):
    run("importance_sampling.py", "--quick", "--out", tmp_path)
    rows = rows_of(tmp_path / "importance_sampling.csv")
    last = {
        way: [float(r["loss"]) for r in rows if (r["drawn"], r["step"]) == (way, "300")]
        for way in ("evenly", "by loss", "by gradient norm")
    }
    assert all(len(losses) == 2 and max(losses) < 0.5 for losses in last.values())  # from 2.3
    assert sum(last["by gradient norm"]) < 1.2 * sum(last["evenly"])
    assert (tmp_path / "importance_sampling.png").stat().st_size > 50_000


def test_a_transformers_layers_have_all_of_its_gradient(tmp_path):
    summary = run("transformer_layers.py", "--quick", "--out", tmp_path)
    rows = rows_of(tmp_path / "transformer_layers.csv")
    assert len(rows) == 30
    assert float(rows[-1]["loss"]) < 0.8 * float(rows[0]["loss"])
    for row in rows:  # of means: each part no larger than the whole, all of them no smaller
        model, *parts = (
            float(value) for name, value in row.items() if name not in ("step", "loss")
        )
        assert max(parts) <= model <= sum(parts)
    assert summary.startswith("loss ")
    assert (tmp_path / "transformer_layers.png").stat().st_size > 50_000


def test_packed_documents_have_norms_and_losses_of_their_own(tmp_path):
    summary = run("packed_documents.py", "--quick", "--out", tmp_path)
    rows = rows_of(tmp_path / "packed_documents.csv")
    assert [int(row["item"]) for row in rows] == list(range(200))
    assert all(float(row["norm"]) > 0 for row in rows)
    damaged = [row["kind"] != "sound" for row in rows]
    assert sum(damaged) == 20
    for name, words in (("norm", "norms find"), ("loss", "losses")):
        order = sorted(range(200), key=lambda k: -float(rows[k][name]))
        found = sum(damaged[k] for k in order[:20])
        assert found >= 5  # chance: 2
        assert f"{words} {found}" in summary
    assert summary.startswith("Of 20 damaged documents")
    assert (tmp_path / "packed_documents.png").stat().st_size > 50_000


def test_what_spikes_the_loss_is_named_by_norm_more_than_by_loss(tmp_path):
    summary = run("loss_spikes.py", "--quick", "--out", tmp_path)
    rows = rows_of(tmp_path / "loss_spikes.csv")
    damaged, named, by_loss = ({(r["step"], k) for r in rows for k in r[of].split()}
                               for of in ("damaged", "named", "named by loss"))  # fmt: skip
    assert len(damaged) == 24
    assert len(named) > 12
    assert named <= damaged
    assert len(by_loss & damaged) <= len(named)
    said = f"of 24 broken images, norms name {len(named)} and losses {len(by_loss & damaged)};"
    assert summary.startswith(said)
    assert (tmp_path / "loss_spikes.png").stat().st_size > 50_000
