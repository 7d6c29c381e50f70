"""Jobs in two gloo processes on the CPU, held against one. Run by test_two_processes.py."""

import itertools
import os
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import test_score_segments as segments
import torch
import torch.distributed as dist
import torch.nn.functional as F
from attach_models import Model
from test_score_files import Counted
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, Subset

import torchgradx

N, C = 13, 3


def net(seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, C)).double()


def pool(n=N):
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(n, 5, generator=generator, dtype=torch.float64)
    data = Counted(x, torch.randint(0, C, (n,), generator=generator))
    data.reads = []
    return data


def score(model, loader, **options):
    return torchgradx.score(model, F.cross_entropy, loader, progress=False, **options)


def same(got, want):
    np.testing.assert_allclose(got, want, rtol=1e-9)


def only_here(rank, error, words):
    """An error of one rank, which the other is told of."""
    mine = dist.get_rank() == rank
    return pytest.raises(error if mine else RuntimeError, match=words if mine else "another rank")


def a_shard_each(n, sampled, folder):
    data = pool(n)
    sampler = DistributedSampler(data, shuffle=True) if sampled else None
    loader = DataLoader(data, 4, sampler=sampler)
    got = score(net(), loader)
    assert len(data.reads) == len(range(dist.get_rank(), n, 2)), "its shard, and no padding"
    same(got, score(net(), loader, distributed=False))


def parts_under_ddp(folder):
    model = net()
    got = score(DistributedDataParallel(model), DataLoader(pool(), 2), per="parameter")
    want = score(net(), DataLoader(pool(), 2), per="parameter", distributed=False)
    assert list(got) == [f"module.{name}" for name in want]
    for name, column in want.items():
        same(got[f"module.{name}"], column)
    modules = score(DistributedDataParallel(model), DataLoader(pool(), 2), per="module")
    assert list(modules) == ["module.0", "module.2"]


def a_sharded_model(n, folder):
    model = net()
    fully_shard(model[0])
    fully_shard(model)
    got = score(model, DataLoader(pool(n), 2))
    same(got, score(net(), DataLoader(pool(n), 2), distributed=False))
    items = DataLoader([{"x": x, "labels": y} for x, y in pool(n)], 2)
    whole = Model(lambda m, x, labels: {"loss": F.cross_entropy(m.net(x), labels)}, net=model)
    got = torchgradx.score(whole, None, items, kind="loss", progress=False)  # a forward for each
    same(got, score(net(), DataLoader(pool(n), 2), distributed=False, kind="loss"))


def chosen_samples_of_several_models(folder):
    models = [net(0), net(1)]
    chosen = [1, 3, 5, 6]  # rank 1 has three of them
    got = score(models, DataLoader(pool(), 4), indices=chosen)
    whole = score(models, DataLoader(pool(), 4), distributed=False)
    assert np.flatnonzero(~np.isnan(got)).tolist() == chosen
    same(got[chosen], whole[chosen])


def packed_documents(folder):
    """Rows of unequal numbers of documents: rank 0 has those of even items."""
    got, want = (segments.score(segments.gpt(), distributed=d) for d in (True, False))
    assert list(got) == ["item", "id", "norm"]
    for name, column in want.items():
        same(got[name], column)


def interrupted_and_resumed(folder):
    out, data = folder / "scores.npz", pool()
    data.fails = 4  # rank 0 meets it, in its second batch
    with pytest.raises(OSError if dist.get_rank() == 0 else RuntimeError):
        score(net(), DataLoader(data, 2), out=out)
    dist.barrier()
    assert sorted(os.listdir(folder)) == [f"scores.npz.rank{r}.partial" for r in range(2)]
    data = pool()
    got = score(net(), DataLoader(data, 2), out=out)
    looked_at = len(np.unique(np.linspace(0, N - 1, 8, dtype=int)))
    assert len(data.reads) - looked_at == (5 if dist.get_rank() == 0 else 0)
    same(got, score(net(), DataLoader(pool(), 2), distributed=False))
    dist.barrier()
    assert os.listdir(folder) == ["scores.npz"]
    same(np.load(out)["norm"], got)


def models_and_pools_that_differ(folder):
    """As a random_split makes them, whose seed is another on each rank."""
    rank = dist.get_rank()
    with pytest.raises(ValueError, match=r"the same on all ranks.* its buffers"):
        score(net(rank), DataLoader(pool(), 4))
    with pytest.raises(ValueError, match=r"random_split .* must be the same on all ranks"):
        score(net(), DataLoader(Subset(pool(), [0, 1, 2 + rank]), 4))
    with pytest.raises(ValueError, match=r"the dataset .* the same on all ranks"):
        score(net(), DataLoader(pool(N + rank), 4))
    with pytest.raises(ValueError, match=r"indices.* the same on all ranks"):
        score(net(), DataLoader(pool(), 4), indices=[rank])
    with pytest.raises(ValueError, match="whether out is given must be the same on all ranks"):
        score(net(), DataLoader(pool(), 4), out=None if rank else folder / "scores.npz")
    assert len(score(net(), DataLoader(pool(), 4))) == N


