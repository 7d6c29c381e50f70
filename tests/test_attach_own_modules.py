"""Modules of users' own that scale, shift and normalise are served at the graph's nodes, and do
not run again; weights that a hook makes before each forward."""

import copy
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from attach_oracle import (
    Model,
    a_few_modes,
    check,
    close_named,
    exact_or,
    loop,
    per_model,
    same_gradients,
    square,
    title,
    tolerance,
)
from torch import nn
from torch.nn.utils import parametrizations, prune, spectral_norm, weight_norm
from torch.utils.checkpoint import checkpoint

import torchgradx

N, T, C = 4, 5, 6


class RMSNorm(nn.Module):
    """As transformers has it."""

    def __init__(self, offset=0):
        super().__init__()
        self.weight, self.offset = nn.Parameter(torch.randn(C)), offset

    def forward(self, x):
        dtype = x.dtype
        wide = x.to(torch.promote_types(dtype, torch.float32))
        normalised = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + 1e-6)
        weight = self.weight + self.offset if self.offset else self.weight
        return weight * normalised.to(dtype)


class LayerScale(nn.Module):
    def __init__(self, shape):
        super().__init__()
        self.gamma = nn.Parameter(torch.randn(shape))

    def forward(self, x):
        return x * self.gamma


class Shift(nn.Module):
    """Positions, or a bias of attention."""

    def __init__(self, shape):
        super().__init__()
        self.places = nn.Parameter(torch.randn(shape))

    def forward(self, x):
        return x + self.places


class ResponseNorm(nn.Module):
    """ConvNeXt V2's."""

    def __init__(self):
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.randn(C)), nn.Parameter(torch.randn(C))

    def forward(self, x):
        size = x.norm(dim=(2, 3), keepdim=True)
        weight, bias = (p.view(1, -1, 1, 1) for p in (self.weight, self.bias))
        return x + torch.addcmul(bias, weight, x * size / (size.mean(1, keepdim=True) + 1e-6))


class LayerNorm(nn.LayerNorm):
    def forward(self, x):
        return F.layer_norm(x, self.normalized_shape, self.weight, self.bias, self.eps)


class LayerNorm2d(LayerNorm):
    def forward(self, x):
        return super().forward(x.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)


class GroupNormAct(nn.GroupNorm):
    def __init__(self):
        super().__init__(2, C)
        self.act = nn.SiLU()

    def forward(self, x):
        return self.act(F.group_norm(x, self.num_groups, self.weight, self.bias, self.eps))


class BatchNormAct(nn.BatchNorm2d):
    """By running statistics."""

    def __init__(self):
        super().__init__(C)
        self.running_mean.normal_()
        self.running_var.uniform_(0.5, 2)
        self.eval()

    def forward(self, x):
        statistics = self.running_mean, self.running_var
        return torch.relu(F.batch_norm(x, *statistics, self.weight, self.bias, False))


class Checkpointed(nn.Module):
    def __init__(self, inner, reentrant):
        super().__init__()
        self.inner, self.reentrant = inner, reentrant

    def forward(self, x):
        return checkpoint(self.inner, x, use_reentrant=self.reentrant)


def around(middle, layer):
    forward = lambda m, x: m.o(torch.tanh(m.s(m.i(x))))  # noqa: E731
    return Model(forward, i=layer(3, C), s=middle, o=layer(C, 2))


def rows(middle):
    return around(middle, nn.Linear), torch.randn(N, T, 3)


def images(middle):  # with a dimension as long as the channels
    return around(middle, partial(nn.Conv2d, kernel_size=1)), torch.randn(N, 3, 5, C)


MODELS = {
    "RMSNorm": lambda: rows(RMSNorm()),
    "1 + w": lambda: rows(RMSNorm(1)),
    "LayerScale": lambda: rows(LayerScale(C)),
    "a gate by position": lambda: rows(LayerScale((T, 1))),
    "one number": lambda: rows(LayerScale(())),
    "positions": lambda: rows(Shift((1, T, C))),
    "LayerNorm": lambda: rows(LayerNorm(C)),
    "LayerNorm without bias": lambda: rows(LayerNorm(C, bias=False)),
    "LayerNorm of positions too": lambda: rows(LayerNorm((T, C))),
    "gamma": lambda: images(LayerScale((C, 1, 1))),
    "LayerNorm2d": lambda: images(LayerNorm2d(C)),
    "GroupNormAct": lambda: images(GroupNormAct()),
    "BatchNormAct": lambda: images(BatchNormAct()),
    "GRN": lambda: images(ResponseNorm()),
}
each_model = pytest.mark.parametrize("name", MODELS)


