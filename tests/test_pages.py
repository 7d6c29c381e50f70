"""Every ```python block of README.md and docs/ runs; a block may use the names of earlier ones of
its page. The pages agree with the code where they name it. Examples run as they are, in a folder of
their own, and hold what they promise."""

import csv
import json
import re
import runpy
import sys
from pathlib import Path
from statistics import median

import pytest
import torch
from test_refusals import first_words

import torchgradx
from torchgradx.refusals import SECTIONS

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
FENCE = re.compile(r"^```python[^\n]*\n(.*?)^```", re.MULTILINE | re.DOTALL)
EXTRAS = {
    "lightning", "transformers", "accelerate", "opacus", "sklearn", "tensorboard", "cleanlab",
    "datasets", "pandas",
}  # fmt: skip


def blocks(page):
    text = page.read_text()
    return [(text.count("\n", 0, m.start(1)), m[1]) for m in FENCE.finditer(text)]


BLOCKS = {page: blocks(page) for page in PAGES}
CASES = [(page, index) for page in PAGES for index in range(len(BLOCKS[page]))]
names, done = {page: {} for page in PAGES}, set()  # what the blocks run so far have defined


def run(page, index):
    line, code = BLOCKS[page][index]
    namespace = {"__name__": page.stem, **names[page]}
    try:
        exec(compile("\n" * line + code, str(page), "exec"), namespace)
    except ModuleNotFoundError as error:
        if error.name.partition(".")[0] in EXTRAS:
            pytest.skip(f"{error.name} is not installed: `pip install .[bridges,test]`")
        raise
    names[page].update(namespace)
    done.add((page, index))


def test_every_page_is_there():
    assert BLOCKS[PAGES[0]], "the README shows no code"
    listed = set(re.findall(r"^ +- [^:]+: (\w+\.md)$", (ROOT / "mkdocs.yml").read_text(), re.M))
    assert listed == {page.name for page in PAGES[1:]}


@pytest.mark.parametrize(("page", "index"), CASES, ids=lambda value: getattr(value, "name", value))
@pytest.mark.filterwarnings("ignore")  # of the trainers, on devices and workers
def test_a_block_runs(page, index, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)
    for earlier in range(index + 1):
        if (page, earlier) not in done:
            run(page, earlier)


def test_the_api_page_has_all_that_is_public():
    text = (ROOT / "docs" / "api.md").read_text()
    shown = set(re.findall(r"^::: torchgradx\.(?:[\w.]+\.)?(\w+)$", text, re.MULTILINE))
    assert shown - {"GradNorms", "register"} == set(torchgradx.__all__)


def listed():
    """Rows of docs/errors.md: each section of refusals by the first words of its texts."""
    return [
        f"| {title} | {' · '.join(f'`{first_words(key)}`' for key in section)} |"
        for title, section in SECTIONS.items()
    ]


def test_the_page_of_errors_lists_the_first_words_of_each_refusal():
    lines = (ROOT / "docs" / "errors.md").read_text().splitlines()
    start = lines.index("## What refusals begin with")
    rows = [line for line in lines[start:] if line.startswith("| ")][1:]
    assert rows == listed(), "its rows should be:\n" + "\n".join(listed())


def test_pages_that_are_read_first_are_short():
    lengths = {page.name: len(page.read_text().splitlines()) for page in PAGES}
    assert lengths["README.md"] < 170
    assert lengths["limits.md"] <= 140
    columns = [line.count("|") - 1 for line in PAGES[0].read_text().splitlines() if line[:1] == "|"]
    assert columns
    assert max(columns) <= 6


def test_links_between_pages_lead_somewhere():
    for page in PAGES:
        for target in re.findall(r"\]\((?!https?:)([^)#]+)", page.read_text()):
            assert (page.parent / target).exists(), f"{page.name}: {target}"


# ---- Examples ------------------------------------------------------------------------------------
EXAMPLES = ROOT / "examples"


