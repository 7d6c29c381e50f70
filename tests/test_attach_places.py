"""Where the samples are in what a model gives and takes: in other dimensions, in several outputs,
in lists."""

import contextlib

import pytest
import torch
from attach_oracle import (
    Model,
    Same,
    a_few_modes,
    check,
    close_named,
    every_mode,
    exact_or,
    exact_or_refused,
    loop,
    need_native,
    refused,
    square,
)
from torch import nn
from torch.nn.utils.rnn import pad_sequence
from torch.utils.checkpoint import checkpoint

import torchgradx

N = 4


def by_rows(model, x):
    """The mean over the samples of a loss of each, wherever the model's output has them."""
    return model(x).square().sum() / len(x)


def head(*shape):
    return {"l": nn.Linear(3, *shape)}


TURNED = {
    "transposed": (lambda m, x: m.l(x).transpose(0, 1), head(5)),
    "permuted": (lambda m, x: m.l(x).permute(2, 0, 1), head(5)),
    "by einsum": (lambda m, x: torch.einsum("ntd->tnd", m.l(x)), head(5)),
    "back and forth": (
        lambda m, x: m.l(x.transpose(0, 1)).tanh().transpose(0, 1).contiguous(),
        head(5),
    ),
    "after views": (
        lambda m, x: (
            m.l(x.reshape(-1, 3)).view(len(x), -1, 1, 5).squeeze(2).unsqueeze(0).transpose(1, 2)[0]
        ),
        head(5),
    ),
    "a row of each": (
        lambda m, x: m.b(m.l(x)[torch.arange(len(x)), torch.zeros(len(x), dtype=torch.long)]).T,
        {**head(5), "b": nn.Linear(5, N)},
    ),
    "its own parameter": (lambda m, x: (x * m.w).transpose(0, 1), {"w": torch.randn(3)}),
}


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


@every_mode
def test_as_many_classes_as_samples_beside_samples_in_dimension_1(options):
    model = Model(lambda m, x: m.l(torch.tanh(m.into(x)).mean(0)), into=nn.Linear(3, 5),
                  l=nn.Linear(5, N))  # fmt: skip
    loss = lambda m, x: m(x).square().sum() / x.shape[1]  # noqa: E731
    check(model, loss, torch.randn(6, N, 3), dims=1, batch_dim=1, **options)


def filled(y):
    out = torch.empty(y.shape[1], y.shape[0], *y.shape[2:], dtype=y.dtype)
    for k in range(len(out)):
        out[k] = y[:, k]
    return out


LOST = {
    "by strides": lambda y: y.as_strided((y.shape[1], len(y), 5), (5, 5 * y.shape[1], 1)),
    "filled": filled,
    "put together": lambda y: torch.stack([y[:, k] for k in range(y.shape[1])]),
    "in a loop": lambda y: torch.cat([y[:, k].unsqueeze(0) for k in range(y.shape[1])]),
    "shuffled by data": lambda y: y.gather(0, torch.arange(len(y)).view(-1, 1, 1).expand_as(y)),
}


@every_mode
@pytest.mark.parametrize("name", LOST)
def test_where_nobody_can_follow_it_is_exact_or_refused(name, options):
    model = Model(lambda m, x: LOST[name](m.l(x)), **head(5))
    exact_or_refused(model, by_rows, torch.randn(N, N, 3), **options)


def lost(y):
    return y.unfold(-1, 1, 1).squeeze(-1)


def by_all(model, x):
    found = model(x)
    each = [found] if isinstance(found, torch.Tensor) else found
    return sum(y.square().sum() for y in each) / len(x)


def of_parts(forward, width):
    return Model(forward, l=nn.Linear(3, width), k=nn.Linear(3, 3), o=nn.Linear(3, width))


def of_one_trunk(m, x):
    h = torch.softmax(x @ x.mT, -1) @ m.k(x)
    return [lost(layer(h) * k) for k in range(3) for layer in (m.l, m.o)]


