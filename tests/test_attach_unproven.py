"""Where no backward can be asked whose rows a layer is given (in a reentrant checkpoint, below a
user's Function), a forward in which they could be no sample's, or another's, is refused."""

import copy

import pytest
import torch
import torch.nn.functional as F
from attach_oracle import (
    UNPROVEN,
    Model,
    a_few_modes,
    check,
    exact_or_refused,
    square,
    unproven,
)
from torch import nn

N = 4


def model(use, where, **parts):
    def forward(m, x):
        return UNPROVEN[where](lambda t: use(m, t), m.i(x / 2 - 1))

    layers = {"i": nn.Linear(3, 3), "a": nn.Linear(3, 3), "b": nn.Linear(3, 2)}
    return Model(forward, **(layers | parts))


def h(m, x):
    return torch.tanh(m.a(x))


def rows(m, x):
    """[2 N, 3]"""
    return torch.stack([h(m, x), x], 1).flatten(0, 1)


IN_ORDER = {
    "layers": lambda m, x: m.b(F.gelu(m.a(x)).softmax(-1)),
    "positions": lambda m, x: m.b(h(m, x)[:, None].expand(-1, 5, -1) * m.kept[0].to(x)),
    "each at its place": lambda m, x: m.b(h(m, x)[torch.arange(len(x)), :]),
    "each of its rows": lambda m, x: m.b(rows(m, x).view(len(x), 2, 3)[:, 1:]),
    "all of its rows, turned": lambda m, x: m.b(rows(m, x).view(len(x), 2, 3).transpose(1, 2).mT),
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
        model(IN_ORDER[name], where, kept=[torch.randn(5, 1)]), square, torch.randn(N, 3), **options
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


def over(rows):
    """A layer called on rows of no sample's, as many as there are samples."""
    return lambda m, x: m.c(torch.tanh(x @ m.a(rows(m)).T))


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
    use, rows = TABLES[name]
    parts = {"c": nn.Linear(N, 2), "e": nn.Embedding(N, 3), "kept": [torch.randn(N, 3)]}
    parts |= {} if rows is None else {"rows": rows}
    x = torch.randn(N, 3)
    exact_or_refused(model(use, where, **parts), square, x, check="samples", **options)


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
