"""What each level of check= finds of the models in silent_models.py."""

import copy

import pytest
from attach_oracle import ANY, attempt, close_named, loop, seeded, title  # noqa: F401
from silent_models import EXACT, MODELS, REFUSED, SILENT


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


@pytest.mark.parametrize("options", [*ANY, {"backend": "vmap"}], ids=title)
@pytest.mark.parametrize("name", [name for name in MODELS if "turned and back" not in name])
def test_check_samples(name, options):
    make, _, verdict = MODELS[name]
    assert outcome(make, "samples", **options) == verdict
