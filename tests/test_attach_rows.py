"""Rows given without a sign of N, led by other dimensions, or behind zeros, where a backward shows
little."""

import copy

import pytest
import torch
import torch.nn.functional as F
from attach_oracle import (
    UNPROVEN,
    Model,
    Same,
    a_few_modes,
    check,
    close_named,
    every_mode,
    exact_or_refused,
    loop,
    need_native,
    square,
    unproven,
)
from flat_rows import of_each, owned
from torch import nn

import torchgradx


def near(k):
    """[rows, rows]: each row to the earlier ones of its sample."""
    return (owned(k).T @ owned(k)).tril(-1)


def summed_by_edge(m, x, k):
    to, of = near(k).nonzero().T
    return x + torch.zeros_like(x).index_add(0, to, x[of])


OF_ITS_OWN = {
    "neighbours": summed_by_edge,
    "a matrix": lambda m, x, k: near(k) @ x,
    "its mean with a gradient": lambda m, x, k: m.into(x) - (near(k) @ m.into(x)).relu(),
    "noise": lambda m, x, k: x + 0 * torch.randn_like(x),
    "a sum that is kept": lambda m, x, k: setattr(m, "kept", x.sum(0) / len(x)) or x,
}  # fmt: skip


def of_rows(made):
    return Model(
        lambda m, x, k: m.o(owned(k) @ torch.tanh(m.l(made(m, x, k)))),
        l=nn.Linear(3, 4),
        o=nn.Linear(4, 2),
        into=nn.Linear(3, 3),
    ).double()


def backward(model, x, lengths):
    model(x, torch.tensor(lengths)).square().sum(1).mean().backward()


EVEN = [4, 4, 4]


@a_few_modes
@pytest.mark.parametrize("name", OF_ITS_OWN)
def test_what_rows_of_one_sample_make_is_its_own(name, options):
    model = of_rows(OF_ITS_OWN[name])
    twin = copy.deepcopy(model)
    with torchgradx.attach(model, batch_size=3, **options) as probe:
        for _ in range(2):
            x = torch.randn(12, 3).double()
            backward(model, x, EVEN)
            close_named(probe.norms(per="parameter"), of_each(twin, x, torch.tensor(EVEN)))
            model.zero_grad()


@a_few_modes
def test_numbers_of_segments_stay_what_they_are(options):
    def forward(m, x, segment):
        segment = segment if len(segment) == len(x) else torch.zeros(len(x), dtype=torch.long)
        sums = x.new_zeros(1 + int(segment.max()), 4)
        return m.o(sums.index_add(0, segment, torch.tanh(m.l(x))))

    model = Model(forward, l=nn.Linear(3, 4), o=nn.Linear(4, 2)).double()
    twin, x, even = copy.deepcopy(model), torch.randn(12, 3).double(), torch.tensor(EVEN)
    with torchgradx.attach(model, batch_size=3, **options) as probe:
        backward(model, x, [0, 0, 0, 0, 1, 1, 1, 1, 2, 2, 2, 2])
        close_named(probe.norms(per="parameter"), of_each(twin, x, even))


@a_few_modes
def test_rows_that_were_padded_before_the_layers_may_be_of_any_lengths(options):
    """As many in all as would be three for each, and they are not."""

    def forward(m, x, k):
        padded = nn.utils.rnn.pad_sequence(x.split(k.tolist()), batch_first=True)
        there = torch.arange(padded.shape[1])[None] < k[:, None]
        return m.o(
            (torch.tanh(m.l(padded - padded.sum(1, keepdim=True))) * there[..., None]).sum(1)
        )

    model = Model(forward, l=nn.Linear(3, 4), o=nn.Linear(4, 2)).double()
    twin = copy.deepcopy(model)
    with torchgradx.attach(model, batch_size=3, **options) as probe:
        for lengths in ([1, 5, 3], [2, 5, 2]):
            x = torch.randn(9, 3).double()
            backward(model, x, lengths)
            close_named(probe.norms(per="parameter"), of_each(twin, x, torch.tensor(lengths)))
            model.zero_grad()


N = 4


def inside(use, where, **parts):
    def forward(m, x):
        return UNPROVEN[where](lambda t: use(m, t), m.i(x / 2 - 1))

    layers = {"i": nn.Linear(3, 3), "a": nn.Linear(3, 3), "b": nn.Linear(3, 2)}
    return Model(forward, **(layers | parts))


def h(m, x):
    return torch.tanh(m.a(x))


def pairs(m, x):
    """[2 N, 3]"""
    return torch.stack([h(m, x), x], 1).flatten(0, 1)


IN_ORDER = {
    "layers": lambda m, x: m.b(F.gelu(m.a(x)).softmax(-1)),
    "positions": lambda m, x: m.b(h(m, x)[:, None].expand(-1, 5, -1) * m.kept[0].to(x)),
    "each at its place": lambda m, x: m.b(h(m, x)[torch.arange(len(x)), :]),
    "each of its rows": lambda m, x: m.b(pairs(m, x).view(len(x), 2, 3)[:, 1:]),
    "all of its rows, turned": lambda m, x: m.b(pairs(m, x).view(len(x), 2, 3).transpose(1, 2).mT),
    "half of each": lambda m, x: m.b(torch.cat([x[:, :1], h(m, x)[:, 1:]], 1)),
    "a loss beside it": lambda m, x: m.b(h(m, x) + 0 * len(str(h(m, x).mean().item()))),
    "attention": lambda m, x: m.b(
        F.scaled_dot_product_attention(*[h(m, x).unflatten(1, (3, 1))] * 3).flatten(1)
    ),
}


