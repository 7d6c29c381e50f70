"""Recurrent modules used more than once, in part, in place, under checkpoints and by copies."""

import copy

import pytest
import torch
from attach_oracle import (
    Model,
    a_few_modes,
    both_dtypes,
    check,
    close_named,
    exact_or_refused,
    loop,
    need_native,
    refused,
    square,
)
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
    needs_half_lstm,
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


@native_mode
def test_weights_shared_between_layers_and_with_a_linear(options):
    rnn = nn.GRU(I, I, num_layers=2, batch_first=True)
    rnn.weight_hh_l1, rnn.bias_ih_l1 = rnn.weight_hh_l0, rnn.bias_ih_l0
    head = nn.Linear(I, 3 * I)
    head.weight = rnn.weight_ih_l0
    check(
        Model(lambda m, x: m.o(m.r(x)[0]), r=rnn, o=head), square, torch.randn(N, T, I), **options
    )


FROZEN = {
    "input weights": ["weight_ih_l0"],
    "state weights": ["weight_hh_l0"],
    "biases": ["bias_ih_l0", "bias_hh_l0"],
    "weights": ["weight_ih_l0", "weight_hh_l0"],
    "all but a bias": ["weight_ih_l0", "weight_hh_l0", "bias_ih_l0"],
}


@native_mode
@pytest.mark.parametrize("frozen", FROZEN)
@every_kind
def test_frozen_parameters_count_nothing(kind, frozen, options):
    model = net(made(kind, "plain"))
    for name in FROZEN[frozen]:
        getattr(model.r, name).requires_grad_(False)
    check(model, square, torch.randn(N, T, I), input_grad=True, **options)


@native_mode
def test_a_frozen_module_passes_its_inputs_gradient_on(options):
    model = net(nn.LSTM(I, H))
    model.r.requires_grad_(False)
    check(model, square, torch.randn(N, T, I), input_grad=True, **options)


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
    need_native(options)
    model, x = net(made(kind, "both ways")).double(), torch.randn(N, T, I).double()
    want = {name: 3 * norms for name, norms in loop(model, square, x).items()}
    with torchgradx.attach(model, **options) as probe:
        loss = square(model, x)
        loss.backward(retain_graph=True)
        (2 * loss).backward()
        close_named(probe.norms(per="parameter"), want)


@a_few_modes
@every_kind
def test_a_graph_of_the_gradient_is_the_plain_one(kind, options):
    """create_graph: refused when read, and the gradients of the gradients are right."""
    model = net(made(kind, "both ways"), "steps").double()
    x, twin = torch.randn(N, T, I).double().requires_grad_(), copy.deepcopy(model)

    def penalty(model):
        (g,) = torch.autograd.grad(square(model, x), x, create_graph=True)
        g.square().sum().backward()
        return [p.grad for p in model.parameters()]

    plain = penalty(twin)
    with torchgradx.attach(model, **options) as probe:
        for got, want in zip(penalty(model), plain, strict=True):
            if options.get("weight_grad", True):
                assert (got is None) == (want is None)
                assert want is None or torch.allclose(got, want, rtol=1e-9, atol=0)
        with pytest.raises(torchgradx.CoverageError):
            probe.norms()


@served
@served_mode
@every_kind
def test_states_may_be_changed_in_place(kind, options):
    """As far as the framework allows it: oneDNN's LSTM keeps its own output."""
    model = Model(lambda m, x: torch.relu_(m.r(x)[0]), r=KINDS[kind](I, H, batch_first=True))
    check(model, square, torch.randn(N, T, I), **options)


@native_mode
@pytest.mark.parametrize("kind", ["lstm", "gru"])
def test_dropout_between_layers_has_the_masks_of_the_plain_module(kind, options):
    need_native(options)
    rnn = KINDS[kind](I, H, num_layers=3, dropout=0.5, bidirectional=True)
    model = net(rnn).double()
    x, rows = torch.randn(N, T, I).double(), []
    for n in range(N):
        torch.manual_seed(7)
        grads = torch.autograd.grad(model(x)[n].square().sum(), list(model.parameters()))
        rows.append(torch.stack([g.norm() for g in grads]))
    torch.manual_seed(7)
    plain = square(model, x)
    want = dict(zip(dict(model.named_parameters()), torch.stack(rows).unbind(1), strict=True))
    with torchgradx.attach(model, **options) as probe:
        torch.manual_seed(7)
        loss = square(model, x)
        loss.backward()
        assert torch.equal(loss, plain)
        close_named(probe.norms(per="parameter"), want)


