"""Weights that a hook makes before each forward: weight_norm, spectral_norm and pruning of old."""

import copy

import pytest
import torch
from attach_oracle import (
    Model,
    a_few_modes,
    check,
    close_named,
    exact_or,
    loop,
    square,
)
from torch import nn
from torch.nn.utils import parametrizations, prune, spectral_norm, weight_norm
from torch.utils.checkpoint import checkpoint

import torchgradx

pytestmark = pytest.mark.filterwarnings("ignore:.*weight_norm.*:FutureWarning")
N = 4


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


MODELS = {
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
@pytest.mark.parametrize("name", MODELS)
def test_the_tensors_that_a_weight_is_made_of_have_the_norms_of_the_loop(name, options):
    make, shape = MODELS[name]
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
