"""Recurrent modules under test, by kind and option, and models around them."""

from functools import cache

import pytest
import torch
from attach_oracle import ANY, NATIVE, Model, each_of
from torch import nn

from torchgradx import ops

N, T, I, H = 4, 5, 3, 6
served = pytest.mark.skipif(not ops.NATIVE, reason="a replay refuses it")
native_mode = each_of([*ANY, NATIVE[0]])
served_mode = each_of([{}, {"weight_grad": False}])
dtypes = pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)

KINDS = {
    "lstm": nn.LSTM,
    "gru": nn.GRU,
    "rnn": nn.RNN,
    "rnn relu": lambda *args, **more: nn.RNN(*args, nonlinearity="relu", **more),
}
CELLS = {
    "lstm": nn.LSTMCell,
    "gru": nn.GRUCell,
    "rnn": nn.RNNCell,
    "rnn relu": lambda *args: nn.RNNCell(*args, nonlinearity="relu"),
}
OPTIONS = {
    "plain": {},
    "batch first": {"batch_first": True},
    "no biases": {"bias": False, "batch_first": True},
    "two layers": {"num_layers": 2},
    "both ways": {"bidirectional": True, "batch_first": True},
    "both ways, three layers": {"bidirectional": True, "num_layers": 3},
    "dropout in eval": {"num_layers": 2, "dropout": 0.5},
    "projected": {"proj_size": 2},
    "projected both ways, two layers": {"proj_size": 2, "bidirectional": True, "num_layers": 2},
}
every_kind = pytest.mark.parametrize("kind", KINDS)
every_option = pytest.mark.parametrize("option", OPTIONS)


def states_of(out):
    """Output and all last states of a recurrent module, as rows of samples [N, *]."""
    y, last = out
    last = last if isinstance(last, tuple) else (last,)
    return y, torch.cat([s.transpose(0, 1).flatten(1) for s in last], 1)


def net(rnn, use="all"):
    """A model [N, T, I] -> [N, *] that reads the states at every step, the last ones, or both."""

    def forward(m, x, h=None, c=None):
        first = m.r.batch_first
        x = torch.tanh(m.i(x))
        h = h if h is None else h.transpose(0, 1).contiguous()
        c = c if c is None else c.transpose(0, 1).contiguous()
        hx = h if c is None else (h, c)
        y, last = states_of(m.r(x if first else x.transpose(0, 1), hx))
        y = (y if first else y.transpose(0, 1)).flatten(1)
        return {"all": torch.cat([y, 2 * last], 1), "steps": y, "last": last}[use]

    return Model(forward, i=nn.Linear(I, I), r=rnn)


def made(kind, option):
    if "proj_size" in OPTIONS[option] and kind != "lstm":
        pytest.skip("only an LSTM projects")
    return KINDS[kind](I, H, **OPTIONS[option]).train(option != "dropout in eval")


@cache
def computes_halves() -> bool:
    """Return False where the framework's own LSTM cannot run in bfloat16 (oneDNN below AVX-512)."""
    try:
        with torch.autocast("cpu", torch.bfloat16):
            nn.LSTM(3, 4)(torch.randn(5, 2, 3))
    except RuntimeError:
        return False
    return True


# One sweep takes whole vectors, and more steps than a Gram matrix does.
STEPS, WIDE, STATES = 20, 48, 80


def tied():
    """Two modules with one W_hh: its norm has cross terms, and the first's W_ih has none."""
    model = nn.ModuleList(nn.LSTM(WIDE, STATES, batch_first=True) for _ in range(2))
    model[1].weight_hh_l0 = model[0].weight_hh_l0
    return Model(lambda m, x: m.r[0](x)[0] + m.r[1](x)[0], r=model)


def of(forward=lambda m, x: m.r(x)[0], **options):
    return lambda: Model(forward, r=nn.LSTM(WIDE, STATES, batch_first=True, **options))


def with_frozen(*names):
    def make():
        model = of()()
        for name in names:
            model.r.get_parameter(name).requires_grad_(False)
        return model

    return make


def from_a_state(m, x):
    state = torch.linspace(-2, 2, STATES).to(x).expand(1, len(x), STATES).contiguous()
    return m.r(x, (state, state))[0]


WAYS = {
    "forwards": of(),
    "both ways": of(bidirectional=True),
    "the first bias frozen": with_frozen("bias_ih_l0"),
    "the first weight frozen": with_frozen("weight_ih_l0"),
    "from a state": of(from_a_state),
    "called twice": of(lambda m, x: m.r(x)[0] + m.r(x.flip(1))[0]),
    "weights tied": tied,
}
every_way = pytest.mark.parametrize("make", WAYS.values(), ids=WAYS)
