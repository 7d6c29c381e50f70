"""The command line: what it writes, what it says when an argument is wrong, how it ends."""

import csv
import os
import sqlite3
import sys

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from processes import python
from torch.utils.data import DataLoader

import torchgradx
from torchgradx import cli
from torchgradx.cli import commands, named

USER = """
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
WIDTH = 6
def make():
    return nn.Sequential(nn.Linear(5, WIDTH), nn.Dropout(0.5), nn.Tanh(), nn.Linear(WIDTH, 3))
class Mixing(nn.Module):
    def __init__(self, out=None):
        super().__init__()
        self.fc, self.out = nn.Linear(5, 3), out or nn.Identity()
    def forward(self, x):
        h = self.fc(x)
        return self.out(h - h.mean(0))
def refused():
    return Mixing(nn.Sequential(nn.Tanh(), nn.Linear(3, 3)))
generator = torch.Generator().manual_seed(7)
pool = TensorDataset(torch.randn(20, 5, generator=generator), torch.arange(20) % 3)
loader = DataLoader(pool, 7, shuffle=True)
inputs, settings = pool.tensors[0], {"lr": 0.1}
def pairs():
    return [{"a": x, "b": y} for x, y in pool]
def split(batch):
    return batch["a"], batch["b"]
def loss(out, y):
    return nn.functional.cross_entropy(out, y)
def each(out, y):
    return nn.functional.cross_entropy(out, y, reduction="none")
def wrong(out, y):
    if len(out) < 6:  # the last batch
        raise ValueError("my own error")
    return loss(out, y)
def broken():
    raise KeyError("no such config")
"""


@pytest.fixture
def user(tmp_path, monkeypatch):
    (tmp_path / "mine.py").write_text(USER)
    (tmp_path / "bad.py").write_text("import no_such_package\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", sys.path.copy())
    yield tmp_path
    sys.modules.pop("mine", None)


def column(path, name="norm"):
    with open(path, newline="") as file:
        return [float(row[name]) for row in csv.DictReader(file)]


def aloud(*more, model="mine.py:make", data="mine.py:pool", out="s.csv"):
    given = ["--model", model, "--data", data, "--out", out, "--device", "cpu"]
    return cli.main(["score", *given, *more])


def score(*more, **given):
    return aloud("--force", "--quiet", *more, **given)


def expected(seed=0, **options):
    torch.manual_seed(seed)
    model, data = named.found("", "mine.py:make")(), named.found("", "mine.py:pool")
    return torchgradx.score(model, F.cross_entropy, DataLoader(data, 64), progress=False, **options)


@pytest.mark.parametrize("data", ["mine.py:pool", "mine:pool", "mine.py:loader"])
def test_score_writes_what_the_function_returns(user, capsys, data):
    assert score("--batch-size", "6", data=data) == 0
    np.testing.assert_allclose(column("s.csv"), expected(), rtol=1e-5)
    assert capsys.readouterr().out == "s.csv: norm of 20 samples\n"
    assert sorted(p.name for p in user.iterdir() if p.suffix == ".csv") == ["s.csv"]


def test_options_are_passed_on(user, capsys):
    assert score("--kind", "egl", "--top-classes", "2", "--workers", "1", out="s.npz") == 0
    with np.load("s.npz") as held:
        np.testing.assert_allclose(held["egl"], expected(kind="egl", top_classes=2), rtol=1e-5)
    more = ["--split", "mine.py:split", "--loss", "mine.py:loss", "--per", "parameter"]
    assert score(*more, data="mine.py:pairs") == 0
    for name, want in expected(per="parameter").items():
        np.testing.assert_allclose(column("s.csv", name), want, rtol=1e-5)
    assert score("--backend", "vmap", "--loss", "torch.nn:CrossEntropyLoss") == 0
    np.testing.assert_allclose(column("s.csv"), expected(), rtol=1e-5)
    capsys.readouterr()
    assert score("--kind", "norm,loss", "--kind", "margin") == 0
    assert capsys.readouterr().out == "s.csv: norm, loss, margin of 20 samples\n"
    for kind, want in expected(kind=["norm", "loss", "margin"]).items():
        np.testing.assert_allclose(column("s.csv", kind), want, rtol=1e-5)


