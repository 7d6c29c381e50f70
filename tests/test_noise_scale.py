"""NoiseScale against closed forms, and against all gradients of single samples."""

import itertools
from functools import partial

import pytest
import torch
from attach_models import Model, mlp, square
from clip_oracle import gradients, group_of
from torch import nn

import torchgradx
from torchgradx import NoiseScale

POINTS = torch.tensor([[1.0, 0, 2], [-1, 3, 0], [2, 2, 2], [0, -1, 5]], dtype=torch.float64)
AT = torch.tensor([0.5, -0.5, 1.0], dtype=torch.float64)


def quadratic():
    """Of loss |w - x|^2 / 2, so that a sample's gradient is w - x, exactly."""
    return Model(lambda m, x: x - m.w, w=AT.clone())


def half_square(model, x):
    return model(x).square().sum(1).mean() / 2


def step(model, probe, noise, *batches, loss=half_square):
    model.zero_grad()
    for batch in batches:
        (loss(model, batch) / len(batches)).backward()
    noise.update(probe)


@pytest.mark.parametrize("sizes", [(3,), (1, 3), (2, 2), (4, 3, 1)])
def test_batches_accumulated_or_not_are_unbiased(sizes):
    """Weights 1 / (steps * size): the mean over all ways to draw the samples with replacement is
    what they are drawn from, exactly."""
    model, points, traces, signals = quadratic(), POINTS[:2, :2] * 3, [], []
    model.w.data = AT[:2].clone()
    with torchgradx.attach(model, loss_scale=1 / len(sizes)) as probe:
        for drawn in itertools.product(range(len(points)), repeat=sum(sizes)):
            noise = NoiseScale(decay=0.0)
            step(model, probe, noise, *points[list(drawn)].split(sizes))
            traces.append(noise.trace)
            signals.append(noise.sq_grad_norm)
    trace = points.var(0, correction=0).sum().item()
    assert sum(traces) / len(traces) == pytest.approx(trace, rel=1e-12)
    signal = (AT[:2] - points.mean(0)).square().sum().item()
    assert sum(signals) / len(signals) == pytest.approx(signal, rel=1e-12)


@pytest.mark.parametrize("per", ["model", "module", "parameter"])
@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_each_part_of_a_network_equals_a_loop(per, reduction):
    model, x = mlp().double(), torch.randn(6, 3, dtype=torch.float64)
    rows, parts = gradients(model, square, x), {}
    for name in rows[0]:
        each = torch.stack([row[name].flatten() for row in rows])
        parts.setdefault(group_of(name, per), []).append(each)
    traces = {k: torch.cat(v, 1).var(0).sum().item() for k, v in parts.items()}
    means = {k: torch.cat(v, 1).mean(0).square().sum().item() for k, v in parts.items()}
    noise = NoiseScale(per=per, decay=0.9)

    def loss(model, x):
        return square(model, x) * (len(x) if reduction == "sum" else 1)

    with torchgradx.attach(model, loss_reduction=reduction) as probe:
        step(model, probe, noise, x, loss=loss)
    held = (noise.trace, noise.sq_grad_norm, noise.noise_scale)
    if per == "model":
        held = tuple({"": value} for value in held)
    for key, trace in traces.items():
        signal = means[key] - trace / len(x)
        assert held[0][key] == pytest.approx(trace, rel=1e-9)
        assert held[1][key] == pytest.approx(signal, rel=1e-9, abs=1e-12)
        want = trace / signal if signal > 0 else float("inf")
        assert held[2][key] == pytest.approx(want, rel=1e-6)


def test_a_grad_scaler_changes_nothing():
    model, noise = quadratic(), NoiseScale(decay=0.0)
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0)
    with torchgradx.attach(model, loss_scale=scaler) as probe:
        scaler.scale(half_square(model, POINTS)).backward()
        noise.update(probe)
        scaler.unscale_(torch.optim.SGD(model.parameters()))
        with pytest.raises(RuntimeError, match="before scaler"):
            noise.update(probe)
    # .grad and norms are both 64 times too large by the same weights
    assert noise.trace == pytest.approx(POINTS.var(0).sum().item(), rel=1e-12)


