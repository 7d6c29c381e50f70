"""Sparse tensors, as bags of words and adjacencies of a graph, and messages between its nodes."""

import copy
from functools import partial

import pytest
import torch
from attach_oracle import (
    Model,
    a_few_modes,
    check,
    close_named,
    loop,
    mlp,
    refused,
    same_gradients,
    square,
)
from torch import nn
from torch.utils.checkpoint import checkpoint

import torchgradx

N = 6
LAYOUTS = {"coo": torch.Tensor.to_sparse, "csr": torch.Tensor.to_sparse_csr}
layouts = pytest.mark.parametrize("made", LAYOUTS.values(), ids=LAYOUTS)


def words():
    return torch.randn(N, 3).double().relu()


@a_few_modes
@layouts
@pytest.mark.parametrize("way", ["plain", "a checkpoint", "clipped"])
def test_a_linear_layer_is_given_bags_of_words(made, way, options):
    model, x = mlp(5).double(), words()
    want = loop(model, square, x)
    twin, sparse = copy.deepcopy(model), made(x)
    clips = way == "clipped" and options.get("weight_grad", True)
    with torchgradx.attach(model, **options, clip=clips) as probe:
        for m in (model, twin):
            inside = partial(checkpoint, m, use_reentrant=False) if way == "a checkpoint" else m
            square(inside, sparse).backward()
        close_named(probe.norms(per="parameter"), want)
        if clips:
            probe.clip_grad_norm_(torch.inf)
    if options.get("weight_grad", True):
        same_gradients(model, twin, rtol=None if options else 1e-12)


MIXES = {
    "an adjacency": lambda x, a: a @ x,
    "a sparse product": lambda x, a: torch.sparse.mm(a, x),
    "added to another": lambda x, a: torch.sparse.addmm(x, a, x),
}


@layouts
@pytest.mark.parametrize("held", ["a buffer", "an argument", "nowhere"])
@pytest.mark.parametrize("way", MIXES)
def test_nodes_that_meet_their_neighbours_are_refused(way, held, made):
    """As data do, before the first layer: no gradient shows it."""
    edges = made((torch.rand(N, N) < 0.5).double() + torch.eye(N).double())
    given = {"a buffer": lambda m: m.edges, "nowhere": lambda m: edges}
    model = Model(lambda m, x, *a: m.l(MIXES[way](x, a[0] if a else given[held](m))),
                  l=nn.Linear(3, 2)).double()  # fmt: skip
    model.register_buffer("edges", edges)
    batch = (words(), edges) if held == "an argument" else (words(),)
    with torchgradx.attach(model, check="samples") as probe:
        square(model, *batch).backward()
        with pytest.raises(torchgradx.CoverageError, match="alone") as error:
            probe.norms()
    assert error.value.parameters == ("l.weight", "l.bias")


ALONG = {
    "summed": lambda x, made: x - made(x).to_dense().sum(0),
    "summed while sparse": lambda x, made: x - x.to_sparse().sum(0).to_dense(),
    "a softmax": lambda x, made: torch.sparse.softmax(x.to_sparse(), 0).to_dense(),
}
APART = {
    "there and back": lambda x, made: made(x).to_dense(),
    "scaled": lambda x, made: (made(x) * 2).to_dense(),
    "a softmax of each": lambda x, made: torch.sparse.softmax(x.to_sparse(), 1).to_dense(),
    "a product": lambda x, made: made(x) @ torch.arange(9.0).view(3, 3).to(x),
}


@layouts
@pytest.mark.parametrize("way", ALONG)
def test_data_made_sparse_that_are_mixed_are_refused(way, made):
    model = Model(lambda m, x: m.l(ALONG[way](x, made)), l=nn.Linear(3, 2)).double()
    refused(model, square, words(), names=["l.weight"], match="alone", check="samples")


@a_few_modes
@layouts
@pytest.mark.parametrize("way", APART)
def test_data_made_sparse_that_stay_apart_are_exact(way, made, options):
    model = Model(lambda m, x: m.l(APART[way](x, made)), l=nn.Linear(3, 2))
    check(model, square, words(), **options)


def edges_of(n):
    return torch.stack([torch.arange(n), torch.arange(n).roll(1)])[:, 1:]


MESSAGES = {
    "added": lambda x, e: torch.zeros_like(x).index_add(0, e[1], x[e[0]]),
    "scattered": lambda x, e: torch.zeros_like(x).scatter_add(
        0, e[1][:, None].expand(-1, x.shape[1]), x[e[0]]),
    "the largest": lambda x, e: torch.zeros_like(x).index_reduce(0, e[1], x[e[0]], "amax"),
    "differences": lambda x, e: torch.zeros_like(x).index_add(0, e[0], x[e[0]] - x[e[1]]),
    "of both ends": lambda x, e: torch.zeros_like(x).index_add(
        0, e[0], torch.cat([x[e[0]], x[e[1]]], 1)[:, 2:5]),
}  # fmt: skip


@pytest.mark.parametrize("way", MESSAGES)
def test_messages_between_nodes_are_refused(way):
    model = Model(lambda m, x, e: m.l(MESSAGES[way](x, e)), l=nn.Linear(3, 2)).double()
    refused(model, square, words(), edges_of(N), names=["l.weight"], match="alone", check="samples")


def from_others(x, rows):
    """Those of the rows alone, each put back where it was."""
    return torch.zeros_like(x).index_add(0, rows, x[rows] * 2)


def by_mask(x, rows):
    keeps, y = x[:, 0] > 0, x.clone()
    y[keeps] = y[keeps].tanh()
    return y


@a_few_modes
@pytest.mark.parametrize("way", [from_others, by_mask])
def test_rows_that_come_back_are_exact(way, options):
    model = Model(lambda m, x: m.l(way(x, (x[:, 0] > 0).nonzero()[:, 0])), l=nn.Linear(3, 2))
    check(model, square, words(), **options)
