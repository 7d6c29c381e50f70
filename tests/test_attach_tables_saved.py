"""What all samples share, changed in place, or saved through hooks and checkpoints."""

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
    exact_or,
    exact_or_refused,
    loop,
    loop_model,
    mlp,
    same_gradients,
    square,
)
from broadcast_models import D, N, T, constant
from torch import nn
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

import torchgradx

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


CHANGES = {
    "relu": lambda b: torch.relu_(b),
    "twice": lambda b: b.mul_(2).add_(1).sigmoid_(),
    "heads, scaled": heads,
    "parts": part,
}
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


@modes
@changes
def test_tables_changed_in_place_are_exact_in_later_steps_of_other_sizes(change, options):
    net = changed(change).double()
    with torchgradx.attach(net, **options) as probe:
        for n, t in [(N, T), (N, T), (N, N), (3, T), (1, T), (N, T)]:
            x = torch.randn(n, t, D, dtype=torch.float64)
            square(net, x).backward()
            close(probe.norms(), loop_model(net, square, x))


@modes
@changes
def test_samples_written_into_it_are_found(change, options):
    def forward(m, x):
        b = m.l(m.c[None]).expand(len(x), -1, -1).clone()
        b[:, 1:] *= m.i(x)[:, 1:]
        return m.o(torch.tanh(CHANGES[change](b)))

    net = constant(forward, (T, D), l=nn.Linear(D, D), i=nn.Linear(D, D))
    check(net, square, torch.randn(N, T, D), **options)


def in_offload(use, c):
    with save_on_cpu():
        return use(c)


def in_checkpoint(use, c):
    return checkpoint(use, c, use_reentrant=False)


@modes
@changes
def test_in_a_checkpoint_each_is_exact_or_refused(change, options):
    """What an operation in place wraps shows nothing of what it saved: it is not asked there."""
    exact_or_refused(changed(change, in_checkpoint), square, torch.randn(N, T, D), **options)


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


@modes
def test_a_table_of_the_roots_own_is_exact(options):
    def forward(m, x):
        b = m.w[None] * 2
        b.view(-1, D)[1:].sigmoid_()
        return m.o(torch.tanh(m.i(x) * b))

    net = constant(forward, w=torch.randn(T, D), i=nn.Linear(D, D)).double()
    x = torch.randn(N, T, D, dtype=torch.float64)
    with torchgradx.attach(net, **options) as probe:
        square(net, x).backward()
        close_named(probe.norms(per="parameter"), loop(net, square, x))


def rows():
    return torch.arange(T) % 3  # some twice


