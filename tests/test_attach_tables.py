"""What all samples share: position tables, bare parameters, modules called without samples."""

import pytest
import torch
import torch.nn.functional as F
from attach_oracle import (
    Model,
    a_few_modes,
    check,
    exact_or_refused,
    fallback_mode,
    refusal,
    refused,
    square,
    square_second,
)
from broadcast_models import TOKENS, D, N, T, constant, in_place, placed, relative, tokens
from torch import nn

import torchgradx

sizes = pytest.mark.parametrize(("n", "t"), [(N, T), (N, N), (D, T), (1, T), (T, 1), (2, 2 * N)])
IDS = {
    "[T]": torch.arange,
    "[1, T]": lambda t: torch.arange(t)[None],
    "repeated": lambda t: torch.arange(t) // 2,
    "reversed": lambda t: torch.arange(t).flip(0)[None],
    "distances": lambda t: (torch.arange(t)[:, None] - torch.arange(t)).abs()[0],
}
MASKS = {
    "[1, T] > 1": lambda t: torch.arange(t)[None] > 1,
    "[T] > 1": lambda t: torch.arange(t) > 1,
}


@fallback_mode
@sizes
@pytest.mark.parametrize("ids", IDS)
def test_a_position_table_is_exact(ids, n, t, options):
    model = placed(lambda m, i: m.p(IDS[ids](i.shape[1])))
    check(model, square, tokens(n, t), **options)


def test_what_is_made_of_all_data_is_no_table_in_a_later_step_either():
    model = Model(lambda m, x: m.o(torch.tanh(m.t(x) + m.scale * x.mean(0))),
                  t=nn.Linear(D, D), o=nn.Linear(D, 2)).double()  # fmt: skip
    model.scale = nn.Parameter(torch.randn(D).double())
    with torchgradx.attach(model) as probe:
        for _ in range(3):
            square(model, torch.randn(N, D).double()).backward()
            refusal(probe, "scale")


class Positions(nn.Embedding):
    """As BART's, which is given the ids of the tokens too."""

    def forward(self, ids, positions):
        return super().forward(positions[None] + 2)


@fallback_mode
def test_a_table_that_is_given_the_samples_too_is_exact(options):
    model = placed(lambda m, i: m.p(i, torch.arange(i.shape[1])), Positions(2 * N + 2, D))
    for n, t in [(N, T), (N, 2 * N), (N, N), (2, T)]:
        check(model, square, tokens(n, t), **options)


@fallback_mode
@pytest.mark.parametrize("ids", ["[T]", "[1, T]", "repeated", *MASKS])
def test_what_a_model_is_called_with_for_all_samples_is_of_none(ids, options):
    """Ids and masks; of as many positions as samples there may be refusals."""
    given = (IDS | MASKS)[ids]
    model = placed(lambda m, i, p: m.p(p.long()))
    for n, t in [(N, T), (N, 2 * N), (1, T), (N, 1), (2, T)]:
        check(model, lambda m, i: square(m, i, given(i.shape[1])), tokens(n, t), **options)
    exact_or_refused(model, lambda m, i: square(m, i, given(N)), tokens(N, N), **options)


@a_few_modes
def test_positions_of_a_sequence_first_model_are_exact(options):
    model = placed(lambda m, i: m.p(torch.arange(len(i)))[:, None])
    for t in (T, N):
        check(model, square_second, tokens(N, t).T, dims=1, batch_dim=1, **options)


@fallback_mode
@sizes
@pytest.mark.parametrize("read", [False, True])
@pytest.mark.parametrize("shared", [False, True])
def test_relative_positions_through_modules_are_exact(shared, read, n, t, options):
    """`shared`: the same Linear for samples and for positions, so terms of both kinds cross."""
    check(relative(shared, read), square, torch.randn(n, t, D), **options)


@fallback_mode
def test_a_parameter_that_a_layer_takes_is_exact(options):
    model = Model(lambda m, x: x @ torch.tanh(m.o(m.rows)).T, rows=torch.randn(3, D),
                  o=nn.Linear(D, D))  # fmt: skip
    check(model, square, torch.randn(N, D), **options)


@fallback_mode
@pytest.mark.parametrize("hidden", [False, True])
def test_a_use_that_no_output_shows_is_exact_unless_it_receives_a_gradient(hidden, options):
    """As DoRA calls its adapters on an identity matrix, and detaches what comes of it."""

    def forward(m, x):
        m.seen[:] = [m.o(torch.eye(D).to(x))]
        return m.o(x) * m.seen[0].detach().norm()

    def loss(m, x):
        return square(m, x) + (m.seen[0].sum() if hidden else 0)

    model, x = Model(forward, o=nn.Linear(D, 2), seen=[]), torch.randn(N, D)
    if hidden:
        names = ["o.weight", "o.bias"]
        refused(model, loss, x, names=names, match="not come from the model's outputs", **options)
    else:
        check(model, loss, x, **options)


