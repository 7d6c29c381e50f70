"""Weights that a forward reads beside the calls of their modules: one gradient, cross terms."""

import pytest
import torch
import torch.nn.functional as F
from attach_models import Model, square, under_autocast
from attach_modes import (
    ANY,
    a_few_modes,
    each_of,
    fallback_mode,
    native_missing,
    need_native,
    title,
)
from attach_oracle import check, close, loop, loop_model
from attach_steps import exact_or_refused, exact_step, exact_steps, refused
from clip_oracle import check_clip
from torch import nn
from torch.func import functional_call
from torch.nn.utils.parametrizations import spectral_norm, weight_norm
from torch.utils.checkpoint import checkpoint

import torchgradx

N, T, D, V = 4, 3, 5, 7
NATIVE = {"backend": "native"}
modes = each_of([NATIVE, NATIVE | {"fused": False}, NATIVE | {"weight_grad": False}])


def of_a_sample(*size):
    return lambda n=N: torch.randn(n, *size)


def linear():
    return nn.Linear(D, D)


rows = of_a_sample(T, D)


def turned(m, x):
    """Every way to turn a matrix, and twice is none."""
    h, w = torch.tanh(m.l(x)), m.l.weight
    turned = h @ w.T + h @ w.mT + h @ w.transpose(-1, 0) + h @ w.permute(1, 0)
    return turned + h @ w.permute(0, 1) + 2 * h @ w.transpose(0, -2) @ w[..., None].mT.view(D, D)


def times(m, x):
    h = torch.tanh(m.l(x)).flatten(0, 1)
    return torch.addmm(m.l.bias, h, m.l.weight.t(), beta=0.5, alpha=3).view_as(x)


def of_bert():
    """The decoder's bias is a parameter of the head too."""
    model = Model(lambda m, x: m.decoder(torch.tanh(m.dense(x))) + m.bias, dense=linear(),
                  decoder=linear())  # fmt: skip
    model.bias = model.decoder.bias
    return model


MODELS = {
    "embedding and head": (
        lambda: Model(lambda m, x: F.linear(torch.tanh(m.o(m.e(x))), m.e.weight),
                      e=nn.Embedding(V, D), o=linear()), lambda: torch.randint(0, V, (N, T))),
    "with bias": (
        lambda: Model(lambda m, x: F.linear(torch.tanh(m.l(x)), m.l.weight, m.l.bias), l=linear()),
        rows),
    "turned": (lambda: Model(turned, l=linear()), rows),
    "times a number": (lambda: Model(times, l=linear()), rows),
    "a part": (
        lambda: Model(lambda m, x: m.l(x) + F.linear(x, m.l.weight[:, :2].repeat(1, 3)[:, :D]),
                      l=linear()), rows),
    "scale and shift": (
        lambda: Model(lambda m, x: m.n(x) * m.n.weight + m.n.bias, n=nn.LayerNorm(D)), rows),
    "convolution": (
        lambda: Model(lambda m, x: F.conv2d(torch.tanh(m.c(x)), m.c.weight, padding=1),
                      c=nn.Conv2d(3, 3, 3, padding=1)), of_a_sample(3, 4, 4)),
    "two": (  # in the forward of a module that has its own
        lambda: Model(lambda m, x: m.o(m.l(x)) + F.linear(x, m.l.weight), l=linear(), o=linear()),
        rows),
    "a bias": (of_bert, rows),
}  # fmt: skip
models = pytest.mark.parametrize("name", MODELS)


def made(name):
    make, batch = MODELS[name]
    return make(), batch()


@modes
@models
def test_a_call_and_a_functional_use_have_cross_terms(name, options):
    model, x = made(name)
    check(model, square, x, **options)


@each_of([{}, {"clip": True}, {"weight_grad": False}])
def test_a_parameter_of_a_module_that_does_not_use_it(options):
    model = Model(lambda m, x: m.s(x) / m.s.w * (m.l(x) @ m.s.w)[..., None], l=linear(),
                  s=Model(lambda s, x: x * 1.0, w=torch.rand(D) + 1))  # fmt: skip
    check(model, square, rows(), **options)


def test_parts_may_have_names_of_methods_and_parameters_of_others():
    a, b = linear(), linear()
    model = Model(lambda m, x: m.b(m.a(x).tanh()) * m._modules["modules"][0], a=a, b=b,
                  parameters=nn.ParameterList([*a.parameters()]),
                  modules=nn.ParameterList([torch.rand(D)]))  # fmt: skip
    exact_steps(model.double(), rows().double())


