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
    refused,
    seeded,  # noqa: F401
    square,
)
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

N, T = 6, 4
LENGTHS = torch.tensor([4, 2, 3, 1, 2, 4])
CLASSES = torch.tensor([3, 1, 1, 2, 3, 3])


def to_the_right(lengths):
    """Of each position, whether it is a sample's; those before are padding."""
    return torch.arange(T) >= T - lengths[:, None]


MADE = {  # of ids [N], a number for each sample
    "over the largest": lambda k: k / k.max(),
    "less the least": lambda k: (k - k.min()).float(),
    "over the sum": lambda k: k / k.sum(),
    "how many of its class": lambda k: 1 / k.bincount()[k],
    "its class's share": lambda k: (k.bincount() / len(k))[k],
    "counted by others": lambda k: 1 / F.one_hot(k).sum(0)[k],
    "how many are alike": lambda k: 1 / (k[:, None] == k).sum(1),
    "of distinct ones": lambda k: k.unique(return_inverse=True)[1].sqrt(),
    "rank": lambda k: k.argsort().argsort().sqrt(),
    "rank by all": lambda k: (k[:, None] > k).sum(1).sqrt(),
    "place among all": lambda k: torch.searchsorted(k.sort().values, k).sqrt(),
    "summed up": lambda k: k.cumsum(0).sqrt(),
}


@a_few_modes
@pytest.mark.parametrize("name", MADE)
def test_data_that_are_scaled_by_one_are_refused(name, options):
    model = Model(lambda m, x, k: m.l(x * MADE[name](k)[:, None]), l=nn.Linear(3, 2))
    x = torch.randn(N, 3)
    refused(model, square, x, CLASSES, names=["l.weight"], match="mixes", **options)


CHOSEN = {  # of ids [N], others
    "less the least": lambda k: k - k.min(),
    "of distinct ones": lambda k: k.unique(return_inverse=True)[1],
    "rank": lambda k: k.argsort().argsort(),
    "summed up": lambda k: k.cumsum(0) % 9,
    "padded and cut": lambda k: F.pad(k, (1, 0))[:-1],
    "twice and cut": lambda k: torch.cat([k, k])[1 : len(k) + 1],
}


@a_few_modes
@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("name", CHOSEN)
def test_so_are_rows_that_one_chooses_of_a_table(name, frozen, options):
    model = Model(lambda m, x, k: m.l(x + m.e(CHOSEN[name](k))), e=nn.Embedding(9, 3),
                  l=nn.Linear(3, 2))  # fmt: skip
    model.e.requires_grad_(not frozen)
    x = torch.randn(N, 3)
    refused(model, square, x, CLASSES, names=["l.weight"], match="mixes", **options)


TABLE = torch.linspace(-1, 1, 27).view(9, 3)
READ = {  # a table, by ids [N]
    "indexed": lambda t, i: t[i],
    "index_select": lambda t, i: t.index_select(0, i),
    "gathered": lambda t, i: t.gather(0, i[:, None].expand(-1, 3)),
    "looked up": lambda t, i: F.embedding(i, t),
}


@a_few_modes
@pytest.mark.parametrize("read", READ)
@pytest.mark.parametrize("name", ["less the least", "rank"])
def test_so_are_rows_of_a_constant(name, read, options):
    model = Model(lambda m, x, k: m.l(x + READ[read](TABLE.to(x), CHOSEN[name](k))),
                  l=nn.Linear(3, 2))  # fmt: skip
    refused(model, square, torch.randn(N, 3), CLASSES, names=["l.weight"], match="mixes", **options)


WHOLE = {  # a number that is made whole
    "rounded": lambda x, k: 1 + x.amax().round().int(),
    "the exponent of the largest": lambda x, k: 2.0 ** x.abs().amax().log2().ceil().int(),
    "frexp": lambda x, k: 2.0 ** torch.frexp(x.abs().amax()).exponent,
    "a whole mean": lambda x, k: k.double().mean().long(),
}


