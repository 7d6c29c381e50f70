"""Rows that each batch sends where its values say, stand flattened, or lie behind zeros."""

import copy

import pytest
import torch
import torch.nn.functional as F
from attach_oracle import Model, a_few_modes, close_named, exact_or, loop
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
    "gather": put_back(lambda h, m: h.flatten(0, 1).gather(0, places(m)[:, None].expand(-1, 3))),
    "looked up": put_back(lambda h, m: F.embedding(places(m), h.flatten(0, 1))),
    "masked_scatter": scattered,
    "packed": unpacked,
    "unbound": in_turn(lambda h: h.unbind(0)),
    "into a view": into_a_view,
}


# In a reentrant checkpoint these are taken as they come: sizes leave no doubt (docs/limits.md).
HIDDEN = {"unbound"}


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


def apart(k):
    """[N, rows, 1]: flags of the rows that are not a sample's."""
    return owned(k)[..., None] == 0


def pooled(m, h, k):
    """By torch's attention, of one query that a sample has."""
    query = m.score.weight.expand(len(k), -1)
    q, kv = query[None, None], h[None, None]
    return F.scaled_dot_product_attention(q, kv, kv, attn_mask=owned(k)[None, None] > 0)[0, 0]


def beside_rest(m, h, k):
    index = 1 + torch.arange(len(k)).repeat_interleave(k)
    rows = h.new_zeros(1, len(k) + 1, 4)
    return rows.scatter_add(1, index[None, :, None].expand(1, -1, 4), h[None])[0, 1:]


SEGMENTS = {  # of rows [rows, 4] and how many are of each
    "reduced": lambda m, h, k: torch.segment_reduce(h, "sum", lengths=k),
    "bags": lambda m, h, k: F.embedding_bag(torch.arange(len(h)), h, k.cumsum(0) - k, mode="sum"),
    "pieces": lambda m, h, k: torch.stack([rows.sum(0) for rows in h.split(k.tolist())]),
    "product": lambda m, h, k: owned(k) @ h,
    "sparse": lambda m, h, k: torch.sparse.mm(owned(k).to_sparse(), h),
    "where": lambda m, h, k: torch.where(apart(k), 0.0, h).sum(1),
    "attention of queries": pooled,
    "beside the rest": beside_rest,
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
                want = of_each(twin, x, k, -2)  # rows may go where this batch's numbers say
                exact_or(torchgradx.CoverageError, "l.weight", probe, want)
                break
            close_named(probe.norms(per="parameter"), of_each(twin, x, k, -2))


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
