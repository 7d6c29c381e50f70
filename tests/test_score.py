"""score(): a pool's scores, in the dataset's order, against a loop over its samples."""

import random
import weakref
from itertools import cycle

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from attach_models import Model
from attach_oracle import close, fingerprint, loop, per_model
from torch import nn
from torch.utils.data import BatchSampler, DataLoader, RandomSampler, StackDataset, TensorDataset

import torchgradx
from torchgradx import scoring
from torchgradx.jobs.pool import moved, split_batch

N, C = 23, 4


def classifier():
    return nn.Sequential(nn.Linear(5, 6), nn.Tanh(), nn.LayerNorm(6), nn.Linear(6, C)).double()


def pool(n=N):
    return TensorDataset(torch.randn(n, 5, dtype=torch.float64), torch.randint(0, C, (n,)))


def entropy(model, *batch):
    *inputs, y = batch
    return F.cross_entropy(model(*inputs), y)


def score(model, loader, loss_fn=F.cross_entropy, **options):
    return torchgradx.score(model, loss_fn, loader, progress=False, **options)


LOADERS = {
    "shuffled": lambda d: DataLoader(d, 4, shuffle=True),
    "the last dropped": lambda d: DataLoader(d, 5, shuffle=True, drop_last=True),
    "with replacement": lambda d: DataLoader(d, 4, sampler=RandomSampler(d, True, 50)),
    "batches of one's own": lambda d: DataLoader(d, batch_sampler=[[5, 3, 3], [7], [20, 1, 0, 4]]),
    "batches forever": lambda d: DataLoader(d, batch_sampler=cycle([[9], [2, 9, 9, 4], [1, 0]])),
    "indexed by batches": lambda d: DataLoader(d, None, sampler=BatchSampler(range(N), 4, True)),
    "two workers": lambda d: DataLoader(d, 4, shuffle=True, num_workers=2),
}


@pytest.mark.parametrize("make", LOADERS.values(), ids=LOADERS)
def test_every_sample_is_scored_once_in_the_order_of_the_dataset(make):
    model, data = classifier(), pool()
    got = score(model, make(data))
    assert (type(got), got.dtype, got.shape) == (np.ndarray, np.float64, (N,))
    close(torch.tensor(got), per_model(loop(model, entropy, *data.tensors)))


def test_batches_of_ones_own_stay_together_and_the_rest_fills_up():
    met = []

    def noted(samples):
        met.append([int(x) for (x,) in samples])
        return [torch.tensor(met[-1], dtype=torch.float64)[:, None]] * 2

    own = [[9, 8, 7], [3], [8, 8, 2], [1, 0]]
    loader = DataLoader(TensorDataset(torch.arange(13.0)), batch_sampler=own, collate_fn=noted)
    score(nn.Linear(1, 1).double(), loader, F.mse_loss)
    assert met == [[9, 8, 7], [3], [2], [1, 0], [4, 5, 6], [10, 11, 12]]


def test_an_empty_pool_has_empty_scores():
    loader = DataLoader(pool(0), 4)
    assert score(classifier(), loader).shape == (0,)
    named = score(classifier(), loader, per="module")
    assert list(named) == ["0", "2", "3"]
    assert {column.shape for column in named.values()} == {(0,)}


def test_the_options_of_attach_and_a_sum_are_heard():
    model, data = classifier(), pool()

    def tenfold(out, y):
        return 10 * F.cross_entropy(out, y, reduction="sum")

    options = {"loss_reduction": "sum", "loss_scale": 10.0}
    for backend in ("auto", "vmap"):
        got = score(model, DataLoader(data, 4), tenfold, backend=backend, **options)
        close(torch.tensor(got), per_model(loop(model, entropy, *data.tensors)))


