"""What all samples share: each way samples meet it, changed in place, saved; over steps."""

import contextlib
import copy

import pytest
import torch
from attach_oracle import (
    ANY,
    VMAP,
    Model,
    a_few_modes,
    check,
    close,
    close_named,
    each_of,
    exact_or_refused,
    exact_step,
    loop,
    loop_model,
    same_gradients,
    square,
)
from broadcast_models import (
    WAYS,
    D,
    N,
    Patches,
    T,
    against_all,
    constant,
    positional,
    relative,
    tokens,
)
from recurrent_models import KINDS, made, net
from torch import nn
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

import torchgradx

SHARED = {
    "positions": (positional, tokens),
    "relative": (lambda: relative(True), lambda: torch.randn(N, T, D)),
    "queries": (lambda: constant(against_all, l=nn.Linear(D, D)), lambda: torch.randn(N, T, D)),
    "patches": (Patches, lambda: torch.randn(N, T, 3)),
}
RECURRENT = {  # several outputs, which run again when the backward ends
    kind: (lambda kind=kind: net(made(kind, "both ways")), lambda: torch.randn(N, T, 3))
    for kind in KINDS
}
each_model = pytest.mark.parametrize("name", SHARED)


def shared_example(name, dtype=torch.float64):
    make, data = (SHARED | RECURRENT)[name]
    model, x = make(), data()
    return model.to(dtype), x.to(dtype) if x.is_floating_point() else x


@pytest.mark.parametrize("name", SHARED | RECURRENT)
@a_few_modes
def test_several_backwards_through_one_graph_add_up(name, options):
    model, x = shared_example(name)
    with torchgradx.attach(model, **options) as probe:
        for batch in (x, x[:1], x[:1]):
            want = loop(model, lambda *batch: 3 * square(*batch), batch)
            model.zero_grad()
            loss = square(model, batch)
            loss.backward(retain_graph=True)
            (2 * loss).backward()
            close_named(probe.norms(per="parameter"), want)


@each_model
@a_few_modes
def test_batches_of_other_sizes_follow(name, options):
    """Where a sample's value goes is seen once; where the samples stand is proven for each size."""
    model, x = shared_example(name)
    with torchgradx.attach(model, **options) as probe:
        for batch in (x, torch.cat([x, x])[:7], x[:1], x[:, :3], torch.cat([x, x])[:T], x[:3], x):
            exact_step(probe, model, batch)
        model.eval()
        exact_step(probe, model, x)


MAY_REFUSE = {"stacked"}  # each sample alone: its nodes hold no row for the others


@a_few_modes
@pytest.mark.parametrize("positions", [T, N])
@pytest.mark.parametrize("way", WAYS)
def test_each_way_for_samples_to_come_in_is_exact(way, positions, options):
    def forward(m, x):
        return m.o(torch.tanh(WAYS[way](x, m.l(m.c))))

    model = constant(forward, (positions, D), l=nn.Linear(D, D))
    x = torch.randn(N, positions, D)
    if way in MAY_REFUSE or positions == N:  # outputs [N, N, ...] may have the samples in either
        exact_or_refused(model, square, x, **options)
    else:
        check(model, square, x, **options)


MAY_RUN_AGAIN = {"divided by", "into a part", "stacked", "attention", "maximum", "where", "norm",
                 "indexed"}  # fmt: skip


@a_few_modes
@pytest.mark.parametrize("way", WAYS)
def test_a_bare_parameter_is_exact_without_running_its_owner_again(way, options):
    model = Model(lambda m, x: m.o(torch.tanh(WAYS[way](m.i(x), m.w))), w=torch.randn(T, D),
                  i=nn.Linear(D, D), o=nn.Linear(D, 2))  # fmt: skip
    x = torch.randn(N, T, D)
    if way in MAY_RUN_AGAIN:
        exact_or_refused(model, square, x, **options)
        return
    check(model, square, x, **options)
    with torchgradx.attach(model, **options) as probe:
        square(model, x).backward()
        probe.norms()
        assert "(root): Model  [w]: lifted" in probe.explain()


@a_few_modes
@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("way", WAYS)
def test_where_samples_come_in_inside_a_checkpoint(way, reentrant, options):
    def forward(m, x):
        inside = lambda x, s: torch.tanh(WAYS[way](x, s))  # noqa: E731
        return m.o(checkpoint(inside, m.i(x), m.l(m.c), use_reentrant=reentrant))

    model = constant(forward, l=nn.Linear(D, D), i=nn.Linear(D, D))
    x = torch.randn(N, T, D)
    if reentrant or way in {*MAY_REFUSE, "into a part"}:  # what CopySlices saved shows to nobody
        exact_or_refused(model, square, x, **options)
    else:
        check(model, square, x, **options)


ONE = {
    "a factor": lambda m, x: m.l(x) * m.t(),
    "a temperature": lambda m, x: (m.l(x) / m.t()).softmax(-1),
    "twice": lambda m, x: torch.tanh(m.l(x * m.t())) * m.t(),
    "in a checkpoint": lambda m, x: checkpoint(
        lambda x: torch.tanh(m.l(x)) * m.t(), x, use_reentrant=False),
    "detached": lambda m, x: m.l(x) * m.t().detach(),
    "idle": lambda m, x: (m.t(), m.l(x))[1],
}  # fmt: skip


@a_few_modes
@pytest.mark.parametrize("n", [1, N])
@pytest.mark.parametrize("numbers", [(), (3,)], ids=str)
@pytest.mark.parametrize("way", ONE)
def test_a_module_may_give_one_number(way, numbers, n, options):
    """As a temperature: of a submodule that is given no sample."""
    number = Model(lambda m: m.weight.exp().sum(), weight=torch.randn(numbers))
    model = Model(ONE[way], l=nn.Linear(D, D), t=number)
    check(model, square, torch.randn(n, T, D), **options)


