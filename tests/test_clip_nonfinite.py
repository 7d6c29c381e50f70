"""Clipping of batches in which a gradient is not finite: its sample is dropped, or spoils .grad."""

import pytest
import torch
from attach_oracle import mlp, square
from clip_oracle import clipped, is_sum
from test_clip_deferred import BOUND, N, Scale, needs_kernels
from torch import nn

import torchgradx


class Image(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv, self.norm = nn.Conv2d(3, 4, 3, padding=1), nn.GroupNorm(2, 4)
        self.act, self.gain, self.head = nn.PReLU(4), Scale(4), nn.Linear(4, 2)

    def forward(self, x):  # [N, 3, 5, 5]
        x = self.act(self.norm(self.conv(x))).flatten(2).transpose(1, 2)
        return self.head(self.gain(x))


class Sequence(nn.Module):
    def __init__(self):
        super().__init__()
        self.into, self.norm = nn.Linear(3, 4), nn.LayerNorm(4)
        self.lstm, self.place = nn.LSTM(4, 4, batch_first=True), nn.Parameter(torch.rand(5, 4))

    def forward(self, x):  # [N, 5, 3]
        return self.lstm(self.norm(self.into(x)) + self.place)[0]


SPOILED = {
    "one position": (mlp, (N, 3)),
    "positions": (mlp, (N, 4, 3)),
    "images": (Image, (N, 3, 5, 5)),
    "sequences": (Sequence, (N, 5, 3)),
}
every_way = pytest.mark.parametrize(
    "options", [{}, {"weight_grad": False}, {"fused": False}], ids=str
)


def left_out(model, x, bad, bound):
    """The loop's clipped sum over the others, divided by N."""
    rest = clipped(model, x[[n for n in range(N) if n != bad]], bound=bound)
    return {name: g * (N - 1) / N for name, g in rest.items()}


@every_way
@pytest.mark.parametrize(  # an LSTM without a kernel is replayed: docs/limits.md
    "kind", [pytest.param(k, marks=needs_kernels) if k == "sequences" else k for k in SPOILED]
)
@pytest.mark.parametrize("number", ["nan", "inf"])
def test_a_sample_that_is_not_finite_is_dropped(kind, options, number):
    make, shape = SPOILED[kind]
    model, x = make().double(), torch.randn(shape, dtype=torch.float64)
    x[2] = float(number)
    finite = [n != 2 for n in range(N)]
    with torchgradx.attach(model, clip=True, **options) as probe:
        for bound in (BOUND, float("inf")):
            model.zero_grad()
            square(model, x).backward()
            norms = probe.clip_grad_norm_(bound, nonfinite="drop")
            assert norms.isfinite().tolist() == finite
            is_sum(model, left_out(model, x, 2, bound))
        model.zero_grad()
        square(model, x).backward()
        keep = lambda norms: torch.isfinite(norms).to(norms.dtype)  # noqa: E731
        probe.clip_grad_norm_(factors=keep)
        is_sum(model, left_out(model, x, 2, float("inf")))
        model.zero_grad()
        square(model, x).backward()
        probe.clip_grad_norm_(BOUND)  # "keep": it spoils .grad, as without a probe
        assert not any(p.grad.isfinite().all() for p in model.parameters())


@pytest.mark.parametrize("options", [{}, {"weight_grad": False}], ids=str)
def test_a_module_that_is_run_again_leaves_it_out_too(options):
    model = mlp().double()
    x = torch.randn(N, 3, dtype=torch.float64)
    x[2] = float("nan")
    with torchgradx.attach(model, clip=True, backend="vmap", **options) as probe:
        square(model, x).backward()
        probe.clip_grad_norm_(BOUND, nonfinite="drop")
    is_sum(model, left_out(model, x, 2, BOUND))