@each_of([{}, {"clip": True}, {"weight_grad": False}])
def test_in_later_steps_a_parameter_of_no_called_module_is_all_that_trains(options):
    model = Model(lambda m, x: x @ m.l.weight.T * m.w, l=linear(), w=torch.rand(D)).double()
    with torchgradx.attach(model, **options) as probe:
        for name in ("w", "l.weight", "l.weight"):
            for key, p in model.named_parameters():
                p.requires_grad_(key == name)
            exact_step(probe, model, rows().double())


def test_a_gate_that_is_shut_in_the_first_batch():
    gate = Model(lambda m, x: torch.relu(F.linear(x, m.w) - 2), w=torch.ones(1, D))
    model = Model(lambda m, x: m.l(x) * (1 + m.gate(x)), l=linear(), gate=gate).double()
    exact_steps(model, rows().double() / 99, rows().double() + 1, rows().double() + 1)


@models
@pytest.mark.parametrize("options", [NATIVE, NATIVE | {"fused": False}], ids=title)
def test_clipping_and_products_with_directions(name, options):
    need_native(options)
    model, x = made(name)
    check_clip(model, square, x, **options)


BORROWED = {
    "a bare parameter": lambda m: m.w,
    "another module's": lambda m: m.o.weight,
    "in its own call too": lambda m: m.l.weight,
}


@fallback_mode
@pytest.mark.parametrize("name", BORROWED)
def test_a_module_called_with_another_ones_parameter_is_refused(name, options):
    def forward(m, x):
        return m.o(torch.tanh(functional_call(m.l, {"weight": BORROWED[name](m)}, (x,)))) + x @ m.w

    model = Model(forward, l=linear(), o=linear(), w=torch.randn(D, D))
    if name == "in its own call too":
        check(model, square, rows(), **options)
    else:
        refused(model, square, rows(), names=["l.weight"], match="another module's", **options)


@modes
@models
def test_inside_a_checkpoint_it_is_exact_or_refused(name, options):
    model, x = made(name)
    forward = model.function
    model.function = lambda m, x: checkpoint(forward, m, x, use_reentrant=False)
    exact_or_refused(model, square, x, **options)


def test_what_runs_again_by_vmap_refuses_it_by_name():
    model, x = made("with bias")
    refused(model, square, x, names=["l.weight", "l.bias"], backend="vmap")


