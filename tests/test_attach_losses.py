"""Models that return their loss alone: no proof begins there, and samples are followed to it."""

import pytest
import torch
import torch.nn.functional as F
from attach_oracle import (
    Model,
    a_few_modes,
    check,
    exact_or_refused,
    refused,
    seeded,  # noqa: F401
)
from torch import nn

N, T, CLASSES = 5, 7, 3


def each(logits, labels, **options):
    return F.cross_entropy(logits, labels, reduction="none", **options)


def focal(logits, labels):
    rows = each(logits, labels)
    return ((1 - torch.exp(-rows)).square() * rows).mean()


def binary(logits, labels, **options):
    positive = (labels > 0).to(logits)
    return F.binary_cross_entropy_with_logits(logits[:, 0], positive, reduction="none", **options)


def probability(logits, labels):
    positive = (labels > 0).to(logits)
    return F.binary_cross_entropy(logits[:, 0].sigmoid(), positive, reduction="none")


LOSSES = {
    "a mean of each": lambda o, y: each(o, y).mean(),
    "a sum of each": lambda o, y: each(o, y).sum() / len(y),
    "a smoothed one": lambda o, y: each(o, y, label_smoothing=0.1).mean(),
    "weighted classes": lambda o, y: each(o, y, weight=torch.arange(1.0, 4).to(o)).mean(),
    "nll": lambda o, y: F.nll_loss(o.log_softmax(1), y, reduction="none").mean(),
    "focal": focal,
    "binary": lambda o, y: binary(o, y).mean(),
    "binary, weighted": lambda o, y: binary(o, y, pos_weight=o.new_tensor(3.0)).mean(),
    "a probability": lambda o, y: probability(o, y).mean(),
    "hinge": lambda o, y: F.multi_margin_loss(o, y),
}


def of_its_loss(loss, *batch):
    return Model(lambda m, x, y: loss(m.b(torch.tanh(m.a(x))), y),
                 a=nn.Linear(4, 7), b=nn.Linear(7, CLASSES))  # fmt: skip


def whole(model, *batch):
    return model(*batch)


def labels(*sizes):
    return torch.randint(0, CLASSES, (N, *sizes))


@a_few_modes
@pytest.mark.parametrize("name", LOSSES)
def test_a_loss_that_keeps_the_samples_until_their_mean_is_exact(name, options):
    check(of_its_loss(LOSSES[name]), whole, torch.randn(N, 4), labels(), **options)


def masked(o, y):
    rows = each(o.mT, y) * (y != 0)
    return (rows.sum(1) / (y != 0).sum(1)).mean()


TOKENS = {
    "tokens": lambda o, y: each(o.mT, y).mean(1).mean(),
    "rows": lambda o, y: each(o.flatten(0, 1), y.flatten()).view(y.shape).mean(1).mean(),
    "by sample, masked": masked,
    "maps": lambda o, y: each(o.mT.unflatten(2, (1, -1)), y[:, None]).mean((1, 2)).mean(),
}


@a_few_modes
@pytest.mark.parametrize("name", TOKENS)
def test_a_loss_of_tokens_is_exact(name, options):
    y = labels(T).index_fill(1, torch.tensor([0]), 1)
    check(of_its_loss(TOKENS[name]), whole, torch.randn(N, T, 4), y, **options)


@a_few_modes
@pytest.mark.parametrize("name", TOKENS)
def test_of_as_many_tokens_as_samples_nothing_is_guessed(name, options):
    y = labels(N).index_fill(1, torch.tensor([0]), 1)
    exact_or_refused(of_its_loss(TOKENS[name]), whole, torch.randn(N, N, 4), y, **options)


MIXED = {
    "others' labels": lambda o, y: each(o, y[y.argsort()]).mean(),
    "labels of all, in turn": lambda o, y: (each(o, y) * each(o.flip(0), y)).mean(),
    "each against the mean": lambda o, y: (each(o, y) - each(o, y).mean()).square().mean(),
}


@a_few_modes
@pytest.mark.parametrize("name", MIXED)
def test_a_loss_that_mixes_them_is_refused(name, options):
    refused(of_its_loss(MIXED[name]), whole, torch.randn(N, 4), labels(), names=["a.weight"],
            **options)  # fmt: skip


@a_few_modes
def test_tokens_that_meet_others_labels_are_refused(options):
    model = of_its_loss(lambda o, y: each(o.flatten(0, 1), y.mT.flatten()).mean())
    refused(model, whole, torch.randn(N, T, 4), labels(T), names=["a.weight"], **options)


BY_ALL = {
    "a weighted mean": lambda o, y: (each(o, y) * o[:, 0].exp()).sum() / o[:, 0].exp().sum(),
    "the largest": lambda o, y: each(o, y).max(),
    "a norm": lambda o, y: each(o, y).norm(),
    "a distance": lambda o, y: torch.dist(o, F.one_hot(y, CLASSES).to(o)),
}


@a_few_modes
@pytest.mark.parametrize("name", BY_ALL)
def test_a_loss_in_which_a_samples_part_is_by_all_is_refused(name, options):
    """What it is divided by, or chosen among."""
    refused(of_its_loss(BY_ALL[name]), whole, torch.randn(N, 4), labels(),
            names=["a.weight", "b.bias"], **options)  # fmt: skip
