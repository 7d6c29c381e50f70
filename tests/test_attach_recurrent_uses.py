"""Recurrent modules in training: used more than once, in part, in place, clipped, checkpointed."""

import copy

import pytest
import torch
from attach_oracle import (
    Model,
    a_few_modes,
    check,
    close_named,
    exact_step,
    loop,
    same_gradients,
    square,
    tolerance,
)
from clip_oracle import check_clip
from recurrent_models import (
    CELLS,
    KINDS,
    H,
    I,
    N,
    T,
    computes_halves,
    every_kind,
    made,
    native_mode,
    net,
    served,
    served_mode,
)
from torch import nn
from torch.utils.checkpoint import checkpoint

import torchgradx
from torchgradx import ops


@served
@served_mode
@every_kind
def test_a_module_called_twice_counts_its_cross_terms(kind, options):
    rnn = KINDS[kind](I, I, batch_first=True)
    model = Model(lambda m, x: m.r(m.r(x)[0] + x)[0], r=rnn)
    check(model, square, torch.randn(N, T, I), **options)


@a_few_modes
@pytest.mark.parametrize("reentrant", [False, True])
@every_kind
def test_checkpointed(kind, reentrant, options):
    def forward(m, x):
        return checkpoint(lambda t: m.r(t)[0], torch.tanh(m.i(x)), use_reentrant=reentrant)

    for more in ({}, {"num_layers": 2, "bidirectional": True}):
        model = Model(forward, i=nn.Linear(I, I), r=KINDS[kind](I, H, batch_first=True, **more))
        check(model, square, torch.randn(N, T, I), input_grad=True, **options)


@native_mode
@every_kind
def test_two_backwards_through_one_graph_add_up(kind, options):
    model, x = net(made(kind, "both ways")).double(), torch.randn(N, T, I).double()
    want = {name: 3 * norms for name, norms in loop(model, square, x).items()}
    with torchgradx.attach(model, **options) as probe:
        loss = square(model, x)
        loss.backward(retain_graph=True)
        (2 * loss).backward()
        close_named(probe.norms(per="parameter"), want)


@pytest.mark.skipif(not ops.NATIVE, reason="replayed without the extension")
@pytest.mark.parametrize("kind", [*KINDS, *(f"{kind} cell" for kind in CELLS)])
def test_with_gradients_of_the_framework_a_module_runs_once_more_and_not_for_each_sample(kind):
    if kind in KINDS:
        layer, x = KINDS[kind](I, H, num_layers=2, batch_first=True), torch.randn(N, T, I)
    else:
        layer, x = CELLS[kind.removesuffix(" cell")](I, H), torch.randn(N, I)
    several = kind in KINDS or kind == "lstm cell"
    model = Model(lambda m, x: m.r(x)[0] if several else m.r(x), r=layer)
    with torchgradx.attach(model, fused=False) as probe:
        square(model, x).backward()
        probe.norms()
        text = probe.explain()
    assert "through time: the framework's gradients stay" in text
    assert "replay" not in text
    assert "vmap" not in text
    if kind == "lstm" and not computes_halves():
        return
    with torchgradx.attach(model, fused=False) as probe, torch.autocast("cpu", torch.bfloat16):
        square(model, x).backward()
        probe.norms()
        # our forward is of one dtype
        assert ("through time and" if kind == "lstm" else "lifted") in probe.explain()


# One sweep takes whole vectors, and more steps than a Gram matrix does.
STEPS, WIDE, STATES = 20, 48, 80


def tied():
    """Two modules with one W_hh: its norm has cross terms, and the first's W_ih has none."""
    model = nn.ModuleList(nn.LSTM(WIDE, STATES, batch_first=True) for _ in range(2))
    model[1].weight_hh_l0 = model[0].weight_hh_l0
    return Model(lambda m, x: m.r[0](x)[0] + m.r[1](x)[0], r=model)


def of(**options):
    rnn = nn.LSTM(WIDE, STATES, batch_first=True, **options)
    return lambda: Model(lambda m, x: m.r(x)[0], r=rnn)


def with_frozen(*names):
    def make():
        model = of()()
        for name in names:
            model.r.get_parameter(name).requires_grad_(False)
        return model

    return make


def from_a_state():
    rnn = nn.LSTM(WIDE, STATES, batch_first=True)
    state = torch.randn(1, 1, STATES)
    return Model(
        lambda m, x: m.r(x, (state.to(x).expand(1, len(x), STATES).contiguous(),) * 2)[0], r=rnn
    )


def called_twice():
    return Model(
        lambda m, x: m.r(x)[0] + m.r(x.flip(1))[0], r=nn.LSTM(WIDE, STATES, batch_first=True)
    )


WAYS = {
    "forwards": of(),
    "both ways": of(bidirectional=True),
    "the first bias frozen": with_frozen("bias_ih_l0"),
    "the first weight frozen": with_frozen("weight_ih_l0"),
    "from a state": from_a_state,
    "called twice": called_twice,
    "weights tied": tied,
}
every_way = pytest.mark.parametrize("make", WAYS.values(), ids=WAYS)


@native_mode
@every_way
def test_every_step_is_exact(make, options):
    model = make()
    twin = copy.deepcopy(model)
    with torchgradx.attach(model, **options) as probe:
        for samples, steps in [
            (N, STEPS),
            (N, STEPS),
            (N + 1, STEPS),
            (N, STEPS + 9),
            (N, STEPS),
            (N, 1),
            (N, 2),
        ]:
            x = torch.randn(samples, steps, WIDE)
            for m in (model, twin):
                m.zero_grad()
                square(m, x).backward()
            rtol = tolerance(model, torch.float32)
            close_named(probe.norms(per="parameter"), loop(model, square, x), rtol)
            if options.get("weight_grad", True):
                exactly = options.get("fused") is False
                same_gradients(model, twin, None if exactly else rtol)


@served
@every_way
def test_what_else_a_step_is_asked_for(make):
    check_clip(make(), square, torch.randn(N, STEPS, WIDE), dtype=torch.float32)


@served
@pytest.mark.parametrize(
    "write", [torch.relu_, lambda y: y.detach().zero_() + y], ids=["y", "alias"]
)
def test_what_a_loss_writes_over_the_states_is_noticed_as_without_a_probe(write):
    model = Model(lambda m, x: write(m.r(x)[0]), r=nn.LSTM(WIDE, STATES, batch_first=True))
    x = torch.randn(N, STEPS, WIDE)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        square(copy.deepcopy(model), x).backward()
    with torchgradx.attach(model) as probe:
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            square(model, x).backward()
        model.r.register_forward_hook(lambda m, args, out: (out[0].clone(), out[1]))
        exact_step(probe, model, x, rtol=tolerance(model, torch.float32))
