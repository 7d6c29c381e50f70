"""score, grad_norms and verify beside a standing probe: its record is as if they had not been."""

import gc

import pytest
import torch
import torch.nn.functional as F
from attach_models import Model
from attach_oracle import close, loop, per_model
from clip_oracle import bounded, is_sum, weighted
from clip_oracle import gradients as each
from test_score import C, classifier, entropy, pool
from torch import nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, TensorDataset

import torchgradx

N = 6


def shared():
    """A table that all samples share, and a weight that is read functionally."""

    def forward(m, x):
        return F.linear(torch.tanh(m.a(x) + m.place), m.b.weight)

    return Model(forward, a=nn.Linear(5, 6), b=nn.Linear(6, C), place=torch.randn(6)).double()


def checkpointed(reentrant):
    inner = nn.Sequential(nn.Linear(6, 6), nn.Tanh())
    return Model(lambda m, x: m.b(checkpoint(m.inner, m.a(x), use_reentrant=reentrant)),
                 a=nn.Linear(5, 6), inner=inner, b=nn.Linear(6, C)).double()  # fmt: skip


MODELS = {
    "plain": classifier,
    "shared": shared,
    "checkpoint": lambda: checkpointed(False),
    "reentrant checkpoint": lambda: checkpointed(True),
    "recurrent": lambda: Model(
        lambda m, x: m.b(m.core(x[:, None])[0][:, 0]), core=nn.GRU(5, 6, batch_first=True),
        b=nn.Linear(6, C)).double(),
}  # fmt: skip
OPTIONS = [{}, {"weight_grad": False}, {"fused": False}, {"clip": True}, {"backend": "vmap"}]


def batch(n=N):
    return pool(n).tensors


def norms_of(model, x, y):
    return per_model(loop(model, entropy, x, y))


def grad_norms(model, x, y):
    close(torchgradx.grad_norms(model, F.cross_entropy, x, y), norms_of(model, x, y))


def score(model, x, y):
    kinds = ["norm", "loss", "egl"]
    loader = DataLoader(TensorDataset(x, y), 4)
    got = torchgradx.score(model, F.cross_entropy, loader, kind=kinds, progress=False)
    close(torch.tensor(got["norm"]), norms_of(model, x, y))


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_whatever_runs_between_leaves_the_record_as_it_is(name, options):
    model, (x, y), other = MODELS[name](), batch(), batch(5)
    want = norms_of(model, x, y)
    clipped = weighted(each(model, entropy, x, y), bounded({"": want}, want.median()), "model")
    model.zero_grad()
    entropy(model, x, y).backward()
    gradients = {k: p.grad.clone() for k, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    types = [type(m) for m in model.modules()]
    with torchgradx.attach(model, **options) as probe:
        attached = [type(m) for m in model.modules()]
        for _ in range(2):
            grad_norms(model, *other)  # before the forward,
            loss = entropy(model, x, y)
            score(model, *other)  # between it and its backward,
            loss.backward()
            report = torchgradx.verify(model, F.cross_entropy, *other)  # before norms are read
            assert report.agrees
            close(probe.norms(), want)
            for key, p in model.named_parameters():
                held = None if options == {"weight_grad": False} else gradients.get(key)
                assert (p.grad is None) == (held is None)
                if held is not None:
                    torch.testing.assert_close(p.grad, held)
            if options.get("clip"):
                close(probe.clip_grad_norm_(float(want.median())), want)
                is_sum(model, {key: g / N for key, g in clipped.items()})
            model.zero_grad()
            assert [type(m) for m in model.modules()] == attached
    del loss
    gc.collect()  # a checkpoint's graph is a cycle
    assert [type(m) for m in model.modules()] == types


def test_a_part_or_the_whole_of_an_attached_model_may_be_scored():
    body, (x, y) = classifier(), batch()
    whole = nn.Sequential(body, nn.Linear(C, C).double())
    for attached, other in ((body, whole), (whole, body)):
        with torchgradx.attach(attached) as probe:
            loss = entropy(attached, x, y)
            grad_norms(other, x, y)
            loss.backward()
            close(probe.norms(), norms_of(attached, x, y))


def test_a_probe_that_fails_gives_the_model_back():
    model, (x, y) = classifier(), batch()
    with torchgradx.attach(model) as probe:

        def fails(output, y):
            raise KeyError("unlucky")

        with pytest.raises(KeyError, match="unlucky"):
            torchgradx.grad_norms(model, fails, x, y)
        entropy(model, x, y).backward()
        close(probe.norms(), norms_of(model, x, y))


def test_a_probe_that_is_removed_inside_leaves():
    model, (x, y) = classifier(), batch()
    probe = torchgradx.attach(model)

    def removes(output, y):
        probe.remove()
        return F.cross_entropy(output, y)

    close(torchgradx.grad_norms(model, removes, x, y), norms_of(model, x, y))
    assert [type(m) for m in model.modules()] == [type(m) for m in classifier().modules()]
    torchgradx.attach(model).remove()
