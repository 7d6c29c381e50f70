"""Rows that each batch sends where its values say, stand flattened, or lie behind zeros."""

import copy

import pytest
import torch
import torch.nn.functional as F
from attach_models import Model, square
from attach_modes import ANY, a_few_modes, each_of, need_native
from attach_oracle import close_named
from attach_steps import exact_step, exact_steps, read_or_refused, refusal, step_or_refused
from segment_models import WORDS, Experts
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
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


def routed(name, reentrant):
    route = ROUTES[name]

    def forward(model, x, m):
        h = torch.tanh(model.a(x))
        of = lambda rows: torch.tanh(model.c(torch.tanh(model.b(rows))))  # noqa: E731
        if reentrant is None:
            return route(h, m, of)
        return checkpoint(lambda h: route(h, m, of), h, use_reentrant=reentrant)

    return Model(forward, **{key: nn.Linear(3, 3) for key in "abc"}).double()


def rows():
    return torch.randn(N, T, 3, dtype=torch.float64)


@a_few_modes
@pytest.mark.parametrize(
    ("name", "reentrant"),
    [(name, way) for name in ROUTES for way in (None, False, True) if not (way and name in HIDDEN)],
)
def test_batches_of_equal_sizes_that_choose_otherwise_are_exact_or_refused(
    name, reentrant, options
):
    model = routed(name, reentrant)
    exact = 0
    with torchgradx.attach(model, **options) as probe:
        for m in (ALIKE, OTHERS[0], ALIKE, ALIKE, *OTHERS, ALIKE):
            refusal = step_or_refused(probe, model, rows(), m, words="b.weight")
            exact += refusal is None
            assert refusal is None or reentrant or m is not ALIKE or name == "packed", refusal
    assert exact == 0 if reentrant else exact >= 4


UNPADDED = {  # rows of x [N T, 3] at these places
    "masked": lambda x, at: x[F.one_hot(at, len(x)).sum(0) > 0],
    "indexed": lambda x, at: x[at],
    "selected": lambda x, at: x.index_select(0, at),
    "gathered": lambda x, at: x.gather(0, at[:, None].expand(-1, 3)),
    "taken": lambda x, at: x.take(3 * at[:, None] + torch.arange(3)),
    "embedded": lambda x, at: F.embedding(at, x),
}


@a_few_modes
@pytest.mark.parametrize("way", UNPADDED)
def test_data_that_are_unpadded_before_the_first_layer_are_looked_at_anew(way, options):
    def forward(model, x, m):
        picked = UNPADDED[way](x.flatten(0, 1), places(m))
        return model.o(owned(m.sum(1)) @ torch.tanh(model.b(picked)))

    model = Model(forward, b=nn.Linear(3, 3), o=nn.Linear(3, 2)).double()
    with torchgradx.attach(model, **options) as probe:
        for m in (ALIKE, ALIKE, OTHERS[0], ALIKE):
            refusal = step_or_refused(probe, model, rows(), m, words="b.weight")
            assert refusal is None or m is not ALIKE, refusal


