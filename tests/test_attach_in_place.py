"""Tensors that are written into: inputs before the reading, outputs of modules; and which outputs
are views."""

import contextlib
import copy

import pytest
import torch
import torch.nn.functional as F
from attach_oracle import (
    ANY,
    Model,
    check,
    close,
    close_named,
    each_of,
    every_mode,
    exact_or,
    loop,
    need_native,
    per_model,
    same_gradients,
    square,
)
from torch import nn
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint

import torchgradx

N, T, D = 4, 5, 6
WORDS = "written into before"


def bare(m, x):
    return m.o(torch.tanh(x @ m.w))


def tied(m, x):
    return F.linear(torch.tanh(m.o(m.e(x))), m.e.weight)


MODELS = {
    "linear": lambda: nn.Sequential(nn.Linear(D, 4), nn.Tanh(), nn.Linear(4, 2)),
    "convolution": lambda: nn.Sequential(
        nn.Unflatten(1, (1, D)), nn.Conv1d(1, 2, 3), nn.Tanh(), nn.Flatten()
    ),
    "norm": lambda: nn.Sequential(nn.LayerNorm(D), nn.Tanh()),
    "bare": lambda: Model(bare, w=torch.randn(D, 4), o=nn.Linear(4, 2)),
    "tied": lambda: Model(tied, e=nn.Embedding(7, D), o=nn.Linear(D, D)),
}
models = pytest.mark.parametrize("name", MODELS)


def made(name, options):
    need_native(options)
    model = MODELS[name]().double()
    tables = any(isinstance(m, nn.Embedding) for m in model.modules())
    if "bare" in name and options.get("backend") == "native":
        pytest.skip("backend='native' refuses it at attach")
    if tables and (options.get("backend") == "vmap" or not torchgradx.ops.NATIVE):
        pytest.skip("refused: what runs again by vmap has no functional use beside its calls")
    x = torch.randint(7, (N, 3)) if tables else torch.randn(N, D).double()
    return model, x, loop(model, square, x)


def refill(*buffers):
    for x in buffers:
        x.random_(7) if not x.is_floating_point() else x.normal_()


@every_mode
@models
@pytest.mark.parametrize("retain", [False, True])
def test_an_input_after_a_backward(retain, name, options):
    model, x, want = made(name, options)
    with torchgradx.attach(model, **options) as probe:
        for _ in range(2):
            buffer = x.clone()
            square(model, buffer).backward(retain_graph=retain)
            refill(buffer)
            if retain:
                exact_or(torchgradx.CoverageError, WORDS, probe, want)
            else:
                close(probe.norms(), per_model(want))


@every_mode
@models
def test_inputs_of_the_same_samples(name, options):
    model, x, _ = made(name, options)
    z = x.flip(-1)

    def both(m, x, z):
        return (m(x).flatten(1).square() + m(z).flatten(1).sin()).sum(1).mean()

    want = loop(model, both, x, z)
    with torchgradx.attach(model, **options) as probe:
        for _ in range(2):
            buffers = x.clone(), z.clone()
            with probe.same_samples():
                value = both(model, *buffers)
            value.backward()
            refill(*buffers)
            exact_or(torchgradx.CoverageError, WORDS, probe, want)


@every_mode
def test_a_gradient_that_was_given(options):
    model, x, _ = made("linear", options)
    out = model(x)
    given = torch.randn_like(out)

    def loss(m, x, g):
        return (m(x) * g).sum(1).mean()

    want = loop(model, loss, x, given)
    with torchgradx.attach(model, **options) as probe:
        for _ in range(2):
            buffer = given / N
            model(x).backward(buffer, retain_graph=True)
            buffer.zero_()
            exact_or(torchgradx.CoverageError, WORDS, probe, want)


@pytest.mark.parametrize("options", [{}, {"backend": "vmap"}], ids=str)
@models
def test_an_input_before_clipping(name, options):
    model, x, _ = made(name, options)

    def clipped(write):
        model.zero_grad()
        buffer = x.clone()
        square(model, buffer).backward()
        if write:
            refill(buffer)
        probe.clip_grad_norm_(0.1)
        return [p.grad.clone() for p in model.parameters()]

    with torchgradx.attach(model, clip=True, **options) as probe:
        want = clipped(False)
        with contextlib.suppress(torchgradx.CoverageError):
            assert all(map(torch.equal, clipped(True), want))


