"""Models for tests of whole compiled graphs, and what such a test does with one."""

import copy

import pytest
import torch
import torch.nn.functional as F
from attach_oracle import Model, close_named, loop, mlp, same_gradients, square
from torch import nn

import torchgradx

extension = pytest.mark.skipif(
    not torchgradx.ops.NATIVE, reason="a graph is whole with the extension only"
)
N = 4


def cnn():
    return nn.Sequential(
        nn.Conv2d(3, 4, 3, stride=2, padding=1, bias=False), nn.GroupNorm(2, 4),
        nn.ReLU(inplace=True), nn.Conv2d(4, 4, 3, groups=2), nn.Flatten(), nn.Linear(36, 2),
    )  # fmt: skip


def tokens():
    def forward(m, ids):
        x = m.norm(m.table(ids))
        return m.head(F.gelu(m.up(x)) + m.up(x)).mean(1)

    return Model(forward, table=nn.Embedding(7, 4), norm=nn.LayerNorm(4), up=nn.Linear(4, 6),
                 head=nn.Linear(6, 3))  # fmt: skip


def tied():
    model = tokens()
    model.head = nn.Linear(6, 7)
    model.out, model.back = nn.Linear(4, 7, bias=False), nn.Linear(7, 4)
    model.out.weight = model.table.weight
    model.function = lambda m, ids: m.out(m.norm(m.table(ids)) + m.back(m.head(m.up(m.table(ids)))))
    return model


def rows(n, t=5):
    return torch.randn(n, t, 3).double()


def images(n, size=9):
    return torch.randn(n, 3, size, size).double()


def ids(n, t=5):
    return torch.randint(0, 7, (n, t))


MODELS = {
    "Linear": (mlp, rows),
    "Conv2d, GroupNorm": (cnn, images),
    "Embedding, LayerNorm, a Linear twice": (tokens, ids),
    "a head tied to the table": (tied, ids),
}
every_model = pytest.mark.parametrize(("make", "draw"), MODELS.values(), ids=MODELS)
backends = pytest.mark.parametrize("backend", ["eager", "aot_eager"])


def attached(model, backend="aot_eager", **options):
    if not torchgradx.ops.NATIVE:
        pytest.skip("a graph is whole with the extension only")
    probe = torchgradx.attach(model, **options)
    return probe, torch.compile(model, backend=backend, fullgraph=True)


def held_against_a_loop(model, probe, compiled, *batch, loss=square):
    twin, want = copy.deepcopy(model), loop(model, loss, *batch)
    loss(compiled, *batch).backward()
    loss(twin, *batch).backward()
    close_named(probe.norms(per="parameter"), want)
    same_gradients(model, twin, 1e-9)
    model.zero_grad()
