"""Parameters used several times, tied, frozen, unused; layers and models called in every way."""

import pytest
import torch
import torch.nn.functional as F
from attach_models import Model, mlp, square
from attach_modes import a_few_modes, every_mode, fallback_mode
from attach_oracle import check, close, loop_model
from attach_steps import exact_or_refused, exact_step, exact_steps, refusal
from test_attach_interrupted import linear
from torch import nn
from torch.nn.utils.parametrizations import weight_norm

import torchgradx

N = 4


def thrice(m, x):
    for _ in range(3):
        x = torch.tanh(m.l(x))
    return m.head(x)


def on_two_resolutions(m, x):
    y = m.conv(x)
    return torch.cat([y.flatten(1), m.conv(F.avg_pool2d(torch.tanh(y), 2)).flatten(1)], 1)


def twice_and_detached(m, x):
    y = m.l(x)
    return y + m.o(y) + y.detach() * m.l(x).sigmoid()


def in_place(m, x):
    y = m.c(F.relu_(m.l(x))[:, None])
    y[:, 0] *= 2
    y.add_(1)
    return m.o(y.flatten(1))


def tied(a, b, forward=lambda m, x: m.b(torch.tanh(m.a(x)))):
    model = Model(forward, a=a, b=b)
    model.b.weight = model.a.weight
    return model


def frozen(model, *names):
    for name in names:
        model.get_parameter(name).requires_grad_(False)
    return model


def two_names():
    layer = nn.Linear(3, 3)
    return nn.Sequential(layer, nn.Tanh(), layer)


