"""Checkpoints of each kind; what they run again belongs to the forward that it comes from."""

import contextlib
import copy
import functools

import pytest
import torch
from attach_models import Model, mlp, square
from attach_modes import a_few_modes, fallback_mode
from attach_oracle import check, close_named, joined, loop, same_gradients
from attach_steps import exact_step, refusal, refused
from torch import nn
from torch.distributed._composable import checkpoint as composable
from torch.utils.checkpoint import CheckpointPolicy, checkpoint
from torch.utils.checkpoint import create_selective_checkpoint_contexts as contexts

import torchgradx

N = 4
pytestmark = pytest.mark.usefixtures("no_collector")  # a checkpoint's graph is a cycle


def checkpointed(reentrant, middle=None):
    middle = middle or nn.Sequential(nn.Linear(4, 4), nn.ReLU(inplace=True), nn.Linear(4, 4))
    return Model(
        lambda m, x: m.out(checkpoint(m.block, torch.tanh(m.into(x)), use_reentrant=reentrant)),
        into=nn.Linear(3, 4), block=middle, out=nn.Linear(4, 2),
    )  # fmt: skip


BLOCKS = {
    "linears": lambda: nn.Sequential(nn.Linear(4, 4), nn.ReLU(inplace=True), nn.Linear(4, 4)),
    "others": lambda: nn.Sequential(nn.LayerNorm(4), nn.Linear(4, 4), nn.PReLU(4)),
    "convolutions": lambda: nn.Sequential(
        nn.Unflatten(1, (2, 2)), nn.Conv1d(2, 2, 3, padding=1), nn.Flatten()),
}  # fmt: skip


@fallback_mode
@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("name", BLOCKS)
def test_checkpointed_blocks_are_exact(name, reentrant, options):
    check(checkpointed(reentrant, BLOCKS[name]()), square, torch.randn(N, 3), **options)


@fallback_mode
def test_more_reentrant_checkpoints_than_backwards_that_are_remembered(options):
    model = Model(lambda m, x: m.out(functools.reduce(
        lambda x, layer: x + checkpoint(layer, x / 9, use_reentrant=True), m.layers, m.into(x))),
        into=nn.Linear(3, 4), layers=nn.ModuleList(nn.Linear(4, 4) for _ in range(66)),
        out=nn.Linear(4, 2))  # fmt: skip
    check(model, square, torch.randn(N, 3), **options)


class Reversible(torch.autograd.Function):
    """Its backward runs another one, which adds to `.grad` by itself."""

    @staticmethod
    def forward(ctx, x, block):
        ctx.saved = x.detach(), block
        return block(x)

    @staticmethod
    def backward(ctx, g):
        x, block = ctx.saved[0].requires_grad_(), ctx.saved[1]
        with torch.enable_grad():
            block(x).backward(g)
        return x.grad, None


@pytest.mark.parametrize("level", ["graph", "samples"])
def test_a_block_whose_function_runs_a_backward_of_its_own(level):
    model = Model(lambda m, x: m.out(Reversible.apply(m.into(x), m.block)),
                  into=nn.Linear(3, 4), block=BLOCKS["others"](), out=nn.Linear(4, 2))  # fmt: skip
    check(model, square, torch.randn(N, 3), check=level)


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

    layers = {f"l{k}": nn.Linear(4 if k else 3, 4) for k in range(5)}
    model, x = Model(forward, **layers), torch.randn(N, 5, 3)
    if outer and inner and not torchgradx.ops.NATIVE:
        refused(model, square, x, names=[], match="use_reentrant=False", **options)
    else:
        check(model, square, x, **options)


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
    refused(model, square, torch.randn(4, 3), names=["w"], match="use_reentrant|beyond", **options)


SAVE, RUN = CheckpointPolicy.MUST_SAVE, CheckpointPolicy.PREFER_RECOMPUTE
PRODUCTS = torch.ops.aten.mm.default, torch.ops.aten.addmm.default
POLICIES = {
    "nothing": lambda _, op, *args, **kwargs: RUN,
    "products": lambda _, op, *args, **kwargs: SAVE if op in PRODUCTS else RUN,
    "all but views": lambda _, op, *args, **kwargs: RUN if op.is_view else SAVE,
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
        want = loop(reference, square, x).items()
        mine = {key[len(part) :]: norms for key, norms in want if key.startswith(part)}
        twin = twin if options.get("weight_grad", True) else None
        exact_step(probe, model, x, loss=loss, want=mine, twin=twin)


@a_few_modes
@pytest.mark.parametrize("policy", POLICIES.values(), ids=POLICIES)
@pytest.mark.parametrize("outer", [None, False])
@pytest.mark.parametrize("part", ["", "inner."])
def test_a_selective_checkpoint_around(part, outer, policy, options):
    around = functools.partial(checkpoint, use_reentrant=False,
                               context_fn=functools.partial(contexts, policy))  # fmt: skip

    def loss(model, x):
        x = x.detach().requires_grad_()
        run = functools.partial(around, model)
        whole = run if outer is None else functools.partial(checkpoint, run, use_reentrant=outer)
        return square(whole, x)

    model = Model(plain, **parts()).double()
    twin, reference = copy.deepcopy(model), copy.deepcopy(model)
    probe = torchgradx.attach(model.get_submodule(part.rstrip(".")), **options)
    stepped(model, twin, probe, options, loss, reference, part)
    probe.remove()


@contextlib.contextmanager
def timed():
    yield


@a_few_modes
@pytest.mark.parametrize("whole", [False, True])
@pytest.mark.parametrize("once", ["composable", "a generator's"])
@pytest.mark.parametrize("check", ["graph", "off"])
def test_a_context_that_serves_one_backward(check, once, whole, options):
    """Refused in the forward, as the proof uses it up; left to the user if nothing is proven."""
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


not_reentrant = functools.partial(checkpoint, use_reentrant=False)
reentrant = functools.partial(checkpoint, use_reentrant=True)
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
    want = loop(model, square, x).items()
    want = {k.removeprefix("0." if part else ""): 2 * w for k, w in want if k.startswith(part)}
    close_named(probe.norms(per="parameter"), want)


class Fails(nn.Module):
    next = False

    def forward(self, x):
        if self.next and torch._C._current_graph_task_id() != -1:
            self.next = False
            raise MemoryError("once")
        return x


@a_few_modes
@pytest.mark.parametrize("ways", NESTED.values(), ids=NESTED)
def test_what_a_recomputation_raises_is_the_users(ways, options):
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
def test_a_module_called_outside_of_the_model_is_of_its_own_call(options):
    model, late = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)).double(), []
    twin, probe = copy.deepcopy(model), torchgradx.attach(model, **options)

    def loss(model, x):
        return square(lambda x: checkpoint(part, model, x, use_reentrant=False), x)

    def part(model, x):
        return torch.tanh(model[0](torch.tanh(x)))

    for is_paused in (False, True):
        x = torch.randn(3, 2, 4).double()
        with probe.paused() if is_paused else contextlib.nullcontext():
            late += loss(model, x), loss(twin, x)
    for one in late:
        one.backward()
    same_gradients(model, twin, 1e-9)
