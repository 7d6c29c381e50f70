"""What all samples share: position tables, bare parameters, modules called without samples."""

import pytest
import torch
import torch.nn.functional as F
from attach_oracle import (
    Model,
    a_few_modes,
    check,
    close_named,
    each_of,
    exact_or_refused,
    fallback_mode,
    loop,
    refused,
    square,
    square_second,
)
from broadcast_models import (
    TOKENS,
    D,
    N,
    Patches,
    T,
    against_all,
    constant,
    positional,
    relative,
    tokens,
)
from torch import nn

import torchgradx
from torchgradx import ops

sizes = pytest.mark.parametrize(("n", "t"), [(N, T), (N, N), (D, T), (1, T), (T, 1), (2, 2 * N)])
IDS = {
    "[T]": torch.arange,
    "[1, T]": lambda t: torch.arange(t)[None],
    "repeated": lambda t: torch.arange(t) // 2,
    "reversed": lambda t: torch.arange(t).flip(0)[None],
    "distances": lambda t: (torch.arange(t)[:, None] - torch.arange(t)).abs()[0],
}


@fallback_mode
@sizes
@pytest.mark.parametrize("ids", IDS)
def test_a_position_table_is_exact(ids, n, t, options):
    check(positional(IDS[ids]), square, tokens(n, t), **options)


