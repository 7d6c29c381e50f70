"""What only looks as if all samples shared it; and tables beside reentrant checkpoints."""

import pytest
import torch
import torch.nn.functional as F
from attach_oracle import (
    Model,
    a_few_modes,
    close_named,
    each_of,
    exact_or_refused,
    fallback_mode,
    loop,
    refused,
    square,
    square_second,
)
from broadcast_models import TOKENS, D, N, T, constant, in_place, positional, tokens
from torch import nn
from torch.utils.checkpoint import checkpoint

import torchgradx


def hidden(batch):
    class Hidden:
        data = batch

    return Hidden()


MIXED = {
    "mean of the inputs": lambda m, x: m.l(x.mean(0)),
    "mean, kept": lambda m, x: m.l(x.mean(0, keepdim=True)),
    "the first sample": lambda m, x: m.l(x[0]),
    "a number of the batch": lambda m, x: m.l(x.mean().expand(x.shape[1:])),
    "a constant scaled by the batch": lambda m, x: m.l(m.c[:1] * x.mean()),
    "scaled after the module": lambda m, x: m.l(m.c[:1]) * x.mean((0, 1)),
    "written over": lambda m, x: m.l(torch.zeros_like(x[0]).copy_(x[0])),
    "written into": lambda m, x: m.l(in_place(0 * m.c, lambda z: z[1:].add_(x[0, 1]))),
    "written by a list of tensors": lambda m, x: m.l(in_place(0 * m.c, lambda z:
                                                     torch._foreach_add_([z], [x[0]]))),
    "of a list": lambda m, x: m.l(torch.tensor(x[0].tolist(), dtype=x.dtype)),
    "of an array": lambda m, x: m.l(torch.from_numpy(x[0].numpy())),
    "mean of what was learned": lambda m, x: m.l(m.i(x).mean(0)),
    "the neighbour": lambda m, x: m.l(x).flip(0),
    "batch statistics": lambda m, x: F.batch_norm(m.l(x).mT, None, None, training=True).mT,
    "softmax over samples": lambda m, x: torch.softmax(m.l(x), 0),
}  # fmt: skip
# Statistics of data concern all parameters: a sample alone has others.
OF_DATA = {"mean of the inputs", "mean, kept", "a number of the batch",
           "a constant scaled by the batch", "scaled after the module"}  # fmt: skip


@fallback_mode
@pytest.mark.parametrize("t", [T, N])
@pytest.mark.parametrize("how", MIXED)
def test_what_is_computed_from_several_samples_is_refused(how, t, options):
    model = constant(lambda m, x: m.o(torch.tanh(m.i(x) + MIXED[how](m, x))), (t, D),
                     l=nn.Linear(D, D, bias=False), i=nn.Linear(D, D))  # fmt: skip
    spared = set() if how in OF_DATA else {"o.weight"}
    refused(model, square, torch.randn(N, t, D), names={"l.weight"}, spared=spared, **options)


@fallback_mode
def test_data_that_no_argument_shows_is_refused(options):
    model = constant(lambda m, x, box: m.o(m.i(x) + m.l(box.data.mean(0))), l=nn.Linear(D, D),
                     i=nn.Linear(D, D)).double()  # fmt: skip
    x = torch.randn(N, T, D).double()
    with torchgradx.attach(model, **options) as probe:
        square(lambda x: model(x, hidden(x)), x).backward()
        with pytest.raises(torchgradx.CoverageError, match=r"l\.weight"):
            probe.norms()


@fallback_mode
@pytest.mark.parametrize("mix", ["a mean", "attention"])
def test_packed_ids_of_one_row_are_of_samples(mix, options):
    """Beside lengths [N] they look like positions [1, T] beside tokens [N, T]."""

    def forward(m, lengths, ids):
        h = torch.tanh(m.l(m.e(ids)))
        scores = torch.softmax(h @ h.transpose(1, 2), -1)
        h = scores @ h if mix == "attention" else h - h.mean(1, keepdim=True)
        owners = torch.repeat_interleave(torch.arange(len(lengths)), lengths)
        return m.o(h.new_zeros(len(lengths), D).index_add(0, owners, h[0]))

    model = Model(forward, e=nn.Embedding(TOKENS, D), l=nn.Linear(D, D), o=nn.Linear(D, 2))
    lengths = torch.tensor([2, 3, 1, 4])
    refused(model, square, lengths, torch.randint(0, TOKENS, (1, 10)),
            names={"e.weight", "l.weight"}, **options)  # fmt: skip


