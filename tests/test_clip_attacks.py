"""Orders of calls that would clip the wrong sum: each is right, or refused with .grad as it was."""

import copy

import pytest
import torch
import torch.nn.functional as F
from attach_models import Model, identity, mlp, square
from clip_oracle import clipped, is_sum, refuses
from test_clip_steps import BOUND, batch
from torch import nn

import torchgradx
from torchgradx import CoverageError

EVERY = [{}, {"weight_grad": False}, {"backend": "vmap"}, {"backend": "vmap", "weight_grad": False}]


@pytest.mark.parametrize("to_none", [True, False])
def test_a_pass_whose_gradients_were_zeroed(to_none):
    """The generator's loss goes through the discriminator, whose gradients are thrown away."""
    model, x, y = mlp().double(), batch(), batch(4)
    with torchgradx.attach(model, clip=True) as probe:
        square(model, x).backward()
        model.zero_grad(set_to_none=to_none)
        square(model, y).backward()
        refuses(CoverageError, "zero_grad", probe, model, BOUND)
        probe.reset()
        for _ in range(2):
            model.zero_grad(set_to_none=to_none)
            with probe.paused():
                square(model, x).backward()
            model.zero_grad(set_to_none=to_none)
            square(model, y).backward()
            probe.clip_grad_norm_(BOUND)
            is_sum(model, clipped(model, y))


def step_of(model, x, change=lambda model, x: None):
    square(model, x).backward()
    change(model, x)


def decayed(model, x):
    for p in model.parameters():
        p.grad.add_(p.detach(), alpha=0.1)


def unscaled(model, x):
    for p in model.parameters():
        p.grad = p.grad / 1024


def decayed_before_a_penalty(model, x):
    decayed(model, x)
    sum(p.square().sum() for p in model.parameters()).backward()


def input_read_anew(model, x):
    x.copy_(batch())


def weights_stepped(model, x):
    """What was clipped at some steps only: the others' gradients are not in .grad any more."""
    with torch.no_grad():
        model[0].weight.add_(1)
    model.zero_grad()
    step_of(model, x)


SPOILED = {  # what the refusal says, and options with which it comes
    decayed: ("changed since the backward", [{}]),
    unscaled: ("changed since the backward", [{}]),
    decayed_before_a_penalty: ("changed between", [{}]),
    input_read_anew: ("0.weight", EVERY),
    weights_stepped: ("once a step", EVERY),
}
CASES = [(change, words, o) for change, (words, options) in SPOILED.items() for o in options]


@pytest.mark.parametrize(("change", "words", "options"), CASES)
def test_what_changes_between_a_backward_and_clipping(change, words, options):
    model, x = mlp().double(), batch()
    with torchgradx.attach(model, clip=True, **options) as probe:
        step_of(model, x, change)
        refuses(CoverageError, words, probe, model, BOUND)
        probe.reset()
        model.zero_grad()
        step_of(model, x)
        probe.clip_grad_norm_(BOUND)
        is_sum(model, clipped(model, x))


@pytest.mark.parametrize("after", [False, True])
@pytest.mark.parametrize("options", EVERY[:2], ids=str)
def test_hooks_on_parameters(options, after):
    """Deferred, they see the gradient that is not clipped, or none: what they do to it is lost."""
    model, x, seen = mlp().double(), batch(), []
    p = model[0].weight
    with torchgradx.attach(model, clip=True, **options) as probe:
        if after:
            handle = p.register_post_accumulate_grad_hook(lambda p: seen.append(p.grad.mul_(2)))
        else:
            handle = p.register_hook(lambda g: seen.append(g) or 2 * g)
        square(model, x).backward()
        refuses(CoverageError, r"Concerned: 0\.weight$", probe, model, BOUND)
        if options:
            assert len(seen) == (not after)
        handle.remove()
        probe.reset()
        model.zero_grad()
        square(model, x).backward()
        probe.clip_grad_norm_(BOUND)
    is_sum(model, clipped(model, x))


