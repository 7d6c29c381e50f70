"""What a copy is asked of a model that does what cannot be followed: in the forward's own grad mode
and modes, of all outputs, whatever stands beside in them, and not for ever."""

import copy

import pytest
import torch
import torch.nn.functional as F
from attach_oracle import a_few_modes, check, need_native, refused, seeded, square  # noqa: F401
from between import Between, as_a_number
from torch import nn
from torch.nn.utils.parametrizations import spectral_norm
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

import torchgradx
from torchgradx.proof import others
from torchgradx.proof.sample_dims import Place

N = 6
MIXES = {"match": "mixes"}


def halved_by_a_flag(x):
    return x * 0.5 if (x > 1).any() else x


def halved_by_no_flag(x):
    return x if (x < 1).all() else x * 0.5


def halved_by_a_count(x):
    return x * 0.5 if (x > 1).sum() > 1 else x


def halved_by_how_many(x):
    return x * 0.5 if torch.count_nonzero(x > 1) > 1 else x


def halved_unless_equal(x):
    return x if torch.equal(x, x.clamp(max=1)) else x * 0.5


FLAGS = [halved_by_a_flag, halved_by_no_flag, halved_by_a_count, halved_by_how_many,
         halved_unless_equal]  # fmt: skip


def some_above_1():
    x = torch.rand(N, 4)
    x[1:4, 2] += 1
    return x


@a_few_modes
@pytest.mark.parametrize("before", FLAGS)
def test_a_flag_of_the_batch_that_changes_a_pass_is_refused(before, options):
    refused(Between(before=before), square, some_above_1(), names=["a.weight"], **MIXES, **options)


@a_few_modes
@pytest.mark.parametrize("alone", range(N))
def test_each_of_a_few_samples_is_asked(alone, options):
    """All others have it set."""
    x = some_above_1()
    x[:, 2] = 1.5
    x[alone, 2] = 0.5
    halved = Between(before=halved_by_a_flag)
    refused(halved, square, x, names=["a.weight"], **MIXES, **options)


def checked(x):
    if (x > 100).any() or torch.isnan(x).any():
        raise ArithmeticError
    return x


@a_few_modes
def test_a_flag_that_changes_nothing_is_no_reason(options):
    check(Between(before=checked), square, some_above_1(), **options)


class Tagger(nn.Module):
    """Of as many positions as the longest has."""

    def __init__(self, relative):
        super().__init__()
        self.a, self.b, self.relative = nn.Linear(4, 5), nn.Linear(5, 3), relative

    def forward(self, x, lengths):
        longest = int(lengths.max())
        at = torch.arange(longest, dtype=x.dtype) / (longest if self.relative else 4)
        return self.b(torch.relu(self.a(x[:, :longest]) + at[:, None]))


def masked(model, x, lengths):
    out = model(x, lengths)
    return (out.square().sum(2) * (torch.arange(out.shape[1]) < lengths[:, None])).sum(1).mean()


LENGTHS = torch.tensor([2, 3, 7, 4, 3, 5])


@a_few_modes
def test_positions_relative_to_the_longest_are_refused(options):
    given = torch.randn(N, 8, 4), LENGTHS
    refused(Tagger(True), masked, *given, names=["a.weight", "b.weight"], **MIXES, **options)


@a_few_modes
def test_positions_up_to_the_longest_are_exact(options):
    check(Tagger(False), masked, torch.randn(N, 8, 4), LENGTHS, **options)


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.GRU(4, 5, batch_first=True), nn.Linear(5, 3)

    def forward(self, x, lengths):
        rows = pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
        h = pad_packed_sequence(self.a(rows)[0], batch_first=True, total_length=8)[0].sum(1)
        return self.b(h - h.detach().mean(0)), lengths


@a_few_modes
def test_of_several_outputs_each_is_looked_at(options):
    def loss(model, x, lengths):
        return model(x, lengths)[0].square().sum(1).mean()

    names = ["a.weight_ih_l0", "b.weight"]
    refused(Recurrent(), loss, torch.randn(N, 8, 4), LENGTHS, names=names, **options)