@fallback_mode
def test_a_row_of_the_samples_own_ids_is_theirs(options):
    """Given once more, it looks like positions; it is a view of the same memory."""
    model = Model(lambda m, i, p: m.o(torch.tanh(m.e(i) - m.e(i).mean(0) + m.e(p))),
                  e=nn.Embedding(TOKENS, D), o=nn.Linear(D, 2))  # fmt: skip
    refused(model, lambda m, i: square(m, i, i[:1]), torch.randint(0, TOKENS, (N, T)),
            names={"e.weight"}, **options)  # fmt: skip


class Scaled(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * 2

    @staticmethod
    def backward(ctx, g):
        return g * 2


@fallback_mode
def test_a_function_of_the_users_own_on_the_way_is_refused_by_name(options):
    model = constant(lambda m, x: m.o(x + Scaled.apply(m.l(m.c))), l=nn.Linear(D, D))
    refused(model, square, torch.randn(N, T, D), names={"l.weight"}, **options)


@fallback_mode
def test_another_consumer_in_a_later_pass_is_exact_or_refused(options):
    """The modules called are the same; only what is done with the table is not."""

    def forward(m, x):
        s = m.l(m.c)
        y = torch.tanh(m.i(x) + s)
        return m.o(y * s if m.more else y)

    model = constant(forward, l=nn.Linear(D, D), i=nn.Linear(D, D)).double()
    x, refusals = torch.randn(N, T, D).double(), 0
    with torchgradx.attach(model, **options) as probe:
        for model.more in (False, True, False, True):
            want = loop(model, square, x)
            square(model, x).backward()
            try:
                close_named(probe.norms(per="parameter"), want)
            except torchgradx.CoverageError as error:
                refusals += "l.weight" in error.parameters
                probe.reset()
    assert refusals <= 2


@a_few_modes
def test_a_penalty_on_the_table_is_refused(options):
    model = positional()
    loss = lambda m, i: square(m, i) + m.p.weight.square().sum()  # noqa: E731
    refused(model, loss, tokens(), names={"p.weight"}, **options)


@a_few_modes
def test_a_hook_that_changes_a_gradient_on_the_way_is_exact_or_refused(options):
    def forward(m, x):
        s = m.l(m.c)
        s.register_hook(lambda g: 2 * g)
        return m.o(torch.tanh(m.i(x) + s))

    model = constant(forward, l=nn.Linear(D, D), i=nn.Linear(D, D))
    exact_or_refused(model, square, torch.randn(N, T, D), **options)


@a_few_modes
def test_what_runs_again_calls_no_hook_of_the_users(options):
    seen = []

    def forward(m, x):
        s = m.l(m.c)
        s.register_hook(lambda g: seen.append(tuple(g.shape)))
        return m.o(torch.tanh(m.i(x) + s))

    model, x = constant(forward, l=nn.Linear(D, D), i=nn.Linear(D, D)), torch.randn(N, T, D)
    with torchgradx.attach(model, **options) as probe:
        square(model, x).backward()
        probe.norms()
        seen.clear()
        square(model, x).backward()
        probe.norms()
    assert seen == [(T, D)]


def strided(h):
    """[T, N, D] of [N, T, D], by an operation through which samples are not followed."""
    n, positions, width = h.shape
    return h.contiguous().as_strided((positions, n, width), (width, positions * width, 1))


BESIDE = {
    "a table": lambda: {"table": nn.Embedding(N, D)},
    "a table through a layer": lambda: {"table": nn.Embedding(N, D), "also": nn.Linear(D, D)},
    "positions": lambda: {"places": torch.randn(N, D)},
}


@a_few_modes
@pytest.mark.parametrize("beside", BESIDE.values(), ids=BESIDE)
def test_outputs_with_n_in_two_places_beside_what_samples_share(beside, options):
    """A table of as many rows as samples looks, from the wrong one, as if these were theirs."""
    parts = beside()

    def forward(m, x):
        if "places" in parts:
            x = x * m.places
        if "table" in parts:
            rows = m.table(torch.arange(N))
            x = x + (m.also(rows) if "also" in parts else rows)
        return strided(m.last(torch.tanh(m.first(x))))

    model = Model(forward, first=nn.Linear(D, D), last=nn.Linear(D, D), **parts)
    exact_or_refused(model, square_second, torch.randn(N, N, D), **options)


modes = each_of([{}, {"fused": False}, {"weight_grad": False}])


def text(m, ids):
    h = m.words(ids) + m.places(torch.arange(T)) * m.gain
    h = checkpoint(m.block, h, use_reentrant=True)
    return m.out(h.flatten(1) + m.bias)


def reader():
    return Model(
        text,
        words=nn.Embedding(TOKENS, D),
        places=nn.Embedding(T, D),
        gain=torch.randn(D),
        block=nn.Sequential(nn.Linear(D, D), nn.Tanh(), nn.LayerNorm(D)),
        out=nn.Linear(T * D, 2),
        bias=torch.randn(T * D),
    ).double()


@modes
def test_tables_before_and_after_are_exact_for_every_size(options):
    net = reader()
    with torchgradx.attach(net, **options) as probe:
        for n in (4, 3, 7, 1, 4):
            ids = torch.randint(0, TOKENS, (n, T))
            want = loop(net, square, ids)
            square(net, ids).backward()
            close_named(probe.norms(per="parameter"), want)


@modes
@pytest.mark.parametrize("n", [T, D])
def test_as_many_samples_as_another_dimension_has_are_refused(n, options):
    exact_or_refused(reader(), square, torch.randint(0, TOKENS, (n, T)), **options)


def patches(m, x):
    """A class token beside what is joined with it, as in a vision transformer."""
    token = m.token.expand(len(x), 1, D)
    h = checkpoint(m.block, torch.cat([token, m.into(x)], 1) + m.places, use_reentrant=True)
    return m.out(h[:, 0] * m.gain)


@modes
def test_parameters_of_a_module_that_cannot_run_again_are_exact(options):
    net = Model(patches, token=torch.randn(1, 1, D), places=torch.randn(1, T + 1, D),
                gain=torch.randn(D), into=nn.Linear(3, D), out=nn.Linear(D, 2),
                block=nn.Sequential(nn.Linear(D, D), nn.Tanh())).double()  # fmt: skip
    with torchgradx.attach(net, **options) as probe:
        for n in (4, 3):
            x = torch.randn(n, T, 3, dtype=torch.float64)
            want = loop(net, square, x)
            square(net, x).backward()
            close_named(probe.norms(per="parameter"), want)


C, L = 4, 5


def images(shared):
    def forward(m, x):
        h = checkpoint(m.c, m.i(x), use_reentrant=True)
        return checkpoint(m.o, torch.tanh(shared(m, h)), use_reentrant=True)

    return Model(forward, i=nn.Conv1d(3, C, 1), c=nn.Conv1d(C, C, 1), o=nn.Conv1d(C, 2, 1),
                 p=torch.randn(C, L), t=nn.Embedding(L, C), l=nn.Linear(C, C))  # fmt: skip


def flattened(m, h):
    """Rows of channels: their number is that of the samples."""
    rows = h.permute(1, 0, 2).reshape(C, -1) + m.p[:, :1]
    return rows.view(C, -1, L).permute(1, 0, 2)


WAYS = {
    "a table of as many rows, made of two": lambda m, h: (
        h + m.l(torch.tanh(m.t(torch.arange(L)))).T * m.p
    ),
    "rows of channels": flattened,
    "samples in the last dimension": lambda m, h: (h.permute(1, 2, 0) + m.p[..., None]).permute(
        2, 0, 1
    ),
    "samples turned round": lambda m, h: h.flip(0) + m.p,
    "read inside as well": lambda m, h: checkpoint(lambda u: u * m.p, h, use_reentrant=True) + m.p,
}


@modes
@pytest.mark.parametrize("way", WAYS)
def test_nothing_is_guessed_where_channels_are_as_many_as_samples(way, options):
    x = torch.randn(C, 3, L)
    refused(images(WAYS[way]), square, x, names=(), check="samples", **options)
