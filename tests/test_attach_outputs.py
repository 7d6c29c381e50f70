"""Where the samples are in what a model gives and takes: dimensions, several outputs, lists."""

import contextlib

import pytest
import torch
import torch.nn.functional as F
from attach_models import Model, square
from attach_modes import a_few_modes, every_mode
from attach_oracle import check, close_named, loop
from attach_steps import exact_or_refused, refusal, refused, step_or_refused
from clip_oracle import check_clip
from test_attach_rows import T as PLACES
from test_attach_rows import by_length, lengths, places
from torch import nn
from torch.nn.utils.rnn import pad_sequence

import torchgradx
from torchgradx import ops

N = 4


def by_rows(model, x):
    """The mean over the samples of a loss of each, wherever the model's output has them."""
    return model(x).square().sum() / len(x)


def head(*shape):
    return {"l": nn.Linear(3, *shape)}


TURNED = {
    "transposed": (lambda m, x: m.l(x).transpose(0, 1), head(5)),
    "a row of each": (lambda m,
        x: m.b(m.l(x)[torch.arange(len(x)), torch.zeros(len(x), dtype=torch.long)]).T,
        {**head(5), "b": nn.Linear(5, N)}),
    "its own parameter": (lambda m, x: (x * m.w).transpose(0, 1), {"w": torch.randn(3)}),
}  # fmt: skip


@every_mode
@pytest.mark.parametrize("positions", [N, 6])
@pytest.mark.parametrize("name", TURNED)
def test_a_model_that_returns_its_samples_in_another_dimension_is_exact(name, positions, options):
    forward, parts = TURNED[name]
    if "w" in parts and options.get("backend") == "native":
        pytest.skip("its parameter has no kernel")
    model, x = Model(forward, **parts), torch.randn(N, positions, 3)
    if positions == N or name == "a row of each":  # two dimensions have the samples' number
        exact_or_refused(model, by_rows, x, **options)
    else:
        check(model, by_rows, x, **options)


WORDS = 5


def padded(m, xs):
    lengths = torch.tensor([len(x) for x in xs])
    h = m.l(pad_sequence(xs, batch_first=True))
    return (h * (torch.arange(h.shape[1]) < lengths[:, None])[..., None]).sum(1) / lengths[:, None]


FORWARDS = {
    "stacked": (lambda m, xs: torch.tanh(m.l(torch.stack(xs))).sum(1), lambda n: [(WORDS, 3)] * n),
    "stacked tokens": (lambda m, xs: torch.tanh(m.l(torch.stack(xs))), lambda n: [(WORDS, 3)] * n),
    "padded": (padded, lambda n: [(2 + k, 3) for k in range(n)]),
    "images": (lambda m, xs: m.c(torch.cat([F.interpolate(x[None], 4) for x in xs])).flatten(1),
               lambda n: [(3, 5 + k, 6) for k in range(n)]),
}  # fmt: skip


@a_few_modes
@pytest.mark.parametrize("n", [2, 3, 4, WORDS])
@pytest.mark.parametrize("name", FORWARDS)
def test_a_list_of_samples_is_exact(name, n, options):
    """Also where a sample has as many rows, or channels, as there are samples: or refused."""
    forward, sizes = FORWARDS[name]
    model = Model(forward, l=nn.Linear(3, 2), c=nn.Conv2d(3, 2, 3)).double()
    xs = [torch.randn(size).double() for size in sizes(n)]
    with torchgradx.attach(model, batch_size=lambda args, kwargs: len(args[0]), **options) as probe:
        square(model, xs).backward()
        if name == "stacked tokens" and n == WORDS:
            refusal(probe, "two dimensions")
            return
        got = probe.norms(per="parameter")
    for k, x in enumerate(xs):
        model.zero_grad()
        square(model, [x]).backward()
        want = {p: q.grad.norm()[None] for p, q in model.named_parameters() if q.grad is not None}
        close_named({p: norms[k : k + 1] for p, norms in got.items() if p in want}, want)


