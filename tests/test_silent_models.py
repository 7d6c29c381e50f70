"""What each level of check= finds of the models in silent_models.py."""

import copy

import pytest
from attach_oracle import ANY, attempt, close_named, loop, title
from silent_models import EXACT, MODELS, REFUSED, SILENT

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
    make, verdict, _ = MODELS[name]
    assert outcome(make, "graph") == verdict


@pytest.mark.parametrize("options", [*ANY, {"backend": "vmap"}], ids=title)
@pytest.mark.parametrize("name", MODELS)
def test_check_samples(name, options):
    make, _, verdict = MODELS[name]
    assert outcome(make, "samples", **options) == verdict


@pytest.mark.parametrize("name", MODELS)
def test_a_second_pass_of_a_structure_is_as_the_first(name):
    """What is refused is refused again; what was checked is not checked twice."""
    make, _, verdict = MODELS[name]
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
            with pytest.raises(torchgradx.CoverageError):
                probe.norms()
    probe.remove()
    if verdict == EXACT:
        assert len(calls) - before == 1