@a_few_modes
@unproven
@pytest.mark.parametrize("name", IN_ORDER)
def test_samples_that_stay_in_order_need_no_layout(name, where, options):
    check(
        inside(IN_ORDER[name], where, kept=[torch.randn(5, 1)]),
        square,
        torch.randn(N, 3),
        **options,
    )


@a_few_modes
@unproven
def test_rows_of_a_constant_are_those_of_the_samples_that_they_meet(where, options):
    """As token types that nobody gave."""

    def forward(m, x):
        kinds = torch.zeros(1, 1, dtype=torch.long).expand(len(x), 1)
        h = m.i(x)[:, None] + m.e(kinds)
        return UNPROVEN[where](lambda t: m.b(torch.tanh(m.a(t))), h)

    one = Model(forward, i=nn.Linear(3, 3), a=nn.Linear(3, 3), b=nn.Linear(3, 2),
                e=nn.Embedding(2, 3))  # fmt: skip
    check(one, square, torch.randn(N, 3), **options)


def over(pairs):
    """A layer called on rows of no sample's, as many as there are samples."""
    return lambda m, x: m.c(torch.tanh(x @ m.a(pairs(m)).T))


TABLES = {
    "a parameter": (over(lambda m: m.rows), torch.randn(N, 3)),
    "made from a parameter": (over(lambda m: torch.tanh(m.rows)), torch.randn(N, 3)),
    "a constant": (over(lambda m: torch.ones(N, 3).to(m.c.weight)), None),
    "an attribute": (over(lambda m: m.kept[0].to(m.c.weight)), None),
    "looked up": (over(lambda m: m.e(torch.arange(N))), None),
}


@a_few_modes
@unproven
@pytest.mark.parametrize("name", TABLES)
def test_a_table_of_n_rows_is_exact_or_refused(name, where, options):
    use, pairs = TABLES[name]
    parts = {"c": nn.Linear(N, 2), "e": nn.Embedding(N, 3), "kept": [torch.randn(N, 3)]}
    parts |= {} if pairs is None else {"rows": pairs}
    x = torch.randn(N, 3)
    exact_or_refused(inside(use, where, **parts), square, x, check="samples", **options)


LED = {  # by features or heads, as many as there are samples
    "[F, N]": (4, lambda h: h.mean(1).t(), lambda z, n: z.t()[:, None]),
    "[F, N, T]": (4, lambda h: h.permute(2, 0, 1), lambda z, n: z.permute(1, 2, 0)),
    "[F, T, N]": (4, lambda h: h.permute(2, 1, 0), lambda z, n: z.permute(2, 1, 0)),
    "[H, N T, d]": (2, lambda h: h.unflatten(2, (2, 2)).permute(2, 0, 1, 3).flatten(1, 2),
                    lambda z, n: z.unflatten(1, (n, -1)).permute(1, 2, 0, 3).flatten(2)),
}  # fmt: skip
FINER = {"[F, N, T]": nn.Linear(5, 5), "[H, N T, d]": nn.LayerNorm(2)}  # of the last dimension
led = pytest.mark.parametrize(
    ("name", "layer"), [*((name, nn.Identity()) for name in LED), *FINER.items()], ids=str
)


@a_few_modes
@unproven
@led
def test_rows_led_by_as_many_features_or_heads_as_samples(name, layer, where, options):
    n, to, fro = LED[name]
    own = Model(lambda m, h: m.l(to(h * m.w)), w=torch.randn(4), l=copy.deepcopy(layer))
    net = Model(lambda m, x: m.o(fro(UNPROVEN[where](m.own, m.i(x)), len(x))),
                i=nn.Linear(3, 4), own=own, o=nn.Linear(4, 2))  # fmt: skip
    exact_or_refused(net, square, torch.randn(n, 5, 3), check="samples", **options)


T = 6


def per_sample(model, x):
    return model(x).square().sum() / len(x)


def within(factor, inner):
    """h + factor(inner(h)), from and to the rows of a model that has samples first."""
    return lambda m, x: (lambda h: h + factor(m, inner(m, h)))(m.i(x))


def rows_of_a_sequence(m, h):
    """Flattened to rows t*N+n, and back."""
    y = torch.tanh(m.a(h.transpose(0, 1).reshape(-1, 3)))
    return y.unflatten(0, (h.shape[1], h.shape[0])).transpose(0, 1)


def with_a_bias_alone():
    layer = nn.Linear(3, 3)
    layer.weight.requires_grad_(False)
    return layer


