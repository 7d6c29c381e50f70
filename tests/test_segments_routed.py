"""Rows that a batch's own values send to experts: exact without sample_ids, in every batch."""

import pytest
import torch
from segment_models import WORDS, Experts
from torch.nn import functional as F

import torchgradx
from torchgradx import ops

SHAPES = [(4, 6), (4, 6), (4, 4), (3, 5), (1, 7), (4, 6)]  # N = T among them
MODES = {"default": {}, "beside": {"fused": False}, "norms": {"weight_grad": False}}


def loop(model, x):
    found = []
    for k in range(len(x)):
        model.zero_grad()
        F.cross_entropy(model(x[k : k + 1]).flatten(0, 1), x[k]).backward()
        norms = [torch.zeros(()) if p.grad is None else p.grad.norm() for p in model.parameters()]
        found.append(torch.stack([norm.double() for norm in norms]))
    model.zero_grad()
    return torch.stack(found, 1)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("way", ["index_add", "put", "mask", "positions"])
def test_experts_that_are_given_the_rows_of_their_tokens(way, mode):
    torch.manual_seed(0)
    model = Experts(way).double()
    with torchgradx.attach(model, **MODES[mode]) as probe:
        for shape in SHAPES:
            x = torch.randint(0, WORDS, shape)
            with probe.paused():
                want = loop(model, x)
            model.zero_grad()
            F.cross_entropy(model(x).flatten(0, 1), x.flatten()).backward()
            got = torch.stack(list(probe.norms(per="parameter").values()))
            assert float(((got - want).abs() / want.norm(dim=0)).max()) < 1e-9


@pytest.mark.skipif(not ops.NATIVE, reason="layers run again by backwards there")
def test_batches_that_send_other_rows_need_no_further_proof(monkeypatch):
    torch.manual_seed(0)
    model, calls, plain = Experts().double(), [], torch.autograd.grad

    def counted(*args, **kwargs):
        calls.append(1)
        return plain(*args, **kwargs)

    monkeypatch.setattr(torch.autograd, "grad", counted)
    proofs = []
    with torchgradx.attach(model) as probe:
        for _ in range(12):
            calls.clear()
            out = model(torch.randint(0, WORDS, (6, 8)))
            F.cross_entropy(out.flatten(0, 1), torch.randint(0, WORDS, (48,))).backward()
            assert (probe.norms() > 0).all()
            proofs.append(len(calls))
    assert proofs[0] > 0
    assert proofs[-4:] == [0] * 4


def test_rows_that_several_samples_feed_are_still_refused():
    class Mixing(Experts):
        def forward(self, tokens):
            return super().forward(tokens) + self.head(self.ln(self.emb(tokens))).mean(0)

    torch.manual_seed(0)
    model = Mixing().double()
    with torchgradx.attach(model) as probe:
        for _ in range(3):
            out = model(torch.randint(0, WORDS, (4, 6)))
            F.cross_entropy(out.flatten(0, 1), torch.randint(0, WORDS, (24,))).backward()
            with pytest.raises(torchgradx.CoverageError):
                probe.norms()
