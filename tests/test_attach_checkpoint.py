"""Checkpointing in all its forms: sequential, nested, shared, selective, around the whole model."""

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
    exact_or_refused,
    loop,
    need_native,
    refused,
    same_gradients,
    square,
)
from torch import nn
from torch.distributed._composable import checkpoint as composable
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    checkpoint_sequential,
    set_checkpoint_early_stop,
)
from torch.utils.checkpoint import create_selective_checkpoint_contexts as contexts

import torchgradx

N = 4
kinds = pytest.mark.parametrize("reentrant", [False, True])


def linears(count, first=3, width=4):
    widths = [first] + [width] * count
    return {f"l{k}": nn.Linear(widths[k], width) for k in range(count)}


@a_few_modes
@kinds
@pytest.mark.parametrize("segments", [2, 3])
def test_checkpoint_sequential_is_exact(segments, reentrant, options):
    def forward(m, x):
        x = x.detach().requires_grad_()  # reentrant segments give no gradient without
        return checkpoint_sequential(m.layers, segments, x, use_reentrant=reentrant)

    layers = [nn.Linear(5, 5), nn.ReLU(), nn.Linear(5, 5), nn.Tanh(), nn.Linear(5, 5)]
    check(Model(forward, layers=nn.Sequential(*layers)), square, torch.randn(N, 5), **options)


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

    check(Model(forward, **linears(5)), square, torch.randn(N, 5, 3), **options)


@a_few_modes
@kinds
def test_a_checkpoint_around_the_whole_model_is_exact(reentrant, options):
    def loss(model, x):
        x = x.detach().requires_grad_()
        out = checkpoint(model, x, use_reentrant=reentrant)
        return out.square().flatten(1).sum(1).mean()

    model = nn.Sequential(nn.Linear(3, 5), nn.LayerNorm(5), nn.Tanh(), nn.Linear(5, 2))
    check(model, loss, torch.randn(N, 3), **options)


class Pooled(nn.Module):
    """Attention by a vector of the model's own, over T tokens."""

    def __init__(self):
        super().__init__()
        self.e, self.l, self.o = nn.Embedding(9, 4), nn.Linear(4, 4), nn.Linear(4, 2)
        self.by = nn.Parameter(torch.randn(4))

    def forward(self, ids):
        x = torch.tanh(self.l(self.e(ids)))
        return self.o((torch.softmax(x @ self.by, 1)[..., None] * x).sum(1))


@a_few_modes
@pytest.mark.parametrize("tokens", [N - 1, N])
def test_one_around_a_model_with_a_parameter_of_its_own_is_exact_in_every_pass(tokens, options):
    """Within a backward, where it runs again, nothing is proven: that says nothing of passes."""
    need_native(options)
    model = Pooled().double()
    with torchgradx.attach(model, **options) as probe:
        for _ in range(3):
            ids = torch.randint(9, (N, tokens))
            want = loop(model, square, ids)
            around = functools.partial(checkpoint, model, use_reentrant=False)
            square(around, ids).backward()
            close_named(probe.norms(per="parameter"), want)


@a_few_modes
@pytest.mark.parametrize("last", [nn.LayerNorm(4), nn.Linear(4, 4), nn.LSTM(4, 4)], ids=str)
def test_what_a_checkpoint_makes_last_and_nobody_needs(last, options):
    """Where it runs again it ends before that, by an exception inside of a layer's call."""

    def block(m, x):
        z = torch.tanh(x) + x
        return m.last(z), z

    model = Model(
        lambda m, x: m.o(checkpoint(block, m, m.i(x), use_reentrant=False)[1]),
        i=nn.Linear(3, 4), last=copy.deepcopy(last), o=nn.Linear(4, 2),
    )  # fmt: skip
    check(model, square, torch.randn(N, 5, 3), **options)


