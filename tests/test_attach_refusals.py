"""What cannot be accounted for exactly is refused by name when it is read, and `.grad` is whole."""

import copy

import pytest
import torch
import torch.nn.functional as F
from attach_oracle import (
    NATIVE,
    Model,
    a_few_modes,
    attempt,
    check,
    close,
    every_mode,
    exact_or,
    exact_or_refused,
    fallback_mode,
    loop,
    loop_model,
    mlp,
    need_native,
    penalised,
    refused,
    same_gradients,
    square,
)
from torch import nn

import torchgradx

N = 4


@every_mode
def test_a_functional_use_that_begins_at_a_later_step_is_exact_or_refused(options):
    need_native(options)

    def forward(m, x):
        y = torch.tanh(m.l(x))
        return m.o(F.linear(y, m.l.weight) if m.twice else y)

    model = Model(forward, l=nn.Linear(3, 3), o=nn.Linear(3, 2)).double()
    model.twice, x = False, torch.randn(N, 3).double()
    with torchgradx.attach(model, **options) as probe:
        for _ in range(3):
            square(model, x).backward()
            probe.norms()
        model.twice = True
        want = loop(model, square, x)
        square(model, x).backward()
        exact_or(torchgradx.CoverageError, "l.weight", probe, want)


@every_mode
def test_a_penalty_inside_the_loss_is_refused_by_name(options):
    names, spared = ["0.weight"], ["2.weight", "2.bias"]
    refused(mlp(), penalised, torch.randn(N, 3), names=names, spared=spared, **options)


@a_few_modes
@pytest.mark.parametrize("penalised_name", ["1.weight", "0.bias", "2.weight"])
def test_a_penalty_on_any_kind_of_parameter_is_refused_by_name(penalised_name, options):
    model = nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4), nn.Conv1d(6, 2, 3))

    def loss(model, x):
        p = dict(model.named_parameters())[penalised_name]
        return square(model, x) + 0.01 * p.abs().sum()

    refused(model, loss, torch.randn(N, 6, 3), names=[penalised_name], **options)


@every_mode
def test_a_penalty_that_appears_at_a_later_step_is_refused(options):
    need_native(options)
    model, x = mlp(), torch.randn(N, 3)
    with torchgradx.attach(model, **options) as probe:
        for _ in range(3):
            square(model, x).backward()
            probe.norms()
        penalised(model, x).backward()
        with pytest.raises(torchgradx.CoverageError, match=r"0\.weight"):
            probe.norms()


def test_a_penalty_in_its_own_backward_does_not_change_the_norms():
    model, x = mlp().double(), torch.randn(N, 3).double()
    want = loop_model(model, square, x)
    with torchgradx.attach(model) as probe:
        square(model, x).backward()
        close(probe.norms(), want)
        (0.1 * model[0].weight.square().sum()).backward()
        square(model, x).backward()
        close(probe.norms(), want)


def test_a_penalty_on_a_frozen_parameter_and_on_the_output_is_no_penalty_on_the_weights():
    model = mlp()
    model[0].requires_grad_(False)

    def loss(model, x):
        out = model(x)
        return (out.square() + out.abs()).sum(1).mean() + model[0].weight.square().sum()

    def own(model, x):
        out = model(x)
        return (out.square() + out.abs()).sum(1).mean()

    x = torch.randn(N, 3)
    check(model, loss, x, want=loop(model, own, x))


def test_after_a_refusal_reset_makes_the_probe_good_again():
    model, x = mlp().double(), torch.randn(N, 3).double()
    with torchgradx.attach(model) as probe:
        penalised(model, x).backward()
        with pytest.raises(torchgradx.CoverageError):
            probe.norms()
        probe.reset()
        square(model, x).backward()
        close(probe.norms(), loop_model(model, square, x))


@every_mode
def test_a_submodule_called_without_the_root_is_refused_by_name(options):
    model = Model(lambda m, x: m.head(torch.tanh(m.body(x))), body=nn.Linear(3, 4),
                  head=nn.Linear(4, 2))  # fmt: skip
    refused(model, lambda m, x: square(m.body, x), torch.randn(N, 3), names=["body.weight"],
            **options)  # fmt: skip


@a_few_modes
def test_a_submodule_called_beside_the_root_in_one_loss_is_refused_by_name(options):
    model = Model(lambda m, x: m.head(torch.tanh(m.body(x))), body=nn.Linear(3, 4),
                  head=nn.Linear(4, 2))  # fmt: skip
    refused(model, lambda m, x: square(m, x) + square(m.body, 2 * x), torch.randn(N, 3),
            names=["body.weight"], spared=["head.weight"], **options)  # fmt: skip


def batch_normed(**kwargs):
    return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4, **kwargs), nn.Linear(4, 2))


@fallback_mode
def test_batch_norm_in_training_mode_is_refused_with_what_to_do(options):
    refused(batch_normed(), square, torch.randn(N, 3), names=["1.weight", "1.bias"],
            match=r"eval|GroupNorm", **options)  # fmt: skip


def test_batch_statistics_are_refused_even_without_parameters_of_their_own():
    for kwargs in ({"affine": False}, {"track_running_stats": False}):
        model = batch_normed(**kwargs)
        assert attempt(model, square, torch.randn(N, 3))[1] is not None
    model = batch_normed(track_running_stats=False).eval()  # uses the batch's in eval too
    assert attempt(model, square, torch.randn(N, 3))[1] is not None


def test_batch_norm_that_is_set_to_training_after_attach_is_refused():
    model, x = batch_normed().eval(), torch.randn(N, 3)
    with torchgradx.attach(model) as probe:
        square(model, x).backward()
        probe.norms()
        model.train()
        square(model, x).backward()
        with pytest.raises(torchgradx.CoverageError, match=r"eval|GroupNorm"):
            probe.norms()


