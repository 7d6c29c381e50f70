"""Where the samples are in the rows of layers: said, proven, or refused; never guessed from equal
sizes, nor taken from a batch of another size."""

import pytest
import torch
import torch.nn.functional as F
from attach_models import Model, identity, square, square_second
from attach_modes import a_few_modes, every_mode, fallback_mode
from attach_oracle import check
from attach_steps import exact_or_refused, exact_steps, refused, step_or_refused
from test_steps_cost import t5
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence
from torch.utils.checkpoint import checkpoint

import torchgradx

N = 4


def flattened(sequence_first, kind=nn.Linear):
    def forward(m, x):
        x = x.transpose(0, 1) if sequence_first else x
        y = m.b(torch.tanh(m.a(x.reshape(-1, *x.shape[2:]))))
        y = y.unflatten(0, x.shape[:2])
        return y.transpose(0, 1) if sequence_first else y

    if kind is nn.Conv2d:
        return Model(forward, a=nn.Conv2d(2, 3, 3), b=nn.Conv2d(3, 2, 1))
    return Model(forward, a=nn.Linear(3, 4), b=nn.Linear(4, 2))


def transposed():
    return Model(
        lambda m, x: m.out(m.b(torch.tanh(m.a(m.into(x).transpose(0, 1)))).transpose(0, 1)),
        into=nn.Linear(3, 4), a=nn.Linear(4, 4), b=nn.Linear(4, 4), out=nn.Linear(4, 2),
    )  # fmt: skip


@every_mode
@pytest.mark.parametrize("positions", [5, N, 1])
@pytest.mark.parametrize("layout", ["batch", "sequence"])
def test_flattened_rows_whose_layout_is_said_are_exact(layout, positions, options):
    model = flattened(layout == "sequence")
    said, by_pattern = dict.fromkeys("ab", layout), {"0.*": layout}
    check(model, square, torch.randn(N, positions, 3), layout=said, **options)
    model = nn.Sequential(model, nn.Tanh())
    check(model, square, torch.randn(N, positions, 3), layout=by_pattern, **options)


@every_mode
@pytest.mark.parametrize("positions", [5, N])
def test_sequence_first_models_are_exact_with_batch_dim_1(positions, options):
    model = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 2))
    check(model, square_second, torch.randn(positions, N, 3), dims=1, batch_dim=1, **options)


@fallback_mode
@pytest.mark.parametrize("positions", [5, N])
def test_fallback_layers_of_sequence_first_models_are_exact(positions, options):
    model = Model(lambda m, x: m.head(m.rnn(m.norm(m.table(x)))[0]), table=nn.Embedding(7, 4),
                  norm=nn.LayerNorm(4), rnn=nn.GRU(4, 3), head=nn.Linear(3, 2))  # fmt: skip
    x = torch.randint(0, 7, (positions, N))
    check(model, square_second, x, dims=1, batch_dim=1, **options)


def routed(m, x):
    h = m.r(x).flatten(0, 1)
    first = h[:, 0] > 0
    y = torch.zeros_like(h)
    for expert, rows in ((m.e0, first), (m.e1, ~first)):
        y = y.index_put((rows.nonzero()[:, 0],), expert(h[rows]))
    return y.view_as(x)


def experts():
    return Model(routed, r=nn.Linear(3, 3), e0=nn.Linear(3, 3), e1=nn.Linear(3, 3))


