"""Attached, then compiled with fullgraph=True: one graph that records, exact or refused by name."""

import copy

import pytest
import torch
import torch._dynamo.testing
import torch.nn.functional as F
from attach_oracle import Model, close_named, loop, mlp, same_gradients, square
from fullgraph_models import (
    MODELS,
    N,
    attached,
    backends,
    cnn,
    every_model,
    held_against_a_loop,
    ids,
    images,
    rows,
    tokens,
)
from torch import nn

import torchgradx

pytestmark = pytest.mark.usefixtures("nothing_compiled")


@pytest.mark.grid
@every_model
@backends
@pytest.mark.parametrize("fused", [True, False])
def test_a_whole_graph_is_exact_at_every_batch_size(make, draw, backend, fused):
    model = make().double()
    probe, compiled = attached(model, backend, fused=fused)
    for n in (N, 6, 7, 5, 1, N):  # 5 is as many as there are positions
        held_against_a_loop(model, probe, compiled, draw(n))


def test_as_many_samples_as_positions_are_no_proof():
    model = tokens().double()
    probe, compiled = attached(model)
    held_against_a_loop(model, probe, compiled, ids(5))


@pytest.mark.parametrize("name", ["Conv2d, GroupNorm", "a head tied to the table"])
def test_inductor(name):
    make, draw = MODELS[name]
    model = make().double()
    probe, compiled = attached(model, "inductor")
    for n in (N, 6):
        held_against_a_loop(model, probe, compiled, draw(n))


def test_one_graph_serves_every_size():
    model = tokens().double()
    probe = torchgradx.attach(model)
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(model, backend=counter, fullgraph=True, dynamic=True)
    frames = []
    for n in (N, 6, 8):
        held_against_a_loop(model, probe, compiled, ids(n, n + 1))
        frames.append(counter.frame_count)
    assert frames[0] == frames[-1]


def test_models_of_one_class_are_compiled_one_by_one():
    """The compiler gives up on code that it has compiled eight times."""
    for _ in range(10):
        model = tokens().double()
        probe, compiled = attached(model, "eager")
        held_against_a_loop(model, probe, compiled, ids(N))


def test_code_that_changes_is_looked_at_again():
    """The hooks are compiled apart from the forward of a model of one's own."""

    def forward(m, x):
        return F.linear(m.l(x), m.l.weight) if m.also else m.l(x)

    model = Model(forward, l=nn.Linear(3, 3)).double()
    model.also = False
    probe, compiled = attached(model)
    held_against_a_loop(model, probe, compiled, rows(N))
    model.also = True
    square(compiled, rows(N)).backward()
    with pytest.raises(torchgradx.CoverageError, match=r"l\.weight"):
        probe.norms()


def test_accumulation_and_passes_of_the_same_samples():
    model = mlp().double()
    probe, compiled = attached(model)
    batches = [rows(N), rows(N), rows(3)]
    want = [loop(model, square, x) for x in batches]
    for x in batches:
        square(compiled, x).backward()
    close_named(probe.norms(per="parameter"), {k: torch.cat([w[k] for w in want]) for k in want[0]})

    def siamese(model, a, b):
        return (model(a) - model(b)).square().flatten(1).sum(1).mean()

    want = loop(model, siamese, *batches[:2])
    with probe.same_samples():
        siamese(compiled, *batches[:2]).backward()
    close_named(probe.norms(per="parameter"), want)


def test_several_backwards_of_one_forward_add_up():
    model, x = mlp().double(), rows(N)
    probe, compiled = attached(model)
    want = loop(model, lambda m, x: 2 * square(m, x), x)
    loss = square(compiled, x)
    loss.backward(retain_graph=True)
    loss.backward()
    close_named(probe.norms(per="parameter"), want)