def test_numerator_and_denominator_are_averaged_apart_and_corrected():
    model, noise, decay = quadratic(), NoiseScale(decay=0.75), 0.75
    batches = torch.randn(5, 4, 3, dtype=torch.float64) + 3
    with torchgradx.attach(model) as probe:
        for batch in batches:
            step(model, probe, noise, batch)
    weights = torch.tensor([decay ** (4 - k) for k in range(5)], dtype=torch.float64)
    traces = batches.var(1).sum(1)
    signals = (AT - batches.mean(1)).square().sum(1) - traces / 4
    trace, signal = (((weights * v).sum() / weights.sum()).item() for v in (traces, signals))
    assert noise.trace == pytest.approx(trace, rel=1e-12)
    assert noise.noise_scale == pytest.approx(trace / signal, rel=1e-12)
    assert noise.critical_batch_size == noise.noise_scale
    assert noise.efficiency(8) == pytest.approx(8 / (8 + trace / signal))
    assert noise.steps == 5


def test_a_state_goes_on_as_if_nothing_had_happened():
    model, one, two = quadratic(), NoiseScale(decay=0.5), NoiseScale()
    with torchgradx.attach(model) as probe:
        for k, batch in enumerate(torch.randn(4, 3, 3, dtype=torch.float64)):
            step(model, probe, one, batch)
            if k > 1:
                step(model, probe, two, batch)
            if k == 1:
                two.load_state_dict(one.state_dict())
    assert two.state_dict() == one.state_dict()
    assert two.noise_scale == one.noise_scale
    with pytest.raises(ValueError, match="per='model'"):
        NoiseScale(per="module").load_state_dict(one.state_dict())


@pytest.fixture
def watched():
    """A quadratic model, its probe, and the noise scale with its defaults."""
    model = quadratic()
    with torchgradx.attach(model) as probe:
        yield model, probe, NoiseScale()


def test_steps_that_say_nothing_are_skipped_and_counted(watched):
    noise = watched[-1]
    assert noise.noise_scale != noise.noise_scale, "NaN before the first step"
    step(*watched, POINTS[:1])
    step(*watched, POINTS * float("inf"))
    assert (noise.steps, noise.skipped) == (0, 2)
    step(*watched, POINTS)
    assert (noise.steps, noise.skipped) == (1, 2)


def test_a_grad_that_holds_more_than_the_record_is_refused(watched):
    model, probe, noise = watched
    step(*watched, POINTS)
    for _ in range(2):
        half_square(model, POINTS).backward()  # never zeroed
        with pytest.raises(RuntimeError, match="zero it at every step"):
            noise.update(probe)


@pytest.mark.parametrize("to_none", [True, False])
def test_a_grad_that_began_before_the_record_is_refused(to_none):
    """As of a micro-batch whose norms were read: too small to be seen by its size."""
    model, noise, few = quadratic(), NoiseScale(), POINTS[:2]
    with torchgradx.attach(model, loss_scale=1 / 2) as probe:
        for read in (False, True, False):
            model.zero_grad(set_to_none=to_none)
            (half_square(model, few) / 2).backward()
            if read:
                probe.norms()
            (half_square(model, POINTS[2:]) / 2).backward()
            if read:
                with pytest.raises(RuntimeError, match="before this record's first backward"):
                    noise.update(probe)
            else:
                noise.update(probe)
    assert noise.steps == 2


def test_what_a_frozen_parameter_still_has_in_its_grad_does_not_count():
    model, x = mlp().double(), torch.randn(6, 3, dtype=torch.float64)
    found = []
    for stale in (True, False):
        model.requires_grad_(True)
        model.zero_grad()
        square(model, x).backward()
        model[0].requires_grad_(False)
        if not stale:
            model[0].zero_grad()
        model[2].zero_grad()
        noise = NoiseScale()
        with torchgradx.attach(model) as probe:
            square(model, x).backward()
            noise.update(probe)
        found.append((noise.trace, noise.sq_grad_norm))
    assert found[0] == found[1]


def zero_between(model, to_none=True):
    model.zero_grad(set_to_none=to_none)
    half_square(model, POINTS[2:]).backward()