UNSAID = {
    "rows n*T+t": (lambda: flattened(False), (N, 5, 3)),
    "rows t*N+n": (lambda: flattened(True), (N, 5, 3)),
    "rows n*T+t, T = N": (lambda: flattened(False), (N, N, 3)),
    "rows t*N+n, T = N": (lambda: flattened(True), (N, N, 3)),
    "t*N+n, N lines each": (lambda: flattened(True), (N, 3, N, 3)),
    "images t*N+n": (lambda: flattened(True, nn.Conv2d), (N, 3, 2, 5, 5)),
    "t*N+n under a norm, N lines each": (
        lambda: Model(lambda m, x: F.group_norm(x.transpose(0, 1).flatten(0, 1), 1, m.w, m.b)
                      .unflatten(0, (-1, len(x))).transpose(0, 1),
                      w=torch.randn(2), b=torch.randn(2)), (N, 3, 2, N, 5)),
    "second below a 1, T = N": (
        lambda: Model(lambda m, x: m.a(x.transpose(0, 1)[None])[0].transpose(0, 1),
                      a=nn.Linear(3, 4)), (N, N, 3)),
    "transposed": (transposed, (N, 5, 3)),
    "transposed, T = N": (transposed, (N, N, 3)),
    "experts": (experts, (N, 5, 3)),
    "a weight from the left, D = N": (
        lambda: Model(lambda m, x: identity(lambda g: g)((m.w @ m.l(x).flatten(0, 1).T).T)
                      .reshape(len(x), -1), l=nn.Linear(3, N), w=torch.randn(N, N)), (N, 5, 3)),
    "pooled, T = N": (
        lambda: Model(lambda m, x: m.head(torch.tanh(m.l(x)).mean(1)), l=nn.Linear(3, N),
                      head=nn.Linear(N, 2)), (N, N, 3)),
    "tokens mixed, T = D = N": (
        lambda: Model(lambda m, x: m.b(torch.tanh(m.a(x.transpose(1, 2))).transpose(1, 2)),
                      a=nn.Linear(N, N), b=nn.Linear(N, 2)), (N, N, N)),
}  # fmt: skip


@a_few_modes
@pytest.mark.parametrize("name", UNSAID)
def test_what_is_not_said_is_exact_or_refused_and_never_wrong(name, options):
    make, shape = UNSAID[name]
    refusal = exact_or_refused(make(), square, torch.randn(shape), **options)
    if refusal is not None and ("rows" in name or "images" in name or "transposed" in name):
        assert "layout" in str(refusal), f"what to do is not in: {refusal}"


INTERIOR = {  # rows [T N S], which have the order of a layout at T = 1 or S = 1 alone
    "a layer": lambda m, h: m.n(torch.tanh(m.a(h))),
    "a parameter": lambda m, h: torch.tanh(torch.tanh(h) * m.w),
    "seen by no proof": lambda m, h: m.a(h),
}


@a_few_modes
@pytest.mark.parametrize("first", [(4, 1), (1, 2), (4, 2)])
@pytest.mark.parametrize("how", INTERIOR)
def test_flat_rows_with_the_samples_inside_are_exact_or_refused(how, first, options):
    def forward(m, x):  # [N, T, S, 3]
        x = x.transpose(0, 1)
        y = m.b(INTERIOR[how](m, x.reshape(-1, 3)).view(x.shape).mean((0, 2)))
        return identity(lambda grad: grad)(y) if how == "seen by no proof" else y

    parts = {"a": nn.Linear(3, 3), "n": nn.LayerNorm(3), "b": nn.Linear(3, 2), "w": torch.randn(3)}
    model = Model(forward, **parts).double()
    with torchgradx.attach(model, **options) as probe:
        for t, s in (first, first, (2, 2), (4, 2), (5, 2)):
            step_or_refused(probe, model, torch.randn(3, t, s, 3).double())


def test_rows_of_nan_prove_no_layout():
    model = Model(lambda m, x: m.l(x.view(3, -1, 3)).exp().view(len(x), -1), l=nn.Linear(3, 2))
    with torchgradx.attach(model.double()) as probe:
        model(torch.full((N, 6, 3), torch.nan).double())
        step_or_refused(probe, model, torch.randn(N, 6, 3).double())


@a_few_modes
def test_a_model_of_which_every_size_is_the_batch_size_needs_no_layout(options):
    model = nn.Sequential(nn.Linear(N, N), nn.Tanh(), nn.Linear(N, N))
    check(model, square, torch.randn(N, N), **options)
    check(model, square, torch.randn(N, N, N), **options)
    images = nn.Sequential(nn.Conv2d(N, N, 3, padding=1), nn.Flatten(), nn.Linear(N**3, N))
    check(images, square, torch.randn(N, N, N, N), **options)


BROADCAST = {
    "positions, then ids": lambda m, x: m(torch.ones(1, 6, 3, dtype=x.dtype), x),
    "one number, then inputs": lambda m, x: m(torch.ones(1, dtype=x.dtype), x),
    "by keyword": lambda m, x: m(p=torch.ones(1, 6, 3, dtype=x.dtype), x=x),
}
RETURNED = {
    "outputs": lambda y: y,
    "outputs, positions first": lambda y: y.transpose(0, 1),
    "a loss": lambda y: y.square().sum(),
}


