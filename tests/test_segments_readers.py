"""What reads norms of samples that are not rows: grad_norms, verify, NoiseScale, explain()."""

import pytest
import torch
from attach_oracle import refusal
from segment_models import CASES, GPT, Packed
from test_segments import DOUBLE, ids_of, loop, norms_of, step
from torch import nn
from torch.nn import functional as F

import torchgradx


def drawn(name, sizes, seed=0):
    torch.manual_seed(seed)
    case = CASES[name][0]()
    return case.model().to(DOUBLE), case.draw(sizes, torch.Generator().manual_seed(seed))


def test_grad_norms_and_verify():
    model, case = drawn("graphs", [3, 4, 2])
    inputs = {"x": case.x, "edges": case.edges, "ids": case.ids, "n": case.n}
    want = norms_of(loop(model, case, case.loss_of_one))
    got = torchgradx.grad_norms(
        model, F.cross_entropy, inputs, case.y, per="parameter", sample_ids=ids_of
    )
    for name, norms in want.items():
        torch.testing.assert_close(got[name].double(), norms, rtol=1e-9, atol=1e-12)
    report = torchgradx.verify(model, F.cross_entropy, inputs, case.y, sample_ids=ids_of)
    assert report.agrees
    for name, norms in want.items():
        torch.testing.assert_close(report.loop[name], norms, rtol=1e-9, atol=1e-12)


def test_a_mean_over_all_tokens_with_token_weights():
    model, case = drawn("packed", [[3, 4, 2]])
    inputs = {"tokens": case.x, "positions": case.at, "ids": case.ids}
    y = torch.cat(case.y)
    options = {
        "sample_ids": ids_of,
        "loss_reduction": "sum",
        "loss_scale": torchgradx.token_weights(y, sample_ids=case.ids.flatten()),
    }

    def loss(out, y):
        return F.cross_entropy(out.flatten(0, 1), y)

    want = norms_of(loop(model, case, case.loss_of_one))
    got = torchgradx.grad_norms(model, loss, inputs, y, per="parameter", **options)
    for name, norms in want.items():
        torch.testing.assert_close(got[name].double(), norms, rtol=1e-9, atol=1e-12)
    assert torchgradx.verify(model, loss, inputs, y, **options).agrees


def test_verify_finds_documents_that_see_each_other():
    model, case = drawn("packed", [[3, 4, 2]])
    inputs = {"tokens": case.x, "positions": case.at, "ids": case.ids, "joins": True}
    y = torch.cat(case.y)

    def loss(out, y):
        return F.cross_entropy(out.flatten(0, 1), y, reduction="sum")

    options = {"sample_ids": ids_of, "loss_reduction": "sum", "check": "off"}
    with pytest.raises(torchgradx.VerificationError):
        torchgradx.verify(model, loss, inputs, y, **options)


def test_explain_and_the_noise_scale():
    model, case = drawn("packed", [[3, 4, 2], [4, 5]])
    scale = torchgradx.NoiseScale()
    with torchgradx.attach(model, sample_ids=ids_of) as probe:
        for _ in range(3):
            step(model, case)
            scale.update(probe)
        assert "rows by sample_ids" in probe.explain()
    assert scale.critical_batch_size is not None


def test_mixing_that_zeros_hide_is_refused_once_it_shows():
    """A residual branch of zeros, as of an adapter, that turns the documents of a row around."""

    class Turning(nn.Module):
        def __init__(self):
            super().__init__()
            self.gpt, self.b = GPT(tied=False), nn.Linear(23, 23, bias=False)
            nn.init.zeros_(self.b.weight)

        def forward(self, tokens, positions, ids):
            out = self.gpt(tokens, positions, ids)
            return out + self.b(out.flip(1))

    model = Turning().to(DOUBLE)
    with torchgradx.attach(model, sample_ids=ids_of) as probe:
        for k in range(3):
            case = Packed().draw([[3, 3, 3]], torch.Generator().manual_seed(k))
            model.zero_grad()
            out = model(case.x, case.at, ids=case.ids)
            case.loss(out, case.y).backward()
            if k:
                refusal(probe, "fed by several samples")
            probe.reset()
            with torch.no_grad():
                model.b.weight.normal_()