@a_few_modes
@pytest.mark.parametrize("own", [False, True], ids=["", "parameters of its own"])
@pytest.mark.parametrize("layout", [torch.strided, torch.jagged], ids=str)
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")
def test_layers_that_are_given_nested_tensors_are_refused(layout, own, options):
    class Scaled(nn.Linear):
        def forward(self, x):
            return super().forward(x) * 2

    def forward(m, x):
        rows = torch.nested.nested_tensor([v[: k + 1] for k, v in enumerate(x)], layout=layout)
        return m.o(torch.relu(m.l(rows)).to_padded_tensor(0.0).sum(1))

    model = Model(forward, l=(Scaled if own else nn.Linear)(3, 4), o=nn.Linear(4, 2))
    with torchgradx.attach(model, **options) as probe:
        square(model, torch.randn(4, WORDS, 3)).backward()
        assert model.o.weight.grad is not None or not options.get("weight_grad", True)
        refusal(probe, r"l\.weight.*: .*(nested tensor|could not be looked for)")


T = 5


def lstm_cells_of_another(m, x):
    y, (_, c) = m.r(x)
    return m.o(y[:, -1]) + m.p(c[0].roll(1, 0))


def states_as_rows(m, x):
    """[layers, N, H] taken for [N, layers * H], an error that is often made."""
    y, h = m.r(x)
    return m.o(y.sum(1)) + m.p(h.reshape(len(x), -1))


def two():
    return Model(lambda m, x: (x * m.w, torch.tanh(x * m.w)), w=torch.randn(3))


def taking(take, module):
    return Model(lambda m, x: take(*m.t(x)), t=module)


def chained():
    """Three outputs, each made from those before and from parameters; the second once more."""

    def forward(m, x):
        a = x * m.w + m.v
        b = torch.tanh(a + m.v)
        return a, b, m.w * (a.sin() + 0.5 * b), b

    return Model(forward, v=torch.randn(3), w=torch.randn(3))


CHAINED = {
    "the first": lambda a, b, c, d: a, "the last": lambda a, b, c, d: c,
    "the first two": lambda a, b, c, d: a.square() + b, "ends": lambda a, b, c, d: a * c,
    "all": lambda a, b, c, d: torch.cat([a, b, c, d], 1), "one twice": lambda a, b, c, d: b * d,
    "what is detached": lambda a, b, c, d: c * a.detach(),
}  # fmt: skip
MIXED = {
    "cells of an LSTM": (
        lambda: Model(lstm_cells_of_another, r=nn.LSTM(3, 5, batch_first=True),
                      o=nn.Linear(5, 2), p=nn.Linear(5, 2)), (N, T, 3), "r.weight_ih_l0"),
    "states of layers": (
        lambda: Model(states_as_rows, r=nn.GRU(3, 4, 2, batch_first=True),
                      o=nn.Linear(4, 2), p=nn.Linear(8, 2)), (N, T, 3), "r.weight_hh_l1"),
    "a second output": (lambda: taking(lambda a, b: a + b.roll(1, 0), two()), (N, 3), "t.w"),
    "an output made from another": (
        lambda: Model(lambda m, x: m.t(x)[0].roll(1, 0) + m.t(x)[1], t=chained()), (N, 3), "t.w"),
    "an output of another layout": (
        lambda: taking(lambda a, b: a + b.transpose(0, 1), two()), (N, N, 3), "t.w"),
    "attention's weights": (
        lambda: taking(lambda y, w: y.sum(1) + w.roll(1, 0).square().sum((1, 2))[:, None], Model(
            lambda m, x: m.a(x, x, x), a=nn.MultiheadAttention(4, 2, batch_first=True))),
        (N, T, 4), "t.a.in_proj_weight"),
}  # fmt: skip


@a_few_modes
@pytest.mark.parametrize("name", MIXED)
def test_samples_that_mix_by_one_of_several_outputs_are_refused(name, options):
    make, shape, parameter = MIXED[name]
    refused(make(), square, torch.randn(shape), names=[parameter], match="samples", **options)


