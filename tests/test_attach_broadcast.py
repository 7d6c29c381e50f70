"""What all samples share: modules called on something without samples, and bare parameters. Each is
exact, or refused by name where something computed from several samples only looks like it."""

import copy

import pytest
import torch
import torch.nn.functional as F
from attach_oracle import (
    Model,
    a_few_modes,
    both_dtypes,
    check,
    close_named,
    exact_or_refused,
    fallback_mode,
    loop,
    refused,
    seeded,  # noqa: F401
    square,
    square_second,
)
from torch import nn
from torch.utils.checkpoint import checkpoint

import torchgradx

N, T, D = 4, 5, 6
TOKENS = 7

sizes = pytest.mark.parametrize(("n", "t"), [(N, T), (N, N), (D, T), (1, T), (T, 1), (2, 2 * N)])


def tokens(n=N, t=T):
    return torch.randint(0, TOKENS, (n, t))


def positional(ids=lambda t: torch.arange(t)[None], **options):
    """A GPT's first layers."""
    return Model(lambda m, i: m.o(torch.tanh(m.t(i) + m.p(ids(i.shape[1])))),
                 t=nn.Embedding(TOKENS, D), p=nn.Embedding(2 * N, D, **options),
                 o=nn.Linear(D, 2))  # fmt: skip


def constant(use, shape=(T, D), **parts):
    """A model that holds a constant; `use` of (model, x)."""
    model = Model(use, **{"o": nn.Linear(D, 2), **parts})
    model.register_buffer("c", torch.randn(shape))
    return model


# ---- Modules called without samples --------------------------------------------------------------
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


def relative(shared, read=False):
    """Positions that go through LayerNorm and a Linear, then score each query, as in DeBERTa;
    `read`: rows of the table's weight, the table not being called."""

    def forward(m, x):
        t = x.shape[1]
        places = m.norm(m.p.weight[:t] if read else m.p(torch.arange(t)))
        keys = (m.k if shared else m.r)(places)
        scores = m.q(x) @ m.k(x).transpose(1, 2) + m.q(x) @ keys.T
        return m.o(torch.tanh(scores) @ x)  # a softmax has no gradient for a bias of keys

    return Model(forward, p=nn.Embedding(2 * N, D), norm=nn.LayerNorm(D), q=nn.Linear(D, D),
                 k=nn.Linear(D, D), r=nn.Linear(D, D), o=nn.Linear(D, 2))  # fmt: skip


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
        refused(model, loss, x, names=names, match="no output shows", **options)
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


def against_all(m, x):
    return m.o(torch.softmax(x @ m.l(m.c).T, -1) @ m.c)


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


# ---- Where samples come in -----------------------------------------------------------------------
WAYS = {
    "added": lambda x, s: x + s,
    "added, scaled": lambda x, s: torch.add(x, s, alpha=3),
    "added to": lambda x, s: torch.add(s, x, alpha=3),
    "subtracted": lambda x, s: torch.sub(x, s, alpha=3),
    "subtracted from": lambda x, s: s - x,
    "multiplied": lambda x, s: x * s,
    "multiplied by": lambda x, s: s * x,
    "divided by": lambda x, s: x / (s.square() + 1),
    "in place": lambda x, s: (x * 2).add_(s),
    "into a part": lambda x, s: _in_place(x * 2, lambda y: y[:, 1:].add_(s[1:])),
    "expanded": lambda x, s: x * s.expand(x.shape),
    "one row": lambda x, s: x + s[:1].expand(x.shape),
    "one number": lambda x, s: x * s.sum(),
    "one column": lambda x, s: x * s[:, :1],
    "repeated": lambda x, s: torch.cat([x, s.repeat(len(x), 1, 1)], 1),
    "one row repeated": lambda x, s: torch.cat([x, s[:1].repeat(len(x), 2, 1)], 1),
    "rows repeated": lambda x, s: x.flatten(0, 1).mul(s.repeat(len(x), 1)).view(x.shape),
    "each twice": lambda x, s: x * s.repeat_interleave(2, 0)[: x.shape[1]],
    "stacked": lambda x, s: torch.stack([s + x[k] for k in range(len(x))]),
    "matmul": lambda x, s: x @ s.T @ s,
    "addmm": lambda x, s: torch.addmm(s[0], x.flatten(0, 1), s.T @ s, beta=2, alpha=3).view_as(x),
    "einsum": lambda x, s: torch.einsum("ntd,sd->nts", x, s) @ s,
    "from the left": lambda x, s: torch.softmax(s @ s.T, -1) @ x,
    "bmm": lambda x, s: torch.bmm(x, s.T.expand(len(x), -1, -1)) @ s,
    "attention": lambda x, s: F.scaled_dot_product_attention(x[:, None], x[:, None], x[:, None],
                                                             attn_mask=s @ s.T)[:, 0],
    "maximum": lambda x, s: torch.maximum(x, s),
    "where": lambda x, s: torch.where(x > 0, x, s),
    "norm": lambda x, s: F.layer_norm(x, (D,), s[0], s[1]),
    "transposed": lambda x, s: (x.transpose(0, 1) + s[:, None]).transpose(0, 1),
    "rows t*N+n": lambda x, s: (x.transpose(0, 1).flatten(0, 1) * s.repeat_interleave(len(x), 0)
                                ).unflatten(0, (-1, len(x))).transpose(0, 1),
    "one row, rows t*N+n": lambda x, s: (x.transpose(0, 1).flatten(0, 1) * s[:1]
                                         ).unflatten(0, (-1, len(x))).transpose(0, 1),
    "indexed": lambda x, s: x + s[(x[..., 0] > 0).long()],
}  # fmt: skip
MAY_REFUSE = {"stacked"}  # each sample alone: its nodes hold no row for the others


