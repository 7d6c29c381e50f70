"""nn.LSTM, nn.GRU, nn.RNN and their cells, batches and packed sequences: every option; used more
than once, in part, in place, clipped, checkpointed."""

import copy
from platform import machine

import pytest
import recurrent_models as recurrent
import torch
from attach_models import Model, square
from attach_modes import ANY, NATIVE, VMAP, a_few_modes, each_of, every_mode, fallback_mode
from attach_oracle import check, close, loop_model, tolerance
from attach_steps import exact_step, refused, step_or_refused
from clip_oracle import check_clip
from recurrent_models import KINDS, OPTIONS, H, I, N, T, every_kind, every_option, made, net
from torch import nn
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence, pad_packed_sequence
from torch.utils.checkpoint import checkpoint

import torchgradx
from torchgradx import ops

served = pytest.mark.skipif(not ops.NATIVE, reason="a replay refuses it")
native_mode = each_of([*ANY, NATIVE[0]])
dtypes = pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)


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


@pytest.fixture
def _as_on_a_gpu():
    """Take the framework's operators, which serve where our kernels do not."""
    if not ops.NATIVE:
        pytest.skip("needs the extension")
    from torchgradx import _C

    _C.use_operators_everywhere(True)
    yield
    _C.use_operators_everywhere(False)


@pytest.mark.usefixtures("_as_on_a_gpu")
@every_option
@every_kind
def test_every_option_by_the_operators_of_a_gpu(kind, option):
    for options in ({}, {"fused": False}):
        check(net(made(kind, option)), square, torch.randn(N, T, I), input_grad=True, **options)
    if option != "dropout in eval":
        test_packed_sequences_have_the_norms_of_the_loop(kind, option, {})


@native_mode
@pytest.mark.parametrize("option", ["plain", "both ways, three layers", "projected"])
@every_kind
def test_first_states_and_their_gradients(kind, option, options):
    rnn = made(kind, option)
    rows = rnn.num_layers * (1 + rnn.bidirectional)
    h = [torch.randn(N, rows, rnn.proj_size or H)]
    if kind == "lstm":
        h.append(torch.randn(N, rows, H))
    for dtype in (torch.float64, torch.float32):
        check(net(rnn), square, torch.randn(N, T, I), *h, dtype=dtype, input_grad=True, **options)


@pytest.mark.grid(pairs=False)
@served
@pytest.mark.parametrize("option", ["both ways", "projected"])
@every_kind
def test_threads_that_share_the_rows(kind, option):
    rnn, x = made(kind, option, 33), torch.randn(18, 61, I)
    torch.set_num_threads(2)
    check(net(rnn), square, x, input_grad=True)
    model, found = net(rnn).float(), []
    for _ in range(2):
        with torchgradx.attach(model) as probe:
            square(model, x).backward()
            found.append([probe.norms(), *(p.grad for p in model.parameters())])
        model.zero_grad()
    assert all(map(torch.equal, *found))


@native_mode
@pytest.mark.parametrize("size", [(I, 16), (I, 60), (I, 64), (80, 20), (300, 256), (3, 1)])
@pytest.mark.parametrize("steps", [1, 2, 5])
@pytest.mark.parametrize("backwards", [False, True])
def test_wherever_onednn_keeps_gates_and_cells(size, steps, backwards, options):
    """Rows of gates are padded by their size: 64 * 16 bytes get one more cache line. Where cells
    begin depends on the wider of inputs and states."""
    rnn = nn.LSTM(*size, bidirectional=backwards, batch_first=True)
    model = Model(lambda m, x: m.r(x)[0], r=rnn)
    check(model, square, torch.randn(N, steps, size[0]), dtype=torch.float32, **options)


FROZEN = {
    "the first bias": ["bias_ih_l0"],
    "the second bias": ["bias_hh_l0"],
    "biases": ["bias_ih_l0", "bias_hh_l0"],
    "input weights": ["weight_ih_l0"],
    "state weights": ["weight_hh_l0"],
    "all but a bias": ["weight_ih_l0", "weight_hh_l0", "bias_ih_l0"],
}


