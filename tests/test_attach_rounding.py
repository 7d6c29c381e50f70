"""Rows of a proof that rounding alone moved: no sample was mixed into them."""

import pytest
import torch
from attach_oracle import (
    Model,
    a_few_modes,
    both_dtypes,
    close_named,
    exact_or_refused,
    loop,
    seeded,  # noqa: F401
    square,
)
from torch import nn

import torchgradx

N, T = 4, 5


def disturbed(size):
    """Positions but the first get a gradient of nothing but `size` times that of the largest, and
    another one each time: as of terms that cancel, in a product whose order of summing varies."""

    def noise(g):
        return g + size * g.abs().max() * torch.randn_like(g)

    def forward(m, x):
        hidden = torch.tanh(m.a(x))
        hidden.register_hook(noise)
        return m.b(hidden)[:, 0]

    return Model(forward, a=nn.Linear(3, 4), b=nn.Linear(4, 2))


@a_few_modes
@both_dtypes
def test_rows_that_are_the_rounding_of_others_are_no_sign_of_mixing(dtype, options):
    model, x = disturbed(torch.finfo(dtype).eps), torch.randn(N, T, 3)
    want = loop(model, square, x)
    model, x = model.to(dtype), x.to(dtype)
    with torchgradx.attach(model, **options) as probe:
        square(model, x).backward()
        close_named(probe.norms(per="parameter"), want, 1e3 * torch.finfo(dtype).eps)


def test_rows_that_are_more_than_rounding_still_are():
    model = disturbed(1e-3)
    assert exact_or_refused(model, square, torch.randn(N, T, 3)) is not None


def small(mixing):
    """Weights of 2^-10: gradients of some 2^-20, of which float16 keeps four bits."""

    def forward(m, x):
        hidden = torch.tanh(m.a(x))
        hidden = hidden - hidden.mean(0) if mixing else hidden
        return m.c(torch.tanh(m.b(hidden)))

    model = Model(forward, a=nn.Linear(16, 16), b=nn.Linear(16, 16), c=nn.Linear(16, 4))
    with torch.no_grad():
        for p in (model.b.weight, model.c.weight):
            p.mul_(2.0**-8)
    return model.half()


@a_few_modes
def test_gradients_too_small_for_float16_are_proven_with_larger_ones(options):
    """And scaled up again, their squares are too large for it."""
    model, x = small(False), torch.randn(N, 16).half()

    def loss(model, x):  # scaled, as it would be in training
        return 2.0**14 * square(model, x)

    want = loop(model, loss, x)
    with torchgradx.attach(model, **options) as probe:
        loss(model, x).backward()
        close_named(probe.norms(per="parameter"), want, 32 * torch.finfo(torch.float16).eps)


def test_among_larger_ones_samples_that_mix_are_found():
    model, x = small(True), torch.randn(N, 16).half()
    with torchgradx.attach(model) as probe:
        square(model, x).backward()
        with pytest.raises(torchgradx.CoverageError, match=r"a\.weight: .*mix the 4 samples"):
            probe.norms()
