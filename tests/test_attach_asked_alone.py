"""Where a copy of the model is asked what it gives a sample alone: what a forward changes, it
changes once, or no copy is asked."""

import copy
import os
import random
from queue import Queue
from types import FunctionType, MethodType
from typing import ClassVar

import numpy as np
import pytest
import torch
from attach_oracle import (
    a_few_modes,
    close_named,
    loop,
    need_native,
    seeded,  # noqa: F401
    square,
)
from between import Between, as_a_number, averaged_for_a_log, beside, sent_to_experts
from torch import nn

import torchgradx
from torchgradx.proof import others
from torchgradx.proof.sample_dims import Place
from torchgradx.sites import whole

N = 6


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
    want = loop(beside(model), square, x)
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
    monkeypatch.setattr(whole, "MOST", 1000)
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


class Takes(Between):
    """From what is not its own, and another at each call."""

    def forward(self, x):
        self.gain = 1 + int.from_bytes(os.urandom(4)) / 2**32
        return super().forward(x) * self.gain


@a_few_modes
def test_a_forward_that_does_not_do_the_same_again_is_no_reason(options):
    model, x = Takes(averaged_for_a_log).double(), torch.randn(N, 4).double()
    need_native(options)
    with torchgradx.attach(model, **options) as probe:
        square(model, x).backward()
        want = loop(beside(model), square, x)
        want = {name: norms * model.gain**2 for name, norms in want.items()}
        close_named(probe.norms(per="parameter"), want)


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
