"""The second step and those after it, where nothing is compared any more: both weights of an LSTM
then go in one sweep, over the states that oneDNN keeps as its output."""

import copy

import pytest
import torch
from attach_oracle import (
    Model,
    check,
    close_named,
    loop,
    need_native,
    same_gradients,
    square,
    tolerance,
)
from clip_oracle import bounded, check_clip, gradients, norms_of, same, weighted
from recurrent_models import native_mode, served
from torch import nn

import torchgradx

N, T, I, H = 4, 20, 48, 80  # one sweep takes whole vectors, and more steps than a Gram matrix does


def tied():
    """Two modules with one W_hh: its norm has cross terms, and the first's W_ih has none."""
    model = nn.ModuleList(nn.LSTM(I, H, batch_first=True) for _ in range(2))
    model[1].weight_hh_l0 = model[0].weight_hh_l0
    return Model(lambda m, x: m.r[0](x)[0] + m.r[1](x)[0], r=model)


def of(**options):
    rnn = nn.LSTM(I, H, batch_first=True, **options)
    return lambda: Model(lambda m, x: m.r(x)[0], r=rnn)


def frozen(*names):
    def make():
        model = of()()
        for name in names:
            model.r.get_parameter(name).requires_grad_(False)
        return model

    return make


def from_a_state():
    rnn = nn.LSTM(I, H, batch_first=True)
    state = torch.randn(1, 1, H)
    return Model(
        lambda m, x: m.r(x, (state.to(x).expand(1, len(x), H).contiguous(),) * 2)[0], r=rnn
    )


def called_twice():
    return Model(lambda m, x: m.r(x)[0] + m.r(x.flip(1))[0], r=nn.LSTM(I, H, batch_first=True))


WAYS = {
    "forwards": of(),
    "both ways": of(bidirectional=True),
    "two layers": of(num_layers=2),
    "no biases": of(bias=False),
    "the first bias frozen": frozen("bias_ih_l0"),
    "the second bias frozen": frozen("bias_hh_l0"),
    "the first weight frozen": frozen("weight_ih_l0"),
    "the second weight frozen": frozen("weight_hh_l0"),
    "from a state": from_a_state,
    "called twice": called_twice,
    "weights tied": tied,
}
every_way = pytest.mark.parametrize("make", WAYS.values(), ids=WAYS)


@native_mode
@every_way
def test_every_step_is_exact(make, options):
    need_native(options)
    model = make()
    twin = copy.deepcopy(model)
    with torchgradx.attach(model, **options) as probe:
        for samples, steps in [(N, T), (N, T), (N + 1, T), (N, T + 9), (N, T), (N, 1), (N, 2)]:
            x = torch.randn(samples, steps, I)
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
    check_clip(make(), square, torch.randn(N, T, I), dtype=torch.float32)


@served
def test_clipping_alone_and_products_alone():
    """Each keeps the states by itself."""
    model, x = of()(), torch.randn(N, T, I)
    rows, rtol = gradients(model, square, x), tolerance(model, torch.float32)
    norms = norms_of(rows, "model")
    bound = float(norms[""].median())
    terms = {name: sum(row[name].norm() for row in rows) / N for name in rows[0]}
    want = weighted(rows, {"": bounded(norms, bound)[""] / N}, "model")
    with torchgradx.attach(model, clip=True) as probe:
        for _ in range(3):
            model.zero_grad()
            square(model, x).backward()
            probe.clip_grad_norm_(bound)
            same(model, want, rtol, terms)
    directions = {name: torch.randn_like(p) for name, p in model.named_parameters()}
    exact = torch.stack([sum((g * directions[k]).sum() for k, g in row.items()) for row in rows])
    allowed = rtol * norms[""] * sum(v.square().sum() for v in directions.values()).sqrt()
    with torchgradx.attach(model, directions=directions) as probe:
        for _ in range(3):
            square(model, x).backward()
            assert ((probe.dot() - exact).abs() <= allowed).all()


@served
@pytest.mark.skipif(
    torch.backends.cpu.get_cpu_capability() != "AVX512",
    reason="elsewhere oneDNN's output is not laid out as the states are read",
)
@pytest.mark.parametrize("bias", [True, False])
def test_states_are_there_once(bias):
    """Neither is a tensor put together in the forward, nor one with zeros before it later."""
    model, x = of(bias=bias)(), torch.randn(N, T, I)
    with torchgradx.attach(model) as probe:
        for _ in range(2):
            square(model, x).backward()
            probe.norms()
        with torch.profiler.profile() as seen:
            square(model, x).backward()
    assert not {"aten::cat", "aten::constant_pad_nd"} & {event.name for event in seen.events()}


@served
@pytest.mark.parametrize(
    "write", [torch.relu_, lambda y: y.detach().zero_() + y], ids=["y", "alias"]
)
def test_what_a_loss_writes_over_the_states_is_noticed_as_without_a_probe(write):
    model = Model(lambda m, x: write(m.r(x)[0]), r=nn.LSTM(I, H, batch_first=True))
    x = torch.randn(N, T, I)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        square(copy.deepcopy(model), x).backward()
    with torchgradx.attach(model) as probe:
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            square(model, x).backward()
        model.r.register_forward_hook(lambda m, args, out: (out[0].clone(), out[1]))
        square(model, x).backward()
        close_named(
            probe.norms(per="parameter"), loop(model, square, x), tolerance(model, torch.float32)
        )


@native_mode
@pytest.mark.parametrize("layers", [1, 2])
def test_states_of_both_ways_may_be_changed_in_place(layers, options):
    """They are put together, and nobody keeps the whole."""
    rnn = nn.LSTM(I, H, num_layers=layers, bidirectional=True)
    model = Model(lambda m, x: torch.relu_(m.r(x.transpose(0, 1))[0]).transpose(0, 1), r=rnn)
    check(model, square, torch.randn(N, T, I), dtype=torch.float32, **options)


def settled(probe, model, x):
    """Nothing is compared any more."""
    for _ in range(2):
        model.zero_grad()
        square(model, x).backward()
        probe.norms()
    model.zero_grad()


@served
@pytest.mark.parametrize("both_ways", [False, True])
def test_gates_stand_as_long_as_their_graph_is_kept(both_ways):
    """Their gradients lie over them in the last backward alone."""
    model, x = of(bidirectional=both_ways)(), torch.randn(N, T, I)
    twin, rtol = copy.deepcopy(model), tolerance(model, torch.float32)
    thrice = lambda m, x: 3 * square(m, x)  # noqa: E731
    thrice(twin, x).backward()
    with torchgradx.attach(model) as probe:
        settled(probe, model, x)
        loss = square(model, x)
        for keeps in (True, True, False):
            loss.backward(retain_graph=keeps)
        close_named(probe.norms(per="parameter"), loop(model, thrice, x), rtol)
        same_gradients(model, twin, rtol)
        with pytest.raises(RuntimeError, match="a second time"):
            loss.backward()


@served
def test_what_hooks_were_given_to_keep_stands():
    model, x, given = of()(), torch.randn(N, T, I), []

    def keep(t):
        given.append((t, t.clone()))
        return t

    with torchgradx.attach(model) as probe:
        for _ in range(3):
            with torch.autograd.graph.saved_tensors_hooks(keep, lambda t: t):
                loss = square(model, x)
            loss.backward()
            norms = probe.norms(per="parameter")
    close_named(norms, loop(model, square, x), tolerance(model, torch.float32))
    assert given
    assert all(torch.equal(t, as_it_was) for t, as_it_was in given)