def cnn():
    return nn.Sequential(nn.Conv1d(3, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(16, 2))


THRICE = lambda: Model(thrice, l=linear(), head=nn.Linear(3, 1))  # noqa: E731
NORMS = lambda: nn.Sequential(nn.LayerNorm(3), nn.Linear(3, 4), nn.LayerNorm(4))  # noqa: E731
SERVED = {  # by kernels: a model, and the sizes of a batch
    "a linear thrice, positions": (THRICE, (N, 6, 3)),
    "a convolution on two resolutions": (
        lambda: Model(on_two_resolutions, conv=nn.Conv2d(2, 2, 3, 1, 1, groups=2)), (N, 2, 6, 6)),
    "other numbers of positions": (
        lambda: Model(lambda m, x: torch.cat([m.l(t).flatten(1) for t in (x, x[:, :2])], 1),
                      l=linear()), (N, 5, 3)),
    "tied linears": (lambda: tied(linear(), linear()), (N, 6, 3)),
    "one module under two names": (two_names, (N, 3)),
    "an output that is not used": (
        lambda: Model(lambda m, x: (m.l(x), m.l(2 * x + 1))[0], l=linear()), (N, 3)),
    "an output used twice and detached": (
        lambda: Model(twice_and_detached, l=linear(), o=linear()), (N, 3)),
    "a layer that is not called": (
        lambda: Model(lambda m, x: m.l(x), l=linear(), spare=nn.Linear(2, 2)), (N, 3)),
    "outputs changed in place": (
        lambda: Model(in_place, l=nn.Linear(3, 4), c=nn.Conv1d(1, 2, 3), o=nn.Linear(4, 2)),
        (N, 3)),
    "frozen weights": (lambda: frozen(cnn(), "0.weight", "3.weight"), (N, 3, 6)),
    "a frozen first layer": (lambda: frozen(cnn(), "0.weight", "0.bias"), (N, 3, 6)),
    "a norm twice": (
        lambda: Model(lambda m, x: m.o(m.l(torch.tanh(m.l(x)))), l=nn.LayerNorm(3), o=linear()),
        (N, 6, 3)),
    "tied norms": (lambda: tied(nn.LayerNorm(3), nn.LayerNorm(3)), (N, 6, 3)),
    "frozen norms": (lambda: frozen(NORMS(), "0.weight", "2.weight", "2.bias"), (N, 6, 3)),
    "a table tied to a head": (
        lambda: tied(nn.Embedding(7, 4), nn.Linear(4, 7, bias=False)), (N, 5)),
}  # fmt: skip


@every_mode
@pytest.mark.parametrize("name", SERVED)
def test_a_layer_is_exact_however_it_is_used(name, options):
    make, sizes = SERVED[name]
    x = torch.randint(0, 7, sizes) if "table" in name else torch.randn(sizes)
    check(make(), square, x, **options)


@pytest.mark.filterwarnings("ignore:There is a performance drop")  # vmap has no rule for bilinear
@a_few_modes
def test_a_parameter_at_a_node_and_in_a_module_that_runs_again_is_exact(options):
    scaled = Model(lambda m, x: x * m.w, w=torch.rand(3))
    other = Model(lambda m, x: torch.tanh(F.bilinear(x, x, m.of, m.w)), of=torch.rand(3, 3, 3))
    model = Model(lambda m, x: m.b(m.a(torch.tanh(m.l(x)))), l=linear(), a=scaled, b=other)
    other.w = scaled.w
    exact_steps(model.double(), *(torch.randn(N, 3).double() for _ in range(2)), **options)


@every_mode
def test_a_parameter_frozen_after_its_backward_still_counts(options):
    model, x = mlp().double(), torch.randn(N, 3).double()
    with torchgradx.attach(model, **options) as probe:
        square(model, x).backward()
        want = loop_model(model, square, x)
        model[0].weight.requires_grad_(False)
        close(probe.norms(), want)
        assert "0.weight" in probe.norms(per="parameter")


def exchanged(model):
    """As loaders and wrappers do: another tensor in the same place, then the first one again."""
    first = model.a.weight
    for weight in (nn.Parameter(first.detach() * 2), first):
        model.a.weight = weight
        yield


CHANGES = {
    "exchanged": exchanged,
    "without a bias": lambda model: [setattr(model.a, "bias", None)],
    "on other paths": lambda model: (setattr(model, "first", way) for way in (False, True, False)),
    "frozen then": lambda model: [model.a.requires_grad_(False)],
}


@every_mode
@pytest.mark.parametrize("change", CHANGES)
def test_a_step_after_a_change_is_exact(change, options):
    model = Model(lambda m, x: m.head(torch.tanh(m.a(x) if m.first else m.b(m.b(x)))),
                  a=nn.Linear(3, 3), b=nn.Linear(3, 3), head=nn.Linear(3, 2)).double()  # fmt: skip
    model.first = True
    with torchgradx.attach(model, **options) as probe:
        exact_step(probe, model, torch.randn(N, 3).double())
        for _ in CHANGES[change](model):
            exact_step(probe, model, torch.randn(N, 3).double())


@pytest.mark.parametrize("t", [50, 1000])
@fallback_mode
def test_the_gradient_of_a_bias_alone_may_cancel(t, options):
    """An instance norm whose weight is frozen: what its bias receives is rounding of the terms."""
    for running in (False, True):
        layer = nn.InstanceNorm1d(3, affine=True, track_running_stats=running).double()
        layer.weight.requires_grad_(False)
        with torchgradx.attach(layer, **options) as probe:
            square(layer, torch.randn(N, 3, t, dtype=torch.float64)).backward()
            assert bool((probe.norms() < 1e-10).all())


@fallback_mode
def test_a_direction_of_one_number_receives_rounding_alone(options):
    """weight_norm over one input: the gradient of its direction is zero, but for rounding."""
    model, x = weight_norm(nn.Conv1d(1, 4, 1)).double(), torch.randn(N, 1, 16).double()
    with torchgradx.attach(model, **options) as probe:
        exact_step(probe, model, x)
        assert bool((probe.norms("parameter")["parametrizations.weight.original1"] < 1e-12).all())


@pytest.mark.skipif(not torchgradx.ops.NATIVE, reason="seen with the extension only")
@a_few_modes
def test_a_parameter_that_no_forward_uses_runs_nothing_again(options):
    calls, layer = [], nn.Linear(3, 2)
    drawn = lambda m, x: (calls.append(None), m.l(x) + torch.randn(len(x), 2))[1]  # noqa: E731
    model = Model(drawn, w=torch.randn(3), l=layer).double()
    with torchgradx.attach(model, **options) as probe:
        for _ in range(3):
            calls.clear()
            square(model, torch.randn(N, 3).double()).backward()
            norms = probe.norms(per="parameter")
            assert [bool(norms[key].any()) for key in ("w", "l.weight")] == [False, True]
        assert len(calls) == 1


class Hadamard(torch.autograd.Function):
    """(a @ b) * scale, with a context, as adapters have it: vmap has no rule for it."""

    @staticmethod
    def forward(ctx, a, b, scale):
        ctx.save_for_backward(a, b, scale)
        return a @ b * scale

    @staticmethod
    def backward(ctx, grad):
        a, b, scale = ctx.saved_tensors
        return grad * scale @ b.T, a.T @ (grad * scale), None


@every_mode
@pytest.mark.parametrize("positions", [(), (5,)], ids=["rows", "sequences"])
@pytest.mark.parametrize("frozen", [False, True])
def test_a_weight_that_it_makes_of_two_is_exact(frozen, positions, options):
    if options.get("backend") == "native":
        pytest.skip("its parameters have no kernel")
    half = torch.tensor(0.5, dtype=torch.float64)
    own = Model(lambda m, x: m.base(x) + F.linear(x, Hadamard.apply(m.a, m.b, half)),
                a=torch.randn(3, 2), b=torch.randn(2, 3), base=nn.Linear(3, 3))  # fmt: skip
    own.base.requires_grad_(not frozen)
    net = nn.Sequential(nn.Linear(3, 3), own, nn.Linear(3, 2))
    check(net, square, torch.randn(N, *positions, 3), **options)


class Top(torch.autograd.Function):
    """h @ w.T, and sums of h. Its backward clamps, and writes into what was saved."""

    limit = 1e9

    @staticmethod
    def forward(ctx, h, w):
        ctx.save_for_backward(h, w.clone())
        return h @ w.T, h.sum(-1, keepdim=True)

    @staticmethod
    def backward(ctx, g, sums):
        (h, w), g = ctx.saved_tensors, g.clamp(-Top.limit, Top.limit)
        back = g @ w + sums
        return back, g.flatten(0, -2).T @ h.flatten(0, -2) + w.zero_()


@pytest.mark.skipif(not torchgradx.ops.NATIVE, reason="refused without the extension")
@a_few_modes
def test_a_childs_weight_that_a_function_reads_is_exact_unless_it_clamps(options, monkeypatch):
    net = Model(lambda m, x: torch.dstack(Top.apply(m.l(x), m.o.weight) + Top.apply(x, m.o.weight)),
                l=nn.Linear(3, 3), o=nn.Linear(3, 2, bias=False)).double()  # fmt: skip
    batches = [torch.randn(n, t, 3).double() for n, t in ((N, 6), (N, 7), (2, 5), (1, 2))]
    assert "asked once for each sample" in exact_steps(net, *batches, **options)
    with torchgradx.attach(net, **options) as probe:
        exact_step(probe, net, batches[0])
        monkeypatch.setattr(Top, "limit", 1e-2)
        square(net, batches[0]).backward()
        assert refusal(probe, "not the sum of its grad").parameters == ("o.weight",)


class Rounded(torch.autograd.Function):
    forward = staticmethod(lambda ctx, w: (w * 8).round() / 8)
    backward = staticmethod(lambda ctx, g: g)


@a_few_modes
@pytest.mark.parametrize("n", [N, N + 1], ids=["as many as outputs", "as inputs"])
def test_a_childs_weight_that_a_function_rounds_has_no_rows(n, options):
    forward = lambda m, x: m.o(torch.tanh(F.linear(x, Rounded.apply(m.l.weight))))  # noqa: E731
    net = Model(forward, l=nn.Linear(N + 1, N, bias=False), o=nn.Linear(N, 2)).double()
    exact_or_refused(net, square, torch.randn(n, N + 1).double(), **options)


T, D = 5, 3


def flat(m, x):
    if x.dim() == 3:
        return m.o(m(x.flatten(0, 1)).unflatten(0, x.shape[:2]).mean(1))
    return torch.tanh(m.l(x))


def deep(m, x, depth=2):
    return m.o(m(torch.tanh(m.l(x)), depth - 1)) if depth else m.l(x)


@a_few_modes
@pytest.mark.parametrize("way", [flat, deep])
def test_a_root_that_calls_itself_is_exact_in_steps_of_several_sizes(way, options):
    net = Model(way, l=nn.Linear(D, D), o=nn.Linear(D, D)).double()
    shapes = [(N, T, D), (N, T, D), (N * T, D), (N, T, D), (N, N, D), (2, T, D), (N, D)]
    exact_steps(net, *(torch.randn(shape).double() for shape in shapes), **options)
