"""Modules that are not plain: random, with custom functions, with parameters of their own outside
a leaf layer; batches of no samples."""

import copy

import pytest
import torch
import torch.nn.functional as F
from attach_oracle import (
    Model,
    a_few_modes,
    check,
    close,
    close_named,
    exact_or,
    exact_or_refused,
    fallback_mode,
    loop,
    loop_model,
    refused,
    same_gradients,
    square,
)
from torch import nn
from torch.utils.checkpoint import checkpoint

import torchgradx

N = 4


OWNERS = {
    "a functional use of the root's own matrix": (
        lambda: Model(lambda m, x: m.l(F.linear(x, m.w).tanh()), w=torch.randn(4, 3),
                      l=nn.Linear(4, 2)), (N, 3)),
    "a product with the root's own matrix": (
        lambda: Model(lambda m, x: m.l(torch.tanh(x @ m.w)), w=torch.randn(3, 4),
                      l=nn.Linear(4, 2)), (N, 3)),
    "class token, positions and gains of the root": (
        lambda: Model(
            lambda m, x: m.l((torch.cat([m.cls.expand(len(x), -1, -1), x], 1) + m.pos) * m.gain),
            cls=torch.randn(1, 1, 3), pos=torch.randn(1, 6, 3), gain=torch.randn(3),
            l=nn.Linear(3, 2)), (N, 5, 3)),
    "weights normalised by a parametrization": (
        lambda: nn.Sequential(nn.utils.parametrizations.weight_norm(nn.Linear(3, 4)), nn.Tanh(),
                              nn.Linear(4, 2)), (N, 3)),
    "weights made orthogonal by a parametrization": (
        lambda: nn.Sequential(nn.utils.parametrizations.orthogonal(nn.Linear(3, 3)), nn.Tanh()),
        (N, 3)),
    "parameters in a list": (
        lambda: Model(lambda m, x: sum(torch.tanh(x * w) for w in m.weights),
                      weights=nn.ParameterList([torch.randn(3) for _ in range(2)])), (N, 3)),
    "an embedding whose gradient is scaled by frequency": (
        lambda: nn.Embedding(7, 3, scale_grad_by_freq=True), (N, 5)),
    "an embedding that renormalises its rows": (
        lambda: nn.Embedding(7, 3, max_norm=1.0), (N, 5)),
    "an embedding with sparse gradients": (lambda: nn.Embedding(7, 3, sparse=True), (N, 5)),
    "an encoder layer": (
        lambda: nn.TransformerEncoderLayer(4, 2, 8, dropout=0.0, batch_first=True), (N, 5, 4)),
    "a checkpointed encoder layer": (
        lambda: Model(lambda m, x: checkpoint(m.c, m.i(x), use_reentrant=False),
                      c=nn.TransformerEncoderLayer(4, 2, 8, dropout=0.0, batch_first=True),
                      i=nn.Linear(4, 4)), (N, 5, 4)),
    "attention over a T of N": (
        lambda: Model(lambda m, x: m.a(x, x, x)[0],
                      a=nn.MultiheadAttention(4, 2, batch_first=True)), (N, N, 4)),
    "attention": (
        lambda: Model(lambda m, x: m.a(x, x, x, need_weights=False)[0],
                      a=nn.MultiheadAttention(4, 2, batch_first=True)), (N, 5, 4)),
}  # fmt: skip


@a_few_modes
@pytest.mark.parametrize("name", OWNERS)
def test_parameters_outside_leaf_layers_are_exact_or_refused(name, options):
    make, shape = OWNERS[name]
    x = torch.randint(0, 7, shape) if "embedding" in name else torch.randn(shape)
    exact_or_refused(make(), square, x, **options)


@fallback_mode
@pytest.mark.parametrize("again", [False, True], ids=["", "checkpointed"])
def test_a_module_with_a_gain_of_its_own_around_layers_is_exact(again, options):
    """The layers inside, which a kernel serves, run once more with the module."""
    block = Model(lambda m, x: x + m.gain * m.c(torch.tanh(m.l(x)).mT).mT, gain=torch.randn(3),
                  l=nn.Linear(3, 4), c=nn.Conv1d(4, 3, 1))  # fmt: skip
    model = Model(
        lambda m, x: checkpoint(m.b, x, use_reentrant=False) if again else m.b(x), b=block
    )
    check(nn.Sequential(nn.Linear(3, 3), model), square, torch.randn(N, 5, 3), **options)


