"""What a checkpoint runs again in backward belongs to the forward that it comes from: with others
in flight, while paused, and after remove()."""

import contextlib
import copy
import gc

import pytest
import torch
from attach_oracle import (
    Model,
    a_few_modes,
    close_named,
    exact_or,
    loop,
    mlp,
    same_gradients,
    square,
)
from torch import nn
from torch.utils.checkpoint import checkpoint

import torchgradx


@pytest.fixture(autouse=True)
def graphs_die_late():
    """A checkpoint's graph is a cycle: the collector ends it, and nobody knows when."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def block(reentrant):
    def forward(m, x):
        return m.out(checkpoint(m.block, torch.tanh(m.into(x)), use_reentrant=reentrant))

    parts = {"into": nn.Linear(3, 4), "block": nn.Sequential(nn.Linear(4, 4), nn.Tanh())}
    return Model(forward, **parts, out=nn.Linear(4, 2)), square


def whole(reentrant):
    def loss(model, x):
        x = x.detach().requires_grad_()
        return square(lambda x: checkpoint(model, x, use_reentrant=reentrant), x)

    return nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4), nn.Tanh(), nn.Linear(4, 2)), loss


SIZES = (4, 4, 3)
# Of pass k: f(orward), p(aused forward), b(ackward); read; remove the probe, attach another.
STEPS = {
    "paused, then its backward": "f0 b0 read p1 b1 f2 b2 read",
    "paused between forward and backward": "f0 p1 b1 b0 read",
    "paused before": "p1 f0 b0 b1 read",
    "paused and recorded in flight": "f0 b0 read p1 f2 b1 b2 read",
    "backwards in another order": "f0 f1 f2 b1 b2 b0 read",
    "removed, and trained on": "f0 b0 read remove p1 b1 p2 b2",
    "removed before its backward": "f0 remove b0 p1 b1",
    "removed with two in flight": "f0 f1 remove b1 b0",
    "attached anew": "f0 b0 remove attach p1 b1 f2 b2 read",
    "removed, attached between": "f0 b0 remove p1 attach b1 f2 b2 read",
}


@a_few_modes
@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("make", [block, whole])
@pytest.mark.parametrize("steps", STEPS.values(), ids=STEPS)
def test_each_pass_is_its_own(steps, make, reentrant, options):
    model, loss = make(reentrant)
    model, twin = model.double(), copy.deepcopy(model).double()
    batches = [torch.randn(n, 3).double() for n in SIZES]
    losses, plain, fresh = {}, {}, []
    probe = torchgradx.attach(model, **options)
    for step in steps.split():
        kind, k = step[0], int(step[1]) if step[1].isdigit() else 0
        if step == "read":
            want = [loop(model, square, batches[k]) for k in sorted(fresh)]
            want = {name: torch.cat([w[name] for w in want]) for name in want[0]}
            close_named(probe.norms(per="parameter"), want)
            fresh = []
        elif step == "remove":
            probe.remove()
        elif step == "attach":
            probe, fresh = torchgradx.attach(model, **options), []
        elif kind == "b":
            losses.pop(k).backward()
            plain.pop(k).backward()
        else:
            plain[k] = loss(twin, batches[k])
            if kind == "p":
                with probe.paused():
                    losses[k] = loss(model, batches[k])
            else:
                losses[k] = loss(model, batches[k])
                fresh.append(k)
    probe.remove()
    if options.get("weight_grad", True):
        same_gradients(model, twin, 1e-9)


class Own(nn.Module):
    def __init__(self):
        super().__init__()
        self.w, self.inner = nn.Parameter(torch.randn(4, 4)), nn.Linear(4, 4)

    def forward(self, x):
        return torch.tanh(self.inner(x @ self.w))


class Wrapped(nn.Module):
    def __init__(self, inner, call):
        super().__init__()
        self.inner, self.call = inner, call

    def forward(self, x):
        return self.call(self.inner, x)


LAYERS = {
    "linear": lambda: nn.Linear(4, 4),
    "norm": lambda: nn.LayerNorm(4),
    "own": Own,
    "attention": lambda: Wrapped(
        nn.MultiheadAttention(4, 2, batch_first=True),
        lambda m, x: m(x, x.tanh(), x)[0],
    ),
    "lstm": lambda: Wrapped(nn.LSTM(4, 4, batch_first=True), lambda m, x: m(x)[0]),
    "cell": lambda: Wrapped(nn.LSTMCell(4, 4), lambda m, x: x + sum(m(x[:, 0]))[:, None]),
    "convolution": lambda: nn.Conv1d(2, 2, 3, padding=1),
}
# f(orward) of the model as it is, p(aused forward), R(emove), A(ttach), b(ackward) of the earliest,
# c(ollect the graphs that are over).
LATE = [
    "fRb", "fRAb", "fRARb", "fRAfbb", "fRAfRAfbbb", "fpRAbb", "fRApfbbb", "fRfbcb", "fRfAbcb",
    "fpbb", "pfbb", "pfRbb",
]  # fmt: skip


def checkpointed(make, reentrant, inside):
    """`inside`: how a checkpoint within the checkpoint is made; None: there is none."""

    def block(m, x):
        x = torch.tanh(m.first(x))

        def rest(x):
            return torch.tanh(m.second(torch.tanh(x)))

        return rest(x) if inside is None else checkpoint(rest, x, use_reentrant=inside)

    def forward(m, x):
        return m.out(checkpoint(block, m, torch.tanh(m.into(x)), use_reentrant=reentrant))

    layers = {"first": make(), "second": make()}
    return Model(forward, into=nn.Linear(3, 4), **layers, out=nn.Linear(4, 2)).double()


def as_found(model):
    return [(type(m), list(m._forward_hooks), list(m._forward_pre_hooks)) for m in model.modules()]


@pytest.mark.grid(pairs=False)
@pytest.mark.parametrize(
    ("one", "other"),
    [
        ({}, {}),
        ({}, {"backend": "vmap"}),
        ({"backend": "vmap"}, {}),
        ({"clip": True}, {"fused": False}),
    ],
    ids=str,
)
@pytest.mark.parametrize("of", ["", "first"])
@pytest.mark.parametrize(
    ("reentrant", "inside"), [(False, None), (False, False), (True, False), (False, True)]
)
@pytest.mark.parametrize("make", LAYERS.values(), ids=LAYERS)
def test_a_forward_of_a_probe_before_has_its_gradients(make, reentrant, inside, of, one, other):
    """Whatever was attached or paused since, to the model or to a part that a checkpoint is around;
    and the model is given back as it was."""
    given = []
    for story in LATE:
        model, late = checkpointed(make, reentrant, inside), []
        twin = copy.deepcopy(model)
        given.append((model, as_found(model)))
        probe, options = torchgradx.attach(model.get_submodule(of), **one), [one, other]
        for step in story:
            x = torch.randn(5, 2, 3).double()
            if step == "f":
                late.append((square(model, x), square(twin, x)))
            elif step == "p":
                with probe.paused():
                    late.append((square(model, x), square(twin, x)))
            elif step == "R":
                probe.remove()
            elif step == "A":
                options.reverse()
                probe = torchgradx.attach(model.get_submodule(of), **options[0])
            elif step == "c":
                gc.collect()
            else:
                for loss in late.pop(0):
                    loss.backward()
                    del loss
        same_gradients(model, twin, 1e-9)
        if story.rfind("A") > story.rfind("R"):
            model.zero_grad()
            probe.reset()
            square(model, x).backward()
            want = {
                name.removeprefix(f"{of}."): norms
                for name, norms in loop(model, square, x).items()
                if name.startswith(of)
            }
            close_named(probe.norms(per="parameter"), want)
        probe.remove()
    gc.collect()
    assert all(as_found(model) == found for model, found in given)


@a_few_modes
@pytest.mark.parametrize("story", ["fpbb", "pfbb", "pfRAbb", "fRAfbb", "fRApfbbb", "fRApfBBB"])
def test_a_module_called_outside_of_the_model_is_of_its_own_call(story, options):
    """B: backward of the latest."""
    model, late = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)).double(), []
    twin, probe = copy.deepcopy(model), torchgradx.attach(model, **options)

    def loss(model, x):
        return square(lambda x: checkpoint(part, model, x, use_reentrant=False), x)

    def part(model, x):
        return torch.tanh(model[0](torch.tanh(x)))

    for step in story:
        x = torch.randn(3, 2, 4).double()
        if step in "fp":
            with probe.paused() if step == "p" else contextlib.nullcontext():
                late.append((loss(model, x), loss(twin, x)))
        elif step == "R":
            probe.remove()
        elif step == "A":
            probe = torchgradx.attach(model, **options)
        else:
            for one in late.pop(0 if step == "b" else -1):
                one.backward()
    same_gradients(model, twin, 1e-9)


@pytest.mark.grid(pairs=False)
@a_few_modes
@pytest.mark.parametrize("make", LAYERS.values(), ids=LAYERS)
def test_a_record_that_waits_for_other_uses_holds_no_graph(make, options):
    layer = make()

    def forward(m, x):
        x = checkpoint(m.layer, torch.tanh(m.into(x)), use_reentrant=False)
        return m.out(torch.tanh(m.layer(torch.tanh(x))))

    model = Model(forward, into=nn.Linear(3, 4), layer=layer, out=nn.Linear(4, 2)).double()
    found, x = as_found(model), torch.randn(5, 2, 3).double()
    probe = torchgradx.attach(model, **options)
    square(model, x).backward()
    close_named(probe.norms(per="parameter"), loop(model, square, x))
    probe.remove()
    gc.collect()
    assert as_found(model) == found


def test_paused_within_a_checkpoint_that_is_not_reentrant_is_refused():
    model, x = nn.Linear(4, 4).double(), torch.randn(3, 2, 4).double()
    probe = torchgradx.attach(model)

    def part(x):
        with probe.paused():
            return model(x)

    with pytest.raises(RuntimeError, match=r"paused\(\) was called within what"):
        checkpoint(part, x, use_reentrant=False)
    square(model, x).backward()
    close_named(probe.norms(per="parameter"), loop(model, square, x))


@a_few_modes
@pytest.mark.parametrize("since", ["nothing", "removed", "attached anew", "paused"])
@pytest.mark.parametrize("calls", ["fp", "pf", "fpf"])
def test_paused_within_a_reentrant_checkpoint(calls, since, options):
    """Each call of what runs again is as it was."""
    model = nn.Linear(4, 4).double()
    twin, x = copy.deepcopy(model), torch.randn(3, 2, 4).double().requires_grad_()
    probe = torchgradx.attach(model, **options)

    def part(model, x):
        for call in calls:
            with probe.paused() if call == "p" else contextlib.nullcontext():
                x = torch.tanh(model(x))
        return x.sin()

    losses = [checkpoint(part, m, x, use_reentrant=True).sum() for m in (model, twin)]
    if since in ("removed", "attached anew"):
        probe.remove()
    if since == "attached anew":
        probe = torchgradx.attach(model)
    with probe.paused() if since == "paused" else contextlib.nullcontext():
        losses[0].backward()
    losses[1].backward()
    if options.get("weight_grad", True):
        same_gradients(model, twin, 1e-9)


@a_few_modes
@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_each_call_within_a_reentrant_checkpoint_is_of_its_own_samples(order, options):
    """In the order of their first forwards, with calls under no_grad around them."""
    model = nn.Linear(4, 4).double()
    twin = copy.deepcopy(model)
    probe = torchgradx.attach(model, loss_reduction="sum", **options)
    batches, losses = [torch.randn(n, 2, 4).double().requires_grad_() for n in (3, 5)], []

    def part(x):
        return torch.tanh(torch.cat([model(x[:2]), model(x[2:])]))

    for x in batches:
        with torch.no_grad():
            model(x)
        losses.append(checkpoint(part, x, use_reentrant=True).square().sum())
        with torch.no_grad(), probe.paused():
            model(x)
    for k in order:
        losses[k].backward()
    want = [loop(twin, lambda m, x: torch.tanh(m(x)).square().sum(), x) for x in batches]
    close_named(probe.norms(per="parameter"), {k: torch.cat([w[k] for w in want]) for k in want[0]})


WAYS = {
    "no checkpoint": lambda run, x: run(x),
    "not reentrant": lambda run, x: checkpoint(run, x, use_reentrant=False),
    "reentrant": lambda run, x: checkpoint(run, x.clone().requires_grad_(), use_reentrant=True),
}
ways = pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)


def own(width=5):
    """A module of its own parameter among others."""
    scale = Model(lambda m, x: x * m.scale, scale=torch.rand(width) + 0.5)
    return nn.Sequential(nn.Linear(3, width), nn.Tanh(), scale, nn.Linear(width, 2)).double()


@a_few_modes
@pytest.mark.parametrize("way", list(WAYS.values())[:2], ids=list(WAYS)[:2])
def test_a_hook_that_changes_an_output_inside_of_a_module(way, options):
    """Exact at the graph's nodes; refused where the module runs again, which calls no hook."""
    function = lambda m, x: torch.tanh(m.act(x @ m.weight))  # noqa: E731
    first = nn.Linear(5, 5, bias=False)
    shares = Model(function, weight=torch.zeros(1), act=nn.Identity())
    shares.weight = first.weight
    model = nn.Sequential(first, nn.Tanh(), shares, nn.Linear(5, 2)).double()
    shares.act.register_forward_hook(lambda module, args, out: 3 * out)
    with torchgradx.attach(model, **options) as probe:
        for _ in range(2):
            x = torch.randn(4, 5).double()
            square(lambda x: way(model, x), x).backward()
            exact_or(torchgradx.CoverageError, "0.weight", probe, loop(model, square, x))


@a_few_modes
@pytest.mark.parametrize("inside", [True, False], ids=["backward inside", "after"])
@ways
def test_the_same_samples_twice(way, inside, options):
    model, x = mlp().double(), torch.randn(4, 3).double()
    twin = copy.deepcopy(model)

    def both(net, x):
        return square(net, x) + square(net, 2 * x)

    for _ in range(2):
        with torchgradx.attach(model, **options) as probe:
            with probe.same_samples():
                loss = both(lambda x: way(model, x), x)
                if inside:
                    loss.backward()
            if not inside:
                loss.backward()
            close_named(probe.norms(per="parameter"), loop(twin, both, x))


@a_few_modes
@ways
def test_directions_are_those_of_the_forward(way, options):
    model, x = mlp().double(), torch.randn(4, 3).double()
    first, second = ({"0.weight": torch.randn(5, 3).double()} for _ in range(2))
    found = []
    for later in (first, second):
        with torchgradx.attach(model, directions=first, **options) as probe:
            loss = square(lambda x: way(model, x), x)
            probe.directions = later
            loss.backward()
            found.append(probe.dot())
    assert torch.equal(*found)