def example(name):
    model, x = MODELS[name]()
    for key, p in model.s.named_parameters():
        nn.init.normal_(p, 1.0 if key == "weight" else 0.0)
    return model.double(), x.double()


@each_model
@a_few_modes
def test_norms_and_gradients_are_exact(name, options):
    model, x = example(name)
    check(model, square, x, input_grad=True, **options)


@each_model
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_norms_are_exact_in_other_precisions(name, dtype):
    model, x = example(name)
    check(model, square, x, dtype=dtype)


@each_model
@pytest.mark.parametrize("options", [{}, {"weight_grad": False}], ids=title)
def test_no_module_runs_again(name, options):
    model, x = example(name)
    calls, forward = [], type(model.s).forward

    def counted(self, *args):
        calls.append(self)
        return forward(self, *args)

    model.s.__class__ = type("Counted", (type(model.s),), {"forward": counted})
    with torchgradx.attach(model, **options) as probe:
        square(model, x).backward()
        (line,) = [line for line in probe.explain().splitlines() if line.startswith("s: ")]
        assert "lifted" in line
        for step in (2, 3):
            square(model, x).backward()
            probe.norms()
            assert len(calls) == step


@each_model
def test_what_is_clipped_is_exact(name):
    model, x = example(name)
    norms = per_model(loop(model, square, x))
    bound = float(norms.median())
    factors = (bound / norms).clamp(max=1)
    twin = copy.deepcopy(model)
    sum(f * square(twin, row[None]) for f, row in zip(factors, x, strict=True)).div(N).backward()
    with torchgradx.attach(model, clip=True) as probe:
        square(model, x).backward()
        probe.clip_grad_norm_(bound)
    same_gradients(model, twin, 1e-9)


@each_model
@pytest.mark.parametrize("reentrant", [True, False], ids=["reentrant", "not"])
def test_checkpointed_it_is_exact(name, reentrant):
    model, x = example(name)
    model.s = Checkpointed(model.s, reentrant)
    want = loop(model, square, x)
    model.zero_grad()
    with torchgradx.attach(model) as probe:
        for _ in range(2):
            square(model, x).backward()
            close_named(probe.norms(per="parameter"), want)


@each_model
@a_few_modes
def test_later_steps_are_exact(name, options):
    """Their structure is known, and kernels take the norms at the nodes."""
    model, first = example(name)
    with torchgradx.attach(model, **options) as probe:
        for n in (N, N, N + 1, N + 1):
            x = torch.randn(n, *first.shape[1:], dtype=torch.float64)
            square(model, x).backward()
            close_named(probe.norms(per="parameter"), loop(model, square, x))


@each_model
def test_later_steps_are_exact_in_bfloat16(name):
    model, x = example(name)
    want = loop(model, square, x)
    model, x = model.bfloat16(), x.bfloat16()
    with torchgradx.attach(model) as probe:
        for _ in range(3):
            square(model, x).backward()
            got = probe.norms(per="parameter")
    close_named(got, want, tolerance(model, torch.bfloat16))


@each_model
def test_a_penalty_that_comes_later_is_refused(name):
    model, x = example(name)
    with torchgradx.attach(model) as probe:
        for _ in range(3):
            square(model, x).backward()
            probe.norms()
        (square(model, x) + sum(p.square().sum() for p in model.s.parameters())).backward()
        with pytest.raises(torchgradx.CoverageError) as refusal:
            probe.norms()
    assert set(refusal.value.parameters) == {f"s.{key}" for key, _ in model.s.named_parameters()}


pytestmark = pytest.mark.filterwarnings("ignore:.*weight_norm.*:FutureWarning")


def copyable(module):
    """Its weight as a forward without gradients leaves it: else deepcopy refuses it."""
    with torch.no_grad():
        for hook in module._forward_pre_hooks.values():
            hook(module, ())
    return module


def normed(layer, name="weight"):
    return copyable(weight_norm(layer, name))


def checkpointed(reentrant):
    return Model(
        lambda m, x: checkpoint(m.b, m.i(x), use_reentrant=reentrant),
        i=nn.Linear(3, 3), b=nn.Sequential(normed(nn.Linear(3, 5)), nn.Tanh()),
    )  # fmt: skip


