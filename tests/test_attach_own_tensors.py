"""What an attached module gives is a view only where the framework's own is: a view may not be
detached in place, as hidden states are between the pieces of a sequence."""

import copy

import pytest
import torch
from attach_oracle import ANY, Model, close_named, loop, same_gradients, title
from torch import nn
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint

import torchgradx

N, T, D = 4, 5, 6
every_option = pytest.mark.parametrize("options", ANY, ids=title)
RECURRENT = {
    f"{kind.__name__} {name}": (kind, options, (T, N, D))
    for kind in (nn.LSTM, nn.GRU, nn.RNN)
    for name, options in {
        "plain": {},
        "batch first": {"batch_first": True},
        "both ways": {"bidirectional": True},
        "two layers": {"num_layers": 2},
    }.items()
}
MODULES = {
    **{k: (lambda c=c, o=o: c(D, D, **o), size) for k, (c, o, size) in RECURRENT.items()},
    "an LSTMCell": (lambda: nn.LSTMCell(D, D), (N, D)),
    "a GRUCell": (lambda: nn.GRUCell(D, D), (N, D)),
    "an RNNCell": (lambda: nn.RNNCell(D, D), (N, D)),
    "Conv1d": (lambda: nn.Conv1d(T, D, 3), (N, T, D)),
    "ConvTranspose1d": (lambda: nn.ConvTranspose1d(T, D, 3), (N, T, D)),
    "Linear": (lambda: nn.Linear(D, D), (N, T, D)),
    "LayerNorm": (lambda: nn.LayerNorm(D), (N, T, D)),
    "Conv2d": (lambda: nn.Conv2d(D, D, 3), (N, D, T, T)),
}


@every_option
@pytest.mark.parametrize("grad", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize(("make", "size"), MODULES.values(), ids=MODULES)
def test_no_output_is_a_view_where_the_plain_one_is_none(make, size, dtype, grad, options):
    model, x = Model(lambda m, x: m.r(x), r=make()).to(dtype), torch.randn(size, dtype=dtype)
    with torch.set_grad_enabled(grad):
        plain = tree_leaves(model(x))
        with torchgradx.attach(model, batch_dim=int(size[0] == T), **options):
            ours = tree_leaves(model(x))
    for got, want in zip(ours, plain, strict=True):
        assert got._base is None or want._base is not None


def pieces(model, x, detach):
    """The loss of a sequence in three pieces, the state being detached between them."""
    state, total = None, 0.0
    for piece in x.chunk(3, 1):
        y, state = model(piece, state)
        total = total + y.flatten(1).square().sum(1).mean()
        for t in state if isinstance(state, tuple) else (state,):
            detach(t)
    return total


@every_option
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
def test_states_that_are_detached_in_place(kind, dtype, options):
    model = Model(lambda m, x, s: m.r(x, s), r=kind(D, D, batch_first=True)).to(dtype)
    twin, x = copy.deepcopy(model), torch.randn(N, 3 * T, D, dtype=dtype)
    pieces(twin, x, torch.Tensor.detach_).backward()
    with torchgradx.attach(model, **options) as probe:
        for _ in range(2):
            model.zero_grad()
            with probe.same_samples():
                pieces(model, x, torch.Tensor.detach_).backward()
            rtol = 1e-9 if dtype == torch.float64 else 1e-4
            want = loop(model, lambda m, x: pieces(m, x, torch.Tensor.detach_), x)
            close_named(probe.norms(per="parameter"), want, rtol)
            if options.get("weight_grad", True):
                same_gradients(model, twin, rtol)


@every_option
@pytest.mark.parametrize("kind", [nn.GRU, nn.RNN])
def test_a_reentrant_checkpoint_s_output_is_changed_in_place(kind, options):
    model = Model(
        lambda m, x: checkpoint(lambda x: m.r(x)[0], m.i(x), use_reentrant=True).mul_(2.0),
        i=nn.Linear(D, D),
        r=kind(D, D, batch_first=True),
    ).double()
    x = torch.randn(N, T, D, dtype=torch.float64)

    def loss(model, x):
        return model(x).flatten(1).square().sum(1).mean()

    with torchgradx.attach(model, **options) as probe:
        loss(model, x).backward()
        close_named(probe.norms(per="parameter"), loop(model, loss, x))
