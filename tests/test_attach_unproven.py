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
    close_named,
    exact_or_refused,
    loop,
    seeded,  # noqa: F401
    square,
    unproven,
)
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence

import torchgradx

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


def firsts(x):
    """[2 N]: as many as there are samples."""
    return torch.arange(2 * len(x)) < len(x)


def packed(x, lengths):
    return pack_padded_sequence(x[:, None], lengths, batch_first=True)


def swapped(x):
    return torch.eye(N, dtype=x.dtype).flip(0)[:, : len(x)]


DISORDERED = {
    "flip": lambda m, x: m.b(h(m, x).flip(0)),
    "roll": lambda m, x: m.b(h(m, x).roll(1, 0)),
    "roll, flattened": lambda m, x: m.b(h(m, x).roll(3)),
    "index": lambda m, x: m.b(h(m, x)[torch.arange(len(x)).flip(0)]),
    "index_select": lambda m, x: m.b(h(m, x).index_select(0, torch.arange(len(x)).flip(0))),
    "index_copy": lambda m, x: m.b(h(m, x).index_copy(0, torch.arange(len(x)).flip(0), x)),
    "sorted": lambda m, x: m.b(h(m, x)[x[:, 0].argsort()]),
    "sorted already": lambda m, x: m.b(h(m, x)[(0 * x[:, 0]).argsort(stable=True)]),
    "a boolean mask": lambda m, x: m.b(h(m, x)[x[:, 0] < torch.inf]),
    "slices": lambda m, x: m.b(torch.cat([h(m, x)[1:], h(m, x)[:1]])),
    "unbind": lambda m, x: m.b(torch.stack(h(m, x).unbind(0)[::-1])),
    "split": lambda m, x: m.b(torch.cat(h(m, x).split(1)[::-1])),
    "a permutation matrix": lambda m, x: m.b(swapped(x) @ h(m, x)),
    "centred": lambda m, x: m.b(h(m, x) - h(m, x).mean(0)),
    "centred by one number": lambda m, x: m.b(h(m, x) - h(m, x).mean()),
    "softmax": lambda m, x: m.b(h(m, x).softmax(0)),
    "cumsum": lambda m, x: m.b(h(m, x).cumsum(0)),
    "max": lambda m, x: m.b(h(m, x) - h(m, x).amax(0)),
    "similarity": lambda m, x: m.b(torch.tanh(x @ x.T) @ h(m, x)),
    "covariance": lambda m, x: m.b(x @ (x.T @ x)),
    "einsum": lambda m, x: m.b(torch.einsum("nd,md,me->ne", x, x, h(m, x))),
    "attention": lambda m, x: m.b(F.scaled_dot_product_attention(*[h(m, x)[None]] * 3)[0]),
    "batch statistics": lambda m, x: m.b(F.batch_norm(h(m, x), None, None, training=True)),
    "rows, a mask": lambda m, x: m.b(rows(m, x)[firsts(x)]),
    "rows, index": lambda m, x: m.b(rows(m, x)[torch.arange(len(x))]),
    "rows, index_select": lambda m, x: m.b(rows(m, x).index_select(0, torch.arange(len(x)))),
    "rows, gather": lambda m, x: m.b(rows(m, x).gather(0, torch.arange(3).expand(len(x), 3))),
    "rows, masked_select": lambda m, x: m.b(
        rows(m, x).masked_select(firsts(x)[:, None]).view(-1, 3)
    ),
    "rows, take": lambda m, x: m.b(rows(m, x).take(torch.arange(3 * len(x)).view(-1, 3))),
    "rows, looked up": lambda m, x: m.b(F.embedding(torch.arange(len(x)), rows(m, x))),
    "rows, put": lambda m, x: m.b(
        torch.zeros_like(x).index_put((torch.arange(2 * len(x)) // 2,), rows(m, x), True)
    ),
    "rows, masked_scatter": lambda m, x: m.b(
        torch.zeros_like(x).masked_scatter(firsts(x)[: len(x), None], rows(m, x))
    ),
    "rows, a slice": lambda m, x: m.b(rows(m, x)[: len(x)]),
    "rows, narrow": lambda m, x: m.b(rows(m, x).narrow(0, 0, len(x))),
    "rows, flip": lambda m, x: m.b(rows(m, x).flip(0).view(-1, 2, 3)[:, 0]),
    "rows, centred": lambda m, x: m.b((rows(m, x) - rows(m, x).mean(0)).view(-1, 2, 3)[:, 0]),
    "packed": lambda m, x: m.b(packed(x, torch.ones(len(x)).long()).data),
}


@a_few_modes
@unproven
@pytest.mark.parametrize("name", DISORDERED)
def test_samples_that_may_have_moved_or_mixed_are_refused(name, where, options):
    one = model(DISORDERED[name], where)
    with torchgradx.attach(one, **options) as probe:
        square(one, torch.randn(N, 3)).backward()
        with pytest.raises(
            torchgradx.CoverageError, match=r"b\.weight: .*(no proof could be had|mixes)"
        ):
            probe.norms()


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


TURNS = {
    "one after the other": lambda t: t.flatten(0, 1),
    "by position": lambda t: t.transpose(0, 1).flatten(0, 1),
    "two by two": lambda t: t.view(-1, 2, *t.shape[1:]).transpose(1, 2).flatten(0, 2),
    "halves exchanged": lambda t: t.flatten(0, 1).view(2, -1, 3).flip(0).flatten(0, 1),
    "shifted": lambda t: t.flatten(0, 1).roll(1, 0),
}


@a_few_modes
@unproven
@pytest.mark.parametrize("turn", TURNS)
def test_rows_are_samples_only_if_seen_one_after_the_other(turn, where, options):
    """[N T, 3], as of the layers of an OPT: sizes tell nothing."""

    def use(m, x):
        wide = h(m, x)[:, None] * m.kept[0].to(x)
        rows = TURNS[turn](wide) if len(x) % 2 == 0 else wide.flatten(0, 1)  # a sample alone
        return m.b(torch.tanh(m.c(rows))).view(-1, 5, 2).sum(1)

    one = model(use, where, c=nn.Linear(3, 3), kept=[torch.randn(5, 1)])
    if turn == "one after the other":
        check(one, square, torch.randn(N, 3), **options)
    else:
        with torchgradx.attach(one, **options) as probe:
            square(one, torch.randn(N, 3)).backward()
            with pytest.raises(torchgradx.CoverageError, match=r"c\.weight: .*no proof"):
                probe.norms()


@a_few_modes
@unproven
def test_what_was_followed_holds_for_the_shapes_that_it_was_followed_in(where, options):
    """Rows one after the other of short sequences, by position of long ones."""

    def use(m, x):
        n, t, _ = x.shape
        if t < 6:
            return m.b(torch.tanh(m.a(x.reshape(n * t, 3)))).view(n, t, 2)
        rows = m.b(torch.tanh(m.a(x.transpose(0, 1).reshape(n * t, 3))))
        return rows.view(t, n, 2).transpose(0, 1)

    one, exact = model(use, where).double(), 0
    with torchgradx.attach(one, **options) as probe:
        for t in (5, 7, 5, 7, 5):
            x = torch.randn(N, t, 3, dtype=torch.float64)
            want = loop(one, square, x)
            square(one, x).backward()
            try:
                got = probe.norms(per="parameter")
            except torchgradx.CoverageError:
                probe.reset()
            else:
                close_named(got, want)
                exact += t == 5
    assert exact == 3


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


# Features as many as there are samples: h(m, x) and x are [N, N].
BETWEEN = {
    "halves turned": lambda m, x: m.b(torch.cat([-h(m, x)[2:], h(m, x)[:2]], 0)),
    "softmax": lambda m, x: m.b(h(m, x).softmax(0)),
    "flip": lambda m, x: m.b(h(m, x).flip(0)),
    "flip, transposed": lambda m, x: m.b(h(m, x).T.flip(1).T),
    "a constant matrix": lambda m, x: m.b(torch.eye(N).to(x).flip(0)[:, : len(x)] @ h(m, x)),
    "attention": lambda m, x: m.b(F.scaled_dot_product_attention(*[h(m, x)[None]] * 3)[0]),
    "attention, transposed": lambda m, x: m.b(
        F.scaled_dot_product_attention(*[h(m, x).T[..., None]] * 3)[..., 0].T
    ),
}


def as_many(use, where):
    layers = {"i": nn.Linear(N, N), "a": nn.Linear(N, N), "b": nn.Linear(N, 2)}
    return model(use, where, **layers)


@unproven
@pytest.mark.parametrize("name", BETWEEN)
def test_between_samples_the_same_is_refused(name, where):
    refusal = exact_or_refused(as_many(BETWEEN[name], where), square, torch.randn(N, N))
    assert refusal is not None
    assert "b.weight" in refusal.parameters


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
def test_a_table_of_n_rows_is_refused(name, where, options):
    use, rows = TABLES[name]
    parts = {"c": nn.Linear(N, 2), "e": nn.Embedding(N, 3), "kept": [torch.randn(N, 3)]}
    parts |= {} if rows is None else {"rows": rows}
    refusal = exact_or_refused(model(use, where, **parts), square, torch.randn(N, 3), **options)
    assert ("e.weight" if name == "looked up" else "a.weight") in refusal.parameters


@a_few_modes
@unproven
def test_a_layer_first_met_after_the_forward_that_was_watched(where, options):
    """It is refused once, then looked at."""

    def use(m, x):
        return m.b(m.late(h(m, x)) if m.later else h(m, x))

    one = model(use, where, late=nn.Linear(3, 3), later=False).double()
    x = torch.randn(N, 3).double()
    with torchgradx.attach(one, **options) as probe:
        square(one, x).backward()
        probe.norms()
        one.later = True
        square(one, x).backward()
        with pytest.raises(torchgradx.CoverageError, match=r"late\.weight: .*no proof"):
            probe.norms()
        probe.reset()
        for _ in range(2):
            square(one, x).backward()
            close_named(probe.norms(per="parameter"), loop(one, square, x))


@a_few_modes
@unproven
def test_a_layer_that_is_later_given_what_a_mask_picks(where, options):
    """As where padding is taken out, if there is any; here as many rows are left as samples."""

    def use(m, x):
        wide = h(m, x)[:, None].expand(-1, 2, -1)
        return m.b(wide).sum(1) if m.dense else m.b(wide[firsts(x).view(-1, 2)])

    one, x = model(use, where, dense=True).double(), torch.randn(N, 3).double()
    with torchgradx.attach(one, **options) as probe:
        for dense in (True, False, True, False, True):
            one.dense = dense
            square(one, x).backward()
            if dense:
                close_named(probe.norms(per="parameter"), loop(one, square, x))
            else:
                with pytest.raises(torchgradx.CoverageError, match=r"b\.weight"):
                    probe.norms()


@a_few_modes
@unproven
@pytest.mark.parametrize("name", ["attention of three parts", "halves of N features"])
def test_parts_along_a_dimension_of_the_samples_number_are_no_samples(name, where, options):
    """Three samples, and the queries, keys and values that a module makes of one product; as many
    samples as features, and rotations of their halves."""

    def rotated(m, t):
        return m.b(torch.cat([-t[..., t.shape[-1] // 2 :], t[..., : t.shape[-1] // 2]], -1))

    if name == "halves of N features":
        net, n, size = Model(lambda m, x: UNPROVEN[where](lambda t: rotated(m, t), m.i(x)),
                             i=nn.Linear(4, 4), b=nn.Linear(4, 2)), 4, 4  # fmt: skip
    else:
        layer = nn.TransformerEncoderLayer(8, 2, 9, 0.0, batch_first=True)
        net, n, size = Model(lambda m, x: m.o(UNPROVEN[where](m.l, m.i(x))),
                             i=nn.Linear(8, 8), l=layer, o=nn.Linear(8, 5)), 3, 8  # fmt: skip
    check(net, square, torch.randn(n, 7, size), **options)


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
    exact_or_refused(net, square, torch.randn(n, 5, 3), **options)