def test_places_that_are_drawn_are_looked_at_anew(backwards):
    def forward(m, x):
        at = torch.randperm(4 * len(x))[: 2 * len(x)]
        h = torch.tanh(m.l(x.flatten(0, 1)[at]))
        return m.o(F.one_hot(at // 4, len(x)).T.to(h) @ h)

    model = Model(forward, l=nn.Linear(3, 3), o=nn.Linear(3, 2))
    with torchgradx.attach(model):
        for _ in range(6):
            backwards.clear()
            square(model, torch.randn(2, 4, 3)).backward()
            assert backwards


def owned(k):
    return F.one_hot(torch.arange(len(k)).repeat_interleave(k), len(k)).T.double()


def of_each(twin, x, k, dim=0):
    """The norms by a loop over the samples' own rows."""
    found = []
    for rows in x.split(k.tolist(), dim):
        twin.zero_grad()
        twin(rows, torch.tensor([rows.shape[dim]])).square().sum().backward()
        found.append([0.0 if p.grad is None else p.grad.norm().item() for p in twin.parameters()])
    names = [name for name, _ in twin.named_parameters()]
    return dict(zip(names, torch.tensor(found, dtype=torch.float64).T, strict=True))


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
    "pieces": lambda m, h, k: torch.stack([rows.sum(0) for rows in h.split(k.tolist())]),
    "product": lambda m, h, k: owned(k) @ h, "attention of queries": pooled,
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
                read_or_refused(probe, want, "l.weight")
                break
            close_named(probe.norms(per="parameter"), of_each(twin, x, k, -2))


# Rows that a batch's own values send to experts
SHAPES = [(4, 4), (4, 4), (4, 6), (4, 6), (4, 4), (3, 5), (1, 7), (4, 6)]  # N = T among them
any_mode = each_of(ANY)


@any_mode
@pytest.mark.parametrize("way", [
    "index_add", "put", "mask", "positions", "by choice", "heads", *["tied"] * ops.NATIVE,
])  # fmt: skip
def test_experts_that_are_given_the_rows_of_their_tokens(way, options):
    shapes = [*SHAPES, *[(5, 1)] * 3 * (way == "tied")]
    batches = [torch.randint(0, WORDS, shape) for shape in shapes]
    next_words = lambda m, x: F.cross_entropy(m(x).flatten(0, 1), x.flatten())  # noqa: E731
    experts = Experts(way, 2 if way == "by choice" else 4).double()  # of two, each gets all rows
    exact_steps(experts, *batches, loss=next_words, **options)


def test_a_users_hooks_give_what_a_block_saved_once():
    model, kept = Model(lambda m, ids: m.block(ids), block=Experts()), {}
    with torchgradx.attach(model):
        assert type(model.block) is Experts
        with saved_tensors_hooks(
            lambda t: (kept.update({len(kept): t}), len(kept) - 1)[1], kept.pop
        ):
            loss = square(model, torch.randint(0, WORDS, (4, 6)))
        loss.backward()
    assert not kept


@a_few_modes
@pytest.mark.parametrize("way", ["index_add", "put"])
def test_experts_in_a_checkpoint(way, options):
    """Which rows they are given is read from what their block saved."""
    model = Model(lambda m, ids: checkpoint(m.block, ids, use_reentrant=False), block=Experts(way))
    next_words = lambda m, x: F.cross_entropy(m(x).flatten(0, 1), x.flatten())  # noqa: E731
    exact_steps(model.double(), *(torch.randint(0, WORDS, shape) for shape in SHAPES),
                loss=next_words, **options)  # fmt: skip


@pytest.mark.skipif(not ops.NATIVE, reason="layers run again by backwards there")
def test_batches_that_send_other_rows_need_no_further_proof(backwards):
    model, proofs = Experts().double(), []
    with torchgradx.attach(model) as probe:
        for _ in range(12):
            backwards.clear()
            out = model(torch.randint(0, WORDS, (6, 8)))
            F.cross_entropy(out.flatten(0, 1), torch.randint(0, WORDS, (48,))).backward()
            assert (probe.norms() > 0).all()
            proofs.append(len(backwards))
    assert proofs[0] > 0
    assert proofs[-4:] == [0] * 4


def put(part, k, n):
    return torch.zeros(n, 4).to(part).index_add(0, k, part)


def turned(x):
    """Another sample's place for each; its own of one alone."""
    return torch.arange(len(x)).flip(0)


def picked(x):
    return (x[:, 0] > -0.5).nonzero()[:, 0]


EXACT = {
    "taken and put back": lambda m, x, h: m.c(h) + m.d(h[turned(x)])[turned(x)],
    "some": lambda m, x, h: h + put(m.d(h[picked(x)]), picked(x), len(x)),
}
MIXED = {
    "what is given is data": lambda m, x, h: m.a(x) + m.b(x)[turned(x)],
    "taken from others by place": lambda m, x, h: m.a(x) + m.b(x).index_select(0, turned(x)),
    "data, placed": lambda m, x, h: h.masked_scatter(torch.ones(4, 4) > 0, m.b(x)[turned(x)]),
    "beside its own": lambda m, x, h: m.c(h) + m.d(h)[turned(x)],
    "given another's": lambda m, x, h: m.c(h) + m.d(h[turned(x)]),
    "put where others are": lambda m, x, h: h + put(m.d(h[:1]), turned(x)[:1], len(x)),
    "another's, detached": lambda m, x, h: h + put(m.d(h.detach()[:1]), turned(x)[:1], len(x)),
}


def exchanging(way):
    layers = {name: nn.Linear(3 if name in "iab" else 4, 4) for name in "iabcd"}
    model = Model(lambda m, x: m.way(m, x, torch.tanh(m.i(x))), **layers).double()
    model.way = way
    return model


def exchanged(model, probe, mixes):
    x = torch.randn(4, 3).double()
    if not mixes:
        exact_step(probe, model, x)
        return
    square(model, x).backward()
    refusal(probe)
    probe.reset()


@any_mode
@pytest.mark.parametrize("among_routed", [False, True])
@pytest.mark.parametrize("name", [*EXACT, *MIXED])
def test_rows_are_served_where_they_come_back_to_whom_they_were_taken_from(
    name, among_routed, options
):
    need_native({"backend": "native"})
    model = exchanging(None)
    with torchgradx.attach(model, **options) as probe:
        for each in ["some", "some", name, "some"] if among_routed else [name] * 3:
            model.way = (EXACT | MIXED)[each]
            exchanged(model, probe, each in MIXED)


def test_rows_of_a_mask_under_a_loss_where_there_are_as_many_positions_as_samples():
    def forward(m, x, mask):
        return m.head(torch.tanh(m.a(x))[mask]).square().sum()

    model = Model(forward, a=nn.Linear(3, 4), head=nn.Linear(4, 2))
    mask = torch.ones(4, 4).triu() > 0
    with torchgradx.attach(model, batch_dim=1, layout={"a": "sequence"}) as probe:
        model(torch.randn(4, 4, 3), mask).backward()
        assert refusal(probe).parameters == ("head.weight", "head.bias")


def test_experts_of_as_many_positions_as_samples_do_not_turn_them():
    model = Model(lambda m, x: m.e(x.mT), e=Experts()).double()
    with torchgradx.attach(model) as probe:
        for _ in range(2):
            square(model, torch.randint(WORDS, (4, 4))).backward()
            refusal(probe, "mix")
            probe.reset()