SURE = {
    "images of N channels": (lambda m, x: lost(m.c(x)), (N, N, N, N)),
    "series of N channels": (lambda m, x: lost(m.s(x)), (N, N, N)),
    "N numbers of N positions": (lambda m, x: m.n(x).permute(0, 2, 1), (N, N, 3)),
    "six of one trunk": (of_one_trunk, (N, N, 3)),
}


@every_mode
@pytest.mark.parametrize("name", SURE)
def test_where_another_place_would_mix_them_equal_sizes_leave_no_doubt(name, options):
    forward, shape = SURE[name]
    model = of_parts(forward, 5)
    model.c, model.s = nn.Conv2d(N, N, 3, padding=1), nn.Conv1d(N, N, 3, padding=1)
    model.n = nn.Linear(3, N)
    check(model, by_all, torch.randn(shape), **options)


def apart(m, x, y):
    """The second has positions first, and never meets the first one."""
    return m.l(x), m.b(y).transpose(0, 1)


@every_mode
@pytest.mark.parametrize("positions", [N, 6])
def test_a_second_tensor_may_have_its_samples_elsewhere(positions, options):
    def loss(m, x, y):
        return sum(out.square().sum() for out in m(x, y)) / len(x)

    need_native(options)
    model = Model(apart, l=nn.Linear(3, 5), b=nn.Linear(3, 5)).double()
    x, y = torch.randn(N, positions, 3), torch.randn(positions, N, 3)
    want = loop(model, loss, x, y, dims=(0, 1))
    with torchgradx.attach(model, **options) as probe:
        loss(model, x.double(), y.double()).backward()
        exact_or(torchgradx.CoverageError, "two dimensions", probe, want)


def biased(m, x, bias):
    """[N, T] of numbers, and [T, T] for all of them."""
    h = torch.tanh(m.l(x[..., None]))
    return (h @ h.mT + m.b(bias[..., None])[..., 0]).softmax(-1) @ h


def looked_up(m, i, apart):
    """[N, T] of ids, and [T, T] of distances for all of them."""
    h = m.e(i)
    return (h @ h.mT + m.d(apart)[..., 0]).softmax(-1) @ h


SHARED = {
    "biases": (biased, {"l": nn.Linear(1, 3), "b": nn.Linear(1, 1)}, torch.randn),
    "distances": (
        looked_up,
        {"e": nn.Embedding(9, 3), "d": nn.Embedding(9, 1)},
        lambda *shape: torch.randint(0, 9, shape),
    ),
}


@a_few_modes
@pytest.mark.parametrize("reentrant", [None, True])
@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize("name", SHARED)
def test_one_that_all_share_is_not_taken_for_theirs(name, turned, reentrant, options):
    """It has the shape of the first, as there are as many positions as samples."""
    forward, parts, make = SHARED[name]

    def whole(m, x, beside):
        beside = beside.T if turned else beside
        if reentrant is None:
            return forward(m, x, beside)
        live = torch.zeros((), requires_grad=True)
        return checkpoint(lambda x, _: forward(m, x, beside), x, live, use_reentrant=True)

    beside = make(N, N)

    def loss(m, x):
        return m(x, beside.to(x.dtype)).square().sum() / len(x)

    exact_or_refused(Model(whole, **parts), loss, make(N, N), **options)


class Elsewhere(nn.Module):
    """Two outputs with their samples in different places, of x [N, T, D]."""

    def __init__(self, places):
        super().__init__()
        self.places = places
        self.v, self.w = (nn.Parameter(torch.randn(5)) for _ in range(2))

    def forward(self, x):
        return ELSEWHERE[self.places](x * self.w, torch.tanh(x * self.v))


