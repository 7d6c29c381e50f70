"""Nothing in a steady step waits for the device: no number is read back, nothing is copied there.

On a CPU the operations are counted that would wait on a GPU; on a GPU torch itself raises.
"""

from __future__ import annotations

import contextlib

import pytest
import torch
from attach_oracle import DEVICE as NAME
from attach_oracle import rms_norm
from counters import Counter
from test_experts import WAYS as WAYS_OF_EXPERTS
from test_experts import mixture
from torch import nn

import torchgradx
from torchgradx import ops
from torchgradx.record import modes

DEVICE = torch.device(NAME)
# Operators that read a number of a tensor, or make a result whose size depends on one.
READ = {"_local_scalar_dense", "item", "is_nonzero", "equal", "nonzero", "masked_select", "unique2"}
N, T, D, V = 4, 6, 8, 11


def waits(func, args):
    name = func.name().partition("::")[2].partition(".")[0]
    indices = args[1] if name in ("index", "index_put", "index_put_") else ()
    masks = any(i is not None and i.dtype == torch.bool for i in indices)
    return name if name in READ or masks else None


@contextlib.contextmanager
def counted(allowed=0):
    """On a GPU the first wait raises."""
    if DEVICE.type == "cuda":
        torch.cuda.set_sync_debug_mode("error")
        try:
            yield
        finally:
            torch.cuda.set_sync_debug_mode("default")
    else:
        with Counter(waits) as counter:
            yield
        assert counter.counts.total() <= allowed, counter.counts


class Block(nn.Module):
    """A transformer-like model with every way that parameters are served."""

    def __init__(self):
        super().__init__()
        self.table, self.positions = nn.Embedding(V, D), nn.Parameter(torch.randn(T, D))
        self.norm, self.own = nn.LayerNorm(D), rms_norm(D)
        self.up, self.down = nn.Linear(D, 2 * D), nn.Linear(2 * D, D)
        self.gamma = nn.Parameter(torch.rand(D))
        self.head = nn.Linear(D, V, bias=False)

    def forward(self, ids):
        x = self.table(ids) + self.positions
        x = x + self.gamma * self.down(torch.tanh(self.up(self.norm(x))))
        return self.head(self.own(x))


def loss_of(model, ids):
    return model(ids).logsumexp(-1).mean()


def read(probe):
    probe.norms()


def clip(probe, **options):
    probe.clip_grad_norm_(0.01, **options)


WAYS = {  # options of attach, what reads, reads of the CPU's own memory that decide what is done
    "norms": ({}, read, 0),
    "norms alone": ({"weight_grad": False}, read, 0),
    "clip": ({"clip": True}, clip, 4),
    "deferred clip": ({"clip": True, "weight_grad": False}, clip, 0),
    "dropping": (
        {"clip": True, "weight_grad": False},
        lambda probe: clip(probe, nonfinite="drop"),
        0,
    ),
    "by parameter": (
        {"clip": True, "weight_grad": False},
        lambda probe: clip(probe, per="parameter"),
        0,
    ),
    "a tensor for the loss": (
        {"loss_scale": torch.rand(N, dtype=torch.float64, device=DEVICE) + 0.5},
        read,
        0,
    ),
}


@pytest.mark.skipif(not ops.NATIVE, reason="is of the kernels")
@pytest.mark.parametrize("way", WAYS)
def test_a_steady_step_waits_for_nothing(way, monkeypatch):
    monkeypatch.setattr(modes, "_off", contextlib.nullcontext)  # the counter hears ours too
    options, reads, allowed = WAYS[way]
    torch.manual_seed(0)
    model = Block().to(DEVICE)
    ids = torch.randint(0, V, (N, T), device=DEVICE)
    with torchgradx.attach(model, **{"loss_reduction": "mean", **options}) as probe:
        for _ in range(3):  # the first prove where the samples are
            loss_of(model, ids).backward()
            reads(probe)
            model.zero_grad()
        loss = loss_of(model, ids)
        with counted(allowed):
            loss.backward()
            reads(probe)


@pytest.mark.skipif(not ops.NATIVE, reason="the fallback runs them again")
@pytest.mark.parametrize("way", ["grouped", "grouped, biased", "batched, turned"])
def test_experts_are_waited_for_once_a_call(way, monkeypatch):
    """In the forward, for whose rows they have, and how many. No sample is in E columns."""
    monkeypatch.setattr(modes, "_off", contextlib.nullcontext)
    model, copied, cpu = mixture(WAYS_OF_EXPERTS[way]()).to(DEVICE), [], torch.Tensor.cpu
    with torchgradx.attach(model, loss_reduction="sum") as probe:
        for _ in range(3):
            loss = model(torch.randn(5, T, D, device=DEVICE)).square().sum()
            loss.backward()
            probe.norms()
        monkeypatch.setattr(torch.Tensor, "cpu", lambda t: copied.append(t) or cpu(t))
        # on a CPU, random states are compared beside it
        with counted(1) if DEVICE.type == "cpu" else contextlib.nullcontext():
            loss = model(torch.randn(5, T, D, device=DEVICE)).square().sum()
        assert len(copied) == 1
        with counted():
            loss.backward()
            probe.norms()
        assert len(copied) == 1