every_option = each_of([*ANY, {"backend": "vmap"}])


class Views(nn.Module):
    """Two outputs, the first of which lies otherwise than it was made."""

    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(torch.randn(D, D))

    def forward(self, x):
        h = torch.tanh(x @ self.w)
        return h.transpose(1, 2).contiguous().transpose(1, 2), h.sum(1)


class Alone(Views):
    def forward(self, x):
        return super().forward(x)[0]


class Halves(Views):
    def forward(self, x):
        return torch.tanh(x @ self.w).chunk(2, -1)


class Attends(nn.MultiheadAttention):
    """Of its own kind, or torch's as it stands: the first of both is a view."""

    def forward(self, x):
        return super().forward(x, x, x)


def attention():
    return Model(lambda m, x: m.a(x, x, x), a=nn.MultiheadAttention(D, 2, batch_first=True))


STOCK = {
    "an LSTM": lambda: nn.LSTM(D, D, batch_first=True),
    "an LSTM both ways": lambda: nn.LSTM(D, D // 2, batch_first=True, bidirectional=True),
    "a GRU": lambda: nn.GRU(D, D, batch_first=True),
    "attention": attention,
    "a Linear": lambda: nn.Linear(D, D),
}
OWN = {"views": Views, "one view": Alone, "attention": lambda: Attends(D, 2, batch_first=True)}
CHANGES = {
    "all": torch.relu_,
    "a column": lambda y: y[..., 0].zero_(),
    "by its transpose": lambda y: y.transpose(-1, -2).mul_(3.0),
    "rows": lambda y: y.__setitem__((slice(None), 0), 0.5),
}
THEN = {"nothing": lambda m, y: y, "a layer": lambda m, y: m.l(y)}
every_change = pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
every_end = pytest.mark.parametrize("then", THEN.values(), ids=THEN)


def around(module, change, then):
    """[N, T, D] -> [N, T, D or 3]"""

    def forward(m, x):
        out = m.r(torch.tanh(m.i(x)))
        y = out[0] if isinstance(out, tuple) else out
        change(y)
        return then(m, y)

    end = {"l": nn.Linear(D, 3)} if then is THEN["a layer"] else {}
    return Model(forward, i=nn.Linear(D, D), r=module, **end).double()


@every_option
@every_end
@every_change
@pytest.mark.parametrize("make", STOCK.values(), ids=STOCK)
def test_outputs_of_torch_s_modules(make, change, then, options):
    check(around(make(), change, then), square, torch.randn(N, T, D), **options)


@every_option
@every_end
@every_change
@pytest.mark.parametrize("make", OWN.values(), ids=OWN)
def test_outputs_of_a_user_s_modules_are_not_missed(make, change, then, options):
    """Also where its gradient comes before any other, and in later steps."""
    model, x = around(make(), change, then), torch.randn(N, T, D, dtype=torch.float64)
    want = loop(model, square, x)
    missed = {name for name, norms in want.items() if name.startswith("r.") and norms.any()}
    with torchgradx.attach(model, **options) as probe:
        for _ in range(3):
            square(model, x).backward()
            try:
                close_named(probe.norms(per="parameter"), want)
                refused = missed
            except torchgradx.CoverageError as error:
                refused = set(error.parameters)
            assert missed <= refused
            model.zero_grad()


@every_option
def test_a_loss_that_begins_to_change_them(options):
    """After steps in which it did not: the forward is the same."""
    model = Model(lambda m, x: m.r(torch.tanh(m.i(x))), i=nn.Linear(D, D), r=Views()).double()

    def loss(model, x):
        y, _ = model(x)
        return (y.mul_(2.0) if changes else y).flatten(1).square().sum(1).mean()

    x = torch.randn(N, T, D, dtype=torch.float64)
    with torchgradx.attach(model, **options) as probe:
        for changes in (False, False, True, False):  # noqa: B007 of the loss
            loss(model, x).backward()
            exact_or(torchgradx.CoverageError, "r.w", probe, loop(model, loss, x))
            model.zero_grad()


@every_option
def test_halves_cannot_be_changed_in_place_with_a_probe_or_without(options):
    model, x = around(Halves(), torch.relu_, THEN["nothing"]), torch.randn(N, T, D).double()
    with torchgradx.attach(model, **options), pytest.raises(RuntimeError, match="inplace"):
        square(model, x)


any_option = each_of(ANY)
RECURRENT = {
    f"{kind.__name__} {name}": (kind, options, (T, N, D))
    for kind in (nn.LSTM, nn.GRU, nn.RNN)
    for name, options in {
        "plain": {},
        "batch first": {"batch_first": True},
        "both ways": {"bidirectional": True},
        "two layers": {"num_layers": 2},
    }.items()
}
MODULES = {
    **{k: (lambda c=c, o=o: c(D, D, **o), size) for k, (c, o, size) in RECURRENT.items()},
    "an LSTMCell": (lambda: nn.LSTMCell(D, D), (N, D)),
    "a GRUCell": (lambda: nn.GRUCell(D, D), (N, D)),
    "an RNNCell": (lambda: nn.RNNCell(D, D), (N, D)),
    "Conv1d": (lambda: nn.Conv1d(T, D, 3), (N, T, D)),
    "ConvTranspose1d": (lambda: nn.ConvTranspose1d(T, D, 3), (N, T, D)),
    "Linear": (lambda: nn.Linear(D, D), (N, T, D)),
    "LayerNorm": (lambda: nn.LayerNorm(D), (N, T, D)),
    "Conv2d": (lambda: nn.Conv2d(D, D, 3), (N, D, T, T)),
}


@any_option
@pytest.mark.parametrize("grad", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize(("make", "size"), MODULES.values(), ids=MODULES)
def test_no_output_is_a_view_where_the_plain_one_is_none(make, size, dtype, grad, options):
    model, x = Model(lambda m, x: m.r(x), r=make()).to(dtype), torch.randn(size, dtype=dtype)
    with torch.set_grad_enabled(grad):
        plain = tree_leaves(model(x))
        with torchgradx.attach(model, batch_dim=int(size[0] == T), **options):
            ours = tree_leaves(model(x))
    for got, want in zip(ours, plain, strict=True):
        assert got._base is None or want._base is not None


def pieces(model, x, detach):
    """The loss of a sequence in three pieces, the state being detached between them."""
    state, total = None, 0.0
    for piece in x.chunk(3, 1):
        y, state = model(piece, state)
        total = total + y.flatten(1).square().sum(1).mean()
        for t in state if isinstance(state, tuple) else (state,):
            detach(t)
    return total


@any_option
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
def test_states_that_are_detached_in_place(kind, dtype, options):
    model = Model(lambda m, x, s: m.r(x, s), r=kind(D, D, batch_first=True)).to(dtype)
    twin, x = copy.deepcopy(model), torch.randn(N, 3 * T, D, dtype=dtype)
    pieces(twin, x, torch.Tensor.detach_).backward()
    with torchgradx.attach(model, **options) as probe:
        for _ in range(2):
            model.zero_grad()
            with probe.same_samples():
                pieces(model, x, torch.Tensor.detach_).backward()
            rtol = 1e-9 if dtype == torch.float64 else 1e-4
            want = loop(model, lambda m, x: pieces(m, x, torch.Tensor.detach_), x)
            close_named(probe.norms(per="parameter"), want, rtol)
            if options.get("weight_grad", True):
                same_gradients(model, twin, rtol)


@any_option
@pytest.mark.parametrize("kind", [nn.GRU, nn.RNN])
def test_a_reentrant_checkpoint_s_output_is_changed_in_place(kind, options):
    model = Model(
        lambda m, x: checkpoint(lambda x: m.r(x)[0], m.i(x), use_reentrant=True).mul_(2.0),
        i=nn.Linear(D, D),
        r=kind(D, D, batch_first=True),
    ).double()
    x = torch.randn(N, T, D, dtype=torch.float64)

    def loss(model, x):
        return model(x).flatten(1).square().sum(1).mean()

    with torchgradx.attach(model, **options) as probe:
        loss(model, x).backward()
        close_named(probe.norms(per="parameter"), loop(model, loss, x))