def an_error_on_one_rank_before_they_meet(folder):
    """Rank 1 meets the other wherever that waits next: none hangs, and the next call works."""
    rank, loader = dist.get_rank(), DataLoader(pool(), 4)

    def models():
        yield net()
        if rank:
            raise KeyError("mine alone")
        yield net(1)

    with only_here(1, KeyError, "mine alone"):
        score(models(), loader)
    with only_here(1, TypeError, "model must be a torch.nn.Module"):
        score([net(), "net" if rank else net()], loader)
    with pytest.raises((ValueError, RuntimeError), match=r"same on all ranks|another rank"):
        score([net()] * (1 + rank), loader)
    with only_here(1, ValueError, "kind must be one of"):
        score(net(), loader, kind="norms" if rank else "norm")
    with only_here(0, ValueError, "indices must be from 0 to 12"):
        score(net(), loader, indices=[3] if rank else [N])
    data = pool()
    data.fails = 1 if rank else None  # one of those that the partial file tells a dataset by
    with only_here(1, OSError, "sample 1 cannot be read"):
        score(net(), DataLoader(data, 4), out=folder / "scores.npz")
    assert len(score(net(), loader)) == N


def noise(wrap, per, folder, sizes=((6, 7), (4, 2))):
    """Of unequal batches on two ranks: that of one process which weights them as DDP does."""
    single, model = net(), net()
    wrapped = wrap(model) or model
    x, y = pool(sum(map(sum, sizes))).tensors
    parts = [slice(*pair) for pair in itertools.pairwise(np.cumsum([0, *sizes[0], *sizes[1]]))]
    mine = [parts[dist.get_rank()], parts[2 + dist.get_rank()]]
    here = torchgradx.NoiseScale(per=per, decay=0.5)
    there = torchgradx.NoiseScale(per=per, decay=0.5, distributed=False)
    with (
        torchgradx.attach(model, loss_scale=1 / 2) as probe,
        torchgradx.attach(single, loss_scale=1 / 4) as other,
    ):
        for _ in range(2):
            wrapped.zero_grad()
            single.zero_grad()
            for part in mine:
                (F.cross_entropy(wrapped(x[part]), y[part]) / 2).backward()
            for part in parts:
                (F.cross_entropy(single(x[part]), y[part]) / 4).backward()
            here.update(probe)
            there.update(other)
    got, want = here.state_dict(), there.state_dict()
    assert got["steps"] == want["steps"] == 2
    assert list(got["averages"]) == list(want["averages"])
    for name, pair in want["averages"].items():
        np.testing.assert_allclose(got["averages"][name], pair, rtol=1e-8)


def noise_of_what_is_not_averaged_or_of_one_rank_alone(folder):
    ddp, noise = DistributedDataParallel(net()), torchgradx.NoiseScale()
    x, y = (t[dist.get_rank() :: 2] for t in pool().tensors)
    with torchgradx.attach(ddp) as probe:
        with ddp.no_sync():
            F.cross_entropy(ddp(x), y).backward()
            with pytest.raises(RuntimeError, match="another one on each rank"):
                noise.update(probe)
        ddp.zero_grad()
        F.cross_entropy(ddp(x), y).backward()
        if dist.get_rank():
            probe.reset()
        with only_here(1, torchgradx.CoverageError, "nothing is recorded"):
            noise.update(probe)
        ddp.zero_grad()
        F.cross_entropy(ddp(x), y).backward()
        noise.update(probe)
    assert noise.steps == 1


def sharded(model):
    fully_shard(model[0])
    fully_shard(model)


SCENARIOS = {
    "score, shards of unequal size": partial(a_shard_each, N, False),
    "score, a DistributedSampler": partial(a_shard_each, N, True),
    "score, fewer samples than ranks": partial(a_shard_each, 1, False),
    "score, under DDP": parts_under_ddp,
    "score, FSDP": partial(a_sharded_model, 13),
    "score, FSDP, one batch more on a rank": partial(a_sharded_model, 9),
    "score, FSDP, fewer samples than ranks": partial(a_sharded_model, 1),
    "score, chosen samples of several models": chosen_samples_of_several_models,
    "score, models and pools that differ": models_and_pools_that_differ,
    "score, an error on one rank before they meet": an_error_on_one_rank_before_they_meet,
    "score, interrupted and resumed": interrupted_and_resumed,
    "score, packed documents": packed_documents,
    "noise scale, DDP": partial(noise, DistributedDataParallel, "model"),
    "noise scale, DDP, by parameter": partial(noise, DistributedDataParallel, "parameter"),
    "noise scale, what is not averaged": noise_of_what_is_not_averaged_or_of_one_rank_alone,
    "noise scale, FSDP": partial(noise, sharded, "module"),
}


def scenarios(rank, folder):
    def run(scenario, number):
        made = Path(folder) / f"of {number}"
        made.mkdir(exist_ok=True)
        scenario(made)

    return {name: partial(run, scenario, k) for k, (name, scenario) in enumerate(SCENARIOS.items())}
