"""nn.LSTM, nn.GRU, nn.RNN and their cells: every option against a loop over single samples."""

import copy

import pytest
import torch
from attach_oracle import (
    ANY,
    NATIVE,
    Model,
    a_few_modes,
    check,
    close_named,
    exact_or_refused,
    loop,
    need_native,
    refused,
    seeded,  # noqa: F401
    square,
    title,
)
from torch import nn
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence, pad_packed_sequence
from torch.utils.checkpoint import checkpoint

import torchgradx
from torchgradx import ops

N, T, I, H = 4, 5, 3, 6
served = pytest.mark.skipif(not ops.NATIVE, reason="a replay refuses it")
# With fused=False all is run again: its gradients must have the framework's bits.
native_mode = pytest.mark.parametrize("options", [*ANY, NATIVE[0]], ids=title)
served_mode = pytest.mark.parametrize("options", [{}, {"weight_grad": False}], ids=title)
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


@dtypes
@native_mode
@every_option
@every_kind
def test_every_option_has_the_norms_of_the_loop(kind, option, options, dtype):
    if dtype == torch.bfloat16 and (kind == "rnn relu" or option.startswith("projected")):
        pytest.skip("a ReLU switches where its input rounds to 0; projections have no bfloat16")
    rtol = 0.05 if dtype == torch.bfloat16 else None
    check(net(made(kind, option)), square, torch.randn(N, T, I), dtype=dtype, rtol=rtol,
          input_grad=True, **options)  # fmt: skip


@native_mode
@pytest.mark.parametrize("use", ["steps", "last"])
@pytest.mark.parametrize("steps", [1, N, 7])
@every_kind
def test_a_loss_on_the_steps_or_on_the_last_states_alone(kind, steps, use, options):
    if use == "last" and steps == N and not (ops.NATIVE and options.get("fused", True)):
        pytest.skip("run again, nothing tells the steps from the samples")
    for option in ("plain", "both ways"):
        model = net(made(kind, option), use)
        check(model, square, torch.randn(N, steps, I), input_grad=True, **options)


@native_mode
@pytest.mark.parametrize("option", ["plain", "both ways, three layers", "projected"])
@every_kind
def test_first_states_and_their_gradients(kind, option, options):
    rnn = made(kind, option)
    rows = rnn.num_layers * (1 + rnn.bidirectional)
    first = [torch.randn(N, rows, rnn.proj_size or H)]
    if kind == "lstm":
        first.append(torch.randn(N, rows, H))
    for dtype in (torch.float64, torch.float32):
        check(net(rnn), square, torch.randn(N, T, I), *first, dtype=dtype, input_grad=True,
              **options)  # fmt: skip


@native_mode
@every_kind
def test_sizes_off_every_vector_and_many_rows(kind, options):
    rnn = KINDS[kind](37, 33, num_layers=2, bidirectional=True)
    model = Model(lambda m, x: m.r(x.transpose(0, 1))[0].transpose(0, 1), r=rnn)
    check(model, square, torch.randn(9, 19, 37), dtype=torch.float32, **options)


@native_mode
@pytest.mark.parametrize("hidden", [16, 60, 64, 128])
@pytest.mark.parametrize("backwards", [False, True])
def test_wherever_onednn_keeps_the_gates(hidden, backwards, options):
    """Its rows are padded by the size of four gates: 64 * 16 bytes get one more cache line."""
    rnn = nn.LSTM(I, hidden, bidirectional=backwards)
    check(net(rnn), square, torch.randn(N, T, I), dtype=torch.float32, **options)


@native_mode
def test_without_onednn_the_gates_are_computed_again(options):
    with torch.backends.mkldnn.flags(enabled=False):
        for option in ("plain", "both ways"):
            check(
                net(made("lstm", option)),
                square,
                torch.randn(N, T, I),
                dtype=torch.float32,
                **options,
            )


# ---- Cells ---------------------------------------------------------------------------------------
def unrolled(cell, steps=3):
    def forward(m, x):
        state, seen = None, []
        for t in range(steps):
            state = m.c(torch.tanh(m.i(x[:, t])), state)
            seen.append(state[0] if isinstance(state, tuple) else state)
        return torch.stack([*seen, state[-1] if isinstance(state, tuple) else state], 1)

    return Model(forward, i=nn.Linear(I, I), c=cell)


@dtypes
@served
@served_mode
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("kind", CELLS)
def test_a_cell_unrolled_in_time_is_exact(kind, bias, options, dtype):
    cell = CELLS[kind](I, H) if kind == "rnn relu" else CELLS[kind](I, H, bias)
    for steps in (1, 3):
        rtol = 0.05 if dtype == torch.bfloat16 else None
        x = torch.randn(N, 3, I)
        check(unrolled(cell, steps), square, x, dtype=dtype, rtol=rtol, input_grad=True, **options)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
