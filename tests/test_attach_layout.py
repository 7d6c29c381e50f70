"""Where the samples are: said, proven, or refused; never guessed from equal sizes."""

import pytest
import torch
from attach_oracle import (
    Model,
    a_few_modes,
    as_dtype,
    check,
    close_named,
    every_mode,
    exact_or_refused,
    fallback_mode,
    loop,
    refused,
    square,
    square_second,
)
from torch import nn
from torch.utils.checkpoint import checkpoint

import torchgradx

N = 4


def flattened(sequence_first, kind=nn.Linear):
    """Layers fed rows n*T+t, or t*N+n."""

    def forward(m, x):
        x = x.transpose(0, 1) if sequence_first else x
        y = m.b(torch.tanh(m.a(x.reshape(-1, *x.shape[2:]))))
        y = y.unflatten(0, x.shape[:2])
        return y.transpose(0, 1) if sequence_first else y

    if kind is nn.Conv2d:
        return Model(forward, a=nn.Conv2d(2, 3, 3), b=nn.Conv2d(3, 2, 1))
    return Model(forward, a=nn.Linear(3, 4), b=nn.Linear(4, 2))


def transposed():
    """A block that works on [T, N, D] inside a batch-first model."""
    return Model(
        lambda m, x: m.out(m.b(torch.tanh(m.a(m.into(x).transpose(0, 1)))).transpose(0, 1)),
        into=nn.Linear(3, 4), a=nn.Linear(4, 4), b=nn.Linear(4, 4), out=nn.Linear(4, 2),
    )  # fmt: skip


SAID = {
    "batch": {"a": "batch", "b": "batch"},
    "sequence": {"a": "sequence", "b": "sequence"},
}


@every_mode
@pytest.mark.parametrize("positions", [5, N, 1])
@pytest.mark.parametrize("layout", SAID)
def test_flattened_rows_whose_layout_is_said_are_exact(layout, positions, options):
    model = flattened(layout == "sequence")
    check(model, square, torch.randn(N, positions, 3), layout=SAID[layout], **options)


@every_mode
@pytest.mark.parametrize("layout", SAID)
def test_flattened_images_whose_layout_is_said_are_exact(layout, options):
    model = flattened(layout == "sequence", nn.Conv2d)
    check(model, square, torch.randn(N, 3, 2, 5, 5), layout=SAID[layout], **options)


@every_mode
@pytest.mark.parametrize("positions", [5, N])
def test_transposed_blocks_whose_layout_is_said_are_exact(positions, options):
    check(transposed(), square, torch.randn(N, positions, 3), layout=SAID["sequence"], **options)


@fallback_mode
@pytest.mark.parametrize("positions", [5, N])
def test_the_layout_of_a_fallback_layer_can_be_said(positions, options):
    model = Model(lambda m, x: m.norm(m.l(x).transpose(0, 1)).square().transpose(0, 1),
                  l=nn.Linear(3, 4), norm=nn.LayerNorm(4))  # fmt: skip
    layout = {"norm": "sequence"}
    check(model, square, torch.randn(N, positions, 3), layout=layout, **options)


def test_a_layout_is_said_by_a_pattern_too():
    model = nn.Sequential(flattened(True), nn.Tanh())
    check(model, square, torch.randn(N, N, 3), layout={"0.*": "sequence"})
    check(model, square, torch.randn(N, N, 3), layout={"*": "sequence"})


@a_few_modes
def test_two_views_of_each_sample_stacked_along_the_batch_are_rows_of_a_sequence(options):
    model = Model(lambda m, x: torch.mul(*m.a(torch.cat([x, x * 2 + 1])).chunk(2)),
                  a=nn.Linear(3, 4))  # fmt: skip
    check(model, square, torch.randn(N, 3), layout={"a": "sequence"}, **options)


@every_mode
@pytest.mark.parametrize("positions", [5, N])
def test_sequence_first_models_are_exact_with_batch_dim_1(positions, options):
    model = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 2))
    x = torch.randn(positions, N, 3)
    check(model, square_second, x, dims=1, batch_dim=1, **options)


