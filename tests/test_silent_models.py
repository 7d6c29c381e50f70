"""What each level of check= finds of the models in silent_models.py."""

import copy

import pytest
import torch
from attach_oracle import ANY, Model, attempt, close_named, exact_step, loop, refusal, title
from silent_models import EXACT, MODELS, REFUSED, SILENT
from torch import nn

import torchgradx


def outcome(make, check, **options):
    model, loss, batch = make()
    model, batch = model.double(), [t.double() if t.is_floating_point() else t for t in batch]
    want = loop(copy.deepcopy(model), loss, *batch)
    got, refusal, _ = attempt(model, loss, *batch, check=check, **options)
    if refusal is not None:
        return REFUSED
    try:
        close_named(got, want)
    except AssertionError:
        return SILENT
    return EXACT


@pytest.mark.parametrize("name", MODELS)
def test_check_graph(name):
    make, verdict = MODELS[name]
    assert outcome(make, "graph") == verdict


@pytest.mark.parametrize("options", [*ANY, {"backend": "vmap"}], ids=title)
@pytest.mark.parametrize("name", MODELS)
def test_check_samples(name, options):
    make, verdict = MODELS[name]
    found = EXACT if verdict == EXACT else REFUSED
    assert outcome(make, "samples", **options) == found


@pytest.mark.parametrize("name", MODELS)
def test_a_second_pass_of_a_structure_is_as_the_first(name):
    """What is refused is refused again; what was checked is not checked twice."""
    make, verdict = MODELS[name]
    model, loss, batch = make()
    calls = []
    model.register_forward_hook(lambda *_: calls.append(1))
    probe = torchgradx.attach(model, check="samples")
    for _ in range(2):
        before = len(calls)
        loss(model, *batch).backward()
        if verdict == EXACT:
            probe.norms()
        else:
            refusal(probe)
    probe.remove()
    if verdict == EXACT:
        assert len(calls) - before == 1


def test_an_output_from_which_another_is_made_is_checked_as_it_is():
    """As of an encoder and its decoder, which transformers returns both."""
    parts = {"e": nn.Linear(3, 4), "d": nn.Linear(4, 2)}

    def forward(m, x):
        h = torch.tanh(m.e(x))
        return {"logits": m.d(h), "hidden": h}

    model, x = Model(forward, **parts).double(), torch.randn(5, 6, 3).double()
    for loss in (
        lambda m, x: m(x)["logits"].square().flatten(1).sum(1).mean(),
        lambda m, x: sum(t.square().flatten(1).sum(1).mean() for t in m(x).values()),
    ):
        with torchgradx.attach(model, check="samples") as probe:
            exact_step(probe, model, x, loss=loss)