@a_few_modes
@pytest.mark.parametrize("gives", RETURNED)
@pytest.mark.parametrize("call", BROADCAST)
def test_a_first_tensor_that_is_broadcast_is_not_taken_for_the_batch(call, gives, options):
    """One sample for the model, it would be: the norm of all gradients' sum."""
    if gives != "outputs" and call.startswith("one number"):
        pytest.skip("of one sample, as far as one can see")
    model = Model(lambda m, p, x: RETURNED[gives](m.l(x * p)), l=nn.Linear(3, 2))
    x = torch.randn(N, 6, 3)
    loss = lambda m, x: BROADCAST[call](m, x).square().sum() / len(x)  # noqa: E731
    refused(model, loss, x, names=["l.weight", "l.bias"], match="batch_size=", **options)
    check(model, loss, torch.randn(1, 6, 3), **options)
    with torchgradx.attach(model.double(), batch_size=N, **options) as probe:
        loss(model, x.double()).backward()
        assert len(probe.norms()) == N


@a_few_modes
@pytest.mark.parametrize("size", [N, lambda args, kwargs: len(args[1]["x"])], ids=["said", "asked"])
def test_the_batch_size_may_be_said_or_computed(size, options):
    model = Model(lambda m, heat, inputs: m.l(inputs["x"]) / heat, l=nn.Linear(3, 2)).double()
    heat = torch.full((1,), 2.0).double()

    def loss(model, x):
        return square(lambda t: model(heat, {"x": t}), x)

    exact_steps(model, torch.randn(N, 6, 3).double(), loss=loss, batch_size=size, **options)


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


@a_few_modes
def test_each_length_is_exact_whichever_came_before(options):
    def forward(m, x):
        return m.o((m.i(x.transpose(0, 1)) + m.places[: x.shape[1]]).transpose(0, 1))

    model = Model(forward, i=nn.Linear(3, 6), o=nn.Linear(6, 5), places=torch.randn(8, 1, 6))
    batches = [torch.randn(N, length, 3).double() for length in (1, 6, 1, 8)]
    exact_steps(model.double(), *batches, **options)


@pytest.mark.parametrize("seed", range(2))
def test_a_long_bias_sum_of_the_frameworks_own_is_not_refused(seed):
    """65,536 terms, which the framework adds up in float32."""
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Conv2d(8, 32, 3, 1, 1), nn.AdaptiveAvgPool2d(1), nn.Flatten())
    x, y = torch.randn(16, 8, 64, 64), torch.randint(0, 32, (16,))
    with torchgradx.attach(model, fused=False) as probe:
        F.cross_entropy(model(x), y).backward()
        assert len(probe.norms()) == 16


@pytest.mark.parametrize("lengths", [[(8, 8, 8), (8, 5, 6)], [(8, 5, 6), (8, 8, 8)]])
def test_t5_with_and_without_padding(lengths):
    """The mask is dropped when nothing is padded, so that the bias is broadcast otherwise."""
    model = t5()[0].train().double()

    def loss(m, x, mask, d, y):
        out = m(input_ids=x, attention_mask=mask, decoder_input_ids=d).logits
        return F.cross_entropy(out.flatten(0, 1), y.flatten())

    batches = []
    for lens in lengths * 2:
        x, d, y = (torch.randint(3, 61, (3, 8)) for _ in range(3))
        batches.append((x, (torch.arange(8)[None] < torch.tensor(lens)[:, None]).long(), d, y))
    exact_steps(model, *batches, loss=loss, rtol=1e-5)  # its norms are float32


# ---- Models that mix, sort, cut and join anything but their samples, or return their loss --------
T, EDGES = 6, 9


def linears(**sizes):
    return {name: nn.Linear(*size) for name, size in sizes.items()}


def ids(high, *sizes):
    return torch.randint(0, high, sizes)


def packed(m, x, lengths):
    return m.g(pack_padded_sequence(x, lengths, True, enforce_sorted=False))[1][0]


def masked_tokens(m, x):
    """As masked autoencoders: a few of each sample's tokens, in an order of their own, and back."""
    order = x[:, :, 0].argsort(1)
    h = torch.tanh(m.l(x.gather(1, order[:, :3, None].expand(-1, -1, 3))))
    h = torch.cat([h, h.new_zeros(len(x), x.shape[1] - 3, 3)], 1)
    return m.o(h.gather(1, order.argsort(1)[:, :, None].expand(-1, -1, 3))).flatten(1)


