"""Packed sequences: rows of samples of several lengths, against a loop over single samples."""

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
    exact_or_refused,
    fallback_mode,
    loop,
    need_native,
    refused,
    square,
    title,
)
from clip_oracle import check_clip
from recurrent_models import KINDS, OPTIONS, H, I, N, T, every_kind, made, served, states_of
from torch import nn
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence, pad_packed_sequence

import torchgradx

any_mode = pytest.mark.parametrize("options", [*ANY, *VMAP, NATIVE[0]], ids=title)
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
