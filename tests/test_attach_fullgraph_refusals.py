"""Whole compiled graphs: what is refused, at once or once it comes; what nobody must notice."""

import copy

import pytest
import torch
import torch._dynamo
import torch.nn.functional as F
from attach_oracle import (
    Model,
    close_named,
    loop,
    mlp,
    penalised,
    same_gradients,
    square,
    square_sum,
)
from fullgraph_models import N, attached, backends, held_against_a_loop, rows
from torch import nn

import torchgradx

pytestmark = pytest.mark.usefixtures("nothing_compiled")


def functional(m, x):
    return F.linear(m.l(x), m.l.weight)


def mixing(m, x):
    return m.l(x) + m.l(x).flip(0)


def table(m, x):
    return m.l(x + m.p(torch.arange(x.shape[1])))


NEVER = {
    "a functional use": (lambda: Model(functional, l=nn.Linear(3, 3)), square),
    "samples that mix": (lambda: Model(mixing, l=nn.Linear(3, 3)), square),
    "a table of positions": (lambda: Model(table, l=nn.Linear(3, 3), p=nn.Embedding(5, 3)), square),
    "a penalty on the weights": (mlp, penalised),
}


@pytest.mark.parametrize(("make", "loss"), NEVER.values(), ids=NEVER)
@backends
def test_what_is_not_exact_is_refused(make, loss, backend):
    model = make().double()
    twin = copy.deepcopy(model)
    probe, compiled = attached(model, backend)
    for n in (N, 6):
        x = rows(n)
        loss(compiled, x).backward()
        loss(twin, x).backward()
        with pytest.raises(torchgradx.CoverageError):
            probe.norms()
        same_gradients(model, twin, 1e-9)


def test_samples_in_the_second_dimension():
    model = mlp().double()
    probe, compiled = attached(model, batch_dim=1)

    def loss(model, x):
        return model(x).square().transpose(0, 1).flatten(1).sum(1).mean()

    for n in (N, 5):
        x = torch.randn(5, n, 3).double()
        want = loop(model, loss, x, dims=1)
        loss(compiled, x).backward()
        close_named(probe.norms(per="parameter"), want)


OUTSIDE = {
    "a module without a graph's operator": (lambda: nn.Sequential(nn.Linear(3, 3), nn.PReLU()), {}),
    "norms only": (mlp, {"weight_grad": False}),
    "no kernels": (mlp, {"backend": "vmap"}),
}


@pytest.mark.parametrize(("make", "options"), OUTSIDE.values(), ids=OUTSIDE)
def test_what_no_graph_can_hold_says_what_to_do(make, options):
    model = make().double()
    with torchgradx.attach(model, **options):
        compiled = torch.compile(model, backend="eager", fullgraph=True)
        with pytest.raises(torch._dynamo.exc.Unsupported, match=r"torchgradx.*without fullgraph"):
            compiled(rows(N))
    assert square_sum(model, rows(N)).isfinite()


def test_a_thousand_steps_leave_nothing_behind():
    model = mlp()
    probe, compiled = attached(model)
    x = rows(N).float()

    def step():
        square(compiled, x).backward()
        model.zero_grad()
        return probe.norms()

    step()
    alive = torchgradx._C.links()
    for _ in range(1000):
        step()
        compiled(x)  # meets no backward
    assert torchgradx._C.links() == alive


def warming_up(m, x, weight):
    return square(m, x) + weight * m[0].weight.square().sum()


def test_a_penalty_that_comes_later_is_refused():
    """The first pass of a structure shows nothing of it, and one graph has no edges of its own."""
    model, x = mlp().double(), rows(N)
    with torchgradx.attach(model) as probe:
        step = torch.compile(warming_up, backend="aot_eager", fullgraph=True)
        for weight in (0.0, 0.0, 5.0):
            step(model, x, torch.tensor(weight)).backward()
            if weight:
                with pytest.raises(torchgradx.CoverageError, match=r"0\.weight"):
                    probe.norms()
            else:
                close_named(probe.norms(per="parameter"), loop(model, square, x))


def test_a_penalty_compiled_apart_is_refused():
    model, x = mlp().double(), rows(N)
    probe, compiled = attached(model)
    apart = torch.compile(lambda m: m[0].weight.square().sum(), backend="aot_eager", fullgraph=True)
    held_against_a_loop(model, probe, compiled, x)
    (square(compiled, x) + 5 * apart(model)).backward()
    with pytest.raises(torchgradx.CoverageError, match=r"0\.weight"):
        probe.norms()


def test_the_root_of_a_backward_is_seen():
    """A compiled loss with a penalty that begins at nothing, on a model that is not compiled."""
    model, x = mlp().double(), rows(N)

    def loss(out, w, weight):
        return out.square().flatten(1).sum(1).mean() + weight * w.square().sum()

    compiled = torch.compile(loss, backend="aot_eager")
    with torchgradx.attach(model) as probe:
        for weight in (0.0, 0.0, 5.0):
            compiled(model(x), model[0].weight, torch.tensor(weight)).backward()
            with pytest.raises(torchgradx.CoverageError, match=r"0\.weight"):
                probe.norms()


def remembering(m, x, k):
    m.calls += 1
    h = m.l(x)
    k.add_(1)
    m.seen = m.seen * 0.5 + h.detach().mean()
    return h * k


def test_the_look_from_outside_leaves_attributes_and_arguments():
    model = Model(remembering, l=nn.Linear(3, 2)).double()
    model.calls, model.seen = 0, torch.zeros((), dtype=torch.float64)
    twin, x = copy.deepcopy(model), rows(N)
    found = []
    for m in (model, twin):
        torch._dynamo.reset()
        m.k = torch.zeros(N, 1, 1, dtype=torch.float64)
        if m is model:
            probe = torchgradx.attach(m)
        compiled = torch.compile(m, backend="aot_eager", fullgraph=True)
        for _ in range(2):
            out = compiled(x, m.k)
            out.square().sum().backward()
        found += [(out.detach(), m.k, m.calls, m.seen)]
    assert probe.norms().shape == (2 * N,)
    torch.testing.assert_close(*found)
    same_gradients(model, twin, 1e-9)


def test_attached_again_and_again():
    model, x = mlp().double(), rows(N)
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    for _ in range(12):
        with torchgradx.attach(model) as probe:
            held_against_a_loop(model, probe, compiled, x)


def test_attached_to_what_was_compiled():
    model, x = mlp().double(), rows(N)
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    probe = torchgradx.attach(compiled)
    want = loop(model, square, x)
    square(compiled, x).backward()
    got = probe.norms(per="parameter")
    close_named({name.removeprefix("_orig_mod."): sq for name, sq in got.items()}, want)


def test_compiled_autograd_is_refused():
    model, x = mlp().double(), rows(N)
    twin = copy.deepcopy(model)
    probe, compiled = attached(model)
    loss = square(compiled, x)
    with torch._dynamo.compiled_autograd._enable(torch.compile(backend="eager")):
        loss.backward()
    square(twin, x).backward()
    same_gradients(model, twin, 1e-9)
    with pytest.raises(torchgradx.CoverageError):
        probe.norms()
