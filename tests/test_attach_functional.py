"""Weights that a forward reads beside the calls of their modules: one gradient, cross terms."""

import pytest
import torch
import torch.nn.functional as F
from attach_oracle import (
    ANY,
    Model,
    a_few_modes,
    check,
    close,
    each_of,
    exact_or_refused,
    exact_steps,
    fallback_mode,
    loop,
    loop_model,
    native_missing,
    need_native,
    per_model,
    refused,
    square,
    title,
    under_autocast,
)
from clip_oracle import check_clip
from computed_models import COMPUTED, FULL, PAIRS, around
from torch import nn
from torch.func import functional_call
from torch.utils.checkpoint import checkpoint

import torchgradx

N, T, D, V = 4, 3, 5, 7
NATIVE = {"backend": "native"}
modes = each_of([NATIVE, NATIVE | {"fused": False}, NATIVE | {"weight_grad": False}])


def rows():
    return torch.randn(N, T, D)


def ids():
    return torch.randint(0, V, (N, T))


def images():
    return torch.randn(N, 3, 4, 4)


def tied(m, x):
    return F.linear(torch.tanh(m.o(m.e(x))), m.e.weight)


def biased(m, x):
    return F.linear(torch.tanh(m.l(x)), m.l.weight, m.l.bias)


def turned(m, x):
    """Every way to turn a matrix, and twice is none."""
    h, w = torch.tanh(m.l(x)), m.l.weight
    turned = h @ w.T + h @ w.mT + h @ w.transpose(-1, 0) + h @ w.permute(1, 0)
    return turned + h @ w.permute(0, 1) + 2 * h @ w.transpose(0, -2)


def times(m, x):
    h = torch.tanh(m.l(x)).flatten(0, 1)
    return torch.addmm(m.l.bias, h, m.l.weight.t(), beta=0.5, alpha=3).view_as(x)


def sliced(m, x):
    return m.l(x) + F.linear(x, m.l.weight[:, :2].repeat(1, 3)[:, :D])


def scaled(m, x):
    return m.n(x) * m.n.weight + m.n.bias


def folded(m, x):
    return F.conv2d(torch.tanh(m.c(x)), m.c.weight, padding=1)


def inner(m, x):
    """A module's weight, in the forward of another that has its own."""
    return m.o(m.l(x)) + F.linear(x, m.l.weight)


def linear():
    return nn.Linear(D, D)


def headed(m, x):
    """As BERT's: the decoder's bias is a parameter of the head too."""
    return m.decoder(torch.tanh(m.dense(x))) + m.bias


def of_bert():
    model = Model(headed, dense=linear(), decoder=linear())
    model.bias = model.decoder.bias
    return model


MODELS = {
    "embedding and head": (lambda: Model(tied, e=nn.Embedding(V, D), o=linear()), ids),
    "with bias": (lambda: Model(biased, l=linear()), rows),
    "turned": (lambda: Model(turned, l=linear()), rows),
    "times a number": (lambda: Model(times, l=linear()), rows),
    "a part": (lambda: Model(sliced, l=linear()), rows),
    "scale and shift": (lambda: Model(scaled, n=nn.LayerNorm(D)), rows),
    "convolution": (lambda: Model(folded, c=nn.Conv2d(3, 3, 3, padding=1)), images),
    "two": (lambda: Model(inner, l=linear(), o=linear()), rows),
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


UNCALLED = {
    "linear": (lambda m, x: F.linear(x, m.l.weight, m.l.bias), linear, rows),
    "linear, T = N": (lambda m, x: F.linear(x, m.l.weight), linear, lambda: torch.randn(N, N, D)),
    "twice": (lambda m, x: torch.tanh(x @ m.l.weight) @ m.l.weight, linear, rows),
    "table": (lambda m, x: F.embedding(x, m.l.weight), lambda: nn.Embedding(V, D), ids),
    "convolution": (
        lambda m, x: F.conv2d(x, m.l.weight, m.l.bias).flatten(2).mT,
        lambda: nn.Conv2d(3, D, 3),
        images,
    ),
}  # fmt: skip


@fallback_mode
@pytest.mark.parametrize("name", UNCALLED)
def test_a_module_that_is_not_called_itself(name, options):
    forward, make, batch = UNCALLED[name]
    model = Model(lambda m, x: m.o(torch.tanh(forward(m, x))), l=make(), o=linear())
    if "T = N" in name:  # outputs [N, N, ...] may have the samples in either
        exact_or_refused(model, square, batch(), **options)
    else:
        check(model, square, batch(), **options)


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
        own = functional_call(m.l, {"weight": BORROWED[name](m)}, (x,))
        return m.o(torch.tanh(own)) + x @ m.w

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


@modes
@models
def test_two_forwards_of_the_same_samples(name, options):
    model, x = made(name)
    model, x, z = model.double(), x.double() if x.is_floating_point() else x, x.flip(-1).clone()

    def both(m, x, z):
        return (m(x).flatten(1).square() + m(z.to(x.dtype)).flatten(1).sin()).sum(1).mean()

    want = loop(model, both, x, z)
    with torchgradx.attach(model, **options) as probe:
        for _ in range(2):
            with probe.same_samples():
                value = both(model, x, z)
            value.backward()
            close(probe.norms(), per_model(want))


def test_what_runs_again_by_vmap_refuses_it_by_name():
    model, x = made("with bias")
    refused(model, square, x, names=["l.weight", "l.bias"], backend="vmap")


computed = pytest.mark.parametrize("name", COMPUTED)


@each_of([*ANY, {"backend": "vmap"}])
@computed
def test_a_weight_of_a_convolution_may_be_computed(name, options):
    model, x = around(name)
    check(model, square, x, **options)


@computed
def test_a_computed_weight_is_served_at_the_graphs_nodes(name):
    """In steps of other sizes too."""
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


@pytest.mark.parametrize("name", ["standardised", "weight_norm", "weight_norm of a Linear", "both"])
def test_a_computed_weight_of_halves(name):
    model, x = around(name)
    model, x = model.bfloat16(), x.bfloat16()
    want = loop_model(model, square, x, dtype=torch.float32)
    with torchgradx.attach(model) as probe:
        square(model, x).backward()
        close(probe.norms(), want, 0.05)


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


def test_rows_of_which_next_to_nothing_is_left_beside_the_weight_itself():
    """As differences of squares in float32 they would have no digit."""
    model, x = around("weight_norm, cancelled")
    model, x = model.float(), x.float()
    want = loop(model, square, x)["part.v"]
    with torchgradx.attach(model) as probe:
        square(model, x).backward()
        close(probe.norms(per="parameter")["part.v"].double(), want, 1e-2)
