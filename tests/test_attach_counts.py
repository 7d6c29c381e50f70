"""Numbers of the batch, as its longest length: samples whose data are made with one are mixed, for
alone each has another. As sizes, offsets and indices they are harmless."""

from itertools import pairwise

import pytest
import torch
import torch.nn.functional as F
from attach_oracle import (
    Model,
    a_few_modes,
    check,
    square,
)
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

N, T = 6, 4
LENGTHS = torch.tensor([4, 2, 3, 1, 2, 4])


def to_the_right(lengths):
    """Of each position, whether it is a sample's; those before are padding."""
    return torch.arange(T) >= T - lengths[:, None]


def trimmed(m, x, k):
    mask = torch.arange(k.max()) < k[:, None]
    return F.pad(m.l(x[:, : k.max()]) * mask[..., None], (0, 0, 0, T - int(k.max())))


def packed(m, x, k):
    y = pack_padded_sequence(x, k, batch_first=True, enforce_sorted=False)
    return pad_packed_sequence(m.lstm(y)[0], batch_first=True, total_length=T)[0]


def positions(m, x, k):
    mask = to_the_right(k)
    return m.l((x + m.e((mask.cumsum(1) - 1).clamp(min=0))) * mask[..., None])


def offsets(m, x, k):
    """Rows that stand one sample after the other, without padding."""
    mask = to_the_right(k)
    ends = F.pad(k.cumsum(0), (1, 0))
    rows = torch.arange(int(ends[-1])) - ends[:-1].repeat_interleave(k)
    h = torch.zeros_like(x)
    h[mask] = x[mask] + m.e(rows).detach()
    return m.l(h)


def by_lengths(m, x, k):
    rows = x[to_the_right(k)]
    return m.l(torch.stack([own.amax(0) for own in rows.split(k.tolist())]))


def by_offsets(m, x, k):
    rows, ends = x[to_the_right(k)], [0, *k.cumsum(0).tolist()]
    return m.l(torch.stack([rows[a:b].mean(0) for a, b in pairwise(ends)]))


def of_each_graph(count):
    """Means over nodes that stand flattened, of which `nodes` says the samples."""

    def forward(m, x, k):
        nodes = torch.arange(len(x)).repeat_interleave(k)
        sums = x.new_zeros(len(x), 3).index_add(0, nodes, x[to_the_right(k)])
        return m.l(sums / count(nodes)[:, None])

    return forward


def bags(offsets):
    def forward(m, x, k):
        start = [int(n) % 9 for n in x[:, 0, 0].mul(9).long().abs()]  # others of each sample
        ids = torch.cat([(torch.arange(int(n)) + a) % 9 for n, a in zip(k, start, strict=True)])
        return m.l(m.bag(ids, offsets(k)) * x[:, 0])

    return forward


def below_the_longest(m, x, k):
    places = torch.arange(T)
    return m.l(x * ((places < k.max()) & (places < k[:, None]))[..., None])


def but_where_none_is(m, x, k):
    mask = to_the_right(k)
    kept = mask.any(0)
    return m.l((x[:, kept] * mask[:, kept][..., None]).sum(1))


def unless_any_is_inf(m, x, k):
    most = torch.where(m.r(x).isinf().any(), 10.0, 1e4)
    return m.l(torch.clamp(m.r(x), -most, most))


HARMLESS = {
    "its own largest": lambda m, x, k: m.l(x * F.one_hot(x.argmax(-1), 3)),
    "below the longest": below_the_longest,
    "but where none is": but_where_none_is,
    "unless any is inf": unless_any_is_inf,
    "bags, cut": bags(lambda k: torch.cat([k.new_zeros(1), k.cumsum(0)[:-1]])),
    "bags, less their own": bags(lambda k: k.cumsum(0) - k),
    "bags, padded": bags(lambda k: F.pad(k.cumsum(0), (1, 0))[:-1]),
    "nodes of each": of_each_graph(torch.bincount),
    "distinct nodes": of_each_graph(lambda nodes: nodes.unique(return_counts=True)[1]),
    "trimmed": trimmed,
    "packed": packed,
    "positions": positions,
    "offsets": offsets,
    "by lengths": by_lengths,
    "by offsets": by_offsets,
    "shares of its own": lambda m, x, k: m.l(x * (k / T)[:, None, None]),
    "lengths to the longest": lambda m, x, k: m.l(x * (k.clamp(max=k.max()) > 1)[:, None, None]),
}


@a_few_modes
@pytest.mark.parametrize("name", HARMLESS)
def test_sizes_offsets_and_indices_are_harmless(name, options):
    parts = {"l": nn.Linear(3, 2), "e": nn.Embedding(9, 3), "lstm": nn.LSTM(3, 2, batch_first=True)}
    parts |= {"bag": nn.EmbeddingBag(9, 3), "r": nn.Linear(3, 3)}
    model = Model(HARMLESS[name], **parts)
    check(model, square, torch.randn(N, T, 3), LENGTHS, **options)