def test_checkpoints_and_seeds_are_averaged(user):
    wants = [expected(seed) for seed in (4, 5)]
    for seed in (4, 5):
        torch.manual_seed(seed)
        state = named.found("", "mine.py:make")().state_dict()
        torch.save({"model": state} if seed == 4 else state, f"{seed}.pt")
    assert score("--checkpoint", "4.pt") == 0
    np.testing.assert_allclose(column("s.csv"), wants[0], rtol=1e-5)
    for more in (["--checkpoint", "4.pt", "--checkpoint", "5.pt"], ["--seed", "4", "--seeds", "2"]):
        assert score(*more) == 0
        np.testing.assert_allclose(column("s.csv"), sum(wants) / 2, rtol=1e-5)


@pytest.mark.parametrize("kind", ["norm", "margin"])
def test_the_scores_are_summed_up(user, capsys, kind):
    assert aloud("--kind", kind) == 0
    first, titles, quantiles, heading, *top = capsys.readouterr().out.splitlines()
    want = expected(kind=kind)
    assert first == f"s.csv: {kind} of 20 samples"
    assert titles.split() == ["least", "10%", "median", "90%", "99%", "most"]
    name, *numbers = quantiles.split()
    assert name == kind
    quantile = np.quantile(want, [0, 0.1, 0.5, 0.9, 0.99, 1])
    np.testing.assert_allclose([float(n) for n in numbers], quantile, rtol=1e-3)
    assert heading == f"{'smallest' if kind == 'margin' else 'largest'} {kind}, by index:"
    order = np.argsort(want)[:10] if kind == "margin" else np.argsort(-want)[:10]
    assert [int(line.split()[0]) for line in top] == order.tolist()


def test_a_finished_file_is_replaced_when_told_so_alone(user, capsys):
    assert aloud() == 0
    before = (user / "s.csv").read_bytes()
    assert aloud("--seed", "3") == 2
    assert "--out: s.csv is there: say --force" in capsys.readouterr().err
    assert (user / "s.csv").read_bytes() == before
    assert aloud("--seed", "3", "--force") == 0
    assert (user / "s.csv").read_bytes() != before