@pytest.fixture
def example(tmp_path, monkeypatch, capsys):
    """Return a function that runs an example, as in a process of its own but for the imports, and
    returns what it says, and the rows of its table; it draws a picture too."""
    for needed in ("sklearn", "matplotlib", "tqdm"):
        pytest.importorskip(needed)
    monkeypatch.setenv("MPLBACKEND", "agg")
    monkeypatch.syspath_prepend(EXAMPLES)

    def run_it(name, made=None):
        script = EXAMPLES / f"{name}.py"
        monkeypatch.setattr(sys, "argv", [str(script), "--quick", "--out", str(tmp_path)])
        runpy.run_path(str(script), run_name="__main__")
        assert (tmp_path / f"{made or name}.png").stat().st_size > 50_000
        with (tmp_path / f"{made or name}.csv").open(newline="") as file:
            return capsys.readouterr().out, list(csv.DictReader(file))

    return run_it


def test_rank_digits_finds_the_flipped_labels(example, tmp_path):
    summary, rows = example("rank_digits", "ranking")
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


def test_active_learning_scores_labels_that_nobody_gave(example):
    summary, rows = example("active_learning")
    assert {row["labels"] for row in rows} == {"20", "40", "60", "80", "100", "120"}
    assert {row["chosen by"] for row in rows} == {"random", "margin", "expected gradient length"}
    last = [float(row["accuracy"]) for row in rows if row["labels"] == "120"]
    assert min(last) > 0.8  # chance: 0.1
    assert summary.startswith("accuracy with 120 labels")


def test_scores_are_compared_with_their_baselines(example):
    summary, rows = example("which_score")
    scores = {"norm", "loss", "el2n", "margin", "entropy", "last layer's norm"}
    assert {row["score"] for row in rows} == scores
    assert {row["epochs"] for row in rows} == {"1", "2", "3", "5", "8", "12"}
    best = {name: max(int(r["found"]) for r in rows if r["score"] == name) for name in scores}
    for name in ("norm", "loss", "el2n"):
        assert 0.8 * 180 < best[name] <= 180, name  # chance: 18
    assert "found of 180" in summary


def test_the_noise_scale_grows_in_training(example):
    summary, rows = example("noise_scale")
    scales, truths = ([float(row[name]) for row in rows] for name in ("noise_scale", "truth"))
    assert len(scales) == 36
    assert 10 < scales[1] < scales[-1]
    off = [estimate / true for estimate, true in zip(scales[5:], truths[5:], strict=True)]
    assert 1 / 2 < median(off) < 2
    assert summary.startswith(f"first run: noise scale {scales[1]:.0f} samples after 20 steps")


def test_importance_sampling_learns(example):
    _, rows = example("importance_sampling")
    last = {
        way: [float(r["loss"]) for r in rows if (r["drawn"], r["step"]) == (way, "300")]
        for way in ("evenly", "by loss", "by gradient norm")
    }
    assert all(len(losses) == 2 and max(losses) < 0.5 for losses in last.values())  # from 2.3
    assert sum(last["by gradient norm"]) < 1.2 * sum(last["evenly"])


def test_a_transformers_layers_have_all_of_its_gradient(example):
    summary, rows = example("transformer_layers")
    assert len(rows) == 30
    assert float(rows[-1]["loss"]) < 0.8 * float(rows[0]["loss"])
    for row in rows:  # of means: each part no larger than the whole, all of them no smaller
        model, *parts = (float(row[name]) for name in row if name not in ("step", "loss"))
        assert max(parts) <= model <= sum(parts)
    assert summary.startswith("loss ")


def test_packed_documents_have_norms_and_losses_of_their_own(example):
    summary, rows = example("packed_documents")
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


def test_what_spikes_the_loss_is_named_by_norm_more_than_by_loss(example):
    summary, rows = example("loss_spikes")
    damaged, named, by_loss = ({(r["step"], k) for r in rows for k in r[of].split()}
                               for of in ("damaged", "named", "named by loss"))  # fmt: skip
    assert len(damaged) == 24
    assert len(named) > 12
    assert named <= damaged
    assert len(by_loss & damaged) <= len(named)
    said = f"of 24 broken images, norms name {len(named)} and losses {len(by_loss & damaged)};"
    assert summary.startswith(said)
