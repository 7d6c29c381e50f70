"""Rows that each batch sends where its values say: what one batch proved of a structure is not held
to be so of another, of the same sizes, that chooses otherwise."""

import pytest
import torch
import torch.nn.functional as F
from attach_oracle import (
    Model,
    a_few_modes,
    close_named,
    exact_or,
    loop,
)
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
    "flat places": put_back(lambda h, m: h.flatten(0, 1)[places(m)]),
    "where": put_back(lambda h, m: h[torch.where(m)]),
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
    "split": in_turn(lambda h: [rows[0] for rows in h.split(1)]),
    "beside padding": beside_padding,
    "stacked along the second": lambda h, m, of: in_turn(lambda h: h.unbind(1), 1)(
        h.transpose(0, 1), m, of
    ).transpose(0, 1),
    "in the last dimension": in_the_last_dimension,
    "into a view": into_a_view,
}


# In a reentrant checkpoint these are taken as they come: sizes leave no doubt (docs/limits.md).
HIDDEN = {"unbound", "split", "beside padding", "in the last dimension"}


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
        with pytest.raises(torchgradx.CoverageError, match=r"b\.weight"):
            probe.norms()
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


def last(model, x, ends):
    return model.b(torch.tanh(model.a(x)))[torch.arange(len(x)), ends]


@pytest.mark.skipif(not ops.NATIVE, reason="layers run again by backwards there")
def test_the_last_token_of_each_is_known_from_one_batch_on(backwards):
    model = Model(last, a=nn.Linear(3, 3), b=nn.Linear(3, 2)).double()

    def ends_loss(model, x, ends):
        return model(x, ends).square().sum(1).mean()

    with torchgradx.attach(model) as probe:
        for k in range(4):
            x, ends = rows(), torch.randint(T, (N,))
            want = loop(model, ends_loss, x, ends)
            model.zero_grad()
            ends_loss(model, x, ends).backward()
            close_named(probe.norms(per="parameter"), want)
            assert bool(backwards) == (k == 0)
            backwards.clear()


@pytest.mark.skipif(not ops.NATIVE, reason="a graph is whole with the extension only")
@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("first", ["attach", "compile"])
@pytest.mark.usefixtures("nothing_compiled")
def test_a_whole_compiled_graph_is_looked_at_for_each_choice(first, fused):
    def forward(model, x, flat):
        h = torch.tanh(model.a(x))
        of = torch.tanh(model.b(h.view(-1, 3).index_select(0, flat)))
        return model.c(torch.zeros_like(h).view(-1, 3).index_add(0, flat, of).view_as(h))

    model = Model(forward, **{key: nn.Linear(3, 3) for key in "abc"}).double()
    if first == "compile":
        compiled = torch.compile(model, backend="eager", fullgraph=True)
    with torchgradx.attach(model, fused=fused) as probe:
        if first == "attach":
            compiled = torch.compile(model, backend="eager", fullgraph=True)
        for m in (ALIKE, OTHERS[0], ALIKE):
            x, flat = rows(), places(m)
            of_each = [places(m[n : n + 1]) for n in range(N)]
            want = []
            for n in range(N):
                model.zero_grad()
                with probe.paused():
                    loss(model, x[n : n + 1], of_each[n]).backward()
                want.append([p.grad.norm() for p in model.parameters()])
            names = [name for name, _ in model.named_parameters()]
            loss(compiled, x, flat).backward()
            got, refusal = read(probe)
            if refusal is None:
                close_named(got, dict(zip(names, torch.tensor(want).double().T, strict=True)))
            assert (refusal is None) == (m is ALIKE), refusal