@a_few_modes
def test_double_backward_is_exact_or_refused(options):
    def gradient_penalty(model, x):
        x = x.detach().requires_grad_()
        (gradient,) = torch.autograd.grad(square(model, x) * len(x), x, create_graph=True)
        return gradient.square().sum(1).mean()

    exact_or_refused(mlp(), gradient_penalty, torch.randn(N, 3), **options)


@a_few_modes
@pytest.mark.filterwarnings("ignore:Using backward.. with create_graph=True:UserWarning")
def test_a_backward_that_creates_a_graph_is_exact_or_refused(options):
    model, x = mlp().double(), torch.randn(N, 3).double()
    want = loop(model, square, x)
    with torchgradx.attach(model, **options) as probe:
        square(model, x).backward(create_graph=True)
        exact_or(torchgradx.CoverageError, "create_graph", probe, want)
    model.zero_grad()


D = 6


class Odd(nn.Module):
    """No kernel has it."""

    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(torch.randn(D))

    def forward(self, x):
        return torch.sin(x * self.w)


class Sequence(nn.Module):
    def __init__(self, of, **call):
        super().__init__()
        self.of, self.call = of, call

    def forward(self, x):
        rows = x.view(len(x), 2, D)
        if isinstance(self.of, nn.MultiheadAttention):
            return self.of(rows, rows, rows)[0].flatten(1)
        return self.of(rows)[0].flatten(1)


PARTS = {
    "linear": lambda: nn.Sequential(nn.Linear(2 * D, D), nn.Linear(D, D)),
    "convolution": lambda: nn.Sequential(
        nn.Unflatten(1, (2, D)), nn.Conv1d(2, 1, 3, padding=1), nn.Flatten()
    ),
    "norm": lambda: nn.LayerNorm(2 * D),
    "lstm": lambda: Sequence(nn.LSTM(D, 3, batch_first=True)),
    "attention": lambda: Sequence(nn.MultiheadAttention(D, 2, batch_first=True)),
    "no kernel": lambda: nn.Sequential(nn.Linear(2 * D, D), Odd()),
}
parts = pytest.mark.parametrize("part", PARTS)


def made(part, options):
    need_native(options)
    if options.get("backend") == "native":
        unserved = part == "no kernel" or (part == "lstm" and not options.get("fused", True))
        if unserved:
            pytest.skip("backend='native' refuses it at attach")
    body = PARTS[part]()
    width = body(torch.zeros(N, 2 * D)).shape[1]
    model = Model(lambda m, x: m.head(torch.tanh(m.body(x))), body=body, head=nn.Linear(width, 2))
    return model.double(), torch.randn(N, 2 * D).double()


def alone(model, x):
    return model.body(x).square().sum(1).mean()


def by_forward(model, x):
    return model.forward(x).square().sum(1).mean()


@every_mode
@parts
@pytest.mark.parametrize("read", ["at first", "after a read"])
@pytest.mark.parametrize("astray", [alone, by_forward])
def test_is_refused_and_then_forgotten(part, astray, read, options):
    model, x = made(part, options)
    want, twin = loop_model(model, square, x), copy.deepcopy(model)
    with torchgradx.attach(model, **options) as probe:
        if read == "after a read":
            square(model, x).backward()
            close(probe.norms(), want)
        model.zero_grad()
        astray(model, 2 * x).backward()
        with pytest.raises(torchgradx.CoverageError, match="outside of the model's own") as refusal:
            probe.norms()
        concerned = dict(model.named_parameters() if astray is by_forward else
                         model.body.named_parameters(prefix="body"))  # fmt: skip
        assert set(refusal.value.parameters) == set(concerned)
        astray(twin, 2 * x).backward()
        same_gradients(model, twin, 1e-9)  # nothing of it is taken away, not by norms only either
        square(model, x).backward()
        close(probe.norms(), want)


@every_mode
def test_beside_a_pass_that_is_not_read_yet(options):
    model, x = made("linear", options)
    with torchgradx.attach(model, **options) as probe:
        square(model, x).backward()
        alone(model, x).backward()
        with pytest.raises(torchgradx.CoverageError, match="outside of the model's own"):
            probe.norms()


@every_mode
@parts
def test_paused_it_is_no_part_of_the_record(part, options):
    model, x = made(part, options)
    want = loop_model(model, square, x)
    with torchgradx.attach(model, **options) as probe:
        square(model, x).backward()
        with probe.paused():
            loss = alone(model, x)
        loss.backward()
        close(probe.norms(), want)


@every_mode
def test_without_a_backward_it_leaves_nothing(options):
    model, x = made("linear", options)
    want = loop_model(model, square, x)
    with torchgradx.attach(model, **options) as probe:
        loss = alone(model, x)
        torch.autograd.grad(alone(model, x.clone().requires_grad_()), model.body[0].weight)
        with torch.no_grad():
            alone(model, x)
        torch.func.grad(lambda w: torch.func.functional_call(
            model.body, {"0.weight": w}, x).sum())(model.body[0].weight.detach())  # fmt: skip
        square(model, x).backward()
        del loss
        close(probe.norms(), want)


@pytest.mark.parametrize("options", [{}, NATIVE[0]], ids=str)
def test_one_that_failed_is_forgotten(options):
    model, x = made("linear", options)
    want = loop_model(model, square, x)

    def fail(g):
        raise RuntimeError("on its way")

    with torchgradx.attach(model, **options) as probe:
        square(model, x).backward()
        y = x.clone().requires_grad_()
        y.register_hook(fail)
        with pytest.raises(RuntimeError, match="on its way"):
            alone(model, y).backward()
        close(probe.norms(), want)