@served
@served_mode
def test_several_rows_of_each_sample(options):
    """[N, K, T, I] as [N K, T, I]: K sequences of each sample in the module's batch."""
    for first in (True, False):

        def forward(m, x, first=first):
            rows = torch.tanh(m.i(x)).flatten(0, 1)
            y = m.r(rows if first else rows.transpose(0, 1))[0]
            return (y if first else y.transpose(0, 1)).unflatten(0, (-1, 3))

        model = Model(forward, i=nn.Linear(I, I), r=nn.LSTM(I, H, batch_first=first))
        check(model, square, torch.randn(N, 3, T, I), **options)


@a_few_modes
@pytest.mark.parametrize("taken", ["the state", "both", "the last step"])
@every_kind
def test_states_of_several_rows_of_each_sample(kind, taken, options):
    """As choices [N, K, T] that each are read by itself."""

    def forward(m, x):
        y, h = m.r(x.flatten(0, 1))
        h = (h[0] if isinstance(h, tuple) else h)[0]
        row = {"the state": h, "both": h + y.mean(1), "the last step": y[:, -1]}[taken]
        return m.o(row).view(len(x), -1)

    model = Model(forward, r=KINDS[kind](I, H, batch_first=True), o=nn.Linear(H, 1))
    for choices in (2, N, 6):
        check(model, square, torch.randn(N, choices, T, I), **options)


@a_few_modes
def test_samples_along_the_steps_are_refused(options):
    """Sequences of as many steps as samples, given to a module that takes the one for the other."""
    model = Model(lambda m, x: m.r(torch.tanh(m.i(x)))[0], i=nn.Linear(I, I), r=nn.LSTM(I, H))
    refused(model, square, torch.randn(N, N, I), names=["i.weight"], **options)


@needs_half_lstm
@a_few_modes
def test_what_is_not_served_runs_again(options):
    """Without a batch dimension, under autocast, or called in another way: exact all the same."""

    def half(m, x):
        with torch.autocast("cpu", torch.bfloat16):
            return m.r(x)[0].float()

    model = Model(half, r=nn.LSTM(I, H, batch_first=True))
    check(model, square, torch.randn(N, T, I), dtype=torch.float32, rtol=0.05, **options)
    alone = Model(
        lambda m, x: m.r(torch.tanh(m.i(x))[0])[0][None], i=nn.Linear(I, I), r=nn.LSTM(I, H)
    )
    exact_or_refused(alone, square, torch.randn(1, T, I), **options)


def test_a_copy_of_an_attached_module_is_stock():
    model = net(nn.LSTM(I, H))
    with torchgradx.attach(model):
        twin = copy.deepcopy(model)
        assert (type(model.r) is nn.LSTM) is not ops.NATIVE
        assert type(model.r).__name__ == "LSTM"
        assert isinstance(model.r, nn.LSTM)
    assert type(twin.r) is type(model.r) is nn.LSTM
    x = torch.randn(N, T, I)
    assert torch.equal(twin(x), model(x))


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


@pytest.mark.skipif(not ops.NATIVE, reason="replayed without the extension")
def test_explain_tells_of_each_weight():
    model = net(nn.LSTM(I, H, bidirectional=True))
    with torchgradx.attach(model) as probe:
        square(model, torch.randn(N, T, I)).backward()
        probe.norms()
        text = probe.explain()
    for name in ("weight_ih_l0, r.bias_ih_l0", "weight_hh_l0_reverse, r.bias_hh_l0_reverse"):
        assert f"r: LSTM  [r.{name}]" in text, text
    assert "replay" not in text
    assert f"linear N={N} T={T} I={H} O={4 * H}" in text


@both_dtypes
@a_few_modes
@pytest.mark.parametrize("both_ways", [False, True])
@every_kind
def test_last_states_of_as_many_layers_as_samples(kind, both_ways, options, dtype):
    """[layers, N, H] of which both are as long."""
    rnn = KINDS[kind](I, H, num_layers=N // (1 + both_ways), bidirectional=both_ways)

    def forward(m, x):
        last = m.r(x.transpose(0, 1))[1]
        return (torch.cat(last, -1) if isinstance(last, tuple) else last).transpose(0, 1)

    assert N % 2 == 0
    check(Model(forward, r=rnn), square, torch.randn(N, T, I), dtype=dtype, **options)
