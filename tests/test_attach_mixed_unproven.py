"""Samples mixed, or put elsewhere, where no backward can be asked: by products, windows, norms and
sums along the dimension that they were moved to. What loses them is refused, never presumed."""

import pytest
import torch
from attach_oracle import (
    Model,
    Same,
    check,
    square,
)
from torch import nn

N, T, D = 4, 5, 6


APART = {  # samples first, in modules that torch takes apart where nobody sees it
    "lstm": (lambda: nn.LSTM(3, D, batch_first=True), lambda m, x: m.l(x)[0]),
    "gru": (lambda: nn.GRU(3, D, batch_first=True), lambda m, x: m.l(x)[0]),
    "instance norm": (lambda: nn.InstanceNorm1d(T, affine=True), lambda m, x: m.l(x)),
    "instance norm of nothing": (lambda: nn.InstanceNorm1d(T), lambda m, x: m.l(m.c(x))),
    "prelu": (lambda: nn.PReLU(T), lambda m, x: m.l(x)),
    "one prelu": (nn.PReLU, lambda m, x: m.l(m.c(x))),
    "bilinear": (lambda: nn.Bilinear(3, 3, D), lambda m, x: m.l(x, x.tanh())),
}


@pytest.mark.parametrize("options", [{}, {"fused": False}, {"backend": "vmap"}], ids=str)
@pytest.mark.parametrize("alone", [False, True], ids=["a Function", "its loss"])
@pytest.mark.parametrize("name", APART)
def test_modules_that_leave_samples_apart_are_exact(name, alone, options):
    make, use = APART[name]

    def forward(m, x):
        out = m.o(use(m, x).flatten(1))
        return out.square().sum(1).mean() if alone else Same.apply(out)

    size = T * D if name in ("lstm", "gru", "bilinear") else T * 3
    net = Model(forward, l=make(), c=nn.Linear(3, 3), o=nn.Linear(size, 2))
    check(net, (lambda m, x: m(x)) if alone else square, torch.randn(N, T, 3), **options)