@native_mode
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
@pytest.mark.parametrize("frozen", FROZEN)
@pytest.mark.parametrize("steps", [3, 20])
@pytest.mark.parametrize("kind", ["lstm", "gru", "rnn"])
def test_what_two_weights_share_of_the_gates_gradients(kind, steps, frozen, dtype, options):
    """Of 3 steps norms come from a Gram matrix, of 20 from tiles, in one sweep for both."""
    rnn = KINDS[kind](48, 80)
    for name in FROZEN[frozen]:
        rnn.get_parameter(name).requires_grad_(False)
    model = Model(lambda m, x: recurrent.states_of(m.r(x.transpose(0, 1)))[1], r=rnn)
    x = torch.randn(N, steps, 48)
    check(model, square, x, dtype=dtype, input_grad=True, **options)


laid_out_as_known = pytest.mark.skipif(
    not (ops.NATIVE and torch.backends.mkldnn.is_available() and machine() == "x86_64"),
    reason="where its layout was looked up",
)


@laid_out_as_known
@pytest.mark.parametrize("hidden", [16, 60, 64, 128])
@pytest.mark.parametrize("backwards", [False, True])
def test_gates_that_onednn_keeps_are_not_computed_again(hidden, backwards):
    """But for a few, to see that they are where they were thought to be."""
    model = net(nn.LSTM(I, hidden, bidirectional=backwards))
    with torchgradx.attach(model):
        loss = square(model, torch.randn(N, T, I))
        with torch.profiler.profile() as seen:
            loss.backward()
    assert "aten::sigmoid_" not in {event.name for event in seen.events()}


def unrolled(cell, steps=3):
    def forward(m, x):
        state, seen = None, []
        for t in range(steps):
            state = m.c(torch.tanh(m.i(x[:, t])), state)
            seen.append(state[0] if isinstance(state, tuple) else state)
        return torch.stack([*seen, state[-1] if isinstance(state, tuple) else state], 1)

    return Model(forward, i=nn.Linear(I, I), c=cell)


@dtypes
@fallback_mode
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("kind", recurrent.CELLS)
def test_a_cell_unrolled_in_time_is_exact(kind, bias, options, dtype):
    cell = recurrent.CELLS[kind](I, H) if kind == "rnn relu" else recurrent.CELLS[kind](I, H, bias)
    for steps in (1, 3):
        rtol = 0.05 if dtype == torch.bfloat16 else None
        x = torch.randn(N, 3, I)
        check(unrolled(cell, steps), square, x, dtype=dtype, rtol=rtol, input_grad=True, **options)


OVER_SAMPLES = {
    "without a batch": (lambda m, x: m.r(x)[0], (N, I), {}),
    "samples in its time": (lambda m, x: m.r(x)[0], (N, T, I), {}),
    "samples in its batch, of steps": (
        lambda m, x: m.r(x.transpose(0, 1))[0].transpose(0, 1), (N, T, I), {"batch_first": True},
    ),
}  # fmt: skip


@every_mode
@every_kind
@pytest.mark.parametrize("name", OVER_SAMPLES)
def test_states_that_go_from_sample_to_sample_are_refused(name, kind, options):
    forward, shape, way = OVER_SAMPLES[name]
    model = Model(forward, r=KINDS[kind](I, H, **way))
    refused(model, square, torch.randn(shape), names=["r.weight_ih_l0"], **options)


any_mode = each_of([*ANY, *VMAP, NATIVE[0]])
LENGTHS = torch.tensor([3, 5, 1, 3])