@a_few_modes
def test_a_checkpoint_that_does_not_stop_early_is_exact(options):
    def loss(model, x):
        with set_checkpoint_early_stop(False):
            return square(model, x)

    model = Model(
        lambda m, x: m.out(checkpoint(m.block, torch.tanh(m.into(x)), use_reentrant=False)),
        into=nn.Linear(3, 4), block=nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4)),
        out=nn.Linear(4, 2),
    )  # fmt: skip
    check(model, loss, torch.randn(N, 3), **options)


@a_few_modes
@kinds
@pytest.mark.parametrize("order", ["one by one", "summed", "last first"])
def test_checkpointed_passes_in_flight_together_are_exact(order, reentrant, options):
    model = Model(
        lambda m, x: m.out(checkpoint(m.block, torch.tanh(m.into(x)), use_reentrant=reentrant)),
        into=nn.Linear(3, 4), block=nn.Sequential(nn.Linear(4, 4), nn.Tanh()), out=nn.Linear(4, 2),
    ).double()  # fmt: skip
    batches = [torch.randn(n, 3).double() for n in (N, N - 1)]
    parts = [loop(model, square, x) for x in batches]
    want = {name: torch.cat([part[name] for part in parts]) for name in parts[0]}
    with torchgradx.attach(model, **options) as probe:
        if order == "one by one":
            for x in batches:
                square(model, x).backward()
        else:
            losses = [square(model, x) for x in batches]
            for loss in [sum(losses)] if order == "summed" else reversed(losses):
                loss.backward()
        close_named(probe.norms(per="parameter"), want)


def sequence_block(reentrant):
    def forward(m, x):
        def block(t):
            return m.l2(torch.tanh(m.l1(t.transpose(0, 1)))).transpose(0, 1)

        return m.l3(checkpoint(block, torch.tanh(m.l0(x)), use_reentrant=reentrant))

    return Model(forward, **linears(4))


@a_few_modes
@kinds
@pytest.mark.parametrize("positions", [5, N, 2 * N])
def test_a_transposed_block_in_a_checkpoint_is_exact_or_refused(positions, reentrant, options):
    x = torch.randn(N, positions, 3)
    refusal = exact_or_refused(sequence_block(reentrant), square, x, **options)
    assert (refusal is not None) == reentrant  # where nothing can be proven
    check(sequence_block(reentrant), square, x, layout={"l[12]": "sequence", "l[03]": "batch"},
          **options)  # fmt: skip


@a_few_modes
def test_a_second_attachment_to_what_is_all_in_a_reentrant_checkpoint(options):
    """Its graph holds nothing of the pass before it runs again, and the structure is known."""
    model = Model(
        lambda m, x: checkpoint(m.a, x, use_reentrant=True),
        a=nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 2)),
    )
    x = torch.randn(N, 3, requires_grad=True)
    want = {f"a.{name}": norms for name, norms in loop(model.a, square, x).items()}
    for _ in range(2):
        with torchgradx.attach(model, **options) as probe:
            for _ in range(2):
                square(model, x).backward()
                close_named(probe.norms(per="parameter"), want, 1e-5)


def root_alone(m, x):
    return m.o(checkpoint(lambda t: torch.tanh(t @ m.w), m.i(x), use_reentrant=True))


def root_and_layer(m, x):
    return checkpoint(lambda t: m.o(torch.tanh(t @ m.w)), m.i(x), use_reentrant=True)


def weight_of_a_layer(m, x):
    return m.o(checkpoint(lambda t: torch.tanh(t @ m.i.weight @ m.w), m.i(x), use_reentrant=True))


def last_of_all(m, x):
    """No module's backward comes before it."""
    return checkpoint(lambda t: torch.tanh(t @ m.w), m.i(x), use_reentrant=True)


@a_few_modes
@pytest.mark.parametrize("forward", [root_alone, root_and_layer, weight_of_a_layer, last_of_all])
def test_what_a_reentrant_checkpoint_uses_outside_of_modules_is_refused(forward, options):
    """Its backward is one inside the other, and may meet no module at all."""
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