def _in_place(y, change):
    change(y)
    return y


@a_few_modes
@pytest.mark.parametrize("positions", [T, N])
@pytest.mark.parametrize("way", WAYS)
def test_each_way_for_samples_to_come_in_is_exact(way, positions, options):
    def forward(m, x):
        return m.o(torch.tanh(WAYS[way](x, m.l(m.c))))

    model = constant(forward, (positions, D), l=nn.Linear(D, D))
    x = torch.randn(N, positions, D)
    if way in MAY_REFUSE:
        exact_or_refused(model, square, x, **options)
    else:
        check(model, square, x, **options)


MAY_RUN_AGAIN = {"divided by", "into a part", "stacked", "attention", "maximum", "where", "norm",
                 "indexed"}  # fmt: skip


@a_few_modes
@pytest.mark.parametrize("way", WAYS)
def test_a_bare_parameter_is_exact_without_running_its_owner_again(way, options):
    model = Model(lambda m, x: m.o(torch.tanh(WAYS[way](m.i(x), m.w))), w=torch.randn(T, D),
                  i=nn.Linear(D, D), o=nn.Linear(D, 2))  # fmt: skip
    x = torch.randn(N, T, D)
    if way in MAY_RUN_AGAIN:
        exact_or_refused(model, square, x, **options)
        return
    check(model, square, x, **options)
    with torchgradx.attach(model, **options) as probe:
        square(model, x).backward()
        probe.norms()
        assert "(root): Model  [w]\n  lifted" in probe.explain()


# ---- Several uses of a parameter -----------------------------------------------------------------
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


class Patches(nn.Module):
    """A vision transformer's parameters beside its modules: class token, positions, layer scale."""

    def __init__(self):
        super().__init__()
        self.token = nn.Parameter(torch.randn(1, 1, D))
        self.positions = nn.Parameter(torch.randn(1, T + 1, D))
        self.scale = nn.Parameter(torch.randn(D))
        self.embed, self.block, self.head = nn.Linear(3, D), nn.Linear(D, D), nn.Linear(D, 2)

    def forward(self, x):
        h = torch.cat([self.token.expand(len(x), -1, -1), self.embed(x)], 1)
        h = h + self.positions[:, : h.shape[1]]
        h = h + self.scale * torch.tanh(self.block(h))
        return self.head(h[:, 0])


@fallback_mode
def test_a_vision_transformers_own_parameters_are_exact_and_it_runs_once(options):
    model, x = Patches(), torch.randn(N, T, 3)
    check(model, square, x, **options)
    with torchgradx.attach(model, **options) as probe:
        square(model, x).backward()
        probe.norms()
        assert "vmap: no kernel for Patches" not in probe.explain()


# ---- Regimes -------------------------------------------------------------------------------------
MODELS = {
    "positions": (positional, tokens),
    "relative": (lambda: relative(True), lambda: torch.randn(N, T, D)),
    "queries": (lambda: constant(against_all, l=nn.Linear(D, D)), lambda: torch.randn(N, T, D)),
    "patches": (Patches, lambda: torch.randn(N, T, 3)),
}
each_model = pytest.mark.parametrize("name", MODELS)