def graphs(m, x, start, end):
    """Each sample a graph: its nodes and edges flattened, by an offset."""
    offset = torch.arange(len(x))[:, None] * x.shape[1]
    h, start, end = m.l(x).flatten(0, 1), (start + offset).flatten(), (end + offset).flatten()
    return m.o(torch.zeros_like(h).index_add(0, end, h[start]).tanh()).view(len(x), -1)


def images_among_words(m, words, image):
    """As LLaVA: all frozen but what comes after."""
    among = (torch.arange(words.shape[1]) < 2)[None, :, None] & (words >= 0)[:, :, None]
    h = m.e(words)
    return m.l(torch.tanh(h.masked_scatter(among.expand_as(h), m.v(image)))).flatten(1)


def positions_mixed(m, x):
    t = x.shape[1]
    return m.l(torch.ones(t, t).tril().to(x) @ x).flatten(1)


def shuffled_keys(m, x):
    """As momentum encoders have them; here of the layer that is trained."""
    with torch.no_grad():
        order = torch.randperm(len(x)).flip(0)
        keys = m.l(x[order])[order.argsort()]
    return m.l(x) * keys


LENGTHS = torch.tensor([3, 6, 2, 4])
USUAL = {
    "packed": (packed, {"g": nn.GRU(3, 2, batch_first=True)}, (N, T, 3), (LENGTHS,)),
    "masked tokens, T = N": (masked_tokens, linears(l=(3, 3), o=(3, 2)), (N, N, 3), ()),
    "graphs": (graphs, linears(l=(3, 4), o=(4, 2)), (N, T, 3), (ids(T, N, EDGES),) * 2),
    "images among words": (
        images_among_words, {"e": nn.Embedding(7, 3).requires_grad_(False),
                             "v": nn.Linear(5, 3).requires_grad_(False), "l": nn.Linear(3, 2)},
        ids(7, N, T), (torch.randn(N, 2, 5),)),
    "positions mixed, T = N": (positions_mixed, linears(l=(3, 2)), (N, N, 3), ()),
    "shuffled keys": (shuffled_keys, linears(l=(3, 2)), (N, 3), ()),
}  # fmt: skip


@a_few_modes
@pytest.mark.parametrize("name", USUAL)
def test_what_orders_anything_but_the_samples_is_exact(name, options):
    forward, parts, x, others = USUAL[name]
    x = x if isinstance(x, torch.Tensor) else torch.randn(x)
    check(Model(forward, **parts), square, x, *others, **options)


EACH, WORDS, CLASSES = 5, 7, 3


def each(logits, labels):
    return F.cross_entropy(logits, labels, reduction="none")


def focal(logits, labels):
    rows = each(logits, labels)
    return ((1 - torch.exp(-rows)).square() * rows).mean()


def columns_in_turn(logits, labels):
    loss = logits.new_zeros(())
    for column in logits.unbind(1):
        loss += 0.5 * column.square().mean() / logits.new_tensor(2.0)
    return torch.stack([loss, each(logits, labels).mean()]) @ logits.new_tensor([1.0, 2.0])


def masked(logits, labels):
    rows = each(logits.mT, labels) * (labels != 0)
    return (rows.sum(1) / (labels != 0).sum(1)).mean()


LOSSES = {  # of a sample's own classes, or of each of its words
    "focal": (focal, ()),
    "over a count": (lambda o, y: each(o, y).sum() / (y >= 0).sum().clamp(min=1), ()),
    "several in turn": (columns_in_turn, ()),
    "words in rows": (lambda o, y: each(o.flatten(0, 1), y.flatten()).view(y.shape).mean(1).mean(),
                      (WORDS,)),
    "words, masked": (masked, (WORDS,)),
}  # fmt: skip


@a_few_modes
@pytest.mark.parametrize("name", LOSSES)
def test_a_loss_that_keeps_the_samples_until_their_mean_is_exact(name, options):
    loss, words = LOSSES[name]
    model = Model(lambda m, x, y: loss(m.b(torch.tanh(m.a(x))), y),
                  a=nn.Linear(4, 7), b=nn.Linear(7, CLASSES))  # fmt: skip
    y = torch.randint(0, CLASSES, (EACH, *words))
    if words:
        y[:, 0] = 1
    check(model, lambda m, x, y: m(x, y), torch.randn(EACH, *words, 4), y, **options)