def biased(m, x):
    """A bias for each pair of positions and each head, as in T5; used twice."""
    t = x.shape[1]
    bias = m.p((torch.arange(t)[:, None] - torch.arange(t)).abs()).permute(2, 0, 1)[None]
    for layer in (m.a, m.b):
        h = layer(x).unflatten(2, (2, -1)).transpose(1, 2)
        scores = h @ h.transpose(2, 3)
        scores += bias
        x = x + (torch.softmax(scores, -1) @ h).transpose(1, 2).flatten(2)
    return m.o(x)


@fallback_mode
@sizes
def test_a_bias_of_attention_used_in_several_layers_is_exact(n, t, options):
    model = Model(biased, p=nn.Embedding(2 * N, 2), a=nn.Linear(D, D), b=nn.Linear(D, D),
                  o=nn.Linear(D, 2))  # fmt: skip
    check(model, square, torch.randn(n, t, D), **options)


def tied_embedding(m, i):
    h = torch.tanh(m.t(i) + m.t(torch.arange(i.shape[1])))
    return m.o(h)


def in_two_places(m, i):
    t = i.shape[1]
    h = torch.tanh(m.t(i) + m.p(torch.arange(t)))
    return m.o(torch.tanh(h * m.p(torch.arange(t).flip(0))[None]))


def beside_samples(m, i):
    return m.o(torch.tanh(m.t(i) + m.l(m.c) + m.l(m.t(i))))


def tied_head(m, i):
    """The position table is also what the head is tied to."""
    return m.o(torch.tanh(m.t(i) + m.p(torch.arange(i.shape[1])))) @ m.p.weight.new_ones(2 * N, 1)


@fallback_mode
@pytest.mark.parametrize("use", [tied_embedding, in_two_places, beside_samples, tied_head])
@pytest.mark.parametrize("t", [T, N])
def test_all_uses_of_a_parameter_add_up(use, t, options):
    parts = {"t": nn.Embedding(TOKENS, D), "o": nn.Linear(D, 2)}
    if use in (in_two_places, tied_head):
        parts["p"] = nn.Embedding(2 * N, D)
    if use is tied_head:
        parts["o"] = nn.Linear(D, 2 * N, bias=False)
        parts["o"].weight = parts["p"].weight
    if use is beside_samples:
        parts["l"] = nn.Linear(D, D)
    check(constant(use, (t, D), **parts), square, tokens(N, t), **options)


MIXED = {
    "mean of the inputs": lambda m, x: m.l(x.mean(0)),
    "the first sample": lambda m, x: m.l(x[0]),
    "a constant scaled by the batch": lambda m, x: m.l(m.c[:1] * x.mean()),
    "written into": lambda m, x: m.l(in_place(0 * m.c, lambda z: z[1:].add_(x[0, 1]))),
    "written by a list of tensors": lambda m, x: m.l(in_place(0 * m.c, lambda z:
                                                     torch._foreach_add_([z], [x[0]]))),
    "of a list": lambda m, x: m.l(torch.tensor(x[0].tolist(), dtype=x.dtype)),
    "mean of what was learned": lambda m, x: m.l(m.i(x).mean(0)),
    "the neighbour": lambda m, x: m.l(x).flip(0),
    "batch statistics": lambda m, x: F.batch_norm(m.l(x).mT, None, None, training=True).mT,
    "softmax over samples": lambda m, x: torch.softmax(m.l(x), 0),
}  # fmt: skip
# Statistics of data concern all parameters: a sample alone has others.
OF_DATA = {"mean of the inputs", "a constant scaled by the batch"}


@fallback_mode
@pytest.mark.parametrize("t", [T, N])
@pytest.mark.parametrize("how", MIXED)
def test_what_is_computed_from_several_samples_is_refused(how, t, options):
    model = constant(lambda m, x: m.o(torch.tanh(m.i(x) + MIXED[how](m, x))), (t, D),
                     l=nn.Linear(D, D, bias=False), i=nn.Linear(D, D))  # fmt: skip
    spared = set() if how in OF_DATA else {"o.weight"}
    refused(model, square, torch.randn(N, t, D), names={"l.weight"}, spared=spared, **options)


@fallback_mode
def test_a_row_of_the_samples_own_ids_is_theirs(options):
    """Given once more, it looks like positions; it is a view of the same memory."""
    model = placed(lambda m, i, p: m.t(p) - m.t(i).mean(0))
    refused(model, lambda m, i: square(m, i, i[:1]), tokens(), names={"t.weight"}, **options)


@a_few_modes
def test_a_penalty_on_the_table_is_refused(options):
    model = placed(lambda m, i: m.p(torch.arange(i.shape[1])))
    loss = lambda m, i: square(m, i) + m.p.weight.square().sum()  # noqa: E731
    refused(model, loss, tokens(), names={"p.weight"}, **options)
