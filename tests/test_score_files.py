"""What score() writes: the whole result, and the partial one that a kill leaves behind."""

import copy
import csv
import functools
import os
import sys

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from processes import python
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import torchgradx
from torchgradx.jobs import fingerprint

N = 30


class Counted(TensorDataset):
    """Notes which samples are read, and fails at one of them."""

    reads, fails = None, None

    def __getitem__(self, index):
        if index == self.fails:
            raise OSError(f"sample {index} cannot be read")
        if self.reads is not None:
            self.reads.append(index)
        return super().__getitem__(index)


def pool():
    torch.manual_seed(1)
    return Counted(torch.randn(N, 5), torch.randint(0, 3, (N,)))


def model(seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 3))


def score(net, data, batch=4, loss=F.cross_entropy, **options):
    return torchgradx.score(net, loss, DataLoader(data, batch), progress=False, **options)


def interrupted(net, out, fails=17, **options):
    """A run that fails at a sample, none of those that the fingerprint reads."""
    data = pool()
    data.fails = fails
    with pytest.raises(OSError, match=f"sample {fails}"):
        score(net, data, out=out, **options)


def test_of_several_models_those_that_are_done_are_not_scored_again(tmp_path):
    out, nets = tmp_path / "scores.npz", [model(seed) for seed in range(3)]
    want = score(nets, pool())

    def first_two():
        yield from nets[:2]
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        score(first_two(), pool(), out=out)
    data = pool()
    data.reads = []
    got = score(nets, data, out=out)
    assert data.reads[8:] == list(range(N))
    np.testing.assert_array_equal(got, want)
    with pytest.raises(KeyboardInterrupt):
        score(first_two(), pool(), out=out)
    with pytest.raises(torchgradx.ResumeError, match="other weights"):
        score(nets[1:], pool(), out=out)
    with pytest.raises(torchgradx.ResumeError, match="2 models; got 1"):
        score(nets[:1], pool(), out=out)


KILLED = """
import os, sys
sys.path.insert(0, {tests!r})
import test_score_files as t
read = t.Counted.__getitem__
t.Counted.__getitem__ = lambda data, k: os._exit(9) if k == 17 else read(data, k)
t.score(t.model(), t.pool(), out={out!r}, per={per!r})
"""


@pytest.mark.parametrize("per", ["model", "parameter"])
def test_a_kill_loses_the_batch_in_hand_alone(tmp_path, per):
    """Nothing of Python's runs at its end."""
    out, data = tmp_path / "scores.npz", pool()
    killed = python("-c", KILLED.format(tests=os.path.dirname(__file__), out=str(out), per=per))
    assert killed.returncode == 9, killed.stderr
    assert (tmp_path / "scores.npz.partial").exists()
    data.reads = []
    got = score(model(), data, batch=7, out=out, per=per)
    assert data.reads[8:] == list(range(16, N)), "after those of the fingerprint"
    want = score(model(), pool(), per=per)
    for name in want if per == "parameter" else [None]:
        a, b = (x if name is None else x[name] for x in (got, want))
        np.testing.assert_allclose(a, b, rtol=1e-5)
    assert os.listdir(tmp_path) == ["scores.npz"]


@pytest.mark.parametrize("damage", ["first bytes", "cut"])
def test_a_damaged_file_is_named(tmp_path, damage):
    out, net = tmp_path / "scores.npz", model()
    interrupted(net, out)
    kept = tmp_path / "scores.npz.partial"
    data = kept.read_bytes()
    kept.write_bytes(data[:-150] if damage == "cut" else b"x" + data[1:])
    with pytest.raises(torchgradx.ResumeError, match=r"scores\.npz\.partial is .* damaged"):
        score(net, pool(), out=out)
    kept.unlink()
    np.testing.assert_allclose(score(net, pool(), out=out), score(net, pool()), rtol=1e-5)


def double(out, y):
    return 2 * F.cross_entropy(out, y)


def scaled(out, y, factor):
    return factor * F.cross_entropy(out, y)


