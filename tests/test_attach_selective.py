"""What runs a checkpoint's layers in a context of its own: selective checkpoints, which keep what
each operation gave for the next one of its kind, and contexts that serve once. They hear the
model's operations alone."""

import contextlib
import copy
import functools

import pytest
import torch
from attach_oracle import (
    Model,
    a_few_modes,
    close_named,
    loop,
    same_gradients,
    square,
)
from torch import nn
from torch.distributed._composable import checkpoint as composable
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import CheckpointPolicy, checkpoint
from torch.utils.checkpoint import create_selective_checkpoint_contexts as contexts

import torchgradx

N = 4
SAVE, RUN = CheckpointPolicy.MUST_SAVE, CheckpointPolicy.PREFER_RECOMPUTE
PRODUCTS = torch.ops.aten.mm.default, torch.ops.aten.addmm.default
ALL = [*PRODUCTS, torch.ops.aten.linear.default, torch.ops.aten.native_layer_norm.default]
ALL += [torch.ops.aten.tanh.default, torch.ops.aten.abs.default, torch.ops.aten.clone.default]
ALL += [torch.ops.aten.pow.Tensor_Scalar, torch.ops.aten.any.default, torch.ops.aten.mul.Tensor]
POLICIES = {
    "nothing": lambda _, op, *args, **kwargs: RUN,
    "products": lambda _, op, *args, **kwargs: SAVE if op in PRODUCTS else RUN,
    "all but views": lambda _, op, *args, **kwargs: SAVE if op in ALL else RUN,
}


def parts():
    inner = nn.Sequential(nn.Linear(5, 5), nn.LayerNorm(5), nn.Tanh(), nn.Linear(5, 5))
    return {"first": nn.Linear(3, 5), "inner": inner, "last": nn.Linear(5, 2)}


def plain(m, x):
    h = m.inner(torch.tanh(m.first(x))).abs()  # ours take abs(), clone() and views as well
    return m.last(h.clone().view(len(x), -1)).abs()


class Heard(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.operations = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.operations.append(func)
        return func(*args, **(kwargs or {}))


def stepped(model, twin, probe, options, loss, reference, part=""):
    """Each step's norms are the loop's, over `reference`, and .grad is the twin's."""
    for n in (N, N, 3):
        x = torch.randn(n, 3).double()
        for net in (model, twin):
            net.zero_grad()
            loss(net, x).backward()
        want = loop(reference, square, x)
        mine = {key[len(part) :]: norms for key, norms in want.items() if key.startswith(part)}
        close_named(probe.norms(per="parameter"), mine)
        if options.get("weight_grad", True):
            same_gradients(model, twin, 1e-9)


@a_few_modes
@pytest.mark.parametrize("policy", POLICIES.values(), ids=POLICIES)
@pytest.mark.parametrize("outer", [None, False, True])
@pytest.mark.parametrize("part", ["", "inner."])
def test_a_selective_checkpoint_around(part, outer, policy, options):
    """The model, or more than it."""
    around = functools.partial(checkpoint, use_reentrant=False,
                               context_fn=functools.partial(contexts, policy))  # fmt: skip

    def loss(model, x):
        x = x.detach().requires_grad_()
        run = functools.partial(around, model)
        return square(
            run if outer is None else lambda x: checkpoint(run, x, use_reentrant=outer), x
        )

    model = Model(plain, **parts()).double()
    twin, reference = copy.deepcopy(model), copy.deepcopy(model)
    probe = torchgradx.attach(model.get_submodule(part.rstrip(".")), **options)
    stepped(model, twin, probe, options, loss, reference, part)
    late, other = loss(model, torch.ones(N, 3).double()), loss(twin, torch.ones(N, 3).double())
    probe.remove()
    late.backward()
    other.backward()
    if options.get("weight_grad", True):
        same_gradients(model, twin, 1e-9)


@a_few_modes
@pytest.mark.parametrize(
    "policy", [*POLICIES.values(), lambda *args, **kwargs: SAVE], ids=[*POLICIES, "everything"]
)
@pytest.mark.parametrize("outer", [None, False])
def test_a_selective_checkpoint_inside_of_another(outer, policy, options):
    """A proof's backward runs the outer one's layers again, with contexts of their own."""

    def forward(m, x):
        run = functools.partial(checkpoint, m.inner, use_reentrant=False,
                                context_fn=functools.partial(contexts, policy))  # fmt: skip
        return m.last(run(torch.tanh(m.first(x))))

    def loss(model, x):
        run = functools.partial(checkpoint, model, use_reentrant=outer)
        return square(model if outer is None else run, x.detach().requires_grad_())

    model = Model(forward, **parts()).double()
    twin, reference = copy.deepcopy(model), Model(lambda m, x: m.last(m.inner(m.first(x).tanh())))
    reference.first, reference.inner, reference.last = map(
        copy.deepcopy, (model.first, model.inner, model.last)
    )
    stepped(model, twin, torchgradx.attach(model, **options), options, loss, reference)


def test_a_mode_of_the_users_hears_the_layers_alone():
    """As many operations at the first step, which is looked at in every way, as at later ones."""
    model, counts = Model(plain, **parts()), []
    torchgradx.attach(model)
    for _ in range(3):
        with Heard() as heard:
            loss = square(model, torch.ones(N, 3))
        loss.backward()
        counts.append(heard.operations)
    assert counts[0] == counts[1] == counts[2]
    assert torch.ops.aten.any.default not in counts[0]


@contextlib.contextmanager
def timed():
    yield


@a_few_modes
@pytest.mark.parametrize("whole", [False, True])
@pytest.mark.parametrize("once", ["composable", "a generator's"])
@pytest.mark.parametrize("check", ["graph", "off"])
def test_a_context_that_serves_one_backward(check, once, whole, options):
    """Refused in the forward, as the proof uses it up; left to the user's where nothing is
    proven."""
    model = Model(plain, **parts()).double()
    twin, reference = copy.deepcopy(model), copy.deepcopy(model)

    def around(net, x):
        return checkpoint(net, x, use_reentrant=False, context_fn=lambda: (timed(), timed()))

    def loss(model, x):
        return square(functools.partial(around, model) if once != "composable" else model, x)

    if once == "composable":
        for net in (model, twin):
            composable(net if whole else net.inner)
    elif not whole:
        for net in (model, twin):
            net.function = lambda m, x: m.last(around(m.inner, m.first(x).tanh()))
        reference.function = lambda m, x: m.last(m.inner(m.first(x).tanh()))
        loss = square
    probe = torchgradx.attach(model, check=check, **options)
    if check == "graph":
        with pytest.raises(torchgradx.CoverageError, match="serves one backward"):
            loss(model, torch.randn(N, 3).double())
    else:
        stepped(model, twin, probe, options, loss, reference)
