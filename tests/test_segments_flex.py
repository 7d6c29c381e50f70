"""Packed documents with flex attention, whose mask is by document, as it is and compiled.

torch refuses its backward on a CPU before it looks at the graph; all but the kernel is as on a GPU.
"""

import pytest
import torch
import torch._functorch.config
from attach_oracle import close_named
from attach_steps import refusal
from segment_models import ROWS, WORDS, Packed
from test_segments import DOUBLE, ids_of, loop, norms_of, step
from torch import nn
from torch.nn.attention import flex_attention as flex

import torchgradx

pytestmark = pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")


class FlexGPT(nn.Module):
    """Two blocks of flex attention. Documents of a row see each other where `joins`."""

    def __init__(self, attend):
        super().__init__()
        self.words, self.places = nn.Embedding(WORDS, 16), nn.Embedding(32, 16)
        self.norms = nn.ModuleList(nn.LayerNorm(16) for _ in range(2))
        self.qkv = nn.ModuleList(nn.Linear(16, 48) for _ in range(2))
        self.out, self.attend = nn.Linear(16, WORDS), attend

    def forward(self, tokens, positions, ids=None, joins=False):
        b, s = tokens.shape
        of = torch.zeros_like(tokens) if ids is None or joins else ids

        def in_document(b, h, i, j):
            return (of[b, i] == of[b, j]) & (i >= j)

        mask = flex.create_block_mask(in_document, b, None, s, s, device="cpu", BLOCK_SIZE=16)
        h = self.words(tokens) + self.places(positions)
        for norm, qkv in zip(self.norms, self.qkv, strict=True):
            parts = (part.view(b, s, 2, 8).transpose(1, 2) for part in qkv(norm(h)).chunk(3, -1))
            h = h + self.attend(*parts, block_mask=mask).transpose(1, 2).reshape(b, s, -1)
        return self.out(h)


@pytest.fixture(params=["as it is", "compiled"])
def attend(request, monkeypatch):
    monkeypatch.setattr(flex, "_validate_device", lambda *tensors: None)
    torch._dynamo.reset()
    with torch._functorch.config.patch(donated_buffer=False):
        if request.param == "compiled":
            yield torch.compile(flex.flex_attention, backend="aot_eager")
        else:
            yield flex.flex_attention


def test_documents_of_a_flex_attention_are_exact(attend):
    model = FlexGPT(attend).to(DOUBLE)
    with torchgradx.attach(model, sample_ids=ids_of) as probe:
        for k, rows in enumerate(ROWS[:4]):
            case = Packed().draw(rows, torch.Generator().manual_seed(k))
            with probe.paused():
                want = norms_of(loop(model, case, case.loss_of_one))
            step(model, case)
            close_named(probe.norms(per="parameter"), want, 1e-9)


def test_documents_that_its_mask_lets_see_each_other_are_refused(attend):
    model, case = FlexGPT(attend).to(DOUBLE), Packed().draw(ROWS[0], torch.Generator())
    case.joins = True
    with torchgradx.attach(model, sample_ids=ids_of) as probe:
        for _ in range(2):
            step(model, case)
            refusal(probe, "fed by several samples")


def test_a_compiled_one_that_runs_backward_once_is_refused_with_what_to_do(monkeypatch):
    monkeypatch.setattr(flex, "_validate_device", lambda *tensors: None)
    torch._dynamo.reset()
    attend = torch.compile(flex.flex_attention, backend="aot_eager")
    model, case = FlexGPT(attend).to(DOUBLE), Packed().draw(ROWS[0], torch.Generator())
    loop(model, case, case.loss_of_one)  # from the second length on it is compiled for all
    with torchgradx.attach(model, sample_ids=ids_of) as probe:
        step(model, case)
        refusal(probe, r"set torch\._functorch\.config\.donated_buffer = False")