@fallback_mode
@pytest.mark.parametrize("positions", [5, N])
def test_fallback_layers_of_sequence_first_models_are_exact(positions, options):
    model = Model(lambda m, x: m.head(m.rnn(m.norm(m.table(x)))[0]), table=nn.Embedding(7, 4),
                  norm=nn.LayerNorm(4), rnn=nn.GRU(4, 3), head=nn.Linear(3, 2))  # fmt: skip
    x = torch.randint(0, 7, (positions, N))
    check(model, square_second, x, dims=1, batch_dim=1, **options)


@a_few_modes
def test_a_layout_overrides_the_batch_dimension_of_the_model(options):
    model = Model(lambda m, x: m.b(torch.tanh(m.a(x)).transpose(0, 1)).transpose(0, 1),
                  a=nn.Linear(3, 4), b=nn.Linear(4, 2))  # fmt: skip
    x = torch.randn(N, N, 3)
    check(model, square_second, x, dims=1, batch_dim=1, layout={"b": "batch"}, **options)


@fallback_mode
@pytest.mark.parametrize("batch_first", [True, False])
@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU])
def test_a_recurrent_layers_own_batch_first_needs_no_saying(kind, batch_first, options):
    def forward(m, x):
        if batch_first:
            return m.rnn(x)[0]
        return m.rnn(x.transpose(0, 1))[0].transpose(0, 1)

    model = Model(forward, rnn=kind(3, 4, batch_first=batch_first))
    for positions in (5, N):
        check(model, square, torch.randn(N, positions, 3), **options)


def table(rows, use):
    """A table of rows that no sample owns goes through a Linear and meets every sample."""
    model = Model(use, l=nn.Linear(3, 3), head=nn.Linear(3, 2))
    model.register_buffer("rows", torch.randn(rows, 3))
    return model


def against_all(m, x):
    return m.head(torch.softmax(x @ m.l(m.rows).T, -1) @ m.rows)


def added(m, x):
    return m.head(torch.tanh(x + m.l(m.rows)))


def positional(positions, ids):
    return Model(lambda m, i: m.l(torch.tanh(m.t(i) + m.p(ids(i.shape[1])))),
                 t=nn.Embedding(7, 4), p=nn.Embedding(positions, 4), l=nn.Linear(4, 2))  # fmt: skip


def routed(m, x):
    """Two experts, each fed the rows that chose it."""
    h = m.r(x).flatten(0, 1)
    first = h[:, 0] > 0
    y = torch.zeros_like(h)
    for expert, rows in ((m.e0, first), (m.e1, ~first)):
        y = y.index_put((rows.nonzero()[:, 0],), expert(h[rows]))
    return y.view_as(x)


def experts():
    return Model(routed, r=nn.Linear(3, 3), e0=nn.Linear(3, 3), e1=nn.Linear(3, 3))


def pooled():
    return Model(lambda m, x: m.head(torch.tanh(m.l(x)).mean(1)), l=nn.Linear(3, N),
                 head=nn.Linear(N, 2))  # fmt: skip


def swapped():
    """Mixes tokens, as in an MLP-mixer: [N, T, D] and [N, D, T], with T = D = N."""
    return Model(lambda m, x: m.b(torch.tanh(m.a(x.transpose(1, 2))).transpose(1, 2)),
                 a=nn.Linear(N, N), b=nn.Linear(N, 2))  # fmt: skip


UNSAID = {
    "rows n*T+t": (lambda: flattened(False), (N, 5, 3)),
    "rows t*N+n": (lambda: flattened(True), (N, 5, 3)),
    "rows n*T+t, T = N": (lambda: flattened(False), (N, N, 3)),
    "rows t*N+n, T = N": (lambda: flattened(True), (N, N, 3)),
    "images n*T+t": (lambda: flattened(False, nn.Conv2d), (N, 3, 2, 5, 5)),
    "images t*N+n": (lambda: flattened(True, nn.Conv2d), (N, 3, 2, 5, 5)),
    "transposed": (transposed, (N, 5, 3)),
    "transposed, T = N": (transposed, (N, N, 3)),
    "a table of 6 queries": (lambda: table(6, against_all), (N, 3)),
    "a table of N queries": (lambda: table(N, against_all), (N, 3)),
    "a table of N positions": (lambda: table(N, added), (N, N, 3)),
    "a table of T positions": (lambda: table(5, added), (N, 5, 3)),
    "position ids": (lambda: positional(5, torch.arange), (N, 5)),
    "position ids, T = N": (lambda: positional(N, torch.arange), (N, N)),
    "position ids [1, T]": (lambda: positional(5, lambda n: torch.arange(n)[None]), (N, 3)),
    "experts": (experts, (N, 5, 3)),
    "experts, one position": (experts, (N, 1, 3)),
    "pooled": (pooled, (N, 5, 3)),
    "pooled, T = N": (pooled, (N, N, 3)),
    "tokens mixed, T = D = N": (swapped, (N, N, N)),
}