@fallback_mode
@pytest.mark.parametrize("ids", ["[T]", "[1, T]", "repeated, [1, T]", "a mask", "a mask [T]"])
def test_what_a_model_is_called_with_for_all_samples_is_of_none(ids, options):
    """Ids and masks; of as many positions as samples there may be refusals."""
    given = {
        "[T]": torch.arange,
        "[1, T]": lambda t: torch.arange(t)[None],
        "repeated, [1, T]": lambda t: (torch.arange(t) // 2)[None],
        "a mask": lambda t: torch.arange(t)[None] > 1,
        "a mask [T]": lambda t: torch.arange(t) > 1,
    }[ids]
    model = Model(lambda m, i, p: m.o(torch.tanh(m.t(i) + m.p(p.long()))),
                  t=nn.Embedding(TOKENS, D), p=nn.Embedding(2 * N, D),
                  o=nn.Linear(D, 2))  # fmt: skip
    for n, t in [(N, T), (N, 2 * N), (1, T), (N, 1), (2, T)]:
        check(model, lambda m, i: square(m, i, given(i.shape[1])), tokens(n, t), **options)
    exact_or_refused(model, lambda m, i: square(m, i, given(N)), tokens(N, N), **options)


@a_few_modes
@pytest.mark.parametrize("how", [{"padding_idx": 1}, {"scale_grad_by_freq": True},
                                 {"sparse": True}], ids=str)  # fmt: skip
@pytest.mark.parametrize("ids", ["[1, T]", "repeated"])
def test_a_tables_own_options_hold(ids, how, options):
    if "sparse" in how and not options.get("weight_grad", True):
        pytest.skip("the oracle's comparison of .grad is of dense tensors")
    check(positional(IDS[ids], **how), square, tokens(), **options)


@a_few_modes
def test_positions_of_a_sequence_first_model_are_exact(options):
    model = Model(lambda m, i: m.o(torch.tanh(m.t(i) + m.p(torch.arange(len(i)))[:, None])),
                  t=nn.Embedding(TOKENS, D), p=nn.Embedding(2 * N, D),
                  o=nn.Linear(D, 2))  # fmt: skip
    for t in (T, N):
        check(model, square_second, tokens(N, t).T, dims=1, batch_dim=1, **options)


@fallback_mode
@sizes
@pytest.mark.parametrize("read", [False, True])
@pytest.mark.parametrize("shared", [False, True])
def test_relative_positions_through_modules_are_exact(shared, read, n, t, options):
    """`shared`: the same Linear for samples and for positions, so terms of both kinds cross."""
    model = relative(shared, read)
    if shared:
        del model.r
    check(model, square, torch.randn(n, t, D), **options)


@fallback_mode
def test_a_table_read_as_a_tensor_and_penalised_is_refused(options):
    model = relative(False, True)

    def loss(m, x):
        return square(m, x) + m.p.weight.square().sum()

    refused(model, loss, torch.randn(N, T, D), names=["p.weight"], spared=["q.weight"], **options)


@fallback_mode
def test_a_parameter_of_one_number_is_exact(options):
    model = Model(lambda m, x: m.o(x) * m.s, s=torch.randn(()), o=nn.Linear(D, 2))
    check(model, square, torch.randn(N, D), **options)


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


@fallback_mode
@pytest.mark.parametrize("shape", [(N, D), (N, T, D), (D, N, D)], ids=str)
@pytest.mark.parametrize("rows", [N, T, D])
def test_a_table_that_every_sample_is_held_against_is_exact(rows, shape, options):
    check(
        constant(against_all, (rows, D), l=nn.Linear(D, D)), square, torch.randn(shape), **options
    )


def made(how):
    """A weight that modules compute from something without samples."""

    def forward(m, x):
        w = torch.tanh(m.g(m.c))
        y = x @ w.view(D, D) if how == "matmul" else F.linear(x, w.view(D, D), m.h(m.c)[0])
        return m.o(torch.tanh(y))

    return constant(forward, (1, 3), g=nn.Linear(3, D * D), h=nn.Linear(3, D))


@a_few_modes
@pytest.mark.parametrize("shape", [(N, D), (N, T, D), (N, N, D)], ids=str)
@pytest.mark.parametrize("how", ["matmul", "linear"])
def test_a_weight_made_by_modules_is_exact(how, shape, options):
    model = made(how)
    if how == "matmul":
        del model.h
    if shape == (N, N, D):  # outputs [N, N, ...] may have the samples in either
        exact_or_refused(model, square, torch.randn(shape), **options)
    else:
        check(model, square, torch.randn(shape), **options)


@a_few_modes
@pytest.mark.parametrize("kind", ["conv", "lstm", "norm"])
def test_any_module_may_be_called_without_samples(kind, options):
    make = {"conv": lambda: nn.Conv1d(2, T, 3, padding=1), "norm": lambda: nn.GroupNorm(1, 2),
            "lstm": lambda: nn.LSTM(D, T, batch_first=True)}[kind]  # fmt: skip

    def forward(m, x):
        y = m.l(m.c)
        y = y[0] if isinstance(y, tuple) else y
        return m.o(torch.tanh(x + y.mean((0, 1)).sum()))

    check(constant(forward, (1, 2, D), l=make()), square, torch.randn(N, T, D), **options)


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


@a_few_modes
def test_a_bare_parameter_used_twice_adds_up(options):
    model = Model(lambda m, x: m.o(torch.tanh(m.i(x) + m.w) * m.w), w=torch.randn(T, D),
                  i=nn.Linear(D, D), o=nn.Linear(D, 2))  # fmt: skip
    check(model, square, torch.randn(N, T, D), **options)


@a_few_modes
def test_a_bare_parameter_tied_to_a_module_adds_up(options):
    model = Model(lambda m, x: m.o(torch.tanh(m.l(x) + x @ m.w)), w=torch.randn(D, D),
                  l=nn.Linear(D, D), o=nn.Linear(D, 2))  # fmt: skip
    model.l.weight = model.w
    exact_or_refused(model, square, torch.randn(N, T, D), **options)


@fallback_mode
def test_a_vision_transformers_own_parameters_are_exact_and_it_runs_once(options):
    model, x = Patches(), torch.randn(N, T, 3)
    check(model, square, x, **options)
    with torchgradx.attach(model, **options) as probe:
        square(model, x).backward()
        probe.norms()
        assert "vmap: no kernel for Patches" not in probe.explain()


any_mode = each_of([{}, {"fused": False}, {"weight_grad": False}])


def language(m, ids):
    h = m.embed(ids) + m.place(torch.arange(T)) * m.gain
    h = h + torch.tanh(m.mix(h)) if m.deep else h
    h = m.into(m.time(h)[0][:, -1] if m.deep else h[:, -1])
    return F.linear(h, m.embed.weight) if ops.NATIVE else h


def language_model():
    made = Model(
        language,
        embed=nn.Embedding(TOKENS, D),
        place=nn.Embedding(T, D),
        gain=torch.randn(D),
        mix=nn.Linear(D, D),
        time=nn.LSTM(D, D, batch_first=True),
        into=nn.Linear(D, D),
    ).double()
    made.deep = True
    return made


def exact_steps(probe, net, how_many=2):
    for _ in range(how_many):
        ids = torch.randint(0, TOKENS, (N, T))
        want = loop(net, square, ids)
        square(net, ids).backward()
        close_named(probe.norms(per="parameter"), want)


@any_mode
@pytest.mark.parametrize("frozen", ["embed", "place", "gain", "mix", "time", "into"])
def test_parts_frozen_between_steps_and_thawed_again(frozen, options):
    net = language_model()
    live = [p for name, p in net.named_parameters() if name.partition(".")[0] == frozen]
    with torchgradx.attach(net, **options) as probe:
        for on in (True, False, True, False):
            for p in live:
                p.requires_grad_(on)
            exact_steps(probe, net)


@any_mode
def test_layers_left_out_in_some_steps(options):
    """The root's own use has another number then."""
    net = language_model()
    with torchgradx.attach(net, **options) as probe:
        for deep in (True, False, True, False):
            net.deep = deep
            exact_steps(probe, net)


@a_few_modes
def test_a_root_with_a_table_whose_blocks_are_dropped(options):
    def blocks(m, x):
        h = m.i(x) + m.table
        for block in m.blocks[: m.depth]:
            h = h + torch.tanh(block(h))
        return m.o(h)

    net = Model(blocks, i=nn.Linear(3, D), o=nn.Linear(D, 2), table=torch.randn(T, D),
                blocks=nn.ModuleList(nn.Linear(D, D) for _ in range(3))).double()  # fmt: skip
    with torchgradx.attach(net, **options) as probe:
        for net.depth in (3, 1, 2, 0, 3):
            x = torch.randn(N, T, 3).double()
            want = loop(net, square, x)
            square(net, x).backward()
            close_named(probe.norms(per="parameter"), want)
