"""What a model gives a sample among others, and alone: where no graph and no operation shows it."""

import pytest
import torch
import torch.nn.functional as F
from attach_oracle import (
    a_few_modes,
    check,
    close_named,
    exact_or_refused,
    loop,
    need_native,
    refused,
    seeded,  # noqa: F401
    square,
)
from between import Between, as_a_number, averaged_for_a_log, beside, sent_to_experts
from clip_oracle import check_clip
from torch import nn
from torch.nn.utils import parametrize

import torchgradx
from torchgradx.proof import others, witness

N = 6


def largest_of_all(h):
    """The batch's top-k, as sparse autoencoders take it."""
    values, at = h.flatten().topk(2 * len(h))
    return torch.zeros_like(h).flatten().scatter(0, at, values).view_as(h)


def chosen_by_experts(h):
    """Each column takes half of the batch."""
    columns = []
    for column in h.unbind(1):
        values, at = column.topk(len(h) // 2)
        columns.append(torch.zeros_like(column).scatter(0, at, values))
    return torch.stack(columns, 1)


def by_how_many_are_alike(x):
    """Three of each of two kinds, here."""
    kinds = (x[:, 0] > 0).long()
    return x * torch.bincount(kinds)[kinds, None].to(x)


def by_a_branch(x):
    return x if x.mean() > 0 else 2 * x


def cut_to_the_longest(x):
    """Numbers above 0, of the longest in the batch."""
    longest = int((x > 0).sum(1).max())
    return F.pad(x[:, :longest] / longest, (0, 4 - longest))


BETWEEN = [largest_of_all, chosen_by_experts]
BEFORE = [by_how_many_are_alike, as_a_number, by_a_branch, cut_to_the_longest]


@a_few_modes
@pytest.mark.parametrize("between", BETWEEN)
def test_rows_that_the_batch_chooses_are_refused(between, options):
    names = ["a.weight", "b.weight"]
    refused(Between(between), square, torch.randn(N, 4), names=names, match="mixes", **options)


@a_few_modes
@pytest.mark.parametrize("before", BEFORE)
def test_numbers_of_the_batch_are_refused(before, options):
    x = torch.randn(N, 4)
    x[:, 0] = torch.tensor([2.0, -3.0]).repeat(N // 2)
    x[:2, 1:] = torch.tensor([[1.0, 3, 1], [-1, -3, 0.1]])
    names = ["a.weight", "b.weight"]
    refused(Between(before=before), square, x, names=names, match="mixes", **options)


def looked_at(h):
    if bool(h.isnan().any()) or float(h.max()) > 1e9:
        raise ArithmeticError
    return h


@a_few_modes
@pytest.mark.parametrize("between", [sent_to_experts, looked_at, averaged_for_a_log])
def test_what_comes_back_to_its_sample_is_exact(between, options):
    check(Between(between), square, torch.randn(N, 4), **options)


@a_few_modes
def test_dropout_hides_nothing(options):
    need_native(options)
    model = nn.Sequential(nn.Dropout(0.2), Between(before=as_a_number)).double()
    with torchgradx.attach(model, **options) as probe:
        square(model, torch.randn(N, 4).double()).backward()
        with pytest.raises(torchgradx.CoverageError, match="mixes"):
            probe.norms()


def two_kinds(h):
    """A mask for each row, which another row of the same number has elsewhere."""
    rows = (h[:, 0] > h[:, 1]).nonzero().flatten()
    return h.index_add(0, rows, F.dropout(h[rows], 0.5))


@a_few_modes
def test_random_numbers_for_rows_that_the_batch_chose_are_no_reason(options):
    need_native(options)
    model = Between(two_kinds).double()
    with torchgradx.attach(model, **options) as probe:
        square(model, torch.randn(N, 4).double()).backward()
        assert probe.norms().shape == (N,)


class Tells(Between):
    """How many of its batch are of each of N kinds, beside."""

    def forward(self, x):
        kinds = x.argmax(1)
        return super().forward(x), torch.zeros(N).scatter_add(0, kinds, torch.ones(N))


@a_few_modes
def test_statistics_beside_the_outputs_are_no_reason(options):
    need_native(options)
    model, x = Tells().double(), torch.randn(N, 4).double()
    with torchgradx.attach(model, **options) as probe:
        (model(x)[0].square().sum() / N).backward()
        want = loop(beside(model), lambda m, x: m(x).square().sum(), x)
        close_named(probe.norms(per="parameter"), want)


class Later(Between):
    """Centres its activations by the batch, where it is on, or has more than four samples."""

    on, many = False, 10**9

    def forward(self, x):
        h = torch.relu(self.a(x))
        if self.on or len(x) > self.many:
            h = h - h.mean(0).detach()
        return self.b(h)


@a_few_modes
def test_what_begins_later_is_seen_in_the_second_pass_of_its_kind(options):
    need_native(options)
    model, seen = Later().double(), []
    with torchgradx.attach(model, **options) as probe:
        for on in (False, False, True, True, True):
            model.on = on
            square(model, torch.randn(N, 4).double()).backward()
            try:
                probe.norms()
                seen.append(True)
            except torchgradx.CoverageError:
                seen.append(False)
    assert seen in ([True, True, True, False, False], [True, True, False, False, False])


@a_few_modes
@pytest.mark.parametrize("before", [False, True])
def test_what_begins_with_more_samples_is_seen_at_once(before, options):
    need_native(options)
    model = Later(before=lambda x: x - x.mean(0) if before and len(x) > 4 else x).double()
    if before:
        model.forward = super(Later, model).forward
    else:
        model.many = 4
    with torchgradx.attach(model, **options) as probe:
        for n in (3, 6, 8):
            x = torch.randn(n, 4).double()
            want = loop(model, square, x)
            square(model, x).backward()
            if n < 5:
                close_named(probe.norms(per="parameter"), want)
            else:
                with pytest.raises(torchgradx.CoverageError, match="mixes"):
                    probe.norms()


@a_few_modes
def test_numbers_of_samples_that_never_repeat_are_not_looked_at_for_ever(options, monkeypatch):
    need_native(options)
    model, looks = Later().double(), []
    monkeypatch.setattr(witness, "LONG", 3)
    monkeypatch.setattr(
        others.Others, "of", staticmethod(lambda n, *given: looks.append(n) or None)
    )
    with torchgradx.attach(model, **options) as probe:
        for n in (3, 4, 5, 6, 7, 6):
            x = torch.randn(n, 4).double()
            want = loop(model, square, x)
            square(model, x).backward()
            close_named(probe.norms(per="parameter"), want)
    assert looks == [3, 4, 5]


class Twice(Between):
    """Without gradients first, as one that looks for a fixed point."""

    def forward(self, x):
        with torch.no_grad():
            start = torch.tanh(self.b(torch.relu(self.a(x)))).argmax(1)
        return super().forward(x) * (1 + start[:, None])


@a_few_modes
def test_a_layer_that_is_called_without_gradients_too_is_exact_at_each_number(options):
    need_native(options)
    model = Twice().double()
    with torchgradx.attach(model, **options) as probe:
        for n in (8, 5, 8, 5, 5):
            x = torch.randn(n, 4).double()
            want = loop(model, square, x)
            square(model, x).backward()
            close_named(probe.norms(per="parameter"), want)


class Gain(nn.Module):
    def __init__(self):
        super().__init__()
        self.gain = nn.Parameter(torch.tensor(1.5))

    def forward(self, weight):
        return weight * self.gain


@pytest.mark.parametrize("options", [{}, {"fused": False}], ids=["default", "fused=False"])
def test_a_single_number_beside_a_weight_is_clipped(options):
    layer = nn.Linear(3, 3)
    parametrize.register_parametrization(layer, "weight", Gain())
    check_clip(nn.Sequential(layer, nn.Tanh()), square, torch.randn(N, 3), **options)


@a_few_modes
def test_rejected_random_numbers_are_no_reason(options):
    """How many are drawn is up to all samples."""

    def drawn(h):
        return averaged_for_a_log(h) * torch.distributions.Gamma(h.detach() + 0.1, 1.0).sample()

    model = Between(drawn).double()
    need_native(options)
    with torchgradx.attach(model, **options) as probe:
        square(model, torch.randn(N, 4).double()).backward()
        assert probe.norms().shape == (N,)


@a_few_modes
@pytest.mark.parametrize("n", [1, 2, 3])
def test_few_samples(n, options):
    check(Between(sent_to_experts), square, torch.randn(n, 4), **options)
    exact_or_refused(Between(largest_of_all), square, torch.randn(n, 4), **options)