# ---- Weights that are computed in the forward, by what torch and timm have and by hand -----------
class Standardised(nn.Conv2d):
    """As timm's ScaledStdConv2d."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.gain = nn.Parameter(torch.rand(self.out_channels, 1, 1, 1) + 0.5)

    def forward(self, x):
        rows, gain = self.weight.reshape(1, self.out_channels, -1), (self.gain * 0.7).view(-1)
        weight = F.batch_norm(rows, None, None, gain, training=True, momentum=0.0, eps=1e-3)
        return self._conv_forward(x, weight.view_as(self.weight), self.bias)


class ByHand(nn.Conv2d):
    def forward(self, x):
        var, mean = torch.var_mean(self.weight, (1, 2, 3), keepdim=True)
        return self._conv_forward(x, (self.weight - mean) / (var + 1e-5).sqrt(), self.bias)


def of_images(m, x):
    first = F.conv2d(x.flatten(0, 1), m.w, m.b, padding=1).unflatten(0, x.shape[:2])
    last = F.conv2d(x.transpose(0, 1).flatten(0, 1), m.w, padding=1).unflatten(0, (-1, len(x)))
    return first + last.transpose(0, 1)


def in_two(m, x):
    weight = torch._weight_norm(m.v, m.g, 0)
    return F.conv2d(torch.tanh(F.conv2d(x, weight, padding=1)), weight, m.b * m.b, dilation=2)


def of_both(m, x):
    weight = F.batch_norm(m.v.view(1, 4, -1), None, None, m.h, training=True)
    return F.conv2d(x, torch._weight_norm(weight.view_as(m.v), m.g, 0))


def masked(m, x):
    h = F.conv2d(x, torch.where(torch.ones(3, 3).tril() > 0, m.w, 0) / m.s, m.b, padding=1)
    return F.linear(h, 0.7 * m.v * torch.ones(6, 5).tril())


def ensemble(m, x):
    h = (x.flatten(2).transpose(0, 1) @ (m.w * 0.7)).transpose(0, 1).tanh()
    return torch.einsum("bki,kio->bko", h, m.v)


def transposed(m, x):
    return F.conv_transpose2d(x, m.w, m.b, 2, 1, output_padding=1, groups=2)


IMAGE, SOUND = of_a_sample(4, 5, 5), of_a_sample(4, 9)
PAIRS = {"w": torch.randn(4, 4, 3, 3), "b": torch.randn(4)}
NORMED = {"v": torch.randn(4, 4, 3, 3), "g": torch.randn(4, 1, 1, 1)}
GROUPED = {"padding": 2, "groups": 2}
COMPUTED = {
    "a bare weight": (
        lambda: Model(lambda m, x: F.conv2d(x, m.w, m.b, 2, 1), **PAIRS), IMAGE),
    "of three dimensions": (
        lambda: Model(lambda m, x: F.conv3d(x, m.w, groups=2), w=torch.randn(4, 2, 2, 2, 2)),
        of_a_sample(4, 3, 3, 3)),
    "transposed": (lambda: Model(transposed, w=torch.randn(4, 2, 3, 3), b=torch.randn(4)), IMAGE),
    "padded beyond its stride": (
        lambda: Model(lambda m, x: F.conv_transpose2d(x, m.w, m.b, output_padding=1, dilation=2),
                      **PAIRS), IMAGE),
    "several images": (
        lambda: Model(of_images, w=torch.randn(6, 6, 3, 3), b=torch.randn(6)),
        of_a_sample(3, 6, 5, 5)),
    "standardised": (lambda: Standardised(4, 6, 3, padding="same"), IMAGE),
    "standardised, by channel": (lambda: Standardised(4, 4, 3, 2, groups=4, bias=False), IMAGE),
    "weight_norm": (
        lambda: weight_norm(nn.Conv2d(4, 6, 3, padding=1, padding_mode="reflect")), IMAGE),
    "weight_norm, transposed": (
        lambda: weight_norm(nn.ConvTranspose1d(4, 4, 3, 2, groups=2)), SOUND),
    "weight_norm by position": (lambda: weight_norm(nn.Conv1d(4, 4, 4, **GROUPED), dim=2), SOUND),
    "weight_norm of old": (lambda: nn.utils.weight_norm(nn.Conv1d(4, 4, 4, **GROUPED)), SOUND),
    "weight_norm of a Linear": (lambda: weight_norm(nn.Linear(5, 6)), IMAGE),
    "weight_norm, cancelled": (  # rows of which next to nothing is left beside what lies along it
        lambda: Model(lambda m, x: F.conv2d(1 + 1e-3 * x,
                                            torch._weight_norm(1 + 1e-3 * m.v, m.g, 0)),
                      v=torch.randn(4, 4, 1, 1), g=NORMED["g"]), IMAGE),
    "in two convolutions": (lambda: Model(in_two, **NORMED, b=torch.randn(4)), IMAGE),
    "both": (lambda: Model(of_both, **NORMED, h=torch.rand(4) + 0.5), IMAGE),
    "by hand": (lambda: ByHand(4, 6, 3), IMAGE),
    "masked": (lambda: Model(masked, v=torch.randn(6, 5), s=torch.rand(1) + 1, **PAIRS), IMAGE),
    "one row": (lambda: Model(lambda m, x: x.flatten(1) @ (m.w * torch.ones(100, 6).triu() * m.s),
                              w=torch.randn(100, 6), s=torch.rand(1)), IMAGE),
    "spectral norm": (lambda: spectral_norm(nn.Linear(5, 6)).eval(), IMAGE),
    "ensemble": (lambda: Model(ensemble, w=torch.randn(4, 25, 6), v=torch.randn(4, 6, 3)), IMAGE),
}  # fmt: skip
FULL = {"by hand"}  # gradients of the weight's size for each sample


def around(name, reentrant=None):
    """(model, input): the convolution is neither its first nor its last layer."""
    make, batch = COMPUTED[name]
    torch.manual_seed(0)
    part, x = make().double(), batch().double()

    def forward(m, x):
        h = m.scale * x
        h = m.part(h) if reentrant is None else checkpoint(m.part, h, use_reentrant=reentrant)
        return m.last(torch.tanh(0.5 * h).flatten(1))

    with torch.no_grad():
        last = nn.Linear(part(x)[0].numel(), 2)
    scale = torch.rand(x.shape[1:]) + 0.5
    return Model(forward, part=part, scale=scale, last=last).double(), x


computed = pytest.mark.parametrize("name", COMPUTED)


@each_of([*ANY, {"backend": "vmap"}])
@computed
def test_a_weight_of_a_convolution_may_be_computed(name, options):
    model, x = around(name)
    check(model, square, x, **options)


@computed
def test_a_computed_weight_is_served_at_the_graphs_nodes(name):
    model, _ = around(name)
    shown = exact_steps(model, *(COMPUTED[name][1](n).double() for n in (N, N, 3, 1, N)))
    assert ("run again" in shown) == bool(native_missing())
    assert native_missing() or ("in full" in shown) == (name in FULL)


@pytest.mark.parametrize("options", [{}, {"fused": False}, {"weight_grad": False}], ids=title)
@computed
def test_gradients_of_a_computed_weight_are_clipped(name, options):
    model, x = around(name)
    check_clip(model, square, x, **options)
    with torchgradx.attach(model, clip=True, **options) as probe:
        square(model, x).backward()
        probe.clip_grad_norm_(1.0)
        again = "run again" in probe.explain()
    assert native_missing() or again == (name in FULL)


@computed
def test_a_computed_weight_inside_a_checkpoint(name):
    model, x = around(name, reentrant=False)
    check(model, square, x)
    model, x = around(name, reentrant=True)
    exact_or_refused(model, square, x)


@computed
def test_a_computed_weight_under_autocast(name):
    model, x = around(name)
    model, x, loss = model.float(), x.float(), under_autocast()
    want = loop_model(model, loss, x, dtype=torch.float32)
    with torchgradx.attach(model) as probe:
        loss(model, x).backward()
        close(probe.norms(), want, 16 * torch.finfo(torch.bfloat16).eps)


@a_few_modes
def test_a_weight_computed_of_its_batch_is_refused(options):
    def forward(m, x):
        return m.last(torch.tanh(F.conv2d(x, m.w * m.first(x).mean(), padding=1)).flatten(1))

    parts = {"first": nn.Conv2d(4, 4, 1), "last": nn.Linear(100, 2), "w": PAIRS["w"]}
    refused(Model(forward, **parts), square, torch.randn(N, 4, 5, 5), names=["w"], **options)


@pytest.mark.parametrize("name", ["standardised", "weight_norm", "weight_norm by position"])
def test_a_sample_that_is_dropped_leaves_no_nan_in_what_a_weight_is_computed_from(name):
    model, x = around(name)
    square(model, x[1:]).backward()
    want = [0.75 * p.grad for p in model.parameters()]
    model.zero_grad()
    x[0] = torch.nan
    with torchgradx.attach(model, clip=True) as probe:
        square(model, x).backward()
        probe.clip_grad_norm_(1e9, nonfinite="drop")
    for p, g in zip(model.parameters(), want, strict=True):
        assert (p.grad - g).abs().max() <= 1e-9 * g.abs().max()


PRODUCTS = {
    "rows": lambda m, x: torch.einsum("nti,io->nto", x, m.w),
    "rows, sequence first": lambda m, x: torch.einsum("tni,io->nto", x.mT.movedim(2, 0), m.w),
    "masked": lambda m, x: x.sum(1, keepdim=True) @ (m.w * torch.ones(D, D).tril()),
    "a matrix each": lambda m, x: torch.einsum("nti,tio->nto", x, m.each),
    "a vector of N": lambda m, x: (x.transpose(0, 1)[..., :N] @ m.v).T[..., None] * x,
}


@pytest.mark.parametrize("name", PRODUCTS)
def test_a_sample_of_nan_leaves_the_norms_of_the_others(name):
    parts = {"w": torch.randn(D, D), "each": torch.randn(T, D, D), "v": torch.randn(N)}
    model = Model(lambda m, x: m.l(PRODUCTS[name](m, m.l(x))), l=linear(), **parts).double()
    want = loop_model(model, square, x := rows().double())[1:]
    with torchgradx.attach(model) as probe:
        for value in (torch.nan, 1.0, torch.nan):
            x[0] = value
            square(model, x).backward()
            close(probe.norms()[1:], want)


def test_rows_of_which_next_to_nothing_is_left_beside_the_weight_itself():
    """As differences of squares in float32 they would have no digit."""
    model, x = around("weight_norm, cancelled")
    model, x = model.float(), x.float()
    want = loop(model, square, x)["part.v"]
    with torchgradx.attach(model) as probe:
        square(model, x).backward()
        close(probe.norms(per="parameter")["part.v"].double(), want, 1e-2)


def test_what_a_mask_takes_out_costs_the_others_no_digit():
    model = Model(lambda m, x: x @ (m.w * torch.eye(D)[:, 1:]), w=torch.randn(D, D - 1))
    x = rows()[:, 0]
    x[:, 0] = 1e25
    with torchgradx.attach(model) as probe:
        square(model, x).backward()
        close(probe.norms().double(), loop(model, square, x)["w"], 1e-5)