def packed_net(rnn, enforce_sorted=False):
    def forward(m, x, lengths, h=None):
        first = m.r.batch_first
        x = torch.tanh(m.i(x))
        packed = pack_padded_sequence(x if first else x.transpose(0, 1), lengths.cpu(), first,
                                      enforce_sorted)  # fmt: skip
        hx = None
        if h is not None:
            h = h.transpose(0, 1).contiguous()
            hx = (h, 2 * h) if isinstance(m.r, nn.LSTM) else h
        out = m.r(packed, hx)
        assert isinstance(out[0], PackedSequence)
        rows, _ = pad_packed_sequence(out[0], True, total_length=x.shape[1])
        y, last = recurrent.states_of((rows, out[1]))
        return torch.cat([y.flatten(1), 2 * last], 1)

    return Model(forward, i=nn.Linear(I, I), r=rnn)


@any_mode
@pytest.mark.parametrize("option", [o for o in OPTIONS if o != "dropout in eval"])
@every_kind
def test_packed_sequences_have_the_norms_of_the_loop(kind, option, options):
    rnn = made(kind, option)
    x, h = torch.randn(N, T, I), torch.randn(N, rnn.num_layers * (1 + rnn.bidirectional), H)
    check(packed_net(rnn), square, x, LENGTHS, input_grad=True, **options)
    if not rnn.proj_size:
        check(packed_net(rnn), square, x, LENGTHS, h, input_grad=True, **options)
    longest_first = LENGTHS.sort(descending=True).values
    check(packed_net(rnn, True), square, x, longest_first, dtype=torch.float32, **options)


@any_mode
@pytest.mark.parametrize(("before", "field", "change"), [
    (True, "unsorted_indices", lambda t: t[[3, 1, 2, 0]]),
    (False, "batch_sizes", lambda t: t + torch.tensor([0, 1, 0, -1, 0])),
])  # fmt: skip
def test_other_lengths_are_not_proven_anew(before, field, change, backwards, options):
    """Unless rows are put elsewhere than where the sequence has them."""
    model, refusals = packed_net(nn.LSTM(I, H, 2, batch_first=True)).double(), []

    def put(_, given, out=None):
        sequence, rest = out or given
        is_last = len(refusals) == 7 and len(sequence.unsorted_indices) == N
        changed = {field: change(getattr(sequence, field))} if is_last else {}
        return sequence._replace(**changed), rest

    add = model.r.register_forward_pre_hook if before else model.r.register_forward_hook
    add(put)
    with torchgradx.attach(model, **options) as probe:
        for k, each in enumerate([[3, 5, 1, 3], [2, 5, 4, 1], [1, 5, 2, 3], [4, 5, 2, 1]] * 2):
            backwards.clear()
            batch = torch.randn(N, T, I).double(), torch.tensor(each)
            refusals.append(step_or_refused(probe, model, *batch) is not None)
            assert len(backwards) <= 2 * (k < 2) or k == 7 or options or not ops.NATIVE
    assert refusals == [False] * 7 + [True]


@any_mode
def test_rows_that_the_user_sorted_are_not_taken_for_the_samples(options):
    """Sorted before and put back after, the module's first row is not the batch's first sample."""

    def forward(m, x, lengths):
        order = lengths.argsort(descending=True, stable=True)
        packed = pack_padded_sequence(m.i(x)[order], lengths[order].cpu(), True)
        rows = pad_packed_sequence(m.r(packed)[0], True, total_length=x.shape[1])[0]
        return rows[order.argsort()]

    model = Model(forward, i=nn.Linear(I, I), r=nn.GRU(I, H, batch_first=True))
    refused(model, square, torch.randn(N, T, I), LENGTHS, names=["r.weight_ih_l0"], **options)


# ---- In training ---------------------------------------------------------------------------------
# One sweep takes whole vectors, and more steps than a Gram matrix does.
STEPS, WIDE, STATES = 20, 48, 80


def tied():
    """Two modules with one W_hh: its norm has cross terms, and the first's W_ih has none."""
    model = nn.ModuleList(nn.LSTM(WIDE, STATES, batch_first=True) for _ in range(2))
    model[1].weight_hh_l0 = model[0].weight_hh_l0
    return Model(lambda m, x: m.r[0](x)[0] + m.r[1](x)[0], r=model)