# at_home() undoes each, by its name.
ELSEWHERE = {
    "[T, N, D] and [N, 1, T, D]": lambda a, b: (a.transpose(0, 1), b[:, None]),
    "[N, 1, T, D] and [T, N, D]": lambda a, b: (b[:, None], a.transpose(0, 1)),
    "[T, N, D] and [N, T, D]": lambda a, b: (a.transpose(0, 1), b),
    "[N, T, D] and [T, N, D]": lambda a, b: (b, a.transpose(0, 1)),
    "rows t*N+n and [T, N, D]": lambda a, b: (a.transpose(0, 1).flatten(0, 1), b.transpose(0, 1)),
    "rows t*N+n and [N, T, D]": lambda a, b: (a.transpose(0, 1).flatten(0, 1), b),
    "[T, N, D] and rows n*T+t": lambda a, b: (a.transpose(0, 1), b.flatten(0, 1)),
    "[N, T, D] and rows t*N+n": lambda a, b: (b, a.transpose(0, 1).flatten(0, 1)),
}


def at_home(name, output, n):
    """[N, T, D] of an output, by what its part of the name says."""
    if output.dim() == 2:
        rows = (n, -1) if name.endswith("n*T+t") else (-1, n)
        output = output.unflatten(0, rows)
        return output if name.endswith("n*T+t") else output.transpose(0, 1)
    if output.dim() == 4:
        return output[:, 0]
    return output.transpose(0, 1) if name == "[T, N, D]" else output


WHERE = {
    "plain": lambda use, x: use(x),
    "a checkpoint": lambda use, x: checkpoint(use, x, use_reentrant=False),
    "a reentrant checkpoint": lambda use, x: checkpoint(use, x, use_reentrant=True),
    "below a Function of the user's": lambda use, x: tuple(map(Same.apply, use(x))),
}


def elsewhere(places, where="plain"):
    names = places.split(" and ")

    def outputs(m, x):
        each = zip(names, WHERE[where](m.t, m.i(x)), strict=True)
        return tuple(at_home(name, output, len(x)) for name, output in each)

    return Model(outputs, t=Elsewhere(places), i=nn.Linear(3, 5))


@a_few_modes
@pytest.mark.parametrize("first", ["samples", "positions"])
def test_a_layout_that_one_of_several_outputs_cannot_have_is_refused(first, options):
    def outputs(m, x):
        x = m.i(x)
        return m.t(x if first == "samples" else x.transpose(0, 1))

    def pair(m, x):
        a, b = (y if first == "positions" else y.transpose(0, 1) for y in (x * m.v, x * m.w))
        return a, torch.tanh(b)[:, None]  # [T, N, D] and [T, 1, N, D]

    part = Model(pair, v=torch.randn(5), w=torch.randn(5))
    loss = lambda m, x: sum(y.square().sum() / len(x) for y in m(x))  # noqa: E731
    refused(Model(outputs, t=part, i=nn.Linear(3, 5)), loss, torch.randn(N, 6, 3), names=["t.w"],
            match="the 4 samples of the pass", layout={"t": "sequence"}, **options)  # fmt: skip


@a_few_modes
@pytest.mark.parametrize("where", WHERE)
@pytest.mark.parametrize("places", ELSEWHERE)
def test_samples_in_different_places_of_several_outputs_are_exact_or_refused(
    places, where, options
):
    """In each step, whichever of the outputs the losses before used, of whatever sizes."""
    model = elsewhere(places, where).double()
    with torchgradx.attach(model, **options) as probe:
        for t, used in [(6, 3), (1, 3), (8, 3), (N, 2), (1, 2), (8, 1), (6, 2)]:

            def loss(model, x, used=used):
                each = [y for k, y in enumerate(model(x)) if used & (k + 1)]
                return sum(y.sin().square().flatten(1).sum(1).mean() for y in each)

            x = torch.randn(N, t, 3, dtype=torch.float64)
            loss(model, x).backward()
            with contextlib.suppress(torchgradx.CoverageError):
                close_named(probe.norms(per="parameter"), loop(model, loss, x))


T = 5


def resized(x):
    return nn.functional.interpolate(x[None], (4, 4))[0]


def padded(m, xs):
    lengths = torch.tensor([len(x) for x in xs])
    h = m.l(pad_sequence(xs, batch_first=True))
    mask = torch.arange(h.shape[1]) < lengths[:, None]
    return (h * mask[..., None]).sum(1) / lengths[:, None]


