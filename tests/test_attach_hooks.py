"""A probe's hooks on parameters go where they are done with, and the user's stay."""

import sys
import threading

import pytest
import torch
from attach_oracle import close, loop_model, mlp, square
from torch import nn

import torchgradx

pytestmark = pytest.mark.skipif(not torchgradx.ops.NATIVE, reason="there every pass is listened to")
DICTIONARIES = "_backward_hooks", "_post_accumulate_grad_hooks"
OPTIONS = {
    "fused": {},
    "beside": {"fused": False},
    "run again": {"backend": "vmap"},
    "norms only": {"weight_grad": False},
    "clipping": {"clip": True},
}


@pytest.fixture(autouse=True)
def alone():
    """A progress bar that another test showed has left a thread, beside which all hooks stay."""
    bar = getattr(sys.modules.get("tqdm"), "tqdm", None)
    if bar is not None and bar.monitor is not None:
        bar.monitor.exit()
        bar.monitor = None
    if threading.active_count() > 1:
        pytest.skip(f"threads of other tests: {threading.enumerate()[1:]}")


def step(model, probe):
    model.zero_grad()
    x = torch.randn(4, 3, dtype=torch.float64)
    square(model, x).backward()
    close(probe.norms(), loop_model(model, square, x))


def left(model):
    return [p for p in model.parameters() if any(getattr(p, d) is not None for d in DICTIONARIES)]


@pytest.mark.parametrize("name", ["fused", "beside"])
def test_nothing_is_left_once_a_structure_is_known(name):
    model = mlp().double()
    with torchgradx.attach(model, **OPTIONS[name]) as probe:
        for _ in range(3):
            step(model, probe)
            assert not left(model)


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_nothing_is_left_by_a_probe_that_has_gone(options):
    model, told = mlp().double(), []
    with torchgradx.attach(model, **options) as probe:
        step(model, probe)
    assert not left(model)
    for p in model.parameters():  # both kinds are heard as on a new tensor
        p.register_hook(lambda g: told.append("before"))
        p.register_post_accumulate_grad_hook(lambda p: told.append("after"))
    square(model, torch.randn(4, 3, dtype=torch.float64)).backward()
    assert told == ["before", "after"] * 4


@pytest.mark.parametrize("when", ["before", "while", "after"])
def test_the_users_hooks_stay(when):
    model, told = mlp().double(), []
    p = model[0].weight

    def hook():
        return p.register_hook(told.append), p.register_post_accumulate_grad_hook(told.append)

    handles = hook() if when == "before" else ()
    with torchgradx.attach(model) as probe:
        if when == "while":
            square(model, torch.randn(4, 3, dtype=torch.float64))
            handles = hook()
        step(model, probe)
        handles = handles or hook()
        told.clear()
        step(model, probe)
        assert len(told) == 2
        for handle in handles:
            handle.remove()
        step(model, probe)
        assert len(told) == 2


def test_another_threads_backward_is_waited_for():
    model = mlp().double()
    other, reached, go_on = nn.Linear(2, 2), threading.Event(), threading.Event()
    output = other(torch.randn(1, 2))

    def wait(_):
        reached.set()
        assert go_on.wait(60)

    output.register_hook(wait)
    thread = threading.Thread(target=output.sum().backward, daemon=True)
    with torchgradx.attach(model) as probe:
        thread.start()
        assert reached.wait(60)
        step(model, probe)
        assert len(left(model)) == 4
        assert not any(p._backward_hooks for p in model.parameters())
        go_on.set()
        thread.join(60)
        step(model, probe)
        assert not left(model)
