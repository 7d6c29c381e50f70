"""What a checkpoint runs again in backward belongs to the forward that it comes from: in flight,
paused, after remove()."""

import contextlib
import copy
import functools
import gc

import pytest
import torch
from attach_oracle import (
    a_few_modes,
    close_named,
    exact_step,
    joined,
    loop,
    mlp,
    refusal,
    same_gradients,
    square,
)
from test_attach_checkpoint import checkpointed
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
    return checkpointed(reentrant, nn.Sequential(nn.Linear(4, 4), nn.Tanh())), square


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
    "paused and recorded in flight": "f0 b0 read p1 f2 b1 b2 read",
    "backwards in another order": "f0 f1 f2 b1 b2 b0 read",
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
            want = joined([loop(model, square, batches[k]) for k in sorted(fresh)])
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


def test_paused_within_a_checkpoint_that_is_not_reentrant_is_refused():
    model, x = nn.Linear(4, 4).double(), torch.randn(3, 2, 4).double()
    probe = torchgradx.attach(model)

    def part(x):
        with probe.paused():
            return model(x)

    with pytest.raises(RuntimeError, match=r"paused\(\) was called within what"):
        checkpoint(part, x, use_reentrant=False)
    exact_step(probe, model, x)


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


def not_reentrant(run, x):
    return checkpoint(run, x, use_reentrant=False)


def reentrant(run, x):
    return checkpoint(run, x, use_reentrant=True)


NESTED = {
    "not": [not_reentrant],
    "reentrant": [reentrant],
    "reentrant in not": [not_reentrant, reentrant],
    "not in reentrant": [reentrant, not_reentrant],
    "not in not": [not_reentrant, not_reentrant],
}


def within(ways, run, x):
    for way in reversed(ways):
        run = functools.partial(way, run)
    return run(x)


@a_few_modes
@pytest.mark.parametrize("part", ["", "0"])
@pytest.mark.parametrize("ways", NESTED.values(), ids=NESTED)
def test_two_backwards_of_one_graph(ways, part, options):
    """They add up; where each has a forward of its own, it is said that they do not."""
    model, x = mlp().double(), torch.randn(4, 3).double()
    probe = torchgradx.attach(model.get_submodule(part), **options)
    loss = square(lambda x: within(ways, model, x), x.requires_grad_())
    loss.backward(retain_graph=True)
    loss.backward()
    if reentrant in ways:
        refusal(probe, "for several backwards")
        return
    prefix = f"{part}." if part else ""
    want = {
        k[len(prefix) :]: 2 * w for k, w in loop(model, square, x).items() if k.startswith(prefix)
    }
    close_named(probe.norms(per="parameter"), want)


class Fails(nn.Module):
    """In the next recomputation, once."""

    next = False

    def forward(self, x):
        if self.next and torch._C._current_graph_task_id() != -1:
            self.next = False
            raise MemoryError("once")
        return x


@a_few_modes
@pytest.mark.parametrize("ways", NESTED.values(), ids=NESTED)
def test_what_a_recomputation_raises_is_the_users(ways, options):
    """And the step may be tried again."""
    model = nn.Sequential(nn.Linear(3, 5), Fails(), nn.Tanh(), nn.Linear(5, 2)).double()
    twin, x = copy.deepcopy(model), torch.randn(4, 3).double()
    probe = torchgradx.attach(model, **options)

    def loss(net):
        return square(lambda x: within(ways, net, x), x.detach().requires_grad_())

    loss(model).backward()  # a proof runs layers again as well
    probe.norms()
    for _ in range(2):
        for net in (model, twin):
            net[1].next = True
            with pytest.raises(MemoryError):
                loss(net).backward()
            net.zero_grad()
            loss(net).backward()
        close_named(probe.norms(per="parameter"), loop(twin, square, x))
        if options.get("weight_grad", True):
            same_gradients(model, twin, 1e-9)


@a_few_modes
@pytest.mark.parametrize("story", ["fpbb", "pfRAbb", "fRApfBBB"])
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