def headed(forward):
    """A head that keeps a bias beside the decoder that adds it, as language models do."""
    head = Model(forward, dense=nn.Linear(3, 3), decoder=nn.Linear(3, 4))
    head.bias = head.decoder.bias
    return nn.Sequential(nn.Linear(3, 3), head)


@fallback_mode
def test_a_parameter_kept_beside_the_layer_that_uses_it_counts_once(options):
    model = headed(lambda m, x: m.decoder(torch.tanh(m.dense(x))))
    check(model, square, torch.randn(N, 5, 3), **options)


@a_few_modes
@pytest.mark.parametrize("block", ["dropout between", "lstm with dropout"])
def test_active_dropout_gives_the_gradient_under_the_masks_of_that_forward(block, options):
    if block == "dropout between":
        model = nn.Sequential(nn.Linear(3, 8), nn.Dropout(0.5), nn.Linear(8, 2))
    else:
        model = Model(lambda m, x: m.o(m.r(x)[0]), o=nn.Linear(4, 2),
                      r=nn.LSTM(3, 4, num_layers=2, dropout=0.5, batch_first=True))  # fmt: skip
    model, x, rows = model.double(), torch.randn(N, 5, 3).double(), []
    for n in range(N):  # the sample's own loss within the whole batch, under the same masks
        torch.manual_seed(7)
        grads = torch.autograd.grad(model(x)[n].square().sum(), list(model.parameters()))
        rows.append(torch.stack([g.norm() for g in grads]))
    want = dict(zip(dict(model.named_parameters()), torch.stack(rows).unbind(1), strict=True))
    with torchgradx.attach(model, **options) as probe:
        torch.manual_seed(7)
        square(model, x).backward()
        after = torch.rand(3)
        close_named(probe.norms(per="parameter"), want)
    torch.manual_seed(7)
    model(x)
    assert torch.equal(torch.rand(3), after), "the probe moved the random state"


@a_few_modes
def test_a_module_with_side_effects_and_a_custom_function_is_exact_or_refused(options):
    exact_or_refused(nn.Sequential(nn.Linear(3, 4), Custom()), square, torch.randn(N, 3), **options)


class Double(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, w):
        ctx.save_for_backward(x, w)
        return x * w

    @staticmethod
    def backward(ctx, g):
        x, w = ctx.saved_tensors
        return g * w, (g * x).sum(0)


class Custom(nn.Module):
    """A leaf whose custom autograd function vmap has no rule for, and which counts its calls."""

    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(torch.randn(4))
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x):
        self.calls += 1
        return Double.apply(x, self.w)


@a_few_modes
@pytest.mark.parametrize("function", [F.embedding, F.embedding_bag])
def test_what_frequencies_of_the_batch_divide_is_refused_where_it_is_replayed(function, options):
    """A replay of the batch gives parts of its gradient, which add up: only the loop differs."""

    def forward(m, x):
        return function(x + 0 * int(x.sum()), m.w, scale_grad_by_freq=True)

    model, ids = Model(forward, w=torch.randn(7, 3)), torch.randint(0, 7, (N, 5))
    refused(model, square, ids, names={"w"}, match="how often an id", **options)


def spectral(m, x):
    """Complex numbers on the way from real parameters, as a Fourier layer has them."""
    kept = torch.einsum("bik,iok->bok", torch.fft.rfft(m.l(x)), torch.view_as_complex(m.w))
    turned = torch.fft.irfft(kept, n=x.shape[-1])
    return turned + torch.exp(torch.complex(m.decay, m.turn) * 1j).real * m.l(x)