FORWARDS = {
    "stacked": (lambda m, xs: torch.tanh(m.l(torch.stack(xs))).sum(1), lambda n: [(T, 3)] * n),
    "stacked tokens": (lambda m, xs: torch.tanh(m.l(torch.stack(xs))), lambda n: [(T, 3)] * n),
    "padded": (padded, lambda n: [(2 + k, 3) for k in range(n)]),
    "images": (lambda m, xs: m.c(torch.stack([resized(x) for x in xs])).flatten(1),
               lambda n: [(3, 5 + k, 6) for k in range(n)]),
    "centred": (lambda m, xs: m.l(torch.stack([x - x.mean(0) for x in xs])).sum(1),
                lambda n: [(T, 3)] * n),
}  # fmt: skip


@a_few_modes
@pytest.mark.parametrize("n", [2, 3, 4, T])
@pytest.mark.parametrize("name", FORWARDS)
def test_a_list_of_samples_is_exact(name, n, options):
    """Also where a sample has as many rows, or channels, as there are samples: or refused."""
    forward, sizes = FORWARDS[name]
    model = Model(forward, l=nn.Linear(3, 2), c=nn.Conv2d(3, 2, 3)).double()
    xs = [torch.randn(size).double() for size in sizes(n)]
    with torchgradx.attach(model, batch_size=lambda args, kwargs: len(args[0]), **options) as probe:
        square(model, xs).backward()
        if name == "stacked tokens" and n == T:
            with pytest.raises(torchgradx.CoverageError, match="two dimensions"):
                probe.norms()
            return
        got = probe.norms(per="parameter")
    for k, x in enumerate(xs):
        model.zero_grad()
        square(model, [x]).backward()
        want = {p: q.grad.norm()[None] for p, q in model.named_parameters() if q.grad is not None}
        close_named({p: norms[k : k + 1] for p, norms in got.items() if p in want}, want)


@a_few_modes
@pytest.mark.parametrize("n", [2, 3, 4])
def test_a_list_of_arguments_is_exact(n, options):
    """Of as many as there are samples, or of others."""
    model = Model(lambda m, a, b, c: m.l(torch.tanh(a * b)) + m.l(c), l=nn.Linear(3, 2)).double()
    whole = Model(lambda m, xs: model(*xs), inner=model)
    batch = [torch.randn(n, 3).double() for _ in range(3)]
    with torchgradx.attach(whole, **options) as probe:
        square(whole, batch).backward()
        got = probe.norms(per="parameter")
    close_named({name[6:]: norms for name, norms in got.items()}, loop(model, square, *batch))


@a_few_modes
@pytest.mark.parametrize("n", [2, 3, 4])
def test_a_dictionary_of_arguments_is_none_of_samples(n, options):
    """Of as many as there are samples."""
    model = Model(lambda m, given: torch.tanh(m.l(given["a"])) * given["b"] + given["c"],
                  l=nn.Linear(n, 5)).double()  # fmt: skip
    sizes = {"a": n, "b": 5, "c": 5, "d": 5}
    given = {name: torch.randn(n, sizes[name]).double() for name in "abcd"[: max(3, n)]}
    with torchgradx.attach(model, **options) as probe:
        square(model, given).backward()
        got = probe.norms(per="parameter")
    each = Model(lambda m, *batch: m.inner(dict(zip("abcd", batch, strict=False))), inner=model)
    want = loop(each, square, *given.values())
    close_named({f"inner.{name}": norms for name, norms in got.items()}, want)


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

    kind = Scaled if own else nn.Linear
    model = Model(forward, l=kind(3, 4), o=nn.Linear(4, 2))
    with torchgradx.attach(model, **options) as probe:
        square(model, torch.randn(4, T, 3)).backward()
        assert model.o.weight.grad is not None or not options.get("weight_grad", True)
        with pytest.raises(
            torchgradx.CoverageError,
            match=r"l\.weight.*: .*(nested tensor|could not be looked for)",
        ):
            probe.norms()
