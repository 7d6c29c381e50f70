"""Checkpoints of each kind: around blocks, layers and models, nested, shared, selective."""

import contextlib
import copy
import functools

import pytest
import torch
from attach_oracle import (
    Model,
    a_few_modes,
    check,
    close_named,
    every_mode,
    fallback_mode,
    loop,
    refused,
    same_gradients,
    square,
)
from torch import nn
from torch.distributed._composable import checkpoint as composable
from torch.utils.checkpoint import CheckpointPolicy, checkpoint
from torch.utils.checkpoint import create_selective_checkpoint_contexts as contexts

import torchgradx

N = 4
kinds_of_checkpoint = pytest.mark.parametrize("reentrant", [False, True])


def checkpointed(reentrant, middle=None):
    middle = middle or nn.Sequential(nn.Linear(4, 4), nn.ReLU(inplace=True), nn.Linear(4, 4))
    return Model(
        lambda m, x: m.out(checkpoint(m.block, torch.tanh(m.into(x)), use_reentrant=reentrant)),
        into=nn.Linear(3, 4), block=middle, out=nn.Linear(4, 2),
    )  # fmt: skip


@every_mode
@kinds_of_checkpoint
def test_a_layer_shared_over_three_checkpointed_segments_is_exact(reentrant, options):
    def forward(m, x):
        x = m.into(x)
        for _ in range(3):
            x = checkpoint(lambda t: torch.tanh(m.l(t)), x, use_reentrant=reentrant)
        return x

    model = Model(forward, into=nn.Linear(3, 4), l=nn.Linear(4, 4))
    check(model, square, torch.randn(N, 3), **options)
    check(model, square, torch.randn(N, 6, 3), **options)


BLOCKS = {
    "linears": lambda: nn.Sequential(nn.Linear(4, 4), nn.ReLU(inplace=True), nn.Linear(4, 4)),
    "others": lambda: nn.Sequential(nn.LayerNorm(4), nn.Linear(4, 4), nn.PReLU(4)),
    "convolutions": lambda: nn.Sequential(
        nn.Unflatten(1, (2, 2)), nn.Conv1d(2, 2, 3, padding=1), nn.Flatten()),
}  # fmt: skip


@fallback_mode
@kinds_of_checkpoint
@pytest.mark.parametrize("name", BLOCKS)
def test_checkpointed_blocks_are_exact(name, reentrant, options):
    check(checkpointed(reentrant, BLOCKS[name]()), square, torch.randn(N, 3), **options)


def linears(count, first=3, width=4):
    widths = [first] + [width] * count
    return {f"l{k}": nn.Linear(widths[k], width) for k in range(count)}


@a_few_modes
@pytest.mark.parametrize("inner", [False, True])
@pytest.mark.parametrize("outer", [False, True])
@pytest.mark.parametrize("shared", [False, True])
def test_nested_checkpoints_are_exact(shared, outer, inner, options):
    def forward(m, x):
        layers = [m.l1] * 3 if shared else [m.l1, m.l2, m.l3]

        def within(t):
            return torch.tanh(layers[2](torch.tanh(layers[1](t))))

        def around(t):
            return checkpoint(within, torch.tanh(layers[0](t)), use_reentrant=inner)

        return m.l4(checkpoint(around, torch.tanh(m.l0(x)), use_reentrant=outer))

    model, x = Model(forward, **linears(5)), torch.randn(N, 5, 3)
    if outer and inner and not torchgradx.ops.NATIVE:
        refused(model, square, x, names=[], match="use_reentrant=False", **options)
    else:
        check(model, square, x, **options)


@a_few_modes
@kinds_of_checkpoint
def test_a_checkpoint_around_the_whole_model_is_exact(reentrant, options):
    def loss(model, x):
        x = x.detach().requires_grad_()
        out = checkpoint(model, x, use_reentrant=reentrant)
        return out.square().flatten(1).sum(1).mean()

    model = nn.Sequential(nn.Linear(3, 5), nn.LayerNorm(5), nn.Tanh(), nn.Linear(5, 2))
    check(model, loss, torch.randn(N, 3), **options)


OUTSIDE = {
    "the root's alone": lambda m, t: torch.tanh(t @ m.w),
    "a layer's weight": lambda m, t: torch.tanh(t @ m.i.weight @ m.w),
}


@pytest.mark.grid("last", "use")
@a_few_modes
@pytest.mark.parametrize("last", [False, True], ids=["", "no module's backward comes before it"])
@pytest.mark.parametrize("use", OUTSIDE.values(), ids=OUTSIDE)
def test_what_a_reentrant_checkpoint_uses_outside_of_modules_is_refused(use, last, options):
    """Its backward is one inside the other, and may meet no module at all."""

    def forward(m, x):
        y = checkpoint(functools.partial(use, m), m.i(x), use_reentrant=True)
        return y if last else m.o(y)

    model = Model(forward, w=torch.randn(3, 4), o=nn.Linear(4, 2), i=nn.Linear(3, 3))
    refused(model, square, torch.randn(4, 3), names=["w"], match="use_reentrant=False|beyond",
            **options)  # fmt: skip


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
@pytest.mark.parametrize("outer", [None, False])
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
