"""An EmbeddingBag whose bags the user's own offsets part, as in a text classifier: neither ids nor
offsets are a sample's by themselves."""

import pytest
import torch
from attach_oracle import (
    a_few_modes,
    close_named,
    loop,
    need_native,
    square,
)
from torch import nn

import torchgradx

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
