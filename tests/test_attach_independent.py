"""Models that mix, sort, cut and join anything but their samples, or return their loss: exact."""

import copy

import pytest
import torch
import torch.nn.functional as F
from attach_oracle import Model, a_few_modes, check, square
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
    "windows": (windows, linears(l=(9, 2)), (N, T, 3), ()),
    "packed": (packed, {"g": nn.GRU(3, 2, batch_first=True)}, (N, T, 3), (LENGTHS,)),
    "best classes": (best_classes, linears(l=(3, 5), o=(5, 2)), (N, 3), ()),
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


SAMPLES, STEPS = 6, 4
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


EACH, WORDS, CLASSES = 5, 7, 3


def each(logits, labels):
    return F.cross_entropy(logits, labels, reduction="none")


def focal(logits, labels):
    rows = each(logits, labels)
    return ((1 - torch.exp(-rows)).square() * rows).mean()


def logged(logits, labels):
    """What is made of it for a log changes nothing."""
    loss = each(logits, labels).mean()
    with torch.no_grad():
        loss.exp().sqrt()
    loss.detach().exp().item()
    return loss


def columns_in_turn(logits, labels):
    loss = logits.new_zeros(())
    for column in logits.unbind(1):
        loss += 0.5 * column.square().mean() / logits.new_tensor(2.0)
    return torch.stack([loss, each(logits, labels).mean()]) @ logits.new_tensor([1.0, 2.0])


def of_flat_rows(logits, labels):
    return each(logits.flatten(0, 1), labels.flatten()).view(labels.shape).mean(1).mean()


def masked(logits, labels):
    rows = each(logits.mT, labels) * (labels != 0)
    return (rows.sum(1) / (labels != 0).sum(1)).mean()


LOSSES = {  # of a sample's own classes, or of each of its words
    "focal": (focal, ()),
    "over a count": (lambda o, y: each(o, y).sum() / (y >= 0).sum().clamp(min=1), ()),
    "several in turn": (columns_in_turn, ()),
    "logged": (logged, ()),
    "words in rows": (of_flat_rows, (WORDS,)),
    "words, masked": (masked, (WORDS,)),
}


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