def example(name, dtype=torch.float64):
    make, data = MODELS[name]
    model, x = make(), data()
    if hasattr(model, "r"):
        del model.r
    return model.to(dtype), x.to(dtype) if x.is_floating_point() else x


@each_model
@both_dtypes
@a_few_modes
def test_in_either_precision(name, dtype, options):
    check(*(lambda model, x: (model, square, x))(*example(name)), dtype=dtype, **options)


@each_model
@a_few_modes
def test_under_autocast(name, options):
    """Norms are those of what the backward computed in bfloat16: near the exact ones."""
    model, x = example(name, torch.float32)
    want = loop(model, square, x)
    with torchgradx.attach(model, **options) as probe:
        for _ in range(2):
            with torch.autocast("cpu", torch.bfloat16):
                out = square(model, x)
            out.backward()
            norms = probe.norms(per="parameter")
    largest = max(float(v.max()) for v in want.values())
    for key, value in want.items():
        assert (norms[key].double() - value).abs().max() < 0.05 * largest, key


@each_model
@a_few_modes
def test_micro_batches_are_one_record(name, options):
    model, x = example(name)
    want = loop(model, square, x)
    with torchgradx.attach(model, **options) as probe:
        for part in (x[:2], x[2:]):
            square(model, part).backward()
        close_named(probe.norms(per="parameter"), want)


@each_model
@a_few_modes
def test_several_backwards_through_one_graph_add_up(name, options):
    model, x = example(name)
    want = loop(model, lambda *batch: 3 * square(*batch), x)
    with torchgradx.attach(model, **options) as probe:
        loss = square(model, x)
        loss.backward(retain_graph=True)
        (2 * loss).backward()
        close_named(probe.norms(per="parameter"), want)


@each_model
@a_few_modes
def test_forwards_of_the_same_samples_add_up(name, options):
    model, x = example(name)
    want = loop(model, lambda model, x: square(model, x) + square(model, x.flip(1)), x)
    with torchgradx.attach(model, **options) as probe:
        with probe.same_samples():
            loss = square(model, x) + square(model, x.flip(1))
        loss.backward()
        close_named(probe.norms(per="parameter"), want)


@each_model
@a_few_modes
def test_batches_of_other_sizes_follow(name, options):
    """Where a sample's value goes is seen once; where the samples stand is proven for each size."""
    model, x = example(name)
    with torchgradx.attach(model, **options) as probe:
        for batch in (x, torch.cat([x, x])[:7], x[:1], x[:, :3], torch.cat([x, x])[:T], x[:3], x):
            want = loop(model, square, batch)
            square(model, batch).backward()
            close_named(probe.norms(per="parameter"), want)
        model.eval()
        square(model, x).backward()
        close_named(probe.norms(per="parameter"), loop(model, square, x))


@each_model
@a_few_modes
def test_a_gradient_asked_for_beside_the_backward_is_not_counted(name, options):
    model, x = example(name)
    want = loop(model, square, x)
    with torchgradx.attach(model, **options) as probe:
        for _ in range(2):
            loss = square(model, x)
            torch.autograd.grad(loss, list(model.parameters()), retain_graph=True)
            loss.backward()
            close_named(probe.norms(per="parameter"), want)


@each_model
def test_create_graph_is_refused(name):
    model, x = example(name)
    with torchgradx.attach(model) as probe:
        square(model, x).backward(create_graph=True)
        with pytest.raises(torchgradx.CoverageError, match="create_graph"):
            probe.norms()
    model.zero_grad()


@each_model
@a_few_modes
def test_frozen_parts_count_nothing(name, options):
    for place in range(len(list(example(name)[0].parameters()))):
        model, x = example(name)
        list(model.parameters())[place].requires_grad_(False)
        check(model, square, x, **options)


@a_few_modes
@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("way", ["added", "multiplied", "matmul", "repeated", "norm"])
def test_where_samples_come_in_inside_a_checkpoint(way, reentrant, options):
    def forward(m, x):
        inside = lambda x, s: torch.tanh(WAYS[way](x, s))  # noqa: E731
        return m.o(checkpoint(inside, m.i(x), m.l(m.c), use_reentrant=reentrant))

    model = constant(forward, l=nn.Linear(D, D), i=nn.Linear(D, D))
    refusal = exact_or_refused(model, square, torch.randn(N, T, D), **options)
    if way in ("added", "repeated") and not reentrant:
        assert refusal is None, "what reads nothing saved needs no second run"