def test_frozen_parameters_paused_no_grad_and_removal():
    model, x = mlp().double(), rows(N)
    model[0].weight.requires_grad_(False)
    model[2].bias.requires_grad_(False)
    probe, compiled = attached(model)
    held_against_a_loop(model, probe, compiled, x)
    with torch.no_grad():
        torch.testing.assert_close(compiled(x), copy.deepcopy(model)(x))
    with probe.paused():
        square(compiled, x).backward()
    model.zero_grad()
    held_against_a_loop(model, probe, compiled, x)
    probe.remove()
    assert type(model[0]) is nn.Linear
    square(compiled, rows(6)).backward()
    assert probe.norms().shape == (N,)  # what was recorded before


def test_removed_between_forward_and_backward():
    model, x = nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4)).double(), rows(N)
    probe, compiled = attached(model)
    twin = copy.deepcopy(model)
    held_against_a_loop(model, probe, compiled, x)
    loss = square(compiled, x)
    probe.remove()
    loss.backward()
    square(twin, x).backward()
    same_gradients(model, twin, 1e-9)


def test_dropout_and_buffers_are_those_of_the_compiled_model():
    """The model is called once more to be looked at, and nobody can tell."""

    def forward(m, x):
        m.calls.add_(1)
        return m.b(F.dropout(torch.tanh(m.a(x)), 0.5))

    model = Model(forward, a=nn.Linear(3, 4), b=nn.Linear(4, 2)).double()
    model.register_buffer("calls", torch.zeros(()))
    twin, x = copy.deepcopy(model), rows(N)
    outputs = []
    for m in (model, twin):
        torch._dynamo.reset()
        if m is model:
            probe = torchgradx.attach(model)
        torch.manual_seed(3)
        compiled = torch.compile(m, backend="aot_eager", fullgraph=True)
        outputs.append([compiled(x), compiled(x)])
        square(compiled, x).backward()
    assert all(torch.equal(a, b) for a, b in zip(*outputs, strict=True))
    assert model.calls.item() == twin.calls.item() == 3
    same_gradients(model, twin, 1e-9)
    assert probe.norms().shape == (N,)


def keywords(m, *, x, scale=1.0, more=None):
    return {"out": m.l(x) * scale + (0 if more is None else more[0])}


@backends
def test_keywords_and_outputs_in_a_dict(backend):
    model = Model(keywords, l=nn.Linear(3, 2)).double()
    probe, compiled = attached(model, backend)
    x, more = rows(N), torch.randn(N, 5, 2).double()

    def loss(model, x, more):
        return model(x=x, scale=0.5, more=[more])["out"].square().flatten(1).sum(1).mean()

    held_against_a_loop(model, probe, compiled, x, more, loss=loss)


def test_in_a_compiled_step():
    """The model is called by what is compiled, beside another."""
    model, other = tokens().double(), mlp(4).double()
    x, y = ids(N), torch.randn(N, 3).double()

    def step(model, x, y):
        return (model(x) + 0 * other(y).sum()).square().flatten(1).sum(1).mean()

    want = loop(model, step, x, y)
    with torchgradx.attach(model) as probe:
        torch.compile(step, backend="aot_eager", fullgraph=True)(model, x, y).backward()
        close_named(probe.norms(per="parameter"), want)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("make", [tokens, cnn])
@backends
def test_autocast_is_that_of_the_eager_model(make, backend, dtype):
    model, x = make(), ids(N) if make is tokens else images(N).float()

    def loss(model, x):
        with torch.autocast("cpu", dtype):
            out = model(x)
        return out.float().square().flatten(1).sum(1).mean()

    with torchgradx.attach(model) as probe:
        loss(model, x).backward()
        want = probe.norms(per="parameter")
    model.zero_grad()
    probe, compiled = attached(model, backend)
    loss(compiled, x).backward()
    got = probe.norms(per="parameter")
    for name in want:
        torch.testing.assert_close(
            got[name], want[name], rtol=64 * torch.finfo(dtype).eps, atol=0.0
        )