KINDS = {
    "a table": lambda m, h: h * m.table(rows()),
    "a table, read": lambda m, h: h * m.table.weight[rows()],
    "a table, normed": lambda m, h: h * m.norm(m.table(rows())),
    "a layer of both": lambda m, h: h * torch.tanh(m.layer(m.table(rows()))),
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


def shared(m, x):
    return checkpoint(m.blocks[0], checkpoint(m.blocks[0], x, use_reentrant=False),
                      use_reentrant=False)  # fmt: skip


def offloaded(m, x):
    with save_on_cpu():
        return plain(m, x)


def offloaded_inputs(m, x):
    with save_on_cpu():
        return checkpointed(m, x)


def model(kind, way):
    blocks = nn.ModuleList(Block(kind) for _ in range(2))
    return Model(lambda m, x: m.head(way(m, x).mean(1)), blocks=blocks, head=nn.Linear(D, 2))


@a_few_modes
@each_kind
@pytest.mark.parametrize("way", [checkpointed, nested, shared, offloaded, offloaded_inputs])
def test_each_is_exact(way, kind, options):
    check(model(kind, way), square, torch.randn(N, T, D), **options)


@a_few_modes
def test_a_forward_runs_again_before_a_node_is_asked_for_all_samples_at_once(options):
    """Where nothing below asked for it yet: what draws numbers cannot run for all at once."""

    def inside(m, x):
        h = m.layer(x)
        return h + 0 * torch.rand_like(h) + m.norm(m.table(rows()))

    parts = {"layer": nn.Linear(D, D), "norm": nn.LayerNorm(D), "table": nn.Embedding(3, D)}
    net = Model(lambda m, x: checkpoint(inside, m, m.first(x), use_reentrant=False),
                first=nn.Linear(D, D), **parts)  # fmt: skip
    check(net, square, torch.randn(N, T, D), **options)


@a_few_modes
@each_kind
@pytest.mark.parametrize("way", [checkpointed, nested])
def test_backwards_of_one_graph_add_up(way, kind, options):
    net, x = model(kind, way).double(), torch.randn(N, T, D, dtype=torch.float64)
    want = loop_model(net, square, x)
    with torchgradx.attach(net, **options) as probe:
        for _ in range(2):
            loss = square(net, x)
            for count in (1, 2):
                loss.backward(retain_graph=True)
                close(probe.norms(), count * want)


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
    plainly(model(kind, plain).double(), options, torch.randn(N, T, D, dtype=torch.float64))


@a_few_modes
@pytest.mark.parametrize("layer", [nn.Linear, nn.LSTM, nn.GRU], ids=lambda kind: kind.__name__)
def test_layers_that_are_asked_nothing_are_exact_beside_them(layer, options):
    def forward(m, x):
        h = m.norm(m.first(x))
        h = m.layer(h)
        return m.last(torch.tanh(h if layer is nn.Linear else h[0]))

    made = layer(7, 3) if layer is nn.Linear else layer(7, 3, batch_first=True)
    net = Model(forward, first=nn.Linear(D, 7), norm=nn.LayerNorm(7), layer=made,
                last=nn.Linear(3, 2))  # fmt: skip
    x = torch.randn(N, T, D, dtype=torch.float64)
    assert len(plainly(net.double(), options, x)) == 2, "refused"


@a_few_modes
@pytest.mark.parametrize("place", [0, 1, 2])
@pytest.mark.parametrize("kind", ["register_full_backward_hook", "register_full_backward_pre_hook"])
def test_a_modules_backward_hook_may_come_and_go(kind, place, options):
    net = mlp().double()
    with torchgradx.attach(net, **options) as probe:
        for step in range(6):
            if step == 2:
                hook = getattr(net[place], kind)(lambda *_: None)
            if step == 4:
                hook.remove()
            x = torch.randn(N, 3, dtype=torch.float64)
            square(net, x).backward()
            close(probe.norms(), loop_model(net, square, x))


@a_few_modes
@pytest.mark.parametrize("first", [contextlib.nullcontext, save_on_cpu])
@pytest.mark.parametrize("kind", KINDS)
def test_hooks_on_saved_tensors_may_come_and_go(kind, first, options):
    """A scale is exact in another way than to ask nodes; what has none is refused each time."""
    net = model(kind, plain).double()
    with torchgradx.attach(net, **options) as probe:
        for step, around in enumerate((first, first, Once, Once, Once, first, Once)):
            x = torch.randn(N, T, D, dtype=torch.float64)
            with around():
                loss = square(net, x)
            loss.backward()
            # Under other hooks than the first ones a forward is watched from its beginning.
            known = first is contextlib.nullcontext or step != 2
            if step < 2 or (kind == "a scale" and known):
                close(probe.norms(), loop_model(net, square, x))
            else:
                exact_or(torchgradx.CoverageError, "", probe, loop(net, square, x))


class Scaled(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer, self.scale = nn.Linear(D, D), nn.Parameter(torch.randn(D))

    def forward(self, x):
        return x + self.scale * torch.tanh(self.layer(x))


def reentrant(block, x):
    return checkpoint(block, x, use_reentrant=True)


def hooked(block, x):
    with Once():
        return block(x)


def straight(block, x):
    return block(x)


@a_few_modes
@pytest.mark.parametrize("later", [reentrant, hooked])
def test_inside_of_a_forward_they_are_refused_once_at_most(later, options):
    """Where no hook is in force as it begins: until a forward with them is watched."""
    net = Model(lambda m, x: m.last(m.way(m.block, m.first(x)).mean(1)), first=nn.Linear(3, D),
                block=Scaled(), last=nn.Linear(D, 2)).double()  # fmt: skip
    with torchgradx.attach(net, **options) as probe:
        for step, net.way in enumerate((straight, straight, later, later, later, straight, later)):
            x = torch.randn(N, T, 3, dtype=torch.float64)
            square(net, x).backward()
            if step == 2:
                exact_or(torchgradx.CoverageError, "no proof", probe, loop(net, square, x))
            else:
                close(probe.norms(), loop_model(net, square, x))