def scaled_by(factor):
    return functools.partial(scaled, factor=factor)


def test_a_partial_result_of_something_else_is_refused_by_name(tmp_path):
    out, net = tmp_path / "scores.npz", model()
    interrupted(net, out, loss=scaled_by(2.0))
    other_data = Counted(pool().tensors[0] + 1, pool().tensors[1])
    one_more = pool()
    one_more.tensors[1][1] += 1  # none of those that the fingerprint reads
    frozen = copy.deepcopy(net)
    frozen[0].bias.requires_grad_(False)
    gelu = nn.Sequential(net[0], nn.GELU(), net[2])
    same = {"loss": scaled_by(2.0), "out": out}
    for words, call in (
        ("loss_fn", lambda: score(net, pool(), out=out)),
        ("dataset", lambda: score(net, other_data, **same)),
        ("dataset", lambda: score(net, Counted(*(t[:-1] for t in pool().tensors)), **same)),
        ("per", lambda: score(net, pool(), per="module", **same)),
        ("kind", lambda: score(net, pool(), kind="el2n", **same)),
        ("eval_mode", lambda: score(net, pool(), eval_mode=False, **same)),
        ("indices", lambda: score(net, pool(), indices=[1], **same)),
        ("loss_scale", lambda: score(net, pool(), loss_scale=2.0, **same)),
        ("dataset", lambda: score(net, one_more, **same)),
        ("other weights", lambda: score(frozen, pool(), **same)),
        ("other weights", lambda: score(model(1), pool(), **same)),
        ("other weights", lambda: score(gelu, pool(), **same)),
    ):
        with pytest.raises(torchgradx.ResumeError, match=words):
            call()
    assert not out.exists()
    again = score(model(1), pool(), resume=False, **same)
    np.testing.assert_allclose(again, 2 * score(model(1), pool()), rtol=1e-5)


class Loss:
    def __init__(self, smoothing):
        self.smoothing = smoothing

    def __call__(self, out, y):
        return F.cross_entropy(out, y, label_smoothing=self.smoothing)

    def method(self, out, y):
        return self(out, y)


class Other(Loss):
    pass


def size_of(place, args, kwargs):
    return len(args[place])


PROMPT = {"F": F}  # of functions without a source: what they are made of is not looked at
exec("def first(out, y): return F.cross_entropy(out, y)\nsecond = lambda *a: first(*a)", PROMPT)
LOSSES = {
    "the numbers of an object": (Loss(0.1), Loss(0.2)),
    "the object of a method": (Loss(0.1).method, Loss(0.2).method),
    "the class of a method's object": (Loss(0.1).method, Other(0.1).method),
    "the numbers of a module": [nn.CrossEntropyLoss(label_smoothing=by) for by in (0.1, 0.2)],
    "the arguments of a partial": (scaled_by(2.0), scaled_by(3.0)),
    "the bits of a partial's tensors": [scaled_by(torch.tensor(by)) for by in (1.00001, 1.00002)],
    "the text": (
        lambda out, y: 2 * F.cross_entropy(out, y),
        lambda out, y: 3 * F.cross_entropy(out, y),
    ),
    "the name": (double, scaled_by(2.0)),
    "the name, without a source": (PROMPT["first"], PROMPT["second"]),
    "an option": (functools.partial(size_of, 0), functools.partial(size_of, -1)),
}


@pytest.mark.parametrize("by", LOSSES)
def test_a_loss_is_told_by(tmp_path, by):
    """And so is an option: a function's address is another in each process."""
    (one, other), out, net = LOSSES[by], tmp_path / "scores.npz", model()
    which, match = ("batch_size",) * 2 if by == "an option" else ("loss", "loss_fn")
    interrupted(net, out, **{which: one})
    with pytest.raises(torchgradx.ResumeError, match=match):
        score(net, pool(), out=out, **{which: other})
    score(net, pool(), out=out, **{which: copy.copy(one)})


