"""Parameters served at the graph's nodes: behind weights that begin as zeros (zero-initialised last
norms, adapters), tables of the user's, and where no gradient comes."""

import copy
from functools import partial
from types import MethodType

import pytest
import torch
import torch.nn.functional as F
from attach_models import Model, identity, square, under_autocast
from attach_modes import ANY, a_few_modes, native_missing, title
from attach_oracle import close_named, loop
from attach_steps import exact_step, exact_steps, refusal
from clip_oracle import check_clip
from torch import nn
from torch.utils.checkpoint import checkpoint

import torchgradx

N, T, C = 4, 5, 6


class Norm(nn.BatchNorm2d):
    """As timm's: with an activation perhaps, so not the stock class."""

    act = staticmethod(F.relu)

    def forward(self, x):
        return self.act(super().forward(x))


def residual(m, x):
    x = m.stem(x)
    for k in range(3):
        h = m.norms[2 * k](m.convs[2 * k](x))
        h = h * m.gate(h.mean((2, 3), keepdim=True)).sigmoid()
        x = F.relu(x + m.norms[2 * k + 1](m.convs[2 * k + 1](h)))
    return m.head(x.mean((2, 3)))


def residuals(channels):
    convs = nn.ModuleList(nn.Conv2d(channels, channels, 3, padding=1) for _ in range(6))
    norms = nn.ModuleList(Norm(channels) for _ in range(6)).eval()
    for norm in norms:
        norm.running_var.uniform_(0.5, 2)
    for norm in norms[1::2]:
        nn.init.zeros_(norm.weight)
        norm.act = nn.Identity()
    stem = nn.Sequential(nn.Conv2d(3, channels, 1), Norm(channels).eval())
    gate = nn.Conv2d(channels, channels, 1)
    head = nn.Linear(channels, 2)
    model = Model(residual, stem=stem, gate=gate, convs=convs, norms=norms, head=head)
    return model, torch.randn(N, 3, 5, 5)


def windows(m, x):
    """As SwinV2's attention: its qkv is read, and its scale is the module's own."""
    qkv = F.linear(x, m.qkv.weight, torch.cat([m.q_bias, torch.zeros_like(m.q_bias), m.v_bias]))
    q, k, v = qkv.view(*x.shape[:2], 3, 3, 2).permute(2, 0, 3, 1, 4).unbind(0)
    scores = F.normalize(q, dim=-1) @ F.normalize(k, dim=-1).mT * m.scale.exp()
    return m.proj((scores.softmax(-1) @ v).transpose(1, 2).flatten(2))


def windowed(m, x):
    h = m.first(x)
    rows = h.unflatten(1, (-1, N)).flatten(0, 1)
    return m.last(h + m.norm(m.windows(rows).reshape(h.shape)))


def attention():
    norm = nn.LayerNorm(6)
    nn.init.zeros_(norm.weight)
    first, qkv, proj = nn.Linear(3, 6), nn.Linear(6, 18, bias=False), nn.Linear(6, 6)
    own = {"q_bias": torch.randn(6), "v_bias": torch.randn(6), "scale": torch.randn(3, 1, 1)}
    parts = {"windows": Model(windows, qkv=qkv, proj=proj, **own), "last": nn.Linear(6, 2)}
    return Model(windowed, first=first, norm=norm, **parts), torch.randn(N, 4 * N, 3)


MODELS = {
    "residual": lambda: residuals(5),
    "as many channels as samples": lambda: residuals(N),
    "windows": attention,
}


@a_few_modes
@pytest.mark.parametrize("moves", ["", "plain", "fused"])  # a fused step moves no version
@pytest.mark.parametrize("name", MODELS)
def test_branches_that_begin_as_zeros(name, moves, options):
    model, x = MODELS[name]()
    model, x = model.double(), x.double()
    probe = torchgradx.attach(model, **options)
    optimizer = torch.optim.SGD(model.parameters(), 0.1, fused=moves == "fused")
    for _ in range(4):
        twin = copy.deepcopy(model)
        exact_step(probe, model, x)
        square(twin, x).backward()
        for p, q in zip(model.parameters(), twin.parameters(), strict=True):
            p.grad = q.grad if moves else None
        optimizer.step()


def written(m, x):
    h = 2 * m.first(x)
    h[x[..., 0] > 0] = m.token.to(h.dtype)  # as wav2vec2's SpecAugment
    where = x[..., 1] > 0  # as many rows in all as there are positions
    h[where] = m.token.expand(int(where.sum()), -1)
    return m.last(torch.tanh(h)) * x[..., 2:]


def chosen(m, x):
    h = torch.where(x[..., :1] > 0, m.token, m.first(x))
    return m.last(torch.tanh(torch.where(x[..., 1:2] > 0, h, m.token)))