def of(forward=lambda m, x: m.r(x)[0], **options):
    return lambda: Model(forward, r=nn.LSTM(WIDE, STATES, batch_first=True, **options))


def from_a_state(m, x):
    state = torch.linspace(-2, 2, STATES).to(x).expand(1, len(x), STATES).contiguous()
    return m.r(x, (state, state))[0]


WAYS = {
    "forwards": of(), "both ways": of(bidirectional=True), "from a state": of(from_a_state),
    "called twice": of(lambda m, x: m.r(x)[0] + m.r(x.flip(1))[0]), "weights tied": tied,
}  # fmt: skip
every_way = pytest.mark.parametrize("make", WAYS.values(), ids=WAYS)


@a_few_modes
@pytest.mark.parametrize("reentrant", [False, True])
@every_kind
def test_checkpointed(kind, reentrant, options):
    def forward(m, x):
        return checkpoint(lambda t: m.r(t)[0], torch.tanh(m.i(x)), use_reentrant=reentrant)

    for more in ({}, {"num_layers": 2, "bidirectional": True}):
        model = Model(forward, i=nn.Linear(I, I), r=KINDS[kind](I, H, batch_first=True, **more))
        check(model, square, torch.randn(N, T, I), input_grad=True, **options)


@pytest.mark.skipif(not ops.NATIVE, reason="replayed without the extension")
@pytest.mark.parametrize("kind", [*KINDS, *(f"{kind} cell" for kind in recurrent.CELLS)])
def test_with_gradients_of_the_framework_a_module_runs_once_more_and_not_for_each_sample(kind):
    if kind in KINDS:
        layer, x = KINDS[kind](I, H, num_layers=2, batch_first=True), torch.randn(N, T, I)
    else:
        layer, x = recurrent.CELLS[kind.removesuffix(" cell")](I, H), torch.randn(N, I)
    several = kind in KINDS or kind == "lstm cell"
    model = Model(lambda m, x: m.r(x)[0] if several else m.r(x), r=layer)
    with torchgradx.attach(model, fused=False) as probe:
        square(model, x).backward()
        probe.norms()
        text = probe.explain()
    assert "through time: the framework's gradients stay" in text
    assert "replay" not in text
    assert "vmap" not in text
    if kind == "lstm" and not recurrent.computes_halves():
        return
    with torchgradx.attach(model, fused=False) as probe, torch.autocast("cpu", torch.bfloat16):
        square(model, x).backward()
        probe.norms()
        assert ("through time:" if kind == "lstm" else "lifted:") in probe.explain()


@native_mode
@every_way
def test_every_step_is_exact(make, options):
    model, exactly = make(), options.get("fused") is False
    twin = copy.deepcopy(model) if options.get("weight_grad", True) else None
    with torchgradx.attach(model, **options) as probe:
        for samples, steps in zip([N, N, N + 1, N, N], [STEPS, STEPS, STEPS, 1, 2], strict=True):
            x, rtol = torch.randn(samples, steps, WIDE), tolerance(model, torch.float32)
            exact_step(probe, model, x, rtol=rtol, twin=twin, exactly=exactly)


@served
@every_way
def test_what_else_a_step_is_asked_for(make):
    check_clip(make(), square, torch.randn(N, STEPS, WIDE), dtype=torch.float32)


@served
@pytest.mark.parametrize(
    "write", [torch.relu_, lambda y: y.detach().zero_() + y], ids=["", "alias"]
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


@served
def test_a_default_device_is_for_what_the_user_makes():
    model, batch = packed_net(nn.LSTM(I, H, batch_first=True)), (torch.randn(N, T, I), LENGTHS)
    scale, want = torch.full((N,), 2.0), loop_model(model, square, *batch)
    with torch.device("meta"), torchgradx.attach(model, loss_scale=scale) as probe:
        (2 * square(model, *batch)).backward()
        torchgradx.NoiseScale().update(probe)
        assert len({*torchgradx.ImportanceSampler(9, num_samples=99)}) > 1
    close(probe.norms().double(), want, 1e-4)
