"""Batches of several sizes on one probe: what a first one shows is taken for others, and where N is
as large as something else, that alone must not be doubted."""

import copy

import pytest
import torch
import torch.nn.functional as F
from attach_oracle import (
    Model,
    a_few_modes,
    close_named,
    loop,
)
from torch import nn

import torchgradx

CLASSES, WIDTH, T = 6, 8, 4


def mean_of_each(model, x, y):
    return F.cross_entropy(model(x), y)


def mean_of_rows(model, ids, y):
    """Of logits [N*T, V]."""
    rows = F.cross_entropy(model(ids), y.flatten(), reduction="none")
    return rows.view(len(ids), T).mean(1).mean()


def steps(model, loss, batches, options, moves=0.0):
    """Each step's norms are the loop's; its weights move by so much after each."""
    model = model.double()
    with torchgradx.attach(model, **options) as probe:
        for batch in batches:
            model.zero_grad()
            loss(model, *batch).backward()
            close_named(probe.norms(per="parameter"), loop(copy.deepcopy(model), loss, *batch))
            with torch.no_grad():
                for p in model.parameters():
                    p += moves * torch.randn_like(p)


def images(*sizes, memory_format=torch.contiguous_format):
    return [(torch.randn(n, 3, 6, 6).double().contiguous(memory_format=memory_format),
             torch.randint(CLASSES, (n,))) for n in sizes]  # fmt: skip


def network(act, memory_format=torch.contiguous_format):
    body = nn.Sequential(nn.Conv2d(3, WIDTH, 3), act, nn.AdaptiveAvgPool2d(1), nn.Flatten())
    return nn.Sequential(body, nn.Linear(WIDTH, CLASSES)).to(memory_format=memory_format)


class Windows(nn.Module):
    """Nobody follows samples through it, see proof/sample_dims.py."""

    def forward(self, h):
        return h.unfold(2, 2, 2).sum(-1)


ACTIVATIONS = {"hardswish": nn.Hardswish(), "rrelu": nn.RReLU().eval(), "unfold": Windows()}


@a_few_modes
@pytest.mark.parametrize("act", ACTIVATIONS)
@pytest.mark.parametrize("first", [CLASSES, 9, 3])
def test_as_many_samples_as_classes_after_another_batch(first, act, options):
    steps(network(ACTIVATIONS[act]), mean_of_each, images(first, CLASSES, CLASSES), options)


@a_few_modes
def test_as_many_samples_as_classes_in_channels_last(options):
    last = torch.channels_last
    batches = images(9, CLASSES, 9, memory_format=last)
    steps(network(nn.ReLU(), last), mean_of_each, batches, options)


class Biased(nn.Module):
    """Attention biased by a table that a network makes of positions, before a norm of zeros."""

    def __init__(self):
        super().__init__()
        self.bias = nn.Sequential(nn.Linear(2, 5), nn.ReLU(), nn.Linear(5, 1))
        self.qkv, self.norm = nn.Linear(WIDTH, 3 * WIDTH), nn.LayerNorm(WIDTH)
        nn.init.zeros_(self.norm.weight)
        self.register_buffer("places", torch.randn(1, T, T, 2))

    def forward(self, h):
        q, k, v = self.qkv(h).chunk(3, -1)
        mixed = q @ k.transpose(1, 2) + self.bias(self.places).squeeze(-1)
        return h + self.norm(mixed.softmax(-1) @ v)


@a_few_modes
@pytest.mark.parametrize("n", [2, T, 5])
def test_what_was_behind_zeros_is_proven_in_the_next_step(n, options):
    rows = [nn.Linear(3, WIDTH), Biased(), Biased(), nn.Flatten(), nn.Linear(T * WIDTH, CLASSES)]
    batches = [(torch.randn(n, T, 3).double(), torch.randint(CLASSES, (n,))) for _ in range(3)]
    steps(nn.Sequential(*rows), mean_of_each, batches, options, moves=0.05)


@a_few_modes
@pytest.mark.parametrize("sizes", [(3, WIDTH, 3), (16, WIDTH, 16), (3, 5, 3)])
def test_a_size_that_comes_back_after_one_that_looks_otherwise(sizes, options):
    def forward(m, ids):
        h = torch.tanh(m.mix(m.ids(ids) + m.places(torch.arange(T))))
        return m.out(h).view(-1, CLASSES)

    model = Model(forward, ids=nn.Embedding(CLASSES, WIDTH), places=nn.Embedding(T, WIDTH),
                  mix=nn.Linear(WIDTH, WIDTH), out=nn.Linear(WIDTH, CLASSES))  # fmt: skip
    batches = [(torch.randint(CLASSES, (n, T)), torch.randint(CLASSES, (n, T))) for n in sizes]
    steps(model, mean_of_rows, batches, options)


@a_few_modes
@pytest.mark.parametrize("n", [5, CLASSES])
def test_a_loss_alone_of_as_many_samples_as_classes(n, options):
    model = Model(lambda m, x, y: F.cross_entropy(m.b(torch.tanh(m.a(x))), y),
                  a=nn.Linear(4, WIDTH), b=nn.Linear(WIDTH, CLASSES))  # fmt: skip
    batches = [(torch.randn(n, 4).double(), torch.randint(CLASSES, (n,))) for _ in range(2)]
    steps(model, lambda m, *batch: m(*batch), batches, options)