@a_few_modes
@pytest.mark.parametrize("forward", [written, chosen], ids=["written", "chosen"])
def test_a_token_in_the_place_of_those_masked(forward, options):
    """Running such a model again would draw another mask."""
    parts = {"first": nn.Linear(3, C), "last": nn.Linear(C, 2)}
    model, x = Model(forward, **parts), torch.randn(N, T, 3).double()
    x[..., 1] = (torch.arange(N * T) % N).view(N, T).eq(0).double() - 0.5
    model.token = nn.Parameter(torch.randn(C))
    model = model.double()
    assert "lifted" in exact_steps(model, x, **options) or options.get("backend") == "vmap"


class Scaled(nn.Embedding):
    """As Gemma's and BART's."""

    def forward(self, ids):
        return 3.0 * super().forward(ids)


@pytest.mark.parametrize("options", [*ANY, {"clip": True}], ids=title)
@pytest.mark.parametrize("padding", [None, 2])
@pytest.mark.parametrize("tied", [False, True])
def test_an_embedding_of_the_users_is_looked_up_as_a_stock_one(tied, padding, options):
    def forward(m, ids):
        h, is_padding = m.e(ids), (ids == (padding or 11))[..., None]
        h.register_hook(lambda g: g.masked_fill(is_padding, torch.nan))
        return m.o(torch.tanh(h))

    parts = {"e": Scaled(11, C, padding_idx=padding), "o": nn.Linear(C, 11, bias=False)}
    model = Model(forward, **parts).double()
    if tied:
        model.o.weight = model.e.weight
    batches = [torch.randint(0, 11, (n, T)) for n in (N, N, N + 1)]
    shown = exact_steps(model, *batches, **options)
    assert "e: Scaled  [e.weight]: lifted" in shown or (tied and native_missing())
    for kind in [Scaled, nn.Embedding] if options.get("clip") else ():
        model.e.__class__ = kind
        check_clip(model, square, batches[0])


@a_few_modes
def test_rows_of_a_bare_table_are_looked_up(options):
    def forward(m, ids):
        return m.o(torch.tanh(m.w[ids] * m.pairs[ids[:, :1], ids][..., None] + m.b[ids, None]))

    parts = {"w": torch.randn(11, C), "pairs": torch.randn(11, 11), "b": torch.randn(11)}
    model = Model(forward, **parts, o=nn.Linear(C, 2)).double()
    batches = [torch.randint(-11, 11, (n, T)) for n in (N, N, N + 1)]
    shown = exact_steps(model, *batches, **options)
    assert "(root): Model  [w, pairs, b]: lifted" in shown or options.get("backend") == "vmap"


def through(layer, *args):
    return layer.before(*args)


@a_few_modes
@pytest.mark.parametrize("use_reentrant", [None, True])
@pytest.mark.parametrize("how", ["partial", "method"])
def test_a_stock_layer_whose_forward_is_replaced_as_by_accelerate(how, use_reentrant, options):
    def forward(m, x):
        inner = lambda h: m.b(h).tanh()  # noqa: E731
        h = m.a(x)
        return m.c(inner(h) if use_reentrant is None else checkpoint(inner, h, use_reentrant=True))

    model = Model(forward, a=nn.Linear(3, C), b=nn.Linear(C, C), c=nn.Linear(C, 2)).double()
    for layer in model.children():
        layer.before = layer.forward
        layer.forward = {"partial": partial, "method": MethodType}[how](through, layer)
    shown = exact_steps(model, *(torch.randn(n, T, 3).double() for n in (N, N + 1)), **options)
    assert "a: Linear  [a.weight, a.bias]: lifted" in shown or options.get("backend") == "vmap"


stop = identity(lambda grad: None)  # what is below receives no gradient at all


@a_few_modes
def test_a_node_that_receives_no_gradient_counts_as_zeros(options):
    def forward(m, x):
        h = m.i(x)
        return m.o(torch.tanh(m.r(h)) + stop(m.s(h)))

    parts = {key: Model(lambda m, x: x * m.w, w=torch.randn(C)) for key in "sr"}
    model = Model(forward, i=nn.Linear(3, C), o=nn.Linear(C, 2), **parts).double()
    exact_steps(model, *(torch.randn(N, T, 3).double() for _ in range(3)), **options)


IDS = torch.tensor([[0, 2, -1, 2, 1], [2, 2, 0, 1, 1]])
MADE = {  # [T, C] that all samples share, of a parameter
    "factors": (lambda p: 16 * torch.sigmoid(p).tanh().exp(), (T, C)),
    "normalised": (lambda p: F.layer_norm(p, (C,)), (T, C)),
    "kinks": (lambda p: F.relu(-p.clamp(max=0.5)) + p.abs(), (T, C)),
    "powers": (lambda p: F.silu(p.square() + 1).rsqrt(), (T, C)),
    "turns": (lambda p: p.permute(2, 0, 1)[0].transpose(-1, 0).contiguous(), (C, T, 2)),
    "looked up": (lambda p: torch.sigmoid(p)[IDS].mean(0), (3, C)),
    "of itself": (lambda p: p.view(T, C) * p.view(T, C).sum(1, keepdim=True), (T * C,)),
}