@a_few_modes
@pytest.mark.parametrize("before", [nn.LayerNorm(D), nn.Identity()], ids=["normed", "plain"])
def test_a_module_without_samples_inside_a_checkpoint(before, options):
    def forward(m, x):
        inside = lambda x: torch.tanh(x + m.l(m.n(m.c)))  # noqa: E731
        return m.o(checkpoint(inside, m.i(x), use_reentrant=False))

    model = constant(forward, l=nn.Linear(D, D), n=copy.deepcopy(before), i=nn.Linear(D, D))
    exact_or_refused(model, square, torch.randn(N, T, D), **options)


def test_a_forward_that_meets_no_backward_leaves_nothing():
    model, x = example("relative")
    with torchgradx.attach(model) as probe:
        for _ in range(2):
            square(model, x)
            square(model, x).backward()
            close_named(probe.norms(per="parameter"), loop(model, square, x))


def test_the_first_forwards_watch_is_over_when_it_ends():
    from torch.utils._python_dispatch import _get_current_dispatch_mode

    def broken(m, x):
        if m.fails:
            raise KeyboardInterrupt if m.fails == "interrupt" else ValueError
        return m.o(m.i(x) + m.l(m.c))

    model = constant(broken, l=nn.Linear(D, D), i=nn.Linear(D, D))
    probe = torchgradx.attach(model)
    for model.fails in ("error", "interrupt", ""):
        with_error = pytest.raises((ValueError, KeyboardInterrupt))
        if model.fails:
            with with_error:
                model(torch.randn(N, T, D))
        else:
            square(model, torch.randn(N, T, D)).backward()
            probe.norms()
        if model.fails != "interrupt":  # which runs no hooks: the next forward ends it
            assert _get_current_dispatch_mode() is None
    model.fails = "interrupt"
    other = copy.deepcopy(model)
    probe.remove()
    probe = torchgradx.attach(other)
    with pytest.raises(KeyboardInterrupt):
        other(torch.randn(N, T, D))
    probe.remove()
    assert _get_current_dispatch_mode() is None


# ---- What only looks like it ---------------------------------------------------------------------
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
    "written into": lambda m, x: m.l(_in_place(0 * m.c, lambda z: z[1:].add_(x[0, 1]))),
    "written by a list of tensors": lambda m, x: m.l(_in_place(0 * m.c, lambda z:
                                                     torch._foreach_add_([z], [x[0]]))),
    "of a list": lambda m, x: m.l(torch.tensor(x[0].tolist(), dtype=x.dtype)),
    "of an array": lambda m, x: m.l(torch.from_numpy(x[0].numpy())),
    "mean of what was learned": lambda m, x: m.l(m.i(x).mean(0)),
    "the neighbour": lambda m, x: m.l(x).flip(0),
    "batch statistics": lambda m, x: F.batch_norm(m.l(x).mT, None, None, training=True).mT,
    "softmax over samples": lambda m, x: torch.softmax(m.l(x), 0),
}  # fmt: skip


@fallback_mode
@pytest.mark.parametrize("t", [T, N])
@pytest.mark.parametrize("how", MIXED)
def test_what_is_computed_from_several_samples_is_refused(how, t, options):
    model = constant(lambda m, x: m.o(torch.tanh(m.i(x) + MIXED[how](m, x))), (t, D),
                     l=nn.Linear(D, D, bias=False), i=nn.Linear(D, D))  # fmt: skip
    refused(model, square, torch.randn(N, t, D), names={"l.weight"}, spared={"o.weight"}, **options)


@fallback_mode
def test_data_that_no_argument_shows_is_refused(options):
    model = constant(lambda m, x, box: m.o(m.i(x) + m.l(box.data.mean(0))), l=nn.Linear(D, D),
                     i=nn.Linear(D, D)).double()  # fmt: skip
    x = torch.randn(N, T, D).double()
    with torchgradx.attach(model, **options) as probe:
        square(lambda x: model(x, hidden(x)), x).backward()
        with pytest.raises(torchgradx.CoverageError, match=r"l\.weight"):
            probe.norms()


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
def test_a_table_that_the_model_also_returns_is_exact_or_refused(options):
    model = Model(lambda m, i: (m.o(m.t(i) + m.p(torch.arange(T))), m.p(torch.arange(T))),
                  t=nn.Embedding(TOKENS, D), p=nn.Embedding(T, D), o=nn.Linear(D, 2))  # fmt: skip

    def loss(m, i):
        y, table = m(i)
        return square(lambda i: y, i) + table.square().sum()

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
