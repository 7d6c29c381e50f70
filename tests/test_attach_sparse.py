"""Sparse tensors, messages between the nodes of a graph; modules called under no_grad, then in
earnest."""

import copy
from functools import partial

import pytest
import torch
from attach_oracle import (
    Model,
    Same,
    a_few_modes,
    check,
    close,
    close_named,
    exact_or,
    exact_or_refused,
    loop,
    loop_model,
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


SAMPLES, D = 4, 6
STATES = {
    "zeros": lambda m, x: x.new_zeros(*x.shape[:-1], D),
    "a constant": lambda m, x: m.c.expand(*x.shape[:-1], D),
    "a table": lambda m, x: m.t,
    "the samples": lambda m, x: torch.tanh(m.i(x)),
    "the samples, turned": lambda m, x: torch.tanh(m.i(x)).transpose(0, -2),
}
states = pytest.mark.parametrize("state", STATES)


def model(state, steps, earnest=True):
    def forward(m, x):
        z = STATES[state](m, x)
        with torch.no_grad():
            for _ in range(steps):
                z = torch.tanh(m.f(z) / 2)
        if state.endswith("turned"):
            z = z.transpose(0, -2)
        if state == "a table":
            z = z.mean(0, keepdim=True)
        return m.o(torch.tanh((m.f if earnest else m.g)(z) + m.i(x)))

    parts = {"f": nn.Linear(D, D), "g": nn.Linear(D, D), "i": nn.Linear(3, D), "o": nn.Linear(D, 2)}
    made = Model(forward, **parts)
    made.register_buffer("c", torch.randn(D))
    made.register_buffer("t", torch.randn(2 * SAMPLES, D))
    return made


@a_few_modes
@states
@pytest.mark.parametrize("steps", [1, 3])
@pytest.mark.parametrize(
    "shape", [(SAMPLES, 3), (D, 3), (1, 3), (SAMPLES, 5, 3), (SAMPLES, SAMPLES, 3)], ids=str
)
def test_each_is_exact(shape, steps, state, options):
    check(model(state, steps), square, torch.randn(shape), **options)


@a_few_modes
@states
def test_a_module_of_which_nothing_is_asked_counts_nothing(state, options):
    check(model(state, 2, earnest=False), square, torch.randn(SAMPLES, 3), **options)


@a_few_modes
def test_another_number_of_silent_steps_is_refused_once_at_most(options):
    """Until a forward of that many is watched."""
    net = model("zeros", 0).double()
    silent = {steps: model("zeros", steps).function for steps in (0, 1, 2)}
    with torchgradx.attach(net, **options) as probe:
        known = set()
        for n, steps in [
            (SAMPLES, 0),
            (SAMPLES, 1),
            (SAMPLES, 1),
            (SAMPLES, 2),
            (SAMPLES, 2),
            (SAMPLES, 0),
            (SAMPLES, 2),
            (SAMPLES, 1),
        ]:
            net.function = silent[steps]
            x = torch.randn(n, 3, dtype=torch.float64)
            square(net, x).backward()
            if steps in known:
                close(probe.norms(), loop_model(net, square, x))
            else:
                exact_or(torchgradx.CoverageError, "no proof", probe, loop(net, square, x))
            known.add(steps)


class Again(torch.autograd.Function):
    """A checkpoint of the user's, whose forward has no ctx."""

    @staticmethod
    def forward(use, x):
        return use(x)

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.use = inputs[0]
        ctx.save_for_backward(inputs[1])

    @staticmethod
    def backward(ctx, grad):
        x = ctx.saved_tensors[0].detach().requires_grad_()
        with torch.enable_grad():
            out = ctx.use(x)
        torch.autograd.backward(out, grad)
        return None, x.grad


REENTRANT = {
    "torch's": lambda use, x: checkpoint(use, x, use_reentrant=True),
    "the user's": Again.apply,
    "within a Function": lambda use, x: Same.apply(checkpoint(use, x, use_reentrant=True)),
}


@a_few_modes
@pytest.mark.parametrize("earnest", [False, True])
@pytest.mark.parametrize("where", REENTRANT)
@pytest.mark.parametrize("rows", [SAMPLES, 2 * SAMPLES, 3])
def test_what_a_function_runs_again_is_not_silent(rows, where, earnest, options):
    """A table whose rows are as many as samples, or twice as many, is no batch."""

    def forward(m, x):
        h = m.i(x)
        z = REENTRANT[where](lambda x: x + m.f(m.t[:rows]).square().mean(0), h)
        return m.o(torch.tanh((m.f if earnest else m.g)(z) + h))

    net = model("zeros", 0)
    net.function = forward
    exact_or_refused(net, square, torch.randn(SAMPLES, 3), **options)