@a_few_modes
@pytest.mark.parametrize("name", MADE)
def test_what_all_samples_share_may_be_made_of_a_parameter(name, options):
    make, shape = MADE[name]
    forward = lambda m, x: m.o(torch.tanh(m.i(x) + make(m.p)))  # noqa: E731
    parts = {"i": nn.Linear(3, C), "o": nn.Linear(C, 2), "p": torch.randn(shape)}
    batches = [torch.randn(n, T, 3).double() for n in (N, N, 2 * N + 1, 1)]
    exact_steps(Model(forward, **parts).double(), *batches, **options)


def keeping():
    def forward(m, x):
        m.kept = torch.sigmoid(m.p) * 2
        return m.o(torch.tanh(m.i(x) + m.kept))

    parts = {"i": nn.Linear(3, C), "o": nn.Linear(C, 2), "p": torch.randn(T, C)}
    return Model(forward, **parts).double()


def hooked(change):
    def loss(model, x):
        value = square(model, x)
        model.kept.register_hook(change)
        return value

    return loss


ON_THE_WAY = {
    "a gradient of its own": lambda model, x: square(model, x) + model.kept.square().sum(),
    "a hook that changes": hooked(lambda g: 3 * g),
    "a hook that looks": hooked(lambda g: None),
}


@a_few_modes
@pytest.mark.parametrize("name", ON_THE_WAY)
def test_what_changes_a_gradient_on_its_way_later_is_refused(name, options):
    model = keeping()
    with torchgradx.attach(model, **options) as probe:
        for loss in (square, square, ON_THE_WAY[name], square):
            x = torch.randn(N, T, 3, dtype=torch.float64)
            loss(model, x).backward()
            model.kept = None
            if loss is square or name == "a hook that looks":
                close_named(probe.norms(per="parameter"), loop(model, square, x))
            else:
                refusal(probe)
                probe.reset()


@pytest.mark.parametrize("options", ANY, ids=title)
@pytest.mark.parametrize("batch_first", [False, True])
@pytest.mark.parametrize("kind", [nn.GRU, nn.RNN])
def test_recurrent_layers_run_once_under_autocast(kind, batch_first, options):
    calls = []

    class Counted(kind):
        def forward(self, *given):
            calls.append(given)
            return super().forward(*given)

    def forward(m, x):
        y, _ = m.r(x if batch_first else x.transpose(0, 1))
        return m.o(y.mean(1 if batch_first else 0))

    for recurrent in (kind(3, C, batch_first=batch_first), Counted(3, C, batch_first=batch_first)):
        model, loss = Model(forward, r=recurrent, o=nn.Linear(C, 2)), under_autocast()
        with torchgradx.attach(model, **options) as probe:
            for _ in range(3):
                x = torch.randn(N, T, 3)
                want = loop(model, loss, x, dtype=torch.float32)
                calls.clear()
                exact_step(probe, model, x, loss=loss, rtol=3e-2, want=want)
                assert len(calls) == isinstance(recurrent, Counted)
            assert "replay" not in probe.explain() or native_missing()


@pytest.mark.skipif(native_missing() is not None, reason="the fallback multiplies")
def test_halves_times_a_wider_scale_are_served_without_a_product_of_their_own():
    model = Model(lambda m, x: m.head((m.layer(x) * m.gamma).mean(1)))
    model.layer, model.head = nn.Linear(C, C), nn.Linear(C, 2)
    model.gamma, loss = nn.Parameter(torch.randn(C)), under_autocast()
    plain = steady_calls("aten::mul", model, loss, torch.float32, 3e-2)
    with torchgradx.attach(model) as probe:
        assert steady_calls("aten::mul", model, loss, torch.float32, 3e-2, probe) == plain


@pytest.mark.skipif(native_missing() is not None, reason="the fallback compares at every step")
def test_a_table_of_positions_is_compared_on_its_first_pass_alone():
    """A comparison has the host wait for the device. What is left measures what came."""
    model = Model(lambda m, x: m.head((x + m.positions(torch.arange(T))).tanh().mean(1)))
    model.positions, model.head = nn.Embedding(T, C), nn.Linear(C, 2)
    with torchgradx.attach(model) as probe:
        assert steady_calls("aten::_local_scalar_dense", model, square, probe=probe) <= 1


def steady_calls(operator, model, loss, dtype=torch.float64, off=1e-9, probe=None):
    """Return how often an operator is called by a backward of a known structure."""
    model.to(dtype)
    for _ in range(3):
        x = torch.randn(N, T, C, dtype=dtype)
        want = loop(model, loss, x, dtype=dtype)
        with torch.profiler.profile() as seen:
            loss(model, x).backward()
        if probe is not None:
            close_named(probe.norms(per="parameter"), want, off)
    return sum(event.key == operator and event.count for event in seen.key_averages())
