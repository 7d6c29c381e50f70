"""Models that mix, sort, cut and join anything but their samples, before the layers and between
them: exact."""

import copy

import pytest
import torch
import torch.nn.functional as F
from attach_oracle import Model, a_few_modes, check, close_named, loop, square
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence

import torchgradx

N, T, EDGES = 4, 6, 9


def linears(**sizes):
    return {name: nn.Linear(*size) for name, size in sizes.items()}


def ids(high, *sizes):
    return torch.randint(0, high, sizes)


def windows(m, x):
    return m.l(torch.cat([x[:, :-2], x[:, 1:-1], x[:, 2:]], 2)).flatten(1)


def shifted(m, x):
    """Positions, and with them rows of T = N in another order than the samples'."""
    x = torch.cat([x[:, -1:], x[:, :-1]], 1)
    return m.l(torch.stack(x.unbind(1)[::-1], 1)).flatten(1)


def packed(m, x, lengths):
    return m.g(pack_padded_sequence(x, lengths, True, enforce_sorted=False))[1][0]


def best_classes(m, x):
    h = m.l(x)
    best, which = h.topk(2, 1)
    return m.o(torch.zeros_like(h).scatter(1, which, best.softmax(1)))


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


def adjacency(m, x, start, end):
    t = x.shape[1]
    near = x.new_zeros(len(x), t * t).scatter_(1, start * t + end, 1.0).view(-1, t, t)
    return m.o(torch.tanh(m.l(near @ x))).flatten(1)


def images_among_words(m, words, image):
    """As LLaVA: all frozen but what comes after."""
    among = (torch.arange(words.shape[1]) < 2)[None, :, None] & (words >= 0)[:, :, None]
    h = m.e(words)
    return m.l(torch.tanh(h.masked_scatter(among.expand_as(h), m.v(image)))).flatten(1)


def one_by_one(m, x, lengths):
    return m.l(torch.stack([row[int(k) - 1] for row, k in zip(x, lengths, strict=True)]))


def positions_mixed(m, x):
    t = x.shape[1]
    return m.l(torch.ones(t, t).tril().to(x) @ x).flatten(1)


def turned_images(m, x):
    return (m.c(x) + m.c(x.flip(3)) + m.c(x.rot90(1, (2, 3))) + m.c(x.roll(1, 2))).flatten(1)


def codes(m, x):
    """As VQ-VAE: the nearest row of a table."""
    h = m.l(x)
    nearest = torch.cdist(h.detach().flatten(0, 1), m.e.weight.detach()).argmin(1)
    chosen = h.new_zeros(len(nearest), 7).scatter_(1, nearest[:, None], 1.0) @ m.e.weight
    return m.o(h + chosen.view_as(h)).flatten(1)


def shuffled_keys(m, x):
    """As momentum encoders have them; here of the layer that is trained."""
    with torch.no_grad():
        order = torch.randperm(len(x)).flip(0)
        keys = m.l(x[order])[order.argsort()]
    return m.l(x) * keys


def shuffled_keys_written(m, x):
    with torch.no_grad():
        order = torch.randperm(len(x)).flip(0)
        keys = x.new_empty(len(x), 2)
        keys[order] = m.l(x[order])
    return m.l(x) * keys


def turned_and_back(m, x):
    order = torch.arange(len(x)).roll(1)
    return m.l(torch.tanh(x[order])[order.argsort()])


LENGTHS = torch.tensor([3, 6, 2, 4])
USUAL = {
    "windows": (windows, linears(l=(9, 2)), (N, T, 3), ()),
    "shifted": (shifted, linears(l=(3, 2)), (N, N, 3), ()),
    "packed": (packed, {"g": nn.GRU(3, 2, batch_first=True)}, (N, T, 3), (LENGTHS,)),
    "best classes": (best_classes, linears(l=(3, 5), o=(5, 2)), (N, 3), ()),
    "masked tokens": (masked_tokens, linears(l=(3, 3), o=(3, 2)), (N, T, 3), ()),
    "masked tokens, T = N": (masked_tokens, linears(l=(3, 3), o=(3, 2)), (N, N, 3), ()),
    "graphs": (graphs, linears(l=(3, 4), o=(4, 2)), (N, T, 3), (ids(T, N, EDGES),) * 2),
    "adjacency": (adjacency, linears(l=(3, 4), o=(4, 2)), (N, T, 3), (ids(T, N, EDGES),) * 2),
    "images among words": (
        images_among_words, {"e": nn.Embedding(7, 3).requires_grad_(False),
                             "v": nn.Linear(5, 3).requires_grad_(False), "l": nn.Linear(3, 2)},
        ids(7, N, T), (torch.randn(N, 2, 5),)),
    "one by one": (one_by_one, linears(l=(3, 2)), (N, T, 3), (LENGTHS,)),
    "positions mixed, T = N": (positions_mixed, linears(l=(3, 2)), (N, N, 3), ()),
    "turned images, all of N": (turned_images, {"c": nn.Conv2d(N, 2, 3)}, (N, N, N, N), ()),
    "shuffled keys": (shuffled_keys, linears(l=(3, 2)), (N, 3), ()),
    "shuffled keys, written": (shuffled_keys_written, linears(l=(3, 2)), (N, 3), ()),
    "turned and back": (turned_and_back, linears(l=(3, 2)), (N, 3), ()),
    "codes": (codes, {**linears(l=(3, 3), o=(3, 2)), "e": nn.Embedding(7, 3)}, (N, T, 3), ()),
}  # fmt: skip