def test_two_optimizers_of_which_one_has_unscaled():
    model, x = mlp(), batch().float()
    first, second = (torch.optim.SGD(layer.parameters(), 0.0) for layer in (model[0], model[2]))
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    with torchgradx.attach(model, clip=True, loss_scale=scaler) as probe:
        scaler.scale(square(model, x)).backward()
        scaler.unscale_(first)
        refuses(CoverageError, "2.weight", probe, model, BOUND)
        scaler.unscale_(second)
        probe.clip_grad_norm_(BOUND)


def test_an_overflow_that_is_unscaled_is_not_refused():
    model, x, scaler = mlp(), batch().float(), torch.amp.GradScaler("cpu")
    with torchgradx.attach(model, clip=True, loss_scale=scaler) as probe:
        scaler.scale((model(x) - 1e38).square().mean()).backward()
        scaler.unscale_(torch.optim.SGD(model.parameters(), 0.0))
        assert not probe.clip_grad_norm_(BOUND).isfinite().any()


def dropping():
    """Runs again when it is clipped, as it ran: its gradients by sample are larger than its
    output, and not kept."""
    model = Model(lambda m, x: F.dropout(x * m.w.sum(0) / m.temperature + m.shift, 0.5, m.training),
                  w=torch.randn(2, 3), temperature=1.0)  # fmt: skip
    model.register_buffer("shift", torch.zeros(3))
    return model


def test_what_runs_again_stands_as_it_stood():
    model = nn.Sequential(nn.Linear(3, 3), dropping(), nn.Tanh(), nn.Linear(3, 2)).double()
    x = batch()
    wanted = []
    for changes in (False, True):
        twin = copy.deepcopy(model)
        torch.manual_seed(1)
        with torchgradx.attach(twin, clip=True) as probe:
            square(twin, x).backward()
            if changes:
                twin.eval()
                twin[1].temperature = 3.0
                twin[1].shift.fill_(1)
            probe.clip_grad_norm_(BOUND)
        wanted.append([p.grad for p in twin.parameters()])
    assert all(map(torch.equal, *wanted))


def test_what_cannot_run_again_leaves_all_as_it_was():
    fails = []

    def once(m, x):
        if fails:
            raise ValueError("not again")
        return x * m.w.sum(0)

    model = nn.Sequential(nn.Linear(3, 3), Model(once, w=torch.randn(2, 3)), nn.Linear(3, 2))
    with torchgradx.attach(model, clip=True, layout={"1": "batch"}) as probe:  # it runs again
        square(model, batch().float()).backward()
        fails.append(True)
        refuses(ValueError, "not again", probe, model, BOUND)
        fails.clear()
        probe.clip_grad_norm_(BOUND)


negated = identity(torch.Tensor.neg_)


@pytest.mark.parametrize("backend", ["auto", "vmap"])
def test_a_gradient_that_is_changed_in_place_later(backend):
    """A branch beside a residual one gets the same memory."""

    def branches(m, x):
        h = torch.tanh(m.a(x))
        return negated(h) + m.b(h)

    model, x = Model(branches, a=nn.Linear(3, 3), b=nn.Linear(3, 3)).double(), batch()
    with torchgradx.attach(model, clip=True, backend=backend) as probe:
        square(model, x).backward()
        try:
            probe.clip_grad_norm_(BOUND)
        except CoverageError as error:
            assert "changed in place" in str(error)  # noqa: PT017
        else:
            is_sum(model, clipped(model, x))


@pytest.mark.parametrize("options", [{}, {"fused": False}, {"backend": "vmap"}], ids=str)
@pytest.mark.parametrize("before", [False, True])
@pytest.mark.parametrize("retain", [False, True])
def test_a_parameter_that_the_forward_does_not_use_is_left_as_it_is(retain, before, options):
    model, x = Model(lambda m, x: m.o(x), w=torch.randn(3), o=nn.Linear(3, 2)).double(), batch()
    model.w.grad = torch.ones_like(model.w) if before else None
    with torchgradx.attach(model, clip=True, **options) as probe:
        square(model, x).backward(retain_graph=retain)
        probe.clip_grad_norm_(BOUND)
    assert bool((model.w.grad == 1).all()) if before else model.w.grad is None
    model.w.grad = None
    is_sum(model, clipped(model, x))
