"""Recurrent modules under test, by kind and option, and models around them."""

from functools import cache

import pytest
import torch
from attach_models import Model
from torch import nn

N, T, I, H = 4, 5, 3, 6
KINDS = {"lstm": nn.LSTM, "gru": nn.GRU, "rnn": nn.RNN,
         "rnn relu": lambda *args, **more: nn.RNN(*args, nonlinearity="relu", **more)}  # fmt: skip
CELLS = {"lstm": nn.LSTMCell, "gru": nn.GRUCell, "rnn": nn.RNNCell,
         "rnn relu": lambda *args: nn.RNNCell(*args, nonlinearity="relu")}  # fmt: skip
OPTIONS = {
    "plain": {}, "batch first": {"batch_first": True},
    "no biases": {"bias": False, "batch_first": True}, "two layers": {"num_layers": 2},
    "both ways": {"bidirectional": True, "batch_first": True},
    "both ways, three layers": {"bidirectional": True, "num_layers": 3},
    "dropout in eval": {"num_layers": 2, "dropout": 0.5}, "projected": {"proj_size": 2},
    "projected both ways, two layers": {"proj_size": 2, "bidirectional": True, "num_layers": 2},
}  # fmt: skip
every_kind = pytest.mark.parametrize("kind", KINDS)
every_option = pytest.mark.parametrize("option", OPTIONS)


def states_of(out):
    """Output and all last states of a recurrent module, as rows of samples [N, *]."""
    y, last = out
    last = last if isinstance(last, tuple) else (last,)
    return y, torch.cat([s.transpose(0, 1).flatten(1) for s in last], 1)


def net(rnn):
    """A model [N, T, I] -> [N, *] that reads the states at every step and the last ones."""

    def forward(m, x, h=None, c=None):
        first = m.r.batch_first
        x = torch.tanh(m.i(x))
        h, c = (s if s is None else s.transpose(0, 1) for s in (h, c))  # as it lies: on a CPU
        h, c = (s.contiguous() if s is not None and s.is_cuda else s for s in (h, c))
        y, last = states_of(m.r(x if first else x.transpose(0, 1), h if c is None else (h, c)))
        y = (y if first else y.transpose(0, 1)).flatten(1)
        return torch.cat([y, 2 * last], 1)

    return Model(forward, i=nn.Linear(I, I), r=rnn)


def made(kind, option, hidden=H):
    if "proj_size" in OPTIONS[option] and kind != "lstm":
        pytest.skip("only an LSTM projects")
    return KINDS[kind](I, hidden, **OPTIONS[option]).train(option != "dropout in eval")


@cache
def computes_halves() -> bool:
    """Return False where the framework's own LSTM cannot run in bfloat16 (oneDNN below AVX-512)."""
    try:
        with torch.autocast("cpu", torch.bfloat16):
            nn.LSTM(3, 4)(torch.randn(5, 2, 3))
    except RuntimeError:
        return False
    return True
