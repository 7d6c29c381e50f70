"""What a model gives a sample among others, and alone: where no graph and no operation shows it."""

import copy
import random
from queue import Queue
from types import FunctionType, MethodType
from typing import ClassVar

import numpy as np
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
from clip_oracle import check_clip
from torch import nn
from torch.nn.utils import parametrize

import torchgradx
from torchgradx.proof import others, witness
from torchgradx.proof.sample_dims import Place
from torchgradx.sites import stand_in

N = 6


class Between(nn.Module):
    """Something between two layers, and before them."""

    def __init__(self, between=lambda h: h, before=lambda x: x):
        super().__init__()
        self.a, self.b = nn.Linear(4, 5), nn.Linear(5, 3)
        self.between, self.before = between, before

    def forward(self, x):
        return self.b(self.between(torch.relu(self.a(self.before(x)))))


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


def as_a_number(x):
    return x * float(x.abs().mean())


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


def sent_to_experts(h):
    out, to = torch.zeros_like(h), h.argmax(1)
    for expert in range(5):
        rows = (to == expert).nonzero().flatten()
        out = out.index_add(0, rows, h[rows] * (expert + 1.0))
    return out


def looked_at(h):
    if bool(h.isnan().any()) or float(h.max()) > 1e9:
        raise ArithmeticError
    return h


def averaged_for_a_log(h):
    assert float(h.detach().abs().mean()) >= 0
    return h


@a_few_modes
@pytest.mark.parametrize("between", [sent_to_experts, looked_at, averaged_for_a_log])
def test_what_comes_back_to_its_sample_is_exact(between, options):
    check(Between(between), square, torch.randn(N, 4), **options)


class Remembers(Between):
    """Asks what cannot be followed, counts, draws and keeps."""

    def __init__(self):
        super().__init__()
        self.calls, self.kept, self.drawing = 0, [], torch.Generator().manual_seed(0)
        self.register_buffer("mean", torch.zeros(4).double())

    def forward(self, x):
        self.calls += 1
        self.kept.append(float(x.abs().max()))
        self.mean += 1
        x = x + torch.rand(4, generator=self.drawing) + torch.rand(4) + random.random()
        return super().forward(x.add_(float(np.random.rand())))


@a_few_modes
def test_what_a_forward_changes_is_changed_once(options):
    need_native(options)
    model = Remembers().double()
    twin = copy.deepcopy(model)
    twin.drawing = torch.Generator().manual_seed(0)
    xs = torch.randn(3, N, 4).double()
    ends = []
    for one in (model, twin):
        torch.manual_seed(0), random.seed(0), np.random.seed(0)
        probe = torchgradx.attach(one, **options) if one is model else None
        losses = [square(one, x.clone()) for x in xs]
        drawn = [torch.rand(()), random.random(), np.random.rand()]
        drawn.append(torch.rand((), generator=one.drawing))
        ends.append([*losses, *drawn, one.mean, one.calls, one.kept])
        if probe:
            probe.remove()
    for ours, theirs in zip(*ends, strict=True):
        assert torch.equal(torch.as_tensor(ours), torch.as_tensor(theirs))


class Counts(Between):
    calls = 0

    def forward(self, x):
        self.calls += 1
        return super().forward(x) / self.calls


@a_few_modes
@pytest.mark.parametrize("before", [as_a_number, averaged_for_a_log])
def test_what_it_counts_is_as_it_was(before, options):
    """Alone with what it had counted before, so that it does what it did."""
    model = Counts(averaged_for_a_log, before).double()
    x = torch.randn(N, 4).double()
    twin = Between(averaged_for_a_log).double()
    twin.load_state_dict(model.state_dict())
    want = loop(twin, square, x)
    need_native(options)
    with torchgradx.attach(model, **options) as probe:
        square(model, x).backward()
        if before is as_a_number:
            with pytest.raises(torchgradx.CoverageError, match="mixes"):
                probe.norms()
        else:
            close_named(probe.norms(per="parameter"), want)


@pytest.mark.parametrize("given", [torch.zeros(300), np.zeros(300), [1] * 5000], ids=type)
def test_what_is_large_is_not_copied(given, monkeypatch):
    model, arguments = Between(), ((torch.randn(N, 4),), {})
    assert others.Others.of(N, model, arguments, [Place(0)], 0)
    model.data = {"kept": [given]}
    monkeypatch.setattr(stand_in, "MOST", 1000)
    assert others.Others.of(N, model, arguments, [Place(0)], 0) is None


class HearsByClass(Between):
    heard: ClassVar[list] = []

    def forward(self, x):
        self.heard.append(1)
        return super().forward(x)