@a_few_modes
@pytest.mark.parametrize("length", [6, N], ids=["", "as long as there are samples"])
def test_complex_numbers_between_real_parameters_are_exact(length, options):
    model = Model(spectral, l=nn.Conv1d(2, 2, 1), w=torch.randn(2, 2, length // 2 + 1, 2),
                  decay=torch.rand(2, 1), turn=torch.randn(2, 1))  # fmt: skip
    check(model, square, torch.randn(N, 2, length), **options)


@a_few_modes
def test_samples_mixed_in_imaginary_parts_alone_are_refused(options):
    def mixed(m, x):
        kept = m.l(x) * torch.view_as_complex(m.w)
        return kept.real + kept.flip(0).imag

    model = Model(mixed, l=nn.Linear(3, 4), w=torch.randn(4, 2))
    refused(model, square, torch.randn(N, 3), names={"w", "l.weight", "l.bias"}, **options)


def of_its_loss(m, x, y):
    x = x * m.idle if m.uses else x
    return F.cross_entropy(m.b(torch.tanh(m.a(x))), y)


def with_a_mean_of_all(m, x, y):
    h = m.b(torch.tanh(m.a(x * m.idle if m.uses else x)))
    return {"logits": h, "balance": h.mean()}


IDLE = {
    "a loss alone": (of_its_loss, lambda model, *batch: model(*batch)),
    "a number beside the outputs": (
        with_a_mean_of_all, lambda model, x, y: F.cross_entropy(model(x, y)["logits"], y)),
}  # fmt: skip


@a_few_modes
@pytest.mark.parametrize("how", IDLE)
@pytest.mark.parametrize("uses", [(False,) * 3, (False, True, True), (True, False, True)], ids=str)
def test_own_parameters_that_a_forward_does_not_use_have_norm_0(uses, how, options):
    """Even where the module cannot be run again by sample; once they are used, they count."""
    if how == "a loss alone" and uses == (False, True, True):
        pytest.skip("refused by name: no forward that was watched used them")
    forward, loss = IDLE[how]
    model = Model(forward, a=nn.Linear(3, 5), b=nn.Linear(5, 2), idle=torch.randn(3)).double()
    with torchgradx.attach(model, **options) as probe:
        for model.uses in uses:
            model.zero_grad()
            batch = torch.randn(N, 3).double(), torch.randint(2, (N,))
            loss(model, *batch).backward()
            named = probe.norms(per="parameter")
            close_named(named, loop(copy.deepcopy(model), loss, *batch))
            assert bool(named["idle"].any()) == model.uses


@a_few_modes
def test_outputs_in_a_distribution(options):
    def forward(m, x):
        return torch.distributions.Independent(
            torch.distributions.Normal(m.mean(torch.tanh(m.first(x))), m.log_std.exp()), 1
        )

    model = Model(forward, first=nn.Linear(3, 5), mean=nn.Linear(5, 2), log_std=torch.randn(2))
    check(model, lambda model, x: -model(x).log_prob(x[:, :2]).mean(), torch.randn(N, 3), **options)


class Held:
    def __init__(self, logits):
        self.logits = logits


UNSEEN = {  # what a forward gives, and its logits
    "an object": (Held, lambda m, out: out.logits),
    "a function": (lambda logits: lambda: logits, lambda m, out: out()),
    "an iterator": (lambda logits: iter([logits]), lambda m, out: next(out)),
    "nothing": (lambda logits: None, lambda m, out: m.logits),
}


@a_few_modes
@pytest.mark.parametrize("own", [False, True], ids=["", "parameters of its own"])
@pytest.mark.parametrize("name", UNSEEN)
def test_outputs_that_are_not_seen_are_exact_or_refused(name, own, options):
    give, take = UNSEEN[name]

    def forward(m, x):
        h = torch.tanh(m.l(x))
        m.logits = m.o(h * m.scale if own else h)
        return give(m.logits)

    model = Model(forward, l=nn.Linear(3, 4), o=nn.Linear(4, 2), scale=torch.randn(4))
    loss = lambda m, x: take(m, m(x)).square().sum(1).mean()  # noqa: E731
    if own:
        refused(model, loss, torch.randn(N, 3), names=["scale"], **options)
    else:
        model.logits = None
        exact_or_refused(model, loss, torch.randn(N, 3), **options)


D = 4


def attending():
    return Model(lambda m, x: m.a(x, x, x)[0], a=nn.MultiheadAttention(D, 2, batch_first=True))


def positions():
    return Model(lambda m, x: m.o(x + m.p.tanh() * m.gain), o=nn.Linear(D, 2),
                 p=torch.randn(5, D), gain=torch.randn(D))  # fmt: skip


EMPTY = {
    "attention": attending,
    "an encoder layer": lambda: nn.TransformerEncoderLayer(D, 2, 8, 0.0, batch_first=True),
    "parameters of the root": positions,
    "one slope": lambda: Model(lambda m, x: m.a(m.l(x)), a=nn.PReLU(), l=nn.Linear(D, 3)),
    "a recurrent layer": lambda: Model(lambda m, x: m.r(x)[0], r=nn.GRU(D, 3, batch_first=True)),
    "a replay": lambda: Model(lambda m, x: m.l(x), l=nn.utils.parametrizations.weight_norm(
        nn.Linear(D, 3))),
}  # fmt: skip


@a_few_modes
@pytest.mark.parametrize("sizes", [(0, 3), (3, 0, 2)], ids=str)
@pytest.mark.parametrize("name", EMPTY)
def test_no_samples_among_others(name, sizes, options):
    model = EMPTY[name]().double()
    batches = [torch.randn(n, 5, D).double() for n in sizes]
    with torchgradx.attach(model, loss_reduction="sum", **options) as probe:
        for x in batches:
            model(x).square().sum().backward()
            norms = probe.norms()
            assert norms.shape == x.shape[:1]
            if len(x):
                close(norms, loop_model(model, square, x))
        for x in batches:
            model(x).square().sum().backward()
        assert len(probe.norms()) == sum(sizes), "accumulated"


@a_few_modes
@pytest.mark.parametrize("positions", [(), (2,)], ids=str)
def test_layers_of_no_features(positions, options):
    model = nn.Sequential(nn.Linear(D, 0), nn.Linear(0, 3)).double()
    twin, x = copy.deepcopy(model), torch.randn(5, *positions, D).double()
    clip = options.get("weight_grad", True)
    with torchgradx.attach(model, clip=clip, **options) as probe:
        square(model, x).backward()
        want = loop_model(twin, square, x)
        close(probe.norms(), want)
        if clip:
            square(twin, x).backward()
            same_gradients(model, twin, 1e-9)
            close(probe.clip_grad_norm_(1.0), want)


def put_back(m, x, k):
    out = m.a(x)
    out[k] = out[k] + m.b(x[k])
    return out


def in_turn(m, x, k):
    i = k.nonzero()[:, 0].flip(0)
    return m.a(x).index_add(0, i, m.b(x[i]))


def for_nothing(m, x, k):
    return m.a(x).sum(1, keepdim=True) + 0 * m.b(x[k]).sum()


@a_few_modes
@pytest.mark.parametrize("function", [put_back, in_turn, for_nothing])
def test_a_layer_that_is_given_no_rows_leaves_others_exact(function, options):
    model = Model(function, a=nn.Linear(D, 2), b=nn.Linear(D, 2))
    check(model, square, torch.randn(3, D), torch.zeros(3, dtype=torch.bool), **options)


@a_few_modes
@pytest.mark.parametrize("function", [put_back, in_turn, for_nothing])
def test_rows_that_come_after_none_are_proven(function, options):
    model = Model(function, a=nn.Linear(D, 2), b=nn.Linear(D, 2)).double()
    x = torch.randn(3, D).double()
    with torchgradx.attach(model, **options) as probe:
        for given in (0, 0, 3, 2, 0, 3):
            k = torch.arange(3) < given
            square(model, x, k).backward()
            if given and function is in_turn:
                with pytest.raises(torchgradx.CoverageError):
                    probe.norms()
                probe.reset()
            else:
                exact_or(torchgradx.CoverageError, "", probe, loop(model, square, x, k))
                probe.reset()
