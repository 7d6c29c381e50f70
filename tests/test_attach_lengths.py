"""Sequences of other lengths on one probe. At length 1 rows t*N+n and n*T+t are the same, and a
leading dimension of 1 may be the positions': what is proven there is proven of nothing longer."""

import contextlib
import copy

import pytest
import torch
from attach_oracle import (
    Model,
    a_few_modes,
    close,
    close_named,
    loop,
    loop_model,
    square,
)
from torch import nn
from torch.utils.checkpoint import checkpoint

import torchgradx

N, WIDTHS, LONGEST = 4, [4, 6], 8


def block(width):
    return nn.TransformerEncoderLayer(width, 2, 8, dropout=0.0)


# Of a model and h [T, N, D]
USES = {
    "scaled": lambda m, h: h * m.scale,
    "rows t*N+n, scaled": lambda m, h: (h.flatten(0, 1) * m.scale).view(h.shape),
    "multiplied": lambda m, h: h @ m.w,
    "adapted": lambda m, h: h + h @ m.w[:, :2] @ m.w[:2],
    "positions, added": lambda m, h: h + m.places[: len(h)],
    "a table's positions, added": lambda m, h: h + m.table(torch.arange(len(h)))[:, None],
    "a gate around a block": lambda m, h: h + m.scale * m.block(h),
    "a block below positions": lambda m, h: m.block(h + m.places[: len(h)]),
}
LENGTHS = {
    "short first": (1, 6, 1, 8),
    "long first": (6, 1, 6, 1),
    "as many as samples between": (8, 1, N, 1, 8),
}
FED = {"positions first": lambda m, x: m.i(x.transpose(0, 1)),
       "samples first": lambda m, x: m.i(x).transpose(0, 1)}  # fmt: skip


def model_of(use, fed, width):
    return Model(
        lambda m, x: m.o(USES[use](m, FED[fed](m, x)).transpose(0, 1)),
        i=nn.Linear(3, width),
        o=nn.Linear(width, 5),
        scale=torch.randn(width),
        w=torch.randn(width, width),
        places=torch.randn(LONGEST, 1, width),
        table=nn.Embedding(LONGEST, width),
        block=block(width),
    ).double()


@a_few_modes
@pytest.mark.parametrize("fed", FED)
@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("lengths", LENGTHS)
@pytest.mark.parametrize("use", USES)
def test_each_length_is_exact_whichever_came_before(use, lengths, width, fed, options):
    model = model_of(use, fed, width)
    with torchgradx.attach(model, **options) as probe:
        for length in LENGTHS[lengths]:
            x = torch.randn(N, length, 3, dtype=torch.float64)
            square(model, x).backward()
            want = loop(model, square, x)
            try:
                got = probe.norms(per="parameter")
            except torchgradx.CoverageError:
                assert length == N, f"refused at length {length}"
            else:
                close_named(got, want)


@a_few_modes
def test_each_plan_is_held_to_its_own_sizes(options):
    """Windows of every fourth position: at 1 the samples come in at the expansion, then later."""

    def forward(m, x):
        windows = m.p(torch.arange(1)).expand(x.shape[1] // 2, 3, len(x), -1)[::4]
        h = m.i(x)[:, : len(windows)].transpose(0, 1)
        return m.o((windows * h[:, None]).sum(1).transpose(0, 1))

    model = Model(forward, p=nn.Embedding(2, 3), i=nn.Linear(3, 3), o=nn.Linear(3, 2)).double()
    with torchgradx.attach(model, **options) as probe:
        for length in (2, 4, 4, 10, 2, 10):
            x = torch.randn(3, length, 3, dtype=torch.float64)
            square(model, x).backward()
            want = loop(model, square, x)
            with contextlib.suppress(torchgradx.CoverageError):
                close_named(probe.norms(per="parameter"), want)


@pytest.mark.parametrize("use", USES)
def test_nor_is_it_by_a_probe_before(use):
    """What is known of a model outlives a probe."""
    model = model_of(use, "positions first", 6)
    for length in (1, 6, 1, 8):
        x = torch.randn(N, length, 3, dtype=torch.float64)
        loss = lambda y, _: y.square().flatten(1).sum(1).mean()  # noqa: E731
        got = torchgradx.grad_norms(model, loss, x, None, per="parameter")
        close_named(got, loop(model, square, x))


@pytest.mark.parametrize("reentrant", [True, False], ids=["reentrant", "not"])
def test_lengths_that_never_repeat_do_not_add_up(reentrant, monkeypatch):
    """What is known of the oldest is forgotten, and looked at again should they come back."""
    monkeypatch.setattr("torchgradx.proof.audit.MANY", 4)

    def forward(m, x):
        x = x.clone().requires_grad_()
        return m.o(torch.tanh(checkpoint(m.l, x, use_reentrant=reentrant)))

    model = Model(forward, l=nn.Linear(4, 5), o=nn.Linear(5, 2)).double()
    twin = copy.deepcopy(model)
    with torchgradx.attach(model) as probe:
        for T in (*range(4, 12), 4, 5, 11):
            x = torch.randn(3, T, 4).double()
            square(model, x).backward()
            close(probe.norms(), loop_model(twin, square, x))
        assert len(probe._audit._proven) <= 5
