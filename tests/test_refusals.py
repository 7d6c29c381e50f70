"""Each refusal is written once, is found by its first words, and is reported once."""

import re
from pathlib import Path

import pytest
import torch
from attach_oracle import Model, square
from torch import nn

import torchgradx
from torchgradx.refusals import REFUSALS, first_words, sentence

ROOT = Path(__file__).parent.parent / "torchgradx"
SOURCES = [p for p in ROOT.rglob("*.py") if p.name != "refusals.py"]
SOURCES += list((ROOT.parent / "csrc").rglob("*.cpp"))
TEXT = "\n".join(path.read_text() for path in SOURCES)
CALLS = r"refuse\([^\"()]*|cause\(|refused_all\(|RefusedError\(|emplace_back\([^\"()]*|note\("
CALL = rf'(?:{CALLS})"(\w+)"'
N = 6


def test_every_key_is_used_and_every_key_that_is_used_is_there():
    assert not [key for key in REFUSALS if f'"{key}"' not in TEXT]
    used = set(re.findall(CALL, TEXT))
    assert len(used) > 30
    assert used <= set(REFUSALS), used - set(REFUSALS)


def test_the_first_words_are_of_one_refusal():
    words = [first_words(key) for key in REFUSALS]
    assert len(set(words)) == len(words)
    for one in words:
        assert len(one.split()) >= 3, one
        assert not [other for other in words if other != one and other.startswith(one)], one


@pytest.mark.parametrize("key", REFUSALS)
def test_a_sentence_ends_with_what_to_do(key):
    text, remedy = REFUSALS[key]
    assert text[-1] not in ".:;,"
    assert remedy[0].isupper()
    assert remedy[-1] not in ".:;,"


def nothing_recorded(what, model, x, probe):
    if what == "no_grad":
        with torch.no_grad():
            model(x)
    elif what == "paused":
        with probe.paused():
            square(model, x)
    elif what == "called_directly":
        model.forward(x)
    elif what == "no_backward":
        torch.autograd.grad(square(model, x), model[0].weight)
    elif what == "removed":
        square(model, x)
        probe.remove()
    elif what == "reset":
        square(model, x).backward()
        probe.reset()
    elif what == "traced":
        torch.func.functional_call(model, {}, x)
        torch.func.vmap(model)(x)
    elif what == "backward_failed":
        y = model(x)
        y.register_hook(lambda g: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            y.sum().backward()
    elif what == "frozen":
        model.requires_grad_(False)
        model(x)


CAUSES = ["not_called", "no_grad", "paused", "called_directly", "no_backward", "removed", "reset",
          "frozen"]  # fmt: skip


@pytest.mark.parametrize("backend", ["auto", "vmap"])
@pytest.mark.parametrize("what", CAUSES)
def test_where_nothing_is_recorded_it_says_why(what, backend):
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
    with torchgradx.attach(model, backend=backend) as probe:
        nothing_recorded(what, model, torch.randn(N, 3), probe)
        with pytest.raises(torchgradx.CoverageError, match="nothing is recorded") as error:
            probe.norms()
    assert str(error.value).startswith(sentence(what))
    names = [name for name, p in model.named_parameters() if p.requires_grad]
    assert list(error.value.parameters) == names


def test_one_cause_that_covers_many_parameters_is_reported_once():
    """At the module that is the closest to it."""
    layers = {f"l{k}": nn.Linear(3, 3) for k in range(10)}

    def forward(m, x):
        for k in range(9):
            x = torch.tanh(m.get_submodule(f"l{k}")(x))
        return m.l9(x - x.mean(0))

    model = Model(forward, **layers)
    with torchgradx.attach(model) as probe:
        square(model, torch.randn(N, 3)).backward()
        with pytest.raises(torchgradx.CoverageError) as error:
            probe.norms()
    text = str(error.value)
    below = {f"l{k}.{name}" for k in range(9) for name in ("weight", "bias")}
    assert below <= set(error.value.parameters)
    assert "l8.weight and 17 parameters below it: its rows mix the 6 samples" in text
    assert text.count("mix") == 1


@pytest.mark.parametrize("frozen", [False, True])
def test_what_mixes_below_batch_statistics_has_one_cause_with_its_module(frozen):
    norm = nn.BatchNorm1d(4).requires_grad_(not frozen)
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 4), norm, nn.Linear(4, 2))
    with torchgradx.attach(model) as probe:
        square(model, torch.randn(N, 3)).backward()
        with pytest.raises(torchgradx.CoverageError) as error:
            probe.norms()
    assert {"0.weight", "1.weight"} <= set(error.value.parameters)
    assert str(error.value).count("\n") == 1
    assert "module '2': it normalises by the batch's statistics" in str(error.value)