def unsaid(name):
    make, shape = UNSAID[name]
    return make(), torch.randint(0, 7, shape) if "ids" in name else torch.randn(shape)


@a_few_modes
@pytest.mark.parametrize("name", UNSAID)
def test_what_is_not_said_is_exact_or_refused_and_never_wrong(name, options):
    model, x = unsaid(name)
    refusal = exact_or_refused(model, square, x, **options)
    if refusal is not None and ("rows" in name or "images" in name or "transposed" in name):
        assert "layout" in str(refusal), f"what to do is not in: {refusal}"


@a_few_modes
@pytest.mark.parametrize("name", UNSAID)
def test_a_verdict_on_one_batch_is_not_carried_to_another(name, options):
    """The same probe sees a batch of 7, then of N, then its samples in another order."""
    model, x = unsaid(name)
    model, x = model.double(), as_dtype(x, torch.float64)
    refusals = []
    try:
        probe = torchgradx.attach(model, **options)
    except torchgradx.CoverageError:
        return
    with probe:
        for batch in (torch.cat([x, x])[:7], x, x.flip(0)):
            want = loop(model, square, batch)
            square(model, batch).backward()
            try:
                close_named(probe.norms(per="parameter"), want)
            except torchgradx.CoverageError as error:
                refusals.append(error)
                probe.reset()
    assert all(error.parameters for error in refusals)


@pytest.mark.parametrize("name", ["pooled", "pooled, T = N", "tokens mixed, T = D = N"])
def test_ordinary_batch_first_models_need_no_layout(name):
    model, x = unsaid(name)
    check(model, square, x)


@a_few_modes
def test_a_model_of_which_every_size_is_the_batch_size_needs_no_layout(options):
    model = nn.Sequential(nn.Linear(N, N), nn.Tanh(), nn.Linear(N, N))
    check(model, square, torch.randn(N, N), **options)
    check(model, square, torch.randn(N, N, N), **options)
    images = nn.Sequential(nn.Conv2d(N, N, 3, padding=1), nn.Flatten(), nn.Linear(N**3, N))
    check(images, square, torch.randn(N, N, N, N), **options)


def test_the_batch_size_is_read_off_the_first_tensor_positional_or_keyword():
    model = Model(lambda m, flag=None, *, x, y=None: m.l(x), l=nn.Linear(3, 2))
    check(model, lambda m, x: square(lambda t: m(None, x=t, y=torch.ones(9)), x),
          torch.randn(N, 3))  # fmt: skip
    check(model, lambda m, x: square(lambda t: m("text", x=t), x), torch.randn(N, 6, 3))


BESIDE = {
    "states": lambda m, x: m(x, torch.ones(2, len(x), 3, dtype=x.dtype)),
    "a mask": lambda m, x: m(x, torch.ones(x.shape[1], x.shape[1], dtype=x.dtype)),
    "as many rows": lambda m, x: m(x, torch.ones(5, *x.shape[1:], dtype=x.dtype)),
}


@a_few_modes
@pytest.mark.parametrize("call", BESIDE)
def test_one_sample_beside_tensors_of_several_rows_is_exact(call, options):
    """Returned with what is theirs, too."""
    model = Model(lambda m, x, y: (m.l(x), m.l.weight.sum() * y), l=nn.Linear(3, 2))
    loss = lambda m, x: BESIDE[call](m, x)[0].square().sum((1, 2)).mean()  # noqa: E731
    check(model, loss, torch.randn(1, 6, 3), **options)