MADE = {
    "linear": (lambda: nn.Sequential(normed(nn.Linear(3, 4)), nn.Tanh(), nn.Linear(4, 2)), (N, 3)),
    "positions": (lambda: nn.Sequential(nn.Linear(3, 3), normed(nn.Linear(3, 4))), (N, 5, 3)),
    "T = N": (lambda: nn.Sequential(nn.Linear(3, 3), normed(nn.Linear(3, 4))), (N, N, 3)),
    "conv": (lambda: nn.Sequential(normed(nn.Conv1d(3, 4, 2)), nn.Tanh()), (N, 3, 6)),
    "lstm": (lambda: Model(lambda m, x: m.r(x)[0],
                           r=normed(nn.LSTM(3, 4, batch_first=True), "weight_hh_l0")), (N, 5, 3)),
    "called twice": (lambda: Model(lambda m, x: m.l(torch.tanh(m.l(x))),
                                   l=normed(nn.Linear(3, 3))), (N, 3)),
    "checkpointed": (lambda: checkpointed(False), (N, 3)),
    "checkpointed reentrantly": (lambda: checkpointed(True), (N, 3)),
    "spectral": (lambda: nn.Sequential(copyable(spectral_norm(nn.Linear(3, 4))), nn.Tanh()).eval(),
                 (N, 3)),
    "pruned": (lambda: nn.Sequential(copyable(
        prune.random_unstructured(nn.Linear(3, 4), "weight", amount=5)), nn.Tanh()), (N, 3)),
}  # fmt: skip


@a_few_modes
@pytest.mark.parametrize("name", MADE)
def test_the_tensors_that_a_weight_is_made_of_have_the_norms_of_the_loop(name, options):
    make, shape = MADE[name]
    check(make(), square, torch.randn(shape), **options)


def test_clipping_knows_the_tensors_that_a_weight_is_made_of():
    model, x = normed(nn.Linear(3, 4)).double(), torch.randn(N, 3, dtype=torch.float64)
    twin = copy.deepcopy(model)
    with torchgradx.attach(model, clip=True) as probe:
        square(model, x).backward()
        weights = 0.1 / probe.clip_grad_norm_(0.1)
    assert bool((weights < 1).all())
    (twin(x).square().sum(1) * weights).mean().backward()
    for p, q in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(p.grad, q.grad)


@a_few_modes
@pytest.mark.parametrize("norm", [spectral_norm, parametrizations.spectral_norm])
def test_a_power_iteration_takes_no_step_more_in_backward(norm, options):
    """In training each forward takes one; of a pass, the vectors are the same for all samples."""
    model = nn.Sequential(copyable(norm(nn.Linear(3, 4))), nn.Tanh(), nn.Linear(4, 2)).double()
    for _ in range(2):
        x, rows = torch.randn(N, 3, dtype=torch.float64), []
        for n in range(N):
            twin = copy.deepcopy(model)
            twin(x)[n].square().sum().backward()
            rows.append(torch.stack([p.grad.norm() for p in twin.parameters()]))
        names = [name for name, _ in model.named_parameters()]
        want = dict(zip(names, torch.stack(rows).unbind(1), strict=True))
        with torchgradx.attach(model, **options) as probe:
            square(model, x).backward()
            close_named(probe.norms(per="parameter"), want)
        model(x)
        twin(x)
        for (name, b), c in zip(model.named_buffers(), twin.buffers(), strict=True):
            assert torch.equal(b, c), name
        copyable(model[0])


@a_few_modes
def test_a_power_iteration_after_the_forward_makes_it_another_weight(options):
    model = nn.Sequential(spectral_norm(nn.Linear(3, 4)), nn.Tanh()).double()
    x = torch.randn(N, 3, dtype=torch.float64)
    with torchgradx.attach(model, **options) as probe:
        loss = square(model, x)
        model(x)
        loss.backward()
        with pytest.raises(torchgradx.CoverageError, match=r"weight_orig: .* is not the sum"):
            probe.norms()


@a_few_modes
def test_a_hook_that_uses_the_weight_otherwise_is_exact_or_refused(options):
    model = normed(nn.Linear(3, 4)).double()
    model.register_forward_pre_hook(lambda m, args: (args[0] * m.weight_g.sum(),))
    x = torch.randn(N, 3, dtype=torch.float64)
    want = loop(model, square, x)
    with torchgradx.attach(model, **options) as probe:
        square(model, x).backward()
        exact_or(torchgradx.CoverageError, "weight_g", probe, want)