EXACT = {
    "sequences of N with their weights": (
        lambda: taking(lambda y, w: y.sum(0) + w.square().sum((1, 2))[:, None], Model(
            lambda m, x: m.a(*[x.transpose(0, 1)] * 3), a=nn.MultiheadAttention(4, 2))),
        (N, N, 4)),
    "states alone, both ways, of N units": (
        lambda: Model(lambda m, x: m.r(x)[1][0].transpose(0, 1),
                      r=nn.LSTM(3, N, 2, batch_first=True, bidirectional=True)), (N, N, 3)),
}  # fmt: skip


@a_few_modes
@pytest.mark.parametrize("name", EXACT)
def test_outputs_with_the_samples_where_they_should_be_are_exact(name, options):
    make, shape = EXACT[name]
    check(make(), square, torch.randn(shape), **options)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@a_few_modes
@pytest.mark.parametrize("use", CHAINED)
def test_outputs_that_others_are_made_from_are_exact_and_clipped(use, dtype, options):
    model = Model(lambda m, x: CHAINED[use](*m.t(m.i(x))), t=chained(), i=nn.Linear(3, 3))
    check(model, square, torch.randn(N, 3), dtype=dtype, check="samples", **options)
    if options in ({}, {"fused": False}):
        check_clip(model, square, torch.randn(N, 3), **options)


@a_few_modes
@pytest.mark.parametrize("retained", [False, True])
@pytest.mark.parametrize("offloaded", [False, True])
def test_outputs_that_come_back_in_backwards_of_their_own(retained, offloaded, options):
    two = Model(lambda m, x: (x @ m.actor, torch.tanh(x @ m.critic)),
                actor=torch.randn(3, 2), critic=torch.randn(3, 1))  # fmt: skip
    model = nn.Sequential(nn.Linear(3, 3), two).double()
    model[0].requires_grad_(False)  # nothing that both have is let go
    x, hooks = torch.randn(N, 3).double(), torch.autograd.graph.save_on_cpu()
    want = loop(model, lambda m, x: sum(t.square().sum() for t in m(x)), x)
    want = {name: norms for name, norms in want.items() if name[0] == "1"}
    with torchgradx.attach(model, **options) as probe:
        with hooks if offloaded else contextlib.nullcontext():
            first, second = (t.square().sum() / N for t in model(x))
        first.backward(retain_graph=retained)
        second.backward()
        if retained:
            close_named(probe.norms(per="parameter"), want)
        else:
            refusal(probe, "retain_graph=True")


PICKS = {
    "mask": lambda h, m: h[m],
    "flat": lambda h, m: h.flatten(0, 1).index_select(0, places(m)),
    "in pieces": lambda h, m: h[m].view(-1, 1, 5),
}
MIXING = {  # rows of a head that are not a sample's alone, in some batches
    "turned": lambda h, m: h[m].flip(0),
    "less their mean": lambda h, m: h[m] - h[m].mean(0),
    "ordered": lambda h, m: h[m][h[m][:, 0].argsort()],
    "samples sorted": lambda h, m: h[by_length(m)][m[by_length(m)]],
    "two masks": lambda h, m: torch.cat([h[m], h[~m]]),
    "pairs of rows": lambda h, m: F.avg_pool1d(h[m].T[None], 2, ceil_mode=True)[0].T,
    "and by sample": lambda h, m: h[m] + h[m].view(len(m), -1, 5).mean(1).mean(0),
    "the one before": lambda h, m: h.mean(1)[(torch.arange(len(m)) - 1).clamp(min=0)],
}


def masked(pick, last=nn.Linear, loss=False):
    """A model whose outputs are the rows of a mask alone, as of heads for masked words."""

    def forward(model, x, m):
        h = torch.tanh(model.a(x))
        h = h + h.mean(1, keepdim=True) + model.table(torch.arange(PLACES))
        y = model.c(torch.relu(model.norm(model.b(pick(h, m)))))
        return y.square().sum() if loss else y

    layers = {"a": nn.Linear(3, 5), "b": nn.Linear(5, 5), "c": last(5, 5)}
    return Model(forward, **layers, norm=nn.LayerNorm(5), table=nn.Embedding(PLACES, 5)).double()


