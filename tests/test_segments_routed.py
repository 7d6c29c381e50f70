"""Rows that a batch's own values send to experts: exact without sample_ids, in every batch."""

import pytest
import torch
from attach_oracle import Model, exact_step, need_native, refusal, square
from segment_models import WORDS, Experts
from torch import nn
from torch.nn import functional as F

import torchgradx
from torchgradx import ops

SHAPES = [(4, 6), (4, 6), (4, 4), (3, 5), (1, 7), (4, 6)]  # N = T among them
MODES = {"default": {}, "beside": {"fused": False}, "norms": {"weight_grad": False}}


def next_words(model, x):
    return F.cross_entropy(model(x).flatten(0, 1), x.flatten())


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("way", ["index_add", "put", "mask", "positions"])
def test_experts_that_are_given_the_rows_of_their_tokens(way, mode):
    model = Experts(way).double()
    with torchgradx.attach(model, **MODES[mode]) as probe:
        for shape in SHAPES:
            model.zero_grad()
            exact_step(probe, model, torch.randint(0, WORDS, shape), loss=next_words)


@pytest.mark.skipif(not ops.NATIVE, reason="layers run again by backwards there")
def test_batches_that_send_other_rows_need_no_further_proof(backwards):
    model, proofs = Experts().double(), []
    with torchgradx.attach(model) as probe:
        for _ in range(12):
            backwards.clear()
            out = model(torch.randint(0, WORDS, (6, 8)))
            F.cross_entropy(out.flatten(0, 1), torch.randint(0, WORDS, (48,))).backward()
            assert (probe.norms() > 0).all()
            proofs.append(len(backwards))
    assert proofs[0] > 0
    assert proofs[-4:] == [0] * 4


def test_rows_that_several_samples_feed_are_still_refused():
    class Mixing(Experts):
        def forward(self, tokens):
            return super().forward(tokens) + self.head(self.ln(self.emb(tokens))).mean(0)

    model = Mixing().double()
    with torchgradx.attach(model) as probe:
        for _ in range(3):
            out = model(torch.randint(0, WORDS, (4, 6)))
            F.cross_entropy(out.flatten(0, 1), torch.randint(0, WORDS, (24,))).backward()
            refusal(probe)


def put_back(part, k, n):
    return torch.zeros(n, 4).to(part).index_add(0, k, part)


def turned(x):
    """Another sample's place for each; its own of one alone."""
    return torch.arange(len(x)).flip(0)


def picked(x):
    return (x[:, 0] > -0.5).nonzero()[:, 0]


EXACT = {
    "taken and put back": lambda m, x, h: m.c(h) + m.d(h[turned(x)])[turned(x)],
    "some": lambda m, x, h: h + put_back(m.d(h[picked(x)]), picked(x), len(x)),
}
MIXED = {
    "what is given is data": lambda m, x, h: m.a(x) + m.b(x)[turned(x)],
    "taken from others by place": lambda m, x, h: m.a(x) + m.b(x).index_select(0, turned(x)),
    "data, all": lambda m, x, h: m.b(x)[turned(x)],
    "beside its own": lambda m, x, h: m.c(h) + m.d(h)[turned(x)],
    "all": lambda m, x, h: m.d(h)[turned(x)],
    "given another's": lambda m, x, h: m.c(h) + m.d(h[turned(x)]),
    "put where others are": lambda m, x, h: h + put_back(m.d(h[:1]), turned(x)[:1], len(x)),
    "another's, detached": lambda m, x, h: h + put_back(m.d(h.detach()[:1]), turned(x)[:1], len(x)),
}


def exchanging(way):
    layers = {name: nn.Linear(3 if name in "iab" else 4, 4) for name in "iabcd"}
    model = Model(lambda m, x: m.way(m, x, torch.tanh(m.i(x))), **layers).double()
    model.way = way
    return model


def routed(model, probe, mixes):
    """A step that is exact, or refused where samples mix."""
    x = torch.randn(4, 3).double()
    if not mixes:
        exact_step(probe, model, x)
        return
    square(model, x).backward()
    refusal(probe)
    probe.reset()


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", [*EXACT, *MIXED])
def test_rows_are_served_where_they_come_back_to_whom_they_were_taken_from(name, mode):
    need_native({"backend": "native"})
    model = exchanging({**EXACT, **MIXED}[name])
    with torchgradx.attach(model, **MODES[mode]) as probe:
        for _ in range(3):
            routed(model, probe, name in MIXED)


@pytest.mark.parametrize("name", MIXED)
def test_rows_that_mix_are_refused_after_routed_ones_too(name):
    need_native({"backend": "native"})
    model = exchanging(EXACT["some"])
    with torchgradx.attach(model) as probe:
        for mixes in (False, False, True, False):
            model.way = MIXED[name] if mixes else EXACT["some"]
            routed(model, probe, mixes)
