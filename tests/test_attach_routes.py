"""Rows that each batch sends where its values say, and segments of rows that stand flattened: what
one batch proved is not held to be so of another that chooses otherwise."""

import copy
import math

import pytest
import torch
import torch.nn.functional as F
from attach_oracle import Model, a_few_modes, check, close_named, exact_or, loop, square_second
from flat_rows import of_each, owned
from torch import nn
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence, pad_packed_sequence
from torch.utils.checkpoint import checkpoint

import torchgradx
from torchgradx import ops

N, T = 3, 4


def places(m):
    return m.flatten().nonzero()[:, 0]


def scattered(h, m, of):
    """[N, T, 3]: where m says, a function of those rows of h."""
    wide = m[..., None].expand(-1, -1, 3)
    return torch.zeros_like(h).masked_scatter(wide, of(h.masked_select(wide).view(-1, 3)))


def added(h, m, of):
    flat = places(m)
    return torch.zeros_like(h).view(-1, 3).index_add(0, flat, of(h[m])).view_as(h)


def unpacked(h, m, of):
    p = pack_padded_sequence(h, m.sum(1), batch_first=True, enforce_sorted=False)
    p = PackedSequence(of(p.data), p.batch_sizes, p.sorted_indices, p.unsorted_indices)
    return pad_packed_sequence(p, batch_first=True, total_length=h.shape[1])[0]


def by_length(m):
    return m.sum(1).argsort(descending=True, stable=True)


def in_turn(pieces, dim=0):
    """Sorted by length in a list, as for packing, and put back."""

    def route(h, m, of):
        found, order = pieces(h), by_length(m).tolist()
        rows = of(torch.stack([found[k] for k in order], dim)).unbind(dim)
        return torch.stack([rows[order.index(k)] for k in range(len(order))], dim)

    return route


def beside_padding(h, m, of):
    """Indices into the samples after a row of zeros."""
    order = by_length(m)
    rows = of(F.pad(h, (0, 0, 0, 0, 1, 0))[1 + order])
    return F.pad(rows, (0, 0, 0, 0, 1, 0))[1 + order.argsort()]


def in_the_last_dimension(h, m, of):
    order = by_length(m)
    rows = of(h.permute(1, 2, 0)[..., order].permute(2, 0, 1))
    return rows.permute(1, 2, 0)[..., order.argsort()].permute(2, 0, 1)


def into_a_view(h, m, of):
    """Where nothing but the writing tells of the choice."""
    out = torch.zeros_like(h)
    out.view(-1, 3)[places(m)] = of(h.detach().flatten(0, 1)[places(m)])
    return out


def put_back(pick):
    """[N, T, 3]: rows that are picked, in the order of their places, and put where they were."""

    def route(h, m, of):
        out = torch.zeros_like(h)
        out[m] = of(pick(h, m))
        return out

    return route


ROUTES = {
    "a mask": put_back(lambda h, m: h[m]),
    "a flat mask": put_back(lambda h, m: h.flatten(0, 1)[m.flatten()]),
    "index_select": put_back(lambda h, m: h.flatten(0, 1).index_select(0, places(m))),
    "gather": put_back(lambda h, m: h.flatten(0, 1).gather(0, places(m)[:, None].expand(-1, 3))),
    "take": put_back(lambda h, m: h.take(3 * places(m)[:, None] + torch.arange(3))),
    "looked up": put_back(lambda h, m: F.embedding(places(m), h.flatten(0, 1))),
    "pieces": put_back(
        lambda h, m: torch.cat([a[: int(k)] for a, k in zip(h, m.sum(1), strict=True)])
    ),
    "masked_scatter": scattered,
    "index_add": added,
    "packed": unpacked,
    "unbound": in_turn(lambda h: h.unbind(0)),
    "beside padding": beside_padding,
    "stacked along the second": lambda h, m, of: in_turn(lambda h: h.unbind(1), 1)(
        h.transpose(0, 1), m, of
    ).transpose(0, 1),
    "in the last dimension": in_the_last_dimension,
    "into a view": into_a_view,
}


