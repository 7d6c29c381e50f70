"""Recurrent modules in a training: after the first step, where both weights of an LSTM go in one
sweep; packed sequences."""

import copy

import pytest
import torch
from attach_oracle import (
    ANY,
    DEVICE,
    NATIVE,
    VMAP,
    Model,
    Same,
    a_few_modes,
    check,
    close_named,
    each_of,
    exact_or_refused,
    fallback_mode,
    loop,
    need_native,
    refused,
    same_gradients,
    square,
    tolerance,
)
from clip_oracle import bounded, check_clip, gradients, norms_of, same, weighted
from recurrent_models import (
    KINDS,
    OPTIONS,
    H,
    I,
    N,
    T,
    every_kind,
    made,
    native_mode,
    served,
    states_of,
)
from torch import nn
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence, pad_packed_sequence

import torchgradx

any_mode = each_of([*ANY, *VMAP, NATIVE[0]])
LENGTHS = torch.tensor([3, 5, 1, 3])


def both(y, last):
    return torch.cat([y.flatten(1), 2 * last], 1)


def packed_net(rnn, enforce_sorted=False, use=both):
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
        y, last = states_of((pad_packed_sequence(out[0], True, total_length=x.shape[1])[0], out[1]))
        return use(y, last)

    return Model(forward, i=nn.Linear(I, I), r=rnn)


@any_mode
@every_kind
def test_sequences_first_are_packed_in_an_order_that_unpacking_undoes(kind, options):
    def forward(m, x, lengths):  # [T, N, I] -> [T, N, H]
        packed = pack_padded_sequence(m.i(x), lengths.cpu(), enforce_sorted=False)
        return pad_packed_sequence(m.r(packed)[0], total_length=len(x))[0]

    model = Model(forward, i=nn.Linear(I, I), r=KINDS[kind](I, H, num_layers=2))
    check(model, lambda m, x, lengths: square(lambda *given: m(*given).transpose(0, 1), x, lengths),
          torch.randn(T, N, I), LENGTHS, dims=(1, 0), batch_dim=1, **options)  # fmt: skip


@any_mode
@pytest.mark.parametrize("option", [o for o in OPTIONS if o != "dropout in eval"])
@every_kind
def test_every_option_has_the_norms_of_the_loop(kind, option, options):
    rnn = made(kind, option)
    x, h = torch.randn(N, T, I), torch.randn(N, rnn.num_layers * (1 + rnn.bidirectional), H)
    check(packed_net(rnn), square, x, LENGTHS, input_grad=True, **options)
    if not rnn.proj_size:
        check(packed_net(rnn), square, x, LENGTHS, h, input_grad=True, **options)
    longest_first = LENGTHS.sort(descending=True).values
    check(packed_net(rnn, True), square, x, longest_first, dtype=torch.float32, **options)


@served
@pytest.mark.grid(pairs=False)
@pytest.mark.parametrize("option", ["both ways", "projected"])
@every_kind
def test_threads_that_share_the_rows(kind, option):
    if option == "projected" and kind != "lstm":
        pytest.skip("only an LSTM projects")
    torch.set_num_threads(2)
    rnn, lengths = KINDS[kind](I, 33, **OPTIONS[option]), torch.arange(18) * 3 + 7
    check(packed_net(rnn), square, torch.randn(18, 61, I), lengths, input_grad=True)


@any_mode
@every_kind
@pytest.mark.parametrize("use", [lambda y, last: y, lambda y, last: last], ids=["steps", "last"])
def test_a_loss_on_the_steps_or_on_the_last_states_alone(use, kind, options):
    model = packed_net(KINDS[kind](I, H), use=use)
    check(model, square, torch.randn(N, T, I), LENGTHS, **options)


@any_mode
def test_other_lengths_of_as_many_rows_are_other_samples_rows(options):
    need_native(options)
    model = packed_net(nn.GRU(I, H, batch_first=True)).double()
    with torchgradx.attach(model, **options) as probe:
        for lengths in ([3, 5, 1, 3], [2, 5, 4, 1], [3, 3, 3, 3], [1, 5, 3, 3], [3, 5, 1, 3]):
            batch = torch.randn(N, T, I, dtype=torch.float64), torch.tensor(lengths)
            want = loop(model, square, *batch)
            model.zero_grad()
            square(model, *batch).backward()
            close_named(probe.norms(per="parameter"), want)


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


@any_mode
def test_several_sequences_of_a_sample_are_exact_or_refused_by_name(options):
    def forward(m, x, lengths):  # [N, 2, T, I]
        lengths = lengths.repeat_interleave(2)
        packed = pack_padded_sequence(x.flatten(0, 1), lengths.cpu(), True, False)
        return m.r(packed)[1][0].view(len(x), -1)

    model = Model(forward, r=nn.GRU(I, H, batch_first=True))
    refusal = exact_or_refused(model, square, torch.randn(N, 2, T, I), LENGTHS, **options)
    assert refusal is None or "given a packed sequence" in str(refusal)


@a_few_modes
def test_where_no_proof_can_be_had_it_is_exact_or_refused(options):
    model = packed_net(nn.GRU(I, H), use=lambda y, last: Same.apply(both(y, last)))
    exact_or_refused(model, square, torch.randn(N, T, I), LENGTHS, **options)


@fallback_mode
@pytest.mark.parametrize("kind", ["lstm", "gru"])
def test_clipped_gradients_are_those_of_the_loop(kind, options):
    if options.get("weight_grad", True):
        model = packed_net(KINDS[kind](I, H, bidirectional=True))
        check_clip(model, square, torch.randn(N, T, I), LENGTHS, **options)


@fallback_mode
def test_under_autocast_they_are_exact_to_its_rounding(options):
    def forward(m, x, lengths):
        packed = pack_padded_sequence(x, lengths.cpu(), True, False)
        with torch.autocast(DEVICE, torch.bfloat16):
            return m.o(m.r(packed)[1][0]).float()

    model = Model(forward, r=nn.GRU(I, H, batch_first=True), o=nn.Linear(H, 2))
    check(model, square, torch.randn(N, T, I), LENGTHS, dtype=torch.float32, rtol=0.05, **options)


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


def frozen(*names):
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
def test_clipping_alone_and_products_alone():
    """Each keeps the states by itself."""
    model, x = of()(), torch.randn(N, STEPS, WIDE)
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
    model, x = of(bias=bias)(), torch.randn(N, STEPS, WIDE)
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
    model = Model(lambda m, x: write(m.r(x)[0]), r=nn.LSTM(WIDE, STATES, batch_first=True))
    x = torch.randn(N, STEPS, WIDE)
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
    rnn = nn.LSTM(WIDE, STATES, num_layers=layers, bidirectional=True)
    model = Model(lambda m, x: torch.relu_(m.r(x.transpose(0, 1))[0]).transpose(0, 1), r=rnn)
    check(model, square, torch.randn(N, STEPS, WIDE), dtype=torch.float32, **options)


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
    model, x = of(bidirectional=both_ways)(), torch.randn(N, STEPS, WIDE)
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
    model, x, given = of()(), torch.randn(N, STEPS, WIDE), []

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
