"""Bags, bilinear products, sparse tensors; modules called under no_grad, then in earnest."""

import copy
from functools import partial

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
    mlp,
    same_gradients,
    square,
)
from torch import nn
from torch.utils.checkpoint import checkpoint

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
    "by offsets": bag(by_offsets, mode="mean"),
    "by offsets, with the last": bag(by_offsets, mode="sum", include_last_offset=True),
    "of other sizes": bag(of_other_sizes, mode="sum"),
    "of other sizes, max": bag(of_other_sizes, mode="max"),
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
    "few positions": (pair(), (N, 2)),
    "many positions": (pair(), (N, 70)),
    "one sample": (pair(), (1, 5)),
    "flattened rows": (
        pair(lambda m, x, y: m.pair(x.flatten(0, 1), y.flatten(0, 1)).view(-1, 3, 4)), (N, 3)),
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


ROWS = 6
LAYOUTS = {"coo": torch.Tensor.to_sparse, "csr": torch.Tensor.to_sparse_csr}
layouts = pytest.mark.parametrize("made", LAYOUTS.values(), ids=LAYOUTS)


def words():
    return torch.randn(ROWS, 3).double().relu()


@a_few_modes
@layouts
@pytest.mark.parametrize("way", ["plain", "a checkpoint", "clipped"])
def test_a_linear_layer_is_given_bags_of_words(made, way, options):
    model, x = mlp(5).double(), words()
    want = loop(model, square, x)
    twin, sparse = copy.deepcopy(model), made(x)
    clips = way == "clipped" and options.get("weight_grad", True)
    with torchgradx.attach(model, **options, clip=clips) as probe:
        for m in (model, twin):
            inside = partial(checkpoint, m, use_reentrant=False) if way == "a checkpoint" else m
            square(inside, sparse).backward()
        close_named(probe.norms(per="parameter"), want)
        if clips:
            probe.clip_grad_norm_(torch.inf)
    if options.get("weight_grad", True):
        same_gradients(model, twin, rtol=None if options else 1e-12)


APART = {
    "there and back": lambda x, made: made(x).to_dense(),
    "a product": lambda x, made: made(x) @ torch.arange(9.0).view(3, 3).to(x),
}


@a_few_modes
@layouts
@pytest.mark.parametrize("way", APART)
def test_data_made_sparse_that_stay_apart_are_exact(way, made, options):
    model = Model(lambda m, x: m.l(APART[way](x, made)), l=nn.Linear(3, 2))
    check(model, square, words(), **options)


WIDE = 6
STATES = {
    "zeros": lambda m, x: x.new_zeros(*x.shape[:-1], WIDE),
    "a table": lambda m, x: m.t,
    "the samples": lambda m, x: torch.tanh(m.i(x)),
    "the samples, turned": lambda m, x: torch.tanh(m.i(x)).transpose(0, -2),
}


def silent_net(state, steps):
    def forward(m, x):
        z = STATES[state](m, x)
        with torch.no_grad():
            for _ in range(steps):
                z = torch.tanh(m.f(z) / 2)
        if state.endswith("turned"):
            z = z.transpose(0, -2)
        if state == "a table":
            z = z.mean(0, keepdim=True)
        return m.o(torch.tanh(m.f(z) + m.i(x)))

    parts = {"f": nn.Linear(WIDE, WIDE), "i": nn.Linear(3, WIDE), "o": nn.Linear(WIDE, 2)}
    made = Model(forward, **parts)
    made.register_buffer("t", torch.randn(2 * N, WIDE))
    return made


@a_few_modes
@pytest.mark.parametrize("state", STATES)
@pytest.mark.parametrize("steps", [1, 3])
@pytest.mark.parametrize("shape", [(N, 3), (1, 3), (N, N, 3)], ids=str)
def test_a_module_called_under_no_grad_first_is_exact(shape, steps, state, options):
    check(silent_net(state, steps), square, torch.randn(shape), **options)
