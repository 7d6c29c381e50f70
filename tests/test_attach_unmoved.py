"""Models that sort, scatter, cut and join other things than samples: that is no order of these."""

import pytest
import torch
from attach_oracle import (
    Model,
    a_few_modes,
    check,
    square,
)
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence

N, T, EDGES = 4, 6, 9


def linears(**sizes):
    return {name: nn.Linear(*size) for name, size in sizes.items()}


def ids(high, *sizes):
    return torch.randint(0, high, sizes)


def one_hot(m, x, kind):
    into = x.new_zeros(len(x), 5).scatter_(1, kind[:, None], 1.0)
    return m.l(torch.cat([x, into], 1))


def bag_of_words(m, x, words):
    counts = x.new_zeros(len(x), 5).scatter_add(1, words, torch.ones_like(words).to(x))
    return m.l(torch.cat([x, counts], 1))


def windows(m, x):
    return m.l(torch.cat([x[:, :-2], x[:, 1:-1], x[:, 2:]], 2)).flatten(1)


def shifted(m, x):
    """Positions, and with them rows of T = N in another order than the samples'."""
    x = torch.cat([x[:, -1:], x[:, :-1]], 1)
    return m.l(torch.stack(x.unbind(1)[::-1], 1)).flatten(1)


def packed(m, x, lengths):
    return m.g(pack_padded_sequence(x, lengths, True, enforce_sorted=False))[1][0]


def as_long_as_the_longest(m, x, lengths):
    """Sorted lengths, which say no more."""
    longest = lengths.sort(descending=True).values[0]
    return m.l(x.where(torch.arange(x.shape[1])[:, None] < longest.clamp(min=T), 0)).flatten(1)


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


def edges_of_inputs(m, x, start, end):
    offset = torch.arange(len(x))[:, None] * x.shape[1]
    h, start, end = x.flatten(0, 1), (start + offset).flatten(), (end + offset).flatten()
    return m.o(m.l(torch.zeros_like(h).index_add(0, end, h[start]))).view(len(x), -1)


def adjacency(m, x, start, end):
    t = x.shape[1]
    near = x.new_zeros(len(x), t * t).scatter_(1, start * t + end, 1.0).view(-1, t, t)
    return m.o(torch.tanh(m.l(near @ x))).flatten(1)


def images_among_words(m, words, image):
    """As LLaVA: all frozen but what comes after."""
    among = (torch.arange(words.shape[1]) < 2)[None, :, None] & (words >= 0)[:, :, None]
    h = m.e(words)
    return m.l(torch.tanh(h.masked_scatter(among.expand_as(h), m.v(image)))).flatten(1)


def by_kind(m, x, kind):
    y = torch.empty_like(x)
    y[kind > 2], y[kind <= 2] = x[kind > 2] * 2, x[kind <= 2].tanh()
    return m.l(y)


def images_of_all_sizes(m, x):
    """As detectors: each made ready by itself, and written into its place."""
    y = x.new_zeros(len(x), 3, 6, 6)
    for k, image in enumerate(x.unbind()):
        y[k, :, :5, :5].copy_((image - image.mean()) / 2)
    return m.c(y).flatten(1)


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
    "one-hot": (one_hot, linears(l=(8, 2)), (N, 3), (ids(5, N),)),
    "a bag of words": (bag_of_words, linears(l=(8, 2)), (N, 3), (ids(5, N, T),)),
    "windows": (windows, linears(l=(9, 2)), (N, T, 3), ()),
    "shifted": (shifted, linears(l=(3, 2)), (N, N, 3), ()),
    "packed": (packed, {"g": nn.GRU(3, 2, batch_first=True)}, (N, T, 3), (LENGTHS,)),
    "as long as the longest": (as_long_as_the_longest, linears(l=(3, 2)), (N, T, 3), (LENGTHS,)),
    "best classes": (best_classes, linears(l=(3, 5), o=(5, 2)), (N, 3), ()),
    "masked tokens": (masked_tokens, linears(l=(3, 3), o=(3, 2)), (N, T, 3), ()),
    "masked tokens, T = N": (masked_tokens, linears(l=(3, 3), o=(3, 2)), (N, N, 3), ()),
    "graphs": (graphs, linears(l=(3, 4), o=(4, 2)), (N, T, 3), (ids(T, N, EDGES),) * 2),
    "edges of inputs": (edges_of_inputs, linears(l=(3, 4), o=(4, 2)), (N, T, 3),
                        (ids(T, N, EDGES),) * 2),
    "adjacency": (adjacency, linears(l=(3, 4), o=(4, 2)), (N, T, 3), (ids(T, N, EDGES),) * 2),
    "images among words": (
        images_among_words, {"e": nn.Embedding(7, 3).requires_grad_(False),
                             "v": nn.Linear(5, 3).requires_grad_(False), "l": nn.Linear(3, 2)},
        ids(7, N, T), (torch.randn(N, 2, 5),)),
    "by kind": (by_kind, linears(l=(3, 2)), (N, 3), (torch.tensor([3, 0, 4, 1]),)),
    "images of all sizes": (images_of_all_sizes, {"c": nn.Conv2d(3, 2, 3)}, (N, 3, 5, 5), ()),
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