@a_few_modes
@pytest.mark.parametrize("name", WHOLE)
def test_so_are_data_over_a_statistic_that_is_made_whole(name, options):
    model = Model(lambda m, x, k: m.l(x / WHOLE[name](x, k)), l=nn.Linear(3, 2))
    refused(model, square, torch.randn(N, 3), LENGTHS, names=["l.weight"], match="mixes", **options)


TOGETHER = {
    "time over the longest": lambda m, x, k: m.l(x + (torch.arange(T) / k.max())[:, None]),
    "tokens": lambda m, x, k: m.l(x * to_the_right(k)[..., None] / to_the_right(k).sum()),
    "tokens, between layers": lambda m, x, k: m.l(torch.tanh(m.r(x)) / k.sum()),
    "classes of a loss": lambda m, x, k: m.l(x) / k.bincount()[k][:, None, None],
}


@a_few_modes
@pytest.mark.parametrize("name", TOGETHER)
def test_so_are_sequences(name, options):
    model = Model(TOGETHER[name], l=nn.Linear(3, 2), r=nn.Linear(3, 3))
    refused(model, square, torch.randn(N, T, 3), LENGTHS, names=["l.weight"], match="mixes",
            **options)  # fmt: skip


def written(k, where):
    flags = torch.zeros(N, 1)
    flags[where] = 1.0
    return flags


FLAGS = {  # of ids [N], T
    "among the longest": lambda k: torch.isin(k, k.max())[:, None],
    "one of the two longest": lambda k: torch.isin(torch.arange(N), k.topk(2).indices)[:, None],
    "written where": lambda k: written(k, k == k.max()),
    "written at": lambda k: written(k, (k == k.max()).nonzero()[:, 0]),
    "filled at": lambda k: torch.zeros(N, 1).index_fill(0, k.argmax(0, True), 1.0),
    "copied to": lambda k: torch.zeros(N, 1).index_copy(0, k.argmax(0, True), torch.ones(1, 1)),
    "looked up": lambda k: torch.tensor([0.0, 1.0])[(k == k.max()).long()][:, None],
    "as long as the longest": lambda k: (k == k.max())[:, None],
    "longer than the least": lambda k: (k - k.min() > 0)[:, None],
    "of the longest, and there": lambda k: to_the_right(k) & (k == k.max())[:, None],
    "not there in any": lambda k: ~to_the_right(k).any(0)[None],
    "there in all": lambda k: to_the_right(k).all(0)[None],
    "there in three": lambda k: (to_the_right(k).sum(0) > 2)[None],
    "the first of the longest": lambda k: F.one_hot(k.argmax(0), N)[:, None],
    "set at the longest": lambda k: torch.zeros(N).scatter(0, k.argmax(0, True), 1.0)[:, None],
}


@a_few_modes
@pytest.mark.parametrize("how", ["factor", "fill", "where"])
@pytest.mark.parametrize("name", FLAGS)
def test_so_are_samples_that_meet_flags_of_the_batch(name, how, options):
    def meet(h, flags):
        if how == "factor":
            return h * flags[..., None]
        flags = flags.bool()[..., None]
        return h.masked_fill(flags, 0) if how == "fill" else torch.where(flags, h, 1.0)

    model = Model(lambda m, x, k: m.l(meet(torch.tanh(m.r(x)), FLAGS[name](k))), l=nn.Linear(3, 2),
                  r=nn.Linear(3, 3))  # fmt: skip
    refused(model, square, torch.randn(N, T, 3), LENGTHS, names=["l.weight"], match="mixes",
            **options)  # fmt: skip


def test_so_are_the_features_of_one_that_has_the_largest():
    def forward(m, x):
        h = torch.tanh(m.r(x))
        return m.l(h * F.one_hot(h.argmax(0), N).T)

    model = Model(forward, l=nn.Linear(3, 2), r=nn.Linear(3, 3))
    refused(model, square, torch.randn(N, 3), names=["l.weight"], match="mixes")


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
