"""What a checkpoint runs again in backward belongs to the forward that it comes from, which was
recorded or was not: with others in flight, while paused, and after remove()."""

import copy
import gc

import pytest
import torch
from attach_oracle import (
    Model,
    a_few_modes,
    close_named,
    loop,
    same_gradients,
    seeded,  # noqa: F401
    square,
)
from torch import nn
from torch.utils.checkpoint import CheckpointError, checkpoint

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


@a_few_modes
@pytest.mark.parametrize("still", [True, False], ids=["attached", "attached and removed"])
@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("make", [block, whole])
def test_a_forward_of_a_probe_before_has_its_gradients_or_an_error(make, reentrant, still, options):
    """What runs again is then another probe's, or nobody's, and may save other tensors."""
    model, loss = make(reentrant)
    model, x = model.double(), torch.randn(4, 3).double()
    twin = copy.deepcopy(model)
    with torchgradx.attach(model, **options):
        late = loss(model, x)
    probe = torchgradx.attach(model, **options)
    if not still:
        probe.remove()
    loss(twin, x).backward()
    error = None
    try:
        late.backward()
    except RuntimeError as raised:
        error = raised
    if error is None:
        if options.get("weight_grad", True):
            same_gradients(model, twin, 1e-9)
    else:
        assert not reentrant
        assert isinstance(error, CheckpointError) or "before you attach again" in str(error)
    model.zero_grad()
    probe.reset()
    if still:
        loss(model, x).backward()
        close_named(probe.norms(per="parameter"), loop(model, square, x))
    probe.remove()