class Actions(Between):
    """Those that are impossible have no weight."""

    def __init__(self, fill):
        super().__init__(before=as_a_number)
        self.fill = fill

    def forward(self, x):
        return super().forward(x).masked_fill(x[:, :3] > 1, self.fill)


@a_few_modes
@pytest.mark.parametrize("fill", [-1e14, float("-inf"), torch.finfo(torch.float64).min])
def test_a_masks_constants_hide_nothing(fill, options):
    def loss(model, x):
        return F.cross_entropy(model(x), torch.zeros(len(x), dtype=torch.long))

    x = some_above_1()
    x[:, 0] = 0.5
    names = ["a.weight", "b.weight"]
    refused(Actions(fill), loss, x, names=names, **MIXES, **options)


class Mixes(Between):
    """By a number of its batch, beside what a copy has to do as the forward did it."""

    def __init__(self):
        super().__init__(before=as_a_number)
        self.made()

    def made(self):
        pass


class WithSpectralNorm(Mixes):
    def made(self):
        spectral_norm(self.a)


class WithATeacher(Mixes):
    """Which follows in the forward."""

    def made(self):
        self.teacher = copy.deepcopy(self.a).requires_grad_(False)

    def forward(self, x):
        with torch.no_grad():
            for p, q in zip(self.teacher.parameters(), self.a.parameters(), strict=True):
                p.mul_(0.9).add_(q, alpha=0.1)
        return super().forward(x) + self.teacher(x).mean(1, keepdim=True)


class WithAHook(Mixes):
    def forward(self, x):
        out = super().forward(x)
        out.register_hook(lambda g: g)
        return out


class WithAForce(Mixes):
    """A gradient by its input."""

    def forward(self, x):
        x = x.detach().requires_grad_()
        (force,) = torch.autograd.grad(torch.sin(x).sum(), x)
        return super().forward(x.detach() + force)


class ByItsInput(Mixes):
    def forward(self, x):
        (force,) = torch.autograd.grad(torch.sin(x).sum(), x)
        return super().forward(x + force)


@a_few_modes
def test_an_input_that_needs_a_gradient_does_again(options):
    need_native(options)
    model, x = ByItsInput().double(), torch.randn(N, 4).double().requires_grad_()
    with torchgradx.attach(model, **options) as probe:
        square(model, x).backward()
        with pytest.raises(torchgradx.CoverageError, match="mixes"):
            probe.norms()


def test_to_be_asked_makes_no_node_of_the_graph():
    given = ((torch.randn(N, 4).requires_grad_(),), {})
    before = torch.autograd._get_sequence_nr()
    assert others.Others.of(N, Between(), given, [Place(0)], 0)
    assert torch.autograd._get_sequence_nr() == before


class InTwoPlaces(Mixes):
    def made(self):
        self.one = self.other = nn.Module()
        self.one.register_buffer("gain", torch.ones(()))

    def forward(self, x):
        self.one.gain.mul_(0.5)
        return super().forward(x) * self.other.gain


BESIDE = [WithSpectralNorm, WithATeacher, WithAHook, WithAForce, InTwoPlaces]


@a_few_modes
@pytest.mark.parametrize("kind", BESIDE)
def test_nothing_beside_hides_a_number_of_the_batch(kind, options):
    refused(kind(), square, torch.randn(N, 4), names=["b.weight"], **MIXES, **options)


def until_two_pass(x):
    """A bar that comes down until two samples are over it: of one alone, many or none are."""
    bar = 1.0
    while int((x.detach().amax(1) > bar).sum()) != 2:
        bar *= 0.9
    return x * bar


@a_few_modes
def test_a_loop_that_ends_for_the_batch_alone_ends(options):
    x = torch.arange(4.0 * N).view(N, 4) / (4 * N)
    refused(Between(before=until_two_pass), square, x, names=["a.weight"], **MIXES, **options)
