"""Layers of more than one input, whose norms have a closed form: bags, and bilinear products."""

import pytest
import torch
from attach_oracle import (
    Model,
    a_few_modes,
    both_dtypes,
    check,
    close_named,
    every_mode,
    loop,
    need_native,
    square,
)
from torch import nn

import torchgradx

N = 4


def bag(how=lambda m, ids: m.bag(ids), **options):
    return lambda: Model(how, bag=nn.EmbeddingBag(7, 3, **options))


def by_offsets(m, ids):
    """The same bags, one after another, the first id of each left out."""
    kept = ids[:, 1:]
    offsets = torch.arange(0, kept.numel() + m.bag.include_last_offset, kept.shape[1])
    return m.bag(kept.flatten(), offsets)


def of_other_sizes(m, ids):
    """As many of a sample's ids as its last one says: none, for some."""
    bags = [row[: row[-1] % len(row)] for row in ids]
    sizes = torch.tensor([0, *map(len, bags)])
    return m.bag(torch.cat(bags), offsets=sizes.cumsum(0)[:-1])


def weighted(m, ids):
    return m.bag(ids, per_sample_weights=m.gain(ids).squeeze(-1).to(m.bag.weight.dtype))


def weighted_bag():
    made = bag(weighted, mode="sum", padding_idx=2)()
    made.gain = nn.Embedding(7, 1)
    return made


def tied_to_a_head():
    made = bag(lambda m, ids: m.head(m.bag(ids).tanh()), mode="mean")()
    made.head = nn.Linear(3, 7, bias=False)
    made.head.weight = made.bag.weight
    return made


def several_bags(m, ids):
    return m.bag(ids.reshape(2 * len(ids), -1)).unflatten(0, (-1, 2))


BAGS = {
    "sum": bag(mode="sum"),
    "mean": bag(mode="mean"),
    "max": bag(mode="max"),
    "sum with padding": bag(mode="sum", padding_idx=2),
    "mean with padding": bag(mode="mean", padding_idx=2),
    "max with padding": bag(mode="max", padding_idx=2),
    "by offsets": bag(by_offsets, mode="mean"),
    "by offsets, with the last": bag(by_offsets, mode="sum", include_last_offset=True),
    "of other sizes": bag(of_other_sizes, mode="sum"),
    "of other sizes, mean": bag(of_other_sizes, mode="mean", padding_idx=1),
    "of other sizes, max": bag(of_other_sizes, mode="max"),
    "by keywords": bag(lambda m, ids: m.bag(input=ids), mode="mean"),
    "sparse": bag(mode="sum", sparse=True),
    "weighted": weighted_bag,
    "several of a sample": bag(several_bags, mode="sum"),
    "twice": bag(lambda m, ids: m.bag(ids[:, :3]) * m.bag(ids), mode="mean"),
    "its table in a head": tied_to_a_head,
}


@both_dtypes
@every_mode
@pytest.mark.parametrize("name", BAGS)
def test_bags_have_the_norms_of_the_loop(name, options, dtype):
    model, ids = BAGS[name](), torch.randint(0, 7, (N, 6))
    ids[1] = 2  # nothing but equal ids, or but padding
    check(model, square, ids, dtype=dtype, **options)


def pair(how=lambda m, x, y: torch.tanh(m.pair(x, y)), **options):
    return lambda: Model(how, pair=nn.Bilinear(3, 2, 4, **options))


PAIRS = {
    "rows": (pair(), (N,)),
    "rows without bias": (pair(bias=False), (N,)),
    "one position": (pair(), (N, 1)),
    "few positions": (pair(), (N, 2)),
    "many positions": (pair(), (N, 70)),
    "4-D": (pair(), (N, 3, 2)),
    "one sample": (pair(), (1, 5)),
    "flattened rows": (
        pair(lambda m, x, y: m.pair(x.flatten(0, 1), y.flatten(0, 1)).view(-1, 3, 4)), (N, 3)),
    "by keywords": (pair(lambda m, x, y: m.pair(input2=y, input1=x).tanh()), (N, 3)),
    "of one tensor": (pair(lambda m, x, y: m.pair(x, x[..., :2]).tanh()), (N, 3)),
    "twice": (pair(lambda m, x, y: m.pair(m.pair(x, y)[..., :3].tanh(), y)), (N, 3)),
    "positions first": (
        pair(lambda m, x, y: m.pair(x.transpose(0, 1), y.transpose(0, 1)).transpose(0, 1)), (N, 5)),
}  # fmt: skip


@both_dtypes
@every_mode
@pytest.mark.parametrize("name", PAIRS)
def test_bilinear_products_have_the_norms_of_the_loop(name, options, dtype):
    make, lead = PAIRS[name]
    x, y = torch.randn(*lead, 3), torch.randn(*lead, 2)
    check(make(), square, x, y, dtype=dtype, input_grad=True, **options)


@a_few_modes
@pytest.mark.parametrize("live", ["weight", "bias"])
def test_bilinear_products_of_which_a_part_is_frozen(live, options):
    model = pair()()
    for name, p in model.pair.named_parameters():
        p.requires_grad_(name == live)
    check(model, square, torch.randn(N, 5, 3), torch.randn(N, 5, 2), **options)


SIZES = [[2, 1, 3, 2], [2, 0, 3, 2], [2, 3, 3, 0], [1, 1, 1, 1], [2, 1, 1, 0], [3, 3, 3, 3]]


class Text(nn.Module):
    def __init__(self, with_last):
        super().__init__()
        self.bag = nn.EmbeddingBag(9, 5, mode="sum", include_last_offset=with_last)
        self.head = nn.Linear(5, 2)

    def forward(self, ids, offsets):
        return self.head(self.bag(ids, offsets))


class Bags(nn.Module):
    """The same, of rows of ids."""

    def __init__(self, text):
        super().__init__()
        self.bag, self.head = nn.EmbeddingBag(9, 5, mode="sum"), nn.Linear(5, 2)
        self.load_state_dict(text.state_dict())

    def forward(self, ids):
        return self.head(self.bag(ids[0], torch.zeros(1, dtype=torch.long)))


@a_few_modes
@pytest.mark.parametrize("with_last", [False, True])
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_bags_that_offsets_part_are_exact(sizes, with_last, options):
    need_native(options)
    model = Text(with_last).double()
    alone = Bags(model).double()
    ids = torch.randint(0, 9, (sum(sizes),))
    ends = torch.tensor([0, *sizes]).cumsum(0)
    offsets = ends if with_last else ends[:-1]
    each = [loop(alone, square, bag[None]) for bag in ids.split(sizes)]
    want = {name: torch.cat([norms[name] for norms in each]) for name in each[0]}
    n = {"batch_size": len(sizes)}
    with torchgradx.attach(model, **n, **options) as probe:
        for _ in range(2):
            square(model, ids, offsets).backward()
            close_named(probe.norms(per="parameter"), want)


@a_few_modes
@pytest.mark.parametrize("mode", ["sum", "mean", "max"])
def test_as_many_samples_as_features(mode, options):
    need_native(options)
    model, ids = nn.EmbeddingBag(9, 6, mode=mode).double(), torch.randint(0, 9, (6, 3))
    want = loop(model, square, ids)
    with torchgradx.attach(model, **options) as probe:
        square(model, ids).backward()
        close_named(probe.norms(per="parameter"), want)