# In a reentrant checkpoint these are taken as they come: sizes leave no doubt (docs/limits.md).
HIDDEN = {"unbound", "beside padding", "in the last dimension"}


def lengths(*values):
    return torch.arange(T) < torch.tensor(values)[:, None]


ALIKE, OTHERS = lengths(2, 2, 2), (lengths(3, 2, 1), lengths(1, 2, 3), lengths(4, 1, 1))


def routed(route, reentrant=None):
    route = ROUTES.get(route, route)

    def forward(model, x, m):
        h = torch.tanh(model.a(x))
        of = lambda rows: torch.tanh(model.c(torch.tanh(model.b(rows))))  # noqa: E731
        if reentrant is None:
            return route(h, m, of)
        return checkpoint(lambda h: route(h, m, of), h, use_reentrant=reentrant)

    layers = {key: nn.Linear(3, 3) for key in "abc"}
    return Model(forward, **layers).double()


def loss(model, x, m):
    return model(x, m).square().sum((1, 2)).mean()


def read(probe):
    try:
        return probe.norms(per="parameter"), None
    except torchgradx.CoverageError as error:
        return None, error


def rows():
    return torch.randn(N, T, 3, dtype=torch.float64)


def step(probe, model, m):
    """One that is exact, or what it is refused with."""
    x = rows()
    want = loop(model, loss, x, m)
    model.zero_grad()
    loss(model, x, m).backward()
    got, refusal = read(probe)
    if refusal is None:
        close_named(got, want)
    return refusal


@a_few_modes
@pytest.mark.parametrize(
    ("name", "reentrant"),
    [(name, way) for name in ROUTES for way in (None, False, True) if not (way and name in HIDDEN)],
)
def test_batches_of_the_same_sizes_that_choose_otherwise_are_exact_or_refused(
    name, reentrant, options
):
    model = routed(name, reentrant)
    exact = 0
    with torchgradx.attach(model, **options) as probe:
        for m in (ALIKE, OTHERS[0], ALIKE, ALIKE, *OTHERS, ALIKE):
            refusal = step(probe, model, m)
            if refusal is None:
                exact += 1
            else:
                assert reentrant or m is not ALIKE or name == "packed", refusal
                assert "b.weight" in refusal.parameters
    assert exact == 0 if reentrant else exact >= 4


def dense(m):
    return torch.ones_like(m)


def flat(h, m, of):
    """Padding is taken out where there is any."""
    if m.all():
        return of(h.flatten(0, 1)).view_as(h)
    return torch.zeros_like(h).masked_scatter(m[..., None].expand_as(h), of(h[m]))


def sorted_rows(h, m, of):
    """By length, where they are not sorted yet."""
    order = m.sum(1).argsort(stable=True)
    if bool((order == torch.arange(len(order))).all()):
        return of(h) * m[..., None]
    return (of(h[order]) * m[order, :, None])[order.argsort()]


@a_few_modes
@pytest.mark.parametrize(
    ("way", "reentrant"), [(flat, None), (flat, False), (flat, True), (sorted_rows, None),
                           (sorted_rows, False)]
)  # fmt: skip
def test_a_batch_that_goes_another_way_is_looked_at_anew(way, reentrant, options):
    """None of what the first of them showed tells of it: the uses and their sizes are alike."""
    model = routed(way, reentrant)
    with torchgradx.attach(model, **options) as probe:
        for m in (dense(ALIKE), *OTHERS, dense(ALIKE), ALIKE, OTHERS[0], dense(ALIKE)):
            refusal = step(probe, model, m)
            assert refusal is None or reentrant or not m.all(), refusal


@a_few_modes
def test_two_forwards_that_choose_differently_before_their_backwards(options):
    model, batches = routed("a mask"), [(rows(), m) for m in (ALIKE, OTHERS[0])]
    with torchgradx.attach(model, **options) as probe:
        loss(model, *batches[0]).backward()
        probe.norms()
        for value in [loss(model, *batch) for batch in batches]:
            value.backward()
        wants = [loop(model, loss, *batch) for batch in batches]  # rows go where the masks say
        want = {name: torch.cat([each[name] for each in wants]) for name in wants[0]}
        exact_or(torchgradx.CoverageError, "b.weight", probe, want)
        loss(model, *batches[0]).backward()
        exact_or(torchgradx.CoverageError, "", probe, loop(model, loss, *batches[0]))


