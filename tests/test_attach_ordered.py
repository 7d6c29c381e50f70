"""Samples that a batch puts in an order of its own: outputs stand in it, and norms would."""

import pytest
import torch
from attach_oracle import (
    UNPROVEN,
    Model,
    a_few_modes,
    check,
    refused,
    seeded,  # noqa: F401
    square,
    unproven,
)
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence

import torchgradx

N, T = 4, 6
LENGTHS = torch.tensor([3, 6, 2, 4])


def without_grad(x, order):
    with torch.no_grad():
        return x[order]


ORDERS = {
    "without grad": without_grad,
    "by a list": lambda x, order: x[order.tolist()],
    "by an array": lambda x, order: x[order.numpy()],
    "with positions": lambda x, order: x[order[:, None], torch.arange(x.shape[1])],
    "put": lambda x, order: torch.empty_like(x).index_put((order,), x),
    "looked up": lambda x, order: nn.functional.embedding(order, x.flatten(1)).view_as(x),
    "indexed": lambda x, order: x[order],
    "selected": lambda x, order: x.index_select(0, order),
    "gathered": lambda x, order: x.gather(0, order.view(-1, 1, 1).expand(x.shape)),
}


def longest_first(m, x, lengths, how):
    order = lengths.argsort(descending=True)
    return m.r(ORDERS[how](x, order)), lengths[order]


@a_few_modes
@pytest.mark.parametrize("how", ORDERS)
@pytest.mark.parametrize("lengths", [LENGTHS, LENGTHS.sort(descending=True).values])
def test_a_model_that_sorts_its_batch_is_refused(lengths, how, options):
    """Also where the batch was sorted already: another one is not."""

    def forward(m, x, lengths):
        return torch.tanh(longest_first(m, x, lengths, how)[0]).flatten(1)

    model = Model(forward, r=nn.Linear(3, 2))
    x = torch.randn(N, T, 3)
    refused(model, square, x, lengths, names=["r.weight"], match="order", **options)


@a_few_modes
@pytest.mark.parametrize("how", ORDERS)
def test_a_model_that_sorts_to_pack_is_refused(how, options):
    def forward(m, x, lengths):
        rows, lengths = longest_first(m, x, lengths, how)
        return m.g(pack_padded_sequence(torch.tanh(rows), lengths, True))[1][0]

    model = Model(forward, r=nn.Linear(3, 3), g=nn.GRU(3, 2, batch_first=True))
    refused(model, square, torch.randn(N, T, 3), LENGTHS, names=["r.weight"], match="order",
            **options)  # fmt: skip


MOVED = {
    "flipped": lambda x: x.flip(0),
    "rolled": lambda x: x.roll(1, 0),
    "sorted": lambda x: x.sort(0).values,
    "turned": lambda x: x[torch.arange(len(x)).flip(0)],
}


@a_few_modes
@pytest.mark.parametrize("way", MOVED)
def test_another_order_than_the_batchs_is_refused(way, options):
    model = Model(lambda m, x: torch.tanh(m.r(MOVED[way](x))).flatten(1), r=nn.Linear(3, 2))
    refused(model, square, torch.randn(N, T, 3), names=["r.weight"], match="order", **options)


def shuffled_keys(m, x, lengths):
    """As momentum encoders have them."""
    with torch.no_grad():
        order = torch.randperm(len(x))
        keys = m.k(x[order])[order.argsort()]
    return m.l(x) * keys


UNMOVED = {
    "keys that are shuffled and put back": shuffled_keys,
    "packing sorts them, and puts them back": lambda m, x, lengths: m.g(
        pack_padded_sequence(x, lengths, True, enforce_sorted=False)
    )[1][0],
    "a position of each": lambda m, x, lengths: m.l(x[torch.arange(len(x)), lengths - 1]),
    "positions in an order of their own": lambda m, x, lengths: m.l(
        x.gather(1, x.argsort(1))
    ).flatten(1),
    "rows of a table": lambda m, x, lengths: m.l(torch.eye(7, 3, dtype=x.dtype)[lengths]),
}


@a_few_modes
@pytest.mark.parametrize("steps", [N, T])
@pytest.mark.parametrize("name", UNMOVED)
def test_what_leaves_the_samples_where_they_are_is_exact(name, steps, options):
    model = Model(UNMOVED[name], l=nn.Linear(3, 2), k=nn.Linear(3, 2).requires_grad_(False),
                  g=nn.GRU(3, 2, batch_first=True))  # fmt: skip
    x, lengths = torch.randn(N, steps, 3), LENGTHS.clamp(max=steps)
    check(model, square, x, lengths, **options)


@unproven
def test_an_order_that_python_made_may_be_another_next_time(where):
    """That of the first batch changes nothing."""

    def forward(m, x):
        order = sorted(range(len(x)), key=m.lengths.__getitem__)
        back = sorted(range(len(x)), key=order.__getitem__)
        return UNPROVEN[where](lambda t: m.b(torch.tanh(t)), m.i(x)[order])[back]

    model = Model(forward, i=nn.Linear(3, 3), b=nn.Linear(3, 2)).double()
    with torchgradx.attach(model) as probe:
        for model.lengths in ([2, 2, 2, 2], [2, 2, 2, 2], [4, 2, 3, 1]):
            x = torch.randn(N, 3, dtype=torch.float64)
            square(lambda x: model(x), x).backward()
            with pytest.raises(torchgradx.CoverageError):
                probe.norms()
            probe.reset()