MODES = [*ANY, *VMAP, {"clip": True}, {"clip": True, "fused": False}]
modes = each_of(MODES)


def heads(b):
    b = b.unflatten(-1, (2, -1)).transpose(1, 2)
    b /= 3
    return b.transpose(1, 2).flatten(2)


def part(b):
    b[:, :2] *= 2
    b[..., 1:].tanh_()
    return b


CHANGES = {"twice": lambda b: b.mul_(2).add_(1).sigmoid_(), "heads, scaled": heads, "parts": part}
changes = pytest.mark.parametrize("change", CHANGES)


def changed(change, around=lambda use, c: use(c)):
    """Positions [1, T, D] through a Linear, whose output is changed where it stands."""

    def forward(m, x):
        table = around(lambda c: CHANGES[change](m.l(c)), m.c[None, : x.shape[1]])
        return m.o(torch.tanh(m.i(x) * table))

    return constant(forward, (2 * N, D), l=nn.Linear(D, D), i=nn.Linear(D, D))


@modes
@changes
@pytest.mark.parametrize(("n", "t"), [(N, T), (N, N), (D, D), (1, T), (N, 1), (2, T)])
def test_tables_changed_in_place_are_exact(change, n, t, options):
    check(changed(change), square, torch.randn(n, t, D), **options)


def in_offload(use, c):
    with save_on_cpu():
        return use(c)


def in_checkpoint(use, c):
    return checkpoint(use, c, use_reentrant=False)


@modes
@pytest.mark.parametrize("around", [in_checkpoint, in_offload])
def test_samples_changed_in_place_by_what_they_share(around, options):
    """Exact, or refused in a checkpoint: that gives each saved tensor once."""

    def change(m, x):
        h = m.i(x)
        h[:, 1:] *= m.l(m.c)[1:]
        return m.l(h)

    def forward(m, x):
        return m.o(torch.tanh(around(lambda x: change(m, x), m.f(x))))

    parts = {name: nn.Linear(D, D) for name in ("f", "i", "l")}
    shows = exact_or_refused if around is in_checkpoint else check
    shows(constant(forward, (T, D), **parts), square, torch.randn(N, T, D), **options)


def place_ids():
    return torch.arange(T) % 3  # some twice


KINDS = {
    "a table": lambda m, h: h * m.table(place_ids()),
    "a layer of both": lambda m, h: h * torch.tanh(m.layer(m.table(place_ids()))),
    "a scale": lambda m, h: h * m.scale,
    "a product": lambda m, h: h @ (m.square @ m.square),
}
each_kind = pytest.mark.parametrize("kind", KINDS)


class Block(nn.Module):
    def __init__(self, kind):
        super().__init__()
        self.use = KINDS[kind]
        self.layer, self.table, self.norm = nn.Linear(D, D), nn.Embedding(3, D), nn.LayerNorm(D)
        if kind == "a scale":
            self.scale = nn.Parameter(torch.randn(D))
        if kind == "a product":
            self.square = nn.Parameter(torch.randn(D, D))

    def forward(self, x):
        return x + torch.tanh(self.use(self, self.layer(x)))


def plain(m, x):
    for block in m.blocks:
        x = block(x)
    return x


def checkpointed(m, x):
    for block in m.blocks:
        x = checkpoint(block, x, use_reentrant=False)
    return x


def nested(m, x):
    return checkpoint(lambda x: checkpointed(m, x), x, use_reentrant=False)


def one_block_twice(m, x):
    return checkpoint(m.blocks[0], checkpoint(m.blocks[0], x, use_reentrant=False),
                      use_reentrant=False)  # fmt: skip


def offloaded(m, x):
    with save_on_cpu():
        return plain(m, x)


def offloaded_inputs(m, x):
    with save_on_cpu():
        return checkpointed(m, x)


def blocks_of(kind, way):
    blocks = nn.ModuleList(Block(kind) for _ in range(2))
    return Model(lambda m, x: m.head(way(m, x).mean(1)), blocks=blocks, head=nn.Linear(D, 2))


@a_few_modes
@each_kind
@pytest.mark.parametrize(
    "way", [checkpointed, nested, one_block_twice, offloaded, offloaded_inputs]
)
def test_each_is_exact(way, kind, options):
    check(blocks_of(kind, way), square, torch.randn(N, T, D), **options)


class Once(saved_tensors_hooks):
    """They forget what they gave, as those of libraries that move activations away."""

    def __init__(self):
        self.kept = {}
        super().__init__(self.pack, self.kept.pop)

    def pack(self, t):
        key = object()
        self.kept[key] = t
        return key


def plainly(net, options, x):
    """Two steps under such hooks: nothing is asked for twice, and gradients are what they are."""
    twin, want = copy.deepcopy(net), loop_model(net, square, x)
    square(twin, x).backward()
    read = []
    with torchgradx.attach(net, **options) as probe:
        for _ in range(2):
            net.zero_grad()
            with Once():
                loss = square(net, x)
            loss.backward()
            if options.get("weight_grad") is not False:
                same_gradients(net, twin, 1e-9)
            with contextlib.suppress(torchgradx.CoverageError):
                read.append(probe.norms())
    for norms in read:
        close(norms, want)
    return read


@a_few_modes
@each_kind
def test_hooks_that_give_once_are_asked_by_the_engine_alone(kind, options):
    plainly(blocks_of(kind, plain).double(), options, torch.randn(N, T, D, dtype=torch.float64))
