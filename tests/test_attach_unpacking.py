"""What all samples share, in nodes that saved through hooks: each is asked, and then it runs."""

import contextlib
import copy

import pytest
import torch
from attach_oracle import (
    Model,
    a_few_modes,
    check,
    close,
    loop_model,
    same_gradients,
    square,
)
from torch import nn
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

import torchgradx

N, T, D = 6, 5, 4


def rows():
    return torch.arange(T) % 3  # some twice


KINDS = {
    "a table": lambda m, h: h * m.table(rows()),
    "a table, read": lambda m, h: h * m.table.weight[rows()],
    "a table, normed": lambda m, h: h * m.norm(m.table(rows())),
    "a layer of both": lambda m, h: h * torch.tanh(m.layer(m.table(rows()))),
    "a scale": lambda m, h: h * m.scale,
    "a product": lambda m, h: h @ (m.square @ m.square),
}
each_kind = pytest.mark.parametrize("kind", KINDS)


class Block(nn.Module):
    def __init__(self, kind):
        super().__init__()
        self.use = KINDS[kind]
        self.layer, self.table, self.norm = nn.Linear(D, D), nn.Embedding(3, D), nn.LayerNorm(D)
        if kind == "a scale":
            self.scale = nn.Parameter(torch.randn(D))
        if kind == "a product":
            self.square = nn.Parameter(torch.randn(D, D))

    def forward(self, x):
        return x + torch.tanh(self.use(self, self.layer(x)))


def plain(m, x):
    for block in m.blocks:
        x = block(x)
    return x


def checkpointed(m, x):
    for block in m.blocks:
        x = checkpoint(block, x, use_reentrant=False)
    return x


def nested(m, x):
    return checkpoint(lambda x: checkpointed(m, x), x, use_reentrant=False)


def shared(m, x):
    return checkpoint(m.blocks[0], checkpoint(m.blocks[0], x, use_reentrant=False),
                      use_reentrant=False)  # fmt: skip


def offloaded(m, x):
    with save_on_cpu():
        return plain(m, x)


def offloaded_inputs(m, x):
    with save_on_cpu():
        return checkpointed(m, x)


def model(kind, way):
    blocks = nn.ModuleList(Block(kind) for _ in range(2))
    return Model(lambda m, x: m.head(way(m, x).mean(1)), blocks=blocks, head=nn.Linear(D, 2))


@a_few_modes
@each_kind
@pytest.mark.parametrize("way", [checkpointed, nested, shared, offloaded, offloaded_inputs])
def test_each_is_exact(way, kind, options):
    check(model(kind, way), square, torch.randn(N, T, D), **options)


@a_few_modes
def test_a_forward_runs_again_before_a_node_is_asked_for_all_samples_at_once(options):
    """Where nothing below asked for it yet: what draws numbers cannot run for all at once."""

    def inside(m, x):
        h = m.layer(x)
        return h + 0 * torch.rand_like(h) + m.norm(m.table(rows()))

    parts = {"layer": nn.Linear(D, D), "norm": nn.LayerNorm(D), "table": nn.Embedding(3, D)}
    net = Model(lambda m, x: checkpoint(inside, m, m.first(x), use_reentrant=False),
                first=nn.Linear(D, D), **parts)  # fmt: skip
    check(net, square, torch.randn(N, T, D), **options)


@a_few_modes
@each_kind
@pytest.mark.parametrize("way", [checkpointed, nested])
def test_backwards_of_one_graph_add_up(way, kind, options):
    net, x = model(kind, way).double(), torch.randn(N, T, D, dtype=torch.float64)
    want = loop_model(net, square, x)
    with torchgradx.attach(net, **options) as probe:
        for _ in range(2):
            loss = square(net, x)
            for count in (1, 2):
                loss.backward(retain_graph=True)
                close(probe.norms(), count * want)


class Once(saved_tensors_hooks):
    """They forget what they gave, as those of libraries that move activations away."""

    def __init__(self):
        self.kept = {}
        super().__init__(self.pack, self.kept.pop)

    def pack(self, t):
        key = object()
        self.kept[key] = t
        return key


def plainly(net, options, x):
    """Two steps under such hooks: nothing is asked for twice, and gradients are what they are."""
    twin, want = copy.deepcopy(net), loop_model(net, square, x)
    square(twin, x).backward()
    read = []
    with torchgradx.attach(net, **options) as probe:
        for _ in range(2):
            net.zero_grad()
            with Once():
                loss = square(net, x)
            loss.backward()
            if options.get("weight_grad") is not False:
                same_gradients(net, twin, 1e-9)
            with contextlib.suppress(torchgradx.CoverageError):
                read.append(probe.norms())
    for norms in read:
        close(norms, want)
    return read


@a_few_modes
@each_kind
def test_hooks_that_give_once_are_asked_by_the_engine_alone(kind, options):
    plainly(model(kind, plain).double(), options, torch.randn(N, T, D, dtype=torch.float64))


@a_few_modes
@pytest.mark.parametrize("layer", [nn.Linear, nn.LSTM, nn.GRU], ids=lambda kind: kind.__name__)
def test_layers_that_are_asked_nothing_are_exact_beside_them(layer, options):
    def forward(m, x):
        h = m.norm(m.first(x))
        h = m.layer(h)
        return m.last(torch.tanh(h if layer is nn.Linear else h[0]))

    made = layer(7, 3) if layer is nn.Linear else layer(7, 3, batch_first=True)
    net = Model(forward, first=nn.Linear(D, 7), norm=nn.LayerNorm(7), layer=made,
                last=nn.Linear(3, 2))  # fmt: skip
    x = torch.randn(N, T, D, dtype=torch.float64)
    assert len(plainly(net.double(), options, x)) == 2, "refused"