def of_rows(model, x, m):
    y = model(x, m)
    return (y.square().sum() if y.dim() else y) / len(x)


def batches(*counts):
    for k in counts:  # no order of the rows tells the places
        yield torch.randn(len(k), PLACES, 3).double(), lengths(*k)[:, torch.randperm(PLACES)]


COUNTS = [(2, 1, 3), (3, 0, 2), (1, 1, 1), (2, 0, 1), (4, 1, 0), (0, 4, 0), (1, 2, 4, 3), (1, 3)]


@a_few_modes
@pytest.mark.parametrize("loss", [False, True] if ops.NATIVE else [False])
@pytest.mark.parametrize("way", PICKS)
def test_outputs_that_a_mask_takes_are_exact(way, loss, options, backwards):
    model, found = masked(PICKS[way], loss=loss), []
    with torchgradx.attach(model, **options) as probe:
        for x, m in batches(*COUNTS[: 2 if loss else None]):
            want = loop(model, of_rows, x, m)
            backwards.clear()
            own = of_rows(model, x, m)
            found.append(len(backwards))
            own.backward()
            close_named(probe.norms(per="parameter"), want)
    assert found[:2] == [2, 0]


@pytest.mark.parametrize("way", MIXING)
def test_outputs_that_a_mask_takes_and_others_mix_are_refused(way):
    model = masked(MIXING[way])
    with torchgradx.attach(model) as probe:
        found = [step_or_refused(probe, model, x, m, loss=of_rows)
                 for x, m in batches((2, 2, 2), (1, 4, 1), (3, 1, 2), (2, 2, 2))]  # fmt: skip
    assert all(found[1:3])


@pytest.mark.parametrize("last", [nn.PReLU, lambda k: nn.GroupNorm(1, k), nn.BatchNorm1d])
def test_layers_of_images_are_exact_or_refused_on_the_rows_of_a_mask(last):
    model, (x, m) = masked(PICKS["mask"], lambda k, _: last(k).eval()), next(batches((2, 1, 3)))
    with torchgradx.attach(model) as probe:
        why = step_or_refused(probe, model, x, m, loss=of_rows, words="c.weight")
    assert bool(why) == (ops.NATIVE and last is nn.BatchNorm1d)  # without it they run again


def test_outputs_that_a_mask_takes_are_clipped_and_run_alone():
    check_clip(masked(PICKS["mask"]), of_rows, *next(batches((2, 1, 3))), check="samples")


RETURNED = {  # losses of outputs [N, T, 3] and [N, T, N], of sizes that may be taken for N
    "over the samples first": lambda m, y: y.square().mean(0).sum(),
    "classes in front": lambda m, y: y.permute(2, 0, 1).flatten(1).square().mean(),
    "with a penalty": lambda m, y: y.square().mean() + m.l.weight.square().sum(),
    "with differences": lambda m, y: y.square().mean() + m.l.weight.diff(dim=0).square().sum(),
}


@pytest.mark.parametrize("t", [N, 6])
@pytest.mark.parametrize("classes", [3, N])
@pytest.mark.parametrize("name", RETURNED)
def test_a_returned_loss_of_sizes_as_n_is_exact_or_refused(name, classes, t):
    model = Model(lambda m, x: RETURNED[name](m, m.l(torch.tanh(m.a(x)))),
                  a=nn.Linear(3, 3), l=nn.Linear(3, classes)).double()  # fmt: skip
    with torchgradx.attach(model) as probe:
        for _ in range(2):
            x = torch.randn(N, t, 3).double()
            why = step_or_refused(probe, model, x, loss=lambda m, x: m(x))
            assert bool(why) == (name.startswith("with") or t == N)
