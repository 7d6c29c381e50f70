"""The samples followed through operations: x holds the number of its sample everywhere, so what an
operation only moves shows where they are."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from torchgradx.proof.sample_dims import GONE, Place
from torchgradx.proof.taint import watching

N = 4
EYE = torch.eye(N, dtype=torch.float64)
LABELS = torch.zeros(N, dtype=torch.long)

MOVES = {
    "transpose": lambda x: x.transpose(0, 2),
    "negative axes": lambda x: x.transpose(-1, 0),
    "T": lambda x: x.mT.transpose(0, 1),
    "permute": lambda x: x.permute(2, 0, 1),
    "movedim": lambda x: x.movedim(0, -1),
    "unsqueeze": lambda x: x.unsqueeze(0).unsqueeze(-1).unsqueeze(2),
    "squeeze": lambda x: x[None, :, None].squeeze(),
    "squeeze one": lambda x: x[None, :, None].squeeze(2),
    "select": lambda x: x.transpose(0, 1)[2],
    "unbind": lambda x: x.unbind(1)[1],
    "narrow": lambda x: x.narrow(1, 1, 2),
    "split": lambda x: x.split(2, 1)[0],
    "stack": lambda x: torch.stack([x, x], 1).transpose(0, 1),
    "cat": lambda x: torch.cat([x, x], 2),
    "rows": lambda x: x.flatten(0, 1),
    "rows of a sequence": lambda x: x.transpose(0, 1).flatten(0, 1),
    "rows in between": lambda x: x.permute(1, 0, 2).reshape(2, 2 * N, -1),
    "rows and back": lambda x: x.transpose(0, 1).reshape(-1, N).unflatten(0, (-1, N)),
    "expand": lambda x: x[:, None].expand(-1, 3, -1, -1),
    "index": lambda x: x[:, torch.tensor([1, 0])],
    "two indices": lambda x: x[torch.arange(N), torch.tensor([0, 1, 0, 1])],
    "indices behind": lambda x: x.transpose(0, 2)[torch.tensor([0, 1]), torch.tensor([1, 0])],
    "gather": lambda x: x.gather(2, torch.zeros(N, N, 2, dtype=torch.long)),
    "broadcast": lambda x: x[:, 0] + torch.zeros(3, N, N),
    "broadcast from one": lambda x: x[:, :1, :1] + torch.zeros(N, N),
    "where": lambda x: torch.where(torch.ones(N, N, dtype=torch.bool), x, 0),
    "mean": lambda x: x.transpose(0, 2).mean(1),
    "mean of two": lambda x: x.transpose(0, 2).mean((0, 1), keepdim=True),
    "max": lambda x: x.max(1).values,
    "mm": lambda x: x[:, 0] @ EYE,
    "from the right": lambda x: EYE @ x[:, 0].T,
    "bmm": lambda x: x @ EYE,
    "linear": lambda x: F.linear(x.transpose(0, 1), EYE),
    "embedding": lambda x: F.embedding(x.long().T, torch.arange(N).double()[:, None]),
    "softmax": lambda x: x.softmax(-1) + x,
    "pool": lambda x: F.max_pool1d(x, 2),
    "a loss of each": lambda x: F.nll_loss(-x[:, 0], LABELS, reduction="none"),
    "a loss of each token": lambda x: F.nll_loss(-x, LABELS.expand(N, N), reduction="none"),
    "a loss of each row": lambda x: F.nll_loss(
        -x.flatten(0, 1), LABELS.repeat(N), reduction="none"
    ).view(N, N),
    "a loss of each class": lambda x: (
        x + 0 * F.binary_cross_entropy(x / N, x / N, reduction="none")
    ),
    "a buffer that is filled": lambda x: torch.zeros_like(x).copy_(x.transpose(0, 1)),
    "in place": lambda x: x.clone().transpose_(0, 1).mul_(1),
    "put together": lambda x: torch.stack([y.mul(2).div(2) for y in x], 1),
    "put together as rows": lambda x: torch.cat(list(x)),
    "put into a buffer": lambda x: nn.utils.rnn.pad_sequence(list(x), batch_first=True),
}


def placed(function, x, graph=False):
    weight = nn.Parameter(torch.ones((), dtype=torch.float64), requires_grad=graph)
    taint = watching(N, [weight], [x], 0)
    try:
        out = function(x * weight if graph else x)
    finally:
        taint.stop([out])
    return out, taint.ends[0]


def numbered(*sizes):
    return torch.arange(N, dtype=torch.float64).view(N, *[1 for _ in sizes]).repeat(1, *sizes)


@pytest.mark.parametrize("name", MOVES)
def test_what_only_moves_them_is_followed(name):
    out, place = placed(MOVES[name], numbered(N, N))
    assert place is not None
    sample = torch.arange(out.shape[place.dim]) // place.inner % N
    shape = [-1 if d == place.dim else 1 for d in range(out.dim())]
    fraction = out.new_full((), 1 / N if name == "softmax" else 0.0)  # of equal numbers
    assert torch.equal(out - fraction, sample.view(shape).expand_as(out).to(out))


SUMS = {
    "all": lambda x: x.sum(),
    "samples": lambda x: x.sum(0),
    "kept": lambda x: x.mean((0, 1), keepdim=True),
    "largest": lambda x: x.amax(0),
    "a product": lambda x: x[:, 0].T @ x[:, 0],
    "a loss": lambda x: F.mse_loss(x, torch.zeros_like(x)),
    "put together": lambda x: torch.stack([x.sum()] * N),
    "columns of a layer": lambda x: F.linear(x[:, 0].T, EYE),
}


@pytest.mark.parametrize("name", SUMS)
def test_what_sums_over_them_leaves_none(name):
    assert placed(SUMS[name], numbered(N, N))[1] == GONE


UNKNOWN = {
    "one of them": lambda x: x[0],
    "some of them": lambda x: x[1:],
    "strides": lambda x: x.as_strided((N, N, N), (N, N * N, 1)),
    "rotation": lambda x: torch.rot90(x, 1, (0, 1)),
    "a mask": lambda x: x[x > 0],
    "operands that disagree": lambda x: x + x.transpose(0, 1),
    "losses of classes": lambda x: F.nll_loss(x[:, 0].T, LABELS, reduction="none"),
    "losses of others' labels": lambda x: F.nll_loss(
        x.flatten(0, 1), x[:, 0].T.flatten().long() * 0, reduction="none"
    ),
    "a copy written over": lambda x: x.clone()[:, 0].copy_(x[0])._base,
    "a size that is said": lambda x: x.reshape(2, 2, N, N),
}  # fmt: skip


@pytest.mark.parametrize("name", UNKNOWN)
def test_nothing_is_guessed(name):
    assert placed(UNKNOWN[name], numbered(N, N), graph=True)[1] is None


FOUND = {"strides": Place(1), "rotation": Place(1), "losses of others' labels": Place(0, N)}


@pytest.mark.parametrize("name", UNKNOWN)
def test_of_data_the_operation_is_asked(name):
    assert placed(UNKNOWN[name], numbered(N, N))[1] == FOUND.get(name)


DRAWN = [torch.poisson, lambda x: torch.bernoulli(x / N), lambda x: torch.normal(x, 1.0),
         lambda x: torch.binomial(x, x / N), torch._standard_gamma, F.dropout]  # fmt: skip


@pytest.mark.parametrize("draw", DRAWN)
def test_numbers_that_are_drawn_for_a_sample_are_its_own(draw):
    assert placed(lambda x: draw(x.transpose(0, 1)), numbered(N, N))[1] == Place(1)


def test_an_operation_of_the_users_own_is_not_known_but_asked():
    turn = torch.library.custom_op(
        "tests::turn", lambda x: x.transpose(0, 1).clone(), mutates_args=(),
        schema="(Tensor x) -> Tensor",
    )  # fmt: skip
    assert placed(turn, numbered(N, N), graph=True)[1] is None
    assert placed(turn, numbered(N, N))[1] == Place(1)


def test_an_lstm_has_them_where_its_input_has_them():
    lstm = nn.LSTM(3, 5).double()
    for x, dim in ((torch.randn(7, N, 3).double(), 1), (torch.randn(N, N, 3).double(), 1)):
        taint = watching(N, lstm.parameters(), [x], 1)
        y, (h, _) = lstm(x)
        taint.stop([y, h])
        assert taint.ends[0] == Place(dim)
        assert taint.ends[1] in (None, Place(1))