@pytest.mark.skipif(not ops.NATIVE, reason="layers run again by backwards there")
def test_batches_that_choose_alike_are_not_proven_again(backwards):
    model = routed("a mask")
    with torchgradx.attach(model) as probe:
        for m in (ALIKE, ALIKE.flip(1), ALIKE.roll(1, 1)):  # of each sample as many
            x = rows()
            want = loop(model, loss, x, m)
            backwards.clear()
            loss(model, x, m).backward()
            close_named(probe.norms(per="parameter"), want)
        assert not backwards
        loss(model, rows(), OTHERS[0]).backward()
        assert backwards


def apart(k):
    """[N, rows, 1]: flags of the rows that are not a sample's."""
    return owned(k)[..., None] == 0


def weighed(m, h, k):
    """By a softmax over each sample's own rows."""
    scores = m.score(h)[:, 0].expand(len(k), -1)
    return scores.masked_fill(apart(k)[..., 0], -math.inf).softmax(-1) @ h


def attended(m, h, k):
    """Each row to the others of its sample, then summed."""
    scores = (h @ h.T).masked_fill(owned(k).T @ owned(k) == 0, -math.inf)
    return owned(k) @ (scores.softmax(-1) @ h)


def pooled(m, h, k):
    """By torch's attention, of one query that a sample has."""
    query = m.score.weight.expand(len(k), -1)
    q, kv = query[None, None], h[None, None]
    return F.scaled_dot_product_attention(q, kv, kv, attn_mask=owned(k)[None, None] > 0)[0, 0]


def chosen(m, h, k):
    """The row of each that scores most."""
    best = m.score(h)[None].masked_fill(apart(k), -math.inf).argmax(1, keepdim=True)
    return h.expand(len(k), -1, -1).gather(1, best.expand(-1, -1, 4))[:, 0]


def beside_rest(m, h, k):
    index = 1 + torch.arange(len(k)).repeat_interleave(k)
    rows = h.new_zeros(1, len(k) + 1, 4)
    return rows.scatter_add(1, index[None, :, None].expand(1, -1, 4), h[None])[0, 1:]


def coalesced(m, h, k):
    index = torch.arange(len(k)).repeat_interleave(k)
    return torch.sparse_coo_tensor(index[None], h, (len(k), 4)).to_dense()


SEGMENTS = {  # of rows [rows, 4] and how many are of each
    "reduced": lambda m, h, k: torch.segment_reduce(h, "sum", lengths=k),
    "bags": lambda m, h, k: F.embedding_bag(torch.arange(len(h)), h, k.cumsum(0) - k, mode="sum"),
    "pieces": lambda m, h, k: torch.stack([rows.sum(0) for rows in h.split(k.tolist())]),
    "product": lambda m, h, k: owned(k) @ h,
    "einsum": lambda m, h, k: torch.einsum("nr,rd->nd", owned(k), h),
    "sparse": lambda m, h, k: torch.sparse.mm(owned(k).to_sparse(), h),
    "factors": lambda m, h, k: (owned(k)[..., None] * h).sum(1),
    "where": lambda m, h, k: torch.where(apart(k), 0.0, h).sum(1),
    "filled": lambda m, h, k: h.expand(len(k), -1, -1).masked_fill(apart(k), 0).sum(-2),
    "largest": lambda m, h, k: h[None].masked_fill(apart(k), -math.inf).amax(1),
    "attention of queries": pooled,
    "chosen": chosen,
    "topk": lambda m, h, k: h[None].masked_fill(apart(k), -9).topk(1, 1).values[:, 0],
    "scanned": lambda m, h, k: (owned(k)[..., None] * h).cumsum(1)[:, -1],
    "beside a row": lambda m, h, k: F.pad(owned(k), (1, 0)) @ torch.cat([h.new_ones(1, 4), h]),
    "beside the rest": beside_rest,
    "convolved": lambda m, h, k: F.conv1d(h[None], owned(k)[..., None])[0],
    "coalesced": coalesced,
    "weighed": weighed,
    "attended": attended,
}  # fmt: skip


