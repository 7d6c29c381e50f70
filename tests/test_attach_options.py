"""Names, arguments, forced algorithms, and what explain() says."""

import re
from fractions import Fraction

import numpy as np
import pytest
import torch
from attach_oracle import (
    Model,
    check,
    close,
    close_named,
    loop,
    loop_model,
    mlp,
    native_missing,
    need_native,
    square,
)
from torch import nn
from torch.utils.checkpoint import checkpoint

import torchgradx

N = 4


@pytest.fixture
def model():
    return mlp().double()


def samples(n=N):
    return torch.randn(n, 3, dtype=torch.float64)


def test_names_are_those_of_the_model_and_the_roots_own_parameters_belong_to_no_name():
    layer = nn.Linear(3, 2)
    with torchgradx.attach(layer) as probe:
        square(layer, torch.randn(N, 3)).backward()
        assert set(probe.norms(per="parameter")) == {"weight", "bias"}
        assert set(probe.norms(per="module")) == {""}


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("batch_size", 0),
        ("batch_size", 2.0),
        ("layout", "batch"),
        ("layout", {"": "samples"}),
        ("layout", {1: "batch"}),
        ("layout", {"no_such_module": "batch"}),
        ("layout", {"body.*": "batch"}),
        ("directions", torch.ones(2)),
        ("loss_scale", 0.0),
        ("loss_scale", float("nan")),
        ("loss_scale", float("inf")),
        ("loss_scale", torch.ones(2, 2)),
        ("loss_scale", "1"),
    ],
)
def test_a_value_that_means_nothing_is_refused_and_the_model_left_alone(model, name, value):
    with pytest.raises((ValueError, TypeError), match=name) as error:
        torchgradx.attach(model, **{name: value})
    assert "got" in str(error.value) or "it has" in str(error.value)
    torchgradx.attach(model).remove()


def test_a_number_of_samples_or_a_scale_that_is_none_is_refused_by_name(model):
    size = {"batch_size": lambda args, kwargs: "4"}
    with torchgradx.attach(model, **size), pytest.raises(TypeError, match="batch_size"):
        model(samples())
    with torchgradx.attach(model) as probe:
        want = loop(model, square, x := samples())
        square(model, x).backward()
        for scale in ("1", True, 0, 0.0, float("nan"), torch.ones(2, 2)):
            with pytest.raises((TypeError, ValueError), match="loss_scale"):
                probe.norms(loss_scale=scale)
        close_named(probe.norms(per="parameter"), want)


@pytest.mark.parametrize("size", ["4", 4.0, True, 0, -4])
def test_a_callable_that_gives_no_number_of_samples_is_refused_by_name(model, size):
    with (
        torchgradx.attach(model, batch_size=lambda args, kwargs: size),
        pytest.raises((TypeError, ValueError), match=r"batch_size.* got"),
    ):
        model(samples())


def test_a_callable_may_say_that_a_batch_is_empty(model):
    with torchgradx.attach(model, batch_size=lambda args, kwargs: len(args[0])) as probe:
        model(samples(0)).square().sum().backward()
        assert probe.norms().shape == (0,)


@pytest.mark.parametrize("scale", [np.float32(3), np.int64(3), Fraction(3), 3])
def test_a_number_is_a_scale_whatever_its_type(model, scale):
    want = loop(model, square, x := samples())
    for options, read in (({"loss_scale": scale}, {}), ({}, {"loss_scale": scale})):
        with torchgradx.attach(model, **options) as probe:
            (3 * square(model, x)).backward()
            close_named(probe.norms(per="parameter", **read), want)


@pytest.mark.parametrize("backend", ["auto", "vmap"])
@pytest.mark.parametrize("reentrant", [False, True])
def test_samples_that_are_not_found_are_said_to_be_so_and_what_to_do(model, reentrant, backend):
    """Of a checkpoint where there is one."""
    outer = Model(lambda m, x: checkpoint(m.b, x, use_reentrant=reentrant), b=model)
    with torchgradx.attach(outer, batch_size=3, backend=backend) as probe:
        outer(samples().requires_grad_()).square().sum().backward()
        with pytest.raises(torchgradx.CoverageError) as error:
            probe.norms()
    for word in ("3 samples", "batch_size=", "batch_dim=", "layout="):
        assert word in str(error.value)
    assert ("use_reentrant=False" in str(error.value)) == reentrant


@pytest.mark.parametrize("backend", ["auto", "vmap"])
def test_complex_parameters_are_refused_and_real_ones_in_their_place_are_exact(backend):
    def forward(m, x):
        return (x * torch.view_as_complex(m.w)).abs()

    model = Model(forward, w=torch.randn(3, 2))
    check(model, square, torch.randn(N, 3), backend=backend)
    model = Model(lambda m, x: (x * m.w).abs(), w=torch.randn(3, dtype=torch.complex128))
    with torchgradx.attach(model, backend=backend) as probe:
        square(model, samples()).backward()
        with pytest.raises(torchgradx.CoverageError, match="view_as_complex"):
            probe.norms()