@a_few_modes
@pytest.mark.parametrize("name", USUAL)
def test_what_orders_anything_but_the_samples_is_exact(name, options):
    forward, parts, x, others = USUAL[name]
    x = x if isinstance(x, torch.Tensor) else torch.randn(x)
    check(Model(forward, **parts), square, x, *others, **options)


SAMPLES, STEPS = 6, 4


@a_few_modes
def test_a_frozen_batch_norm_is_refused_until_eval(options):
    frozen = nn.Sequential(nn.Conv1d(STEPS, 3, 1), nn.BatchNorm1d(3), nn.ReLU()).requires_grad_(
        False
    )
    model = nn.Sequential(frozen, nn.Flatten(), nn.Linear(15, 2))
    x = torch.randn(SAMPLES, STEPS, 5)
    with torchgradx.attach(model, **options) as probe:
        square(model, x).backward()
        with pytest.raises(torchgradx.CoverageError, match=r"eval\(\)") as error:
            probe.norms()
    assert error.value.parameters == ("2.weight", "2.bias")
    check(model.eval(), square, x, **options)


def a_count(m, x):
    """A mean over tokens, as of a loss inside of the model."""
    mask = (x[:, :, :1] > -9).to(x)
    return m.l(x) * mask / (mask.sum() / len(x))


RUNNING = {
    "frozen": lambda: nn.BatchNorm1d(STEPS).requires_grad_(False),
    "no weights": lambda: nn.InstanceNorm1d(STEPS, track_running_stats=True),
}


@pytest.mark.parametrize("name", RUNNING)
def test_running_statistics_are_as_they_would_be(name):
    """No schema says that an operation writes into them."""
    model = nn.Sequential(RUNNING[name](), nn.Linear(3, 2))
    twin, x = copy.deepcopy(model), torch.randn(SAMPLES, STEPS, 3)
    with torchgradx.attach(model):
        for m in (model, twin):
            square(m, x).backward()
    assert torch.equal(model[0].running_mean, twin[0].running_mean)
    assert torch.equal(model[0].running_var, twin[0].running_var)


def balanced(m, x):
    """Experts, of which the load is counted."""
    gates = m.g(x).softmax(-1)
    chosen = F.one_hot(gates.argmax(-1), 2).to(x)
    m.scale["balance"] = float((chosen.mean(0) * gates.mean(0)).sum())
    return m.l(x) * gates


def both_views(m, x):
    first, second = torch.cat([x, x.flip(1)]).tanh().chunk(2)
    return m.l(first) * m.l(second)


APART = {
    "a count": a_count,
    "balanced": balanced,
    "both views": both_views,
}


@a_few_modes
@pytest.mark.parametrize("name", APART)
def test_what_leaves_samples_apart_is_exact(name, options):
    parts = {"l": nn.Linear(3, 2), "g": nn.Linear(3, 2), "k": nn.Linear(6, 2)}
    check(Model(APART[name], scale={}, **parts), square, torch.randn(SAMPLES, STEPS, 3), **options)


@a_few_modes
def test_weights_that_a_first_batch_sets_are_given(options):
    """As ActNorm's."""

    def forward(m, x):
        if not m.count:
            m.scale.data.copy_(1 / x.std((0, 1)))
            m.count += 1
        return m.l(x * m.scale)

    parts = {"scale": torch.zeros(3), "l": nn.Linear(3, 2)}
    model, x = Model(forward, count=0, **parts).double(), torch.randn(SAMPLES, STEPS, 3).double()
    with torchgradx.attach(model, **options) as probe:
        square(model, x).backward()
        norms = probe.norms(per="parameter")
    close_named(norms, loop(model, square, x))