@a_few_modes
def test_what_a_class_keeps_is_kept_once(options):
    need_native(options)
    HearsByClass.heard.clear()
    model = HearsByClass(averaged_for_a_log).double()
    with torchgradx.attach(model, **options):
        square(model, torch.randn(N, 4).double()).backward()
    assert HearsByClass.heard == [1]


class Hears(Between):
    """Notes each call where no copy could do so by itself."""

    def __init__(self, hear):
        super().__init__(averaged_for_a_log)
        self.hear = hear(self)

    def forward(self, x):
        how = getattr(self.hear, "put", self.hear)
        how() if isinstance(self.hear, Notes | FunctionType | MethodType) else how(1)
        return super().forward(x)


class Notes:
    __slots__ = ("kept",)

    def __init__(self):
        self.kept = []

    def __call__(self):
        self.kept.append(1)


def in_a_closure(model):
    notes = model.notes = []
    return lambda: notes.append(1)


def in_a_list(model):
    model.notes = []
    return model.notes.append


HEAR = {
    "a queue": lambda model: Queue(),
    "slots": lambda model: Notes(),
    "a closure": in_a_closure,
    "a method of another": lambda model: Notes().__call__,
    "a method of a list": in_a_list,
}


def heard(model):
    hear = model.hear
    if isinstance(hear, Queue):
        return hear.qsize()
    if hasattr(model, "notes"):
        return len(model.notes)
    return len(getattr(hear, "__self__", hear).kept)


@a_few_modes
@pytest.mark.parametrize("hear", HEAR.values(), ids=HEAR)
def test_what_cannot_be_copied_is_called_once(hear, options):
    need_native(options)
    model = Hears(hear).double()
    with torchgradx.attach(model, **options):
        square(model, torch.randn(N, 4).double()).backward()
    assert heard(model) == 1


class Halves(Between):
    """By numbers in the place of those that it had, as many write it."""

    def forward(self, x):
        self.a.weight.data = self.a.weight.data * 0.5
        return super().forward(x)


@a_few_modes
def test_a_parameter_that_a_forward_gives_other_numbers_has_them(options):
    need_native(options)
    model = Halves(averaged_for_a_log)
    before = model.a.weight.detach().clone()
    with torchgradx.attach(model, **options):
        square(model, torch.randn(N, 4)).backward()
    assert torch.equal(model.a.weight, before / 2)


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
    twin = Between().double()
    twin.load_state_dict(model.state_dict())
    with torchgradx.attach(model, **options) as probe:
        (model(x)[0].square().sum() / N).backward()
        want = loop(twin, lambda m, x: m(x).square().sum(), x)
        close_named(probe.norms(per="parameter"), want)


CALLS = []


class Takes(Between):
    """From what is not its own, and another at each call."""

    def forward(self, x):
        CALLS.append(1)
        return super().forward(x) * len(CALLS)


@a_few_modes
def test_a_forward_that_does_not_do_the_same_again_is_no_reason(options):
    CALLS.clear()
    model, x = Takes(averaged_for_a_log).double(), torch.randn(N, 4).double()
    twin = Between().double()
    twin.load_state_dict(model.state_dict())
    need_native(options)
    with torchgradx.attach(model, **options) as probe:
        square(model, x).backward()
        close_named(probe.norms(per="parameter"), loop(twin, square, x))


class Taught(Between):
    """By another model that it has, but not as a part."""

    def __init__(self):
        super().__init__(averaged_for_a_log)
        self.teacher = [nn.BatchNorm1d(4).double()]

    def forward(self, x):
        with torch.no_grad():
            taught = self.teacher[0](x)
        return super().forward(x) + float(taught.abs().sum() > 0)


@a_few_modes
def test_statistics_of_what_is_no_part_are_taken_once(options):
    need_native(options)
    model, x = Taught().double(), torch.randn(N, 4).double()
    with torchgradx.attach(model, **options):
        square(model, x).backward()
    statistics = model.teacher[0]
    assert int(statistics.num_batches_tracked) == 1
    torch.testing.assert_close(statistics.running_mean, 0.1 * x.mean(0), rtol=1e-12, atol=0)


class Scales(Between):
    def forward(self, x):
        self.a.weight.data.mul_(0.5)
        return super().forward(x) * float(self.a.weight.detach().abs().max() > 0)


@a_few_modes
def test_weights_are_written_into_once(options):
    need_native(options)
    model = Scales(sent_to_experts)
    before = model.a.weight.detach().clone()
    with torchgradx.attach(model, **options):
        square(model, torch.randn(N, 4)).backward()
    assert torch.equal(model.a.weight, before / 2)


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
