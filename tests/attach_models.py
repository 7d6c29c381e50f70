"""The device of a run, and models and losses that many files attach to."""

import os

import torch
from torch import nn

DEVICE = os.environ.get("TORCHGRADX_TEST_DEVICE", "cpu")  # of all tensors: see conftest.py


if DEVICE != "cpu":  # what is compared with: float32 in earnest, the same bits each time
    torch.backends.cudnn.deterministic = True
    torch.backends.cudnn.allow_tf32 = False


class Model(nn.Module):
    """Model(forward, name=module_or_tensor, ...): a module from a function of (model, *inputs)."""

    def __init__(self, function, **parts):
        super().__init__()
        self.function = function
        for name, part in parts.items():
            setattr(self, name, nn.Parameter(part) if isinstance(part, torch.Tensor) else part)

    def forward(self, *args, **kwargs):
        return self.function(self, *args, **kwargs)


def rms_norm(d, of=lambda weight: weight):
    """RMSNorm as users write it, which calls no kernel by name."""

    def forward(m, x):
        return of(m.weight) * (x * (x.square().mean(-1, keepdim=True) + 1e-6).rsqrt())

    return Model(forward, weight=torch.rand(d) + 0.5)


def mlp(width=5):
    return nn.Sequential(nn.Linear(3, width), nn.Tanh(), nn.Linear(width, 2))


def square(model, *batch):
    """Mean over samples of the sum of squares of the sample's output."""
    return model(*batch).square().flatten(1).sum(1).mean()


def square_second(model, *batch):
    """Like square, for an output [T, N, ...]."""
    return model(*batch).square().transpose(0, 1).flatten(1).sum(1).mean()


def penalised(model, *batch):
    """square, and a penalty on the first parameter, as weight decay written into the loss."""
    return square(model, *batch) + 0.1 * next(model.parameters()).square().sum()


def under_autocast(dtype=torch.bfloat16, loss=square):
    """The loss, in float32, of a forward in half precision."""

    def halved(model, *batch):
        def forward(*batch):
            with torch.autocast(DEVICE, dtype):
                return model(*batch).float()

        return loss(forward, *batch)

    return halved


def identity(backward):
    """A Function of the user's own: it gives what it is given, and `backward` its gradient."""

    class Identity(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, grad):
            return backward(grad)

    return Identity.apply