FACTORS = {
    "of an adapter": (lambda m, y: m.b(y), lambda: nn.Linear(3, 3, bias=False)),
    "of a convolution": (
        lambda m, y: m.b(y.transpose(1, 2)).transpose(1, 2),
        lambda: nn.Conv1d(3, 3, 1, bias=False),
    ),
    "of a norm": (lambda m, y: m.b(y), lambda: nn.RMSNorm(3)),
    "of a table": (
        lambda m, y: m.b(torch.zeros((), dtype=torch.long)) * y,
        lambda: nn.Embedding(1, 3),
    ),
    "of a bias": (lambda m, y: m.b(y.detach()) * y, with_a_bias_alone),
    "of some rows": (lambda m, y: m.b(y.detach())[..., 3:] * y, lambda: nn.Linear(3, 6)),
    "of some columns": (
        lambda m, y: m.b(torch.cat([torch.ones_like(y), y], -1)),
        lambda: nn.Linear(6, 3, bias=False),
    ),
    "for each feature": (lambda m, y: m.b * y, lambda: nn.Parameter(torch.zeros(3))),
    "one number": (lambda m, y: m.b * y, lambda: nn.Parameter(torch.zeros(()))),
}

WHOLE = [name for name in FACTORS if name not in ("of a bias", "of some rows", "of some columns")]


MIXING = {  # between layers alone, whose rows are seen by the way around the zeros; and above one
    "between": (lambda m, h: h.mean(0).expand_as(h), {}),
    "above": (lambda m, h: torch.tanh(m.a(h)).flip(0), {"a": nn.Linear(3, 3)}),
}


def zeroed(name, inner, layers):
    factor, make = FACTORS[name]
    model = Model(within(factor, inner), i=nn.Linear(3, 3), b=make(), **layers)
    with torch.no_grad():
        for p in model.b.parameters() if isinstance(model.b, nn.Module) else ():
            (p.T[-3:].T if name == "of some columns" else p[-3:] if p.dim() else p).zero_()
    return model.double()


def trained(model, probe, count=3):
    """What the loop says of each backward; after each the parameters change, as by an optimizer."""
    for _ in range(count):
        x = torch.randn(N, T, 3, dtype=torch.float64)
        want = loop(model, per_sample, x)
        per_sample(model, x).backward()
        yield want
        probe.reset()
        with torch.no_grad():
            for p in filter(lambda p: p.requires_grad, model.parameters()):
                p.add_(torch.randn_like(p), alpha=0.1)


@every_mode
@pytest.mark.parametrize("name", FACTORS)
def test_layers_behind_zeros_are_exact_before_and_after_the_first_step(name, options):
    need_native(options)
    model = zeroed(name, rows_of_a_sequence, {"a": nn.Linear(3, 3)})
    try:
        probe = torchgradx.attach(model, **options)
    except torchgradx.CoverageError:
        return  # backend="native", and a parameter that has no kernel
    with probe:
        for want in trained(model, probe):
            close_named(probe.norms(per="parameter"), want)


@every_mode
@pytest.mark.parametrize("name", WHOLE)
@pytest.mark.parametrize("mixing", MIXING)
def test_samples_that_are_mixed_behind_zeros_are_refused_once_it_shows(mixing, name, options):
    need_native(options)
    model = zeroed(name, *MIXING[mixing])
    try:
        probe = torchgradx.attach(model, **options)
    except torchgradx.CoverageError:
        return
    with probe:
        for k, _ in enumerate(trained(model, probe)):
            if k:
                with pytest.raises(torchgradx.CoverageError, match=r"i\.weight"):
                    probe.norms()


D = 5


APART = {  # samples first, in modules that torch takes apart where nobody sees it
    "lstm": (lambda: nn.LSTM(3, D, batch_first=True), lambda m, x: m.l(x)[0]),
    "gru": (lambda: nn.GRU(3, D, batch_first=True), lambda m, x: m.l(x)[0]),
    "instance norm": (lambda: nn.InstanceNorm1d(T, affine=True), lambda m, x: m.l(x)),
    "instance norm of nothing": (lambda: nn.InstanceNorm1d(T), lambda m, x: m.l(m.c(x))),
    "prelu": (lambda: nn.PReLU(T), lambda m, x: m.l(x)),
    "one prelu": (nn.PReLU, lambda m, x: m.l(m.c(x))),
    "bilinear": (lambda: nn.Bilinear(3, 3, D), lambda m, x: m.l(x, x.tanh())),
}


@pytest.mark.parametrize("options", [{}, {"fused": False}, {"backend": "vmap"}], ids=str)
@pytest.mark.parametrize("alone", [False, True], ids=["a Function", "its loss"])
@pytest.mark.parametrize("name", APART)
def test_modules_that_leave_samples_apart_are_exact(name, alone, options):
    make, use = APART[name]

    def forward(m, x):
        out = m.o(use(m, x).flatten(1))
        return out.square().sum(1).mean() if alone else Same.apply(out)

    size = T * D if name in ("lstm", "gru", "bilinear") else T * 3
    net = Model(forward, l=make(), c=nn.Linear(3, 3), o=nn.Linear(size, 2))
    check(net, (lambda m, x: m(x)) if alone else square, torch.randn(N, T, 3), **options)