def test_addresses_are_left_out():
    kind = type("Image", (), {"__repr__": lambda image: f"<Image at 0x{id(image):X}>"})  # as PIL's
    for make in (kind, lambda: np.array([kind()])):
        assert fingerprint.of_values(one := make()) == fingerprint.of_values(make()), one


def test_a_file_without_scores_binds_nobody(tmp_path):
    out, net = tmp_path / "scores.npz", model()
    interrupted(net, out, fails=1, loss=double)
    assert os.listdir(tmp_path) == ["scores.npz.partial"]
    np.testing.assert_array_equal(score(model(1), pool(), out=out), score(model(1), pool()))


def test_a_model_in_another_mode_is_another(tmp_path):
    same = {"out": tmp_path / "scores.npz", "eval_mode": False}
    interrupted(model().eval(), **same)
    with pytest.raises(torchgradx.ResumeError, match="another model"):
        score(model(), pool(), **same)
    score(model().eval(), pool(), **same)


def columns_of(path):
    if path.suffix == ".npz":
        with np.load(path) as archive:
            return dict(archive)
    if path.suffix == ".parquet":
        table = pytest.importorskip("pyarrow.parquet").read_table(path)
        return {name: table[name].to_numpy() for name in table.column_names}
    with path.open(newline="") as file:
        rows = list(csv.reader(file))
    return {n: np.array(c, float) for n, *c in zip(*rows, strict=True)}


def read(path):
    columns = columns_of(path)
    if path.suffix != ".npz":
        assert columns.pop("index").tolist() == [*range(len(next(iter(columns.values()))))]
    return columns


@pytest.mark.parametrize("ending", [".npz", ".csv", ".parquet"])
def test_a_file_holds_what_score_returns(tmp_path, ending):
    if ending == ".parquet":
        pytest.importorskip("pyarrow")
    net, out = model(), tmp_path / f"scores{ending}"
    whole = score(net, pool(), out=out, indices=range(1, N))
    held = read(out)
    assert (list(held), whole.dtype) == (["norm"], np.float32)
    assert np.flatnonzero(np.isnan(whole)).tolist() == [0]
    np.testing.assert_array_equal(held["norm"].astype(np.float32), whole)
    named = score(net, pool(), out=out, per="parameter")  # replaces it
    held = read(out)
    assert list(held) == list(named)
    for name, column in named.items():
        np.testing.assert_array_equal(held[name].astype(np.float32), column)
    assert os.listdir(tmp_path) == [out.name]


def test_a_result_that_cannot_be_written_leaves_the_old_one(tmp_path):
    out = tmp_path / "scores.csv"
    torchgradx.save_scores(out, {"user": [1, 2], "item": [3, 4]})  # of modules of these names
    assert read(out).keys() == {"user", "item"}
    for scores in (torch.arange(3.0), [0.0, 1.0, 2.0], np.arange(3.0)):
        torchgradx.save_scores(out, scores)
        assert columns_of(out)["norm"].tolist() == [0, 1, 2]
    for scores in ({"a": np.zeros(2), "b": np.zeros(3)}, np.zeros((2, 2)), np.float64(1)):
        with pytest.raises(ValueError, match="one length"):
            torchgradx.save_scores(out, scores)
    assert os.listdir(tmp_path) == ["scores.csv"]
    assert columns_of(out)["norm"].tolist() == [0, 1, 2]


def test_parquet_without_pyarrow_says_what_to_install(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(ImportError, match="pip install pyarrow"):
        score(model(), pool(), out=tmp_path / "scores.parquet")


def test_progress_is_a_bar_where_there_is_tqdm(capsys, monkeypatch):
    pytest.importorskip("tqdm")
    loader = DataLoader(pool(), 4)
    torchgradx.score(model(), F.cross_entropy, loader)
    assert "30/30" in capsys.readouterr().err
    score(model(), pool())
    monkeypatch.setitem(sys.modules, "tqdm", None)
    torchgradx.score(model(), F.cross_entropy, loader)
    assert not capsys.readouterr().err
