"""A model with something between its layers, and before them; and what may be there."""

import torch
from attach_oracle import square
from torch import nn

import torchgradx


class Between(nn.Module):
    """Something between two layers, and before them."""

    def __init__(self, between=lambda h: h, before=lambda x: x):
        super().__init__()
        self.a, self.b = nn.Linear(4, 5), nn.Linear(5, 3)
        self.between, self.before = between, before

    def forward(self, x):
        return self.b(self.between(torch.relu(self.a(self.before(x)))))


def beside(model):
    """The same weights, and nothing between."""
    twin = Between().double()
    twin.load_state_dict(model.state_dict())
    return twin


def as_a_number(x):
    return x * float(x.abs().mean())


def sent_to_experts(h):
    out, to = torch.zeros_like(h), h.argmax(1)
    for expert in range(5):
        rows = (to == expert).nonzero().flatten()
        out = out.index_add(0, rows, h[rows] * (expert + 1.0))
    return out


def averaged_for_a_log(h):
    assert float(h.detach().abs().mean()) >= 0
    return h


def runs_alike(make, options, n):
    """Whether a model's losses are the same numbers, attached or not: step by step, of two N."""
    xs = torch.randn(4, n, 4).double()
    runs = []
    for attached in (False, True):
        torch.manual_seed(0)
        model = make()
        probe = torchgradx.attach(model, **options) if attached else None
        # What runs again in backward does so in any case.
        losses = [square(model, x[: n - k % 2]) for k, x in enumerate(xs)]
        runs.append(torch.stack(losses).detach())
        if probe:
            probe.remove()
    return torch.equal(*runs)