@a_few_modes
@pytest.mark.parametrize("shape", [(12, 3), (1, 12, 3)])
@pytest.mark.parametrize("way", SEGMENTS)
def test_segments_of_other_lengths_are_looked_at_anew(way, shape, options):
    if shape[0] == 1 and ("backend" in options or not ops.NATIVE):
        pytest.skip("what runs again is given samples first")

    def forward(m, x, k):
        return m.o(SEGMENTS[way](m, torch.tanh(m.l(x)).view(-1, 4), k))

    model = Model(forward, l=nn.Linear(3, 4), o=nn.Linear(4, 2), score=nn.Linear(4, 1)).double()
    twin = copy.deepcopy(model)
    given = {"batch_size": lambda args, kwargs: len(args[1]), **options}
    with torchgradx.attach(model, **given) as probe:
        for lengths in ([4, 4, 4], [4, 4, 4], [3, 5, 4]):
            model.zero_grad()
            x, k = torch.randn(shape).double(), torch.tensor(lengths)
            model(x, k).square().sum(1).mean().backward()
            if lengths[0] != 4:
                want = of_each(twin, x, k, -2)
                exact_or(torchgradx.CoverageError, "l.weight", probe, want)
                break
            close_named(probe.norms(per="parameter"), of_each(twin, x, k, -2))


class Two(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = (nn.Parameter(torch.randn(3, 4)) for _ in range(2))

    def forward(self, x):
        return torch.tanh(x @ self.first), torch.tanh(x @ self.second)


PARTS = {  # what makes the rows
    "the second output of a module": (lambda m, x: m.two(x)[1], {"two": Two()}),
    "a parameter of the root": (lambda m, x: torch.tanh(x @ m.w), {"w": torch.randn(3, 4)}),
}


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("name", PARTS)
def test_so_are_those_of(name, fused):
    rows, parts = PARTS[name]
    model = Model(lambda m, x, k: m.o(owned(k) @ rows(m, x)), o=nn.Linear(4, 2), **parts).double()
    twin = copy.deepcopy(model)
    with torchgradx.attach(model, fused=fused, batch_size=3) as probe:
        for lengths in ([4, 4, 4], [4, 4, 4], [3, 5, 4]):
            x, k = torch.randn(12, 3).double(), torch.tensor(lengths)
            model(x, k).square().sum(1).mean().backward()
            exact_or(torchgradx.CoverageError, "", probe, of_each(twin, x, k))


SAMPLES, STEPS = 3, 6


def sample_major(m, x):
    """From [T, N, 3]: every layer is given rows that stand one sample after the other."""
    h = m.l(x.transpose(0, 1).reshape(-1, 3))
    return m.o(torch.tanh(h)).view(x.shape[1], -1, 2).transpose(0, 1)


@a_few_modes
def test_no_layer_has_the_samples_where_the_model_says(options):
    model = Model(sample_major, l=nn.Linear(3, 4), o=nn.Linear(4, 2))
    check(model, square_second, torch.randn(STEPS, SAMPLES, 3), dims=1, batch_dim=1, **options)


@a_few_modes
@pytest.mark.parametrize("shape", [(12, 4), (12, 1, 4)])
def test_attention_over_packed_rows_has_samples_where_positions_are_presumed(shape, options):
    def forward(m, x, k):
        apart = owned(k).T @ owned(k) == 0
        return m.att(x, x, x, attn_mask=apart, need_weights=False)[0].view(len(k), -1, 4).mean(1)

    model, k = Model(forward, att=nn.MultiheadAttention(4, 2)).double(), torch.tensor([4, 4, 4])
    twin, x = copy.deepcopy(model), torch.randn(shape).double()
    with torchgradx.attach(model, batch_size=3, **options) as probe:
        model(x, k).square().sum(1).mean().backward()
        want = of_each(twin, x, k)
        exact_or(torchgradx.CoverageError, "att", probe, want)
