"""Steps of attached models that are exact or refused, against the oracle's loop."""

import copy
import re

import pytest
import torch
from attach_models import square
from attach_modes import need_native
from attach_oracle import close, close_named, loop, per_model, prepared, same_gradients

import torchgradx


def exact_step(probe, model, *batch, loss=square, rtol=1e-9, want=None, twin=None, exactly=False):
    """A step, and the norms of it and of each parameter: those of the loop; .grad: a twin's."""
    want = loop(model, loss, *batch) if want is None else want
    if twin is not None:
        model.zero_grad()
        twin.zero_grad()
        loss(twin, *batch).backward()
    loss(model, *batch).backward()
    close_named(probe.norms(per="parameter"), want, rtol)
    close(probe.norms(), per_model(want), rtol)
    if twin is not None:
        same_gradients(model, twin, None if exactly else rtol)


def refusal(probe, match=None):
    """The CoverageError with which the probe refuses to be read."""
    with pytest.raises(torchgradx.CoverageError, match=match) as refusal:
        probe.norms()
    if "no exact norms" in str(refusal.value):
        assert str(refusal.value) in probe.explain()
    return refusal.value


def exact_steps(model, *batches, loss=square, rtol=1e-9, **options):
    """Steps of one attachment, each of them exact. Returns what explain() says after the last."""
    batches = [batch if isinstance(batch, tuple) else (batch,) for batch in batches]
    wants = [loop(model, loss, *batch) for batch in batches]
    with torchgradx.attach(model, **options) as probe:
        for batch, want in zip(batches, wants, strict=True):
            exact_step(probe, model, *batch, loss=loss, rtol=rtol, want=want)
        return probe.explain()


def read_or_refused(probe, want, words=""):
    """Read exact norms, or an error with these words, which is returned."""
    try:
        got = probe.norms(per="parameter")
    except torchgradx.CoverageError as error:
        refusal = error
    else:
        return close_named(got, want)
    assert words in str(refusal), refusal
    return refusal


def step_or_refused(probe, model, *batch, loss=square, words=""):
    """A step, and as read_or_refused; the next one begins a new record."""
    want = loop(model, loss, *batch)
    loss(model, *batch).backward()
    refusal = read_or_refused(probe, want, words)
    probe.reset()
    return refusal


def attempt(model, loss, *batch, **options):
    """One step and a reading: {parameter: norms} or None, the CoverageError or None, and whether
    backward() ran (attach itself may refuse)."""
    probe = None
    try:
        probe = torchgradx.attach(model, **options)
    except torchgradx.CoverageError as error:
        refusal = error
    else:
        loss(model, *batch).backward()  # outside the try: backward() itself must not raise
        try:
            return probe.norms(per="parameter"), None, True
        except torchgradx.CoverageError as error:
            refusal = error
        model.requires_grad_(False)  # what is frozen since is refused all the same
        with pytest.raises(torchgradx.CoverageError):
            probe.norms()
    finally:
        if probe is not None:
            probe.remove()
    assert refusal.parameters, f"no parameter named: {refusal}"
    for name in refusal.parameters:
        assert name in dict(model.named_parameters()), f"{name} is not a parameter's name"
    assert any(name in str(refusal) for name in refusal.parameters), str(refusal)
    return None, refusal, probe is not None


def exact_or_refused(model, loss, *batch, dims=0, **options):
    """A step that may be refused, but not be wrong. Returns the refusal, if there was one."""
    need_native(options)
    model, batch = prepared(model, batch, torch.float64)
    want = loop(model, loss, *batch, dims=dims)
    got, refusal, _ = attempt(model, loss, *batch, **options)
    if refusal is None:
        close_named(got, want)
    return refusal


def refused(model, loss, *batch, names, match="", spared=(), **options):
    """A CoverageError that names these parameters and not the spared ones; .grad is whole."""
    need_native(options)
    model, batch = prepared(model, batch, torch.float64)
    twin = copy.deepcopy(model)
    loss(twin, *batch).backward()
    got, refusal, ran = attempt(model, loss, *batch, **options)
    assert refusal is not None, f"accepted, and gave {got}"
    assert set(names) <= set(refusal.parameters), refusal.parameters
    assert not set(spared) & set(refusal.parameters), refusal.parameters
    text = str(refusal)
    for name in names:
        assert name in text, text
    assert re.search(match, text), f"{match!r} is not in: {text}"
    if ran and options.get("weight_grad", True):
        same_gradients(model, twin, None if options.get("fused") is False else 1e-9)
    return refusal
