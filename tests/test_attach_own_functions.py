"""A torch.autograd.Function of the user's between a module's parameters and its output."""

import pytest
import torch
import torch.nn.functional as F
from attach_oracle import Model, check, every_mode, square
from torch import nn

N = 4


class Hadamard(torch.autograd.Function):
    """(a @ b) * scale, with a context, as adapters have it: vmap has no rule for it."""

    @staticmethod
    def forward(ctx, a, b, scale):
        ctx.save_for_backward(a, b, scale)
        return a @ b * scale

    @staticmethod
    def backward(ctx, grad):
        a, b, scale = ctx.saved_tensors
        return grad * scale @ b.T, a.T @ (grad * scale), None


def adapted(m, x):
    return m.base(x) + F.linear(x, Hadamard.apply(m.a, m.b, torch.tensor(0.5, dtype=x.dtype)))


@every_mode
@pytest.mark.parametrize("positions", [(), (5,)], ids=["rows", "sequences"])
@pytest.mark.parametrize("frozen", [False, True])
def test_a_weight_that_it_makes_of_two_is_exact(frozen, positions, options):
    if options.get("backend") == "native":
        pytest.skip("its parameters have no kernel")
    own = Model(adapted, a=torch.randn(3, 2), b=torch.randn(2, 3), base=nn.Linear(3, 3))
    own.base.requires_grad_(not frozen)
    net = nn.Sequential(nn.Linear(3, 3), own, nn.Linear(3, 2))
    check(net, square, torch.randn(N, *positions, 3), **options)
