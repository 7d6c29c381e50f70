"""Samples that a model puts in an order of its own, or joins out of pieces: outputs stand in that,
and norms would."""

import pytest
import torch
import torch.nn.functional as F
from attach_oracle import (
    Model,
    a_few_modes,
    refused,
    seeded,  # noqa: F401
    square,
)
from torch import nn
from torch.nn.utils.rnn import pad_sequence

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


def two_change_places(x):
    x = x.clone()
    x[[0, 1]] = x[[1, 0]]
    return x


def by_a_mask_of_numbers(x):
    first = (x[:, :1, :1] > x[:, 0, 0].mean()).expand_as(x)
    return torch.cat([x.masked_select(first), x.masked_select(~first)]).view_as(x)


def packed_where_it_was_not(x):
    """Rows that are wanted move to the front."""
    return x.masked_scatter((x[:, :1, :1] > x[:, 0, 0].mean()).expand_as(x), x)


def in_the_other_direction(x):
    """Behind a complex view."""
    pairs = torch.view_as_complex(F.pad(x, (0, 1)).unflatten(2, (2, 2)))
    return torch.view_as_real(pairs.flip(0)).flatten(2)[..., :3]


def by_bilinear_sampling(x):
    grid = F.affine_grid(torch.tensor([[[1.0, 0, 0], [0, -1.0, 0]]]).to(x), (1, 1, N, 3), False)
    return F.grid_sample(
        x[None].movedim(2, 0), grid.expand(T, -1, -1, -1), align_corners=False
    ).movedim(0, 2)[0]


def turned(x):
    return torch.eye(len(x), dtype=x.dtype).flip(0)


MOVED = {
    "padded and cut": lambda x: F.pad(x, (0, 0, 0, 0, 1, -1)),
    "repeated and cut": lambda x: x.repeat(2, 1, 1)[1 : len(x) + 1],
    "expanded and cut": lambda x: x.expand(2, *x.shape).flatten(0, 1)[1 : len(x) + 1],
    "twice and cut": lambda x: torch.cat([x, x])[1 : len(x) + 1],
    "twice and narrowed": lambda x: torch.narrow_copy(torch.cat([x, x]), 0, 1, len(x)),
    "twice and chosen": lambda x: torch.cat([x, x])[torch.arange(1, len(x) + 1)],
    "twice and restrided": lambda x: torch.cat([x, x]).as_strided(x.shape, x.stride(), T * 3),
    "restrided": lambda x: x.as_strided((2, 2, T, 3), (18, 36, 3, 1)).reshape(x.shape),
    "split in two and turned": lambda x: x.view(2, 2, T, 3).transpose(0, 1).reshape(x.shape),
    "windows": lambda x: torch.cat([x, x]).unfold(0, len(x), 1)[1].movedim(-1, 0),
    "behind a complex view": in_the_other_direction,
    "two change places": two_change_places,
    "by a mask of numbers": by_a_mask_of_numbers,
    "packed": packed_where_it_was_not,
    "by a sparse matrix": lambda x: torch.sparse.mm(turned(x).to_sparse(), x.flatten(1)).view_as(x),
    "by a product and a sum": lambda x: (turned(x)[:, :, None, None] * x).sum(1),
    "by a system of equations": lambda x: torch.linalg.solve(turned(x), x.flatten(1)).view_as(x),
    "by sampling": by_bilinear_sampling,
    "by channels": lambda x: F.channel_shuffle(x[None], 2)[0],
    "put together in turn": lambda x: pad_sequence(list(x.unbind()[::-1]), batch_first=True),
    "nested": lambda x: torch.nested.nested_tensor(list(x.unbind()[::-1])).to_padded_tensor(0.0),
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