def test_random_numbers_are_drawn_as_they_would_be():
    with torch.library._scoped_library("user", "FRAGMENT") as library:
        library.define("noisy(Tensor x) -> Tensor")
        library.impl("noisy", lambda x: x + torch.randn_like(x), "CompositeExplicitAutograd")
        model = Model(lambda m, x: m.l(torch.ops.user.noisy(x)), l=nn.Linear(3, 2))
        twin, x = copy.deepcopy(model), torch.randn(SAMPLES, STEPS, 3)
        torch.manual_seed(1)
        square(twin, x).backward()
        want = torch.rand(1)
        torch.manual_seed(1)
        with torchgradx.attach(model) as probe:
            square(model, x).backward()
            assert torch.equal(torch.rand(1), want)
            assert probe.norms().shape == (SAMPLES,)
    torch.testing.assert_close(model.l.weight.grad, twin.l.weight.grad)


def test_statistics_may_be_returned_beside_what_is_trained():
    def loss(model, x):
        return model(x)[0].square().flatten(1).sum(1).mean()

    check(
        Model(lambda m, x: (m.l(x), x.mean(0)), l=nn.Linear(3, 2)),
        loss,
        torch.randn(SAMPLES, STEPS, 3),
    )


def watched(m, x):
    h = torch.tanh(m.r(x))
    m.seen = {"mean": h.mean(0).detach(), "likeness": (h @ h.T).detach(), "largest": float(h.max())}
    return m.o(h - h.max(-1, keepdim=True).values.detach())


def straight_through(m, x):
    h = m.r(x)
    return m.o(h + (h.round() - h).detach())


@a_few_modes
@pytest.mark.parametrize("forward", [watched, straight_through])
def test_what_is_detached_of_each_or_only_looked_at_is_exact(forward, options):
    model = Model(forward, r=nn.Linear(3, 2), o=nn.Linear(2, 2), seen=None)
    check(model, square, torch.randn(SAMPLES, 3), **options)


TARGETS = {  # h and d [N, T, 2], each with its own
    "a loss": lambda h, d: F.mse_loss(h, d, reduction="none"),
    "likeness": lambda h, d: F.cosine_similarity(h, d, dim=-1),
    "attention": lambda h, d: F.scaled_dot_product_attention(h, d, d),
    "distances": lambda h, d: torch.cdist(h, d),
    "likeness of tokens": lambda h, d: torch.einsum("nti,nsi->nts", h, d).softmax(-1),
    "gates": lambda h, d: h * d.sigmoid() + d,
    "together": lambda h, d: torch.tanh(torch.cat([h, d], 1)),
}


@a_few_modes
@pytest.mark.parametrize("size", [STEPS, SAMPLES])
@pytest.mark.parametrize("way", TARGETS)
def test_detached_samples_that_meet_their_own_are_exact(way, size, options):
    def forward(m, x):
        return TARGETS[way](torch.tanh(m.r(x)), m.frozen(x).sin())

    model = Model(forward, r=nn.Linear(3, 2), frozen=nn.Linear(3, 2).requires_grad_(False))
    check(model, square, torch.randn(SAMPLES, size, 3), **options)


def read_first(m, h):
    out = h @ m.queue.clone().t()
    m.queue[: len(h)] = h.detach()
    return out


def own_rows(m, h):
    m.queue[: len(h)] = h.detach()
    return h * m.queue[: len(h)] + h


def cached(m, h):
    """As of keys, step by step."""
    m.cache[: len(h), :1] = h[:, None].detach()
    return (h[:, None] * m.cache[: len(h), :2]).sum(1)


def with_a_row_of_padding(m, h):
    padded = torch.zeros(len(h) + 1, 2).to(h)
    padded[1:] = h.detach()
    other = h.new_zeros(len(h) + 1, 2)
    other[1:] = h.detach().sin()
    return h * (padded * 2 + other).exp()[1:]


@a_few_modes
@pytest.mark.parametrize("way", [read_first, own_rows, cached, with_a_row_of_padding])
def test_a_queue_of_others_and_rows_of_its_own_are_exact(way, options):
    model = Model(lambda m, x: way(m, torch.tanh(m.r(x))), r=nn.Linear(3, 2)).double()
    model.register_buffer("queue", torch.randn(9, 2).double())
    model.register_buffer("cache", torch.zeros(9, 3, 2).double())
    x, twin = torch.randn(SAMPLES, 3).double(), copy.deepcopy(model)
    want = []
    for k in range(SAMPLES):
        one = copy.deepcopy(twin)
        square(one, x[k : k + 1]).backward()
        want.append([p.grad.norm() for p in one.parameters()])
    with torchgradx.attach(model, **options) as probe:
        square(model, x).backward()
        got = probe.norms(per="parameter")
    columns = map(torch.stack, zip(*want, strict=True))
    close_named(got, dict(zip(got, columns, strict=True)))
