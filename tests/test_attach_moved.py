"""Samples that a model puts in an order of its own, or joins out of pieces: outputs stand in that,
and norms would."""

import pytest
import torch
from attach_oracle import (
    Model,
    a_few_modes,
    refused,
    seeded,  # noqa: F401
    square,
)
from torch import nn

N, T = 4, 6


def by_mask(x):
    first = x[:, 0, 0] > x[:, 0, 0].mean()
    return torch.cat([x[first], x[~first]])


def filled_by_mask(x):
    first, y = x[:, 0, 0] > x[:, 0, 0].mean(), torch.empty_like(x)
    y = y.masked_scatter(first.view(-1, 1, 1).expand(x.shape), x)
    return y.masked_scatter(~first.view(-1, 1, 1).expand(x.shape), x[int(first.sum()) :])


def written(x):
    y = torch.empty_like(x)
    y[1:] = x[:-1]
    y[:1] = x[-1:]
    return y


def written_each(x):
    y = torch.empty_like(x)
    for k in range(len(x)):
        y[-1 - k] = x[k] * 2
    return y


def mixed_up(x):
    with torch.no_grad():
        return 0.7 * x + 0.3 * x[torch.arange(len(x)).roll(1)]


def turned_without_grad(x):
    with torch.no_grad():
        return x[torch.arange(len(x)).flip(0)]


MOVED = {
    "turned without grad": turned_without_grad,
    "mixed up without grad": mixed_up,
    "flipped": lambda x: x.flip(0),
    "turned by rot90": lambda x: x.rot90(2, (0, 1)),
    "the largest first": lambda x: x.topk(len(x), 0).values,
    "numbers, sorted": lambda x: x[:, 0, 0].sort().values[:, None, None].expand(x.shape),
    "numbers, the largest first": lambda x: (
        x[:, 0, :1].flatten().topk(len(x)).values[:, None, None].expand(x.shape)
    ),
    "numbers, each once": lambda x: x[:, 0, 0].unique()[:, None, None].expand(x.shape),
    "shifted": lambda x: torch.cat([x[1:], torch.zeros_like(x[:1])]),
    "shifted the other way": lambda x: torch.cat([torch.zeros_like(x[:1]), x[:-1]]),
    "copied": lambda x: torch.empty_like(x).index_copy(0, torch.arange(len(x)).flip(0), x),
    "halves": lambda x: torch.cat([x[len(x) // 2 :], x[: len(x) // 2]]),
    "halves, each changed": lambda x: torch.cat([y * 2 for y in reversed(x.chunk(2))]),
    "every other": lambda x: torch.cat([x[::2], x[1::2]]),
    "one by one": lambda x: torch.stack(x.unbind()[::-1]),
    "one by one, each changed": lambda x: torch.cat([y[None].tanh() for y in reversed(x)]),
    "by a mask": by_mask,
    "filled by a mask": filled_by_mask,
    "written": written,
    "written each": written_each,
    "rolled": lambda x: x.roll(1, 0),
    "sorted": lambda x: x.sort(0).values,
    "turned": lambda x: x[torch.arange(len(x)).flip(0)],
}


@a_few_modes
@pytest.mark.parametrize("way", MOVED)
def test_another_order_than_the_batchs_is_refused(way, options):
    model = Model(lambda m, x: torch.tanh(m.r(MOVED[way](x))).flatten(1), r=nn.Linear(3, 2))
    refused(model, square, torch.randn(N, T, 3), names=["r.weight"], match="order", **options)