CHANGES = {
    "zeroed": zero_between,
    "zeroed in place": partial(zero_between, to_none=False),
    "clipped": lambda model: nn.utils.clip_grad_norm_(model.parameters(), 1e-3),
    "clipped by sample": lambda model: torchgradx.attached(model).clip_grad_norm_(0.1),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_a_grad_that_was_changed_is_refused_where_what_backwards_leave_is_marked(change):
    model, noise = quadratic(), NoiseScale()
    with torchgradx.attach(model, clip=True) as probe:
        half_square(model, POINTS[:2]).backward()
        change(model)
        with pytest.raises(RuntimeError, match=r"changed between or after|before clip_grad_norm_"):
            noise.update(probe)
        model.zero_grad()
        probe.reset()
        for part in (POINTS[:2], POINTS[2:]):
            (half_square(model, part) / 2).backward()
        noise.update(probe)
    assert noise.steps == 1


def test_without_grad_it_says_where_to_call_it():
    model = nn.Linear(3, 2)
    for options, zeroed in (({"weight_grad": False}, False), ({}, True)):
        with torchgradx.attach(model, **options) as probe:
            square(model, torch.randn(4, 3)).backward()
            if zeroed:
                model.zero_grad()
            with pytest.raises(RuntimeError, match=r"between backward\(\) and zero_grad"):
                NoiseScale().update(probe)


# ---- The default, and what it says ---------------------------------------------------------------
def test_the_warm_up_is_reported_and_what_it_means_is_said(watched):
    noise = watched[-1]
    assert str(noise) == "Noise scale: no step was counted yet."
    assert noise.spread == (0, float("inf"))
    for k, batch in enumerate(torch.randn(30, 8, 3, dtype=torch.float64) + 1):
        assert noise.warming_up, k
        step(*watched, batch)
        assert (f"warming up: {k + 1} of 30 steps" in str(noise)) == (k < 29)
    assert not noise.warming_up
    assert "warming" not in repr(noise)
    for words in (
        f"at this batch of 8 makes {noise.efficiency(8):.0%} of the progress",
        f"at 16 it would make {noise.efficiency(16):.0%}",
        "A smaller batch would learn as much", f"{noise.noise_scale:.0f} (",
    ):  # fmt: skip
        assert words in str(noise)


def test_where_no_gradient_is_seen_it_is_infinite_and_says_no_number(watched):
    model, _, noise = watched
    model.w.data = POINTS.mean(0)
    for _ in range(40):
        step(*watched, POINTS)
    assert noise.sq_grad_norm < 0
    assert noise.noise_scale == float("inf")
    assert noise.efficiency(100) == 0
    said = str(noise)
    assert ("No gradient is seen" in said, "inf" in said, "nan" in said) == (True, False, False)


def test_layers_are_told_of_by_name():
    model, noise = mlp().double(), NoiseScale(per="module")
    with torchgradx.attach(model) as probe:
        for _ in range(5):
            step(model, probe, noise, torch.randn(6, 3, dtype=torch.float64), loss=square)
        model[0].requires_grad_(False)
        with pytest.raises(ValueError, match="other parameters are trained than in the 5 steps"):
            step(model, probe, noise, torch.randn(6, 3, dtype=torch.float64), loss=square)
    assert set(noise.spread) == {"0", "2"}
    assert [line.partition(":")[0].strip() for line in str(noise).splitlines()[1:]] == ["0", "2"]


@pytest.mark.parametrize("beside", ["norm", "tensor", "model"])
def test_norms_and_the_batchs_gradient_do_as_a_probe_does(beside):
    model, one, two = quadratic(), NoiseScale(), NoiseScale()
    with torchgradx.attach(model) as probe:
        for batch in torch.randn(4, 6, 3, dtype=torch.float64):
            step(model, probe, one, batch)
            norm = model.w.grad.norm()
            grad = {"norm": norm.item(), "tensor": norm, "model": model}[beside]
            two.update(probe.norms(), grad)
    assert two.noise_scale == pytest.approx(one.noise_scale)
    assert two.batch_size == 6


def test_arguments_are_refused_by_name():
    by_module, noise, norms = NoiseScale(per="module"), NoiseScale(), torch.ones(3)
    for kind, words, call in (
        (ValueError, "per must be", lambda: NoiseScale(per="layer")),
        (ValueError, "decay must be", lambda: NoiseScale(decay=1.0)),
        (TypeError, "needs the norm of the batch's mean gradient", lambda: noise.update(norms)),
        (TypeError, "per='module' can be read", lambda: by_module.update(norms, 1.0)),
        (ValueError, r"norms must be \[N\]", lambda: noise.update(torch.ones(3, 2), 1.0)),
    ):
        with pytest.raises(kind, match=words):
            call()
    for given in (None, 3.0, "norms", {"": norms}, nn.Linear(2, 2)):
        updates = [noise.update, lambda g: torchgradx.ImportanceSampler(5).update([0, 1, 2], g)]
        updates += [torchgradx.OutlierWatch().update] if not isinstance(given, dict) else []
        for update in updates:
            with pytest.raises(TypeError, match="norms must be"):
                update(given)
