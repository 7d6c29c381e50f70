"""What all samples share, under every kind of training step."""

import copy

import pytest
import torch
from attach_oracle import (
    a_few_modes,
    both_dtypes,
    check,
    close_named,
    loop,
    square,
)
from broadcast_models import D, N, Patches, T, against_all, constant, positional, relative, tokens
from torch import nn

import torchgradx

MODELS = {
    "positions": (positional, tokens),
    "relative": (lambda: relative(True), lambda: torch.randn(N, T, D)),
    "queries": (lambda: constant(against_all, l=nn.Linear(D, D)), lambda: torch.randn(N, T, D)),
    "patches": (Patches, lambda: torch.randn(N, T, 3)),
}
each_model = pytest.mark.parametrize("name", MODELS)


def example(name, dtype=torch.float64):
    make, data = MODELS[name]
    model, x = make(), data()
    if hasattr(model, "r"):
        del model.r
    return model.to(dtype), x.to(dtype) if x.is_floating_point() else x


@each_model
@both_dtypes
@a_few_modes
def test_in_either_precision(name, dtype, options):
    check(*(lambda model, x: (model, square, x))(*example(name)), dtype=dtype, **options)


@each_model
@a_few_modes
def test_under_autocast(name, options):
    """Norms are those of what the backward computed in bfloat16: near the exact ones."""
    model, x = example(name, torch.float32)
    want = loop(model, square, x)
    with torchgradx.attach(model, **options) as probe:
        for _ in range(2):
            with torch.autocast("cpu", torch.bfloat16):
                out = square(model, x)
            out.backward()
            norms = probe.norms(per="parameter")
    largest = max(float(v.max()) for v in want.values())
    for key, value in want.items():
        assert (norms[key].double() - value).abs().max() < 0.05 * largest, key


@each_model
@a_few_modes
def test_micro_batches_are_one_record(name, options):
    model, x = example(name)
    want = loop(model, square, x)
    with torchgradx.attach(model, **options) as probe:
        for part in (x[:2], x[2:]):
            square(model, part).backward()
        close_named(probe.norms(per="parameter"), want)


@each_model
@a_few_modes
def test_several_backwards_through_one_graph_add_up(name, options):
    model, x = example(name)
    with torchgradx.attach(model, **options) as probe:
        for batch in (x, x[:1], x[:1]):
            want = loop(model, lambda *batch: 3 * square(*batch), batch)
            model.zero_grad()
            loss = square(model, batch)
            loss.backward(retain_graph=True)
            (2 * loss).backward()
            close_named(probe.norms(per="parameter"), want)


@each_model
@a_few_modes
def test_forwards_of_the_same_samples_add_up(name, options):
    model, x = example(name)
    with torchgradx.attach(model, **options) as probe:
        for batch, at_once in ((x, True), (x, False), (x[:1], False), (x[:1], True)):
            want = loop(model, lambda m, b: square(m, b) + square(m, b.flip(1)), batch)
            model.zero_grad()
            with probe.same_samples():
                losses = square(model, batch), square(model, batch.flip(1))
            for loss in [sum(losses)] if at_once else losses:
                loss.backward()
            close_named(probe.norms(per="parameter"), want)


@each_model
@a_few_modes
def test_batches_of_other_sizes_follow(name, options):
    """Where a sample's value goes is seen once; where the samples stand is proven for each size."""
    model, x = example(name)
    with torchgradx.attach(model, **options) as probe:
        for batch in (x, torch.cat([x, x])[:7], x[:1], x[:, :3], torch.cat([x, x])[:T], x[:3], x):
            want = loop(model, square, batch)
            square(model, batch).backward()
            close_named(probe.norms(per="parameter"), want)
        model.eval()
        square(model, x).backward()
        close_named(probe.norms(per="parameter"), loop(model, square, x))


@each_model
@a_few_modes
def test_a_gradient_asked_for_beside_the_backward_is_not_counted(name, options):
    model, x = example(name)
    want = loop(model, square, x)
    with torchgradx.attach(model, **options) as probe:
        for _ in range(2):
            loss = square(model, x)
            torch.autograd.grad(loss, list(model.parameters()), retain_graph=True)
            loss.backward()
            close_named(probe.norms(per="parameter"), want)


@each_model
def test_create_graph_is_refused(name):
    model, x = example(name)
    with torchgradx.attach(model) as probe:
        square(model, x).backward(create_graph=True)
        with pytest.raises(torchgradx.CoverageError, match="create_graph"):
            probe.norms()
    model.zero_grad()


@each_model
@a_few_modes
def test_frozen_parts_count_nothing(name, options):
    for place in range(len(list(example(name)[0].parameters()))):
        model, x = example(name)
        list(model.parameters())[place].requires_grad_(False)
        check(model, square, x, **options)


def test_a_forward_that_meets_no_backward_leaves_nothing():
    model, x = example("relative")
    with torchgradx.attach(model) as probe:
        for _ in range(2):
            square(model, x)
            square(model, x).backward()
            close_named(probe.norms(per="parameter"), loop(model, square, x))


def test_the_first_forwards_watch_is_over_when_it_ends():
    from torch.utils._python_dispatch import _get_current_dispatch_mode

    def broken(m, x):
        if m.fails:
            raise KeyboardInterrupt if m.fails == "interrupt" else ValueError
        return m.o(m.i(x) + m.l(m.c))

    model = constant(broken, l=nn.Linear(D, D), i=nn.Linear(D, D))
    probe = torchgradx.attach(model)
    for model.fails in ("error", "interrupt", ""):
        with_error = pytest.raises((ValueError, KeyboardInterrupt))
        if model.fails:
            with with_error:
                model(torch.randn(N, T, D))
        else:
            square(model, torch.randn(N, T, D)).backward()
            probe.norms()
        if model.fails != "interrupt":  # which runs no hooks: the next forward ends it
            assert _get_current_dispatch_mode() is None
    model.fails = "interrupt"
    other = copy.deepcopy(model)
    probe.remove()
    probe = torchgradx.attach(other)
    with pytest.raises(KeyboardInterrupt):
        other(torch.randn(N, T, D))
    probe.remove()
    assert _get_current_dispatch_mode() is None