@pytest.mark.parametrize("kind", ["dict", "dict and split", "pair of inputs", "tensor alone"])
def test_what_a_batch_may_be(kind):
    model = Model(lambda m, left, right=None: m.o(left if right is None else left * right),
                  o=nn.Linear(5, C).double())  # fmt: skip
    (x, y), z = pool().tensors, torch.randn(N, 5, dtype=torch.float64)

    def squares(out, _):
        return out.square().mean(1).mean()

    if kind == "tensor alone":
        got = score(model, DataLoader(x, 4), squares)
        want = loop(model, lambda m, x: squares(m(x), None), x)
    elif kind == "pair of inputs":
        got = score(model, DataLoader(TensorDataset(x, z, y), 4))
        want = loop(model, entropy, x, z, y)
    else:
        more = {"labels": y} if kind == "dict and split" else {}
        loader = DataLoader(StackDataset(left=x, right=z, **more), 4)
        split = (lambda b: ((b["left"], b["right"]), b["labels"])) if more else None
        got = score(model, loader, F.cross_entropy if more else squares, split=split)
        loss = F.cross_entropy if more else squares
        want = loop(model, lambda m, x, z, y: loss(m(x, z), y), x, z, y)
    close(torch.tensor(got), per_model(want))


def test_scores_are_had_in_inference_mode():
    model, data = classifier(), pool()
    want = score(model, DataLoader(data, 4))
    with torch.inference_mode():
        assert torchgradx.verify(model, F.cross_entropy, *data.tensors).agrees
        np.testing.assert_array_equal(score(model, DataLoader(data, 4)), want)


def test_a_packed_sequence_is_one_input_and_keeps_its_sizes_on_the_cpu():
    packed = nn.utils.rnn.pack_sequence([torch.ones(2), torch.ones(1)])
    assert split_batch(packed)[0] is packed
    packed, other = moved((packed, torch.ones(2)), torch.device("meta"))
    assert [t.device.type for t in (*packed[:2], other)] == ["meta", "cpu", "meta"]


# ---- Nothing is left behind ----------------------------------------------------------------------
class Counting(nn.Module):
    """Two buffers that every forward changes, one of them by exchanging it."""

    def __init__(self):
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))
        self.register_buffer("latest", torch.zeros(2))

    def forward(self, x):
        self.calls += 1
        self.latest = self.latest + 1
        return x


@pytest.mark.parametrize("fails", [False, True])
@pytest.mark.parametrize("eval_mode", [True, False])
def test_model_and_random_numbers_are_as_they_were(eval_mode, fails):
    model = nn.Sequential(Counting(), nn.Linear(5, 6), nn.Dropout(0.5), nn.Linear(6, C)).double()
    model[3].eval()
    model[1].weight.grad = kept = torch.ones(6, 5, dtype=torch.float64)
    generator, (x, y) = torch.Generator().manual_seed(5), pool().tensors

    class Mine(BatchSampler):
        """Its batches are asked for."""

    sampler = Mine(RandomSampler(range(N), generator=generator), 4, False)

    def states():
        return (torch.get_rng_state().tolist(), generator.get_state().tolist(),
                random.getstate(), np.random.get_state()[1].tolist())  # fmt: skip

    class Restless(TensorDataset):
        def __getitem__(self, index):
            if fails and index == 13:
                raise KeyError("unlucky")
            random.random(), np.random.rand(), torch.rand(1)
            return super().__getitem__(index)

    loader = DataLoader(Restless(x.requires_grad_(), y), batch_sampler=sampler)
    before = fingerprint(model), states(), dict(model.named_buffers())
    if fails:
        with pytest.raises(KeyError, match="unlucky"):
            score(model, loader, eval_mode=eval_mode)
    else:
        score(model, loader, eval_mode=eval_mode)
    assert (fingerprint(model), states()) == before[:2]
    assert all(buffer is before[2][name] for name, buffer in model.named_buffers())
    assert not (model[0].calls + model[0].latest).any()
    assert [p.grad for p in (*model.parameters(), x)] == [kept, None, None, None, None]


def test_scores_are_of_the_eval_mode_unless_said_otherwise():
    model = nn.Sequential(nn.Linear(5, 6), nn.BatchNorm1d(6), nn.Linear(6, C)).double().train()
    data = pool()
    got = score(model, DataLoader(data, 4))
    assert model[1].training
    close(torch.tensor(got), per_model(loop(model.eval(), entropy, *data.tensors)))
    with pytest.raises(torchgradx.CoverageError, match=r"1\.weight"):
        score(model.train(), DataLoader(data, 4), eval_mode=False)


