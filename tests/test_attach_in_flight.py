"""Whose a recomputation is, where little says so: behind hooks of the user's, from other threads,
a second time; and a probe that leaves in a forward."""

import contextlib
import copy
import functools
import gc
import threading

import pytest
import torch
from attach_oracle import (
    Model,
    a_few_modes,
    close_named,
    fingerprint,
    loop,
    mlp,
    same_gradients,
    square,
)
from torch import nn
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode_stack
from torch.utils.checkpoint import checkpoint

import torchgradx


def not_reentrant(run, x):
    return checkpoint(run, x, use_reentrant=False)


def reentrant(run, x):
    return checkpoint(run, x, use_reentrant=True)


WAYS = {
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


def clone_of(t):
    return t.detach().clone()


HOOKS = {
    "none": contextlib.nullcontext,
    "offloading": save_on_cpu,
    "the user's": lambda: saved_tensors_hooks(clone_of, clone_of),
}


@a_few_modes
@pytest.mark.parametrize("hooks", HOOKS.values(), ids=HOOKS)
@pytest.mark.parametrize("ways", WAYS.values(), ids=WAYS)
def test_behind_hooks_of_the_users(ways, hooks, options):
    """Nothing of a paused forward is recorded, and what was recorded is."""
    model, batches = mlp().double(), [torch.randn(n, 3).double() for n in (2, 5)]
    twin, probe, losses = copy.deepcopy(model), torchgradx.attach(model, **options), []

    def loss(net, x):
        def hooked(x):
            with hooks():
                return net(x)

        return square(lambda x: within(ways, hooked, x), x.detach().requires_grad_())

    for paused, x in zip((True, False), batches, strict=True):
        with probe.paused() if paused else contextlib.nullcontext():
            losses.append(loss(model, x))
    for one, x in zip(losses, batches, strict=True):
        one.backward()
        loss(twin, x).backward()
    close_named(probe.norms(per="parameter"), loop(twin, square, batches[1]))
    if options.get("weight_grad", True):
        same_gradients(model, twin, 1e-9)


@a_few_modes
@pytest.mark.parametrize("ways", WAYS.values(), ids=WAYS)
def test_a_forward_of_another_thread_before_the_probe(ways, options):
    model, losses = mlp().double(), []
    twin, x = copy.deepcopy(model), torch.randn(4, 3).double()

    def loss(net):
        return square(lambda x: within(ways, net, x), x.detach().requires_grad_())

    thread = threading.Thread(target=lambda: losses.append(loss(model)))
    thread.start()
    thread.join()
    probe = torchgradx.attach(model, **options)
    losses.pop().backward()
    with pytest.raises(torchgradx.CoverageError, match="nothing is recorded"):
        probe.norms()
    loss(twin).backward()
    same_gradients(model, twin, 1e-9)
    probe.reset()
    loss(model).backward()
    close_named(probe.norms(per="parameter"), loop(twin, square, x))


@a_few_modes
@pytest.mark.parametrize("part", ["", "0"])
@pytest.mark.parametrize("ways", WAYS.values(), ids=WAYS)
def test_two_backwards_of_one_graph(ways, part, options):
    """They add up; where each has a forward of its own, it is said that they do not."""
    model, x = mlp().double(), torch.randn(4, 3).double()
    probe = torchgradx.attach(model.get_submodule(part), **options)
    loss = square(lambda x: within(ways, model, x), x.requires_grad_())
    loss.backward(retain_graph=True)
    loss.backward()
    if reentrant in ways:
        with pytest.raises(torchgradx.CoverageError, match="for several backwards"):
            probe.norms()
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
@pytest.mark.parametrize("ways", WAYS.values(), ids=WAYS)
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


@pytest.mark.parametrize("at", ["before", "after"])
@pytest.mark.parametrize("collected", ["pre", "forward", "inside"])
def test_a_probe_that_the_collector_ends_within_a_forward(collected, at):
    """torch has listed the hooks of the call by then."""
    model = mlp()
    x, found_by = torch.randn(4, 3), []

    def collect(*_):
        found_by.append(gc.collect())

    module = model[1] if collected == "inside" else model
    register = module.register_forward_hook if collected == "forward" else None
    register = register or module.register_forward_pre_hook
    found = fingerprint(model)
    gc.disable()
    try:
        handle = register(collect) if at == "before" else None
        probe = torchgradx.attach(model)
        cycle = [not_reentrant(model, x)]
        cycle.append(cycle)
        cycle[0].sum().backward()
        probe.remove()
        del cycle  # the graph, which the first probe waits for, is the collector's to find
        found_by.clear()
        probe = torchgradx.attach(model)
        handle = handle or register(collect, prepend=True)
        for _ in range(2):
            square(model, x).backward()
        assert probe.norms().shape == (8,)
        assert any(found_by)
        handle.remove()
        probe.remove()
    finally:
        gc.enable()
    gc.collect()
    assert fingerprint(model) == found


def test_a_probe_removed_within_a_forward_leaves_at_its_end():
    model = mlp()
    found, x = fingerprint(model), torch.randn(4, 3)
    probe = torchgradx.attach(model)
    handle = model[1].register_forward_hook(lambda *_: probe.remove())
    square(model, x).backward()
    handle.remove()
    assert fingerprint(model) == found
    with torchgradx.attach(model) as another:
        square(model, x).backward()
        assert another.norms().shape == (4,)


def test_a_probe_removed_after_an_interrupt_leaves_at_once():
    class Interrupt(BaseException):
        pass

    def interrupts(*_):
        raise Interrupt

    model = mlp()
    found = fingerprint(model)
    probe = torchgradx.attach(model)
    handle = model[1].register_forward_hook(interrupts)
    with pytest.raises(Interrupt):
        model(torch.randn(4, 3))
    handle.remove()
    probe.remove()
    assert fingerprint(model) == found


def test_an_exception_is_the_users_where_a_removed_probe_leaves_in_that_forward():
    """Its graph dies there. Torch is walking the hooks then, which must stand until the next."""
    model, kept = mlp(), []
    found, x = fingerprint(model), torch.randn(4, 3)
    probe = torchgradx.attach(model)
    kept.append(not_reentrant(model, x).sum())
    probe.remove()
    probe = torchgradx.attach(model)

    def fails(*_):
        kept.clear()
        gc.collect()
        raise ValueError("the user's own")

    handle = model[1].register_forward_hook(fails)
    with pytest.raises(ValueError, match="the user's own"):
        model(x)
    handle.remove()
    assert not _get_current_dispatch_mode_stack()
    twin = copy.deepcopy(model)
    square(model, x).backward()
    close_named(probe.norms(per="parameter"), loop(twin, square, x), 1e-4)
    probe.remove()
    assert fingerprint(model) == found


class Passing(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return func(*args, **kwargs or {})


def test_a_probe_removed_within_a_mode_of_the_users_leaves_none():
    probes = []

    def forward(m, x):
        with Passing():
            x = m.a(x)
            if probes:
                probes.pop().remove()
            return torch.tanh(x)

    model = Model(forward, a=nn.Linear(3, 2))
    found, x = fingerprint(model), torch.randn(4, 3)
    probes.append(torchgradx.attach(model))
    square(model, x).backward()
    assert not _get_current_dispatch_mode_stack()
    assert not torch.utils._python_dispatch._is_in_torch_dispatch_mode
    assert fingerprint(model) == found
