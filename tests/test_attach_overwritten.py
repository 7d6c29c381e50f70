"""Outputs of modules that are changed in place. Where one is a view, that puts another node of the
graph in its node's place, and what was listened at never comes."""

import pytest
import torch
from attach_oracle import ANY, Model, check, close_named, exact_or, loop, seeded, square, title  # noqa: F401
from torch import nn

import torchgradx

N, T, D = 4, 5, 6
every_option = pytest.mark.parametrize("options", [*ANY, {"backend": "vmap"}], ids=title)


class Views(nn.Module):
    """Two outputs, the first of which lies otherwise than it was made."""

    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(torch.randn(D, D))

    def forward(self, x):
        h = torch.tanh(x @ self.w)
        return h.transpose(1, 2).contiguous().transpose(1, 2), h.sum(1)


class Alone(Views):
    def forward(self, x):
        return super().forward(x)[0]


class Halves(Views):
    def forward(self, x):
        return torch.tanh(x @ self.w).chunk(2, -1)


class Attends(nn.MultiheadAttention):
    """Of its own kind, or torch's as it stands: the first of both is a view."""

    def forward(self, x):
        return super().forward(x, x, x)


def attention():
    return Model(lambda m, x: m.a(x, x, x), a=nn.MultiheadAttention(D, 2, batch_first=True))


STOCK = {
    "an LSTM": lambda: nn.LSTM(D, D, batch_first=True),
    "an LSTM both ways": lambda: nn.LSTM(D, D // 2, batch_first=True, bidirectional=True),
    "a GRU": lambda: nn.GRU(D, D, batch_first=True),
    "attention": attention,
    "a Linear": lambda: nn.Linear(D, D),
}
OWN = {"views": Views, "one view": Alone, "attention": lambda: Attends(D, 2, batch_first=True)}
CHANGES = {
    "all": torch.relu_,
    "a column": lambda y: y[..., 0].zero_(),
    "by its transpose": lambda y: y.transpose(-1, -2).mul_(3.0),
    "rows": lambda y: y.__setitem__((slice(None), 0), 0.5),
}
THEN = {"nothing": lambda m, y: y, "a layer": lambda m, y: m.l(y)}
every_change = pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
every_end = pytest.mark.parametrize("then", THEN.values(), ids=THEN)


def around(module, change, then):
    """[N, T, D] -> [N, T, D or 3]"""

    def forward(m, x):
        out = m.r(torch.tanh(m.i(x)))
        y = out[0] if isinstance(out, tuple) else out
        change(y)
        return then(m, y)

    end = {"l": nn.Linear(D, 3)} if then is THEN["a layer"] else {}
    return Model(forward, i=nn.Linear(D, D), r=module, **end).double()


@every_option
@every_end
@every_change
@pytest.mark.parametrize("make", STOCK.values(), ids=STOCK)
def test_outputs_of_torch_s_modules(make, change, then, options):
    check(around(make(), change, then), square, torch.randn(N, T, D), **options)


@every_option
@every_end
@every_change
@pytest.mark.parametrize("make", OWN.values(), ids=OWN)
def test_outputs_of_a_user_s_modules_are_not_missed(make, change, then, options):
    """Also where its gradient comes before any other, and in later steps."""
    model, x = around(make(), change, then), torch.randn(N, T, D, dtype=torch.float64)
    want = loop(model, square, x)
    missed = {name for name, norms in want.items() if name.startswith("r.") and norms.any()}
    with torchgradx.attach(model, **options) as probe:
        for _ in range(3):
            square(model, x).backward()
            try:
                close_named(probe.norms(per="parameter"), want)
                refused = missed
            except torchgradx.CoverageError as error:
                refused = set(error.parameters)
            assert missed <= refused
            model.zero_grad()


@every_option
def test_a_loss_that_begins_to_change_them(options):
    """After steps in which it did not: the forward is the same."""
    model = Model(lambda m, x: m.r(torch.tanh(m.i(x))), i=nn.Linear(D, D), r=Views()).double()

    def loss(model, x):
        y, _ = model(x)
        return (y.mul_(2.0) if changes else y).flatten(1).square().sum(1).mean()

    x = torch.randn(N, T, D, dtype=torch.float64)
    with torchgradx.attach(model, **options) as probe:
        for changes in (False, False, True, False):  # noqa: B007 of the loss
            loss(model, x).backward()
            exact_or(torchgradx.CoverageError, "r.w", probe, loop(model, loss, x))
            model.zero_grad()


@every_option
def test_halves_cannot_be_changed_in_place_with_a_probe_or_without(options):
    model, x = around(Halves(), torch.relu_, THEN["nothing"]), torch.randn(N, T, D).double()
    with torchgradx.attach(model, **options), pytest.raises(RuntimeError, match="inplace"):
        square(model, x)