def test_torchrun_shares_the_pool(user):
    if not torch.distributed.is_available() or not torch.distributed.is_gloo_available():
        pytest.skip("this torch has no gloo")
    launch = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    given = ["--model", "mine:make", "--data", "mine:pool", "--out", "s.csv", "--device", "cpu"]
    path = os.pathsep.join([".", *sys.path])
    done = python(*launch, "-m", "torchgradx", "score", *given, timeout=300, PYTHONPATH=path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("s.csv: norm of 20 samples\n")
    assert done.stdout.count("largest norm") == 1, "of one rank"
    np.testing.assert_allclose(column("s.csv"), expected(), rtol=1e-5)
    assert not list(user.glob("*.partial"))


def verify(*more, model="mine.py:make", data="mine.py:pool"):
    return cli.main(["verify", "--model", model, "--data", data, "--device", "cpu", *more])


def test_verify_prints_the_table_and_exit_codes_tell(user, capsys):
    assert verify("--samples", "5") == 0
    assert "0.weight" in capsys.readouterr().out
    assert verify(model="mine.py:Mixing") == 1
    assert "fc.weight" in capsys.readouterr().err
    assert verify("--rtol", "1e-30") == 1
    for command in (verify, score):
        assert command(model="mine.py:refused") == 1
        said = capsys.readouterr().err
        assert "fc.weight" in said
    assert "refused: " in said


@pytest.mark.parametrize("command", [[], ["score"], ["verify"]])
def test_help_tells_the_options_and_the_exit_codes(command, capsys):
    assert cli.main([*command, "--help"]) == 0
    said = capsys.readouterr().out
    assert "exit codes" in said
    if command:
        for option in ("--model", "--data", "--loss", "--split", "--device", "--checkpoint"):
            assert option in said


def test_a_wrong_argument_is_named_and_ends_with_2(user, capsys):
    torch.save({"x": torch.zeros(2)}, "other.pt")
    (user / "json.py").write_text("def dumps(): pass\n")
    for words, call in (
        ("--model", lambda: score(model="mine.py")),
        ("--model: there is no file absent.py", lambda: score(model="absent.py:make")),
        ("--model: absent:make: ModuleNotFoundError", lambda: score(model="absent:make")),
        ("no_such_package", lambda: score(model="bad:make")),
        ("module 'mine' has no attribute 'mak'", lambda: score(model="mine.py:mak")),
        ("json.py has the name of another module", lambda: score(model="json.py:dumps")),
        ("--model: mine.py:broken() failed: KeyError", lambda: score(model="mine.py:broken")),
        ("--model: mine.py:WIDTH() failed: TypeError", lambda: score(model="mine.py:WIDTH")),
        ("must be or return an nn.Module", lambda: score(model="mine.py:pairs")),
        ("--data: mine.py:settings must be", lambda: score(data="mine.py:settings")),
        ("say --split", lambda: score(data="mine.py:inputs")),
        ("--data: mine.py:Mixing must be", lambda: score(data="mine.py:Mixing")),
        ("--loss: expected cross_entropy", lambda: score("--loss", "crossentropy")),
        ("verify: loss_fn must return one number", lambda: verify("--loss", "mine.py:each")),
        ("say --split", lambda: verify(data="mine.py:inputs")),
        ("score: [Errno 2]", lambda: score(out="/proc/s.csv")),
        ("--split", lambda: score("--split", "mine.py:absent")),
        ("--device: tpu", lambda: score("--device", "tpu")),
        ("--checkpoint: other.pt", lambda: score("--checkpoint", "other.pt")),
        ("--seeds", lambda: score("--seeds", "0")),
        ("kind must be one of", lambda: score("--kind", "length")),
        ("batch_size", lambda: score("--batch-size", "0")),
        ("--samples", lambda: verify("--samples", "0")),
        ("required", lambda: cli.main(["score"])),
    ):
        assert call() == 2, words
        said = capsys.readouterr().err
        assert words in said, (words, said)
        assert "Traceback" not in said


def test_a_partial_result_of_something_else_says_fresh(user, capsys):
    with pytest.raises(ValueError, match="my own error"):  # with its trace: it is the user's
        score("--loss", "mine.py:wrong", "--batch-size", "6")
    assert (user / "s.csv.partial").exists()
    assert score() == 2
    said = capsys.readouterr().err
    assert "loss_fn" in said
    assert "--fresh" in said
    other = sqlite3.connect("s.csv.partial")
    other.execute("BEGIN EXCLUSIVE")
    with pytest.raises(BlockingIOError):
        expected(out="s.csv")
    assert score("--fresh") == 2
    other.close()
    assert "s.csv.partial is being written by another process" in capsys.readouterr().err
    assert score("--fresh") == 0


INTERRUPTED = """
reads = []
class Interrupted(TensorDataset):
    def __getitem__(self, index):
        reads.append(index)
        if len(reads) == 8 + 15:  # after those of the fingerprint
            raise KeyboardInterrupt
        return super().__getitem__(index)
interrupted = Interrupted(*pool.tensors)
"""


def test_an_interrupt_ends_with_130_and_says_how_to_go_on(user, capsys, monkeypatch):
    (user / "mine.py").write_text(USER + INTERRUPTED)
    again = {"data": "mine.py:interrupted"}
    assert aloud("--batch-size", "5", **again) == 130
    said = capsys.readouterr().err
    assert "interrupted; s.csv.partial keeps what is done, and the same command goes on" in said
    assert aloud("--batch-size", "5", **again) == 0
    assert "going on from 10 of 20 samples, in s.csv.partial" in capsys.readouterr().err
    np.testing.assert_allclose(column("s.csv"), expected(), rtol=1e-5)
    assert not (user / "s.csv.partial").exists()
    at_once = lambda *args, **options: (_ for _ in ()).throw(KeyboardInterrupt)  # noqa: E731
    monkeypatch.setattr(commands, "score", at_once)
    assert score() == 130
    assert "interrupted; nothing was kept" in capsys.readouterr().err