def test_a_pool_is_attached_once_and_needs_the_memory_of_a_batch(monkeypatch, no_collector):
    attached, alive, most = [], weakref.WeakSet(), []
    counted = lambda *a, **k: attached.append(1) or torchgradx.attach(*a, **k)  # noqa: E731
    monkeypatch.setattr(scoring, "attach", counted)

    class Watched(nn.Module):
        def forward(self, x):
            alive.add(x)
            most.append(len(alive))
            return x

    score(nn.Sequential(Watched(), *classifier()), DataLoader(pool(200), 4))
    assert len(attached) == 1
    assert len(most) == 50 + 2  # two samples alone: check="samples"
    assert max(most) <= 2, "batches stay alive"


def test_arguments_are_refused_by_name(tmp_path):
    model, data, two = classifier(), pool(), ["norm", "loss"]
    frozen, one_class = classifier().requires_grad_(False), nn.Linear(5, 1).double()
    loader, folder = DataLoader(data, 4), tmp_path / "folder.npz"
    stream = DataLoader(torch.utils.data.ChainDataset([]))
    folder.mkdir()
    lossy = lambda samples: torch.utils.data.default_collate(samples[:-1])  # noqa: E731
    for kind, words, call in (
        (TypeError, "iterable", lambda: score(model, stream)),
        (TypeError, "DataLoader; got list", lambda: score(model, [1])),
        (ValueError, "batch_size=", lambda: score(model, DataLoader(data, batch_size=None))),
        (ValueError, "per must be", lambda: score(model, loader, per="layer")),
        (ValueError, "kind must be", lambda: score(model, loader, kind=["norm", "norm"])),
        (ValueError, "kind must be .*got 3", lambda: score(model, loader, kind=3)),
        (ValueError, "kind must be", lambda: score(model, loader, kind=[])),
        (ValueError, "top_classes", lambda: score(model, loader, kind="egl", top_classes=1.5)),
        (ValueError, "per must be", lambda: score(model, loader, kind=two, per="module")),
        (ValueError, "C = 2 or more", lambda: score(one_class, loader, kind="margin")),
        (ValueError, "per must be", lambda: score(model, loader, kind="el2n", per="module")),
        (ValueError, "top_classes", lambda: score(model, loader, top_classes=2)),
        (ValueError, "loss_scale", lambda: score(model, loader, kind="egl", loss_scale=2.0)),
        (TypeError, "loss_fn", lambda: score(model, loader, None)),
        (TypeError, "model must be", lambda: score([3], loader)),
        (TypeError, "got function", lambda: score(F.cross_entropy, loader)),
        (ValueError, "got none", lambda: score([], loader)),
        (ValueError, "alike", lambda: score([model, one_class], loader, per="parameter")),
        (ValueError, r"0 to 22; got 0 to 23", lambda: score(model, loader, indices=[0, 23])),
        (TypeError, "indices", lambda: score(model, loader, indices=[0.5])),
        (TypeError, "knows no word", lambda: score(model, loader, kind="el2n", word=1)),
        (ValueError, "is the model frozen", lambda: score(frozen, loader)),
        (TypeError, "say split=", lambda: score(model, DataLoader(data.tensors[0], 4))),
        (TypeError, "say split=", lambda: score(model, DataLoader(StackDataset(a=data), 4))),
        (ValueError, ".npz, .csv, .parquet", lambda: score(model, loader, out="x.txt")),
        (ValueError, "a folder that", lambda: score(model, loader, out=tmp_path / "no" / "x.csv")),
        (ValueError, "is a folder", lambda: score(model, loader, out=folder)),
        (ValueError, "one number", lambda: score(model, loader, lambda o, y: o)),
        (ValueError, "3 of 4 samples", lambda: score(model, DataLoader(data, 4, collate_fn=lossy))),
    ):
        with pytest.raises(kind, match=words):
            call()
