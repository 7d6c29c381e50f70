"""What trains changes between the steps, and layers are left out: what samples share stays exact.

Tables of positions, parameters of the root and weights read beside their module's calls are found
by watching a forward once. Another graph is not what was watched.
"""

import pytest
import torch
import torch.nn.functional as F
from attach_oracle import (
    Model,
    a_few_modes,
    close_named,
    loop,
    square,
    title,
)
from torch import nn

import torchgradx
from torchgradx import ops

N, T, D, V = 4, 5, 6, 9
modes = pytest.mark.parametrize(
    "options", [{}, {"fused": False}, {"weight_grad": False}], ids=title
)


def language(m, ids):
    h = m.embed(ids) + m.place(torch.arange(T)) * m.gain
    h = h + torch.tanh(m.mix(h)) if m.deep else h
    h = m.into(m.time(h)[0][:, -1] if m.deep else h[:, -1])
    return F.linear(h, m.embed.weight) if ops.NATIVE else h


def model():
    made = Model(language, embed=nn.Embedding(V, D), place=nn.Embedding(T, D), gain=torch.randn(D),
                 mix=nn.Linear(D, D), time=nn.LSTM(D, D, batch_first=True),
                 into=nn.Linear(D, D)).double()  # fmt: skip
    made.deep = True
    return made


def steps(probe, net, how_many=2):
    for _ in range(how_many):
        ids = torch.randint(0, V, (N, T))
        want = loop(net, square, ids)
        square(net, ids).backward()
        close_named(probe.norms(per="parameter"), want)


@modes
@pytest.mark.parametrize("frozen", ["embed", "place", "gain", "mix", "time", "into"])
def test_parts_frozen_between_steps_and_thawed_again(frozen, options):
    net = model()
    live = [p for name, p in net.named_parameters() if name.partition(".")[0] == frozen]
    with torchgradx.attach(net, **options) as probe:
        for on in (True, False, True, False):
            for p in live:
                p.requires_grad_(on)
            steps(probe, net)


@modes
def test_layers_left_out_in_some_steps(options):
    """The root's own use has another number then."""
    net = model()
    with torchgradx.attach(net, **options) as probe:
        for deep in (True, False, True, False):
            net.deep = deep
            steps(probe, net)


@a_few_modes
def test_a_root_with_a_table_whose_blocks_are_dropped(options):
    def blocks(m, x):
        h = m.i(x) + m.table
        for block in m.blocks[: m.depth]:
            h = h + torch.tanh(block(h))
        return m.o(h)

    net = Model(blocks, i=nn.Linear(3, D), o=nn.Linear(D, 2), table=torch.randn(T, D),
                blocks=nn.ModuleList(nn.Linear(D, D) for _ in range(3))).double()  # fmt: skip
    with torchgradx.attach(net, **options) as probe:
        for net.depth in (3, 1, 2, 0, 3):
            x = torch.randn(N, T, 3).double()
            want = loop(net, square, x)
            square(net, x).backward()
            close_named(probe.norms(per="parameter"), want)
