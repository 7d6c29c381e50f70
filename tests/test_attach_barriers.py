"""Factors of nothing but zeros, as adapters and gates begin with: behind them no gradient shows
where samples are, until the first step of the optimizer lets one pass."""

import pytest
import torch
from attach_oracle import Model, close_named, every_mode, loop, need_native
from torch import nn

import torchgradx

N, T = 4, 6


def square(model, x):
    return model(x).square().sum() / len(x)


def within(factor, inner):
    """h + factor(inner(h)), from and to the rows of a model that has samples first."""
    return lambda m, x: (lambda h: h + factor(m, inner(m, h)))(m.i(x))


def rows_of_a_sequence(m, h):
    """Flattened to rows t*N+n, and back."""
    y = torch.tanh(m.a(h.transpose(0, 1).reshape(-1, 3)))
    return y.unflatten(0, (h.shape[1], h.shape[0])).transpose(0, 1)


def with_a_bias_alone():
    layer = nn.Linear(3, 3)
    layer.weight.requires_grad_(False)
    return layer


FACTORS = {
    "of an adapter": (lambda m, y: m.b(y), lambda: nn.Linear(3, 3, bias=False)),
    "of a convolution": (
        lambda m, y: m.b(y.transpose(1, 2)).transpose(1, 2),
        lambda: nn.Conv1d(3, 3, 1, bias=False),
    ),
    "of a norm": (lambda m, y: m.b(y), lambda: nn.RMSNorm(3)),
    "of a table": (
        lambda m, y: m.b(torch.zeros((), dtype=torch.long)) * y,
        lambda: nn.Embedding(1, 3),
    ),
    "of a bias": (lambda m, y: m.b(y.detach()) * y, with_a_bias_alone),
    "of some rows": (lambda m, y: m.b(y.detach())[..., 3:] * y, lambda: nn.Linear(3, 6)),
    "of some columns": (
        lambda m, y: m.b(torch.cat([torch.ones_like(y), y], -1)),
        lambda: nn.Linear(6, 3, bias=False),
    ),
    "for each feature": (lambda m, y: m.b * y, lambda: nn.Parameter(torch.zeros(3))),
    "one number": (lambda m, y: m.b * y, lambda: nn.Parameter(torch.zeros(()))),
}

WHOLE = [name for name in FACTORS if name not in ("of a bias", "of some rows", "of some columns")]


MIXING = {  # between layers alone, whose rows are seen by the way around the zeros; and above one
    "between": (lambda m, h: h.mean(0).expand_as(h), {}),
    "above": (lambda m, h: torch.tanh(m.a(h)).flip(0), {"a": nn.Linear(3, 3)}),
}


def zeroed(name, inner, layers):
    factor, make = FACTORS[name]
    model = Model(within(factor, inner), i=nn.Linear(3, 3), b=make(), **layers)
    with torch.no_grad():
        for p in model.b.parameters() if isinstance(model.b, nn.Module) else ():
            (p.T[-3:].T if name == "of some columns" else p[-3:] if p.dim() else p).zero_()
    return model.double()


def steps(model, probe, count=3):
    """What the loop says of each backward; after each the parameters change, as by an optimizer."""
    for _ in range(count):
        x = torch.randn(N, T, 3, dtype=torch.float64)
        want = loop(model, square, x)
        square(model, x).backward()
        yield want
        probe.reset()
        with torch.no_grad():
            for p in filter(lambda p: p.requires_grad, model.parameters()):
                p.add_(torch.randn_like(p), alpha=0.1)


@every_mode
@pytest.mark.parametrize("name", FACTORS)
def test_layers_behind_zeros_are_exact_before_and_after_the_first_step(name, options):
    need_native(options)
    model = zeroed(name, rows_of_a_sequence, {"a": nn.Linear(3, 3)})
    try:
        probe = torchgradx.attach(model, **options)
    except torchgradx.CoverageError:
        return  # backend="native", and a parameter that has no kernel
    with probe:
        for want in steps(model, probe):
            close_named(probe.norms(per="parameter"), want)


@every_mode
@pytest.mark.parametrize("name", WHOLE)
@pytest.mark.parametrize("mixing", MIXING)
def test_samples_that_are_mixed_behind_zeros_are_refused_once_it_shows(mixing, name, options):
    need_native(options)
    model = zeroed(name, *MIXING[mixing])
    try:
        probe = torchgradx.attach(model, **options)
    except torchgradx.CoverageError:
        return
    with probe:
        for k, _ in enumerate(steps(model, probe)):
            if k:
                with pytest.raises(torchgradx.CoverageError, match=r"i\.weight"):
                    probe.norms()


@every_mode
@pytest.mark.parametrize("layout", ["batch", "sequence"])
def test_rows_that_are_dropped_in_one_forward_and_not_in_the_next(layout, options):
    """Nothing follows samples there, so that no more than a proof can tell."""

    def forward(m, x):
        h = m.i(x)
        y = h if layout == "batch" else h.as_strided((T, len(x), 3), (3, 3 * T, 1))
        y = torch.tanh(m.a(y.reshape(-1, 3)).unflatten(0, y.shape[:2]))
        y = y.unfold(-1, 1, 1).squeeze(-1) if layout == "batch" else y.transpose(0, 1)
        return h + m.kept * y

    model = Model(forward, i=nn.Linear(3, 3), a=nn.Linear(3, 3)).double()
    model.register_buffer("kept", torch.zeros((), dtype=torch.float64))
    need_native(options)
    x = torch.randn(N, T, 3, dtype=torch.float64)
    with torchgradx.attach(model, **options) as probe:
        for kept in (0, 2, 0, 1):
            model.kept.fill_(kept)
            want = loop(model, square, x)
            square(model, x).backward()
            close_named(probe.norms(per="parameter"), want)