def test_an_argument_that_means_nothing_is_refused_by_its_name(model):
    for name in ("loss_reduction", "backend", "algorithm"):
        with pytest.raises((ValueError, TypeError), match=name):
            torchgradx.attach(model, **{name: "surely not"})
    with torchgradx.attach(model) as probe:
        square(model, samples()).backward()
        with pytest.raises(ValueError, match="per"):
            probe.norms(per="layer")


@pytest.mark.parametrize("algorithm", ["gram", "direct"])
@pytest.mark.parametrize("fused", [True, False])
def test_a_forced_algorithm_is_used_and_gives_the_same_norms(algorithm, fused):
    net, x = mlp().double(), torch.randn(N, 6, 3, dtype=torch.float64)
    with torchgradx.attach(net, algorithm=algorithm, fused=fused) as probe:
        square(net, x).backward()
        close_named(probe.norms(per="parameter"), loop(net, square, x))
        if not native_missing():  # vmap has no algorithms to choose from
            chosen = "fused" if fused and algorithm == "direct" else algorithm  # both at once
            assert f": {chosen}, " in probe.explain()


def test_a_forced_algorithm_that_refuses_says_why(model):
    need_native({"backend": "native"})

    def step(x):
        with torchgradx.attach(model, algorithm="rank1") as probe:
            square(model, x).backward()
            return probe.norms()

    with pytest.raises((ValueError, RuntimeError), match="rank1"):
        step(torch.randn(N, 6, 3, dtype=torch.float64))
    x = samples()
    close(step(x), loop_model(model, square, x))  # one position: there it is right


def test_explain_names_each_layer_and_the_path_it_takes():
    net = nn.Sequential(nn.Linear(3, 5), nn.LayerNorm(5), nn.Linear(5, 2))
    with torchgradx.attach(net) as probe:
        square(net, torch.randn(N, 6, 3)).backward()
        lines = str(probe.explain()).splitlines()
    starts = [i for i, text in enumerate(lines) if text.split(":")[0].strip() in ("0", "1", "2")]
    assert len(starts) == 3, lines
    paths = ("rank1", "gram", "direct", "fused", "vmap", "replay")
    for start, end in zip(starts, [*starts[1:], len(lines)], strict=True):
        text = " ".join(lines[start:end])
        assert any(word in text for word in paths), text


class Power(nn.Module):
    def __init__(self):
        super().__init__()
        self.exponent = nn.Parameter(torch.rand(5))

    def forward(self, x):
        return x.abs().pow(self.exponent)


def test_explain_begins_with_a_summary_and_has_a_line_for_each_layer():
    net = nn.Sequential(nn.Linear(3, 5), Power(), nn.LayerNorm(5), nn.Linear(5, 2))
    net[0].requires_grad_(False)
    with torchgradx.attach(net) as probe:
        square(net, torch.randn(N, 6, 3)).backward()
        summary, *lines = probe.explain().splitlines()
        verbose = probe.explain(verbose=True).splitlines()
    assert summary.startswith("4 layers: ")
    assert "1 frozen" in summary
    assert "1 Power" in summary
    assert len(lines) == 4
    assert verbose[0] == summary
    assert len(verbose) > 5


def test_explain_shows_the_latest_plans_and_nothing_grows_with_lengths_that_never_repeat():
    need_native({"backend": "native"})
    with torchgradx.attach(net := nn.Linear(3, 2)) as probe:
        for t in range(2, 10):
            square(net, torch.randn(N, t, 3)).backward()
        assert [int(t) for t in re.findall(r"T=(\d+)", probe.explain())] == [8, 9]


def test_names_follow_the_model_through_nested_modules_and_the_root():
    inner = nn.Sequential(nn.Linear(3, 3), nn.PReLU())
    net = nn.ModuleDict({"body": inner, "head": nn.Linear(3, 2)})

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.parts = net

        def forward(self, x):
            return self.parts["head"](self.parts["body"](x))

    net_of = Net().double()
    with torchgradx.attach(net_of) as probe:
        square(net_of, samples()).backward()
        assert list(probe.norms(per="parameter")) == [n for n, _ in net_of.named_parameters()]
        assert list(probe.norms(per="module")) == ["parts.body.0", "parts.body.1", "parts.head"]


class Shift(nn.Module):
    def __init__(self):
        super().__init__()
        self.by = nn.Parameter(torch.randn(4))

    def forward(self, x):
        return x + self.by


def test_native_without_an_extension_and_vmap_with_one_say_what_they_do():
    """backend="vmap" always serves; "native" serves or raises an error that names it."""
    net = nn.Sequential(nn.Linear(3, 4), Shift()).double()
    with torchgradx.attach(net, backend="vmap") as probe:
        square(net, samples()).backward()
        probe.norms()
        assert "vmap" in str(probe.explain())

    def native():  # a layer of one's own has no kernel, whatever is installed
        with torchgradx.attach(net, backend="native") as probe:
            square(net, samples()).backward()
            return probe.norms()

    with pytest.raises((RuntimeError, ValueError, NotImplementedError), match="native"):
        native()