BROADCAST = {
    "positions, then ids": lambda m, x: m(torch.ones(1, 6, 3, dtype=x.dtype), x),
    "one number, then inputs": lambda m, x: m(torch.ones(1, dtype=x.dtype), x),
    "by keyword": lambda m, x: m(p=torch.ones(1, 6, 3, dtype=x.dtype), x=x),
}


GIVEN = {
    "outputs": lambda y: y,
    "outputs, positions first": lambda y: y.transpose(0, 1),
    "rows": lambda y: y.flatten(0, 1),
    "a loss": lambda y: y.square().sum(),
}


@a_few_modes
@pytest.mark.parametrize("gives", GIVEN)
@pytest.mark.parametrize("call", BROADCAST)
def test_a_first_tensor_that_is_broadcast_is_not_taken_for_the_batch(call, gives, options):
    """One sample for the model, it would be: the norm of all gradients' sum."""
    if gives != "outputs" and call.startswith("one number"):
        pytest.skip("of one sample, as far as one can see")
    model = Model(lambda m, p, x: GIVEN[gives](m.l(x * p)), l=nn.Linear(3, 2))
    x = torch.randn(N, 6, 3)
    loss = lambda m, x: BROADCAST[call](m, x).square().sum() / len(x)  # noqa: E731
    refused(model, loss, x, names=["l.weight", "l.bias"], match="batch_size=", **options)
    check(model, loss, torch.randn(1, 6, 3), **options)
    with torchgradx.attach(model.double(), batch_size=N, **options) as probe:
        loss(model, x.double()).backward()
        assert len(probe.norms()) == N


@a_few_modes
@pytest.mark.parametrize(
    "size", [N, lambda args, kwargs: args[1]["x"].shape[0]], ids=["said", "computed"]
)
def test_the_batch_size_may_be_said_or_computed(size, options):
    model = Model(lambda m, heat, inputs: m.l(inputs["x"]) / heat, l=nn.Linear(3, 2)).double()
    x, heat = torch.randn(N, 6, 3).double(), torch.full((1,), 2.0).double()

    def loss(model, x):
        return square(lambda t: model(heat, {"x": t}), x)

    want = loop(model, loss, x)
    with torchgradx.attach(model, batch_size=size, **options) as probe:
        loss(model, x).backward()
        close_named(probe.norms(per="parameter"), want)


def test_a_computed_batch_size_sees_the_keywords_and_may_change_from_pass_to_pass():
    model = Model(lambda m, *, inputs: m.l(inputs[0]), l=nn.Linear(3, 2)).double()

    def loss(model, x):
        return square(lambda t: model(inputs=[t]), x)

    size = lambda args, kwargs: len(kwargs["inputs"][0])  # noqa: E731
    with torchgradx.attach(model, batch_size=size) as probe:
        for n in (4, 6, 1):
            x = torch.randn(n, 3).double()
            want = loop(model, loss, x)
            loss(model, x).backward()
            close_named(probe.norms(per="parameter"), want)


INSIDE = {  # of a reentrant checkpoint, which forbids every proof
    "sequence first": lambda m, x: m.b(torch.tanh(m.a(x.transpose(0, 1)))).transpose(0, 1),
    "rows t*N+n": lambda m, x: m.b(x.transpose(0, 1).flatten(0, 1)).unflatten(0, (-1, len(x)))
    .transpose(0, 1),
    "a norm, sequence first": lambda m, x: m.n(torch.tanh(x.transpose(0, 1))).transpose(0, 1),
}  # fmt: skip


@a_few_modes
@pytest.mark.parametrize("T", [N, N + 1, 2 * N])
@pytest.mark.parametrize("inside", INSIDE)
def test_a_layout_inside_a_reentrant_checkpoint_is_said_or_refused(inside, T, options):
    def forward(m, x):
        return checkpoint(lambda y: INSIDE[inside](m, y), x.requires_grad_(), use_reentrant=True)

    model = Model(forward, a=nn.Linear(3, 3), b=nn.Linear(3, 3), n=nn.LayerNorm(3))
    x = torch.randn(N, T, 3)
    assert exact_or_refused(model, square, x, **options) is not None
    check(model, square, x, layout={"*": "sequence"}, **options)