@pytest.mark.parametrize("options", [{"fused": False}, {"backend": "vmap"}], ids=title)
def test_a_cell_that_runs_again_is_refused_as_its_c_feeds_its_h(options, dtype):
    model = unrolled(nn.LSTMCell(I, H)).to(dtype)
    with torchgradx.attach(model, **options) as probe:
        square(model, torch.randn(N, 3, I).to(dtype)).backward()
        with pytest.raises(torchgradx.CoverageError, match="made from another") as refusal:
            probe.norms()
    assert set(refusal.value.parameters) == {f"c.{name}" for name, _ in model.c.named_parameters()}


def test_a_cell_gives_what_the_module_gives():
    """The same weights, once as nn.GRU and once unrolled: the same norms."""
    rnn, x = nn.GRU(I, H, batch_first=True).double(), torch.randn(N, 3, I).double()
    cell = nn.GRUCell(I, H).double()
    for name, p in cell.named_parameters():
        p.data.copy_(getattr(rnn, f"{name}_l0"))
    one = Model(lambda m, x: m.r(x)[0], r=rnn)
    two = Model(lambda m, x: torch.stack(list(steps(m.c, x)), 1), c=cell)

    def steps(cell, x):
        h = None
        for t in range(x.shape[1]):
            h = cell(x[:, t], h)
            yield h

    found = []
    for model in (one, two):
        with torchgradx.attach(model) as probe:
            square(model, x).backward()
            found.append(list(probe.norms(per="parameter").values()))
    for a, b in zip(*found, strict=True):
        assert torch.allclose(a, b, rtol=1e-9)


# ---- Packed sequences ----------------------------------------------------------------------------
def packed_net(rnn, enforce_sorted=False):
    def forward(m, x, lengths, h=None):
        first = m.r.batch_first
        x = torch.tanh(m.i(x))
        packed = pack_padded_sequence(x if first else x.transpose(0, 1), lengths, first,
                                      enforce_sorted)  # fmt: skip
        hx = None
        if h is not None:
            h = h.transpose(0, 1).contiguous()
            hx = (h, 2 * h) if isinstance(m.r, nn.LSTM) else h
        out = m.r(packed, hx)
        assert isinstance(out[0], PackedSequence)
        y, last = states_of((pad_packed_sequence(out[0], True, total_length=x.shape[1])[0], out[1]))
        return torch.cat([y.flatten(1), 2 * last], 1)

    return Model(forward, i=nn.Linear(I, I), r=rnn)


@served
@served_mode
@pytest.mark.parametrize("option", [o for o in OPTIONS if o != "dropout in eval"])
@every_kind
def test_packed_sequences_have_the_norms_of_the_loop(kind, option, options):
    rnn = made(kind, option)
    x, h = torch.randn(N, T, I), torch.randn(N, rnn.num_layers * (1 + rnn.bidirectional), H)
    lengths = torch.tensor([3, 5, 1, 3])
    check(packed_net(rnn), square, x, lengths, input_grad=True, **options)
    if not rnn.proj_size:
        check(packed_net(rnn), square, x, lengths, h, input_grad=True, **options)
    longest_first = lengths.sort(descending=True).values
    check(packed_net(rnn, True), square, x, longest_first, dtype=torch.float32, **options)


@a_few_modes
def test_packed_sequences_under_autocast_are_refused_by_name(options):
    def forward(m, x):
        packed = pack_padded_sequence(x, torch.tensor([5, 4, 3, 2]), True)
        with torch.autocast("cpu", torch.bfloat16):
            return m.o(m.r(packed)[1][0]).float()

    model = Model(forward, r=nn.GRU(I, H, batch_first=True), o=nn.Linear(H, 2))
    with torchgradx.attach(model, **options) as probe:
        square(model, torch.randn(N, T, I)).backward()
        with pytest.raises(torchgradx.CoverageError, match="packed"):
            probe.norms()


# ---- Uses and regimes ----------------------------------------------------------------------------
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
                assert want is None or torch.allclose(got, want, rtol=1e-9, atol=1e-12)
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
def test_samples_along_the_steps_are_refused(options):
    """Sequences of as many steps as samples, given to a module that takes the one for the other."""
    model = Model(lambda m, x: m.r(torch.tanh(m.i(x)))[0], i=nn.Linear(I, I), r=nn.LSTM(I, H))
    refused(model, square, torch.randn(N, N, I), names=["i.weight"], **options)


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
